"""What the gate has found is kept from start to start, for as long as nothing of what it depends on has changed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from app.precision import gate as gates
from app.precision.gate import Verdict, Verdicts, compile_options, what_computes
from app.worker import load as loading
from app.worker.messages import ModelPlan, WorkerPlan
from backends import (
    CompileOptions,
    Device,
    EngineCache,
    EngineRefusedError,
    Executable,
    LoadReport,
    NotConvertedError,
    WrongAnswersError,
)
from backends.engines import Engine, compile_first
from tests.support.sums import SHAPE, SIZES, Answering, Sums, more_by

PROBES = np.arange(18, dtype=np.uint8).reshape(6, *SHAPE)
DATE = "2026-11-27"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("app.precision.gate.weights_key", lambda model: model.key)
    monkeypatch.setattr("app.precision.gate.today", lambda: DATE)
    what_computes.cache_clear()
    yield
    what_computes.cache_clear()


class Compiler(Engine):
    """Makes executables with these errors, by precision; it counts how often it compiles."""

    def __init__(self, name: str, errors: dict[str, float]) -> None:
        self.name, self.errors, self.precisions, self.compiled = name, errors, tuple(errors), 0

    def compile(self, network: Any, device: str, precision: str, batch_sizes: Any, options: Any) -> Executable:
        self.compiled += 1
        return Answering(more_by(dict.fromkeys(batch_sizes, self.errors[precision])))


def options(folder: Path, model: Any = None, probes: Any = PROBES, device: Sequence[object] = ("one",)) -> Any:
    return compile_options(model or Sums(), probes, None, folder, device=device)


def judged(folder: Path, errors: dict[int, float], precision: str = "bf16", model: Any = None) -> Any:
    """Return the gate's measures, and how many images it took; each call is a start of its own."""
    executable = Answering(more_by(errors))
    measures = options(folder, model).gate(executable, LoadReport("one", precision))
    return measures, executable.images


def started(folder: Path, *engines: Engine) -> Any:
    network: Any = type("Network", (), {"input_shape": SHAPE})()
    given = options(folder)
    asked = CompileOptions(gate=given.gate, refused=given.refused, unfit=given.unfit)
    return compile_first(engines, network, "cpu:0", ("bf16", "fp32"), SIZES, options=asked).report


def test_what_was_refused_is_not_compiled_again_and_is_named_with_its_reason_and_the_date(tmp_path: Path) -> None:
    wrong, right = Compiler("wrong", {"bf16": 3.0}), Compiler("right", {"bf16": 0.04})
    first = started(tmp_path, wrong, right)
    second = started(tmp_path, wrong, right)
    assert (wrong.compiled, right.compiled) == (1, 2)
    assert first.engine == second.engine == "right"
    assert first.measures == second.measures == {"off": 0.04}
    assert first.rejected == second.rejected == (("wrong", "bf16"),)
    assert second.refusals == {"wrong": f"{first.refusals['wrong']} (found on {DATE})"}


class Unfit(Compiler):
    def compile(self, network: Any, device: str, precision: str, batch_sizes: Any, options: Any) -> Executable:
        self.compiled += 1
        raise NotConvertedError("it has loops")


def test_what_could_not_be_converted_is_not_tried_again_and_answers_nothing_wrong(tmp_path: Path) -> None:
    unfit, right = Unfit("unfit", {"bf16": 0.0}), Compiler("right", {"bf16": 0.0})
    first, second = started(tmp_path, unfit, right), started(tmp_path, unfit, right)
    assert unfit.compiled == 1
    assert first.rejected == second.rejected == ()
    assert second.refusals == {"unfit": f"it has loops (found on {DATE})"}


def test_no_earlier_verdict_alone_keeps_a_network_from_being_served(tmp_path: Path) -> None:
    engine = Compiler("one", {"bf16": 3.0})
    with pytest.raises(EngineRefusedError, match="the error off is 3"):
        started(tmp_path, engine)
    engine.errors["bf16"] = 0.0  # It was wrong by an accident that nothing of the verdict names.
    assert started(tmp_path, engine).engine == "one"
    assert started(tmp_path, engine).rejected == ()
    assert engine.compiled == 3, "the newer verdict holds"


