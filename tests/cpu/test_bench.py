"""`anychip bench` on a device: the sweep, its comparison, and the profile."""

from __future__ import annotations

import json

import pytest
import torch

from app.cli import main

ARGUMENTS = ("--weights", "random", "--device", "cpu", "--engines", "eager", "--precisions", "fp32")


def bench(capsys, *arguments):
    code = main(["bench", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_sweep_has_a_row_for_each_size_in_its_file_and_its_picture(tmp_path, capsys):
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
    assert json.loads(output.read_text())["results"] == found["results"]
    assert all(text in plot.read_text() for text in ("resnet18: throughput", "eager fp32, p99", "batch size"))


def test_a_profile_is_a_trace_with_the_stages(tmp_path, capsys):
    trace = tmp_path / "trace.json"
    arguments = ("--weights", "random", "--device", "cpu", "--engine", "eager", "--precision", "fp32")
    sizes = ("--batches", "2", "--batch-size", "2", "--output", str(trace))
    assert main(["profile", "resnet18", *arguments, *sizes, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(each["share"] for each in found["stages"]) == pytest.approx(1, abs=0.01)
    names = [event.get("name") for event in json.loads(trace.read_text())["traceEvents"]]
    assert names.count("anychip: infer") >= 2
    assert "anychip: decode" in names
