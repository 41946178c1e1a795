"""The dispatcher between its queue and its workers, which are objects here: no process is started."""

import asyncio

import pytest
from msgspec.structs import replace

from app import clock
from app.errors import ServiceError
from app.link import ModelState, Terms
from app.worker.messages import Failed
from tests.support.doubles import Process, Worker, ask, dispatching, done, free_slots, hear, submit, turns


@pytest.fixture
async def worker():
    return Worker()


@pytest.fixture
async def fleet(worker):
    async with dispatching(worker) as fleet:
        yield fleet


@pytest.mark.parametrize("results", [(), ((),) * 7, ((),) * 9])
async def test_a_batch_whose_results_do_not_fit_is_tried_again_and_no_slot_is_lost(results, fleet, worker):
    tasks = ask(fleet, 8)
    await turns()
    hear(fleet, worker, done(worker.runs[0], results))
    for number in range(1, 9):
        await turns()
        assert len(worker.runs) == number + 1
        assert len(worker.runs[-1].slots) == 1
        hear(fleet, worker, done(worker.runs[-1]))
    assert len(await asyncio.gather(*tasks)) == 8


async def test_a_deadline_that_passes_with_a_worker_is_answered_when_it_passes(fleet, worker):
    before = free_slots(fleet)
    [task] = ask(fleet, lasts_s=0.5)
    await turns()
    [run] = worker.runs
    with pytest.raises(ServiceError) as error:
        await asyncio.wait_for(task, 20)
    assert error.value.code == "DEADLINE_EXCEEDED"
    assert free_slots(fleet) == before - 1, "the worker still looks at it"
    hear(fleet, worker, done(run))
    assert free_slots(fleet) == before


async def test_the_image_that_takes_down_a_device_with_two_batches_fails_alone():
    """The device begins the second batch before it answers the first; an image of the second one is to blame."""
    workers = [Worker(f"null:0#{number}", depth=2) for number in range(3)]
    async with dispatching(workers[0]) as fleet:
        tasks = ask(fleet, 16)
        await turns()
        poison = workers[0].runs[1].slots[3]
        lost, answered = 0, set()
        while not all(task.done() for task in tasks):
            worker = workers[lost]
            begun = [run for run in worker.runs if run.batch_id not in answered]
            if any(poison in run.slots for run in begun):
                fleet.worker_gone(worker, "it died")
                lost += 1
                fleet.worker_ready(workers[lost])
            else:
                answered.add(begun[0].batch_id)
                hear(fleet, worker, done(begun[0]))
            await turns()
        failed = [task.exception() for task in tasks if task.exception()]
        assert [error.code for error in failed] == ["INFERENCE_FAILED"]
        assert lost == 2


async def test_what_a_lost_worker_had_not_begun_is_computed_together():
    workers = [Worker("null:0#1"), Worker("null:0#2")]
    async with dispatching(workers[0]) as fleet:
        tasks = ask(fleet, 16)
        await turns()
        assert [len(run.slots) for run in workers[0].runs] == [8, 8]
        fleet.worker_gone(workers[0], "it died")
        fleet.worker_ready(workers[1])
        answered = 0
        await turns()
        while answered < len(workers[1].runs):
            hear(fleet, workers[1], done(workers[1].runs[answered]))
            answered += 1
            await turns()
        assert [len(run.slots) for run in workers[1].runs] == [1] * 8 + [8]
        await asyncio.gather(*tasks)


async def test_a_batch_that_fails_is_tried_one_by_one_and_the_image_to_blame_fails_alone(fleet, worker):
    tasks = ask(fleet, 8)
    await turns()
    poison = worker.runs[0].slots[5]
    answered = 0
    while answered < len(worker.runs):
        run = worker.runs[answered]
        answered += 1
        answer = Failed(run.batch_id, "poison") if poison in run.slots else done(run)
        hear(fleet, worker, answer)
        await turns()
    assert [bool(task.exception()) for task in tasks].count(True) == 1
    assert answered == 9


async def test_terms_in_a_body_count_though_the_check_before_it_is_not_repeated(fleet):
    served, terms = fleet.models["m"], Terms(clock.monotonic() + 60)
    await fleet.link.check(served, terms)
    stated = replace(terms, deadline_s=terms.deadline_s - 30, priority=1)
    with fleet.link.reserve(served, 1, stated) as room:
        assert (room.priority, room.deadline_s, room.terms) == (1, stated.deadline_s, stated)


async def test_an_upload_that_outlives_an_unload_is_refused_and_does_not_wait_for_its_deadline(fleet, worker):
    served = fleet.models["m"]
    room = fleet.link.reserve(served, 2, Terms(clock.monotonic() + 60))
    served.unloaded = True
    # While workers still have the model, what was accepted is answered.
    task = submit(fleet, room, 0, is_last=False)
    await turns()
    hear(fleet, worker, done(worker.runs[0]))
    await task
    fleet.scheduler.retire_worker(worker.name)
    fleet.worker_ready(Worker("null:0#2", models=(None,)))
    with pytest.raises(ServiceError, match="unloaded") as refusal:
        await submit(fleet, room, 1)
    assert refusal.value.code == "NOT_READY"


