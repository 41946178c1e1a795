"""A vendor outside this repository: the package of docs/new-backend.md is installed, serves, and tools know it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import hardware_row, operator_tables
from tests.support.device_child import child, contract
from tests.support.service_process import running

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "new-backend.md"
PHOTO = (ROOT / "models/sample/images/classify_star.jpg").read_bytes()
FAST_PATHS = """
import contextlib, json, onnxruntime, torch
from unittest.mock import Mock
from tests.support.devices import simulated
from anychip_tools.report import versions
from anychip_tools.verify.contract import SmallNetwork, small_images
from backends import BACKENDS, EngineRefusedError

[acme] = [each for each in BACKENDS if each.name == "acme"]
driver = Mock(lock=Mock(return_value=0), unlock=Mock(return_value=0))
torch.acme.acmert = lambda: Mock(acmeHostRegister=driver.lock, acmeHostUnregister=driver.unlock)
torch.Tensor.is_pinned = lambda *_: True
with contextlib.closing(acme.load(SmallNetwork(), "acme:0", "eager", "fp32", (2,)).executable) as executable:
    executable.start_rows([*small_images(2)], 2).outputs()
onnxruntime.get_available_providers = lambda: ["CPUExecutionProvider", "AcmeExecutionProvider"]
onnxruntime.InferenceSession = Mock(**{"return_value.get_providers.return_value": []})
with contextlib.suppress(EngineRefusedError):
    acme.load(SmallNetwork(), "acme:1", "onnxruntime", "fp32", (1,))
providers = onnxruntime.InferenceSession.call_args.kwargs["providers"]
print(json.dumps([[call[0] for call in driver.mock_calls], providers, versions()]))
"""


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
    (source / "functions.yaml").write_text("- func: convolution(Tensor input)\n")
    tables = ("--functions", str(source / "functions.yaml"), "--folder", str(source / "anychip_acme/operator_tables"))
    operator_tables.main(["acme", *tables, "--source", "torch_acme 2.9"])
    command = ["pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(target)]
    subprocess.run([sys.executable, "-m", *command, str(source)], check=True, timeout=120)
    return target


def variables(installed: Path, **more: str) -> dict[str, str]:
    return {"PYTHONPATH": f"{installed}{os.pathsep}{ROOT}", **more}


def said(installed: Path, *words: str, **more: str) -> Any:
    return json.loads(child(sys.executable, variables(installed, **more), "-m", "app", *words, "--json").stdout)


def test_one_that_is_broken_says_so_and_hides_nobody(installed: Path, tmp_path: Path) -> None:
    for name in ("anychip_acme", "anychip_acme-0.1.0.dist-info"):
        (tmp_path / name).symlink_to(installed / name)
    broken = tmp_path / "anychip_broken-1.0.dist-info"
    broken.mkdir()
    (broken / "METADATA").write_text("Metadata-Version: 2.1\nName: anychip-broken\nVersion: 1.0\n")
    (broken / "entry_points.txt").write_text(
        "[anychip.backends]\nnothere = no_such_module:Backend\nsecond = anychip_acme:BACKEND\n"
    )
    rows = {row["device"]: row for row in said(tmp_path, "devices")}
    assert "No module named 'no_such_module'" in str(rows["nothere"]["detail"])
    assert "another backend called acme" in str(rows["second"]["detail"])
    assert rows["cpu:0"]["ok"]


def test_its_devices_pass_the_contract_suite(installed: Path) -> None:
    told = variables(installed)
    ran = contract("tests.support.devices.simulated", "acme", sys.executable, told, "-k", "not resnet50")
    assert ran >= {"test_the_probe_and_the_devices", "test_a_fault_means_that_the_device_is_lost"}


def test_it_serves(installed: Path, tmp_path: Path) -> None:
    options = ("--models", "resnet18", "--weights", "random", "--batch-sizes", "1", "--simulate", "acme:1", "--device")
    with running(tmp_path, *options, "acme", environment=variables(installed)) as service, service.client() as client:
        answer = client.post(
            "/v1/models/resnet18:predict", content=PHOTO, headers={"Content-Type": "image/jpeg"}
        ).json()
        assert (answer["device"], answer["simulated"]) == ("acme:0", True)
        [device] = client.get("/v1/devices").json()["devices"]
        assert (device["vendor"], device["name"]) == ("simulated-acme", "Simulated A100X")


def test_its_fast_paths_its_software_and_its_operators_are_known(installed: Path, tmp_path: Path) -> None:
    for name, text in {
        "torch_acme-2.9.dist-info/METADATA": "Metadata-Version: 2.1\nName: torch_acme\nVersion: 2.9\n",
        "acmekit/version.txt": "acmekit 4.1",
        "bin/acme-smi": "#!/bin/sh\necho card 1: failed\n",
    }.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text, encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    told = {"DEVICE_TYPE": "acme", "ACME_HOME": f"{tmp_path}/acmekit", "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    there = {**told, "PYTHONPATH": f"{tmp_path}:{variables(installed)['PYTHONPATH']}"}
    *called, about = json.loads(child(sys.executable, there, "-c", FAST_PATHS).stdout)
    assert called == [["lock", "lock", "unlock", "unlock"], [["AcmeExecutionProvider", {"device_id": "1"}]]]
    card = tmp_path / "card.json"
    assert child(sys.executable, there, "-m", "app", "report", "--device", "acme", "--out", str(card)).returncode == 0
    sent = json.loads(card.read_text(encoding="utf-8"))
    checks = {check["name"]: f"{check['detail']} {check['remedy']}" for check in sent["doctor"]}
    assert "torch_acme 2.9 wants acmekit 2.9" in checks["compatibility"]
    assert "libacme.so.4" in checks["libraries"]
    assert "acme-smi says: card 1: failed" in checks["cards"]
    assert {"version.txt": "acmekit 4.1"} in [each["versions"] for each in sent["toolkits"]]
    assert {"torch_acme 2.9", "acmekit 4.1"} <= {*hardware_row._software(about, sent["versions"])}
    found = said(installed, "ops", "resnet18", "--weights", "random", "--against", "acme")
    assert [each["operator"] for each in found["operators"] if each["how"] == "native"] == ["aten::convolution"]
