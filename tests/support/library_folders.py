"""Folders in timm's and transformers' form: small networks of many architectures, alive like trained ones.

Weights are drawn so that each layer keeps the spread of its input, and heads so that scores differ: no two
answers are nearly equal by construction.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
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


_HEADS = {"class_labels_classifier": 3.0, "classifier": 12.0, "head": 6.0, "fc": 6.0}
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
            tokens = getattr(module, "detection_tokens", None)
            if tokens is not None:
                drawn(tokens, 3.0)
    return network.eval()


# timm: architecture -> changes of its published configuration, so that all kinds of crops and interpolations occur

TIMM: dict[str, dict[str, Any]] = {
    "resnet18": {},
    "convnext_atto": {},
    "vit_tiny_patch16_224": {},
    "efficientnet_lite0": {},
    "mobilenetv3_small_050": {"crop_mode": "squash", "crop_pct": 0.9},
    "mobilenetv4_conv_small": {"crop_mode": "border", "crop_pct": 1.0},
    "regnetx_002": {"interpolation": "bilinear"},
    "deit_tiny_patch16_224": {"interpolation": "nearest"},
    "ghostnet_050": {"interpolation": "lanczos", "crop_pct": 0.8},
    "edgenext_xx_small": {"input_size": (3, 160, 192), "crop_pct": 0.9},
    "repvit_m0_9": {"crop_mode": "border", "crop_pct": 0.9},
    "mnasnet_small": {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.4, 0.3)},
    "levit_128s": {"crop_mode": "squash", "crop_pct": 1.0},
}


def timm_folder(name: str, folder: Path, *, classes: int = CLASSES) -> Any:
    """Save a network into the folder like timm's hub folders; return it."""
    import timm

    network = enliven(timm.create_model(name, pretrained=False, num_classes=classes))
    network.pretrained_cfg = {**network.pretrained_cfg, **TIMM.get(name, {})}
    labels = {"label_names": list(LABELS.values())} if classes else {}
    timm.models.save_for_hf(network, folder, model_config={"num_classes": classes, **labels}, safe_serialization=True)
    return network


# transformers: name -> (network, image processor), made when they are asked for

_TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
_DETR = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "num_queries": 30,
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
}
_STAGES = {"embedding_size": 16, "hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1], "layer_type": "basic"}
_RT = {
    "encoder_hidden_dim": 32,
    "encoder_in_channels": [32, 48, 64],
    "encoder_layers": 1,
    "encoder_ffn_dim": 64,
    "encoder_attention_heads": 2,
    "d_model": 32,
    "num_queries": 30,
    "decoder_in_channels": [32, 32, 32],
    "decoder_ffn_dim": 64,
    "decoder_layers": 2,
    "decoder_attention_heads": 2,
    "num_denoising": 0,
}
_HG = {
    "embedding_size": 16,
    "hidden_sizes": [32, 32, 48, 64],
    "stem_channels": [3, 8, 16],
    "stage_in_channels": [16, 32, 32, 48],
    "stage_mid_channels": [8, 8, 8, 8],
    "stage_out_channels": [32, 32, 48, 64],
    "stage_num_blocks": [1, 1, 1, 1],
    "stage_numb_of_layers": [2, 2, 2, 2],
}
_LAST = ["stage2", "stage3", "stage4"]


def _square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


def _networks() -> dict[str, Callable[[], tuple[Any, Any]]]:
    import transformers as t

    named = {"id2label": LABELS, "label2id": {name: number for number, name in LABELS.items()}}
    edges = {"shortest_edge": 256, "longest_edge": 352}

    def resnet(*stages: str) -> Any:
        return t.ResNetConfig(**_STAGES, out_features=list(stages))

    def rt(config: Any, backbone: Any) -> Any:
        return config(**_RT, **named, backbone_config=backbone)

    def rt_resnet() -> Any:
        return t.RTDetrResNetConfig(**_STAGES, out_features=_LAST)

    def detr(config: Any, *stages: str, **more: Any) -> Any:
        return config(**_DETR, **named, **more, backbone_config=resnet(*stages))

    vit = {"image_size": 64, "patch_size": 16, **_TINY}
    return {
        "vit": lambda: (
            t.ViTForImageClassification(t.ViTConfig(**vit, **named)),
            t.ViTImageProcessor(size=_square(64)),
        ),
        "convnext": lambda: (
            t.ConvNextForImageClassification(
                t.ConvNextConfig(hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], layer_scale_init_value=1.0, **named)
            ),
            t.ConvNextImageProcessor(size={"shortest_edge": 64}),
        ),
        "deit": lambda: (
            t.DeiTForImageClassification(t.DeiTConfig(**vit, **named)),
            t.DeiTImageProcessor(size=_square(72), crop_size=_square(64)),
        ),
        "resnet": lambda: (
            t.ResNetForImageClassification(t.ResNetConfig(**_STAGES, **named)),
            t.ConvNextImageProcessor(size={"shortest_edge": 64}, crop_pct=0.95),
        ),
        "clip": lambda: (
            t.CLIPForImageClassification(t.CLIPConfig(vision_config=vit, **named)),
            t.CLIPImageProcessor(size={"shortest_edge": 64}, crop_size=_square(64)),
        ),
        "efficientnet": lambda: (
            t.EfficientNetForImageClassification(
                t.EfficientNetConfig(
                    image_size=64, width_coefficient=0.25, depth_coefficient=0.3, hidden_dim=320, **named
                )
            ),
            t.EfficientNetImageProcessor(size=_square(64)),
        ),
        "mobilenetv2": lambda: (
            t.MobileNetV2ForImageClassification(t.MobileNetV2Config(image_size=64, depth_multiplier=0.35, **named)),
            t.MobileNetV2ImageProcessor(size={"shortest_edge": 72}, crop_size=_square(64)),
        ),
        "swin": lambda: (
            t.SwinForImageClassification(
                t.SwinConfig(image_size=64, embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=4, **named)
            ),
            t.ViTImageProcessor(size=_square(64), resample=3),
        ),
        "detr": lambda: (
            t.DetrForObjectDetection(detr(t.DetrConfig, "stage4")),
            t.DetrImageProcessor(size=edges, pad_size=_square(352)),
        ),
        "conditional-detr": lambda: (
            t.ConditionalDetrForObjectDetection(detr(t.ConditionalDetrConfig, "stage4")),
            t.ConditionalDetrImageProcessor(size=edges, pad_size=_square(352)),
        ),
        "deformable-detr": lambda: (
            t.DeformableDetrForObjectDetection(detr(t.DeformableDetrConfig, *_LAST, num_feature_levels=3)),
            t.DeformableDetrImageProcessor(size=edges, pad_size=_square(352)),
        ),
        "rt-detr": lambda: (
            t.RTDetrForObjectDetection(rt(t.RTDetrConfig, rt_resnet())),
            t.RTDetrImageProcessor(size=_square(160)),
        ),
        "rt-detr-v2": lambda: (
            t.RTDetrV2ForObjectDetection(rt(t.RTDetrV2Config, rt_resnet())),
            t.RTDetrImageProcessor(size=_square(160)),
        ),
        "d-fine": lambda: (
            t.DFineForObjectDetection(rt(t.DFineConfig, t.HGNetV2Config(**_HG, out_features=_LAST))),
            t.RTDetrImageProcessor(size=_square(160)),
        ),
        "yolos": lambda: (
            t.YolosForObjectDetection(
                t.YolosConfig(image_size=[160, 160], num_detection_tokens=30, **_TINY, **named)
            ),
            t.YolosImageProcessor(size=_square(160), do_pad=False),
        ),
        "segformer": lambda: (
            t.SegformerForSemanticSegmentation(
                t.SegformerConfig(
                    hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], decoder_hidden_size=32,
                    num_attention_heads=[1, 1, 2, 2], **named,
                )
            ),
            t.SegformerImageProcessor(size=_square(96)),
        ),
        "upernet": lambda: (
            t.UperNetForSemanticSegmentation(
                t.UperNetConfig(
                    backbone_config=t.ConvNextConfig(
                        hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], out_features=["stage1", *_LAST]
                    ),
                    hidden_size=16, use_auxiliary_head=False, **named,
                )
            ),
            t.SegformerImageProcessor(size=_square(96)),
        ),
        "mobilevit": lambda: (
            t.MobileViTForSemanticSegmentation(
                t.MobileViTConfig(
                    image_size=96, hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 16, 24, 32, 32, 64],
                    aspp_out_channels=16, num_attention_heads=2, **named,
                )
            ),
            t.SegformerImageProcessor(size=_square(96)),
        ),
        "dpt": lambda: (
            t.DPTForDepthEstimation(
                t.DPTConfig(
                    **{**vit, "num_hidden_layers": 4}, backbone_out_indices=[0, 1, 2, 3], fusion_hidden_size=16,
                    neck_hidden_sizes=[8, 16, 24, 32], is_hybrid=False,
                )
            ),
            t.DPTImageProcessor(size=_square(64)),
        ),
        "depth-anything": lambda: (
            t.DepthAnythingForDepthEstimation(
                t.DepthAnythingConfig(
                    backbone_config=t.Dinov2Config(
                        image_size=70, patch_size=14, **{**_TINY, "num_hidden_layers": 4},
                        out_features=["stage1", "stage2", "stage3", "stage4"], reshape_hidden_states=False,
                    ),
                    reassemble_hidden_size=32, neck_hidden_sizes=[8, 16, 24, 32], fusion_hidden_size=16,
                    head_hidden_size=8,
                )
            ),
            t.DPTImageProcessor(size=_square(70)),
        ),
        "dinov2": lambda: (
            t.Dinov2Model(t.Dinov2Config(image_size=70, patch_size=14, **_TINY)),
            t.BitImageProcessor(size={"shortest_edge": 80}, crop_size=_square(70)),
        ),
        "clip-vision": lambda: (
            t.CLIPVisionModelWithProjection(t.CLIPVisionConfig(**vit, projection_dim=16)),
            t.CLIPImageProcessor(size={"shortest_edge": 64}, crop_size=_square(64)),
        ),
        "siglip": lambda: (
            t.SiglipVisionModel(t.SiglipVisionConfig(**vit)),
            t.SiglipImageProcessor(size=_square(64)),
        ),
    }  # fmt: skip


