"""Libraries whose networks come as exports: open_clip, segmentation_models_pytorch, rfdetr, and older ones."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.zoo.alive import draw, enliven, measure, spread, spread_queries
from benchmarks.zoo.networks import LABELS, Made, Network, as_arrays
from benchmarks.zoo.pixels import MEAN, STD, Images, batch, centres, normalised

_CLASSES = len(LABELS)


def _cut(images: Images, side: int, mode: str = "RGB") -> torch.Tensor:
    return centres(images, side, mode) / 255


def _export(network: nn.Module, pixels: torch.Tensor, folder: Path, **about: Any) -> None:
    torch.onnx.export(network, (pixels[:1],), str(folder / "mine.onnx"), dynamo=False)
    (folder / "mine.json").write_text(json.dumps(about))


def _classified(network: Any, pixels: torch.Tensor, folder: Path, **stated: Any) -> Made:
    """Return a classifier's export, and what the network itself answers to the pixels."""
    enliven(network, lambda: network(pixels), _CLASSES)
    with torch.inference_mode():
        found = network(pixels).softmax(1)
    _export(network, pixels, folder, task="classify", labels=LABELS, crop=1, resize_by="pillow", **stated)
    return Made("{}/mine.onnx", "scores", as_arrays([*found]))


def _open_clip(folder: Path, images: Images) -> Made:
    """Write a folder of open_clip's hub, which is refused; the refusal's line exports the image encoder."""
    open_clip: Any = importlib.import_module("open_clip")
    from safetensors.torch import save_file

    about = {
        "embed_dim": 64,
        "vision_cfg": {"image_size": 224, "layers": 3, "width": 128, "patch_size": 32, "head_width": 32},
        "text_cfg": {"context_length": 8, "vocab_size": 64, "width": 32, "heads": 2, "layers": 1},
    }
    pixel = {"mean": open_clip.OPENAI_DATASET_MEAN, "std": open_clip.OPENAI_DATASET_STD, "interpolation": "bicubic"}
    pixel["resize_mode"] = "shortest"
    network: Any = open_clip.CLIP(**about)
    draw(network)
    (folder / "hub").mkdir()
    save_file({key: each.contiguous() for key, each in network.state_dict().items()},
              folder / "hub" / "open_clip_model.safetensors")  # fmt: skip
    (folder / "hub" / "open_clip_config.json").write_text(json.dumps({"model_cfg": about, "preprocess_cfg": pixel}))
    read, transform = open_clip.create_model_from_pretrained(f"local-dir:{folder / 'hub'}")
    read.eval()
    with torch.inference_mode():
        found = [read.encode_image(transform(each.convert("RGB"))[None])[0] for each in images]
    stated = {"mean": pixel["mean"], "std": pixel["std"], "resize": "centre", "crop": 1, "interpolation": "bicubic"}
    visual = open_clip.create_model(f"local-dir:{folder / 'hub'}").visual.eval()
    _export(visual, torch.rand(1, 3, 224, 224), folder, task="embed", resize_by="pillow", **stated)
    return Made("{}/mine.onnx", "vector", as_arrays(found), refused="{}/hub", line="torch.onnx.export(open_clip.")


def _smp(folder: Path, images: Images, *, kind: str = "Unet", classes: int = _CLASSES, saved: bool = False) -> Made:
    smp: Any = importlib.import_module("segmentation_models_pytorch")

    side = 512 if saved else 128
    sized = [each.resize((side, side)).convert("RGB") for each in images]
    pixels = normalised((batch(sized, side) * 128 + 128) / 255)
    network: Any = getattr(smp, kind)("resnet18", encoder_weights=None, classes=classes)
    draw(network)
    network.eval()
    measure(network, lambda: network(pixels))
    spread(network.segmentation_head[0], lambda: network(pixels))
    refused = line = ""
    if saved:
        network.save_pretrained(folder / "hub")
        network = smp.from_pretrained(str(folder / "hub")).eval()
        refused, line = "{}/hub", "torch.onnx.export(segmentation_models_pytorch"
    _export(network, pixels, folder, task="segment_semantic", labels=LABELS if classes > 1 else ["wall", "crack"])
    with torch.inference_mode():
        found = network(pixels)
    maps = found.argmax(1) if classes > 1 else (found[:, 0] > 0).long()
    return Made("{}/mine.onnx", "class_map", as_arrays([*maps.float()]), (side, side), refused, line)


def _facenet(folder: Path, images: Images) -> Made:
    """`fixed_image_standardization`: (levels - 127.5) / 128, of faces that were cut out before."""
    facenet_pytorch: Any = importlib.import_module("facenet_pytorch")

    pixels = (_cut(images, 160) * 255 - 127.5) / 128
    network: Any = facenet_pytorch.InceptionResnetV1(pretrained=None, classify=False, num_classes=_CLASSES)
    enliven(network, lambda: network(pixels))
    with torch.inference_mode():
        found = network(pixels)
    pixel = {"mean": 0.5, "std": 128 / 255, "resize_by": "pillow", "crop": 1}
    _export(network, pixels, folder, task="embed", **pixel)
    return Made("{}/mine.onnx", "vector", as_arrays([*found]))


def _monai(folder: Path, images: Images) -> Made:
    """Radiographs: one channel in 0 to 1."""
    nets: Any = importlib.import_module("monai.networks.nets")

    pixels = _cut(images, 96, "L")
    network: Any = nets.DenseNet(
        spatial_dims=2, in_channels=1, out_channels=_CLASSES, init_features=16, growth_rate=8, block_config=(2, 4, 4)
    )
    return _classified(network, pixels, folder)