def test_what_was_accepted_is_compared_again_with_one_batch_of_each_size(tmp_path: Path) -> None:
    assert judged(tmp_path, {4: 0.04}) == ({"off": 0.04}, 6 + 6 + 8)
    assert judged(tmp_path, {}) == ({"off": 0.04}, 1 + 2 + 4), "the largest errors that were ever found"
    with pytest.raises(WrongAnswersError, match="batches of 2 are not the network's"):
        judged(tmp_path, {2: 3.0})
    assert f"is allowed in bf16 (found on {DATE})" in options(tmp_path).refused("one", "bf16", SIZES).reason


def test_a_finished_file_is_compared_with_itself_as_at_its_first_start(tmp_path: Path) -> None:
    model = Sums(reference=False)
    assert judged(tmp_path, {}, model=model)[1] == judged(tmp_path, {}, model=model)[1] == 6 + 6 + 8


OTHERS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "files": {"model": Sums(key="b")},
    "files without a key": {"model": Sums(key="")},
    "probes": {"probes": PROBES + 1},
    "device": {"device": ("other",)},
}


@pytest.mark.parametrize("changed", [*OTHERS, "engine", "precision", "sizes", "a package", "our code", "the folder"])
def test_a_verdict_is_that_of_the_same_network_device_and_software(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(WrongAnswersError):
        judged(tmp_path / "one", {1: 3.0})
    asked: dict[str, Any] = {"engine": "one", "precision": "bf16", "sizes": SIZES}
    others: dict[str, Any] = {"engine": "two", "precision": "fp32", "sizes": (1,)}
    asked |= {changed: others[changed]} if changed in others else {}
    if changed == "a package":
        (tmp_path / "lib" / "openvino-9999.dist-info").mkdir(parents=True)
        monkeypatch.syspath_prepend(tmp_path / "lib")
    elif changed == "our code":
        monkeypatch.setattr(gates, "digest_of_sources", lambda package: "other")
    what_computes.cache_clear()
    folder = tmp_path / ("two" if changed == "the folder" else "one")
    found = options(folder, **OTHERS.get(changed, {})).refused(*asked.values())
    assert bool(found) == (changed == "nothing")


@pytest.mark.parametrize("how", ["cut short", "another's", "older", "forged"])
def test_a_verdict_that_cannot_be_read_is_found_again_and_written_anew(how: str, tmp_path: Path) -> None:
    engine = Compiler("wrong", {"bf16": 3.0})
    right = Compiler("right", {"bf16": 0.0})
    started(tmp_path, engine, right)
    kept = Verdicts(EngineCache(tmp_path / "engines"), {})
    for entry in [each for each in (tmp_path / "engines").iterdir() if (each / "verdict.msgpack").exists()]:
        file = entry / "verdict.msgpack"
        if how == "cut short":
            file.write_bytes(file.read_bytes()[:9])
        elif how == "another's":
            (tmp_path / "engines" / ".key").unlink(missing_ok=True)
        elif how == "forged":
            file.write_bytes(msgspec.msgpack.encode(Verdict(DATE, "no engine is ever right")))
        else:  # Signed, and of a form that is no longer read.
            (entry / "manifest.json").rename(tmp_path / "manifest.json")
            file.write_bytes(msgspec.msgpack.encode({"verdict": 1}))
            names = {"verdict.msgpack": hashlib.sha256(file.read_bytes()).hexdigest()}
            text = msgspec.json.encode({"files": names, "signature": kept.cache._signature(entry.name, names)})
            (entry / "manifest.json").write_bytes(text)
    for compiled in (2, 2):
        assert started(tmp_path, engine, right).rejected == (("wrong", "bf16"),)
        assert engine.compiled == compiled


def test_a_confined_process_has_looked_at_all_packages_before_it_is_confined(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def confine(load: WorkerPlan) -> None:
        order.append("confined")
        raise RuntimeError

    monkeypatch.setattr(loading, "what_computes", lambda: order.append("looked"))
    monkeypatch.setattr(loading, "_confine", confine)
    plans = (ModelPlan(None, "eager", "fp32", (1,)),)
    with pytest.raises(RuntimeError):
        loading.LoadedDevice(WorkerPlan(plans, Device("cpu:0", "a CPU", 1 << 30, "fp32"), confined=True))
    assert order == ["looked", "confined"]
