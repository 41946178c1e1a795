"""The goodput of each model for clients in a hurry.

Owns: clients that ask again at once with a short deadline and may be refused. Must not know the
assertions.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from tests.support.images import JPEG
from tests.support.load import Load
from tests.support.service_process import ServiceProcess

_RETRY_S = 0.05


@contextlib.asynccontextmanager
async def hurried(
    service: ServiceProcess, images: dict[str, bytes], clients: int, timeout_ms: int
) -> AsyncIterator[dict[str, Load]]:
    """Run so many clients for each model, by its name, each with the model's image. Those of a model have an address
    of their own: no work of others counts as theirs.
    """
    async with contextlib.AsyncExitStack() as stack:
        loads = {}
        for number, (model, image) in enumerate(images.items(), 2):
            path = f"/v1/models/{model}:predict?timeout_ms={timeout_ms}"
            loads[model] = await stack.enter_async_context(
                Load(service.url, path, image, clients, JPEG, retry_s=_RETRY_S, address=f"127.0.0.{number}")
            )
        yield loads


async def goodput(loads: dict[str, Load], seconds: float) -> dict[str, float]:
    """Return the good answers of each model a second, from now on for so long."""
    before, began_s = {model: load.outcomes[200, "OK"] for model, load in loads.items()}, time.monotonic()
    await asyncio.sleep(seconds)
    lasted_s = time.monotonic() - began_s
    return {model: (load.outcomes[200, "OK"] - before[model]) / lasted_s for model, load in loads.items()}