async def test_between_a_workers_death_and_the_next_start_requests_wait(fleet, worker):
    assert fleet.readiness.state("m") is ModelState.READY
    fleet.worker_gone(worker, "it died")
    # The replica hears of it later: its status is still "ready".
    assert fleet.readiness.state("m") is ModelState.STARTING
    [task] = ask(fleet)
    following = Worker("null:0#2")
    fleet.worker_ready(following)
    await turns()
    hear(fleet, following, done(following.runs[0]))
    assert (await task).computed_by.weights == following.name


async def test_the_images_of_a_process_that_cannot_be_killed_go_on_in_other_slots():
    stuck, other = Worker(), Worker("null:0#2")
    async with dispatching(stuck) as fleet:
        before = free_slots(fleet)
        tasks = ask(fleet, 3)
        await turns()
        [run] = stuck.runs
        for slot in run.slots:
            fleet.arena.slot(0, slot)[:] = slot + 1
        stuck.process = Process(mortal=False)
        stuck.lose()
        fleet.worker_gone(stuck, stuck.reason)
        fleet.worker_ready(other)
        seen = set()
        for _ in range(3):
            await turns()
            [slot] = other.runs[-1].slots
            assert slot not in run.slots
            seen.add(int(fleet.arena.slot(0, slot)[0]) - 1)
            hear(fleet, other, done(other.runs[-1]))
        await asyncio.gather(*tasks)
        assert seen == set(run.slots)
        # It may still write to these, until it is gone.
        assert free_slots(fleet) == before - 3
        stuck.process.exit(0)
        await turns()
        assert free_slots(fleet) == before


class Host:
    """Decodes what no device could, when it is told to."""

    def __init__(self, error=None):
        self.asked, self.may_end, self.error = [], asyncio.Event(), error
        self.decoding = None

    def refill(self, link):
        async def decode(item):
            await self.may_end.wait()
            link._filled(item, self.error)

        def refill(item):
            self.asked.append(item.slot)
            self.decoding = asyncio.ensure_future(decode(item))

        return refill


def ask_with_files(fleet, host, images, files, **options):
    """As `ask`; the slots of the images at these positions hold files."""
    tasks = ask(fleet, images, **options)
    by_slot = {item.slot: item for item in fleet.link._under_way.values()}
    for position, slot in enumerate(sorted(fleet.models["m"].slots._taken)):
        if position in files:
            by_slot[slot].refill = host.refill(fleet.link)
    return tasks


def undone(run, undecoded):
    results = [None if row in undecoded else () for row in range(len(run.slots))]
    return done(run, results, undecoded=undecoded)


async def test_a_file_that_the_device_cannot_decode_goes_by_the_host_to_the_front_and_the_others_are_answered():
    worker, host = Worker(), Host()
    async with dispatching(worker) as fleet:
        tasks = ask_with_files(fleet, host, 8, set(range(8)))
        await turns()
        [run] = worker.runs
        hear(fleet, worker, undone(run, (3,)))
        await turns()
        assert host.asked == [run.slots[3]]
        assert sum(task.done() for task in tasks) == 7
        others = ask(fleet, 9)
        await turns()
        host.may_end.set()
        await turns()
        for number in range(1, 4):
            if len(worker.runs) > number:
                if run.slots[3] in worker.runs[number].slots:
                    assert worker.runs[number].slots[0] == run.slots[3], "what came later goes before it"
                    assert worker.runs[number].files == ()
                hear(fleet, worker, done(worker.runs[number]))
                await turns()
        await asyncio.gather(*tasks, *others)
        assert len(host.asked) == 1


@pytest.mark.parametrize("undecoded", [(0,), (-1,), (9,)])
async def test_a_worker_is_not_believed_that_it_was_asked_to_decode_pixels(undecoded, fleet, worker):
    [task] = ask(fleet)
    await turns()
    hear(fleet, worker, undone(worker.runs[0], undecoded))
    await task


async def test_files_of_a_batch_that_ended_its_worker_are_decoded_on_the_host_and_run_alone():
    workers, host = [Worker("null:0#1"), Worker("null:0#2")], Host()
    host.may_end.set()
    async with dispatching(workers[0]) as fleet:
        tasks = ask_with_files(fleet, host, 3, {0, 1, 2})
        await turns()
        fleet.worker_gone(workers[0], "it died")
        await turns()
        assert len(host.asked) == 3
        fleet.worker_ready(workers[1])
        for number in range(3):
            await turns()
            assert [len(run.slots) for run in workers[1].runs] == [1] * (number + 1)
            assert workers[1].runs[-1].files == ()
            hear(fleet, workers[1], done(workers[1].runs[-1]))
        await asyncio.gather(*tasks)
