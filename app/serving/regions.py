"""Several regions of one image, each into a slot of its own, by decoding the image once.

    fills of all regions have their slots ─► one job for a decoder ─► every slot is filled, or none

Owns: waiting until the last slot is there, and whose a slot is when somebody gives up in between. Must not know why
these regions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from app.decoder.messages import Region
from app.fleet.served_model import ModelPool
from app.serving.filling import Encoded, Filling
from app.serving.items import Fill
from app.serving.terms import Terms
from models import PixelModel, Placement


class RegionFills:
    """The fills of one image's regions; they belong to one request and run at the same time."""

    def __init__(
        self, filling: Filling, served: ModelPool, terms: Terms, image: Encoded, regions: Sequence[Region]
    ) -> None:
        self._filling, self._served, self._terms, self._image = filling, served, terms, image
        self._regions = regions
        self._slots: dict[int, int] = {}
        self._left: list[int] = []  # Slots whose fills were cancelled while a decoder may write to them.
        self._decoded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None

    def fills(self) -> list[Fill]:
        """One a region, in their order."""
        return [partial(self._fill, number) for number in range(len(self._regions))]

    async def _fill(self, number: int, slot: int, position: int) -> Placement:
        """Raises what `Filling.regions` does. When it raises, the slot is given back or will be."""
        self._slots[number] = slot
        if len(self._slots) == len(self._regions):
            self._task = asyncio.create_task(self._decode(position), name="regions of an image")
        try:
            await asyncio.shield(self._decoded)
        except asyncio.CancelledError:
            self._leave(slot)
            raise
        region, model = self._regions[number], self._served.model
        assert isinstance(model, PixelModel)
        return model.placement(region.width, region.height)

    def _leave(self, slot: int) -> None:
        if self._task is None:
            self._served.slots.give(slot)
        elif not self._decoded.done():
            self._left.append(slot)
            if len(self._left) == len(self._regions):
                self._task.cancel()
        elif not self._decoded.cancelled() and self._decoded.exception() is None:
            self._served.slots.give(slot)

    async def _decode(self, position: int) -> None:
        slots = [self._slots[number] for number in range(len(self._regions))]
        try:
            await self._filling.regions(self._served, self._terms, self._image, slots, self._regions, position=position)
        except asyncio.CancelledError:
            self._decoded.cancel()
            raise
        except Exception as error:
            self._decoded.set_exception(error)
            self._decoded.exception()  # Somebody need not wait for it.
        else:
            for slot in self._left:
                self._served.slots.give(slot)
            self._decoded.set_result(None)
