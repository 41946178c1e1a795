"""What set-up would install into vendors' base images: pip resolves it beside the packages that were recorded of them.

Each image is an environment of names and versions only, in which `pip install --dry-run` runs; nothing is installed.
The versions of torch and its plugins are those that vendors publish; numpy is both 1.26 and 2.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from deploy import install
from tests.support.container import BASES, describe

ROOT = Path(__file__).parents[2]
NUMPY_1, NUMPY_2 = "1.26.4", "2.2.6"


def resolved(folder: Path, packages: dict[str, str], signals: install.Signals) -> dict[str, str]:
    """Return the versions that set-up would add or change, by name. Skips where the registry does not answer."""
    venv.create(folder / "image", with_pip=False, symlinks=True)
    [site] = folder.glob("image/lib/python*/site-packages")
    describe(site, packages)
    python = folder / "image/bin/python"
    choice = install.choose_torch(signals, "auto", install.read_pins(constraints()))
    settled, report = folder / "constraints.txt", folder / "report.json"
    settled.write_text(install.with_pins(constraints(), choice.pins, choice.constraints))
    options = ["--dry-run", "--report", str(report), "--constraint", str(settled), "--retries", "1", "--timeout", "20"]
    command = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install", *options]
    done = subprocess.run(
        [*command, *install.requirements(install.read_project(), (*choice.extras, "grpc", "onnx"))],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    if done.returncode and re.search(r"Connection|Temporary failure|timed out|Name or service", done.stderr):
        pytest.skip(f"the registry does not answer: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(report.read_text())["install"]
    return {re.sub("[-_.]+", "-", each["metadata"]["name"]).lower(): each["metadata"]["version"] for each in found}


def constraints() -> str:
    return (ROOT / "constraints.txt").read_text()


@pytest.mark.parametrize("numpy", [NUMPY_1, NUMPY_2])
@pytest.mark.parametrize("image", BASES)
def test_what_the_image_brings_stays_and_the_rest_fits_beside_it(image: str, numpy: str, tmp_path: Path) -> None:
    packages = {**BASES[image]["packages"], "numpy": numpy}
    added = resolved(tmp_path, packages, install.Signals(present=packages))
    assert not packages.keys() & added.keys(), "these are the image's own"
    assert {"fastapi", "opencv-python-headless", "onnx"} <= added.keys()
    opencv = tuple(int(part) for part in added["opencv-python-headless"].split(".")[:2])
    assert (opencv < (4, 12)) == (numpy == NUMPY_1), "OpenCV 4.12 and later need numpy 2"


@pytest.mark.parametrize("cann", install.CANN_PAIRS)
def test_beside_each_cann_its_torch_npu_and_numpy_1_fit_together(cann: str, tmp_path: Path) -> None:
    """As on a host, where set-up has just taken torch and torchvision of PyTorch's index."""
    torch, plugin = install.CANN_PAIRS[cann]
    packages = {"torch": f"{torch}+cpu", "torchvision": f"{install.torchvision_of(torch)[:-1]}0+cpu"}
    added = resolved(tmp_path, packages, install.Signals(ascend=True, cann=cann))
    assert added["torch-npu"] == plugin
    assert not packages.keys() & added.keys()
    assert added["numpy"].startswith("1.")
    assert tuple(int(part) for part in added["opencv-python-headless"].split(".")[:2]) < (4, 12)
