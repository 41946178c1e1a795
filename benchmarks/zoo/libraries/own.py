"""Networks of one's own, as PyTorch, OpenVINO and Keras write them."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.zoo.alive import enliven
from benchmarks.zoo.networks import LABELS, Floats, Made, Network, as_arrays
from benchmarks.zoo.pixels import Images, centres, normalised

_CLASSES = len(LABELS)
_SIDE = 64


def _body(channels: int = 3) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, 16, 5, stride=2, padding=2), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.SiLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, _CLASSES),
    )  # fmt: skip


def _levels(images: Images, mode: str = "RGB") -> torch.Tensor:
    return centres(images, _SIDE, mode)


class _Inside(nn.Module):
    """Takes levels, and normalises them itself; its scores are probabilities."""

    def __init__(self, body: nn.Module, nhwc: bool = False) -> None:
        super().__init__()
        self.body, self.nhwc = body, nhwc

    def forward(self, levels: torch.Tensor) -> torch.Tensor:
        pixels = levels.float() / 127.5 - 1
        if self.nhwc:
            pixels = pixels.permute(0, 3, 1, 2)
        found: torch.Tensor = self.body(pixels).softmax(1)
        return found


def _sidecar(folder: Path, **more: Any) -> None:
    (folder / "mine.json").write_text(json.dumps({"task": "classify", "labels": LABELS, "resize_by": "pillow", **more}))


def _enlivened(pixels: torch.Tensor) -> Any:
    body = _body(pixels.shape[1])
    return enliven(body, lambda: body(pixels), _CLASSES)


def _scores(found: torch.Tensor) -> list[Floats]:
    return as_arrays([*found.float()])


def _onnx(folder: Path, images: Images, *, dynamo: bool = False, half: bool = False, rows: int = 1) -> Made:
    pixels = normalised(_levels(images) / 255)
    body = _enlivened(pixels)
    answers = _scores(body(pixels).softmax(1))
    example = torch.rand(rows, 3, _SIDE, _SIDE)
    if half:
        body, example = body.half(), example.half()
    torch.onnx.export(body, (example,), str(folder / "mine.onnx"), dynamo=dynamo)
    if half:  # The file is what is rounded, its norms within its convolutions: anychip computes in float32.
        answers = _scores(_in_float32(folder / "mine.onnx", pixels).softmax(1))
    _sidecar(folder)
    return Made("{}/mine.onnx", "scores", answers)


def _in_float32(file: Path, pixels: torch.Tensor) -> torch.Tensor:
    """Return what ONNX Runtime answers with a file of float16 whose numbers are float32's."""
    import onnx
    import onnxruntime

    model = onnx.load(file)
    half, single = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT
    for weight in [each for each in model.graph.initializer if each.data_type == half]:
        weight.CopyFrom(
            onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(weight).astype(np.float32), weight.name)
        )
    for value in [*model.graph.input, *model.graph.output, *model.graph.value_info]:
        if value.type.tensor_type.elem_type == half:
            value.type.tensor_type.elem_type = single
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    [name] = [each.name for each in session.get_inputs()]
    return torch.cat([torch.from_numpy(session.run(None, {name: each[None].numpy()})[0]) for each in pixels])


def _external(folder: Path, images: Images) -> Made:
    """Weights beside the file, which was renamed after the export."""
    import onnx

    made = _onnx(folder, images)
    model = onnx.load(folder / "mine.onnx")
    onnx.save(model, folder / "mine.onnx", save_as_external_data=True, location="weights of mine.bin", size_threshold=0)
    return made


def _program(ending: str, folder: Path, images: Images) -> Made:
    pixels = normalised(_levels(images) / 255)
    body = _enlivened(pixels)
    if ending == ".pt2":
        rows = {0: torch.export.Dim("batch", min=1, max=64)}
        torch.export.save(torch.export.export(body, (pixels,), dynamic_shapes=(rows,)), folder / "mine.pt2")
    else:
        jit: Any = torch.jit
        jit.save(jit.trace(body, pixels), str(folder / f"mine{ending}"))
    _sidecar(folder, size=_SIDE)
    return Made(f"{{}}/mine{ending}", "scores", _scores(body(pixels).softmax(1)))


