"""Compare the service with other servers: the same network file, the same decoding, one command.

The network is ResNet50 in int8 as an OpenVINO file, which our own engine makes once. Each server answers JPEGs with it,
turn and turn about; an in-process loop (`loop`: the same decoder and engine, no server) is the limit.

    python -m benchmarks.race [--connections 1,32] [--seconds 4] [--rounds 5] [--folder FOLDER] [--json FILE]
    python -m benchmarks.race --without triton,litserve
    python -m benchmarks.race --triton /opt/tritonserver/bin/tritonserver     # another than the registry's

They are mosec, LitServe, BentoML, TorchServe (which needs Java 11 or newer) and Triton. pip installs them, once, into
environments in FOLDER; Triton is the binary of `nvidia-pytriton`, with its Python backend (x86-64, glibc of 2.35 or
newer). Without a CUDA driver that build starts, but its model was seen to get other bytes than were sent. A server that
cannot be installed, does not start or does not answer is left out with a message: Triton then needs `--triton` with
another build. Compare ratios: they are medians over pairs of neighbours; all share this machine's cores, the generator
of the load too.

Owns: environments, starts, rounds, figures. The others' code is in mosec_server, litserve_server,
bentoml_server, torchserve_server, triton_models.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from anychip_tools.benchmark.load import drive
from app.images.header import read_header
from backends.host import core_count
from benchmarks import servers, triton_models
from benchmarks.http_load import Ceiling
from benchmarks.race_network import MODEL, opened, settings_of

Runner = tuple[servers.Server, bytes]
"""Server, and the request to send to it."""
PACKAGES = {
    "mosec": "mosec",
    "litserve": "litserve",
    "bentoml": "bentoml",
    "torchserve": "torchserve",
    "triton": "nvidia-pytriton",
}
OURS, LOOP = "anychip", "loop"


def main() -> None:
    """Run the measurements and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--connections", default="1,32")
    parser.add_argument("--seconds", type=float, default=4, help="length of one measurement")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured; the median counts")
    parser.add_argument("--without", default="", help="who does not take part, e.g. triton,litserve")
    parser.add_argument("--triton", type=Path, help="a tritonserver (default: nvidia-pytriton's)")
    parser.add_argument("--folder", type=Path, default=Path("~/.cache/anychip/race"), help="for environments and files")
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args()
    given.folder = given.folder.expanduser().resolve()
    report = measure(given)
    print_report(report)
    if given.json:
        given.json.write_text(json.dumps(report, indent=2) + "\n")


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Measure all servers and the loop."""
    image = servers.sample_image()
    connections = [int(each) for each in given.connections.split(",")]
    rounds: dict[int, dict[str, list[dict[str, float]]]] = {number: {} for number in connections}
    settings = settings_of(given.folder / "network")
    with Ceiling(opened(settings), settings) as loop, contextlib.ExitStack() as stack:
        running = {OURS: stack.enter_context(_ours(given.folder, image))}
        for name, start in _STARTS.items():
            if name in given.without.split(","):
                continue
            try:
                running[name] = stack.enter_context(start(given, image))
            except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
                print(f"without {name}: {error}", file=sys.stderr)
        for name in [*running]:
            try:
                _driven(name, *running[name], max(connections), 2)  # Warm-up.
            except RuntimeError as error:
                print(f"without {error}", file=sys.stderr)
                del running[name]
        names = [OURS, *(name for name in running if name != OURS)]
        for number in range(given.rounds):
            for count in connections:
                figures = rounds[count]
                figures.setdefault(LOOP, []).append(_looped(loop, image, count, given.seconds))
                # Each round changes the order.
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    figures.setdefault(name, []).append(_driven(name, *running[name], count, given.seconds))
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cores": core_count(),
        "image_bytes": len(image),
        "seconds": given.seconds,
        "rounds": given.rounds,
        "figures": {str(count): {name: _medians(each) for name, each in rounds[count].items()} for count in rounds},
        "ours_of_theirs": {str(count): ratios(rounds[count]) for count in rounds},
    }


def ratios(rounds: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """Return our answers a second as a share of each other's: the median over rounds, within one round each."""
    return {
        name: statistics.median(
            ours["answers_per_s"] / each["answers_per_s"] for ours, each in zip(rounds[OURS], theirs, strict=True)
        )
        for name, theirs in rounds.items()
        if name != OURS
    }


def _medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(each.get(name, 0.0) for each in rounds) for name in rounds[0]}


def _driven(name: str, server: servers.Server, request: bytes, connections: int, seconds: float) -> dict[str, float]:
    before = server.cpu_by_role()
    load = drive(server.port, request, connections, seconds)
    after = server.cpu_by_role()
    answers = len(load.latencies_s)
    if load.errors or not answers:
        raise RuntimeError(f"{name}: {answers} answers, errors {load.errors}")
    used = {f"{role}_ms": (after[role] - before.get(role, 0.0)) / answers * 1e3 for role in after}
    latency = {"p50_ms": load.percentile_ms(50), "p99_ms": load.percentile_ms(99)}
    return {"answers_per_s": load.answers_per_s, **latency, "cpu_ms": sum(used.values()), **used}


