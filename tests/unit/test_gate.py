"""The precision gate: what it measures, that no engine with wrong outputs serves, and what serves instead."""

from __future__ import annotations

import hashlib
import itertools
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from app.precision.described import weights_key
from app.precision.gate import Gate
from app.precision.probes import Calibration, CalibrationError, probes
from backends import CompileOptions, LoadReport, WrongAnswersError
from backends.contract.backend import Executable
from backends.engines import EagerEngine, compile_first
from backends.engines.engine import Engine
from models import open_model, parse_spec
from models.contract.digest import OpenedFiles
from models.contract.measures import TENSOR_LIMITS
from models.contract.task_adapter import OWN, task_class
from tests.support.networks import Brightness
from tests.support.rows import row

LADDER = (1, 2, 4)


def opened(spec, tmp_path):
    return open_model(parse_spec(spec), tmp_path, allow_download=False)


class Remembering:
    """A network in float32 that computes each image once for all tests: what distorts its answers is what differs."""

    def __init__(self, network):
        self.network, self.input_shape, self.outputs = network, network.input_shape, {}

    def __deepcopy__(self, _):
        return self

    @torch.inference_mode()
    def __call__(self, pixels):
        keys = [hashlib.sha256(each.numpy().tobytes()).hexdigest() for each in pixels]
        if new := {key: row for row, key in enumerate(keys) if key not in self.outputs}:
            for key, *outputs in zip(new, *self.network(pixels[list(new.values())]), strict=True):
                self.outputs[key] = outputs
        return tuple(map(torch.stack, zip(*(self.outputs[key] for key in keys), strict=True)))


