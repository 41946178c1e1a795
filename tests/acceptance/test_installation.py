"""Wheels, as `python -m build` makes them, in an environment of their own: for its user, and for another."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
WHERE = re.findall(r'"([\w./]+)"', *re.findall(r"^where = .*", PYPROJECT, re.M))
PACKAGES = re.findall(r'"(\w+)\*"', *re.findall(r"^include = .*", PYPROJECT, re.M))
LARGE = "plugins/samples/anychip_samples/resnet50.safetensors"
"""Takes half a minute to compress twice: an empty file stands for it. The demo runs in test_readme.py."""


def made(*command: str | Path, cwd: Path) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def link_needed(packages: Path) -> None:
    """Link there what the wheel's metadata names, with what that needs; what they forget is missing."""
    asked = [("anychip", "")]
    for name, extra in asked:
        found = next(iter(importlib.metadata.distributions(name=name, path=[str(packages), *sys.path])))
        for each in map(Requirement, found.requires or ()):
            if each.marker is None or each.marker.evaluate({"extra": extra}):
                asked += sorted({(each.name, wanted) for wanted in ("", *each.extras)} - {*asked})
        for top in {file.parts[0] for file in found.files or ()} if name != "anychip" else ():
            if top != ".." and not top.endswith(".pth") and not (packages / top).exists():
                (packages / top).symlink_to(str(found.locate_file(top)))


@pytest.fixture(scope="session")
def wheels(once):
    """Built in a copy of the sources, and installed; packages that it needs are those of this Python."""
    if importlib.util.find_spec("build") is None:
        pytest.skip("build is not installed: make .venv/.developer")

    def make(folder: Path) -> None:
        sources = folder / "sources"
        left_out = shutil.ignore_patterns(
            ".*", "__pycache__", "*.egg-info", "build", "dist", "tests", "docs", Path(LARGE).name
        )
        shutil.copytree(ROOT, sources, ignore=left_out, symlinks=True)
        (sources / LARGE).touch()
        build = (sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist")
        made(*build, ".", cwd=sources)
        made(*build, "plugins/samples", cwd=sources)
        made(sys.executable, "-m", "venv", "--without-pip", "environment", cwd=folder)
        python = folder / "environment" / "bin" / "python"
        install = (sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps")
        made(*install, *(folder / "dist").glob("*.whl"), cwd=folder)
        [packages] = (folder / "environment" / "lib").glob("python*/site-packages")
        link_needed(packages)

    return once("wheels", make)


@pytest.fixture
def wheel_command(anychip, wheels):
    return replace(anychip, command=wheels / "environment" / "bin" / "anychip")


def test_the_wheel_has_every_file_of_the_packages(wheels):
    [wheel] = (wheels / "dist").glob("anychip-*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    sources = wheels / "sources"
    there = {
        str(file.relative_to(sources / folder))
        for folder in WHERE
        for package in PACKAGES
        for file in (sources / folder / package).rglob("*")
        if file.is_file()
    }
    assert packed == there
    assert {f"{package}/py.typed" for package in PACKAGES} <= packed


def test_one_wheel_has_every_command(wheel_command, empty):
    said = wheel_command.run("--help", cwd=empty)
    commands = re.findall(r"^(\w+) = ", PYPROJECT.partition('"anychip.commands"]\n')[2].partition("\n[")[0], re.M)
    commands += ["serve", "demo", "devices"]
    assert [name for name in commands if not re.search(rf"^    {name} ", said, re.MULTILINE)] == []
    assert "cannot be used" not in said
    said = wheel_command.run("doctor", "--skip", "weights,port,devices", cwd=empty, status=0)
    assert "PASS" in said


def test_a_wheel_reads_a_file(wheel_command, empty, library_files, same_classes):
    script = "import app; print(app.__file__)"
    python = wheel_command.command.with_name("python")
    where = wheel_command.completed([str(python), "-c", script], cwd=empty)
    assert Path(where.strip()).is_relative_to(python.parent.parent)
    found = wheel_command.predict(
        f"mine={library_files.folder}/mine.onnx", library_files.folder / "small.png", cwd=empty
    )
    same_classes(found["classes"], library_files.answers["mine.onnx"])


def test_the_wheel_of_the_sample_weights_is_found(wheel_command, empty):
    answers = json.loads((ROOT / "models/sample/images/expected.json").read_text(encoding="utf-8"))
    found = wheel_command.predict("yolov8n:sample", ROOT / "models/sample/images/detect_1.jpg", cwd=empty)
    assert sorted(each["label"] for each in found["detections"]) == sorted(
        each["label"] for each in answers["detect_1.jpg"]["objects"]
    )


def test_another_user_without_a_home_serves_a_file_and_the_page(wheel_command, library_files, same_classes):
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    # It reads all files, as those of users who install for everybody can be read, and writes none.
    may = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs")
    may += tuple(f"--{each}=-all,+dac_read_search" for each in ("inh-caps", "ambient-caps", "bounding-set"))
    nobody = replace(wheel_command, prefix=may, environment={"HOME": None})
    refused = subprocess.run([*may, "touch", wheel_command.command], capture_output=True, text=True, check=False)
    if "Permission denied" not in refused.stderr:
        pytest.skip(f"no user can be made here who reads and does not write: {refused.stderr}")
    model = f"mine={library_files.folder}/mine.onnx"
    with nobody.serving("serve", "--models", model, "--port", "0", cwd=Path("/")) as service:
        page = service.ask("/").decode()
        [script, *_] = re.findall(r'src="(/?[\w./-]+\.js)', page)
        assert service.ask(f"/{script.lstrip('/')}")
        found = service.predict("mine", library_files.folder / "small.png")
    same_classes(found["classes"], library_files.answers["mine.onnx"])
