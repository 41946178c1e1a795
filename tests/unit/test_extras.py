"""What messages say about packages that are not here: never a name of ours on a registry."""

from __future__ import annotations

import ast
import re
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from anychip_base import extras
from app.cli import main

ROOT = Path(__file__).parents[2]
REQUIRES = [
    "numpy>=1.26",
    'onnx>=1.16; extra == "onnx"',
    'onnxruntime>=1.18; extra == "onnx"',
    'anychip-grpc==0.1.0; extra == "grpc"',
    'torch-npu; extra == "ascend"',
    'anychip-ascend; extra == "ascend"',
    'ray[serve]>=2.40; extra == "ray"',
    'anychip[grpc,onnx]; extra == "ray"',
    'grafana; python_version >= "3.11" and extra == "dev"',
]
OURS = re.compile(r"anychip(-(ascend|compat|grpc|hosting|ocr|samples|tools))?")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Simulate an installation of its own, beside a pip of the same environment."""
    monkeypatch.setattr(metadata, "requires", lambda name: REQUIRES)
    monkeypatch.setattr(shutil, "which", lambda name: str(Path(sys.executable).with_name(name)))
    extras.how_to_install.cache_clear()
    yield
    extras.how_to_install.cache_clear()


@pytest.mark.parametrize(
    ("extra", "command"),
    [
        ("onnx", "pip install 'onnx>=1.16' 'onnxruntime>=1.18'"),
        ("dev", "pip install grafana"),
        ("grpc", "pip install ./plugins/grpc, in anychip's sources"),
        ("ascend", "pip install torch-npu ./plugins/ascend, in anychip's sources"),
        (
            "ray",
            "pip install 'ray[serve]>=2.40' ./plugins/grpc 'onnx>=1.16' 'onnxruntime>=1.18', in anychip's sources",
        ),
        ("nothing", "ANYCHIP_EXTRAS=nothing make install, in anychip's sources"),
    ],
)
def test_a_command_names_packages_of_others_and_folders_of_ours(asked, extra, command):
    assert extras.how_to_install(extra) == command


def test_every_extra_that_is_asked_for_is_one():
    """Their names are checked nowhere else: a message may never be printed in any test."""
    text = (ROOT / "pyproject.toml").read_text()
    known = set(re.findall(r"^(\w+) = \[", text.partition("[project.optional-dependencies]")[2], re.MULTILINE))
    asked = [
        each.args[0].value
        for path in product()
        for each in ast.walk(ast.parse(path.read_text()))
        if isinstance(each, ast.Call) and ast.unparse(each.func) == "how_to_install"
        if isinstance(each.args[0], ast.Constant)
    ]
    assert len(asked) > 12
    assert set(asked) <= known


def product() -> list[Path]:
    rooms = [ROOT / name for name in ("anychip_base", "app", "backends", "models")]
    return [path for room in (*rooms, *ROOT.glob("plugins/*/anychip_*")) for path in sorted(room.rglob("*.py"))]


def installs(text: str) -> list[str]:
    """Return our packages that a text tells to install by their names."""
    commands = re.findall(r"pip3? install ((?:[^\n`;|#](?<!  #))+)", text)
    words = [word.strip("'\"(),.:").partition("[")[0] for each in commands for word in each.split()]
    return [word for word in words if OURS.fullmatch(word)]


def test_the_scan_sees_every_form():
    text = "`pip install 'anychip[onnx]'`: and pip install -q anychip-grpc onnx, or pip install ./anychip"
    assert installs(text) == ["anychip", "anychip-grpc"]


def test_nothing_tells_to_install_a_name_of_ours_from_a_registry():
    listed = sources_and_pages()
    assert len(listed) > 400
    found = {str(path.relative_to(ROOT)): installs(path.read_text(encoding="utf-8")) for path in listed}
    assert {name: words for name, words in found.items() if words} == {}


def sources_and_pages() -> list[Path]:
    """Return the pages that people read, and the sources that print to them."""
    kinds = (".py", ".md", ".toml", ".yaml", ".yml", ".sh", ".html", ".js")
    files = [path for path in ROOT.glob("*") if path.suffix == ".md" or path.name.startswith("Dockerfile")]
    folders = ("anychip_base", "app", "backends", "benchmarks", "deploy", "docs", "models", "plugins")
    files += [path for name in folders for path in (ROOT / name).rglob("*") if path.suffix in kinds]
    return [path for path in files if path.is_file()]


def test_the_version_is_that_of_the_sources(capsys, monkeypatch, tmp_path):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    [stated] = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert (ended.value.code, capsys.readouterr().out) == (0, f"anychip {stated}\n")
    monkeypatch.setattr(extras, "_PYPROJECT", tmp_path / "pyproject.toml")
    monkeypatch.setattr(metadata, "version", lambda name: f"9.9 of {name}")
    assert extras.version() == "9.9 of anychip"
