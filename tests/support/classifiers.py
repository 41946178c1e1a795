"""Classifiers of ours and of torchvision with the same weights, to compare their answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torchvision import models as torchvision_models

from models.classifiers import Classifier

LABELS = tuple("abcdefg")


def classifier(architecture: str, weights: str = "random", file: Path | None = None) -> Classifier:
    return Classifier.of("test", architecture, LABELS, weights, str(file) if file else None)


def torchvision_network(architecture: str, classes: int = len(LABELS)) -> nn.Module:
    """Build torchvision's network, with BatchNorm as after training and a head that tells classes apart."""
    auxiliary = {"transform_input": True, "aux_logits": True, "init_weights": False}
    torch.manual_seed(7)
    network: nn.Module = torchvision_models.get_model(
        architecture,
        weights=None,
        num_classes=classes,
        **(auxiliary if architecture in ("googlenet", "inception_v3") else {}),
    )
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                assert module.running_mean is not None
                assert module.running_var is not None
                module.running_mean.normal_(0, 0.1)
                module.running_var.uniform_(0.5, 1.5)
                module.weight.uniform_(0.5, 1.5)
                module.bias.normal_(0, 0.1)
            if isinstance(module, nn.Linear) and module.out_features == classes:
                module.weight.normal_(0, 0.05)
    return network.eval()


def saved(network: nn.Module, directory: Path) -> Path:
    path = directory / "weights.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in network.state_dict().items()}, path)
    return path


def preprocessed(model: Classifier, image: np.ndarray[Any, Any], size: tuple[int, int] | None = None) -> Tensor:
    out = torch.full(model.input_shape, 77, dtype=torch.uint8)
    height, width = size or image.shape[:2]
    model.preprocess(torch.from_numpy(image), out, width, height)
    return out
