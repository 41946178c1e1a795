"""How many images decoders have in front of them. The decoders are objects here: no process is started."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.decoder.messages import Decoded, DecodePlan, Status
from app.decoding import pool
from app.decoding.pool import CREDITS, Decoders
from app.decoding.waiting import ImageLimits, PendingImage
from app.processes.arena import Arena
from tests.support.doubles import Decoder, turns

SMALL, LARGE = bytes(60_000), bytes(3_000_000)


class Clock:
    now_s = 100.0

    def monotonic(self):
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(pool, "clock", clock)
    return clock


@contextlib.asynccontextmanager
async def decoding(count=2, buffers=CREDITS, models=1):
    arena = Arena([(4, 64)] * models)
    plan = DecodePlan((None,) * models, arena.pools, buffers, 4 << 20, ("info", "text"))
    decoders = Decoders(plan, arena, count, ImageLimits(queue=256, max_pixels=1000))
    decoders._replicas.decoders = {number: Decoder(number, plan) for number in range(count)}
    try:
        yield decoders
    finally:
        arena.close()


def begun(decoders, model, body, rank):
    """A task that waits for an image, and drops it when it is cancelled."""
    ended = asyncio.get_running_loop().create_future()
    image = PendingImage(model, rank, body, lambda _, outcome: ended.done() or ended.set_result(outcome))
    decoders.decode(image)

    async def outcome():
        try:
            return await ended
        finally:
            if ended.cancelled():
                decoders.drop(image)

    return asyncio.ensure_future(outcome())


async def ask(decoders, *bodies):
    """Tasks of images that come in this order; what can be sent has been sent."""
    asked = [begun(decoders, 0, body, rank) for rank, body in enumerate(bodies)]
    await turns()
    return asked


def answer(decoders, clock, seconds_an_image):
    """Every decoder answers for all that it has, in one packet; they work at the same time."""
    began_s = clock.now_s
    for decoder in sorted(decoders._replicas.ready, key=lambda decoder: len(decoder.jobs)):
        jobs, decoder.jobs = decoder.jobs, []
        clock.now_s = began_s + seconds_an_image * len(jobs)
        for job in jobs:
            decoders._answered(decoder, Decoded(job.token, Status.PLACED, 1, 1))


async def settled(decoders, clock, body, seconds_an_image):
    """How many images each decoder has once it is known how long they take."""
    asked = await ask(decoders, *[body] * 200)
    for _ in range(8):
        had = [len(decoder.sent) for decoder in decoders._replicas.ready]
        answer(decoders, clock, seconds_an_image)
        await turns()
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    answer(decoders, clock, seconds_an_image)
    return had


@pytest.mark.parametrize(("seconds_an_image", "images"), [(0.0001, CREDITS), (0.0035, 3), (0.0045, 2), (0.05, 2)])
async def test_a_decoder_has_as_many_images_as_a_few_milliseconds_take_and_two_at_least(
    clock, seconds_an_image, images
):
    async with decoding() as decoders:
        assert await settled(decoders, clock, SMALL, seconds_an_image) == [images] * 2


async def test_nobody_knows_yet_how_long_an_image_takes(clock):
    async with decoding() as decoders:
        asked = await ask(decoders, *[SMALL] * 20)
        assert [len(decoder.sent) for decoder in decoders._replicas.ready] == [2, 2]
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


async def test_small_images_do_not_stand_behind_one_of_many_bytes(clock):
    async with decoding() as decoders:
        await settled(decoders, clock, SMALL, 0.001)
        asked = await ask(decoders, LARGE, *[SMALL] * 12)
        behind, beside = sorted((decoder.sent for decoder in decoders._replicas.ready), key=len)
        assert len(behind) <= 2
        assert len(beside) == CREDITS
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


async def test_what_a_decoder_has_is_counted_until_it_is_answered(clock):
    async with decoding() as decoders:
        asked = await ask(decoders, SMALL, SMALL, LARGE)
        assert sum(decoder.bytes for decoder in decoders._replicas.ready) == 2 * len(SMALL) + len(LARGE)
        answer(decoders, clock, 0.001)
        assert [decoder.bytes for decoder in decoders._replicas.ready] == [0, 0]
        assert all([await task for task in asked])


async def answered_models(decoders, clock, image_s, pauses):
    """Of which model each image was, in the order of the answers. Each decoder answers one image after the other, and
    stands still for `pauses[n]` in its nth round.
    """
    asked, order = [], []
    for number in range(120):
        asked += [begun(decoders, model, SMALL, number) for model in range(2)]
    await turns()
    for pause_s in pauses:
        clock.now_s += pause_s
        for _ in range(2):
            clock.now_s += image_s
            for decoder in decoders._replicas.ready:
                if decoder.jobs:
                    job = decoder.jobs.pop(0)
                    order.append(job.model)
                    decoders._answered(decoder, Decoded(job.token, Status.PLACED, 1, 1))
        await turns()
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    return order


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.lists(st.sampled_from([0.0, 0.0, 0.0, 2.0, 8.0, 20.0]), min_size=1, max_size=6))
def test_whatever_the_pauses_each_model_is_decoded_within_a_bounded_number_of_images(pauses):
    async def run(clock):
        async with decoding(models=2) as decoders:
            decoders._image_s = 0.02
            return await answered_models(decoders, clock, 0.02, [*pauses, *[0.0] * 40])

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pool, "clock", clock := Clock())
        order = asyncio.run(run(clock))
    for model in (0, 1):
        others = most = 0
        for each in order:
            others = 0 if each == model else others + 1
            most = max(most, others)
        # What a pause may be held against a model, of two decoders, in images of the other; and what these have.
        assert most <= 2 * 0.25 / 0.02 + 2 * CREDITS, order
