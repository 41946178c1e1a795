"""Environments that are kept beside clones: made once, whole or not at all, and no more of them than are used."""

from __future__ import annotations

import json
import os
import subprocess
import time
from importlib import metadata
from pathlib import Path

import pytest

from tests.environments import cached
from tests.environments.cached import Cache, Recipe, name_of

SCRIPT = """
import os, pathlib, subprocess, sys, time, venv
folder = pathlib.Path(sys.argv[-1])
with open({log!r}, "a") as log:
    log.write("made\\n")
if os.environ.get("FAILS"):
    folder.mkdir()
    (folder / "half").touch()
    sys.exit(3)
time.sleep(float(os.environ.get("TAKES_S", 0)))
venv.create(folder, with_pip=False, symlinks=True)
python = folder / "bin" / "python"
site = next((folder / "lib").glob("python*/site-packages"))
(site / "our.pth").write_text({site!r})
(site / "brought.py").write_text("text = 'brought'")
script = folder / "bin" / "says"
script.write_text("#!" + str(python) + "\\nimport brought, anyproject, sys; print(anyproject.text, sys.prefix)\\n")
script.chmod(0o755)
options = ["install", "--quiet", "--no-deps", "--no-build-isolation", "--editable", os.getcwd()]
subprocess.run([python, "-m", "pip", *options], check=True)
"""
PROJECT = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"
[project]
name = "anyproject"
version = "1"
dependencies = ["numpy"]
[tool.setuptools]
py-modules = ["anyproject"]
"""


def clone(folder: Path, log: Path) -> Path:
    """Write a repository with one package; its recipe installs that into an environment that sees ours."""
    folder.mkdir()
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "anyproject.py").write_text(f"text = 'of {folder.name}'")
    # Where they are imported from: our own environment may be a thin one over an entry, which has them.
    leads = sorted({str(metadata.distribution(name).locate_file("")) for name in ("numpy", "pip", "setuptools")})
    (folder / "recipe.py").write_text(SCRIPT.format(log=str(log), site="\n".join(leads)))
    return folder


RECIPES = {"small": Recipe(("recipe.py",), ("recipe.py",), (".",))}


def cache(kept: Path, root: Path, **variables: str) -> Cache:
    return Cache(kept, {**os.environ, **variables}, root, RECIPES)


def made(log: Path) -> int:
    return log.read_text().count("made") if log.exists() else 0


def test_two_clones_share_what_is_not_theirs_and_each_has_its_own_package(tmp_path: Path) -> None:
    kept, log = tmp_path / "kept", tmp_path / "log"
    for name in ("first", "second"):
        root = clone(tmp_path / name, log)
        folder = root / ".venv"
        cache(kept, root).environment("small", folder)
        cache(kept, root).environment("small", folder)  # Once more over what is there.
        said = subprocess.run([folder / "bin" / "says"], capture_output=True, text=True, check=True).stdout.split()
        assert said == ["of", name, str(folder)]
    assert made(log) == 1
    [entry] = kept.glob("small-*/")
    assert not list(entry.rglob("*anyproject*"))  # It knows no clone: any of them may be removed.
    assert json.loads((entry / "whole.json").read_text()) == {"own": {"anyproject": "."}}


def test_an_entry_that_could_not_be_made_or_was_cut_off_is_not_used(tmp_path: Path) -> None:
    kept, log = tmp_path / "kept", tmp_path / "log"
    root = clone(tmp_path / "clone", log)
    with pytest.raises(subprocess.CalledProcessError):
        cache(kept, root, FAILS="1").entry("small")
    assert not list(kept.glob("small-*/"))
    place = cache(kept, root).entry("small")
    (place / "whole.json").unlink()  # As where the machine was switched off.
    (place / "half").touch()
    assert cache(kept, root).entry("small") == place
    assert made(log) == 3
    assert not (place / "half").exists()


def test_the_name_changes_with_what_makes_it_and_with_nothing_else(tmp_path: Path) -> None:
    root = clone(tmp_path / "clone", tmp_path / "log")
    recipes = {**RECIPES, "above": Recipe(("recipe.py",), (), above="small")}

    def names(**variables: str) -> tuple[str, str]:
        return name_of("small", variables, root, recipes), name_of("above", variables, root, recipes)

    first = names()
    assert first == names(HOME="/elsewhere", ANYCHIP_TEST_CPU="avx2", ANYCHIP_ENVIRONMENTS_CACHE="/there")
    project = root / "pyproject.toml"
    project.write_text(PROJECT + "[tool.ruff]\nline-length = 100\n")
    assert names() == first
    seen = {first, names(ANYCHIP_TORCH="cpu")}
    project.write_text(PROJECT.replace("numpy", "numpy>=2"))
    seen.add(names())
    (root / "recipe.py").write_text("another")
    seen.add(names())
    assert len({small for small, _ in seen}) == len({above for _, above in seen}) == 4


def test_entries_that_nobody_uses_go_but_for_the_newest(tmp_path: Path) -> None:
    kept = Cache(tmp_path, {}, tmp_path, RECIPES)
    ages_s = {"small-a": 0, "small-b": 100, "small-c": cached.IN_USE_S - 100, "small-d": cached.IN_USE_S + 100}
    for name, age_s in {**ages_s, "other-e": 10 * cached.IN_USE_S}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "whole.json").touch()
        os.utime(tmp_path / name / "whole.json", (time.time() - age_s,) * 2)
    kept.trim("small")
    assert {path.name for path in tmp_path.glob("*/")} == {"small-a", "small-b", "small-c", "other-e"}
