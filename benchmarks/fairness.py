"""Measure what a greedy client costs a modest one beside it, over HTTP on the null device.

    .venv/bin/python -m benchmarks.fairness --json

Each client sends a given number of images at a time, from its own address and process. The 99th percentile of the
modest client's latency beside the greedy one is compared with the one alone. A batch that has begun is not
stopped, so the least possible is the rest of that batch and the modest client's own: twice a batch if all sizes
take as long, and the client asks again at once. Alone it waits for that, too, once it has several images
in flight. Owns: this measurement.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import re
import sys
import time
from collections.abc import Coroutine
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress

from benchmarks import servers
from models.sample import IMAGES

AIM = 1.5
_MODEL = "resnet18"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="What a greedy client costs a modest one.")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement (default: %(default)g)")
    parser.add_argument("--greedy", type=int, default=64, help="requests of the greedy client at a time")
    parser.add_argument("--modest", type=int, default=1, help="requests of the modest client at a time")
    parser.add_argument("--delay-ms", type=float, default=20.0, help="that a batch takes (default: %(default)g)")
    parser.add_argument("--image-delay-ms", type=float, default=0.0, help="that each of its images adds to it")
    parser.add_argument("--pause-ms", type=float, default=0.0, help="between the modest client's requests, at most")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    delay = f"delay_ms={given.delay_ms:g},image_delay_ms={given.image_delay_ms:g}"
    null = ("--device", "null", "--null", delay, "--batch-sizes", "1,2,4,8")
    with servers.service(_MODEL, "--weights", "random", *null) as server:
        report = asyncio.run(measure(server.port, given.seconds, given.greedy, given.modest, given.pause_ms / 1e3))
    if given.json:
        print(json.dumps(report, indent=2))
    else:
        for name, value in report.items():
            print(f"{name:28} {value:10.2f}")
    print(f"aim: at most {AIM} times: {'met' if report['ratio'] <= AIM else 'missed'}", file=sys.stderr)


async def measure(port: int, seconds: float, greedy: int, modest: int = 1, pause_s: float = 0.0) -> dict[str, float]:
    """Measure the modest client alone, then beside the greedy one. `greedy`, `modest`: requests of each at a time."""
    image = min(IMAGES.glob("*.jpg"), key=lambda path: path.stat().st_size).read_bytes()
    loop = asyncio.get_running_loop()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other:
        await loop.run_in_executor(other, crowd_s, port, image, 1.0, 1)
        alone_s = await _latencies_s(*(client(port, "127.0.0.1", image, seconds, pause_s) for _ in range(modest)))
        crowd = loop.run_in_executor(other, crowd_s, port, image, seconds + 2, greedy)
        await asyncio.sleep(1)
        beside_s = await _latencies_s(*(client(port, "127.0.0.1", image, seconds, pause_s) for _ in range(modest)))
        theirs = await crowd
    return {
        "alone_p50_ms": _percentile(alone_s, 0.5) * 1e3,
        "alone_p99_ms": _percentile(alone_s, 0.99) * 1e3,
        "beside_p50_ms": _percentile(beside_s, 0.5) * 1e3,
        "beside_p99_ms": _percentile(beside_s, 0.99) * 1e3,
        "ratio": _percentile(beside_s, 0.99) / _percentile(alone_s, 0.99),
        "greedy_images_per_s": len(theirs) / (seconds + 2),
        "greedy_p50_ms": _percentile(theirs, 0.5) * 1e3,
        "modest_alone_images_per_s": len(alone_s) / seconds,
        "modest_beside_images_per_s": len(beside_s) / seconds,
    }


def crowd_s(port: int, image: bytes, seconds: float, greedy: int) -> list[float]:
    """Return the greedy client's latencies in seconds, in its own process."""
    return asyncio.run(_latencies_s(*(client(port, "127.0.0.2", image, seconds) for _ in range(greedy))))


async def _latencies_s(*clients: Coroutine[None, None, list[float]]) -> list[float]:
    """Return the latencies of all clients at the same time, in ascending order."""
    return sorted(latency for each in await asyncio.gather(*clients) for latency in each)


async def client(port: int, address: str, image: bytes, seconds: float, pause_s: float = 0.0) -> list[float]:
    """Return the latencies in seconds of requests in sequence from an address, with a pause of up to `pause_s`
    between them; refused requests do not count.
    """
    pauses = random.Random(0)
    head = f"POST /v1/models/{_MODEL}:predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/jpeg\r\n"
    request = f"{head}Content-Length: {len(image)}\r\n\r\n".encode() + image
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
    latencies_s = []
    ends_s = time.monotonic() + seconds
    try:
        while time.monotonic() < ends_s:
            await asyncio.sleep(pauses.uniform(0.0, pause_s))
            began_s = time.monotonic()
            writer.write(request)
            answer = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", answer)
            assert length
            await reader.readexactly(int(length[1]))
            if answer.startswith(b"HTTP/1.1 200"):
                latencies_s.append(time.monotonic() - began_s)
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
    return latencies_s


def _percentile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


if __name__ == "__main__":
    main()
