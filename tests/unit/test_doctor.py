"""The doctor: every check passes here, and each says what to do when what it looks at is broken."""

import json
import os
import socket
import subprocess
from types import SimpleNamespace

import pytest

from anychip_tools import doctor
from anychip_tools.doctor import CHECKS, examine
from anychip_tools.doctor_vendor import Check
from app.cli import main
from app.config import Settings
from models import confinement

GOOD = {"weights": "sample", "device": "cpu", "port": 0}


def found(name, **settings):
    return CHECKS[name](Settings(**{**GOOD, **settings}))


def test_a_torch_that_cannot_be_imported_is_asked_in_a_child_and_its_remedy_is_known(monkeypatch):
    def dies(*_, **__):
        return SimpleNamespace(returncode=1, stdout="", stderr="ImportError: libgalaxyhip.so.5: cannot open\n")

    monkeypatch.setattr(doctor.subprocess, "run", dies)
    checks = {check.name: check for check in examine(Settings(**GOOD))}
    assert checks["torch"].status == "FAIL"
    assert "/opt/hyhal" in checks["torch"].remedy
    assert {name for name, check in checks.items() if check.status == "SKIP"} == set(doctor._NEEDS_TORCH)


def test_a_torch_that_hangs_is_given_up(monkeypatch):
    def hangs(*_, timeout, **__):
        raise subprocess.TimeoutExpired("python", timeout)

    monkeypatch.setattr(doctor.subprocess, "run", hangs)
    assert found("torch").status == "FAIL"
    assert "hang" in found("torch").remedy


def test_it_says_what_the_kernel_gives_to_confine_processes(monkeypatch):
    for landlock, seccomp, status in ((6, True, "PASS"), (0, True, "WARN"), (6, False, "WARN")):
        monkeypatch.setattr(confinement, "what_there_is", lambda: confinement.WhatThereIs(landlock, seccomp))  # noqa: B023
        check = found("kernel")
        assert (check.status, bool(check.remedy)) == (status, status == "WARN")
        assert f"{'Landlock 6' if landlock else 'no Landlock'}, {'' if seccomp else 'no '}seccomp" in check.detail


def test_a_package_that_cannot_be_imported_is_named(monkeypatch):
    monkeypatch.setattr(doctor, "_MODULES", ("json", "no_such_package"))
    check = found("packages")
    assert (check.status, "no_such_package" in check.detail) == ("FAIL", True)


def test_a_cache_that_cannot_be_written_is_a_failure(tmp_path):
    (tmp_path / "file").touch()
    check = found("cache", cache_dir=tmp_path / "file" / "below")
    assert check.status == "FAIL"
    assert f"uid {os.getuid()}" in check.remedy


def test_weights_that_must_be_downloaded_are_a_warning_and_missing_files_a_failure(tmp_path):
    check = found("weights", weights="official", models="resnet50", cache_dir=tmp_path)
    assert (check.status, "anychip weights fetch resnet50" in check.remedy) == ("WARN", True)
    check = found("weights", models="dogs=hf://org/dogs", cache_dir=tmp_path)
    assert (check.status, "weights fetch hf://org/dogs" in check.detail) == ("WARN", True)
    assert found("weights", models="mine=resnet50:missing.pth").status == "FAIL"
    assert found("weights", models="resnet5O").status == "FAIL"


def test_a_port_that_is_taken_is_a_failure():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        check = found("port", port=taken.getsockname()[1])
    assert (check.status, "--port" in check.remedy) == ("FAIL", True)


def test_a_device_file_that_may_not_be_opened_names_its_group(tmp_path, monkeypatch):
    node = tmp_path / "kfd"
    node.touch()
    monkeypatch.setattr("backends.device_files", lambda: [str(node)])
    assert found("device-files").status == "PASS"
    monkeypatch.setattr(doctor.os, "access", lambda *_: False)
    check = found("device-files")
    assert check.status == "FAIL"
    assert f"--group-add {node.stat().st_gid}" in check.remedy


def test_a_cpu_that_serves_beside_an_accelerator_is_a_warning(monkeypatch):
    monkeypatch.setattr("backends.device_files", lambda: ["/dev/kfd"])
    check = found("devices", device="auto")
    assert (check.status, "/dev/kfd" in check.detail) == ("WARN", True)
    assert "rocm" in check.remedy
    assert found("devices", device="cpu").status == "PASS"


@pytest.mark.parametrize(("status", "code"), [("PASS", 0), ("WARN", 0), ("SKIP", 0), ("FAIL", 1)])
def test_only_a_failure_fails_the_command(monkeypatch, capsys, status, code):
    monkeypatch.setattr("anychip_tools.doctor.examine", lambda *_: iter([Check("port", status, "seen", "do this")]))
    assert main(["doctor"]) == code
    assert capsys.readouterr().out == f"{status}  port          seen\n{'':20}-> do this\n"
    assert main(["doctor", "--json"]) == code
    assert json.loads(capsys.readouterr().out) == [
        {"name": "port", "status": status, "detail": "seen", "remedy": "do this"}
    ]


def test_a_check_that_does_not_exist_is_refused_by_name(capsys):
    assert main(["doctor", "--skip", "port,weather"]) == 1
    assert "'weather'" in capsys.readouterr().err
