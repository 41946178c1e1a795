"""Rows of benchmarks.zoo: files as other libraries write them, answered by the installed command as by the library."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.zoo.__main__ import REFUSED, RIGHT
from benchmarks.zoo.table import NETWORKS

# In `.ci/run` one of each way through the code; `make nightly` has all.
USUAL = {
    "timm": ("timm-flat", "timm-ema", "timm-rexnet"),
    "transformers": ("hf-mobilevitv2", "hf-timm-wrapper", "hf-optimum", "hf-detr", "hf-segformer", "hf-yolos"),
    "torchvision": ("tv-fasterrcnn",),
}
ALL = {library: [row.name for row in NETWORKS.values() if row.library == library] for library in (*USUAL, "rfdetr")}
# In bfloat16 its first two classes change places, which the report says.
ALL["timm"].remove("timm-efficientvit_b0")

pytestmark = pytest.mark.timeout(3600)


def check(names: list[str], folder: Path) -> None:
    pytest.importorskip(NETWORKS[names[0]].package)
    results = folder / "results.json"
    command = [sys.executable, "-m", "benchmarks.zoo", *names, "--results", str(results)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = {name: row for name, row in json.loads(results.read_text()).items() if row["result"] in (RIGHT, REFUSED)}
    assert found.keys() == set(names), done.stderr


@pytest.mark.parametrize("library", USUAL)
def test_files_of_a_library_are_answered_as_it_answers(tmp_path: Path, library: str) -> None:
    check([*USUAL[library]], tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("library", ALL)
def test_every_file_of_a_library_is_answered_as_it_answers(tmp_path: Path, library: str) -> None:
    check(ALL[library], tmp_path)
