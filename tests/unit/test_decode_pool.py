"""What decoders get, and what becomes of images whose client or decoder goes. The decoders are objects here."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.decoder.messages import MAX_TEXT, Decoded, DecodePlan, Status
from app.decoding import pool
from app.decoding.pool import CREDITS, DecoderProcess, Decoders
from app.decoding.waiting import DecodeFailedError, DecodeTooLateError, ImageLimits, PendingImage
from app.images.header import InvalidImageError
from app.processes.arena import Arena
from app.processes.channel import to_packet
from models import Placement
from tests.support.doubles import Decoder, turns


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
async def decoding(models=1, **options):
    arena = Arena([(4, 64)] * models)
    plan = DecodePlan((None,) * models, arena.pools, CREDITS, 4 << 20, ("info", "text"))
    decoders = Decoders(plan, arena, 2, ImageLimits(queue=256, max_pixels=1000), **options)
    decoders._places = [SimpleNamespace(child=Decoder(decoders, number)) for number in range(2)]
    try:
        yield decoders
    finally:
        arena.close()


class Waiting:
    """An image that waits from now on, and what has become of it."""

    def __init__(self, decoders, model=0, rank_s=0.0, **of):
        self.outcomes = []
        self.image = PendingImage(model, rank_s, bytes(60_000), lambda _, outcome: self.outcomes.append(outcome), **of)
        decoders.decode(self.image)

    @property
    def outcome(self):
        assert len(self.outcomes) <= 1
        return type(self.outcomes[0]) if self.outcomes else None


async def dropped(decoders, asked):
    for each in asked:
        if each.outcome is None:
            decoders.drop(each.image)
    await turns()


def answer(decoders, clock, seconds_an_image):
    """Every decoder answers for all that it has, in one packet; they work at the same time."""
    began_s = clock.now_s
    for decoder in sorted(decoders.ready, key=lambda decoder: len(decoder.jobs)):
        jobs, decoder.jobs = decoder.jobs, []
        clock.now_s = began_s + seconds_an_image * len(jobs)
        for job in jobs:
            decoders.answered(decoder, Decoded(job.token, Status.PLACED, 1, 1))


async def test_what_would_come_too_late_is_not_decoded_where_others_wait(clock):
    async with decoding() as decoders:
        for _ in range(100):
            decoders.queue.image_s.learn(0.01)
        for _ in range(4):
            Waiting(decoders)
        late = Waiting(decoders, needed_s=clock.now_s + 0.015)
        in_time, last = Waiting(decoders, needed_s=clock.now_s + 0.05), Waiting(decoders)
        needed_s = clock.now_s
        await turns()
        assert late.outcome is None, "nothing is decided before its turn"
        answer(decoders, clock, 0.005)
        await turns()
        assert (late.outcome, in_time.outcome, last.outcome) == (DecodeTooLateError, None, None)
        answer(decoders, clock, 0.005)
        await turns()
        assert (in_time.outcome, last.outcome) == (Placement, Placement)
        last_late = Waiting(decoders, needed_s=needed_s)  # Nothing else waits: it is given a try.
        await turns()
        answer(decoders, clock, 0.005)
        assert last_late.outcome is Placement
        assert decoders.queue.held == 0


async def answered_models(decoders, clock, image_s, pauses):
    """Of which model each image was, in the order of the answers. Each decoder answers one image after the other, and
    stands still for `pauses[n]` in its nth round.
    """
    asked, order = [], []
    for number in range(120):
        asked += [Waiting(decoders, model, number) for model in range(2)]
    await turns()
    for pause_s in pauses:
        clock.now_s += pause_s
        for _ in range(2):
            clock.now_s += image_s
            for decoder in decoders.ready:
                if decoder.jobs:
                    job = decoder.jobs.pop(0)
                    order.append(job.model)
                    decoders.answered(decoder, Decoded(job.token, Status.PLACED, 1, 1))
        await turns()
    await dropped(decoders, asked)
    return order


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.lists(st.sampled_from([0.0, 0.0, 0.0, 2.0, 8.0, 20.0]), min_size=1, max_size=6))
def test_whatever_the_pauses_each_model_is_decoded_within_a_bounded_number_of_images(pauses):
    async def run(clock):
        async with decoding(models=2) as decoders:
            for _ in range(100):
                decoders.queue.image_s.learn(0.02)
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


async def test_what_nobody_waits_for_leaves_the_heap_and_no_decoder_gets_it(clock):
    async with decoding() as decoders:
        images = [Waiting(decoders) for _ in range(8)]
        await turns()
        assert sum(len(decoder.jobs) for decoder in decoders.ready) == 4
        decoders.drop(images[6].image)
        assert (images[6].outcome, decoders.queue.waiting, decoders.queue.held) == (DecodeFailedError, 3, 7)
        for _ in range(3):
            answer(decoders, clock, 0.001)
            await turns()
        assert [each.outcome for each in images] == [Placement] * 6 + [DecodeFailedError, Placement]
        assert decoders.queue.held == 0


async def test_what_nobody_waits_for_any_more_is_no_pixels_though_a_decoder_has_made_them(clock):
    async with decoding() as decoders:
        left, stays = Waiting(decoders), Waiting(decoders)
        await turns()
        decoders.drop(left.image)
        assert (left.outcome, decoders.queue.held) == (None, 2), "a decoder may still write to its slot"
        answer(decoders, clock, 0.001)
        assert (left.outcome, stays.outcome, decoders.queue.held) == (DecodeFailedError, Placement, 0)


@pytest.mark.parametrize("is_sent", [True, False])
async def test_parts_of_an_image_are_made_as_long_as_one_of_them_is_wanted(clock, is_sent):
    async with decoding() as decoders:
        before = [] if is_sent else [Waiting(decoders) for _ in range(4)]
        await turns()
        parts = Waiting(decoders, wanted=3)
        await turns()
        for _ in range(2):
            decoders.drop(parts.image)
            assert parts.outcome is None
        for _ in range(2):
            answer(decoders, clock, 0.001)
            await turns()
        assert parts.outcome is Placement
        assert all(each.outcome is Placement for each in before)
        gone = Waiting(decoders, wanted=2)
        decoders.drop(gone.image)
        decoders.drop(gone.image)
        assert gone.outcome is DecodeFailedError


@pytest.mark.parametrize(("hung", "reason", "text"), [(True, "hung", "too long"), (False, "died", "could not be")])
async def test_a_decoder_that_ends_is_counted_once_and_of_its_images_those_that_are_wanted_go_on(
    clock, hung, reason, text
):
    counted = []
    async with decoding(restarted=counted.append) as decoders:
        by_image = {each.image: each for each in [Waiting(decoders) for _ in range(6)]}
        await turns()
        lost, other = decoders.ready
        lost.end("it ended")
        culprit, left = (image for image, _ in lost.sent.values())
        lost.sent.clear()
        decoders.drop(left)
        decoders.lost([culprit, left], culprit, hung=hung)
        assert counted == [reason]
        assert by_image[left].outcome is DecodeFailedError, "nobody has it, and nobody wants it"
        await asyncio.gather(*decoders._rejecting)
        assert by_image[culprit].outcome is InvalidImageError
        assert text in str(by_image[culprit].outcomes[0])
        for _ in range(2):
            answer(decoders, clock, 0.001)
            await turns()
        assert [each.outcome for each in by_image.values()].count(Placement) == 4
        assert (decoders.queue.held, other.sent) == (0, {})


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        ([], "it says nothing"),
        (
            [Decoded(1, Status.INVALID, text="x" * (MAX_TEXT + 1))],
            f"Expected `str` of length <= {MAX_TEXT} - at `$[0][7]`",
        ),
        ([Decoded(1, Status.PLACED)], "1"),  # It has no such image.
    ],
)
async def test_a_decoder_that_says_what_no_decoder_says_is_killed(clock, monkeypatch, says, reason):
    async with decoding() as decoders:
        decoder, killed = DecoderProcess(decoders, 1), []
        monkeypatch.setattr(decoder, "kill", killed.append)
        decoder._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, decoder._connection:
            theirs.send(to_packet(says))
            decoder._readable()
        assert killed == [f"unreadable answer: {reason}"]
        decoder.inbox.close()
