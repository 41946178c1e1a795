"""Commands that run the image on this host, with the devices, groups and mounts that exist on it.

`anychip doctor --container ascend` prints them, and so does deploy/preflight.py on a host with nothing installed: must
import nothing but the standard library, and load no driver.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from anychip_base.extras import version
from anychip_tools.facts import rows

FORMS = ("docker", "helm", "compose")
IMAGE = "anychip"


class PreflightError(Exception):
    """Host on which the image cannot run; the message says what is missing."""


NEEDS = {row.machine.flavour: row.machine.container for row in rows().values() if row.machine.flavour}
_ASCEND_CARDS = "ascend-cards.yaml"
_EXAMPLE_GROUP = 1000
_TARGETS = {"npu-smi": "/usr/local/sbin/npu-smi"}


@dataclass(frozen=True)
class HostFiles:
    """Paths of this host for a container. `groups`: numbers of groups. `tool`: the vendor's, for telemetry."""

    devices: tuple[str, ...]
    mounts: tuple[str, ...]
    tool: str
    groups: tuple[int, ...]
    variables: dict[str, int]


def look(flavour: str, root: Path = Path("/")) -> HostFiles:
    """Find the files of this host. Raises PreflightError, which names every missing path."""
    needs = NEEDS[flavour]

    def there(pattern: str) -> list[Path]:
        paths = root.glob(pattern.lstrip("/"))
        return sorted(paths, key=lambda path: [int(part) for part in re.findall(r"\d+", path.name)])

    def host(path: Path) -> str:
        return f"/{path.relative_to(root)}"

    wanted = [*needs.devices, *needs.mounts]
    missing = [pattern for pattern in wanted if not there(pattern)]
    if missing:
        raise PreflightError(f"this host has no {', '.join(missing)}: install the vendor's driver first")
    devices = [host(path) for pattern in (*needs.devices, *needs.optional_devices) for path in there(pattern)]
    tool = next((host(path) for name in needs.one_of for path in there(name)), "")
    owners = {name: there(pattern)[0].stat().st_gid for name, pattern in needs.groups.items() if there(pattern)}
    groups = dict.fromkeys(path.stat().st_gid for pattern in needs.groups.values() for path in there(pattern))
    mounts = tuple(host(path) for pattern in needs.mounts for path in there(pattern))
    return HostFiles(tuple(devices), mounts, tool, tuple(groups), owners)


def docker_run(flavour: str, found: HostFiles, release: str) -> str:
    """Return the `docker run` command that serves on every device found."""
    words = ["docker run --detach --name anychip --init --read-only --cap-drop ALL --security-opt no-new-privileges"]
    words += ["--memory 16g --pids-limit 4096"]
    words += [NEEDS[flavour].runtime] if NEEDS[flavour].runtime else []
    words += [f"--device {device}" for device in found.devices]
    words += [f"--group-add {group}" for group in found.groups if group]
    for path in (*found.mounts, *([found.tool] if found.tool else ())):
        target = _TARGETS.get(Path(path).name, path)
        words.append(f"--mount type=bind,source={shlex.quote(path)},target={target},readonly")
    words += ["--volume anychip:/cache --publish 127.0.0.1:8000:8000 --stop-timeout 45"]
    return " \\\n  ".join([*words, f"{IMAGE}:{release}-{flavour}"])


def helm_values(flavour: str, found: HostFiles) -> str:
    """Return the options of `helm install` that depend on the host."""
    options = [f"-f deploy/helm/anychip/values-{flavour}.yaml"]
    groups = [str(group) for group in found.groups if group]
    if groups:
        options.append(f"--set 'supplementalGroups={{{','.join(groups)}}}'")
    elif NEEDS[flavour].groups:
        options.append("--set deviceFiles=")  # Group 0, which the container's user is in.
    return " ".join(options)


def compose_env(flavour: str, found: HostFiles) -> str:
    """Return the lines of `.env` beside compose.yaml."""
    lines = [f"COMPOSE_FILE=compose.yaml:compose.{flavour}.yaml"]
    if more := [path for path in found.devices if re.fullmatch(r"/dev/davinci\d+", path)][1:]:
        lines = [f"# {_ASCEND_CARDS}: keep the lines of {', '.join(more)}", f"{lines[0]}:{_ASCEND_CARDS}"]
    lines += [f"{name}={gid}" for name, gid in found.variables.items()]
    if "/dev/mkfd" in found.devices:
        lines.append("MKFD_DEVICE=/dev/mkfd")
    variable = {"ascend": "NPU_SMI", "mlu": "CNMON"}.get(flavour)
    if variable:
        lines.append(f"{variable}={found.tool or '/dev/null'}")
    return "\n".join(lines)


def _example(flavour: str) -> HostFiles:
    needs = NEEDS[flavour]
    devices = tuple(path.replace("[0-9]*", "0") for path in needs.devices)
    groups = (_EXAMPLE_GROUP,) if needs.groups else ()
    tool = needs.one_of[0] if needs.one_of else ""
    return HostFiles(devices, needs.mounts, tool, groups, dict.fromkeys(needs.groups, _EXAMPLE_GROUP))


def host_options(flavour: str, form: str, root: Path = Path("/"), *, example: bool = False) -> tuple[str, str]:
    """Return a docker run command, options of helm install or lines of .env; and a note, empty if there is none.

    `example`: for a host with one card, whatever this host has. Raises PreflightError.
    """
    found = _example(flavour) if example else look(flavour, root)
    if form == "helm":
        text = helm_values(flavour, found)
    elif form == "compose":
        text = compose_env(flavour, found)
    else:
        text = docker_run(flavour, found, version())
    notes = []
    if example:
        group = f"; the group {_EXAMPLE_GROUP} is made up" if found.groups else ""
        notes.append(f"an example, for a host with one card{group}: on the host itself leave --example out")
    if NEEDS[flavour].one_of and not found.tool:
        notes.append(f"no {Path(NEEDS[flavour].one_of[0]).name} here: no telemetry")
    return text, "; ".join(notes)


def show(flavour: str, form: str, *, example: bool) -> None:
    """Print what `host_options` returns, its note on standard error. Raises PreflightError."""
    text, note = host_options(flavour, form, example=example)
    print(text)
    if note:
        print(f"anychip: {note}", file=sys.stderr)


def main() -> None:
    """Run the command line of deploy/preflight.py."""
    parser = argparse.ArgumentParser(
        description="Say how to run the image on this host.", epilog="example: python3 deploy/preflight.py ascend"
    )
    parser.add_argument("flavour", choices=sorted(NEEDS))
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--helm", action="store_true", help="print options of helm install instead")
    forms.add_argument("--compose", action="store_true", help="print lines for deploy/compose/.env instead")
    parser.add_argument("--example", action="store_true", help="for a host with one card, not for this one")
    options = parser.parse_args()
    form = "helm" if options.helm else "compose" if options.compose else "docker"
    try:
        show(options.flavour, form, example=options.example)
    except PreflightError as error:
        sys.exit(f"anychip: {error}")
