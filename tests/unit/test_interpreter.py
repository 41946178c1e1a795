"""In which order our processes look for modules, and what a confined one may read."""

from __future__ import annotations

import importlib
import os
import runpy
import sys
import sysconfig
from importlib.machinery import PathFinder
from pathlib import Path
from unittest.mock import Mock

import pytest

from anychip_base import command, interpreter
from models import confinement

INSTALLED = sysconfig.get_path("purelib")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a user's folder and enter it."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["-c"])
    return folder


def origin(name: str) -> str:
    """Find the file of a module that is not imported yet, as Python would."""
    found = (finder.find_spec(name, None) for finder in sys.meta_path)
    return next(str(spec.origin) for spec in found if spec is not None)


def test_the_users_folders_come_after_what_is_installed(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vendor, script, linked = (str(project.parent / name) for name in ("vendor", "script", "linked"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((vendor, INSTALLED)))
    monkeypatch.setattr(sys, "argv", [os.path.join(script, "serve.py")])
    monkeypatch.setattr(sys, "path", [script, "", vendor, linked, INSTALLED, vendor])
    assert interpreter.module_path() == [linked, INSTALLED, script, str(project), vendor]


def test_a_child_starts_by_an_absolute_path_with_this_path(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["", INSTALLED])
    command = interpreter.python_command("-m", "app", "serve")
    assert command[0] == sys.executable
    assert command[-5:] == [interpreter.__file__, f"{INSTALLED}\n{project}", "-m", "app", "serve"]


def test_ctrl_c_in_the_first_moments_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "settle", Mock(side_effect=KeyboardInterrupt))
    assert command.main() == 130
    for name in ("path", "meta_path"):
        monkeypatch.setattr(sys, name, [*getattr(sys, name)])
    monkeypatch.setattr(sys, "argv", ["", "\n".join(sys.path), "-c", "raise KeyboardInterrupt"])
    with pytest.raises(SystemExit, match="130"):
        runpy.run_path(interpreter.__file__, run_name="__main__")


def test_packages_of_our_names_elsewhere_are_not_ours(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where ours were found by a finder, which Python asks after the path."""
    for name in ("app", "models"):
        (project / name).mkdir()
        (project / name / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(project)])
    monkeypatch.setattr(sys, "meta_path", [PathFinder])
    interpreter.settle()
    assert {Path(origin(name)).parent.parent for name in interpreter.OURS} == {Path(interpreter._ROOT)}
    assert sys.meta_path[0].find_spec("torch", None) is None
    inside = sys.meta_path[0].find_spec("models.contract", [os.path.join(interpreter._ROOT, "models")])
    assert Path(str(inside and inside.origin)).parents[2] == Path(interpreter._ROOT)
    interpreter.settle()
    assert len(sys.meta_path) == 2, "it is idempotent"


def test_editable_installs_come_before_the_users_folders(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Editable:
        @staticmethod
        def find_spec(name, path=None, target=None):
            return PathFinder.find_spec(name, [str(project.parent)]) if name == "aside_library" else None

    for folder in (project, project.parent):
        (folder / "aside_library.py").touch()
    monkeypatch.setattr(sys, "path", [*sys.path, str(project)])
    monkeypatch.setattr(sys, "meta_path", [PathFinder, Editable])
    assert origin("aside_library") == str(project / "aside_library.py")
    interpreter.settle()
    assert origin("aside_library") == str(project.parent / "aside_library.py")


def test_no_library_tells_its_makers_that_it_is_used(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenVINO asks Google's and ONNX Runtime Microsoft's machines when they are imported, by a thread of their own."""
    (project / "openvino_telemetry.py").touch()
    monkeypatch.setattr(sys, "path", [*sys.path, str(project)])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setitem(sys.modules, "openvino_telemetry", None)  # Is restored afterwards.
    del sys.modules["openvino_telemetry"]
    switches = ("ORT_DISABLE_TELEMETRY", "HF_HUB_DISABLE_TELEMETRY")
    for name in switches:
        monkeypatch.delenv(name, raising=False)
    importlib.import_module("openvino_telemetry")
    del sys.modules["openvino_telemetry"]
    interpreter.settle()
    assert all(os.environ[name] == interpreter.bare_environment()[name] == "1" for name in switches)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("openvino_telemetry")


def readable(path: Path) -> bool:
    """Whether a confined process may read this."""
    return not {path, *path.parents}.isdisjoint(confinement.python_files())


def distribution(folder: Path, name: str, **texts: str) -> None:
    """Metadata of one that is installed in a folder."""
    made = folder / f"{name}-1.0.dist-info"
    made.mkdir(parents=True)
    for file, text in {"METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", **texts}.items():
        (made / file.replace("_json", ".json").replace("_txt", ".txt")).write_text(text)


def package(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "part.py").touch()
    return folder / "part.py"


def test_of_a_project_on_the_path_only_what_was_imported_is_read(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, other = package(project / "aside_plugin"), package(project / "aside_other")
    portion = project / "aside_portion"  # Of a namespace.
    portion.mkdir()
    (portion / "part.py").touch()
    (project / "aside_module.py").touch()
    monkeypatch.setattr(sys, "path", [*sys.path, str(project)])
    for name in ("aside_plugin", "aside_portion.part", "aside_module"):
        __import__(name)
    try:
        assert readable(file)
        assert readable(portion / "part.py")
        assert readable(project / "aside_module.py")
        assert not readable(other)
        assert not readable(project / "secret.txt")
    finally:
        for name in [name for name in sys.modules if name.startswith("aside_")]:
            del sys.modules[name]


@pytest.mark.parametrize("mark", [".git", "pyproject.toml", "setup.py"])
def test_a_package_that_is_a_whole_project_gives_its_modules_alone(
    project: Path, monkeypatch: pytest.MonkeyPatch, mark: str
) -> None:
    file, inner = package(project / "aside_whole"), package(project / "aside_whole" / "inner")
    (project / "aside_whole" / mark).touch()
    distribution(project / "installed", "aside-whole", direct_url_json='{"dir_info": {"editable": true}}')
    monkeypatch.setattr(sys, "path", [*sys.path, str(project / "installed"), str(project)])
    assert readable(file)
    assert readable(inner)
    assert not readable(project / "aside_whole" / "secret.txt")