def _looped(loop: Ceiling, image: bytes, connections: int, seconds: float) -> dict[str, float]:
    """Measure in this process: batches, the next one decoded meanwhile; for one connection image after image."""
    header = read_header(image)
    if connections == 1:
        taken_ms = loop.one_image_ms(image, header)
        return {"answers_per_s": 1e3 / taken_ms, "p50_ms": taken_ms}
    used_s = time.process_time()
    images_per_s = loop.images_per_s(image, header, seconds)
    return {
        "answers_per_s": images_per_s,
        "cpu_ms": (time.process_time() - used_s) / (images_per_s * seconds) * 1e3,
    }


@contextlib.contextmanager
def _ours(folder: Path, image: bytes) -> Iterator[Runner]:
    settings = settings_of(folder / "network")
    options = ("--weights", settings.weights, "--engine", settings.engine, "--precision", settings.precision)
    options += ("--batch-sizes", settings.batch_sizes, "--cache-dir", str(settings.cache_dir))
    with servers.service(MODEL, *options) as server:
        yield server, servers.service_request(MODEL, image)


def _mosec(given: argparse.Namespace, image: bytes) -> AbstractContextManager[Runner]:
    return _other("mosec", given, "/", servers.jpeg_request("/inference", image), str(core_count()))


def _litserve(given: argparse.Namespace, image: bytes) -> AbstractContextManager[Runner]:
    return _other("litserve", given, "/health", servers.form_request("file", image))


def _bentoml(given: argparse.Namespace, image: bytes) -> AbstractContextManager[Runner]:
    return _other("bentoml", given, "/livez", servers.form_request("images", image))


def _torchserve(given: argparse.Namespace, image: bytes) -> AbstractContextManager[Runner]:
    request = servers.jpeg_request("/predictions/race", image)
    return _other("torchserve", given, "/ping", request, str(given.folder / "torchserve-files"))


@contextlib.contextmanager
def _other(name: str, given: argparse.Namespace, path: str, request: bytes, *arguments: str) -> Iterator[Runner]:
    """Run benchmarks.NAME_server in its environment, on the network's folder; it answers a GET of `path`."""
    command = [str(_python_with(name, given.folder)), "-m", f"benchmarks.{name}_server"]
    with servers.other([*command, str(given.folder / "network"), *arguments, "--port"], path) as server:
        yield server, request


@contextlib.contextmanager
def _triton(given: argparse.Namespace, image: bytes) -> Iterator[Runner]:
    binary = given.triton
    if binary is None:
        python = _python_with("triton", given.folder)
        found = [*python.parent.parent.glob("lib/python3*/site-packages/pytriton/tritonserver/bin/tritonserver")]
        if not found:
            raise RuntimeError("nvidia-pytriton has brought no tritonserver; name one by --triton")
        binary = found[0]
    repository, backends = given.folder / "triton-models", given.folder / "triton-backends"
    triton_models.write_repository(repository, given.folder / "network")
    _link_backend(binary.resolve().parent.parent, backends / "python")
    command = [str(binary), "--model-repository", str(repository), "--http-address", "127.0.0.1"]
    command += ["--backend-directory", str(backends), "--allow-grpc", "false", "--allow-metrics", "false"]
    with servers.other([*command, "--log-info", "false", "--http-port"], "/v2/health/ready") as server:
        yield server, servers.file_request("race", image)


def _link_backend(triton: Path, folder: Path) -> None:
    """Link Triton's Python backend and its stub for our version of Python, which the package keeps apart."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    version = ".".join(map(str, sys.version_info[:2]))
    for found in (triton / "backends" / "python", triton / "python_backend_stubs" / version):
        for file in found.glob("*"):
            (folder / file.name).symlink_to(file)


def _python_with(name: str, folder: Path) -> Path:
    """Return the Python of an environment with the package; make the environment if it is missing or incomplete."""
    environment = folder / name
    python, done = environment / "bin" / "python", environment / "done"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(environment)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-qq", PACKAGES[name]], check=True)
        done.touch()
    return python


def print_report(report: dict[str, Any]) -> None:
    """Print the table and the ratios."""
    print(
        f"{MODEL} int8 on OpenVINO, JPEG of {report['image_bytes']} bytes, {report['cores']} cores, "
        f"{report['rounds']} rounds of {report['seconds']:g} s; medians"
    )
    print(f"{'':10}{'c':>4}{'answers/s':>11}{'p50 ms':>9}{'p99 ms':>9}{'CPU ms':>8}{'anychip / it':>14}   by process")
    for count, rows in report["figures"].items():
        for name, row in rows.items():
            ratio = report["ours_of_theirs"][count].get(name)
            used = "  ".join(
                f"{role[:-3]} {row[role]:.2f}" for role in row if role not in _KNOWN and row[role] >= 0.005
            )
            cells = "".join(f"{row[each]:>{width}.2f}" if each in row else " " * width for each, width in _COLUMNS)
            print(
                f"{name:10}{count:>4}{row['answers_per_s']:>11.1f}{cells}{f'{ratio:.2f}' if ratio else '':>14}   {used}"
            )


_STARTS: Mapping[str, Callable[[argparse.Namespace, bytes], AbstractContextManager[Runner]]] = {
    "mosec": _mosec,
    "litserve": _litserve,
    "bentoml": _bentoml,
    "torchserve": _torchserve,
    "triton": _triton,
}
_COLUMNS = (("p50_ms", 9), ("p99_ms", 9), ("cpu_ms", 8))
_KNOWN = {"answers_per_s", *(name for name, _ in _COLUMNS)}


if __name__ == "__main__":
    main()
