"""Another version of a model, which computes live images while the devices rest: which, when, and what is said."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import numpy as np
import pytest

from app.serving import shadow as shadow_module
from app.serving.shadow import HELD, Shadow
from app.worker.messages import Failed
from models import ModelError, ModelSpec, open_model
from tests.support.doubles import Worker, ask, counting, dispatching, done, hear, turns

MODELS = tuple(open_model(ModelSpec(name, "resnet50", "random"), Path("nowhere")) for name in ("m", "m@2"))
CAT, DOG = np.eye(1000, dtype=np.float32)[:2]


@contextlib.asynccontextmanager
async def shadowing(share=1.0, left=0, **of_worker):
    """Yield a fleet of two versions, of which the second is the first one's shadow; `moved()` returns its counters.
    `left`: images that are held at the end.
    """
    worker = Worker(models=MODELS, **of_worker)
    async with dispatching(worker, models=MODELS) as fleet:
        live, other = fleet.models.values()
        fleet.shadow = Shadow(fleet, live, other, share, fleet._metrics)
        fleet.worker, fleet.other, counted = worker, other, counting(fleet._metrics)
        fleet.moved = lambda: {name: each for name, each in counted().items() if name.startswith("shadow")}
        yield fleet
        fleet.shadow.stop()
        fleet.shadow.stop()
        assert other.slots.taken == left


async def answered(fleet, logits=CAT, images=1):
    """Live images are answered so."""
    tasks = ask(fleet, images)
    await turns()
    run = fleet.worker.runs[-1]
    for item in fleet.link._under_way.values():
        fleet.arena.slot(0, item.slot)[:] = 7
    hear(fleet, fleet.worker, done(run, [(logits,)] * images))
    await asyncio.gather(*tasks)
    fleet.worker.sent.clear()


async def shadowed(fleet):
    """Return the batch that the shadow is to compute by now; None without one."""
    await asyncio.sleep(0.07)
    runs = [run for run in fleet.worker.runs if run.model == 1]
    fleet.worker.sent[:] = [each for each in fleet.worker.sent if each not in runs]
    return runs[0] if runs else None


@pytest.mark.parametrize(("other", "outcome"), [(CAT, "same"), (DOG, "different"), (None, "dropped")])
async def test_an_image_is_computed_again_from_its_own_pixels_and_counted_once_by_how_the_answers_compare(
    virtual_time, other, outcome
):
    async with shadowing() as fleet:
        await answered(fleet)
        run = await shadowed(fleet)
        assert fleet.arena.slot(1, run.slots[0]).tolist() == fleet.arena.slot(0, 0).tolist()
        assert set(fleet.arena.slot(1, run.slots[0]).tolist()) == {7}
        hear(fleet, fleet.worker, done(run, [None if other is None else (other,)]))
        await turns()
        assert fleet.moved() == {f"shadow_images m@2 {outcome}": 1}
        report = fleet.shadow.report
        assert (report.same, report.different, report.dropped) == tuple(
            int(each == outcome) for each in ("same", "different", "dropped")
        )
        classes = {MODELS[0].labels[0]: (1, int(outcome == "different"))}
        assert {label: (each.images, each.different) for label, each in report.classes.items()} == (
            {} if other is None else classes
        )
        assert fleet.scheduler.queues["m@2"].reserved == 0


async def test_it_waits_for_a_moment_of_rest_and_drops_what_has_become_old(virtual_time):
    async with shadowing() as fleet:
        await answered(fleet)
        busy = ask(fleet)
        assert await shadowed(fleet) is None
        await asyncio.sleep(shadow_module._OLDEST_S)
        assert await shadowed(fleet) is None
        assert fleet.moved() == {"shadow_images m@2 dropped": 1}
        hear(fleet, fleet.worker, done(fleet.worker.runs[0], [(CAT,)]))
        await asyncio.gather(*busy)
        run = await shadowed(fleet)
        hear(fleet, fleet.worker, done(run, [(CAT,)]))
        await turns()
        assert fleet.moved() == {"shadow_images m@2 dropped": 1, "shadow_images m@2 same": 1}


async def test_one_image_at_a_time_goes_and_no_more_are_held_than_there_are_slots_for(virtual_time):
    async with shadowing(left=HELD - 1) as fleet:
        for _ in range(3):
            await answered(fleet, images=8)
        assert fleet.other.slots.taken == HELD
        run = await shadowed(fleet)
        assert len(run.slots) == 1
        assert await shadowed(fleet) is None, "its worker has one"
        hear(fleet, fleet.worker, done(run, [(CAT,)]))
        await turns()
        assert fleet.moved() == {"shadow_images m@2 same": 1}


@pytest.mark.parametrize("why", ["its client left", "it holds a file", "it was not a number"])
async def test_what_has_no_pixels_or_no_answer_is_not_computed_again(virtual_time, why):
    async with shadowing() as fleet:
        [task] = ask(fleet)
        await turns()
        [item] = fleet.link._under_way.values()
        if why == "its client left":
            task.cancel()
            await turns()
        if why == "it holds a file":
            item.refill = lambda item: None
        hear(fleet, fleet.worker, done(fleet.worker.runs[0], [None if why == "it was not a number" else (CAT,)]))
        await asyncio.gather(task, return_exceptions=True)
        fleet.worker.sent.clear()
        assert (await shadowed(fleet), fleet.moved(), fleet.other.slots.taken) == (None, {}, 0)


async def test_what_the_device_fails_at_is_dropped(virtual_time):
    async with shadowing() as fleet:
        await answered(fleet)
        run = await shadowed(fleet)
        hear(fleet, fleet.worker, Failed(run.batch_id, "it failed"))
        run = await shadowed(fleet)
        hear(fleet, fleet.worker, Failed(run.batch_id, "it failed again"))
        await turns()
        assert fleet.moved() == {"shadow_images m@2 dropped": 1}


async def test_what_would_take_longer_than_it_may_is_dropped(virtual_time):
    async with shadowing(latency_s={1: 20.0, 8: 20.0}) as fleet:
        await answered(fleet)
        assert (await shadowed(fleet), fleet.moved()) == (None, {"shadow_images m@2 dropped": 1})


async def test_a_share_of_nothing_is_nothing(virtual_time):
    async with shadowing(share=0.0) as fleet:
        await answered(fleet, images=8)
        assert (await shadowed(fleet), fleet.moved(), fleet.other.slots.taken) == (None, {}, 0)


async def test_versions_whose_answers_cannot_be_compared_are_refused():
    async with dispatching() as fleet:
        [pool] = fleet.models.values()
        with pytest.raises(ModelError, match="do not answer alike"):
            Shadow(fleet, pool, pool, 1.0, fleet._metrics)
