"""A vendor outside this repository: the package of docs/new-backend.md is installed, simulated, examined and serves."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

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


def devices(environment: dict[str, str]) -> dict[str, dict[str, object]]:
    done = subprocess.run(
        [sys.executable, "-m", "app", "devices", "--json"],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {row["device"]: row for row in json.loads(done.stdout)}


def test_without_its_software_it_says_what_to_install(installed: Path) -> None:
    row = devices(variables(installed))["acme"]
    assert row == {
        "device": "acme",
        "ok": False,
        "detail": "torch_acme is not installed: install the wheel for your version of torch from Acme.",
        "vendor": "Acme",
        "here": False,
    }


def test_the_doctor_checks_it_by_its_own_row(installed: Path, tmp_path: Path) -> None:
    def found(folder: Path, **more: str) -> dict[str, dict[str, str]]:
        command = ["-m", "app", "doctor", "--device", "acme", "--json", "--skip", "torch,packages,port,limits,weights"]
        done = subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            env={**os.environ, **variables(folder, **more)},
            capture_output=True,
            text=True,
            check=False,
        )
        return {check["name"]: check for check in json.loads(done.stdout)}

    checks = found(installed, ACME_VISIBLE_DEVICES="")
    assert "torch_acme is not installed, which Acme needs" in checks["compatibility"]["detail"]
    assert "ACME_VISIBLE_DEVICES is empty" in checks["variables"]["detail"]
    assert "libacme.so.4" in checks["libraries"]["detail"]

    # Its wheel for another torch, and an ill card.
    for name in ("anychip_acme", "anychip_acme-0.1.0.dist-info"):
        (tmp_path / name).symlink_to(installed / name)
    wheel = tmp_path / "torch_acme-2.5.0.dist-info"
    wheel.mkdir()
    (wheel / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_acme\nVersion: 2.5.0\n")
    tool = tmp_path / "acme-smi"
    tool.write_text("#!/bin/sh\necho 'card 0: healthy'\necho 'card 1: failed (ECC)'\n")
    tool.chmod(0o755)
    checks = found(tmp_path, PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert "torch_acme 2.5.0 wants torch 2.5" in checks["compatibility"]["remedy"]
    assert checks["cards"]["detail"] == "acme-smi says: card 1: failed"


def test_one_that_is_broken_says_so_and_hides_nobody(installed: Path, tmp_path: Path) -> None:
    for name in ("anychip_acme", "anychip_acme-0.1.0.dist-info"):
        (tmp_path / name).symlink_to(installed / name)
    broken = tmp_path / "anychip_broken-1.0.dist-info"
    broken.mkdir()
    (broken / "METADATA").write_text("Metadata-Version: 2.1\nName: anychip-broken\nVersion: 1.0\n")
    (broken / "entry_points.txt").write_text(
        "[anychip.backends]\nnothere = no_such_module:Backend\nsecond = anychip_acme:BACKEND\n"
    )
    rows = devices(variables(tmp_path))
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
