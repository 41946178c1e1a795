"""What the precision gate and the walk over engines do with what they find, on networks of a few numbers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from app.precision.gate import Gate, errors_of_decoding, outputs_of
from app.precision.probes import Calibration, CalibrationError, HeldOut, decoded_by_host
from backends import BackendError, CompileOptions, EngineCache, Executable, LoadReport, WrongAnswersError
from backends.contract.errors import DeviceLostError
from backends.engines import Engine, compile_first
from models.contract.measures import Accuracy, of_tensors
from models.contract.model import Placement
from models.sample import IMAGES
from tests.support.networks import Brightness
from tests.support.sums import SHAPE, Answering, Sums, more_by, sums

ITEMS = 5
PROBES = np.arange(ITEMS * 3, dtype=np.uint8).reshape(ITEMS, *SHAPE)


class Share(Accuracy):
    """The share of answers that are right, and `known` in its place, if there is one."""

    name, loss_limit = "right", 0.12

    def __init__(self, known: Sequence[float] = ()) -> None:
        self.known = list(known)

    def of(self, truth: Sequence[Any], answers: Sequence[Any]) -> float:
        return (
            self.known.pop(0)
            if self.known
            else float(np.mean([a["sum"] == t for t, a in zip(truth, answers, strict=True)]))
        )

    def truth(self, answer: Any) -> Any:
        return answer["sum"]


def checked(executable: Executable, model: Any = None, precision: str = "int8", **more: Any) -> Any:
    model = model or Sums("sample", judge=Share())
    return Gate(model, PROBES, **more).check(executable, LoadReport("one", precision, "1"))


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_every_item_is_answered_once_and_by_its_own_answer_whatever_the_size(size: int) -> None:
    [outputs] = outputs_of(Answering(sizes=(size,)).run, PROBES, size)
    np.testing.assert_array_equal(outputs, sums(PROBES))


@pytest.mark.parametrize("errors", [{1: 0.06, 2: 0.02, 4: 0.01}, {2: 0.06}, {1: 0.01, 4: 0.06}])
def test_the_worst_of_the_sizes_counts(errors: dict[int, float]) -> None:
    assert checked(Answering(more_by(errors))) == {"off": 0.06}
    with pytest.raises(WrongAnswersError, match=r"the error off is 0\.06, and 0\.05 is allowed in bf16"):
        checked(Answering(more_by(errors)), precision="bf16")


@pytest.mark.parametrize("strange", [np.nan, np.inf])
def test_what_is_no_number_is_no_answer_though_no_measure_sees_it(strange: float) -> None:
    def spoilt(outputs: Any) -> Any:
        return np.where(outputs == sums(PROBES)[3], strange, outputs)

    class Blind(Sums):
        def measures(self, expected: Any, outputs: Any) -> dict[str, float]:
            return {"off": 0.0}

    with pytest.raises(WrongAnswersError, match="batches of 1 are not all finite numbers"):
        checked(Answering(spoilt), Blind())
    assert checked(Answering(spoilt), Blind(infinite=True)) == {"off": 0}


def test_a_finished_file_has_to_answer_alike_at_every_size_and_is_compared_with_nothing_else() -> None:
    model = Sums(reference=False)
    assert checked(Answering(lambda outputs: outputs + 7), model) == {"off": 0}
    with pytest.raises(WrongAnswersError, match="batches of 4 are not the network's"):
        checked(Answering(more_by({4: 1})), model)
    assert not vars(model)["made"]


def test_an_error_that_is_no_number_is_over_every_limit() -> None:
    """Where NaN may be an answer, as of networks from files, a measure may be NaN, too."""

    class Unknown(Sums):
        def measures(self, expected: Any, outputs: Any) -> dict[str, float]:
            return {"off": float("nan")}

    with pytest.raises(WrongAnswersError, match="is nan"):
        checked(Answering(), Unknown(), "bf16")
    assert Sums().errors([np.zeros((2, 8))], [np.zeros((2, 7))]) == {"off": float("inf")}, "other shapes"


def test_a_precision_without_limits_is_refused() -> None:
    with pytest.raises(WrongAnswersError, match="is not served in fp16"):
        checked(Answering(), precision="fp16")


# --- what int8 costs --------------------------------------------------------------------------------------------------

HELD_OUT = np.arange(20 * 3, dtype=np.uint8).reshape(20, *SHAPE)


class Images:
    def __init__(self, key: str = "images", count: int = 20) -> None:
        self.key, self.count = key, count

    def held_out(self) -> HeldOut | None:
        return HeldOut(HELD_OUT, (cast(Placement, None),) * 20) if self.count else None


def off_on(rows: range) -> Any:
    """Only on these held-out images; the probes are the first five of them, and their sums stay."""
    wrong = sums(HELD_OUT)[list(rows)]
    return Answering(lambda outputs: np.where(np.isin(outputs, wrong), outputs + 1000, outputs))


@pytest.mark.parametrize(
    ("wrong", "loss"),
    [
        (range(6, 6), 0.0),
        (range(6, 7), 0.05),
        (range(6, 8), 0.1),
        (range(6, 9), None),
        (range(6, 20), None),
    ],
)
def test_a_loss_is_what_float32_has_more_and_counts_in_one_direction(wrong: range, loss: float | None) -> None:
    images: Any = Images()
    if loss is None:
        with pytest.raises(WrongAnswersError, match=f"int8 loses {5 * len(wrong)}.0 points of right .* and 12 are"):
            checked(off_on(wrong), calibration=images)
    else:
        assert checked(off_on(wrong), calibration=images) == {"off": 0, "right_loss": pytest.approx(loss)}


def test_an_accuracy_that_is_no_number_is_none_at_all() -> None:
    model, images = Sums(judge=Share([0.9, float("nan")])), cast(Any, Images())
    with pytest.raises(WrongAnswersError, match=r"loses 90\.0 points"):
        checked(Answering(), model, calibration=images)


def test_nothing_is_lost_where_nothing_can_be_measured_and_all_may_be_where_nobody_can_measure() -> None:
    assert checked(Answering(), calibration=Images(count=0)) == {"off": 0}
    assert checked(off_on(range(6, 20)), precision="bf16", calibration=Images()) == {"off": 0}
    with pytest.raises(WrongAnswersError, match="what int8 costs is unknown"):
        checked(Answering(), Sums(), calibration=cast(Any, Images()))


def test_calibration_takes_a_folder_of_images_broken_ones_aside(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="There is no image in"):
        Calibration(Sums(), str(tmp_path))
    with pytest.raises(CalibrationError, match="--calibrate DIR"):
        Calibration(Sums("random"), "")
    (tmp_path / "broken.jpg").write_bytes(b"\xff\xd8 nothing")
    with pytest.raises(CalibrationError, match="None of the images"):
        Calibration(Sums(), str(tmp_path))()
    for path in IMAGES.glob("*.jpg"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "notes.txt").write_text("no image")
    calibration = Calibration(Sums(), str(tmp_path))
    taken = calibration()
    assert taken.shape == (6, *SHAPE)
    assert calibration.held_out() is None, "of so few"
    np.testing.assert_array_equal(taken, decoded_by_host(Sums()))


@pytest.mark.parametrize("files", [1, 7, 8, 200, 300, 5000])
def test_no_image_is_both_calibrated_on_and_held_out(tmp_path: Path, files: int) -> None:
    for index in range(files):
        (tmp_path / f"{index:04}.jpg").touch()
    calibration = Calibration(Sums(), str(tmp_path))
    assert not set(calibration._files) & set(calibration._held_out)
    assert 0 < len(calibration._files) <= 128
    assert (min(files // 4, 64) if files > 7 else 0) <= len(calibration._held_out) <= (256 if files > 7 else 0)
    if files > 384:  # They are from all over the folder.
        for part in (calibration._files, calibration._held_out):
            assert max(int(a.stem) - int(b.stem) for b, a in pairwise(part)) < files / 32


# --- what is kept from start to start ---------------------------------------------------------------------------------

CHANGES = ("nothing", "torch", "cpu", "weights", "engine", "version", "images", "no key")


@pytest.mark.parametrize("changed", CHANGES)
def test_a_verdict_is_kept_for_the_same_network_the_same_images_and_the_same_software(
    changed: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "" if changed == "no key" else "a"
    monkeypatch.setattr("app.precision.gate.weights_key", lambda model: key)
    model, cache = Sums(), EngineCache(tmp_path)

    def losses(images: str = "images", engine: str = "one", version: str = "1") -> int:
        asked = Share([0.9, 0.9])
        vars(model)["judge"], before = asked, vars(model)["made"]
        gate = Gate(model, PROBES, cast(Any, Images(key=images)), cache)
        assert gate.check(Answering(), LoadReport(engine, "int8", version))["right_loss"] == 0
        assert vars(model)["made"] > before or asked.known, "a measured loss has a measured reference"
        return len(asked.known)

    assert losses() == 0
    if changed == "torch":
        monkeypatch.setattr(torch, "__version__", "99.0")
    elif changed == "cpu":
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "SVE9")
    elif changed == "weights":
        key = "b"
    more = {changed: "other"} if changed in ("engine", "version", "images") else {}
    made = vars(model)["made"]
    assert losses(**more) == (2 if changed == "nothing" else 0)
    assert (vars(model)["made"] == made) == (changed == "nothing")


# --- decoding on a device ---------------------------------------------------------------------------------------------


ONE_GREY_LEVEL = np.array([0, 0, 1], np.uint8)


def test_answers_to_what_a_device_decodes_are_those_of_the_host_within_the_coarsest_limits() -> None:
    executable, model = Answering(), Sums()
    assert errors_of_decoding(model, executable, PROBES, PROBES) == {"off": 0}
    with pytest.raises(WrongAnswersError, match=r"the error off is 1, and 0\.1 is allowed"):
        errors_of_decoding(model, executable, PROBES, PROBES + ONE_GREY_LEVEL)
    small = Answering(lambda outputs: outputs / 12)  # A grey level is no more than int8's limit then.
    assert errors_of_decoding(model, small, PROBES, PROBES + ONE_GREY_LEVEL) == {"off": 0.083}


# --- who serves instead -----------------------------------------------------------------------------------------------


class Doubling(Engine):
    """Makes what it is given twice as bright, and answers with it."""

    def __init__(self, name: str, precisions: tuple[str, ...], tried: list[Any]) -> None:
        self.name, self.precisions, self.tried = name, precisions, tried

    def compile(self, network: Any, device: str, precision: str, batch_sizes: Any, options: Any) -> Executable:
        network.scale.data *= 2
        outer = self

        class Made(Executable):
            def _execute(self, pixels: Any) -> tuple[Any, ...]:
                return tuple(each.numpy() for each in network(torch.from_numpy(pixels)))

            def _release(self) -> None:
                outer.tried.append((outer.name, precision, "closed"))

        self.tried.append((self.name, precision))
        return Made("cpu:0", batch_sizes, network.input_shape)


def served(engines: Sequence[Engine], refuses: Any, precisions: Sequence[str] = ("bf16", "fp32")) -> Any:
    options = CompileOptions(gate=refuses)
    return compile_first(engines, cast(Any, Brightness()), "cpu:0", precisions, (1,), options=options)


def test_who_is_refused_leaves_nothing_behind_and_the_next_has_the_network_as_it_was() -> None:
    tried: list[Any] = []
    engines = [Doubling("one", ("bf16", "fp32"), tried), Doubling("two", ("fp32", "bf16"), tried)]

    def refuses(executable: Executable, report: LoadReport) -> dict[str, float]:
        if (report.engine, report.precision) != ("two", "fp32"):
            raise WrongAnswersError(f"{report.engine} is wrong in {report.precision}")
        return {"off": 0.5}

    executable, report = served(engines, refuses)
    orders = [("one", "bf16"), ("two", "bf16"), ("one", "fp32"), ("two", "fp32")]
    assert tried == [each for order in orders for each in (order, (*order, "closed"))][:-1]
    assert (report.engine, report.precision, report.measures) == ("two", "fp32", {"off": 0.5})
    assert report.rejected == tuple(orders[:3])
    assert report.refusals == {
        "one": "one is wrong in bf16",
        "two": "two is wrong in bf16",
        "one fp32": "one is wrong in fp32",
    }
    grey = np.full((1, *Brightness.input_shape), 100, np.uint8)
    assert executable.run(grey)[0] == [200], "doubled once"


def test_who_cannot_compute_is_no_wrong_answer_and_who_has_lost_its_device_ends_the_walk() -> None:
    tried: list[Any] = []
    engines = [Doubling("one", ("bf16",), tried), Doubling("two", ("bf16",), tried)]
    faults: list[Exception] = [BackendError("no kernel")]

    def fails(executable: Executable, report: LoadReport) -> dict[str, float]:
        if faults:
            raise faults.pop()
        return {}

    report = served(engines, fails, ("bf16",)).report
    assert (report.engine, report.rejected, report.refusals) == ("two", (), {"one": "no kernel"})
    tried.clear()
    faults.append(DeviceLostError("gone"))
    with pytest.raises(DeviceLostError):
        served(engines, fails, ("bf16",))
    assert tried == [("one", "bf16"), ("one", "bf16", "closed")]


# --- the measures of any tensors --------------------------------------------------------------------------------------

RAMP = np.linspace(-1, 1, 40, dtype=np.float32).reshape(4, 10)


def changed_at(row: int, value: float) -> Any:
    array = RAMP.copy()
    array[row, 3] = value
    return array


@pytest.mark.parametrize(
    ("expected", "given", "measure", "least"),
    [
        (RAMP, RAMP * np.float32(1.1), "scale", 0.09),
        (RAMP, RAMP * np.float32(0.9), "scale", 0.09),
        (RAMP, changed_at(1, 5), "error", 5),  # One number of forty, in deviations.
        (RAMP, -RAMP, "cosine", 1.99),
        (RAMP, np.concatenate([-RAMP[:1], RAMP[1:]]), "cosine", 1.99),  # One item of four.
        (RAMP, changed_at(1, np.nan), "different", 1),
        (changed_at(1, np.nan), RAMP, "different", 1),
        (changed_at(1, np.inf), changed_at(1, -np.inf), "different", 1),
        (np.arange(8), np.arange(8)[::-1].copy(), "different", 1),
        (np.arange(8), np.array([0, 1, 2, 3, 4, 5, 6, 0]), "different", 0.125),
    ],
)
@pytest.mark.parametrize("at", [0, 1])
def test_the_worst_of_all_outputs_is_measured_in_both_directions(
    expected: Any, given: Any, measure: str, least: float, at: int
) -> None:
    others = [RAMP, RAMP]
    both = [[*others[:at], each, *others[at:]] for each in (expected, given)]
    found = of_tensors(*both)
    assert least <= found[measure] <= 2 * least + 1
    assert set(of_tensors(both[0], both[0]).values()) == {0} or max(of_tensors(both[0], both[0]).values()) < 1e-12


# --- a file that nothing serves as well as the limits want ------------------------------------------------------------


def own(
    error: float, weights: str = "best.onnx", device: str = "cpu:0", engine: str = "eager", precision: str = "fp32"
) -> Any:
    """Check a file of somebody's own whose answers are off by `error`; return the verdict."""
    executable = Answering(lambda outputs: outputs + np.float32(error))
    executable.device = device
    return Gate(Sums(weights), PROBES).check(executable, LoadReport(engine, precision))


@pytest.mark.parametrize(
    ("device", "error", "engine", "file"),
    [
        ("cpu:0", 0.7, "eager", "best.onnx"),
        ("cuda:0", 0.09, "eager", "best.onnx"),
        ("cpu:0", 0.7, "openvino", "best.xml"),
    ],
)
def test_a_persons_own_file_is_served_by_its_reference_with_a_warning_and_the_figures(
    device: str, error: float, engine: str, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert own(error, file, device, engine) == {"off": error}
    assert f"{file} is served by {engine} in float32 though" in caplog.text
    assert f"the error off is {error:g}, and 0 is allowed in fp32" in caplog.text
    assert str({"off": error}) in caplog.text


@pytest.mark.parametrize(
    "other",
    [{"engine": "openvino"}, {"precision": "bf16"}, {"device": "cuda:0"}, {"weights": "official"}],
)
def test_anything_else_that_is_wrong_is_refused(other: dict[str, str]) -> None:
    with pytest.raises(WrongAnswersError, match="the error off is"):
        own(0.7, **other)