def _monai_unet(folder: Path, images: Images) -> Made:
    nets: Any = importlib.import_module("monai.networks.nets")

    side = 96
    sized = [each.resize((side, side)) for each in images]
    pixels = _cut(sized, side, "L")
    network: Any = nets.UNet(
        spatial_dims=2, in_channels=1, out_channels=_CLASSES, channels=(8, 16, 32), strides=(2, 2), num_res_units=1
    )
    enliven(network, lambda: network(pixels), _CLASSES)
    with torch.inference_mode():
        maps = network(pixels).argmax(1)
    _export(network, pixels, folder, task="segment_semantic", labels=LABELS)
    return Made("{}/mine.onnx", "class_map", as_arrays([*maps.float()]), (side, side))


def _kornia(folder: Path, images: Images) -> Made:
    """Pixels in 0 to 1, normalised within the network, as kornia's pipelines are built."""
    enhance: Any = importlib.import_module("kornia.enhance")
    vit: Any = importlib.import_module("kornia.models.vit")

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.classes = nn.LayerNorm(48), nn.Linear(48, _CLASSES)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.classes(self.norm(tokens).mean(1))
            return found

    pixels = _cut(images, 96)
    network: Any = nn.Sequential(
        enhance.Normalize(mean=MEAN, std=STD),
        vit.VisionTransformer(image_size=96, patch_size=16, depth=2, embed_dim=48, num_heads=4),
        Head(),
    )
    return _classified(network, pixels, folder, mean=0, std=1)


def _efficientnet(folder: Path, images: Images) -> Made:
    efficientnet_pytorch: Any = importlib.import_module("efficientnet_pytorch")

    network: Any = efficientnet_pytorch.EfficientNet.from_name("efficientnet-b0", num_classes=_CLASSES, image_size=128)
    network.set_swish(memory_efficient=False)
    pixels = normalised(_cut(images, 128))
    return _classified(network, pixels, folder)


def _bninception(folder: Path, images: Images) -> Made:
    """Caffe's pixels: BGR, 0 to 255 less a mean."""
    pretrainedmodels: Any = importlib.import_module("pretrainedmodels")

    network: Any = pretrainedmodels.bninception(num_classes=1000, pretrained=None)
    network.last_linear = nn.Linear(1024, _CLASSES)
    mean = torch.tensor([104.0, 117.0, 128.0])
    pixels = _cut(images, 224)[:, [2, 1, 0]] * 255 - mean[:, None, None]
    stated = {"mean": [128 / 255, 117 / 255, 104 / 255], "std": 1 / 255}
    return _classified(network, pixels, folder, channels="bgr", **stated)


def _rfdetr(kind: str, folder: Path, images: Images) -> Made:
    """Pictures of the network's size: others rfdetr resizes in float32, and anychip to grey levels."""
    import rfdetr

    labels, side = LABELS[:3], 192
    network: Any = getattr(rfdetr, kind)(pretrain_weights=None, num_classes=len(labels), resolution=side, device="cpu")
    spread_queries(network.model.model)
    file = Path(network.export(output_dir=str(folder), verbose=False))
    file.with_suffix(".labels.txt").write_text("\n".join(labels) + "\n")
    answers = []
    for image in images:
        # A slot more than classes is the background, which rfdetr's own answers count as a class.
        found = network.predict(image.resize((side, side)).convert("RGB"), threshold=0.25)
        row = (found.xyxy, found.confidence[:, None], found.class_id[:, None])
        boxes = torch.cat([torch.as_tensor(each, dtype=torch.float32) for each in row], 1).clamp(min=0)
        answers.append(boxes[boxes[:, 5] < len(labels)])
    return Made(f"{{}}/{file.relative_to(folder)}", "boxes", as_arrays(answers), (side, side))


def _row(name: str, library: str, file: str, build: Callable[[Path, Images], Made], package: str) -> Network:
    by = {"open_clip": "network and its transform", "rfdetr": "predict"}.get(package, "network")
    return Network(name, library, file, build, package, by)


_SMP = "segmentation_models_pytorch"
ROWS = [
    _row("open_clip-vit", "open_clip", "folder of its hub, then .onnx", _open_clip, "open_clip"),
    _row("smp-unet", _SMP, "legacy .onnx", _smp, _SMP),
    _row("smp-fpn", _SMP, "legacy .onnx, one class", partial(_smp, kind="FPN", classes=1), _SMP),
    _row("smp-saved", _SMP, "save_pretrained, then .onnx", partial(_smp, kind="Linknet", saved=True), _SMP),
    _row("facenet", "facenet-pytorch", "legacy .onnx", _facenet, "facenet_pytorch"),
    _row("monai-densenet", "MONAI", "legacy .onnx, one channel", _monai, "monai"),
    _row("monai-unet", "MONAI", "legacy .onnx, one channel", _monai_unet, "monai"),
    _row("kornia-vit", "kornia", "legacy .onnx", _kornia, "kornia"),
    _row("efficientnet-b0", "efficientnet_pytorch", "legacy .onnx", _efficientnet, "efficientnet_pytorch"),
    _row("bninception", "pretrainedmodels", "legacy .onnx, BGR", _bninception, "pretrainedmodels"),
    _row("rfdetr-nano", "rfdetr", ".onnx of export()", partial(_rfdetr, "RFDETRNano"), "rfdetr"),
]
