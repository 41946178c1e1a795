"""Asks the installed command: from an empty folder, in an environment of PATH and HOME alone.

Several files are one service, which is what makes it bearable: each start takes seconds, and each library's import too.
Owns: the processes it starts, and what their log says of seconds.
"""

from __future__ import annotations

import base64
import io
import json
import re
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.zoo.networks import Floats, Kind

_START_S = 900.0
_QUERIES: dict[Kind, str] = {
    "scores": "?top_k=5",
    "boxes": "?score_threshold=0.25&masks=none",
    "vector": "?encoding=base64",
    "depth": "?encoding=base64",
    "class_map": "",
    "values": "",
}


@dataclass
class Answered:
    """Answer of a service to one file."""

    said: str = ""
    """The refusal; empty where it is served."""
    answers: list[Floats] = field(default_factory=list)
    seconds: float = 0.0
    """From the file to the first answer: read, made ready, answered."""
    engine: str = ""
    precision: str = ""


@dataclass
class Asked:
    """A file to serve, and its pictures."""

    name: str
    model: str
    kind: Kind
    pictures: Sequence[Path]


class Command:
    """The installed `anychip`, with a home of its own."""

    def __init__(self, command: Path, home: Path, device: str = "cpu") -> None:
        self.command, self.home, self.device = command, home, device
        (home / "empty").mkdir(parents=True, exist_ok=True)
        self.read_s: dict[str, float] = {}

    def refusal(self, model: str, picture: Path) -> str:
        """Return what `predict` says of a file that it refuses, "" of one that it answers for."""
        line = [str(self.command), "predict", f"m={model}", str(picture), "--json", "--device", self.device]
        line += ["--precision", "fp32", "--trust-exported", "true"]
        ran = subprocess.run(
            line, capture_output=True, text=True, cwd=self.home / "empty", env=self._environment(), timeout=_START_S,
            check=False,
        )  # fmt: skip
        return (ran.stderr.strip() or f"status {ran.returncode}") if ran.returncode else ""

    def ask(self, rows: Sequence[Asked], precision: str) -> dict[str, Answered]:
        """Serve all rows and ask for their pictures; those that a start refuses are left out of the next."""
        found: dict[str, Answered] = {}
        waiting = list(rows)
        while waiting:
            served, said = self._serve(waiting, precision)
            found |= served
            if not said:
                break
            named = [each for each in waiting if re.search(rf"(?<![\w-]){re.escape(each.name)}(?![\w-])", said)]
            if len(named) == 1:
                found[named[0].name] = Answered(said)
                waiting.remove(named[0])
            elif len(waiting) == 1:
                found[waiting[0].name] = Answered(said)
                break
            else:
                for half in (waiting[: len(waiting) // 2], waiting[len(waiting) // 2 :]):
                    found |= self.ask(half, precision)
                break
        return found

    def _serve(self, rows: Sequence[Asked], precision: str) -> tuple[dict[str, Answered], str]:
        """Return the answers, or what the start says."""
        models = ",".join(f"{row.name}={row.model}" for row in rows)
        line = [str(self.command), "serve", "--models", models, "--device", self.device, "--port", "0"]
        line += ["--batch-sizes", "1,2", "--trust-exported", "true", "--precision", precision]
        with tempfile.TemporaryFile("w+") as log:
            process = subprocess.Popen(
                line, stdout=log, stderr=log, cwd=self.home / "empty", env=self._environment(), start_new_session=True
            )
            try:
                address = self._ready(process, log)
                log.seek(0)
                lines = log.read()
                for row in rows:  # Of a start that refuses another file, too: the next one knows what was read.
                    self.read_s[row.name] = max(self.read_s.get(row.name, 0.0), read_s_of(lines, row.name))
                if not address:
                    return {}, _last_words(lines)
                _settled(address)
                about = {each["name"]: each for each in _get(f"{address}/v1/models")["models"]}
                found = {}
                for row in rows:
                    began_s = time.perf_counter()
                    try:
                        answers = [_answer(address, row, picture) for picture in row.pictures[:1]]
                        first_s = time.perf_counter() - began_s
                        answers += [_answer(address, row, picture) for picture in row.pictures[1:]]
                    except urllib.error.HTTPError as error:
                        found[row.name] = Answered(f"{error.code}: {error.read()[:600].decode(errors='replace')}")
                        continue
                    log.seek(0)
                    seconds = self.read_s[row.name] + ready_s_of(log.read(), row.name) + first_s
                    [device] = about[row.name]["served_on"]
                    found[row.name] = Answered("", answers, seconds, device["engine"], device["precision"])
                return found, ""
            finally:
                _end(process)

    def _ready(self, process: subprocess.Popen[bytes], log: Any) -> str:
        until_s = time.monotonic() + _START_S
        while process.poll() is None and time.monotonic() < until_s:
            log.seek(0)
            ready = re.search(r'"ready at (http://[\d.]+:\d+)"', log.read())
            if ready:
                return ready[1]
            time.sleep(0.3)
        return ""

    def _environment(self) -> Mapping[str, str]:
        return {"PATH": "/usr/bin:/bin", "HOME": str(self.home)}


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _last_words(log: str) -> str:
    """Return what a start that failed says: what is no log line of another kind, else the last errors."""
    lines = [line for line in log.splitlines() if line.strip()]
    words = [line for line in lines if not line.startswith("{")]
    if words:
        return "\n".join(words)
    errors = [json.loads(line).get("message", "") for line in lines if '"level":"error"' in line]
    return "\n".join(errors) or "\n".join(lines[-3:])


def _settled(address: str) -> None:
    """Wait until no engine is made ready behind the one that answers."""
    until_s = time.monotonic() + 300
    while time.monotonic() < until_s:
        models = _get(f"{address}/v1/models")["models"]
        if not any(device["staged"] for each in models for device in each["served_on"]):
            return
        time.sleep(1)


def read_s_of(log: str, name: str) -> float:
    """Return the seconds that a file was read for, what it is compared with included."""
    found = re.findall(rf'"{re.escape(name)} is read, ([\d.]+) s', log)
    return max(map(float, found), default=0.0)


def ready_s_of(log: str, name: str) -> float:
    """Return the seconds after which the first engine was ready."""
    found = re.findall(rf'"{re.escape(name)}: [^"]* after ([\d.]+) s', log)
    return float(found[0]) if found else 0.0


def _get(address: str) -> Any:
    with _opener().open(address, timeout=60) as answer:
        return json.loads(answer.read())


def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _answer(address: str, row: Asked, picture: Path) -> Floats:
    request = urllib.request.Request(
        f"{address}/v1/models/{row.name}:predict{_QUERIES[row.kind]}",
        picture.read_bytes(),
        {"Content-Type": "application/octet-stream"},
    )
    with _opener().open(request, timeout=300) as answer:
        [found] = json.loads(answer.read())["predictions"]
    return as_numbers(row.kind, found)


def _box(found: Mapping[str, Any]) -> list[float]:
    """Return the box; of a turned one that around its corners, also where these lie outside the picture."""
    corners = found.get("corners") or found.get("obb", {}).get("corners")
    if not corners:
        return [float(each) for each in found["box"].values()]
    points = np.array([[*each.values()] if isinstance(each, dict) else each for each in corners], np.float64)
    return [*points.reshape(-1, 2).min(0), *points.reshape(-1, 2).max(0)]


def as_numbers(kind: Kind, found: Mapping[str, Any]) -> Floats:
    """Return an answer's numbers in the form of `Made.answers`; classes that are not answered are NaN."""
    if kind == "scores":
        classes = {each["class_id"]: each["score"] for each in found["classes"]}
        scores = np.full(max(classes) + 1, np.nan, np.float32)
        scores[[*classes]] = [*classes.values()]
        return scores
    if kind == "boxes":
        rows = [[*_box(each), each["score"], each["class_id"]] for each in found["detections"]]
        return np.array(rows, np.float32).reshape(-1, 6)
    if kind == "values":
        return np.array([*found["values"].values()], np.float32)
    if kind == "class_map":
        stream = io.BytesIO(base64.b64decode(found["class_map"]["png"]))
        return np.asarray(Image.open(stream), np.float32)
    if kind == "depth":
        height, width = found["depth"]["size"]
        numbers = np.frombuffer(base64.b64decode(found["depth"]["float32"]), np.float32)
        return numbers.reshape(height, width)
    embedding = found["embedding"]
    coded = embedding["float32"] if isinstance(embedding, dict) else embedding
    return np.frombuffer(base64.b64decode(coded), np.float32)
