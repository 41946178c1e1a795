"""Decoder processes for real: pixels as in this process, order, faults, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import random
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
from PIL import Image

from app import clock
from app.decoder.messages import DecodePlan, Kind
from app.decoding.pool import Decoders
from app.decoding.waiting import ImageLimits, PendingImage
from app.images.decoding import decode
from app.images.header import ImageTooLargeError, InvalidImageError, read_header
from app.processes.arena import Arena, FreeSlots
from models import open_model, parse_spec
from models.confinement import what_there_is
from tests.support.escapes import FORGED
from tests.support.faulty_geometry import CRASHES, ESCAPES, FORGES, HANGS, SLOW, FaultyGeometry
from tests.support.images import encoded
from tests.support.load import until
from tests.support.loop_guard import guarded
from tests.support.photographs import FILES

pytestmark = pytest.mark.asyncio(loop_scope="module")


_RESNET, _YOLO = (open_model(parse_spec(f"{name}:random", "official"), Path()) for name in ("resnet18", "yolov8n"))
MODELS = (
    _RESNET,
    _YOLO,
    FaultyGeometry(**{each.name: getattr(_RESNET, each.name) for each in dataclasses.fields(_RESNET)}),
)
FAULTY = 2
SLOTS = 64
NEVER_S = 600.0


class Rig:
    """Decoders over an arena, with the slots counted."""

    def __init__(self, *, count=2, **limits):
        self.arena = Arena([(int(np.prod(model.input_shape)), SLOTS) for model in MODELS])
        self.slots = [FreeSlots(SLOTS) for _ in MODELS]
        plan = DecodePlan(MODELS, self.arena.pools, 2, 4 << 20, ("info", "text"))
        given = {"queue": 64, "max_pixels": 50_000_000, **limits}
        self.reasons: list[str] = []
        self.under_way: list[PendingImage] = []
        self.decoders = Decoders(plan, self.arena, count, ImageLimits(**given), restarted=self.reasons.append)

    async def decode(self, body, model=0, *, deadline_s=60.0, rank_s=None, size=None):
        """Decode; raises TimeoutError at the deadline. A cancelled image's slot comes back once no decoder has it."""
        slot = self.slots[model].take()
        ended = asyncio.get_running_loop().create_future()

        def hear(_, outcome):
            if ended.done():
                self.slots[model].give(slot)
            elif isinstance(outcome, Exception):
                self.slots[model].give(slot)
                ended.set_exception(outcome)
            else:
                ended.set_result(outcome)

        rank_s = clock.monotonic() if rank_s is None else rank_s
        kind, (width, height) = Kind.PIXELS if size else Kind.ENCODED, size or (0, 0)
        image = PendingImage(model, rank_s, body, hear, kind, slot, width, height)
        self.decoders.decode(image)
        self.under_way.append(image)
        try:
            placement = await asyncio.wait_for(ended, deadline_s)
        except BaseException:
            if ended.cancelled():
                self.decoders.drop(image)
            elif ended.exception() is None:
                self.slots[model].give(slot)
            raise
        finally:
            self.under_way.remove(image)
        pixels = self.arena.slot(model, slot).reshape(MODELS[model].input_shape).copy()
        self.slots[model].give(slot)
        return placement, pixels

    @property
    def pids(self):
        return [decoder.pid for decoder in self.decoders.ready if decoder.pid]

    def all_free(self):
        return not any(slots.taken for slots in self.slots) and not self.decoders.queue.held

    async def time_passes_for_the_last(self):
        """When one decoder alone has images left it is as if it had them for longer than it may."""
        queue, decoders = self.decoders.queue, self.decoders.ready
        await until(lambda: not queue.waiting and sum(bool(each.sent) for each in decoders) == 1, blocks=False)
        limits, queue.limits = queue.limits, dataclasses.replace(queue.limits, timeout_s=0.0)
        await until(lambda: self.reasons, blocks=False)
        queue.limits = limits

    @contextlib.asynccontextmanager
    async def limited(self, **changes):
        """With other limits; afterwards nothing is left, everything is up, and nothing has held the loop up."""
        queue = self.decoders.queue
        before, queue.limits = queue.limits, dataclasses.replace(queue.limits, **changes)
        self.reasons.clear()
        try:
            with guarded():
                yield self
                await until(self.all_free, blocks=False)
                await until(lambda: len(self.decoders.ready) == 2, blocks=False)
        finally:
            queue.limits = before


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def made():
    rig = Rig()
    try:
        await rig.decoders.start()
        yield rig
    finally:
        processes = [psutil.Process(pid) for pid in (rig.decoders.fork_server.pid, *rig.pids)]
        await rig.decoders.stop()
        rig.arena.close()
        await until(lambda: not any(process.is_running() for process in processes), blocks=False)


