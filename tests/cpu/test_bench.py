"""`anychip bench` on a device: the sweep, its agreement with PyTorch's own timer, comparison, decoding, profile."""

from __future__ import annotations

import json
import statistics

import pytest
import torch
from torch.utils.benchmark import Timer

from app.cli import main

ARGUMENTS = ("--weights", "random", "--device", "cpu", "--engines", "eager", "--precisions", "fp32")


def bench(capsys, *arguments):
    code = main(["bench", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_sweep_has_a_row_for_each_size_and_can_be_compared_with_itself(tmp_path, capsys):
    output, plot = tmp_path / "a.json", tmp_path / "a.svg"
    more = ("--sizes", "1,2", "--seconds", "0.2", "--output", str(output), "--plot", str(plot))
    code, found = bench(capsys, "resnet18", *ARGUMENTS, *more)
    assert code == 0
    assert [row["batch_size"] for row in found["results"]] == [1, 2]
    for row in found["results"]:
        assert 0 < row["p50_ms"] <= row["p90_ms"] <= row["p99_ms"]
        assert row["images_per_s"] > 0
        assert row["resident_bytes"] > 1 << 20
        assert row["allocated_bytes"] is row["reserved_mib"] is None  # The processor has no memory of its own.
    assert found["environment"]["torch"] == torch.__version__
    assert all(text in plot.read_text() for text in ("resnet18: throughput", "eager fp32, p99", "batch size"))
    code, compared = bench(capsys, "--compare", str(output), str(output))
    assert code == 0
    assert {each["better"] for each in compared["changes"]} == {1.0}
    slower = json.loads(output.read_text())
    for row in slower["results"]:
        row["images_per_s"] /= 2
    (tmp_path / "b.json").write_text(json.dumps(slower))
    code, compared = bench(capsys, "--compare", str(output), str(tmp_path / "b.json"))
    assert code == 1
    assert [each["figure"] for each in compared["changes"] if each["slower"]] == ["images_per_s"] * 2


def test_an_engine_that_refuses_is_listed_and_nothing_at_all_is_an_error(capsys):
    arguments = ("--weights", "random", "--device", "cpu", "--engines", "eager", "--precisions", "fp16")
    code, found = bench(capsys, "resnet18", *arguments, "--sizes", "1", "--seconds", "0.1")
    assert (code, found["results"]) == (1, [])
    assert "fp16" in found["refusals"]["eager fp16"]


@pytest.mark.nightly  # It wants the whole machine, and rather long.
def test_the_sweep_agrees_with_pytorch_s_own_timer(capsys, tmp_path):
    from backends.vendors.cpu import CpuBackend
    from models import open_model, parse_spec

    code, found = bench(capsys, "resnet18", *ARGUMENTS, "--sizes", "4", "--seconds", "4")
    assert code == 0
    model = open_model(parse_spec("resnet18:random"), tmp_path)
    executable, _ = CpuBackend().load(model.network(), "cpu:0", "eager", "fp32", (4,))
    pixels = executable.buffer(4)
    timer = Timer("run(pixels)", globals={"run": executable.run, "pixels": pixels}, num_threads=torch.get_num_threads())
    times_s = timer.blocked_autorange(min_run_time=4).times
    assert found["results"][0]["p50_ms"] == pytest.approx(statistics.median(times_s) * 1e3, rel=0.2)


def test_decoding_is_measured_alone(capsys):
    code, found = bench(capsys, "resnet18", "--weights", "random", "--decode", "--seconds", "0.1")
    assert code == 0
    assert found["results"][0]["threads"] == 1
    assert all(row["images_per_s"] > 0 for row in found["results"])


def test_a_profile_is_a_trace_with_the_stages(tmp_path, capsys):
    trace = tmp_path / "trace.json"
    arguments = ("--weights", "random", "--device", "cpu", "--engine", "eager", "--precision", "fp32")
    sizes = ("--batches", "2", "--batch-size", "2", "--output", str(trace))
    assert main(["profile", "resnet18", *arguments, *sizes, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(each["share"] for each in found["stages"]) == pytest.approx(1, abs=0.01)
    assert any("conv" in each["operator"] for each in found["operators"])
    names = [event.get("name") for event in json.loads(trace.read_text())["traceEvents"]]
    assert names.count("anychip: infer") >= 2
    assert "anychip: decode" in names