def _torchscript_as_pt(folder: Path, images: Images) -> Made:
    made = _program(".ts", folder, images)
    shutil.copy(folder / "mine.ts", folder / "named.pt")
    shutil.copy(folder / "mine.json", folder / "named.json")
    return Made(made.model, made.kind, made.answers, refused="{}/named.pt", line=".ts")


def _uint8(ending: str, folder: Path, images: Images) -> Made:
    levels = _levels(images)
    body = _enlivened(levels / 127.5 - 1)
    inside = _Inside(body).eval()
    if ending == ".onnx":
        rows = {"levels": {0: "n"}, "scores": {0: "n"}}
        torch.onnx.export(
            inside, (levels[:1],), str(folder / "mine.onnx"), dynamo=False, input_names=["levels"],
            output_names=["scores"], dynamic_axes=rows,
        )  # fmt: skip
        _sidecar(folder)
    else:
        jit: Any = torch.jit
        jit.save(jit.trace(inside, levels), str(folder / "mine.ts"))
        _sidecar(folder, size=_SIDE, input="levels")
    return Made(f"{{}}/mine{ending}", "scores", _scores(inside(levels)))


def _grey(folder: Path, images: Images) -> Made:
    pixels = _levels(images, "L") / 255
    body = _enlivened(pixels)
    torch.onnx.export(body, (pixels[:1],), str(folder / "mine.onnx"), dynamo=False)
    _sidecar(folder)
    return Made("{}/mine.onnx", "scores", _scores(body(pixels).softmax(1)))


def _argmax(folder: Path, images: Images) -> Made:
    """Class numbers [n, 1, h, w] of int64, as mmseg and PaddleSeg export them."""

    class Numbers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(3, 16, 9, padding=4), nn.ReLU(), nn.Conv2d(16, _CLASSES, 5, padding=2))

        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.body(pixels).argmax(1, keepdim=True)
            return found

    sized = [each.resize((_SIDE, _SIDE)) for each in images]
    pixels = normalised(_levels(sized) / 255)
    network = Numbers()
    enliven(network, lambda: network(pixels), _CLASSES)
    torch.onnx.export(network, (pixels[:1],), str(folder / "mine.onnx"), dynamo=False)
    (folder / "mine.json").write_text(json.dumps({"task": "segment_semantic", "labels": LABELS}))
    return Made("{}/mine.onnx", "class_map", as_arrays([*network(pixels)[:, 0].float()]), (_SIDE, _SIDE))


def _openvino(folder: Path, images: Images, *, preprocessing: bool = False) -> Made:
    import openvino as ov

    levels = _levels(images)
    pixels = levels / 127.5 - 1 if preprocessing else normalised(levels / 255)
    body = _enlivened(pixels)
    model: Any = ov.convert_model(body, example_input=pixels[:1], input=[-1, 3, _SIDE, _SIDE])
    if preprocessing:
        steps: Any = ov.preprocess.PrePostProcessor(model)
        steps.input().tensor().set_element_type(ov.Type.u8).set_layout(ov.Layout("NHWC"))
        steps.input().model().set_layout(ov.Layout("NCHW"))
        steps.input().preprocess().convert_element_type(ov.Type.f32).mean([127.5] * 3).scale([127.5] * 3)
        model = steps.build()
    ov.save_model(model, folder / "mine.xml", compress_to_fp16=False)
    compiled: Any = ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    given = levels.permute(0, 2, 3, 1).contiguous() if preprocessing else pixels
    _sidecar(folder, **({} if preprocessing else {"input": "floats"}))
    found = torch.from_numpy(np.concatenate([compiled(each[None].numpy())[0] for each in given]))
    return Made("{}/mine.xml", "scores", _scores(found.softmax(1)))


