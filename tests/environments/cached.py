"""Environments of tests that are kept beside clones: made once for all that would make the same.

    ANYCHIP_ENVIRONMENTS_CACHE=~/.cache/anychip/environments python3 tests/environments/cached.py developer .venv

An entry is an environment as its recipe makes it, at a place of its own and without this repository's packages, which
are taken out of it again. A clone's environment is a thin one: a line that leads to the entry, the programs of the
entry with its own Python, and the clone's packages. The name of an entry has a hash of what makes it.

Used only where the variable says so: `make install` makes environments that share nothing. It locks files.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from deploy.install import InstallError, choose_torch, look, read_pins, read_project  # noqa: E402

VARIABLE = "ANYCHIP_ENVIRONMENTS_CACHE"
KEPT = 2
"""Entries of one recipe that stay, however long ago they were used."""
IN_USE_S = 6 * 3600
"""An entry that was asked for within this time stays: something may run in it."""
VERSION = 1
"""Of the form of entries: another one is another entry."""
_WHOLE = "whole.json"
"""Written last: without it, an entry was cut off while it was made."""
_SETUPTOOLS = "setuptools>=77"


@dataclass(frozen=True)
class Recipe:
    command: tuple[str, ...]
    """Python's words, before the folder."""
    made_by: tuple[str, ...]
    """Files that decide what is in it."""
    projects: tuple[str, ...] = ()
    """Folders with a pyproject.toml whose dependencies do."""
    above: str = ""
    """The recipe of the environment whose packages it sees, and whose Python makes it."""
    has_ours: bool = True
    """Whether this repository's packages are in it; else clones have a link to the entry."""


_MAKER = "tests/environments/make.py"
_PLUGINS = tuple(f"plugins/{name}" for name in ("ascend", "grpc", "hosting", "samples"))
_SET_UP = ("constraints.txt", "deploy/install.py")  # Of the vendors' facts, only the torch chosen by them counts.
_MADE_BY = (*_SET_UP, _MAKER)
RECIPES = {
    "developer": Recipe(("deploy/install.py", "--dev"), _SET_UP, (".", *_PLUGINS)),
    "clients": Recipe((_MAKER, "clients"), ("deploy/install.py", _MAKER), has_ours=False),
    "deploy": Recipe((_MAKER, "deploy"), _MADE_BY, (".", "plugins/hosting"), above="developer"),
    "ocr": Recipe((_MAKER, "ocr"), _MADE_BY, (".", "plugins/ocr"), above="developer"),
    "least": Recipe((_MAKER, "least"), _MADE_BY, (".", "plugins/grpc"), above="developer"),
    "arm": Recipe((_MAKER, "arm"), _MADE_BY, (".",), above="developer", has_ours=False),
}


