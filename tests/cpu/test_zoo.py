"""Rows of benchmarks.zoo: files as other libraries write them, answered by the installed command as by the library."""

from __future__ import annotations

import json
import subprocess
import sys
from operator import itemgetter
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
# In bfloat16 the first two classes of timm-efficientvit_b0 change places, which the report says.
LEFT_OUT = {"timm-efficientvit_b0", *(name for names in USUAL.values() for name in names)}
ALL = ([row.name for row in NETWORKS.values() if row.library == library] for library in (*USUAL, "rfdetr"))
OTHERS = [[name for name in names if name not in LEFT_OUT][share::3] for names in ALL for share in range(3)]

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
@pytest.mark.parametrize("names", [names for names in OTHERS if names], ids=itemgetter(0))
def test_every_other_file_of_a_library_is_answered_as_it_answers(tmp_path: Path, names: list[str]) -> None:
    check(names, tmp_path)
