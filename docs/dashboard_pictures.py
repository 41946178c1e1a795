"""Draws the dashboard over services with faults: the pictures of docs/observability.md.

    python docs/dashboard_pictures.py            # needs prometheus (apt); writes docs/images/dashboard-*.png; minutes

Owns: what happens on the pictures. Two services on the null device, one of them with a slow card that is not well; then
a worker is killed, and at last more is asked than they can do. How panels are drawn is in
deploy/grafana/pictures.py. Prometheus, with the rules that are shipped, is started as the tests start it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from deploy.grafana.pictures import Data, draw  # noqa: E402
from tests.support.images import GREY  # noqa: E402
from tests.support.load import Load  # noqa: E402
from tests.support.prometheus import INTERVAL_S, prometheus  # noqa: E402
from tests.support.service_process import running  # noqa: E402

IMAGES = ROOT / "docs" / "images"
PREDICT = "/v1/models/resnet50:predict"
COMMON = (
    *("--models", "resnet50", "--weights", "random", "--device", "null", "--engine", "auto", "--precision", "auto"),
    *("--queue-size", "32", "--timeout-ms", "2000", "--batch-sizes", "1,2,4"),
)
DEVICES = ("devices=2,delay_ms=15,power_w=75,cache_mb=1,memory_mb=256", "delay_ms=60,power_w=75,sick=1")
QUIET_S, LOUD_S = 45.0, 30.0


async def happen(services: list[str], kill: list[int]) -> None:
    """Run a steady load, then kill workers, then run an overload."""
    async with contextlib.AsyncExitStack() as stack:
        for url in services:
            await stack.enter_async_context(Load(url, PREDICT, GREY, 3))
        await asyncio.sleep(QUIET_S)
        print("a worker dies", flush=True)
        for pid in kill:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(QUIET_S)
        print("more is asked than can be done", flush=True)
        for url in services:
            await stack.enter_async_context(Load(url, PREDICT, GREY, 40))
        await asyncio.sleep(LOUD_S)


def small(path: Path) -> None:
    """Reduce a picture to 128 colours, which plots need, so that the file is small."""
    with Image.open(path) as image:
        image.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size} bytes")


def main() -> None:
    """Command line."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(prometheus(folder))
        services = []
        for number, null in enumerate(DEVICES):
            place = folder / str(number)
            place.mkdir()
            services.append(stack.enter_context(running(place, *COMMON, "--null", null)))
            server.watch("anychip", services[-1].url)
        started_s = time.time()
        asyncio.run(happen([service.url for service in services], [services[0].workers()[0].pid]))
        ends_s = time.time()
        for path in draw(Data(server.url, ends_s - started_s, 10 * INTERVAL_S, ends_s), IMAGES):
            small(path)


if __name__ == "__main__":
    main()
