"""The doctor, without torch and without any device; and what the image needs of a host, found in a folder."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from anychip_tools import doctor, facts
from anychip_tools.compatibility import findings
from anychip_tools.container import compose_env, docker_run, look
from anychip_tools.doctor import CHECKS, examine
from anychip_tools.doctor_vendor import Check, _contradictions, trouble, variables
from anychip_tools.facts import rows
from app.cli import main
from app.config import Settings
from backends.vendors import table as vendors

GIVEN: dict[str, Any] = {"weights": "sample", "device": "cpu", "port": 0}
SETTINGS = Settings(**GIVEN)


@pytest.fixture(autouse=True)
def _no_other_packages(monkeypatch):
    monkeypatch.setattr(facts, "_outside_rows", dict)


def test_a_torch_that_cannot_be_imported_is_asked_in_a_child_and_its_remedy_is_known(monkeypatch):
    def dies(*_, **__):
        return SimpleNamespace(returncode=1, stdout="", stderr="ImportError: libgalaxyhip.so.5: cannot open\n")

    monkeypatch.setattr(doctor.subprocess, "run", dies)
    checks = {check.name: check for check in examine(SETTINGS)}
    assert checks["torch"].status == "FAIL"
    assert "/opt/hyhal" in checks["torch"].remedy
    assert "plug-ins" in checks["torch"].detail  # plugins/ascend is one.
    assert {name for name, check in checks.items() if check.status == "SKIP"} == set(doctor._NEEDS_TORCH)


def test_a_device_file_that_may_not_be_opened_names_its_group(tmp_path, monkeypatch):
    node = tmp_path / "kfd"
    node.touch()
    monkeypatch.setattr("backends.device_files", lambda: [str(node)])
    assert CHECKS["device-files"](SETTINGS).status == "PASS"
    monkeypatch.setattr(doctor.os, "access", lambda *_: False)
    check = CHECKS["device-files"](SETTINGS)
    assert check.status == "FAIL"
    assert f"--group-add {node.stat().st_gid}" in check.remedy


@pytest.mark.parametrize(("status", "code"), [("PASS", 0), ("WARN", 0), ("SKIP", 0), ("FAIL", 1)])
def test_only_a_failure_fails_the_command(monkeypatch, capsys, status, code):
    monkeypatch.setattr("anychip_tools.doctor.examine", lambda *_: iter([Check("port", status, "seen", "do this")]))
    assert main(["doctor"]) == code
    assert capsys.readouterr().out == f"{status}  port          seen\n{'':20}-> do this\n"
    assert main(["doctor", "--json"]) == code
    check = {"name": "port", "status": status, "detail": "seen", "remedy": "do this"}
    assert json.loads(capsys.readouterr().out) == [check]


PAIRS = [
    *(pair for row in vendors.ACCELERATORS for pair in row.machine.pairs),
    vendors.Pair("torch_acme", "driver:acme", {"1.2": "4.2", "1": "4.0"}, at_least=True),
]


@pytest.mark.parametrize(
    ("versions", "verdict", "words"),
    [
        ({"torch": "2.14.1", "torchvision": "0.28.0"}, "FAIL", "0.29"),
        ({"torch": "2.12.0", "torch_npu": "2.12.0", "cann": "9.1.0"}, "PASS", ""),  # Our default image.
        ({"torch": "2.12.0", "torch_npu": "2.12.0", "cann": "8.5.0"}, "FAIL", "CANN 9.1"),
        ({"torch": "2.8.0", "torch_npu": "2.8.0", "cann": "8.3.RC1"}, "WARN", "leaks"),
        ({"cuda": "13.0", "driver:nvidia": "570.86"}, "FAIL", "580"),
        ({"torch_tensorrt": "2.13.0"}, "FAIL", "torch_tensorrt 2.13.0 wants tensorrt 11.0"),
        ({"torch": "2.14.0", "torch_tensorrt": "2.13.0", "tensorrt": "11.0.1"}, "FAIL", "torch 2.13: install the two"),
        ({"torch_acme": "1.2.7", "driver:acme": "4.1.9"}, "FAIL", "torch_acme 1.2.7 wants driver 4.2 or newer"),
        ({"torch_acme": "1.1.0", "driver:acme": "4.1.9"}, "PASS", ""),
        ({"torch": "2.9.0+das.opt1.dtk2604", "driver:hygon": "6.3.8"}, "FAIL", "6.3.30"),
        ({"onnxruntime-cann": "1.22.1", "cann": "9.1.0"}, "WARN", "CANN 8.2"),  # Our default image.
    ],
)
def test_versions_that_do_not_fit_are_told_with_what_does(versions, verdict, words):
    found = findings(versions, PAIRS)
    order = ("PASS", "WARN", "FAIL")
    worst = max(found, key=lambda each: order.index(each.verdict))
    assert worst.verdict == verdict
    assert words in worst.remedy
    assert bool(worst.remedy) == (verdict != "PASS")


@pytest.mark.parametrize(
    ("environment", "word"),
    [
        ({"PYTORCH_NPU_ALLOC_CONF": "a:1", "PYTORCH_ALLOC_CONF": "a:1"}, "ends the process"),
        ({"ASCEND_RT_VISIBLE_DEVICES": "3,1"}, "ascending"),
        ({"ASCEND_HOME_PATH": "/no/such/folder", "ASCEND_OPP_PATH": "/"}, "no folder"),
    ],
)
def test_variables_that_contradict_each_other_are_found(environment, word):
    [(text, remedy)] = _contradictions(environment, cores=8)
    assert word in text
    assert remedy


def test_a_variable_of_a_toolkit_s_folder_without_a_version_is_told(tmp_path):
    check = variables("cpu", named := {"NEUWARE_HOME": str(tmp_path)})
    assert (check.status, check.detail.partition(" is ")[2]) == ("WARN", "a folder without a version of neuware")
    (tmp_path / "version.txt").write_text("Neuware Version 4.6.2\n")
    assert variables("cpu", named).status == "PASS"


def test_ill_cards_and_other_people_s_processes_are_read_from_the_tools_answers():
    assert trouble(rows()["cuda"].machine.health, "0, 0\n1, 7\n2, [N/A]\n") == ["1, 7"]
    assert trouble(rows()["cuda"].machine.users, "4711, 1024 MiB\n") == ["4711, 1024 MiB"]
    table = (
        "| NPU   Name      | Health          | Power(W)     Temp(C)           Hugepages-Usage(page) |\n"
        "| 0     910B3     | OK              | 91.0         38                0    / 0              |\n"
        "| 1     910B3     | Alarm           | 91.0         38                0    / 0              |\n"
        "| NPU     Chip    | Process id      | Process name             | Process memory(MB)        |\n"
        "| 0       0       | 4711            | python3                  | 1024                      |\n"
    )
    assert [each[:1] for each in trouble(rows()["npu"].machine.health, table)] == ["1"]
    assert len(trouble(rows()["npu"].machine.users, table)) == 1


ASCEND = (
    *("dev/davinci0", "dev/davinci1", "dev/davinci10", "dev/davinci_manager", "dev/devmm_svm", "dev/hisi_hdc"),
    *("usr/local/Ascend/driver/version.info", "usr/local/dcmi/lib", "etc/ascend_install.info"),
)


@pytest.mark.parametrize("place", ["usr/local/sbin/npu-smi", "usr/local/bin/npu-smi"])
def test_every_card_is_passed_and_npu_smi_is_found_in_both_places(tmp_path, place):
    for name in (*ASCEND, place):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = look("ascend", tmp_path)
    assert found.devices[:3] == ("/dev/davinci0", "/dev/davinci1", "/dev/davinci10")
    command = docker_run("ascend", found, "1.2")
    assert f"source=/{place},target=/usr/local/sbin/npu-smi,readonly" in command
    assert command.endswith("anychip:1.2-ascend")
    assert f"NPU_SMI=/{place}" in compose_env("ascend", found)
