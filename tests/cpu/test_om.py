"""Ascend without torch_npu, over doubles of pyACL and atc (tests/support/cann): offline models."""

from __future__ import annotations

import gc
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from anychip_ascend.backend import BY_PYACL
from anychip_ascend.om import OmProgram
from anychip_tools.verify.contract import SmallNetwork, small_images
from app.precision.gate import Gate, on_cpu
from backends import (
    BackendError,
    CompileOptions,
    DeviceLostError,
    EngineRefusedError,
    OutOfDeviceMemoryError,
)
from models import WeightsError, open_model, parse_spec
from tests.support.cann_double import Cann
from tests.support.exports_of_networks import written

PAGE = Path(__file__).parents[2] / "docs/install/ascend.md"
# acl_base.h, error_codes/rt_error_codes.h and ge_error_codes.h: all of them, in ranges.
ACL = (*range(100000, 100046), 107022, *range(148046, 148054), *range(200000, 200008), 300000, *range(500000, 500006))
RUNTIME = (*range(107000, 107019), *range(207000, 207016), *range(507000, 507037), *range(507053, 507058), 507899)
RUNTIME = (*RUNTIME, 507900, 507901, 507904)
GRAPH_ENGINE = (*range(145000, 145023), *range(245000, 245003), *range(545000, 545010))
TOO_LITTLE_MEMORY = {207001, 200000, 245000, 245002}
LOST = {code for code in RUNTIME if code >= 507000} | {107022, 500004}


def loaded(cann: Cann, sizes: tuple[int, ...] = (1, 2), precision: str = "fp16", **options: Any) -> Any:
    return cann.backend.load(SmallNetwork(), "npu:0", "auto", precision, sizes, options=CompileOptions(**options))


def right(answers: Any, pixels: Any) -> bool:
    scores, classes = on_cpu(SmallNetwork(), pixels)
    return bool(np.allclose(answers[0], scores, atol=1e-2) and (answers[1] == classes).all())


def test_cards_are_found_by_pyacl_without_torch_npu(cann: Cann) -> None:
    assert cann.backend.facts is BY_PYACL
    assert [(each.id, each.name, each.auto_precision) for each in cann.backend.devices()] == [
        ("npu:0", "Ascend310P3", "fp16"),
        ("npu:1", "Ascend310P3", "fp16"),
    ]


def test_batches_of_every_gear_are_answered_and_two_are_under_way(cann: Cann) -> None:
    executable, report = loaded(cann, (1, 2, 4))
    assert (report.engine, report.precision, executable.depth) == ("om", "fp16", 2)
    buffers = [executable.buffer(4) for _ in range(2)]
    under_way: list[Any] = []
    for number in range(7):
        size = (4, 1, 2)[number % 3]
        pixels = buffers[number % 2]
        pixels[:size] = small_images(size, number)
        under_way.append((executable.start(pixels[:size]), small_images(size, number)))
        if len(under_way) == 2:
            started, given = under_way.pop(0)
            assert right(started.outputs(), given)
    executable.close()


def test_closing_gives_everything_back(cann: Cann) -> None:
    for _ in range(5):
        executable, _ = loaded(cann)
        pixels = executable.buffer(2)
        executable.run(pixels)
        assert cann.backend.memory("npu:0").allocated > 0
        executable.close()
        executable.close()
        assert pixels.sum() == 0  # Its memory lasts as long as it does.
        del executable, pixels
        gc.collect()
        assert cann.acl.leftovers() == {"device": 0, "host": 0}
        assert cann.backend.memory("npu:0").allocated == 0


