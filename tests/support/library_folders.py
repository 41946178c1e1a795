"""Folders in timm's and transformers' form: small networks, alive like trained ones.

Weights are drawn so that each layer keeps the spread of its input, and heads so that scores differ: no two
answers are nearly equal by construction.
"""

from __future__ import annotations

from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

CLASSES = 5
LABELS = {number: f"thing {number}" for number in range(CLASSES)}
SIZE = (500, 375)
"""Width and height of the photograph."""


_HEADS = {"classifier": 12.0, "head": 6.0, "fc": 6.0}
"""Gain of layers of classes, by the ends of their names."""


def photograph() -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Make coloured blocks with soft edges, uint8 [h, w, 3]."""
    blocks = np.random.default_rng(0).integers(0, 256, (12, 16, 3)).astype(np.uint8)
    return np.array(Image.fromarray(blocks).resize(SIZE, Image.Resampling.BICUBIC), np.uint8)


def enliven(network: nn.Module, seed: int = 0) -> Any:
    """Draw all weights again; heads of classes larger, norms and biases apart from 1 and 0."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(tensor: torch.Tensor, std: float, mean: float = 0.0) -> None:
        tensor.copy_(torch.empty(tensor.shape).normal_(mean, std, generator=generator))

    with torch.no_grad():
        for name, module in network.named_modules():
            weight, bias = (getattr(module, key, None) for key in ("weight", "bias"))
            if isinstance(module, nn.Linear | nn.Conv2d | nn.ConvTranspose2d) and weight is not None:
                gain = _HEADS.get(name.rpartition(".")[2], 1.5)
                drawn(weight, gain / sqrt(max(1, weight[0].numel())))
            elif isinstance(module, nn.Embedding):
                drawn(module.weight, 3.0)
            elif weight is not None and weight.ndim == 1:
                drawn(weight, 0.1, 1.0)
            if isinstance(bias, torch.Tensor):
                drawn(bias, 0.02)
    return network.eval()


def timm_folder(name: str, folder: Path, *, classes: int = CLASSES, **arguments: Any) -> Any:
    """Save a network made with `arguments` into the folder like timm's hub folders; return it."""
    import timm

    network = enliven(timm.create_model(name, pretrained=False, num_classes=classes, **arguments))
    labels = {"label_names": list(LABELS.values())} if classes else {}
    own = {"model_args": arguments} if arguments else {}
    config = {"num_classes": classes, **labels}
    timm.models.save_for_hf(network, folder, model_config=config, safe_serialization=True, **own)
    return network


def vit_folder(folder: Path) -> tuple[Any, Any]:
    """Save a ViT of transformers and its processor; return both as transformers itself reads them from the folder."""
    import transformers

    named = {"id2label": LABELS, "label2id": {name: number for number, name in LABELS.items()}}
    tiny = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.ViTConfig(image_size=64, patch_size=16, **tiny, **named)
    enliven(transformers.ViTForImageClassification(config)).save_pretrained(folder)
    transformers.ViTImageProcessor(size={"height": 64, "width": 64}).save_pretrained(folder)
    network = transformers.ViTForImageClassification.from_pretrained(folder).eval()
    return network, transformers.AutoImageProcessor.from_pretrained(folder)
