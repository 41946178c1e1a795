"""A vendor outside this repository: the package of docs/new-backend.md is installed, simulated and serves."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.device_child import child, passed
from tests.support.photographs import PHOTOGRAPHS
from tests.support.service_process import running

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "new-backend.md"
PHOTO = (ROOT / "models/sample/images/classify_star.jpg").read_bytes()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the package of the page as a reader would; return the folder."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    blocks = re.findall(r"```(?:toml|python)\n# ([\w./]+)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert [name for name, _ in blocks] == ["pyproject.toml", "anychip_acme/__init__.py", "anychip_acme/smi.py"]
    assert sum(len(text.splitlines()) for name, text in blocks if name.endswith(".py")) <= 80
    for name, text in blocks:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(text, encoding="utf-8")
    command = ["pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(target)]
    subprocess.run([sys.executable, "-m", *command, str(source)], check=True, timeout=120)
    return target


def variables(installed: Path, **more: str) -> dict[str, str]:
    return {"PYTHONPATH": f"{installed}{os.pathsep}{ROOT}", **more}


def said(installed: Path, *words: str, **more: str) -> Any:
    """Return what a command prints as JSON."""
    environment = {**os.environ, **variables(installed, **more)}
    command = [sys.executable, "-m", "app", *words, "--json"]
    return json.loads(subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=False).stdout)


def devices(installed: Path) -> dict[str, dict[str, object]]:
    return {row["device"]: row for row in said(installed, "devices")}


def test_one_that_is_broken_says_so_and_hides_nobody(installed: Path, tmp_path: Path) -> None:
    for name in ("anychip_acme", "anychip_acme-0.1.0.dist-info"):
        (tmp_path / name).symlink_to(installed / name)
    broken = tmp_path / "anychip_broken-1.0.dist-info"
    broken.mkdir()
    (broken / "METADATA").write_text("Metadata-Version: 2.1\nName: anychip-broken\nVersion: 1.0\n")
    (broken / "entry_points.txt").write_text(
        "[anychip.backends]\nnothere = no_such_module:Backend\nsecond = anychip_acme:BACKEND\n"
    )
    rows = devices(tmp_path)
    assert "No module named 'no_such_module'" in str(rows["nothere"]["detail"])
    assert "another backend called acme" in str(rows["second"]["detail"])
    assert rows["cpu:0"]["ok"]


def test_its_devices_pass_the_contract_suite(installed: Path, tmp_path: Path) -> None:
    photographs = tmp_path / "photographs.npz"
    np.savez(photographs, allow_pickle=False, **{name: read() for name, read in PHOTOGRAPHS.items()})
    told = {
        "DEVICE_UNDER_TEST": "tests.support.devices.simulated",
        "DEVICE_TYPE": "acme",
        "PHOTOGRAPHS": str(photographs),
    }
    suite = ("-m", "pytest", "-q", "-rp", "-p", "no:cacheprovider", "tests/support/device_contract.py")
    ran = passed(child(sys.executable, variables(installed, **told), *suite, "-k", "not resnet50"))
    assert ran >= {"test_the_probe_and_the_devices", "test_a_fault_means_that_the_device_is_lost"}


def test_it_serves(installed: Path, tmp_path: Path) -> None:
    options = ("--models", "resnet18", "--weights", "random", "--batch-sizes", "1", "--simulate", "acme:1")
    told = variables(installed)
    with (
        running(tmp_path, *options, "--device", "acme", environment=told) as service,
        service.client() as client,
    ):
        answer = client.post(
            "/v1/models/resnet18:predict", content=PHOTO, headers={"Content-Type": "image/jpeg"}
        ).json()
        assert (answer["device"], answer["simulated"]) == ("acme:0", True)
        [device] = client.get("/v1/devices").json()["devices"]
        assert (device["vendor"], device["name"]) == ("simulated-acme", "Simulated A100X")