def _keras(folder: Path, images: Images, *, application: bool = False) -> Made:
    """Keras 3 on torch: a `.keras` file is refused, what `model.export` writes is served."""
    keras: Any = importlib.import_module("keras")

    keras.utils.set_random_seed(3)
    levels = _levels(images).permute(0, 2, 3, 1).contiguous().float()
    if application:
        model: Any = keras.applications.MobileNetV2(
            input_shape=(_SIDE, _SIDE, 3), alpha=0.35, weights=None, classes=_CLASSES, classifier_activation=None
        )
        given = keras.applications.mobilenet_v2.preprocess_input(levels.numpy())
        pixel: dict[str, Any] = {"mean": 0.5, "std": 0.5}
    else:
        layers = keras.layers
        model = keras.Sequential(
            [layers.Input((_SIDE, _SIDE, 3)), layers.Rescaling(1 / 127.5, -1.0), layers.Conv2D(16, 5, 2, "same"),
             layers.BatchNormalization(), layers.ReLU(), layers.Conv2D(32, 3, 2, "same"), layers.Activation("swish"),
             layers.GlobalAveragePooling2D(), layers.Dense(_CLASSES)]
        )  # fmt: skip
        given, pixel = levels.numpy(), {"input": "levels"}
    found = np.asarray(keras.ops.convert_to_numpy(model(given, training=False)))
    last = model.layers[-1]
    kernel, bias = last.get_weights()
    middle, gain = found.mean(0), 2.5 / (found - found.mean(0)).std()
    last.set_weights([kernel * gain, (bias - middle) * gain])
    answers = keras.ops.convert_to_numpy(keras.ops.softmax(model(given, training=False)))
    model.save(folder / "mine.keras")
    model.export(folder / "mine.onnx", format="onnx", verbose=False)
    _sidecar(folder, **pixel)
    return Made("{}/mine.onnx", "scores", as_arrays([*answers]), refused="{}/mine.keras", line='format="onnx"')


def _row(name: str, library: str, file: str, build: Callable[[Path, Images], Made], package: str) -> Network:
    return Network(name, library, file, build, package, "compiled model" if package == "openvino" else "network")


_own = partial(_row, library="PyTorch", package="torch")

ROWS = [
    _own("own-dynamo", file="dynamo .onnx", build=partial(_onnx, dynamo=True)),
    _own("own-legacy", file="legacy .onnx", build=_onnx),
    _own("own-half", file="legacy .onnx, float16; against ONNX Runtime in float32", build=partial(_onnx, half=True)),
    _own("own-batch4", file="legacy .onnx, batch of 4", build=partial(_onnx, rows=4)),
    _own("own-external", file=".onnx, weights in a file of another name", build=_external),
    _own("own-pt2", file=".pt2", build=partial(_program, ".pt2")),
    _own("own-ts", file=".ts", build=partial(_program, ".ts")),
    _own("own-ts-as-pt", file="TorchScript as .pt", build=_torchscript_as_pt),
    _own("own-uint8", file=".onnx of uint8", build=partial(_uint8, ".onnx")),
    _own("own-uint8-ts", file=".ts of uint8", build=partial(_uint8, ".ts")),
    _own("own-grey", file=".onnx of one channel", build=_grey),
    _own("own-argmax", file=".onnx, class numbers of int64", build=_argmax),
    _row("ov-plain", "OpenVINO", "IR of convert_model", _openvino, "openvino"),
    _row(
        "ov-preprocessing",
        "OpenVINO",
        "IR with PrePostProcessor, u8",
        partial(_openvino, preprocessing=True),
        "openvino",
    ),
    _row("keras-own", "Keras", ".keras, then .onnx of export", _keras, "keras"),
    _row("keras-mobilenetv2", "Keras", ".keras, then .onnx of export", partial(_keras, application=True), "keras"),
]
