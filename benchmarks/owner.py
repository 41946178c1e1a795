"""Measure the work of the owner of queues and workers for an image: from the link's `check` to its reply.

A service on the null device runs in a process that does nothing else: no HTTP, no JSON, and images that need no
decoding. Requests of one image each are in flight, enough to fill the batches of a worker that always has the next one;
when a batch is answered, as many follow. Processor time is this process's own; the worker is another. With `--profile`
the functions that take most of it are printed as well. The requests' own time, which is no part of
the owner, is measured with a link that does nothing, and printed beside it.

    python -m benchmarks.owner [--sizes 8,64] [--seconds 4] [--rounds 5] [--profile]

Owns: the requests, the rounds and the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import statistics
import time
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from app.config import Settings
from app.ingress.budget import freeze
from app.link import Frame, Reply, Result, Room, Terms
from app.serving.service import Service
from models import Options, open_model, parse_spec

MODEL = "resnet50"
_DEPTH = 4
"""Number of batches in flight."""
_DEADLINE_S = 30.0
_OWN_ROUNDS = 2000


class Asking:
    """Source that keeps requests in flight on the link of a started service."""

    def __init__(self, service: Service, at_once: int) -> None:
        self.answers = 0
        self._link, self._served = service.link, service.models[MODEL]
        self._frame = Frame(np.zeros(self._served.model.input_shape, np.uint8), 224, 224)  # type: ignore[attr-defined]
        self._options = Options()
        self._numbers = count()
        self._rooms: dict[int, Room] = {}
        self._due = at_once
        self._link.connect(self._replied)

    def ask(self) -> None:
        """Submit the requests that are due."""
        due, self._due = self._due, 0
        for token in [next(self._numbers) for _ in range(due)]:
            terms = Terms(time.monotonic() + _DEADLINE_S)
            self._link.check(self._served, terms)
            room = self._rooms[token] = self._link.reserve(self._served, 1, terms)
            self._link.submit(room, (token,), self._frame, self._options, 0)

    def _replied(self, token: int, reply: Reply) -> None:
        if not isinstance(reply, Result):
            raise reply
        self._rooms.pop(token).__exit__()
        self.answers += 1
        self._due += 1
        if self._due == 1:
            asyncio.get_running_loop().call_soon(self.ask)


class Nothing:
    """Stand-in for a link and its rooms: it admits everything and does nothing."""

    def check(self, *_: object) -> None:
        """Admit the request."""

    def reserve(self, *_: object) -> Nothing:
        """Return room."""
        return self

    def __exit__(self, *_: object) -> None:
        """Release the room."""

    def submit(self, *_: object) -> None:
        """Do nothing."""


def alone(asking: Asking, at_once: int) -> float:
    """Return the microseconds of a request without the owner: the median of many rounds. It asks no more afterwards."""
    asking._link = Nothing()  # type: ignore[assignment]
    result = Result((), None, None, None, 0.0, 0.0, 0.0)  # type: ignore[arg-type]
    micros = []
    for _ in range(_OWN_ROUNDS):
        asking._due, begun_s = at_once, time.process_time()
        first = next(asking._numbers) + 1
        asking.ask()
        for token in range(first, first + at_once):
            asking._replied(token, result)
        micros.append((time.process_time() - begun_s) / at_once * 1e6)
    return statistics.median(micros)


async def measure(size: int, seconds: float, rounds: int, profile: cProfile.Profile | None) -> dict[str, Any]:
    """Return processor microseconds an image at batches of this size, by round; images a second; the mean batch."""
    settings = Settings(  # type: ignore[call-arg]
        models=MODEL, weights="random", device="null", batch_sizes=str(size), queue_size=_DEPTH * size
    )
    service = Service(settings, [open_model(parse_spec(f"{MODEL}:random"), Path())])
    await service.start()
    try:
        asking = Asking(service, _DEPTH * size)
        freeze()
        asking.ask()
        await asyncio.sleep(seconds / 2)  # Warm-up.
        micros, begun_s, before = [], time.monotonic(), asking.answers
        for _ in range(rounds):
            answers, used_s = asking.answers, time.process_time()
            if profile is not None:
                profile.enable()
            await asyncio.sleep(seconds)
            if profile is not None:
                profile.disable()
            micros.append((time.process_time() - used_s) / (asking.answers - answers) * 1e6)
        rate = (asking.answers - before) / (time.monotonic() - begun_s)
        labels = {"model": MODEL, "device": "null:0"}
        images, batches = (
            service.metrics.registry.get_sample_value(f"anychip_batch_size_{part}", labels) for part in ("sum", "count")
        )
        return {
            "micros": micros,
            "images_per_s": rate,
            "mean_batch": (images or 0) / (batches or 1),
            "own": alone(asking, _DEPTH * size),
        }
    finally:
        await service.stop()


def main() -> None:
    """Run the measurements and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", default="8,64", help="of batches")
    parser.add_argument("--seconds", type=float, default=4, help="length of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="makes everything slower")
    given = parser.parse_args()
    for size in map(int, given.sizes.split(",")):
        profile = cProfile.Profile() if given.profile else None
        found = uvloop.run(measure(size, given.seconds, given.rounds, profile))
        rounds = ", ".join(f"{each:.1f}" for each in sorted(found["micros"]))
        print(
            f"batches of {size} (mean {found['mean_batch']:.1f}): {statistics.median(found['micros']):.1f} us an image "
            f"({rounds}), of it the requests themselves {found['own']:.1f}; {found['images_per_s']:.0f} images/s"
        )
        if profile is not None:
            pstats.Stats(profile).sort_stats("tottime").print_stats(40)


if __name__ == "__main__":
    main()
