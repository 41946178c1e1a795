"""The doctor on vendors' software: versions, variables, libraries and cards, without torch and without any device."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from anychip_ascend.backend import BY_PYACL
from anychip_tools import doctor_vendor, outside_rows
from anychip_tools.compatibility import findings
from anychip_tools.doctor_vendor import _contradictions, concerned, trouble
from anychip_tools.facts import rows
from anychip_tools.outside_rows import from_json, in_json
from backends import external
from backends.vendors import table as vendors
from backends.vendors.table import Facts
from deploy.image.dockerfiles import FLAVOURS


@pytest.fixture(autouse=True)
def _no_other_packages(monkeypatch):
    """Leave out the child process that asks other packages for their rows."""
    monkeypatch.setattr(outside_rows, "_outside_rows", dict)


PAIRS = [
    *(pair for row in vendors.ACCELERATORS for pair in row.machine.pairs),
    vendors.Pair("torch_acme", "driver:acme", {"1.2": "4.2", "1": "4.0"}, at_least=True),
]


@pytest.mark.parametrize(
    ("versions", "verdict", "words"),
    [
        ({"torch": "2.14.1", "torchvision": "0.29.0"}, "PASS", ""),
        ({"torch": "2.14.1", "torchvision": "0.28.0"}, "FAIL", "0.29"),
        ({"torch": "2.12.0", "torch_npu": "2.12.0", "cann": "9.1.0"}, "PASS", ""),  # Our default image.
        ({"torch": "2.12.0", "torch_npu": "2.12.0", "cann": "8.5.0"}, "FAIL", "CANN 9.1"),
        ({"torch": "2.12.0", "torch_npu": "2.12.0.post9", "cann": "9.1.0"}, "PASS", ""),  # As post2, its predecessor.
        ({"torch": "2.13.0", "torch_npu": "2.13.0"}, "WARN", "not in Ascend's table"),
        ({"torch": "2.8.0", "torch_npu": "2.8.0", "cann": "8.3.RC1"}, "WARN", "leaks"),
        ({"torch": "2.9.0", "torch_mlu": "1.29.2+torch2.7.1"}, "FAIL", "2.7"),
        ({"cuda": "13.0", "driver:nvidia": "570.86"}, "FAIL", "580"),
        ({"torch": "2.14.0", "torch_tensorrt": "2.14.0", "tensorrt": "11.0.1"}, "FAIL", "11.1"),
        ({"torch": "2.14.0", "torch_tensorrt": "2.13.0", "tensorrt": "11.0.1"}, "FAIL", "torch 2.13: install the two"),
        ({"torch_acme": "1.2.7", "driver:acme": "4.1.9"}, "FAIL", "torch_acme 1.2.7 wants driver 4.2 or newer"),
        ({"torch_acme": "1.1.0", "driver:acme": "4.1.9"}, "PASS", ""),
        ({"torch_acme": "2.0.0", "driver:acme": "4.1.9"}, "PASS", ""),  # Nothing is known of it.
        ({"torch": "2.9.0+das.opt1.dtk2604", "driver:hygon": "6.3.8"}, "FAIL", "6.3.30"),
        ({"torch": "2.9.0+rocm6.4", "rocm": "7.0.1"}, "WARN", "one major version"),
        ({"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.31.1"}, "WARN", "share one folder"),
        ({"onnxruntime-cann": "1.22.1", "cann": "8.2.RC1"}, "PASS", ""),
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
        ({"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:32"}, "excludes"),
        ({"ASCEND_RT_VISIBLE_DEVICES": "3,1"}, "ascending"),
        ({"ASCEND_HOME_PATH": "/no/such/folder", "ASCEND_OPP_PATH": "/"}, "no folder"),
        ({"LD_PRELOAD": "/no/such/library.so"}, "not there"),
        ({"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}, "AUTOLOAD"),
    ],
)
def test_variables_that_contradict_each_other_are_found(environment, word):
    [(text, remedy)] = _contradictions(environment, cores=8)
    assert word in text
    assert remedy


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_drivers_library_does_not_end_the_build_of_an_image(flavour, tmp_path, monkeypatch):
    """Over a base that holds the vendor's package and no driver, which is mounted when the image runs."""
    for name in ("torch_npu-2.10.0", "torch_mlu-1.33.1"):
        folder = tmp_path / f"{name}.dist-info"
        folder.mkdir()
        package, version = name.split("-")
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(doctor_vendor, "_load_error", lambda name: f"{name}: cannot open shared object file")
    doctor_vendor.versions.cache_clear()
    check = doctor_vendor.libraries("auto")
    doctor_vendor.versions.cache_clear()
    assert (check.status, "libascend_hal.so" in check.detail) == ("FAIL", True)
    assert check.name in FLAVOURS[flavour].skip.split(",")


@pytest.fixture
def told(monkeypatch):
    """Tell the rows of a vendor outside this repository and of pyACL's cards, as the doctor's child process does."""
    acme = replace(
        vendors.NVIDIA,
        name="acme",
        packages=("torch_acme",),
        install="install the wheel from Acme",
        visibility_variable="ACME_VISIBLE_DEVICES",
        page_locks=vendors.PageLocks("acmert", "pin", "unpin", 4),
        machine=vendors.Machine(
            libraries=("libacme.so.4",),
            driver=(("/proc/acme/version", r"([\d.]+)"),),
            pairs=(vendors.Pair("torch_acme", "driver:nvidia", {"1.2": "4.2"}, at_least=True),),
            health=vendors.Question(("acme-smi",), "ILL"),
            container=vendors.Container(("/dev/acme",), group_variables={"ACME_GID": "/dev/acme"}),
        ),
        sample=vendors.Sample("A100X", "acme error", (2, 2)),
    )
    made = [SimpleNamespace(facts=row) for row in (acme, BY_PYACL, Facts("null", "cpu", ("null",), ("fp32",)))]
    monkeypatch.setattr(external, "external_backends", lambda: made)
    rows = from_json(in_json())
    monkeypatch.setattr(outside_rows, "_outside_rows", lambda: rows)
    return acme, rows


def test_the_row_of_another_package_is_checked_as_ours_are(told, monkeypatch):
    monkeypatch.setattr(doctor_vendor, "_load_error", lambda name: f"{name}: cannot open shared object file")
    assert [row.name for row in concerned("acme:0")] == ["acme"]
    assert doctor_vendor.variables("acme", {"ACME_VISIBLE_DEVICES": ""}).status == "FAIL"
    assert "libacme.so.4" in doctor_vendor.libraries("acme").detail
    missing = doctor_vendor.compatibility("acme")
    assert (missing.status, missing.remedy) == ("FAIL", "install the wheel from Acme")
    assert "libhccl" not in doctor_vendor.libraries("npu").detail, "pyACL's cards need no collective library"


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
