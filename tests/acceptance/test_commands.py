"""Commands of a first hour that README has no line for: each starts, and says what it should."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_version_is_said(anychip, empty):
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version
    assert anychip.run("--version", cwd=empty) == f"anychip {version[1]}\n"


def test_bench_measures_a_file(anychip, empty, library_files):
    model = f"mine={library_files.folder}/mine.onnx"
    said = anychip.run("bench", model, "--sizes", "1,4", "--seconds", "0.5", "--device", "cpu", cwd=empty)
    for size in (1, 4):
        assert re.search(rf"^\w+ +\w+ +{size}( +[\d.]+){{3}} ", said, re.MULTILINE), said


def test_validate_compares_a_file_with_float32(anychip, empty, library_files):
    model = f"mine={library_files.folder}/mine.onnx"
    said = anychip.run(
        "validate", model, "--device", "cpu", "--limit", "2", "--precisions", "fp32", "--no-layers", cwd=empty
    )
    assert "against float32 on the CPU" in said
    assert re.search(r"^\w+ +fp32 +agrees ", said, re.MULTILINE), said


def test_a_port_in_use_is_said_before_a_model_is_read(anychip, empty):
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        said = anychip.run("serve", "--weights", "random", "--port", address.partition(":")[2], cwd=empty, status=1)
    assert said.endswith(f"anychip: cannot listen on {address}; is another service there?\n")
    assert "Traceback" not in said
    messages = [json.loads(line)["message"] for line in said.splitlines() if line.startswith("{")]
    assert [each for each in messages if " is read" in each] == []
