"""Commands of a first hour: each starts, and says what it should."""

from __future__ import annotations

import re
import socket
import tomllib

from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_version_is_said(anychip, empty):
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version
    assert anychip.run("--version", cwd=empty) == f"anychip {version[1]}\n"


def test_devices_says_of_every_kind_whether_it_is_here(anychip, empty):
    said = anychip.run("devices", cwd=empty)
    assert re.search(r"^PASS +cpu:0 ", said, re.MULTILINE)
    kinds = dict(re.findall(r"^(PASS|FAIL|not here) +(\w+)", said, re.MULTILINE)[::-1])
    assert {"npu", "cuda", "mlu"} <= {kind for _, kind in re.findall(r"^(PASS|FAIL|not here) +(\w+)", said, re.MULTILINE)}
    assert kinds


def test_doctor_reads_a_model_of_ones_own(anychip, empty):
    said = anychip.run("doctor", cwd=empty)
    assert re.search(r"^PASS +packages ", said, re.MULTILINE)
    assert re.search(r"^PASS +devices +cpu:0 ", said, re.MULTILINE)
    assert "FAIL" not in said


def test_bench_measures_a_file(anychip, empty, library_files):
    said = anychip.run("bench", f"mine={library_files.folder}/mine.onnx", "--sizes", "1", "--device", "cpu", cwd=empty)
    row = re.search(r"^(\w+) +(\w+) +1 +[\d.]+ +[\d.]+ +[\d.]+ +[\d.]+", said, re.MULTILINE)
    assert row, said


def test_validate_compares_a_file_with_float32(anychip, empty, library_files):
    said = anychip.run("validate", f"{library_files.folder}/mine.onnx", "--device", "cpu", "--engine", "openvino", cwd=empty)
    assert "against float32 on the CPU" in said
    assert re.search(r"^\w+ +fp32 +agrees ", said, re.MULTILINE)


def test_a_port_in_use_is_said(anychip, empty):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = anychip.run("serve", "--weights", "random", "--port", str(port), cwd=empty, status=1)
    assert "Traceback" not in said
    assert re.search(rf"anychip: .*{port}.* in use", said)
