"""The installed command, as a user starts it: a bare environment, a folder of the user's own, nothing of other tests.

ANYCHIP_TEST_COMMAND names another `anychip` than the one beside this Python. Nothing here imports the product.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

ROOT = Path(__file__).parents[2]
BUILDER = Path(__file__).with_name("build_files.py")
PATIENCE_S = 600
"""Only what hangs takes as long: no test asks how long something took."""


@dataclass
class Service:
    process: subprocess.Popen[str]
    address: str

    def ask(self, path: str, **body: Any) -> Any:
        """Return the answer to a browser, or to a body as httpx's `request` takes it; JSON is decoded."""
        asked = httpx.request(
            "POST" if body else "GET", self.address + path, timeout=PATIENCE_S, trust_env=False,
            **(body or {"headers": {"Accept": "text/html, */*"}}),
        )  # fmt: skip
        answer = asked.raise_for_status()
        return answer.json() if "json" in answer.headers.get("Content-Type", "") else answer.content

    def predict(self, model: str, image: Path, *, in_json: bool = False) -> dict[str, Any]:
        """Return the prediction of one image; `in_json`: it comes in a document of more than a megabyte."""
        content = image.read_bytes()
        body: dict[str, Any] = {"content": content, "headers": {"Content-Type": "image/jpeg"}}
        if in_json:  # What follows the end of a PNG is no part of it.
            body = {"json": {"instances": [{"b64": base64.b64encode(content + bytes(1 << 20)).decode()}]}}
        [prediction] = self.ask(f"/v1/models/{model}:predict", **body)["predictions"]
        found: dict[str, Any] = prediction
        return found