def served(spec, folder):
    """Open a model whose weights are read once; return it and its probes."""
    model = opened(spec, folder)
    network = Remembering(model.network())
    vars(model)["network"] = lambda: network
    return model, probes(model)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    return served("resnet50:sample", tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def detector(tmp_path_factory):
    return served("yolov8n:sample", tmp_path_factory.mktemp("weights"))


def exchanged_classes(outputs, size):
    logits = outputs[0].copy()
    logits[:, [0, 1]] = logits[:, [1, 0]]
    return (logits, *outputs[1:])


def exchanged_detections(outputs, size):
    classes = outputs[2].copy()
    classes[outputs[2] == 0], classes[outputs[2] == 1] = 1, 0
    return (*outputs[:2], classes)


def five_percent_more(outputs, size):
    return tuple(output * 1.05 if output.dtype == np.float32 else output for output in outputs)


def not_a_number_at_one_size(outputs, size):
    if size != 2:
        return outputs
    spoilt = outputs[0].copy()
    spoilt[-1, 0] = np.nan
    return (spoilt, *outputs[1:])


def boxes_moved(outputs, size):
    return (outputs[0] + 3, *outputs[1:])


def another_images_answer(outputs, size):
    return tuple(np.roll(output, 1, axis=0) for output in outputs)


class WrongEngine(Engine):
    """Eager in float32, with `distort` applied to its outputs."""

    name = "wrong"

    def __init__(self, distort, precisions=("bf16", "fp32")):
        self.distort, self.precisions = distort, precisions

    def compile(self, network, device, precision, batch_sizes, options):
        # In float32 whatever is asked, so that only `distort` makes a difference.
        return WrongExecutable(network, self.distort, batch_sizes)


class RightEngine(WrongEngine):
    """Serves what the wrong one may not."""

    name = "right"

    def __init__(self):
        super().__init__(lambda outputs, size: outputs, ("fp32",))


class WrongExecutable(Executable):
    def __init__(self, network, distort, batch_sizes):
        super().__init__("cpu:0", batch_sizes, network.input_shape)
        self.network, self.distort = network, distort

    def _execute(self, pixels):
        outputs = tuple(output.numpy() for output in self.network(torch.from_numpy(pixels)))
        return self.distort(outputs, len(pixels))

    def _release(self):
        pass


DISTORTIONS = [
    ("classifier", exchanged_classes),
    ("classifier", five_percent_more),
    ("classifier", not_a_number_at_one_size),
    ("classifier", another_images_answer),
    ("detector", exchanged_detections),
    ("detector", five_percent_more),
    ("detector", not_a_number_at_one_size),
    ("detector", boxes_moved),
    ("detector", another_images_answer),
]


@pytest.mark.parametrize(("fixture", "distort"), DISTORTIONS, ids=lambda value: getattr(value, "__name__", value))
@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_an_engine_with_wrong_outputs_never_serves(request, fixture, distort, precision):
    model, images = request.getfixturevalue(fixture)
    options = CompileOptions(gate=Gate(model, images).check)
    engines = [WrongEngine(distort, (precision,)), RightEngine()]
    executable, report = compile_first(engines, model.network(), "cpu", (precision, "fp32"), LADDER, options=options)
    assert (report.engine, report.precision) == ("right", "fp32")
    assert "its answers to batches of" in report.refusals["wrong"]
    assert set(report.measures) == set(model.limits["fp32"])
    executable.close()


def test_outputs_of_another_shape_are_as_wrong_as_can_be(classifier):
    model, _ = classifier
    assert set(model.errors([np.zeros((2, 8))], [np.zeros((2, 7))]).values()) == {float("inf")}


def test_limits_grow_with_the_coarseness_of_the_precision():
    for task in (TENSOR_LIMITS, *(task_class(entry.name).limits for entry in OWN)):
        # Tensors are not calibrated, so that there is no int8 for them.
        assert set(task) == {"fp32", "fp16", "bf16", "int8"} - ({"int8"} if task is TENSOR_LIMITS else set())
        for finer, coarser in itertools.pairwise(name for name in ("fp32", "fp16", "bf16", "int8") if name in task):
            assert all(task[finer][name] <= task[coarser][name] for name in task[finer])


def test_where_nobody_has_named_a_precision_the_engine_that_is_named_serves_in_the_next_one(caplog):
    engines, options = [EagerEngine(row("fp32"))], CompileOptions(automatic=True)
    executable, report = compile_first(engines, Brightness(), "cpu", ("bf16", "fp32"), (1,), options=options)
    executable.close()
    assert (report.engine, report.precision) == ("eager", "fp32")
    assert report.refusals == {"eager": "it offers fp32 here, not bf16"}
    assert "no engine serves the network in bf16 on cpu" in caplog.text


def test_calibration_needs_images(tmp_path, classifier):
    model, _ = classifier
    with pytest.raises(CalibrationError, match="There is no image in"):
        Calibration(model, str(tmp_path))
    with pytest.raises(CalibrationError, match="--calibrate DIR"):
        Calibration(opened("resnet18:random", tmp_path), "")
    (tmp_path / "broken.jpg").write_bytes(b"\xff\xd8 nothing")
    with pytest.raises(CalibrationError, match="None of the images"):
        Calibration(model, str(tmp_path))()


def test_calibration_takes_a_folder_of_images_broken_ones_aside(tmp_path, classifier):
    from models.sample import IMAGES

    model, images = classifier
    for path in IMAGES.glob("*.jpg"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "broken.jpg").write_bytes(b"\xff\xd8 nothing")
    (tmp_path / "notes.txt").write_text("no image")
    taken = Calibration(model, str(tmp_path))()
    assert taken.shape == (5, *model.input_shape)
    held_out = Calibration(model, str(tmp_path)).held_out()
    np.testing.assert_array_equal(np.concatenate([taken[:2], held_out.pixels, taken[2:]]), images[:6])
    assert held_out.truth == ()


@pytest.mark.parametrize("files", [1, 3, 4, 200, 300, 5000])
def test_no_image_is_both_calibrated_on_and_held_out(tmp_path, classifier, files):
    for index in range(files):
        (tmp_path / f"{index:04}.jpg").touch()
    calibration = Calibration(classifier[0], str(tmp_path))
    assert not set(calibration._files) & set(calibration._held_out)
    assert 0 < len(calibration._files) <= 128
    assert min(files // 4, 64) <= len(calibration._held_out) <= 256
    if files > 384:  # They are from all over the folder.
        assert all(
            max(int(a.stem) - int(b.stem) for b, a in pairwise(part)) < files / 32
            for part in (calibration._files, calibration._held_out)
        )


def test_an_error_that_is_no_number_is_over_every_limit(monkeypatch, classifier):
    """Where NaN may be an answer, as of networks from files, a measure may be NaN, too."""
    model, images = classifier
    right = RightEngine().compile(model.network(), "cpu", "fp32", (1,), CompileOptions())
    report = LoadReport("right", "fp32")
    Gate(model, images).check(right, report)
    unknown = dict.fromkeys(model.limits["fp32"], float("nan"))
    monkeypatch.setattr(type(model), "measures", lambda *_: unknown)
    with pytest.raises(WrongAnswersError, match="is nan"):
        Gate(model, images).check(right, report)


def test_a_key_names_what_a_file_alone_does_not_say():
    files = OpenedFiles("/models", "weights", (("weights", "digest"),), "/models/weights")

    def key(architecture, classes):
        return weights_key(SimpleNamespace(architecture=architecture, labels=["x"] * classes, files=files))

    assert len({key("resnet50", 10), key("resnet50", 1000), key("resnet18", 10)}) == 3
    assert not weights_key(SimpleNamespace(architecture="resnet50", labels=(), files=None))


def test_an_engine_without_the_next_precision_stands_in_for_itself_in_a_finer_one():
    """ONNX Runtime offers int8 and fp32: until int8 is made, no bf16 is no reason to refuse the start."""

    class Quantising(WrongEngine):
        def is_quick(self, network, precision, options):
            return precision != "int8"

    engines = [Quantising(lambda outputs, size: outputs, ("int8", "fp32"))]
    options = CompileOptions(quick=True)
    _, report = compile_first(engines, Brightness(), "cpu", ("int8", "bf16", "fp32"), (1,), options=options)
    assert (report.precision, report.staged) == ("fp32", True)