def test_a_network_is_compiled_once_and_then_comes_from_the_cache(
    cann: Cann, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: Any = {"cache_dir": tmp_path, "key": "small"}
    loaded(cann, **kept)[0].close()
    monkeypatch.setenv("ATC_DOUBLE_REFUSES", "there is nothing to compile")
    executable, report = loaded(cann, quick=True, **kept)
    assert right(executable.run(small_images()), small_images())
    assert not report.staged
    executable.close()
    others: Any = ({"sizes": (1, 4)}, {"precision": "fp32"})
    for other in others:
        with pytest.raises(EngineRefusedError, match="E19010: there is nothing to compile"):
            loaded(cann, **kept, **other)
    cann.acl.knobs["soc"] = "Ascend310B4"
    with pytest.raises(EngineRefusedError, match="for Ascend310B4"):
        loaded(cann, **kept)


def test_atc_is_given_what_huaweis_pages_say(cann: Cann, tmp_path: Path) -> None:
    loaded(cann, (1, 2, 8), cache_dir=tmp_path, key="small")[0].close()
    [file] = tmp_path.rglob("network.om")
    about = json.loads(file.read_bytes().partition(b"\n")[0])
    options = {name: value for name, value in about["options"].items() if name not in ("model", "output")}
    assert Path(options.pop("insert_op_conf")).name == "aipp.cfg"
    assert options == {
        "framework": "5",
        "soc_version": "Ascend310P3",
        "input_format": "NCHW",
        "input_shape": "pixels:-1,3,8,6",
        "precision_mode": "must_keep_origin_dtype",
        "dynamic_batch_size": "1,2,8",
    }
    assert about["inputs"] == [{"name": "pixels", "dims": [-1, 8, 6, 3], "dtype": "uint8"}]


@pytest.fixture
def running(cann: Cann) -> Iterator[Any]:
    executable, _ = loaded(cann)
    yield executable
    cann.acl.knobs["fail"] = {}
    executable.close()


def test_each_of_acls_codes_is_too_little_memory_a_lost_card_or_an_error_of_the_batch(cann: Cann, running: Any) -> None:
    for code in (*ACL, *RUNTIME, *GRAPH_ENGINE):
        cann.acl.knobs["fail"] = {"mdl.execute_async": code}
        wanted: type[Exception] = BackendError
        if code in TOO_LITTLE_MEMORY:
            wanted = OutOfDeviceMemoryError
        elif code in LOST:
            wanted = DeviceLostError
        with pytest.raises(BackendError, match=f"error code is {code}") as caught:
            running.run(small_images())
        assert type(caught.value) is wanted, code
        cann.acl.knobs["fail"] = {}
        assert right(running.run(small_images()), small_images())


def test_a_fault_on_the_stream_shows_when_it_is_waited_for(cann: Cann, running: Any) -> None:
    cann.acl.knobs["fail"] = {"stream": 507015}
    started = running.start(small_images())
    with pytest.raises(DeviceLostError, match="507015"):
        started.outputs()


def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded(cann: Cann) -> None:
    cann.acl.knobs["memory_mb"] = 0
    with pytest.raises(OutOfDeviceMemoryError, match="the model takes 0 MiB, and 0 MiB are free"):
        loaded(cann)
    gc.collect()  # What a failed call of an earlier test holds in a circle.
    assert cann.acl.leftovers() == {"device": 0, "host": 0}


def test_what_fails_while_it_is_loaded_leaves_nothing_behind(cann: Cann) -> None:
    for name in ("rt.create_stream", "rt.malloc_host", "mdl.get_desc"):
        cann.acl.knobs["fail"] = {name: 207001}
        with pytest.raises(OutOfDeviceMemoryError):
            loaded(cann)
        cann.acl.knobs["fail"] = {}
        gc.collect()
        found = cann.acl.leftovers()
        assert (found["device"], found.get("_Loaded", 0)) == (0, 0)


def export(network: nn.Module, given: Any, file: Path, inputs: list[str], outputs: list[str], *, free: bool) -> None:
    """Write an ONNX file of opset 17; if `free`, the first axis of all tensors is."""
    axes = {name: {0: "n"} for name in inputs + outputs} if free else None
    names: dict[str, Any] = {"input_names": inputs, "output_names": outputs, "dynamic_axes": axes}
    written(file, network, given, **names)


class Sum(nn.Module):
    def forward(self, left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return left * 2 + right, left.sum(1)


@pytest.mark.parametrize("batched", [True, False])
def test_an_onnx_file_of_tensors_is_compiled_as_it_is(cann: Cann, tmp_path: Path, batched: bool) -> None:
    given = (torch.zeros(2, 3), torch.zeros(2, 3))
    export(Sum(), given, tmp_path / "sum.onnx", ["left", "right"], ["sum", "total"], free=batched)
    model = open_model(parse_spec(str(tmp_path / "sum.onnx")), tmp_path)
    network = model.network()
    sizes = (1, 4) if batched else (1,)
    executable, report = cann.backend.load(network, "npu:0", "auto", "auto", sizes)
    assert (report.engine, report.precision) == ("om", "fp16")
    items = np.random.default_rng(0).random((sizes[-1], model.input_shape[0] // 4), np.float32).view(np.uint8)
    for ours, theirs in zip(executable.run(items), network(torch.from_numpy(items)), strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-6)
    executable.close()


STAGED = OmProgram._staged
FAULTS: dict[str, Any] = {
    "shared by batches": lambda own, _, array, *place: STAGED(own, min(own._slots, key=id), array, 0, place[1]),
    "not pinned": lambda own, slot, array, *_: array,
}
"""Memory from which a card must not copy floats."""


@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_a_card_reads_late_what_it_is_given(cann: Cann, tmp_path: Path, monkeypatch: Any, fault: str) -> None:
    monkeypatch.setattr(OmProgram, "_staged", FAULTS.get(fault, STAGED))
    export(nn.Linear(3, 2), (torch.zeros(2, 3),), tmp_path / "linear.onnx", ["given"], ["sums"], free=True)
    network = open_model(parse_spec(str(tmp_path / "linear.onnx")), tmp_path).network()
    executable, _ = cann.backend.load(network, "npu:0", "auto", "auto", (4,))
    batches = np.random.default_rng(0).random((2, 4, 16), np.float32).view(np.uint8)
    under_way = [executable.start(items) for items in batches]
    answers = [started.outputs()[0] for started in under_way]
    expected = [network(torch.from_numpy(items))[0].numpy() for items in batches]
    assert np.allclose(answers, expected) == (not fault)
    executable.close()


class Shades(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features, self.classes = nn.Conv2d(3, 4, 3), nn.Linear(4, 3)

    def forward(self, planes: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.classes(self.features(planes).relu().mean((2, 3))).softmax(-1)
        return answer


@pytest.mark.parametrize("gears", ["", "1,2"])
def test_the_folder_that_ultralytics_exports_is_served_as_it_is(cann: Cann, tmp_path: Path, gears: str) -> None:
    torch.manual_seed(0)
    network, folder = Shades().eval(), tmp_path / "shades_ascend_model"
    folder.mkdir()
    export(network, (torch.zeros(2, 3, 32, 32),), tmp_path / "shades.onnx", ["images"], ["scores"], free=True)
    command = next(line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("atc "))
    for theirs, ours in (("best", "shades"), ("640", "32"), ("1,2,4,8", "1,2")):
        command = command.replace(theirs, ours)
    if not gears:
        command = command.replace(" --dynamic_batch_size=1,2", "").replace("images:-1", "images:1")
    subprocess.run(command.split(), check=True, capture_output=True, cwd=tmp_path)
    (folder / "metadata.yaml").write_text(
        "description: Ultralytics YOLOv8n-cls model\nauthor: Ultralytics\ntask: classify\nbatch: 1\nimgsz: [32, 32]\n"
        "version: 8.4.0\nnames: {0: dark, 1: grey, 2: light}\n"
    )
    model = open_model(parse_spec(str(folder)), tmp_path)
    assert (model.name, model.labels, model.architecture) == ("shades", ("dark", "grey", "light"), "om")
    sizes = (1, 2) if gears else (1,)
    assert model.batch_sizes((1, 2)) == sizes
    pixels = np.random.default_rng(0).integers(0, 256, (8, 32, 32, 3), dtype=np.uint8)
    checked = Gate(model, pixels).check
    executable, report = cann.backend.load(
        model.network(), "npu:0", "auto", "auto", sizes, options=CompileOptions(gate=checked)
    )
    assert (report.engine, report.precision) == ("om", "fp16")
    given = pixels[: sizes[-1]]
    with torch.inference_mode():
        expected = network(torch.from_numpy(given).permute(0, 3, 1, 2) / 255).log().numpy()
    np.testing.assert_allclose(executable.run(given)[0], expected, atol=1e-3)
    executable.close()


def test_a_file_that_is_no_model_is_refused_by_its_name(cann: Cann, tmp_path: Path) -> None:
    (tmp_path / "broken.om").write_bytes(b"IMOD\0")
    with pytest.raises(WeightsError, match=r"broken\.om cannot be loaded: .*145006"):
        open_model(parse_spec(str(tmp_path / "broken.om")), tmp_path)
