"""Record the SHA-256 of every package that an image takes from a registry, so that a build refuses any other file.

    pip install uv && python3 deploy/image/hashes.py       # asks the registry, writes deploy/image/hashes/*.txt
    python3 deploy/image/hashes.py --check                 # asks nobody; exit 1 where versions have moved on

Each image over plain Python has one file; vendors' bases bring torch and their own versions, which no list can know.
torch, torchvision and the CUDA libraries they need are not in it: they come from PyTorch's index, by exact version.
Owns: the form of the files, which deploy/install.py gives to pip as they are. Versions are those of constraints.txt.
The registry is uv's (UV_DEFAULT_INDEX); its name is not recorded.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from deploy.image.dockerfiles import FLAVOURS  # noqa: E402
from deploy.install import read_project, requirements  # noqa: E402

_ENTRY = re.compile(r"^([\w.-]+)==(\S+)((?: ;[^\\\n]*)?(?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n", re.MULTILINE)
_OLDEST = "3.10"
_OTHERS = {"torch", "torchvision"}
_OF_TORCH = re.compile(r"torch|triton|nvidia-|cuda-")
_HEAD = (
    "# Written by deploy/image/hashes.py for Dockerfile.{}: run it after changing constraints.txt or pyproject.toml.\n"
)


def hashed() -> list[str]:
    """Return the images that have a list."""
    return [name for name, flavour in FLAVOURS.items() if flavour.torch != "keep"]


def path_of(flavour: str) -> Path:
    """Return the path of an image's list."""
    return Path(__file__).with_name("hashes") / f"{flavour}.txt"


def pinned() -> set[tuple[str, str]]:
    """Return names and versions of constraints.txt; a name may have several, for several Pythons."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    return {(name.lower(), version) for name, version in re.findall(r"^([\w.-]+)==([^\s;#]+)", lines, re.MULTILINE)}


def compiled(flavour: str) -> str:
    """Make the list from the registry's present files. Raises CalledProcessError if uv or the registry refuses."""
    command = ["uv", "pip", "compile", "--quiet", "--universal", "--python-version", _OLDEST, "--generate-hashes"]
    command += ["--no-header", "--no-annotate", "--constraint", "constraints.txt", "-"]
    wanted = requirements(read_project(), FLAVOURS[flavour].extras.split(","))
    done = subprocess.run(command, input="\n".join(wanted), cwd=ROOT, capture_output=True, text=True, check=True)
    known = {name for name, _ in pinned()} - _OTHERS
    found = list(_ENTRY.finditer(done.stdout))
    unknown = {match[1] for match in found} - known
    if others := sorted(name for name in unknown if not _OF_TORCH.match(name)):
        sys.exit(f"anychip: constraints.txt lacks {', '.join(others)}")
    entries = [match[0] for match in found if match[1] in known]
    return _HEAD.format(flavour) + "".join(entries)


def stale(flavour: str) -> list[str]:
    """Return packages of the list with another version than in constraints.txt, and required ones that it lacks."""
    listed = {(name, version) for name, version, _ in _ENTRY.findall(path_of(flavour).read_text(encoding="utf-8"))}
    wanted = requirements(read_project(), FLAVOURS[flavour].extras.split(","))
    asked = {re.split(r"[^\w.-]", line, maxsplit=1)[0].lower() for line in wanted} - _OTHERS
    return sorted(f"{name} {version}" for name, version in listed - pinned()) + sorted(
        asked - {name for name, _ in listed}
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Write down the hashes of the packages of images over plain Python.")
    parser.add_argument(
        "--check", action="store_true", help="ask nobody; exit 1 where versions are not constraints.txt's"
    )
    if parser.parse_args().check:
        moved = [f"{flavour}: {', '.join(stale(flavour))}" for flavour in hashed() if stale(flavour)]
        sys.exit(f"not up to date: {'; '.join(moved)}; run python3 deploy/image/hashes.py" if moved else 0)
    for flavour in hashed():
        try:
            text = compiled(flavour)
        except FileNotFoundError:
            sys.exit("anychip: needs uv: pip install uv")
        except subprocess.CalledProcessError as error:
            sys.exit(f"anychip: {error.stderr.strip()}")
        path_of(flavour).parent.mkdir(exist_ok=True)
        path_of(flavour).write_text(text, encoding="utf-8")
        print(path_of(flavour))


if __name__ == "__main__":
    main()