def here(body, model=0):
    header = read_header(body)
    out = torch.empty(MODELS[model].input_shape, dtype=torch.uint8)
    size = MODELS[model].decode_size(header.width, header.height)
    placement = MODELS[model].preprocess(decode(body, header, size), out, header.width, header.height)
    return placement, out.numpy()


def image(width, height=10):
    return encoded(Image.new("RGB", (width, height), (width % 255, 80, 90)))


async def test_pixels_and_placement_are_those_of_this_process(made):
    async with made.limited():
        for file in FILES:
            body = file.read_bytes()
            for model in (0, 1):
                placement, pixels = await made.decode(body, model)
                expected, reference = here(body, model)
                assert placement == expected
                assert (pixels == reference).all()


async def test_what_is_no_good_image_is_refused_with_its_sentence(made):
    async with made.limited(max_pixels=1000):
        with pytest.raises(InvalidImageError, match="not an image"):
            await made.decode(b"not an image")
        with pytest.raises(InvalidImageError, match="broken or truncated"):
            await made.decode(image(20)[:-20])
        with pytest.raises(ImageTooLargeError, match="1010"):
            await made.decode(image(101))
        await made.decode(image(99))


@pytest.mark.parametrize("seed", range(8))
async def test_whatever_becomes_of_images_every_slot_comes_back_once(made, seed):
    """Broken, slow, late, large, cancelled and killed images in one crowd. FreeSlots raises at one that comes twice."""
    chance = random.Random(seed)
    kinds = (image(30), image(SLOW), image(40, 30), image(25)[:-20], b"none", image(CRASHES))

    async with made.limited(large_pixels=1000):
        tasks = []
        for _ in range(50):
            body = chance.choices(kinds, (8, 6, 4, 3, 2, 1))[0]
            deadline_s = chance.choice((0.01, 0.1, 60.0))
            tasks.append(asyncio.create_task(made.decode(body, FAULTY, deadline_s=deadline_s)))
            if chance.random() < 0.3:
                await asyncio.sleep(0)
            if chance.random() < 0.3:
                chance.choice(tasks).cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    known = (tuple, asyncio.TimeoutError, InvalidImageError, asyncio.CancelledError)
    assert all(isinstance(result, known) for result in results), results


@pytest.mark.parametrize(("width", "reason"), [(CRASHES, "died"), (HANGS, "hung")])
async def test_an_image_that_ends_its_decoder_fails_alone(made, width, reason, caplog):
    expected = [here(image(each), FAULTY)[1] for each in range(30, 60)]  # It holds the loop up, and is no work of ours.
    async with made.limited(timeout_s=NEVER_S):
        innocent = [asyncio.create_task(made.decode(image(each), FAULTY)) for each in range(30, 40)]
        culprit = asyncio.create_task(made.decode(image(width), FAULTY))
        innocent += [asyncio.create_task(made.decode(image(each), FAULTY)) for each in range(40, 60)]
        if reason == "hung":
            await made.time_passes_for_the_last()
        with pytest.raises(InvalidImageError):
            await culprit
        for given, (_, pixels) in zip(expected, await asyncio.gather(*innocent), strict=True):
            assert (pixels == given).all()
        assert made.reasons == [reason], "it is known after one death"
        await until(lambda: len(made.decoders.ready) == 2, blocks=False)
    assert any("sha256" in record.getMessage() for record in caplog.records)


async def test_decoders_hold_none_of_each_others_descriptors_and_have_no_part_in_the_services_streams(made):
    async with made.limited():
        await made.decode(image(20))
        inboxes = []
        for pid in made.pids:
            paths = [f"/proc/{pid}/fd/{each}" for each in os.listdir(f"/proc/{pid}/fd")]
            named = {(os.readlink(path).partition(" ")[0], os.stat(path).st_ino) for path in paths}
            assert {name.partition(":")[0] for name, _ in named} == {"/dev/null", "/memfd", "socket"}
            assert sum("anychip-inbox" in name for name, _ in named) == 1
            assert sum(name.startswith("socket:") for name, _ in named) == 1
            inboxes += [number for name, number in named if "anychip-inbox" in name]
        assert len(set(inboxes)) == 2


async def test_a_decoder_that_is_taken_over_gets_nowhere(made):
    """It tries to open files and sockets, to start processes, and to reach its parent."""
    there = what_there_is()
    if not (there.seccomp and there.landlock):
        pytest.skip("this kernel has no seccomp or no Landlock")
    placement, _ = await made.decode(image(ESCAPES), FAULTY)
    assert placement.width == ESCAPES


async def test_a_line_that_a_decoder_forges_goes_nowhere(made, caplog, capfd):
    await made.decode(image(FORGES), FAULTY)
    assert FORGED not in caplog.text
    assert FORGED not in "".join(capfd.readouterr())
