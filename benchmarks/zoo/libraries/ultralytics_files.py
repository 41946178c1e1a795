"""Ultralytics (AGPL): what it exports, and what it predicts from the same file. Its process alone imports it."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from benchmarks.zoo.networks import Floats, Made, Network
from benchmarks.zoo.pixels import Images

_SIDE = 320
_THRESHOLD = 0.25


def _enliven(network: Any, pixels: torch.Tensor) -> None:
    """Measure BatchNorm on pictures, and scale the heads so that some anchors pass the threshold."""
    torch.manual_seed(1)
    seen: dict[str, torch.Tensor] = {}
    head = network.model[-1]
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 1.0
        network.train()
        network(pixels)
        network.eval()
        hooks = [
            module.register_forward_hook(lambda _, __, output, name=name: seen.__setitem__(name, output.detach()))
            for name, module in head.named_modules()
            if isinstance(module, nn.Conv2d | nn.Linear)
        ]
        network(pixels)
        for hook in hooks:
            hook.remove()
        for name, module in head.named_modules():
            if name not in seen:
                continue
            if isinstance(module, nn.Linear):
                module.weight.mul_(4 / seen[name].std())
                continue
            parts = name.removeprefix("one2one_").split(".")
            if len(name.split(".")) != 3 or parts[-1] != "2" or parts[0] not in ("cv2", "cv3", "cv4"):
                continue
            bare = seen[name] - module.bias.view(1, -1, 1, 1)
            gain = 1 / bare.std()
            module.weight.mul_(gain)
            if parts[0] == "cv3":
                best = (bare * gain).amax(dim=1).flatten(1).quantile(0.98, dim=1).max()
                module.bias.fill_(float(np.log(_THRESHOLD / (1 - _THRESHOLD)) - best))
            elif parts[0] == "cv2" and len(module.bias) == 4:
                module.bias.fill_(3.0)
            else:
                module.bias.copy_(torch.randn(len(module.bias)) * 0.5)
    network.eval()


def _letterboxed(images: Images) -> torch.Tensor:
    pixels = []
    for image in images:
        sized = image.convert("RGB")
        sized.thumbnail((_SIDE, _SIDE))
        whole = Image.new("RGB", (_SIDE, _SIDE), (114, 114, 114))
        whole.paste(sized, ((_SIDE - sized.width) // 2, (_SIDE - sized.height) // 2))
        pixels.append(torch.from_numpy(np.array(whole)).permute(2, 0, 1) / 255)
    return torch.stack(pixels)


def _made(yaml: str, folder: Path, images: Images) -> Any:
    ultralytics: Any = importlib.import_module("ultralytics")

    torch.manual_seed(0)
    model: Any = ultralytics.YOLO(yaml, verbose=False)
    _enliven(model.model, _letterboxed(images))
    model.model.args = model.overrides = {**model.overrides, "imgsz": _SIDE}
    model.ckpt = {"train_args": {"imgsz": _SIDE}}
    model.save(folder / "best.pt")
    return ultralytics.YOLO(folder / "best.pt")


def _answers(file: Path, task: str, folder: Path, images: Images) -> list[Floats]:
    ultralytics: Any = importlib.import_module("ultralytics")

    model: Any = ultralytics.YOLO(str(file), task=task)
    answers = []
    for number, image in enumerate(images):
        image.save(folder / f"seen{number}.png")
        [found] = model.predict(
            str(folder / f"seen{number}.png"), imgsz=_SIDE if task != "classify" else 224, conf=_THRESHOLD, rect=False,
            verbose=False, max_det=300,
        )  # fmt: skip
        if found.probs is not None:
            answers.append(found.probs.data.numpy())
            continue
        boxes = found.boxes if found.obb is None else found.obb
        corners = boxes.xyxy if found.obb is None else torch.cat((boxes.xyxyxyxy.amin(1), boxes.xyxyxyxy.amax(1)), 1)
        answers.append(torch.cat((corners, boxes.conf[:, None], boxes.cls[:, None].float()), 1).numpy())
    return answers


def _use_float32() -> None:
    """Let OpenVINO compute in float32, which it does not by itself where the processor has bfloat16."""
    import openvino

    core: Any = openvino.Core
    compile_model = core.compile_model

    def compiled(self: Any, model: Any, device_name: Any = None, config: Any = None, **more: Any) -> Any:
        return compile_model(self, model, device_name, {**(config or {}), "INFERENCE_PRECISION_HINT": "f32"}, **more)

    core.compile_model = compiled


def _exported(
    yaml: str, options: dict[str, Any], folder: Path, images: Images, *, from_checkpoint: bool = False
) -> Made:
    """Write an export. `from_checkpoint`: the `.pt` that it was made of gives the answers, and not the export."""
    model = _made(yaml, folder, images)
    task = model.task
    if options.get("format") == "openvino":
        _use_float32()
    side = 224 if task == "classify" else _SIDE
    file = Path(model.export(**{"format": "onnx", "imgsz": side, "verbose": False, **options}))
    kind: Any = "scores" if task == "classify" else "boxes"
    answered = folder / "best.pt" if from_checkpoint else file
    return Made(f"{{}}/{file.name}", kind, _answers(answered, task, folder, images))


def _checkpoint(yaml: str, folder: Path, images: Images) -> Made:
    model = _made(yaml, folder, images)
    return Made("{}/best.pt", "boxes", _answers(folder / "best.pt", model.task, folder, images))


def _refused(yaml: str, folder: Path, images: Images) -> Made:
    """Write the `.pt` of a network that is not ours, which is refused; its export is served."""
    made = _exported(yaml, {}, folder, images)
    (folder / "given").mkdir()
    shutil.move(folder / "best.pt", folder / "given" / "best.pt")
    return Made(made.model, made.kind, made.answers, refused="{}/given/best.pt", line="format=onnx")


def _row(name: str, file: str, build: Callable[[Path, Images], Made], by: str = "file") -> Network:
    return Network(f"yolo-{name}", "Ultralytics", file, build, "ultralytics", f"YOLO({by}).predict")


# Ultralytics runs no batch of four for one picture. ONNX Runtime, optimising as it does for Ultralytics, is wrong for
# YOLOv3-tiny by 4 pixels. The YOLOv9t of these weights enlarges rounding to 1e-3: float32 by PyTorch and by ONNX
# Runtime, optimised or not, differ from each other by 5e-4 to 8e-4, and from float64 by 4e-4 to 5e-4.
_of_checkpoint = partial(_exported, from_checkpoint=True)


ROWS = [
    _row("v8n", ".onnx", partial(_exported, "yolov8n.yaml", {})),
    _row("v3-tiny", ".onnx", partial(_of_checkpoint, "yolov3-tiny.yaml", {}), "best.pt"),
    _row("v5nu", ".onnx, dynamic=True", partial(_exported, "yolov5n.yaml", {"dynamic": True})),
    _row("v6n", ".torchscript", partial(_exported, "yolov6n.yaml", {"format": "torchscript"})),
    _row("v8n-batch4", ".onnx, batch=4", partial(_of_checkpoint, "yolov8n.yaml", {"batch": 4}), "best.pt"),
    _row("v9t", ".onnx, nms=True", partial(_of_checkpoint, "yolov9t.yaml", {"nms": True}), "best.pt"),
    _row("v10n", ".onnx, end to end", partial(_exported, "yolov10n.yaml", {})),
    _row("v8n-seg", ".onnx", partial(_exported, "yolov8n-seg.yaml", {})),
    _row("11n-pose", ".onnx, nms=True", partial(_exported, "yolo11n-pose.yaml", {"nms": True})),
    _row("11n-obb", "OpenVINO", partial(_exported, "yolo11n-obb.yaml", {"format": "openvino"})),
    _row("26n-cls", ".torchscript", partial(_exported, "yolo26n-cls.yaml", {"format": "torchscript"})),
    _row("v8n-pt", ".pt", partial(_checkpoint, "yolov8n.yaml")),
    _row("11n-pt", ".pt", partial(_checkpoint, "yolo11n.yaml")),
    _row("26n-pt", ".pt", partial(_checkpoint, "yolo26n.yaml")),
    _row("12n-pt", ".pt, then .onnx", partial(_refused, "yolo12n.yaml")),
]
