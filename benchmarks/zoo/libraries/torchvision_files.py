"""torchvision: state dicts as training leaves them, and exports."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.zoo.alive import draw, head_of, measure, spread
from benchmarks.zoo.networks import LABELS, Floats, Made, Network, as_arrays
from benchmarks.zoo.pixels import Images, batch, normalised

_CLASSES = len(LABELS)


def _network(name: str, images: Images, **more: Any) -> tuple[Any, Any]:
    """Return the network, and the transform of its published weights."""
    import torchvision as tv

    network = tv.models.get_model(name, weights=None, num_classes=_CLASSES, **more)
    transform: Any = tv.models.get_model_weights(name).DEFAULT.transforms()
    pixels = torch.stack([transform(each.convert("RGB")) for each in images])
    # Norms stay as they are made: measured on so few pictures they enlarge what a level of a pixel does a thousandfold.
    # MobileNetV2 drawn as the others enlarges it so as well, and torchvision's names are resized within a level.
    draw(network, 1.0 if name == "mobilenet_v2" else 1.4)
    network.eval()
    spread(head_of(network, _CLASSES), lambda: network(pixels), 1.5)
    return network.requires_grad_(False), transform


def _answers(network: nn.Module, transform: Any, images: Images) -> list[Floats]:
    with torch.inference_mode():
        return as_arrays([network(transform(each.convert("RGB"))[None])[0].softmax(0) for each in images])


def _weights(name: str, ending: str, prefix: str, folder: Path, images: Images, **more: Any) -> Made:
    network, transform = _network(name, images, **more)
    state: Any = {prefix + key: each for key, each in network.state_dict().items()}
    if ending == ".ckpt":
        state = {"state_dict": state, "epoch": 3, "pytorch-lightning_version": "2.5.0", "hyper_parameters": {"lr": 0.1}}
    torch.save(state, folder / f"weights{ending}")
    (folder / "weights.labels.txt").write_text("\n".join(LABELS) + "\n")
    return Made(f"{name}:{{}}/weights{ending}", "scores", _answers(network, transform, images))


def _module(folder: Path, images: Images) -> Made:
    """`torch.save(model)`, which is read as data."""
    network, transform = _network("resnet18", images)
    torch.save(network, folder / "module.pth")
    return Made("resnet18:{}/module.pth", "scores", _answers(network, transform, images))


def _own_head(folder: Path, images: Images) -> Made:
    """`fc = Sequential(Dropout, Linear)`: refused; the export is the way."""
    network, transform = _network("resnet18", images)
    network.fc = nn.Sequential(nn.Dropout(0.2), network.fc)
    network.eval()
    torch.save(network.state_dict(), folder / "head.pth")
    torch.onnx.export(network, (torch.rand(1, 3, 224, 224),), str(folder / "head.onnx"), dynamo=False)
    crop = {"crop": 224 / 256, "resize_by": "pillow"}
    (folder / "head.json").write_text(json.dumps({"task": "classify", "labels": LABELS, **crop}))
    answers = _answers(network, transform, images)
    return Made("{}/head.onnx", "scores", answers, refused="resnet18:{}/head.pth", line="torch.onnx.export")


def _graph(name: str, ending: str, folder: Path, images: Images, resized: int = 256) -> Made:
    network, transform = _network(name, images)
    side = transform.crop_size[0]
    example = torch.rand(2, 3, side, side)
    if ending == ".onnx":
        torch.onnx.export(network, (example[:1],), str(folder / "graph.onnx"), dynamo=True)
    else:
        torch.jit.save(torch.jit.script(network), str(folder / "graph.ts"))
    about = {"task": "classify", "labels": LABELS, "resize_to": transform.resize_size[0], "resize_by": "pillow"}
    about |= {} if ending == ".onnx" else {"size": side}
    (folder / "graph.json").write_text(json.dumps(about))
    return Made(f"{{}}/graph{ending}", "scores", _answers(network, transform, images))


_SIDE = 320


def _detector(name: str, folder: Path, images: Images) -> Made:
    """Write a detector's file, which is refused under the network's name, and its export, which is served."""
    import torchvision as tv

    network = tv.models.get_model(name, weights=None, weights_backbone=None, num_classes=_CLASSES + 1)
    sized = [each.resize((_SIDE, _SIDE)).convert("RGB") for each in images]
    pixels = [*((batch(sized, _SIDE) * 128 + 128) / 255)]
    proposes = hasattr(network, "rpn")
    if not proposes:
        draw(network)
    network.eval()
    measure(network, lambda: network(pixels))
    with torch.no_grad():
        if proposes:  # Of nothing that is proposed torchvision's export fails, in any runtime.
            network.rpn.head.bbox_pred.weight.mul_(0.2)
        for head in {id(each): each for each in _heads(network)}.values():
            spread(head, lambda: network(pixels), 1.5)
            # Fewer pass than torchvision answers with: of more, near ties would decide which are left out.
            head.bias.view(-1, _CLASSES + 1)[:, 0] += 3.0 if proposes else 8.0
    torch.save(network.state_dict(), folder / "state.pth")
    torch.onnx.export(network, ([pixels[0]],), str(folder / "best.onnx"), dynamo=False)
    (folder / "best.json").write_text(json.dumps({"task": "detect", "labels": LABELS}))
    answers = []
    with torch.inference_mode():
        for found in network(pixels):
            kept = found["scores"] >= 0.25
            row = (found["boxes"], found["scores"][:, None], found["labels"][:, None].float())
            answers.append(torch.cat(row, 1)[kept])
    line = "torch.onnx.export"
    return Made("{}/best.onnx", "boxes", as_arrays(answers), (_SIDE, _SIDE), f"{name}:{{}}/state.pth", line)


def _heads(network: Any) -> list[Any]:
    if hasattr(network, "roi_heads"):
        return [network.roi_heads.box_predictor.cls_score]
    found = network.head.classification_head
    return [found.cls_logits] if hasattr(found, "cls_logits") else [each[-1] for each in found.module_list]


def _lraspp(folder: Path, images: Images) -> Made:
    import torchvision as tv

    network = tv.models.get_model(
        "lraspp_mobilenet_v3_large", weights=None, weights_backbone=None, num_classes=_CLASSES
    )

    class Only(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.network(pixels)["out"]
            return found

    side = 128
    sized = [each.resize((side, side)).convert("RGB") for each in images]
    pixels = normalised((batch(sized, side) * 128 + 128) / 255)
    draw(network)
    network.eval()
    measure(network, lambda: network(pixels))
    spread(head_of(network, _CLASSES), lambda: network(pixels))
    torch.onnx.export(Only().eval(), (pixels[:1],), str(folder / "map.onnx"), dynamo=False)
    (folder / "map.json").write_text(json.dumps({"task": "segment_semantic", "labels": LABELS}))
    with torch.inference_mode():
        maps = network(pixels)["out"].argmax(1).float()
    return Made("{}/map.onnx", "class_map", as_arrays([*maps]), (side, side))


def _row(
    name: str, file: str, build: Callable[[Path, Images], Made], by: str = "network and its weights' transforms"
) -> Network:
    return Network(f"tv-{name}", "torchvision", file, build, "torchvision", by)


ROWS = [
    _row("swin_v2_t", ".pth", partial(_weights, "swin_v2_t", ".pth", "")),
    _row("squeezenet1_1", ".pth, _orig_mod.", partial(_weights, "squeezenet1_1", ".pth", "_orig_mod.")),
    _row("mobilenet_v2", ".pth.tar, module.", partial(_weights, "mobilenet_v2", ".pth.tar", "module.")),
    _row("efficientnet_b0", "Lightning's .ckpt, model.", partial(_weights, "efficientnet_b0", ".ckpt", "model.")),
    _row("inception_v3", ".pth, transform_input", partial(
        _weights, "inception_v3", ".pth", "", transform_input=True, aux_logits=False)),
    _row("shufflenet", "dynamo .onnx", partial(_graph, "shufflenet_v2_x0_5", ".onnx")),
    _row("mnasnet", "scripted .ts", partial(_graph, "mnasnet0_5", ".ts")),
    _row("resnet18-module", "torch.save(model)", _module),
    _row("resnet18-own-head", ".pth of another head", _own_head),
    _row("fasterrcnn", ".pth, then legacy .onnx", partial(
        _detector, "fasterrcnn_mobilenet_v3_large_320_fpn"), "network"),
    _row("ssdlite", ".pth, then legacy .onnx", partial(_detector, "ssdlite320_mobilenet_v3_large"), "network"),
    _row("lraspp", "legacy .onnx", _lraspp, "network"),
]  # fmt: skip
