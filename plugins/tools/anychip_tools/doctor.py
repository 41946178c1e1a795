"""`anychip doctor`: checks of what a service needs before it can start, each failure with its remedy.

Must not change anything except a file of its own in the cache folder, nor import torch before a child process has
imported it without harm: a vendor's build can end the process that imports it.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator

from anychip_base.extras import entry_points, version
from anychip_base.interpreter import python_command
from anychip_tools import container, doctor_vendor, report
from anychip_tools.compatibility import IMPORT_REMEDIES
from anychip_tools.doctor_vendor import Check
from app.arguments import CommandError, add_settings, read_settings
from app.config import Settings
from app.config.values import split
from app.telling import say

TEXT = "Check the environment, one thing after the other; says what to do about failures."
EXAMPLE = "anychip doctor --device auto --skip port"

_TORCH_TIME_LIMIT_S = 120.0
_LEAST_FREE_BYTES = 2 << 30
_LEAST_OPEN_FILES = 1024
# Packages that the service imports besides torch; their C extensions may lack a library of the system.
_MODULES = ("numpy", "cv2", "PIL", "safetensors", "orjson", "fastapi", "uvicorn", "httptools", "prometheus_client")
# nms lives in torchvision's own C++ part: it is missing where the two builds do not fit each other.
_TORCH = (
    "import numpy, torch, torchvision; boxes = torch.tensor([[0., 0., 1., 1.]]); "
    "torchvision.ops.nms(boxes, torch.ones(1), 0.5); torch.from_numpy(numpy.ones(1)).numpy(); "
    "print(f'torch {torch.__version__}, torchvision {torchvision.__version__}, numpy {numpy.__version__}')"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add("--skip", default="", metavar="CHECK,…", help=f"checks to leave out, of {', '.join(CHECKS)}")
    add("--json", action="store_true", help="print JSON")
    kinds = sorted(container.NEEDS)
    add("--container", choices=kinds, help="check nothing; print the docker run of an image for this host")
    text = "with --container: for docker, helm or compose"
    add("--form", choices=container.FORMS, default="docker", help=text)
    text = "with --container: for a host with one card, also where there is none"
    add("--example", action="store_true", help=text)
    add_settings(parser, ("models", "weights", "trust_exported", "device", "host", "port", "cache_dir", "simulate"))


def run(parsed: argparse.Namespace) -> int:
    """Return exit code 1 if a check fails. Raises CommandError."""
    if parsed.container:
        try:
            container.show(parsed.container, parsed.form, example=parsed.example)
        except container.PreflightError as error:
            raise CommandError(str(error)) from None
        return 0
    skip = split(parsed.skip)
    unknown = [name for name in skip if name not in CHECKS]
    if unknown:
        raise CommandError(f"there is no check {unknown[0]!r}; there is {', '.join(CHECKS)}")
    found = []
    for check in examine(read_settings(parsed), skip):
        found.append(check)
        if not parsed.json:
            print(f"{check.status}  {check.name:14}{check.detail}", flush=True)
            if check.remedy:
                print(f"{'':20}-> {check.remedy}", flush=True)
    if parsed.json:
        print(report.in_json([vars(check) for check in found]))
    return 1 if any(check.status == "FAIL" for check in found) else 0


def examine(settings: Settings, skip: Collection[str] = ()) -> Iterator[Check]:
    """Run the checks in turn and yield each result at once, because some take seconds.

    Checks named in `skip` are left out. Checks that need torch yield SKIP if torch is skipped or does not work.
    """
    torch_works = "torch" not in skip
    for name, check in CHECKS.items():
        if name in skip:
            continue
        if name in _NEEDS_TORCH and not torch_works:
            yield Check(name, "SKIP", "needs torch, which is skipped or does not work")
            continue
        say(f"checking {name}")
        found = check(settings)
        torch_works &= name != "torch" or found.status == "PASS"
        yield found


def _python(_: Settings) -> Check:
    version = platform.python_version()
    detail = f"Python {version} on {platform.system()} {platform.machine()}, {sys.prefix}"
    if sys.platform != "linux":
        return Check("python", "FAIL", detail, "run the service on Linux: its shared memory is a Linux memfd")
    return Check("python", "PASS", detail)


def _packages(_: Settings) -> Check:
    for module in _MODULES:
        try:
            importlib.import_module(module)
        except Exception as error:  # A C extension may raise anything.
            reason = _line(str(error)) or type(error).__name__
            remedy = _remedy(reason) or "install again: make clean install, in anychip's sources"
            return Check("packages", "FAIL", f"{module} cannot be imported: {reason}", remedy)
    return Check("packages", "PASS", f"anychip {version()} and the {len(_MODULES)} packages it serves with")


def _torch(_: Settings) -> Check:
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    try:
        asked = subprocess.run(
            python_command("-c", _TORCH),
            env=environment,
            capture_output=True,
            text=True,
            timeout=_TORCH_TIME_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        reason = f"importing torch takes more than {_TORCH_TIME_LIMIT_S:g} s"
        return Check("torch", "FAIL", reason, "its driver may hang: ask the vendor's tool whether the device answers")
    if asked.returncode == 0:
        return Check("torch", "PASS", _line(asked.stdout))
    reason = _line(asked.stderr) or f"it ended its process, status {asked.returncode}"
    if entry_points("anychip.backends"):
        reason += "; what plug-ins know of their cards is checked once torch can be imported"
    return Check("torch", "FAIL", reason, _remedy(asked.stderr) or "install the torch that the device's vendor names")


def _kernel(_: Settings) -> Check:
    """Check the bounds that the kernel puts on decoders and on the process that tries a file which is a program."""
    from models.confinement import what_there_is

    there = what_there_is()
    landlock = f"Landlock {there.landlock}" if there.landlock else "no Landlock"
    detail = f"{platform.release()}: {landlock}, {'seccomp' if there.seccomp else 'no seccomp'}"
    if there.landlock and there.seccomp:
        return Check("kernel", "PASS", f"{detail}; decoders can open no file, no socket and no process")
    remedy = (
        "images of strangers are decoded, and files that are programs run, with fewer bounds here: a kernel from 5.13 "
        "on, and a container runtime that lets processes confine themselves, have both"
    )
    return Check("kernel", "WARN", detail, remedy)


def _images(_: Settings) -> Check:
    from app.images.decoding import READERS, decode, library
    from app.images.header import read_header
    from app.precision.probes import probe_files

    encoded = probe_files()[0]
    try:
        header = read_header(encoded)
        pixels = decode(encoded, header)
    except Exception as error:  # A library of the system may raise anything.
        return Check(
            "images", "FAIL", f"a JPEG cannot be decoded: {_line(str(error))}", "install pillow and torchvision again"
        )
    order = ", ".join([*READERS, "Pillow"])
    size = f"{header.width} x {header.height}"
    detail = f"{library()} made {tuple(pixels.shape)} bytes of a JPEG of {size} (the first that works of {order})"
    return Check("images", "PASS", detail)


def _shared_memory(_: Settings) -> Check:
    from app.processes.arena import Arena

    try:
        Arena([(1 << 20, 1)])
    except OSError as error:
        remedy = "allow memfd_create and mmap: a seccomp profile of the container may forbid them"
        return Check("shared-memory", "FAIL", f"a memfd cannot be made: {error.strerror}", remedy)
    return Check("shared-memory", "PASS", "memfd works; /dev/shm is not used, so its size does not matter")


def _cache(settings: Settings) -> Check:
    folder = settings.cache_dir.expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"anychip")
        free_bytes = shutil.disk_usage(folder).free
    except OSError as error:
        remedy = f"make it writable for uid {os.getuid()}, gid {os.getgid()}, or name another in ANYCHIP_CACHE_DIR"
        return Check("cache", "FAIL", f"{folder} cannot be written: {error.strerror}", remedy)
    detail = f"{folder} can be written, {free_bytes / 2**30:.1f} GiB free"
    if free_bytes < _LEAST_FREE_BYTES:
        return Check("cache", "WARN", detail, "weights and compiled engines may need more: free some space")
    return Check("cache", "PASS", detail)


def _weights(settings: Settings) -> Check:
    from models import ModelError, WeightsNotFoundError, open_model, parse_spec
    from models.addresses import is_elsewhere

    found = []
    for text in settings.model_specs:
        official = elsewhere = False
        try:
            spec = parse_spec(text, settings.weights)
            official, elsewhere = spec.weights == "official", is_elsewhere(spec.weights)
            model = open_model(spec, settings.weights_dir, allow_download=False, trusted=settings.trust_exported)
        except ModelError as error:
            if official and isinstance(error, WeightsNotFoundError):
                detail = f"the official file of {spec.architecture} is not in {settings.weights_dir}"
                remedy = f"with a network the service fetches it; without: anychip weights fetch {spec.architecture}"
                return Check("weights", "WARN", detail, remedy)
            if elsewhere and isinstance(error, WeightsNotFoundError):
                return Check("weights", "WARN", str(error), "with a network the service fetches it when it starts")
            return Check("weights", "FAIL", str(error), "name models and weights that are there: --models, --weights")
        found.append(f"{model.name} ({model.weights}, {len(model.labels)} classes)")
    return Check("weights", "PASS", ", ".join(found))


def _limits(_: Settings) -> Check:
    import resource

    from backends import host

    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    used_bytes, total_bytes = host.memory_bytes()
    unlimited = files == resource.RLIM_INFINITY
    detail = (
        f"{host.core_count()} cores, {(total_bytes - used_bytes) / 2**30:.1f} of {total_bytes / 2**30:.1f} GiB free"
    )
    detail += ", open files without limit" if unlimited else f", {files} open files"
    if not unlimited and files < _LEAST_OPEN_FILES:
        return Check("limits", "WARN", detail, f"allow {_LEAST_OPEN_FILES} at least: ulimit -n, LimitNOFILE=, --ulimit")
    if total_bytes - used_bytes < _LEAST_FREE_BYTES:
        return Check("limits", "WARN", detail, "a worker needs 1 to 3 GiB of host memory: give more, or fewer workers")
    return Check("limits", "PASS", detail)


def _port(settings: Settings) -> Check:
    where = f"{settings.host}:{settings.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(address)
    except OSError as error:
        return Check(
            "port", "FAIL", f"{where} cannot be had: {error.strerror}", "end what listens there, or use --port"
        )
    return Check("port", "PASS", f"{where} is free")


def _device_files(_: Settings) -> Check:
    from backends import device_files

    files = device_files()
    closed = [path for path in files if not os.access(path, os.R_OK | os.W_OK)]
    if closed:
        group = os.stat(closed[0]).st_gid
        remedy = f"join the group that owns it: --group-add {group} for a container, usermod -aG for a user"
        return Check("device-files", "FAIL", f"{closed[0]} may not be opened by uid {os.getuid()}", remedy)
    if not files:
        return Check("device-files", "PASS", "no accelerator's device file is here")
    return Check("device-files", "PASS", ", ".join(files) + ": open to this user")


def _devices(settings: Settings) -> Check:
    from backends import BackendUnavailableError, choose, device_files, report, simulated

    simulated.configure(settings.simulate, "", settings.cache_dir.expanduser())
    try:
        chosen = choose(settings.device)
    except BackendUnavailableError as error:
        return Check("devices", "FAIL", str(error), "docs/hardware.md names driver, packages and mounts of each vendor")
    rows = {row.device: row for row in report()}
    for device in chosen.devices:
        if device in rows and not rows[device].ok:
            remedy = "the driver or the vendor's package is broken: compare their versions with docs/hardware.md"
            return Check("devices", "FAIL", f"{device}: {rows[device].detail}", remedy)
    detail = ", ".join(f"{device} ({rows[device].detail})" if device in rows else device for device in chosen.devices)
    files = device_files()
    if chosen.backend.facts.device_type == "cpu" and settings.device in ("auto", "all") and files:
        refusals = " ".join(f"{name}: {reason}" for name, reason in chosen.refusals.items())
        return Check("devices", "WARN", f"{files[0]} is here, and still the CPU would serve", refusals)
    return Check("devices", "PASS", detail)


def _remedy(message: str) -> str:
    lowered = message.lower()
    return next((remedy for sign, remedy in IMPORT_REMEDIES.items() if sign in lowered), "")


def _line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


CHECKS: dict[str, Callable[[Settings], Check]] = {
    "python": _python,
    "packages": _packages,
    "torch": _torch,
    "compatibility": lambda settings: doctor_vendor.compatibility(settings.device),
    "variables": lambda settings: doctor_vendor.variables(settings.device, os.environ),
    "libraries": lambda settings: doctor_vendor.libraries("cpu" if settings.simulate else settings.device),
    "cards": lambda settings: doctor_vendor.cards(settings.device),
    "kernel": _kernel,
    "images": _images,
    "shared-memory": _shared_memory,
    "cache": _cache,
    "weights": _weights,
    "limits": _limits,
    "port": _port,
    "device-files": _device_files,
    "devices": _devices,
}
_NEEDS_TORCH = ("kernel", "images", "weights", "limits", "device-files", "devices")
