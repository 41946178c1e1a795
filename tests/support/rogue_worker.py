"""Plugin (`--plugins`) that lets a worker send to the server what a captured worker might.

It begins when a file called `rogue` appears in the service's folder, which says what: `beats` without end, invented
`names`, or `crowds`: more names than a message may hold.
"""

from __future__ import annotations

import select
import struct
import threading
import time
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

from app.processes import channel
from app.worker.messages import Beat, FromWorker, Stats

_ORDERS = Path("rogue")
_REPORTS, _NAMES = 20, 1000
_send = channel.Channel.send
_begun = threading.Event()
_rogue = threading.Event()


def _frame(message: FromWorker) -> bytes:
    data = channel.to_packet((message,))
    return struct.pack("<I", len(data)) + data


def _said(order: str) -> Iterator[bytes]:
    if order == "beats":
        return repeat(_frame(Beat()) * 20_000)
    numbers = range(_NAMES * (20 if order == "crowds" else 1))
    invented = [{f"invented::{report}_{number}": 1 for number in numbers} for report in range(_REPORTS)]
    return iter([_frame(Stats(0, 0, 0, 0, 0, {}, each)) for each in invented])


def _behave(end: channel.Channel) -> None:
    while not _ORDERS.exists():
        time.sleep(0.02)
    order = _ORDERS.read_text()
    _ORDERS.unlink()
    _rogue.set()  # No honest frame may come in between: the frames would be torn.
    for data in _said(order):
        rest = memoryview(data)
        while rest:
            select.select([], [end._socket], [])
            rest = rest[end._socket.send(rest) :]
    _rogue.clear()


def _sending(self: channel.Channel, message: bytes, descriptors: Any = ()) -> None:
    if not _rogue.is_set():
        _send(self, message, descriptors)
    if not _begun.is_set():
        _begun.set()
        threading.Thread(target=_behave, args=(self,), daemon=True).start()


channel.Channel.send = _sending  # type: ignore[method-assign]
