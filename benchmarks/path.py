"""Count the code on three paths: one warm JPEG in the server, one worker's start, and one metric.

Files, calls and changes of file are those of the product's own functions in one thread. A call is a function that
begins or a coroutine that goes on; comprehensions do not count. A change of file is a call in another file than the
call before. Of many requests for one JPEG, one at a time over one connection, the one with the fewest calls counts:
what timers do meanwhile only adds. Records are the dataclasses, named tuples, messages and documents of `app` that its
functions are given or return: for a start, in server and worker, from the settings to what `/v1/models` says.

    python -m benchmarks.path [--list]

The model is a classifier on the CPU. Owns: the three paths, and how they are counted.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import re
import signal
import socket
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pydantic
import uvloop

from anychip_base.interpreter import OURS
from app import logs
from app.config import Settings
from app.core import Loaded
from app.fleet.plans import worker_plans
from app.http.routes.status import snapshot
from app.main import serve
from app.processes.channel import reader, to_packet
from app.serving.service import Service
from app.worker.load import LoadedDevice
from app.worker.messages import FromWorker
from benchmarks.overhead import noise_jpeg
from models import Model, open_model, parse_spec

MODEL = "mobilenet_v3_small"
_ROOT = Path(__file__).parents[1]
_WARM, _REQUESTS = 10, 40
_AFTERWARDS_S = 0.005
_IMAGE_BYTES = 30_000
_INNER = re.compile(r"<(listcomp|dictcomp|setcomp|genexpr)>")
_MOST_SEEN = 8
"""Elements of a sequence that are looked at for records."""


class Walk:
    """Counter of the calls in the thread that enters its context: their files in order, and the records they handle."""

    def __init__(self, rooms: tuple[str, ...] = OURS, *, records: bool = False) -> None:
        """Count functions in these folders of the repository. `records`: also look for records, which is slow."""
        self._folders = tuple(f"{_ROOT / room}/" for room in rooms)
        self._records_wanted = records
        self.calls: list[tuple[str, str]] = []
        """File and name of each function called."""
        self.records: set[str] = set()

    def __enter__(self) -> Walk:
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    @property
    def files(self) -> set[str]:
        """Files with a function that was called."""
        return {file for file, _ in self.calls}

    @property
    def changes(self) -> int:
        """Number of calls in another file than the call before."""
        return sum(one != other for (one, _), (other, _) in pairwise(self.calls))

    def __str__(self) -> str:
        return f"{len(self.files)} files, {len(self.calls)} calls, {self.changes} changes of file"

    def _event(self, frame: FrameType, event: str, returned: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(self._folders):
            return
        if event == "call" and not _INNER.match(code.co_name):
            self.calls.append((code.co_filename.removeprefix(f"{_ROOT}/"), code.co_name))
        if self._records_wanted:
            given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            for value in [frame.f_locals.get(name) for name in given] if event == "call" else [returned]:
                self.records |= records_in(value)


def records_in(value: object, depth: int = 2) -> set[str]:
    """Return the names of app's records that a value is, or holds: `depth` records deep, and a few of a sequence."""
    kind = type(value)
    names = getattr(kind, "_fields", ()) or getattr(kind, "__struct_fields__", ())
    if not names and isinstance(value, (list, tuple)):
        return {name for each in value[:_MOST_SEEN] for name in records_in(each, depth)}
    if dataclasses.is_dataclass(kind):
        names = tuple(each.name for each in dataclasses.fields(kind))
    elif isinstance(value, pydantic.BaseModel):
        names = tuple(kind.model_fields)  # type: ignore[attr-defined]
    if not names or not kind.__module__.startswith("app.") or not depth:
        return set()
    held = (getattr(value, name, None) for name in names)
    return {kind.__name__}.union(*(records_in(each, depth - 1) for each in held))


def _answer(connection: socket.socket, request: bytes) -> None:
    """Send a request in one piece, and wait for its answer. Raises OSError if that is an error."""
    connection.sendall(request)
    answer = b""
    while b"\r\n\r\n" not in answer:
        answer += connection.recv(1 << 16)
    head, _, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head.lower())
    while length is None or len(body) < int(length[1]):
        body += connection.recv(1 << 16)
    if not head.startswith(b"HTTP/1.1 200 "):
        raise OSError(body.decode())


async def _walk_of_image(address: str) -> Walk:
    """Return the walk of one JPEG in the running server, whose event loop this is."""
    host, _, port = address.rpartition("/")[2].partition(":")
    image = noise_jpeg(_IMAGE_BYTES)
    head = f"POST /v1/models/{MODEL}:predict HTTP/1.1\r\nhost: {host}\r\ncontent-type: image/jpeg\r\n"
    request = f"{head}content-length: {len(image)}\r\n\r\n".encode() + image
    walks = []
    with socket.create_connection((host, int(port))) as connection:
        for _ in range(_WARM):
            await asyncio.to_thread(_answer, connection, request)
        for _ in range(_REQUESTS):
            answering = asyncio.create_task(asyncio.to_thread(_answer, connection, request))
            with Walk() as walk:
                await answering
                await asyncio.sleep(_AFTERWARDS_S)  # The server may still have to do with it.
            walks.append(walk)
    return min(walks, key=lambda walk: len(walk.calls))


async def _image(settings: Settings) -> Walk:
    """Serve, and return the walk of one JPEG."""
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(settings, ready.set_result))
    await asyncio.wait((serving, ready), return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        await serving
    walk = await _walk_of_image(ready.result())
    os.kill(os.getpid(), signal.SIGTERM)
    await serving
    return walk


async def _start_and_metric(settings: Settings, models: list[Model]) -> tuple[Walk, Walk]:
    """Return the walk of one worker's start, without that of its decoders, and the walk of one metric."""
    start, metric = Walk(("app",), records=True), Walk(("app",))
    heard: list[Loaded] = []
    service = Service(settings, models)
    try:
        with start:
            plans = worker_plans(settings, service.choice, models, {})
            await service.fleet.start()
            service.administration.served_on(MODEL)
        with start:
            loaded = LoadedDevice(plans[0][1], heard.append)
            reader(FromWorker)(to_packet(heard))
        loaded.close()
        with metric:
            service.fleet.models[MODEL].metrics.batch("cpu")[2].observe(0.01)
            service.metrics.render("")
            snapshot(service.link)
    finally:
        await service.stop()
    return start, metric


def main() -> None:
    """Count, and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the files too, with the functions called in each")
    given = parser.parse_args()
    logs.configure("error", "auto")
    settings = Settings(  # type: ignore[call-arg]
        models=MODEL,
        weights="random",
        device="cpu",
        engine="eager",
        batch_sizes="1,2",
        port=0,
        ingresses=0,
        grace_s=0,
        log_level="error",
    )
    image = uvloop.run(_image(settings))
    models = [open_model(parse_spec(f"{MODEL}:random"), Path())]
    start, metric = uvloop.run(_start_and_metric(settings, models))
    for name, walk in (("one JPEG", image), ("a worker's start", start), ("a metric (a batch's seconds)", metric)):
        records = f"; {len(walk.records)} records: {', '.join(sorted(walk.records))}" if walk.records else ""
        print(f"{name}: {walk}{records}")
        if given.list:
            for file, calls in Counter(file for file, _ in walk.calls).most_common():
                names = Counter(name for of, name in walk.calls if of == file)
                print(f"{calls:6} {file}: {', '.join(f'{name} {count}' for name, count in names.items())}")


if __name__ == "__main__":
    main()
