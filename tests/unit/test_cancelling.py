"""Whoever leaves, at whatever stage: what is given back and when, what is counted, and that nothing more is done."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest

from app.config import Settings
from app.decoding.waiting import DecodeFailedError
from app.errors import ServiceError
from app.http.hot import HotRequest
from app.http.routes.predict import PredictCall
from app.ingress.cascade import predict_cascade
from app.ingress.context import RequestContext
from app.ingress.ingress import Call, Ingress, Items
from app.link import Terms
from app.worker.messages import Failed
from models import ModelSpec, Options, Placement, open_model
from models.contract.cascade import Region
from tests.support.doubles import IMAGE, Decoders, Worker, ask, counting, dispatching, done, free_slots, hear, turns

FAR = 10.0**9
JPEG = b"an image"


class Stages:
    """One image, and what the doubles do with it until it is at a stage."""

    def __init__(self, fleet, worker, decoders):
        self.fleet, self.worker, self.decoders = fleet, worker, decoders

    async def decode(self):
        [self.task] = ask(self.fleet, content=JPEG)
        await turns()

    async def queue(self):
        self.others = ask(self.fleet, 16)
        await turns()
        await self.decode()
        self.decoders.end(Placement(2, 2))
        await turns()

    async def infer(self):
        await self.decode()
        self.decoders.end(Placement(2, 2))
        await turns()
        assert len(self.worker.runs) == 1

    async def again(self):
        """Bring it to a worker for the second time, alone."""
        await self.infer()
        hear(self.fleet, self.worker, Failed(self.worker.runs[0].batch_id, "it failed"))
        await turns()
        assert len(self.worker.runs) == 2

    async def refill(self):
        """Let the host decode it after the device could not."""
        await self.infer_file()
        hear(self.fleet, self.worker, done(self.worker.runs[0], [None], undecoded=(0,)))
        await turns()
        assert len(self.decoders.again) == 1

    async def infer_file(self):
        await self.decode()
        [item] = self.fleet.link._under_way.values()
        item.refill = lambda item: self.fleet.link._filling._decode([item], JPEG, 0, again=True)
        self.decoders.end(Placement(2, 2))
        await turns()

    async def finish(self):
        """Answer all that decoders and workers have."""
        self.decoders.end(DecodeFailedError("it is not wanted any more"))
        for _ in range(3):
            for run in self.worker.runs:
                with contextlib.suppress(KeyError):
                    hear(self.fleet, self.worker, done(run))
            await turns()


STAGES = {"decode": "decode", "queue": "queue", "infer": "infer", "again": "infer", "refill": "decode"}
"""Each, and what metrics call it."""
WHY = ("the client leaves", "it is not wanted", "the deadline passes")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("why", WHY)
async def test_an_item_ends_at_once_is_counted_once_at_its_stage_and_its_slot_comes_back_when_nobody_has_it(
    why, stage, caplog
):
    worker, decoders = Worker(), Decoders()
    async with dispatching(worker, decoders=decoders) as fleet:
        stages = Stages(fleet, worker, decoders)
        before = free_slots(fleet)
        await getattr(stages, stage)()
        [*_, (token, item)] = fleet.link._under_way.items()
        moved, sent = counting(fleet._metrics), len(worker.runs)
        if why == "the deadline passes":
            fleet.link.expire([token])
        else:
            item.terms.recorder.abandoned = why == "the client leaves"
            stages.task.cancel()
        await turns()
        counts = {"the client leaves": "cancelled", "the deadline passes": "expired"}
        assert moved() == ({f"{counts[why]} m {STAGES[stage]}": 1} if why in counts else {})
        [reply] = await asyncio.gather(stages.task, return_exceptions=True)
        if why == "the deadline passes":
            assert (type(reply), reply.code) == (ServiceError, "DEADLINE_EXCEEDED")
        assert token not in fleet.link._under_way
        others = 16 if stage == "queue" else 0
        held = {"queue": 0}.get(stage, 1)
        assert free_slots(fleet) == before - others - held
        assert len(decoders.dropped) == (STAGES[stage] == "decode")
        await stages.finish()
        assert free_slots(fleet) == before
        moved = moved()
        assert moved.get("wasted m", 0) == (STAGES[stage] == "infer")
        assert {name: moved[name] for name in moved if "cancelled" in name or "expired" in name} == (
            {f"{counts[why]} m {STAGES[stage]}": 1} if why in counts else {}
        )
        assert len(worker.runs) == sent
        assert "could not be decoded" not in caplog.text
        if others:
            await asyncio.gather(*stages.others)


async def test_who_was_decoded_too_late_is_not_queued():
    worker, decoders = Worker(), Decoders()
    async with dispatching(worker, decoders=decoders) as fleet:
        [task] = ask(fleet, content=JPEG)
        await turns()
        moved = counting(fleet._metrics)
        [item] = fleet.link._under_way.values()
        item.terms.deadline_s = 0.0  # The timer of it comes a little later.
        decoders.end(Placement(2, 2))
        with pytest.raises(ServiceError) as late:
            await task
        assert late.value.code == "DEADLINE_EXCEEDED"
        assert moved() == {"expired m decode": 1}
        assert worker.runs == []


async def test_a_request_that_ends_takes_all_of_its_images_along_whatever_their_stage():
    """The first was answered, the second is computed, the third waits, the fourth is decoded, the fifth never came."""
    worker, decoders = Worker(), Decoders()
    async with dispatching(worker, decoders=decoders) as fleet:
        room = fleet.link.reserve(fleet.models["m"], 5, Terms(FAR))
        [(_, first)] = fleet.replies.submit(room, IMAGE, Options(), 0)
        await turns()
        hear(fleet, worker, done(worker.runs[0]))
        await first
        worker.sent.clear()
        fleet.replies.submit(room, IMAGE, Options(), 1)
        await turns()
        fleet.replies.submit(room, IMAGE, Options(), 2)
        fleet.replies.submit(room, JPEG, Options(), 3)
        await turns()
        queue, moved = fleet.scheduler.queues["m"], counting(fleet._metrics)
        assert (queue.in_flight, queue.depth, queue.reserved) == (1, 1, 2)
        room.terms.recorder.abandoned = True
        room.__exit__()
        assert (queue.in_flight, queue.depth, queue.reserved) == (1, 0, 0)
        assert moved() == {"cancelled m infer": 1, "cancelled m queue": 1, "cancelled m decode": 1}
        assert fleet.models["m"].images_under_way == 0
        room.__exit__()
        hear(fleet, worker, done(worker.runs[0]))
        decoders.end(Placement(2, 2))
        await turns()
        assert fleet.link._under_way == {}


@pytest.mark.parametrize("left", [True, False])
async def test_who_leaves_while_its_answer_is_made_is_counted_once_and_the_item_is_not_answered(left):
    worker = Worker()
    async with dispatching(worker) as fleet:
        moved, begun = counting(fleet._metrics), asyncio.Event()

        async def answer(_):
            begun.set()
            await asyncio.Event().wait()

        room = fleet.link.reserve(fleet.models["m"], 1, Terms(FAR))
        with room:
            task = asyncio.ensure_future(Items(fleet.replies, room, Options(), answer).run([IMAGE]))
            await turns()
            hear(fleet, worker, done(worker.runs[0]))
            await begun.wait()
            room.terms.recorder.abandoned = left
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        found = {name: count for name, count in moved().items() if not name.startswith("batch_")}
        assert found == ({"cancelled m postprocess": 1} if left else {})


@pytest.mark.parametrize("late", ["when it came", "when its answer was made"])
async def test_an_answer_that_is_ready_after_its_deadline_is_none(late):
    worker = Worker()
    async with dispatching(worker) as fleet:
        moved, made = counting(fleet._metrics), []
        with fleet.link.reserve(fleet.models["m"], 1, Terms(FAR)) as room:

            async def answer(_):
                made.append(1)
                room.terms.deadline_s = 0.0

            task = asyncio.ensure_future(Items(fleet.replies, room, Options(), answer).run([IMAGE]))
            await turns()
            if late == "when it came":
                room.terms.deadline_s = 0.0
            hear(fleet, worker, done(worker.runs[0]))
            with pytest.raises(ServiceError) as error:
                await task
        assert error.value.code == "DEADLINE_EXCEEDED"
        found = {name: count for name, count in moved().items() if not name.startswith("batch_")}
        assert found == {"expired m postprocess": 1}
        assert len(made) == (late != "when it came"), "nothing is made for who is gone"


async def test_the_first_image_that_fails_ends_the_others_of_its_request():
    worker, decoders = Worker(), Decoders()
    async with dispatching(worker, decoders=decoders) as fleet:

        async def answer(result):
            return result

        with fleet.link.reserve(fleet.models["m"], 3, Terms(FAR)) as room:
            task = asyncio.ensure_future(Items(fleet.replies, room, Options(), answer).run([JPEG] * 3))
            await turns()
            moved, [first, *others] = counting(fleet._metrics), decoders.given
            first.ended(first, DecodeFailedError("it cannot be"))
            with pytest.raises(ServiceError):
                await task
            assert decoders.dropped == others, "before the request itself has ended"
        assert moved() == {}, "nobody has left"
        for each in others:
            each.ended(each, Placement(2, 2))
        await turns()
        assert worker.runs == []


def classifier(name):
    return open_model(ModelSpec(name, "resnet50", "random"), Path("nowhere"))


@pytest.mark.parametrize("begun", [len(JPEG), 0])
async def test_a_body_is_not_kept_while_its_image_waits_for_the_device(begun):
    decoders, model = Decoders(), classifier("m")
    worker = Worker(models=(model,))
    async with dispatching(worker, decoders=decoders, models=(model,)) as fleet:
        fleet.link.settings, fleet.link.models = Settings(log_requests=False), fleet.models
        scope = {"headers": (), "query_string": b""}
        request = HotRequest(scope, {}, len(JPEG), memoryview(JPEG)[:begun], keep_alive=True)
        if not begun:
            request.room()[: len(JPEG)] = JPEG
            request.arrived(len(JPEG))
        kept = weakref.ref(request._buffer if begun else request._view)
        with RequestContext(fleet.link, scope) as context:
            context.task = asyncio.ensure_future(Ingress(fleet.link, None).answer(PredictCall(request, "m")))
            await turns()
            assert kept() is not None or not begun, "a decoder reads it"
            decoders.end(Placement(2, 2))
            await turns()
            assert worker.runs
            assert kept() is None
            hear(fleet, worker, done(worker.runs[0], [(np.zeros(1000, np.float32),)]))
            await context.task


class Parts:
    """A cascade of which the first stage finds three parts in the first of two images, and one in the second."""

    name, models = "two", ("m", "n")
    regions = ((0, Region(0, 0, 9, 9)), (0, Region(1, 1, 9, 9)), (0, Region(2, 2, 9, 9)), (1, Region(0, 0, 5, 5)))

    async def predict(self, request, options):
        await request.whole("m")
        return await request.parts("n", self.regions)


@pytest.mark.parametrize("stage", ["first", "decode", "queue", "infer"])
async def test_who_leaves_in_two_stages_leaves_nothing_in_either_and_counts_for_the_version_of_its_share(stage):
    decoders, models = Decoders(), tuple(map(classifier, ("m@2", "n", "m")))
    worker = Worker(models=models)
    async with dispatching(worker, decoders=decoders, models=models) as fleet:
        before = [pool.slots.taken for pool in fleet.models.values()]
        moved = counting(fleet._metrics)
        link = fleet.link
        link.models, link.cascades, link.traffic = fleet.models, {"two": Parts()}, {"m": {"2": 1.0}}
        link.settings, terms, images = Settings(max_images=4, log_requests=False), Terms(FAR), [b"one", b"two"]
        call = MagicMock(Call, model="two", version="", terms=lambda _: terms, watched=lambda run, _: run())
        call.prepare.side_effect = lambda ingress, served, terms, _: partial(
            predict_cascade, ingress, Parts(), served, images, terms, options=Options()
        )

        async def answer():
            with RequestContext(link, {"headers": ()}) as call.context:
                call.context.task = asyncio.current_task()
                await Ingress(link, None).answer(call)

        task = asyncio.ensure_future(answer())
        await turns()
        assert [image.model for image in decoders.given] == [0, 0]
        if stage != "first":
            decoders.end(Placement(100, 100))
            await turns()
            logits = np.zeros(1000, np.float32)
            hear(fleet, worker, done(worker.runs[0], [(logits,)] * 2))
            await turns()
            # Portions of half of what a request may hold, two at a time.
            assert [(image.model, image.wanted) for image in decoders.given] == [(1, 2), (1, 1), (1, 1)]
        if stage == "queue":
            fleet.scheduler.retire_worker(worker.name)
        if stage in ("queue", "infer"):
            decoders.end(Placement(100, 100))
            await turns()
        terms.recorder.abandoned = True
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        expected = {"first": {"cancelled m@2 decode": 2}}.get(stage, {f"cancelled n {stage}": 4})
        assert {name: count for name, count in moved().items() if name.startswith("cancelled")} == expected
        assert moved()["requests m@2 CANCELLED"] == 1
        assert all(image.wanted == 0 for image in decoders.given)
        decoders.end(DecodeFailedError("it is not wanted any more"))
        for run in worker.runs[1:]:
            hear(fleet, worker, done(run))
        await turns()
        assert [pool.slots.taken for pool in fleet.models.values()] == before
        assert moved().get("wasted n", 0) == (4 if stage == "infer" else 0)
