"""Which models share workers, and what follows of a worker that is broken."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.config import Settings
from app.fleet.fleet import Readiness
from app.fleet.plans import CONFINED, memories, sharing_workers, worker_plans
from app.link import ModelState
from app.processes.place import PlaceStatus
from app.worker import load
from app.worker.messages import PROGRAMS, WorkerPlan
from backends import Choice, open_backend
from backends.contract.backend import Device
from models import Model
from models.contract.tensors import TensorSpec
from models.exports.exported import ExportedModel

INPUT = TensorSpec("x", "FP32", (4,))


def model(name: str, file: str) -> Model:
    weights = f"/models/{file}"
    made = ExportedModel(name, file.split(".")[1], (), file, weights, (16,), (INPUT,), (INPUT,), True, (1, 8))
    return replace(made, weights_sha256=f"digest of {file}")


MODELS = [model("ours", "a.pth"), model("first", "b.pt2"), model("other", "c.pth"), model("second", "d.ts")]


def choice(device: str) -> Any:
    backend = SimpleNamespace(facts=SimpleNamespace(device_type=device))
    return SimpleNamespace(backend=backend)


def test_on_a_cpu_each_program_is_apart() -> None:
    assert sharing_workers(choice("cpu"), MODELS) == [(0, 2), (1,), (3,)]
    assert sharing_workers(choice("cpu"), MODELS[1:2]) == [(0,)]
    assert sharing_workers(choice("cuda"), MODELS) == [(0, 1, 2, 3)]
    assert memories(choice("cpu"), MODELS) == [0, 1, 0, 2]


def plans_of(served: list[Model], **given: Any) -> list[WorkerPlan]:
    device = Device("cpu:0", "cpu", 0, "fp32")
    chosen = Choice(open_backend(device), ("cpu:0",), found=(device,))
    return [plan for _, plan in worker_plans(Settings(**given), chosen, served, {})]


def test_a_program_is_told_of_itself_alone(monkeypatch: Any) -> None:
    monkeypatch.setenv("DATABASE_PASSWORD", "hunter2")
    plans = plans_of(MODELS, workers_per_device=2)
    assert [plan.memory for plan in plans] == [0, 0, 1, 1, 2, 2]
    for plan in plans:
        served = [each is not None for each in plan.models]
        assert [index for index, each in enumerate(served) if each] == list(plan.serves or ())
        assert [each.is_gated for each in plan.plans] == served
        assert plan.confined == (plan.memory > 0)
        if plan.confined:
            assert "DATABASE_PASSWORD" not in plan.environment
    # What one keeps no other may write or read.
    kept = [plan.cache_dir for plan in plans[::2]]
    assert [str(each.relative_to(kept[0])) for each in kept[1:] if each and kept[0]] == [
        f"{PROGRAMS}/digest of {name}" for name in ("b.pt2", "d.ts")
    ]


@pytest.mark.parametrize(
    ("name", "file", "confined"),
    [
        ("onnx", "c.onnx", True),
        ("openvino", "d.xml", True),
        ("timm/resnet18", "e.safetensors", True),
        ("transformers/ViTModel", "f.safetensors", True),
        ("resnet18", "g.safetensors", False),
        ("timm", "h.pth", False),  # Of ours, whatever its name.
    ],
)
def test_what_libraries_of_others_read_is_confined_with_all_that_shares_its_worker(
    name: str, file: str, confined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_PASSWORD", "hunter2")
    monkeypatch.setenv("KMP_BLOCKTIME", "0")
    [plan] = plans_of([MODELS[0], replace(model("theirs", file), architecture=name)])
    assert plan.confined == confined
    if confined:
        cache = plan.cache_dir
        assert cache is not None
        assert cache.name == CONFINED
        assert "DATABASE_PASSWORD" not in plan.environment
        assert plan.environment["HOME"] == plan.environment["TMPDIR"] == str(cache)
        # As in another worker: what it computes with is settled by these.
        assert plan.environment["KMP_BLOCKTIME"] == "0"
        assert "ONEDNN_PRIMITIVE_CACHE_CAPACITY" in plan.environment


def test_a_model_whose_own_worker_is_broken_is_not_there_and_the_others_are() -> None:
    served: Any = {
        name: SimpleNamespace(names=(name,), index=index, unloaded=False, model=SimpleNamespace(name=name))
        for index, name in enumerate(("ours", "evil"))
    }
    for each in served.values():
        each.shown = each
    plans = [WorkerPlan((), Device("cpu:0", "cpu", 0, "fp32"), serves=(index,)) for index in range(2)]
    replicas: Any = [
        SimpleNamespace(device="cpu:0", status=PlaceStatus.STARTING, reason="it is loading", plan=plans[0]),
        SimpleNamespace(device="cpu:0", status=PlaceStatus.BROKEN, reason="it died", plan=plans[1]),
    ]
    readiness = Readiness(served, SimpleNamespace(serving={"ours": set(), "evil": set()}), replicas)  # type: ignore[arg-type]
    assert (readiness.state("ours"), readiness.state("evil")) == (ModelState.STARTING, ModelState.UNAVAILABLE)
    assert "it died" in readiness.reason("evil")
    assert "it died" not in readiness.reason("ours")


def test_what_programs_keep_is_bounded_and_stops_nobody(tmp_path: Path) -> None:
    """One has made a thousand folders within each other: a walk through them recurses as deep."""
    deep = tmp_path / "deep"
    deep.mkdir()
    last = os.open(deep, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(1100):
        os.mkdir("a", dir_fd=last)
        within = os.open("a", os.O_RDONLY | os.O_DIRECTORY, dir_fd=last)
        os.close(last)
        last = within
    os.close(last)
    for number in range(load.MOST_PROGRAMS + 2):
        (tmp_path / f"{number}").mkdir()
        os.utime(tmp_path / f"{number}", (number + 1, number + 1))
    os.utime(deep, (0, 0))
    load._forget_programs(tmp_path / "0")
    left = {each.name for each in tmp_path.iterdir()} - {"deep"}
    assert left == {"0", *(f"{number}" for number in range(3, load.MOST_PROGRAMS + 2))}
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10_000)
    shutil.rmtree(deep, ignore_errors=True)
    sys.setrecursionlimit(limit)