@dataclass(frozen=True)
class Anychip:
    """An `anychip` command. `home` is its user's; `prefix` starts it in surroundings of their own."""

    command: Path
    home: Path
    prefix: tuple[str, ...] = ()
    environment: Mapping[str, str | None] = field(default_factory=dict)

    def _bare(self) -> dict[str, str]:
        said = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(self.home), **self.environment}
        return {name: text for name, text in said.items() if text is not None}

    def run(self, *arguments: str, cwd: Path, status: int = 0) -> str:
        """Run the command with these arguments, check its exit status, and return what both streams hold."""
        return self.completed([str(self.command), *arguments], cwd=cwd, status=status)

    def completed(self, command: Sequence[str], *, cwd: Path, status: int = 0) -> str:
        done = self.done(command, cwd, status)
        return done.stdout + done.stderr

    def predict(self, model: str, image: Path, *, cwd: Path) -> dict[str, Any]:
        """Return the prediction of one image by `anychip predict --json`."""
        command = [str(self.command), "predict", model, str(image), "--json", "--device", "cpu"]
        found: dict[str, Any] = json.loads(self.done(command, cwd, 0).stdout)["predictions"][str(image)]
        return found

    def done(self, command: Sequence[str], cwd: Path, status: int = 0) -> subprocess.CompletedProcess[str]:
        """Any command line, after it ended with this status."""
        with subprocess.Popen(
            [*self.prefix, *command], cwd=cwd, env=self._bare(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, start_new_session=True,
        ) as process:  # fmt: skip
            try:
                said, errors = process.communicate(timeout=PATIENCE_S)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # What hangs leaves nothing behind.
        assert process.returncode == status, f"status {process.returncode}\n{said}{errors}"
        return subprocess.CompletedProcess(process.args, process.returncode, said, errors)

    @contextlib.contextmanager
    def serving(self, *arguments: str, cwd: Path) -> Iterator[Service]:
        """Start a service; end it as init systems do. It must exit with status 0 and leave no process."""
        with self.started([str(self.command), *arguments], cwd=cwd) as service:
            yield service

    @contextlib.contextmanager
    def started(
        self, command: Sequence[str], *, cwd: Path, ends_with: signal.Signals = signal.SIGTERM, status: int | None = 0
    ) -> Iterator[Service]:
        """Start a service by any command line, as `serving` does."""
        log = self.home / "service.log"
        with log.open("w") as errors, subprocess.Popen(
            [*self.prefix, *command], cwd=cwd, env=self._bare(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=errors, text=True, start_new_session=True,
        ) as process:  # fmt: skip
            try:
                service = Service(process, _ready(process, log))
                yield service
                of_it = psutil.Process(process.pid).children(recursive=True)
                # As a terminal does it: Ctrl-C reaches all of the group, SIGTERM the process alone.
                if ends_with is signal.SIGINT:
                    os.killpg(process.pid, ends_with)
                else:
                    process.send_signal(ends_with)
                ended = process.wait(PATIENCE_S)
                assert status is None or ended == status, f"status {ended}\n{log.read_text()}"
                assert of_it
                _, left = psutil.wait_procs(of_it, timeout=0)
                assert [each for each in left if each.status() != psutil.STATUS_ZOMBIE] == []
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def _ready(process: subprocess.Popen[str], log: Path) -> str:
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if found := re.search(r"(?: at |^Open )(http://[\w.:]+)", line):
            return found[1]
    raise AssertionError(f"it ended with {process.wait(PATIENCE_S)} before it was ready\n{said}{log.read_text()}")


@pytest.fixture(scope="session")
def command() -> Path:
    found = Path(os.environ.get("ANYCHIP_TEST_COMMAND") or Path(sys.executable).with_name("anychip")).absolute()
    assert found.is_file(), f"{found} is not there: make install first, or name it in ANYCHIP_TEST_COMMAND"
    return found


@pytest.fixture
def anychip(command: Path, tmp_path: Path) -> Anychip:
    """Return that command for a user who has never used it."""
    (tmp_path / "home").mkdir()
    return Anychip(command, tmp_path / "home")


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    (tmp_path / "empty").mkdir()
    return tmp_path / "empty"


@dataclass(frozen=True)
class Built:
    """What a library wrote, and what it answers itself, by the file's name."""

    folder: Path
    answers: Mapping[str, Any]


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], None]], Path]:
    """Make a folder once for all processes of the tests: the first that asks does, others wait for it."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent

    def made(name: str, make: Callable[[Path], None]) -> Path:
        folder = base / name
        with (base / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / ".made").exists():
                folder.mkdir()  # Where it failed before, this fails at once.
                make(folder)
                (folder / ".made").touch()
        return folder

    return made


def _built(part: str, once: Callable[[str, Callable[[Path], None]], Path], *needs: str) -> Built:
    for name in needs:
        if importlib.util.find_spec(name) is None:  # Importing it here would take seconds of each process.
            pytest.skip(f"{name} is not installed, which writes these files")

    def make(folder: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "YOLO_CONFIG_DIR": str(folder)}
        done = subprocess.run(
            [sys.executable, BUILDER, part, folder], env=environment, capture_output=True, text=True,
            timeout=PATIENCE_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr

    folder = once(part, make)
    return Built(folder, json.loads((folder / "answers.json").read_text()))


@pytest.fixture(scope="session")
def ultralytics_files(once: Callable[[str, Callable[[Path], None]], Path]) -> Built:
    """`best.pt`, `best.onnx`, `street.jpg`."""
    return _built("ultralytics", once, "ultralytics")


@pytest.fixture(scope="session")
def library_files(once: Callable[[str, Callable[[Path], None]], Path]) -> Built:
    """Everything else that `build_files.py` writes."""
    return _built("libraries", once, "timm", "transformers")


@pytest.fixture(scope="session")
def same_classes() -> Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], None]:
    """Assert that the first class is the library's, and that scores are nearer than its lead (CLEAR in build_files.py).

    Engines compute in bfloat16, too, to which a network with drawn weights answers more than a trained one.
    """

    def check(mine: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> None:
        assert mine[0]["label"] == theirs[0]["label"]
        expected = {each["label"]: each["score"] for each in theirs}
        for each in mine:
            assert each["score"] == pytest.approx(expected[each["label"]], abs=0.1)

    return check


@pytest.fixture(scope="session")
def same_boxes() -> Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], None]:
    """Assert that the same objects, each of a kind of its own, were found at the same places."""

    def check(mine: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> None:
        assert sorted(each["label"] for each in mine) == sorted(each["label"] for each in theirs)
        for their in theirs:
            [found] = [each for each in mine if each["label"] == their["label"]]
            assert found["score"] == pytest.approx(their["score"], abs=0.1)
            assert [found["box"][side] for side in ("x1", "y1", "x2", "y2")] == pytest.approx(their["box"], abs=2)

    return check
