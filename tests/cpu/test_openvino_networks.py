"""Networks of OpenVINO: the answers are OpenVINO's own, with ours before and after, and nothing else runs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from backends import EngineRefusedError
from backends.contract.backend import DEFAULTS
from backends.engines import EagerEngine, compile_first
from backends.engines.openvino import OpenVINOEngine
from models import NormalisedModel, WeightsError, open_model, parse_spec
from tests.support.rows import row

openvino = pytest.importorskip("openvino")
ops = pytest.importorskip("openvino.opset14")

HEIGHT, WIDTH = 24, 32


def written(folder: Path, first: list[int], kind: Any, *, last: bool = False, sidecar: str = "") -> Path:
    """Write a classifier that tells classes apart; `last`: its input has the channels last."""
    images = ops.parameter([*first, *([HEIGHT, WIDTH, 3] if last else [3, HEIGHT, WIDTH])], kind, "images")
    pixels = ops.transpose(images, ops.constant(np.array([0, 3, 1, 2]))) if last else images
    pixels = pixels if kind == np.float32 else ops.convert(pixels, "f32")
    ends = [ops.constant(np.full((1, 1, 1, 1), level, np.float32)) for level in (0, 1)]
    pixels = ops.fake_quantize(pixels, *ends, *ends, 1 << 16)  # OpenVINO compiles it with a layer after it alone.
    weights = np.random.default_rng(1).normal(size=(64, 3, 3, 3)).astype(np.float32)
    seen = ops.relu(ops.convolution(pixels, ops.constant(weights), [2, 2], [1, 1], [1, 1], [1, 1]))
    packed = ops.convert(ops.constant(np.random.default_rng(2).integers(-127, 128, (5, 64), np.int8)), "f32")
    layer = ops.multiply(packed, ops.constant(np.full((5, 1), 0.01, np.float32)))
    scores = ops.matmul(ops.reduce_mean(seen, ops.constant(np.array([2, 3])), False), layer, False, True)
    file = folder / "best.xml"
    openvino.save_model(openvino.Model([ops.result(scores)], [images], "small"), file, compress_to_fp16=False)
    stated = sidecar or json.dumps({"task": "classify", "labels": list("abcde"), "mean": [0, 0, 0], "std": [1, 1, 1]})
    file.with_suffix(".json").write_text(stated)
    return file


@pytest.mark.parametrize(
    ("first", "kind", "last"),
    [([-1], np.float32, False), ([1], np.float32, False), ([2], np.float32, True), ([1], np.float16, False)],
)
def test_it_is_computed_by_openvino_alone(tmp_path: Path, first: list[int], kind: Any, last: bool) -> None:
    """Of bytes and of floats, one image or several, whatever batch and type the file states."""
    file = written(tmp_path, first, kind, last=last)
    model: Any = open_model(parse_spec(str(file)), tmp_path)
    assert model.witness == "OpenVINO itself computes it, so that nothing was compared"
    pixels = np.random.default_rng(2).integers(256, size=(2, HEIGHT, WIDTH, 3), dtype=np.uint8)
    levels = pixels.astype(np.float32) / 255
    given = (levels if last else levels.transpose(0, 3, 1, 2)).astype(kind)
    network = openvino.Core().read_model(file)
    network.reshape([2, *given.shape[1:]])
    exact = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
    compiled = openvino.Core().compile_model(network, "CPU", exact)
    expected = compiled([given])[0]
    spread = np.ptp(expected)
    for form in (model, NormalisedModel.of(model)):
        items = pixels if form is model else form.items(pixels)
        with torch.inference_mode():
            [reference] = form.network()(torch.from_numpy(items))
        executable = OpenVINOEngine(row("fp32")).compile(form.network(), "cpu", "fp32", (1, 2), DEFAULTS)
        for size in (1, 2):
            [found] = executable.run(np.ascontiguousarray(items[:size]))
            np.testing.assert_allclose(found, expected[:size], atol=1e-3 * spread)
        np.testing.assert_allclose(reference, expected, atol=1e-3 * spread)
        executable.close()


def test_another_engine_or_device_is_refused_with_what_helps(tmp_path: Path) -> None:
    model: Any = open_model(parse_spec(str(written(tmp_path, [1], np.float32))), tmp_path)
    for form in (model, NormalisedModel.of(model)):
        with pytest.raises(EngineRefusedError, match=r"on a CPU .* export an \.onnx for other devices"):
            compile_first([EagerEngine(row("fp32"))], form.network(), "npu:0", ("fp32",), (1,))


def test_pixels_in_yuv_are_refused(tmp_path: Path) -> None:
    file, colours = written(tmp_path, [1], np.float32), openvino.preprocess.ColorFormat
    builder = openvino.preprocess.PrePostProcessor(openvino.Core().read_model(file).clone())
    builder.input().tensor().set_element_type(openvino.Type.u8).set_color_format(colours.NV12_SINGLE_PLANE)
    builder.input().model().set_layout(openvino.Layout("NCHW"))
    builder.input().preprocess().convert_color(colours.RGB).convert_element_type(openvino.Type.f32)
    openvino.save_model(builder.build(), tmp_path / "yuv.xml")
    (tmp_path / "yuv.json").write_text('{"task": "classify"}')
    with pytest.raises(WeightsError, match=r"takes pixels in YUV \(NV12toRGB\): .*ColorFormat\.RGB"):
        open_model(parse_spec(str(tmp_path / "yuv.xml")), tmp_path)


@pytest.mark.parametrize(("names", "found"), [("cat dog big_bird cow hen", "big_bird"), ("cat dog", "")])
def test_labels_that_model_api_has_written_into_the_file_are_read(tmp_path: Path, names: str, found: str) -> None:
    file = written(tmp_path, [1], np.float32, sidecar='{"task": "classify", "input": "floats"}')
    network = openvino.Core().read_model(file).clone()
    network.set_rt_info(names, ["model_info", "labels"])
    openvino.save_model(network, tmp_path / "named.xml", compress_to_fp16=False)
    (tmp_path / "named.json").write_text(file.with_suffix(".json").read_text())
    spec = parse_spec(str(tmp_path / "named.xml"))
    if found:
        assert open_model(spec, tmp_path).labels[2] == found
        return
    with pytest.raises(WeightsError, match="of 5 classes, and there are 2 labels"):
        open_model(spec, tmp_path)