def name_of(key: str, environ: Mapping[str, str], root: Path = ROOT, recipes: Mapping[str, Recipe] = RECIPES) -> str:
    """Return the name of the entry: the recipe's, and a hash of what makes it."""
    recipe = recipes[key]
    pins = read_pins((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    about: dict[str, object] = {
        "python": [sys.version, sysconfig.get_platform(), sys.base_prefix, *platform.libc_ver()],
        "command": recipe.command,
        "version": VERSION,
        "files": {each: (root / each).read_text(encoding="utf-8") for each in recipe.made_by},
        "torch": asdict(choose_torch(look(), environ.get("ANYCHIP_TORCH") or "auto", pins)),
        "variables": {
            name: text
            for name, text in environ.items()
            if name.startswith("ANYCHIP_") and not name.startswith("ANYCHIP_TEST_") and name != VARIABLE
        },
        "dependencies": {each: _dependencies(root / each) for each in recipe.projects},
        "above": name_of(recipe.above, environ, root, recipes) if recipe.above else "",
    }
    return f"{key}-{hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:20]}"


def _dependencies(folder: Path) -> list[object]:
    project = read_project(folder)
    return [project["name"], project.get("dependencies", []), project.get("optional-dependencies", {})]


@dataclass(frozen=True)
class Cache:
    """The folder of entries, for one clone."""

    folder: Path
    environ: Mapping[str, str]
    root: Path = ROOT
    recipes: Mapping[str, Recipe] = field(default_factory=lambda: RECIPES)

    def entry(self, key: str) -> Path:
        """Return a whole entry: the one that is there, or a new one. Who else wants it waits meanwhile.

        Raises subprocess.CalledProcessError if it cannot be made. What was made in part is removed, after a kill by
        the next call.
        """
        recipe = self.recipes[key]
        above = self.entry(recipe.above) if recipe.above else None
        place = self.folder / name_of(key, self.environ, self.root, self.recipes)
        self.folder.mkdir(parents=True, exist_ok=True)
        with _locked(place.with_name(f"{place.name}.lock")):
            if not (place / _WHOLE).exists():
                shutil.rmtree(place, ignore_errors=True)
                try:
                    self._make(recipe, place, above)
                except BaseException:
                    shutil.rmtree(place, ignore_errors=True)
                    raise
                print(f"anychip: keeps {place}", flush=True)
            os.utime(place / _WHOLE)
        self.trim(key)
        return place

    def _make(self, recipe: Recipe, place: Path, above: Path | None) -> None:
        python = str(above / "bin" / "python") if above else sys.executable
        # Of the clone that makes it nothing may stay in it, not even where the clone lies.
        subprocess.run([python, *recipe.command, str(place)], cwd=self.root, env=dict(self.environ), check=True)
        own = _take_out(place / "bin" / "python", self.root) if recipe.has_ours else {}
        beside = place / f"{_WHOLE}.part"
        beside.write_text(json.dumps({"own": own}), encoding="utf-8")
        beside.replace(place / _WHOLE)

    def trim(self, key: str) -> None:
        """Remove entries of a recipe that nobody has asked for lately, but for the newest."""
        used = {}
        for place in self.folder.glob(f"{key}-*"):
            with contextlib.suppress(OSError):
                used[place] = (place / _WHOLE).stat().st_mtime
        for place in sorted(used, key=lambda each: used[each], reverse=True)[KEPT:]:
            if time.time() - used[place] < IN_USE_S:
                continue
            with _locked(place.with_name(f"{place.name}.lock"), waits=False) as mine:
                if mine:
                    (place / _WHOLE).unlink(missing_ok=True)  # First: what is removed in part is not whole.
                    shutil.rmtree(place, ignore_errors=True)

    def environment(self, key: str, folder: Path) -> None:
        """Make a clone's environment over an entry. Raises subprocess.CalledProcessError."""
        entry = self.entry(key)
        if folder.is_symlink():
            folder.unlink()
        elif (folder / "bin" / "python").is_symlink() or (folder / "bin" / "python").exists():
            shutil.rmtree(folder)  # Only what is an environment may be cleared: the folder could be anything.
        if self.recipes[key].has_ours:
            self._thin(entry, folder)
        else:
            folder.symlink_to(entry)

    def _thin(self, entry: Path, folder: Path) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        python = folder / "bin" / "python"
        leads_to = f"import site; site.addsitedir({str(_site(entry / 'bin' / 'python'))!r})\n"
        (_site(python) / "zz_kept_environment.pth").write_text(leads_to, encoding="utf-8")
        for file in (entry / "bin").iterdir():
            place = folder / "bin" / file.name
            if not place.exists() and not file.name.lower().startswith("activate"):
                _copy_program(file, place, entry / "bin", python)
        if (entry / "constraints.txt").exists():
            shutil.copy(entry / "constraints.txt", folder)
        own: dict[str, str] = json.loads((entry / _WHOLE).read_text(encoding="utf-8"))["own"]
        if own:
            links = [word for each in own.values() for word in ("--editable", str(self.root / each))]
            pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
            subprocess.run([*pip, "--no-deps", "--no-build-isolation", *links], check=True)


def _site(python: Path) -> Path:
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip())


def _take_out(python: Path, root: Path) -> dict[str, str]:
    """Take the packages of a clone out of an entry again, and return the folder of each, as the clone has them."""
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    ask = [*pip, "list", "--editable", "--local", "--format", "json"]
    listed = json.loads(subprocess.run(ask, capture_output=True, text=True, check=True).stdout)
    own = {
        each["name"]: Path(each["editable_project_location"]).resolve().relative_to(root.resolve()).as_posix()
        for each in listed
    }
    if own:
        subprocess.run([*pip, "install", "--quiet", _SETUPTOOLS], check=True)  # With which clones put theirs in.
        subprocess.run([*pip, "uninstall", "--quiet", "--yes", *own], check=True)
    return own


def _copy_program(file: Path, place: Path, entry: Path, python: Path) -> None:
    """Give a clone a program of the entry: a script of Python's starts the clone's Python, which sees its packages."""
    head = f"#!{entry}/python".encode()
    with file.open("rb") as opened:
        is_script = opened.read(len(head)) == head
    if not is_script:
        place.symlink_to(file)
        return
    text = file.read_bytes()
    place.write_bytes(f"#!{python.absolute()}\n".encode() + text.partition(b"\n")[2])
    place.chmod(0o755)


@contextlib.contextmanager
def _locked(file: Path, *, waits: bool = True) -> Iterator[bool]:
    """Hold a lock, which ends with this process, and say whether it is held: it need not be where nobody waits."""
    with file.open("w") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="Make an environment of tests over one that is kept beside clones.")
    parser.add_argument("recipe", choices=RECIPES)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args(words)
    kept = os.environ.get(VARIABLE)
    if not kept:
        sys.exit(f"anychip: {VARIABLE} does not say where environments are kept")
    try:
        Cache(Path(kept).expanduser().absolute(), os.environ).environment(options.recipe, options.folder.absolute())
    except (InstallError, subprocess.CalledProcessError) as error:
        sys.exit(f"anychip: the environment {options.recipe} could not be made: {error}")


if __name__ == "__main__":
    os.umask(0o022)
    main(sys.argv[1:])
