"""Verdicts of the precision gate, kept in the cache: the next start need not make ready and compare what was refused.

    network, probes, device, versions, engine, precision, batch sizes ─► an entry of EngineCache ─► Verdict

Owns: what a verdict depends on, and its form. Must not judge. A verdict decides about speed alone: of a refused engine
that nobody else can replace, and of one that was accepted, the gate looks at the answers again. So whoever can write to
the cache, as a confined worker can to its own, makes no wrong answer right.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated

import msgspec

from backends import EngineCache
from models.contract.digest import digest_of_sources

_FILE = "verdict.msgpack"
_OWN_CODE = ("app.precision", "backends", "models")
_Text = Annotated[str, msgspec.Meta(max_length=4000)]


class Verdict(msgspec.Struct, frozen=True):
    """Verdict on an engine in one precision. `reason`: of a refusal, else ""; `wrong`: its answers were, else it could
    not convert the network. `measures`: the largest errors of one that was accepted; `excuse`: what is over a limit
    although it serves; `date`: of the comparison; `seconds`: the shortest of a batch, by size.
    """

    date: Annotated[str, msgspec.Meta(max_length=10)]
    reason: _Text = ""
    wrong: bool = True
    measures: Annotated[dict[_Text, float], msgspec.Meta(max_length=64)] = {}
    excuse: _Text = ""
    seconds: Annotated[dict[int, float], msgspec.Meta(max_length=64)] = {}


@dataclass(frozen=True)
class Verdicts:
    """Verdicts on one network, on one kind of device. `of`: what they depend on beside the code and its libraries."""

    cache: EngineCache
    of: Mapping[str, object]

    def get(self, engine: str, precision: str, sizes: Sequence[int]) -> Verdict | None:
        """Return a verdict; None if there is none that can be read."""
        entry = self.cache.get(**self._parts(engine, precision, sizes))
        if entry is not None:
            with contextlib.suppress(OSError, msgspec.DecodeError):
                return msgspec.msgpack.decode((entry / _FILE).read_bytes(), type=Verdict)
        return None

    def put(self, engine: str, precision: str, sizes: Sequence[int], verdict: Verdict) -> None:
        """Keep a verdict, in place of an earlier one."""
        parts = self._parts(engine, precision, sizes)
        if (entry := self.cache.get(**parts)) is not None:
            shutil.rmtree(entry, ignore_errors=True)
        self.cache.put(lambda folder: (folder / _FILE).write_bytes(msgspec.msgpack.encode(verdict)), **parts)

    def _parts(self, engine: str, precision: str, sizes: Sequence[int]) -> dict[str, object]:
        asked = {"verdict on": engine, "precision": precision, "sizes": tuple(sizes)}
        return {**asked, **self.of, "computed by": what_computes()}


def today() -> str:
    """Return the date of a verdict made now."""
    return time.strftime("%Y-%m-%d")


@cache
def what_computes() -> str:
    """Hash our own code, and the name and version of every installed package: any of them may compute otherwise.

    A process that is to be confined asks before: afterwards it may not see all of them.
    """
    found = {sys.version}
    for folder in sys.path:
        with contextlib.suppress(OSError):
            found.update(each for each in os.listdir(folder or ".") if each.endswith((".dist-info", ".egg-info")))
    text = repr([sorted(found), [digest_of_sources(package) for package in _OWN_CODE]])
    return hashlib.sha256(text.encode()).hexdigest()
