"""Real `anychip serve` for the tests: its own process, its own worker, a free port."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import httpx
import psutil

from tests.support import warm
from tests.support.constants import Constants
from tests.support.constants import words as constants_before
from tests.support.warm import WarmProcess

UNENCRYPTED = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For httpx, which else reads all certificates of the machine for each client: 30 ms of a processor a request."""


@dataclass
class ServiceProcess:
    """Running service; `url` has no slash at its end. `guard`: the file of the guard of its event loop, if any."""

    process: subprocess.Popen[str] | WarmProcess
    url: str
    log: Path
    guard: Path | None = None

    @property
    def admin_url(self) -> str:
        """Address of the administration, from the log."""
        found = re.findall(r"administration at (http://[\w.:]+)", self.log.read_text())
        assert found, "the service has no administration"
        return str(found[-1])

    def admin_client(self) -> httpx.Client:
        return httpx.Client(base_url=self.admin_url, timeout=240, verify=UNENCRYPTED)

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, verify=UNENCRYPTED)

    def children(self) -> list[psutil.Process]:
        found: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        return found

    def named(self, name: str) -> dict[int, psutil.Process]:
        """Return the living processes of the service with this name, by their numbers."""
        found = {}
        for child in self.children():
            with contextlib.suppress(psutil.Error):  # It has just ended.
                if child.name() == name and child.status() != psutil.STATUS_ZOMBIE:
                    found[child.pid] = child
        return found

    def workers(self) -> list[psutil.Process]:
        return [*self.named("anychip-worker").values()]

    def worker(self) -> psutil.Process:
        [worker] = self.workers()
        return worker

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def stop(process: subprocess.Popen[str] | WarmProcess) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def cache_in(folder: Path) -> str:
    """Make a cache for --cache-dir that shares the compiled simulated device: compiling takes longer than tests."""
    compiled = Path("~/.cache/anychip/simulated").expanduser()
    compiled.mkdir(parents=True, exist_ok=True)
    cache = folder / "cache"
    cache.mkdir()
    (cache / "simulated").symlink_to(compiled)
    return str(cache)


def _fresh(words: Sequence[str], folder: Path, environment: Mapping[str, str], log: Path) -> subprocess.Popen[str]:
    command = [sys.executable, *words]
    with log.open("w") as errors:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)


def libraries_of(pid: int) -> set[str]:
    """Return the files of torch, torchvision and their dependencies that a process has mapped."""
    found = re.findall(r"/site-packages/(.*\.so[.\d]*)$", Path(f"/proc/{pid}/maps").read_text(), re.M)
    return {each for each in found if re.match("torch|triton|nvidia", each)}


def own_mib(pid: int) -> float:
    """Return a process's share of all memory that it uses, in MiB."""
    kib = re.search(r"^Pss: +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)
    assert kib
    return int(kib[1]) / 1024


@contextlib.contextmanager
def running(
    folder: Path,
    *options: str,
    environment: Mapping[str, str] = MappingProxyType({}),
    constants: Constants = MappingProxyType({}),
    fresh: bool = False,
    guarded: bool = False,
) -> Iterator[ServiceProcess]:
    """Start the service in `folder`, wait until it is ready, end it with everything it started.

    `environment`: variables beside ours; `constants`: as in tests/support/constants.py. Unless libraries read these
    variables, the service is forked from a process that has imported the libraries; with `fresh` never.
    `guarded`: its event loop has a guard, for `answering` (tests/support/liveness.py).
    """
    log = folder / "service.log"
    guard = folder / "held.jsonl" if guarded else None
    # Measured sizes of batches would differ from run to run.
    usual = ("--port", "0", "--engine", "eager", "--precision", "fp32", "--batch-sizes", "1,4")
    words = [*constants_before(constants, guard), "serve", *usual, *options]
    ours = {name: text for name, text in os.environ.items() if name.startswith("ANYCHIP_")}
    path = {"PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONUNBUFFERED": "1"}
    variables = {**warm.STARTED_WITH, **ours, **path, **environment}
    start = WarmProcess if warm.fits(environment) and not fresh else _fresh
    process = start(words, folder, variables, log)
    assert process.stdout is not None
    children: list[psutil.Process] = []
    try:
        line = process.stdout.readline()
        found = re.search(r"https?://\S+", line)
        assert found, f"the service did not start: {line!r} {log.read_text()}"
        service = ServiceProcess(process, found.group(), log, guard)
        children = service.children()
        yield service
    finally:
        stop(process)
        process.stdout.close()
        left = psutil.wait_procs(children, timeout=20)[1]
        for child in left:
            child.kill()
        assert not left, f"the service left processes behind: {left}"