CLASSIFIERS = ("vit", "convnext", "deit", "resnet", "clip", "efficientnet", "mobilenetv2", "swin")
DETECTORS = ("detr", "conditional-detr", "deformable-detr", "rt-detr", "rt-detr-v2", "d-fine", "yolos")
SEGMENTERS = ("segformer", "upernet", "mobilevit")
DEPTHS = ("dpt", "depth-anything")
EMBEDDERS = ("dinov2", "clip-vision", "siglip")


def transformers_folder(name: str, folder: Path) -> tuple[Any, Any]:
    """Save a network and its processor; return both as transformers itself reads them from the folder."""
    import transformers

    network, processor = _networks()[name]()
    enliven(network).save_pretrained(folder)
    processor.save_pretrained(folder)
    json.loads((folder / "config.json").read_text())
    return type(network).from_pretrained(folder).eval(), transformers.AutoImageProcessor.from_pretrained(folder)


class _Named(nn.Module):
    def __init__(self, network: Any, names: list[str]) -> None:
        super().__init__()
        self.network, self.names = network, names

    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = self.network(pixel_values=pixels)
        return tuple(found[name] for name in self.names)


def optimum_export(network: Any, pixels: torch.Tensor, file: Path) -> list[str]:
    """Write an .onnx with optimum-onnx's names of inputs and outputs; return the outputs' names."""
    with torch.no_grad():
        found = network(pixel_values=pixels)
    known = ("logits", "pred_boxes", "predicted_depth", "last_hidden_state", "pooler_output")
    names = [name for name in known if found.get(name) is not None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            _Named(network, names), (pixels,), file, dynamo=False, opset_version=17,
            input_names=["pixel_values"], output_names=names,
        )  # fmt: skip
    return names
