"""The dispatcher between its queue and its workers, which are objects here: no process is started."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from app.errors import ServiceError
from app.fleet import device_files
from app.link import ModelState, ReturnedBytes, Terms
from app.worker.messages import Failed, Release, Released
from tests.support.doubles import Process, Worker, ask, dispatching, done, free_slots, hear, submit, turns


async def test_what_comes_in_one_turn_of_the_loop_goes_in_one_batch():
    worker = Worker()
    async with dispatching(worker) as fleet:
        tasks = ask(fleet, 8)
        await turns()
        [run] = worker.runs
        assert len(run.slots) == 8
        hear(fleet, worker, done(run))
        await asyncio.gather(*tasks)


@pytest.mark.parametrize("results", [(), ((),) * 7, ((),) * 9])
async def test_a_batch_whose_results_do_not_fit_is_tried_again_and_no_slot_is_lost(results):
    worker = Worker()
    async with dispatching(worker) as fleet:
        before = free_slots(fleet)
        tasks = ask(fleet, 8)
        await turns()
        hear(fleet, worker, done(worker.runs[0], results))
        for number in range(1, 9):
            await turns()
            assert len(worker.runs) == number + 1
            assert len(worker.runs[-1].slots) == 1
            hear(fleet, worker, done(worker.runs[-1]))
        assert len(await asyncio.gather(*tasks)) == 8
        assert free_slots(fleet) == before


async def test_a_deadline_that_passes_with_a_worker_is_answered_when_it_passes():
    worker = Worker()
    async with dispatching(worker) as fleet:
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


async def test_what_cannot_be_recorded_costs_no_answer(monkeypatch):
    worker = Worker()
    async with dispatching(worker) as fleet:
        before = free_slots(fleet)

        def fail(*_):
            raise RuntimeError("the disk of the statistics is full")

        monkeypatch.setattr(fleet.models["m"], "statistics", SimpleNamespace(batch=fail))
        [task] = ask(fleet)
        await turns()
        hear(fleet, worker, done(worker.runs[0]))
        assert (await task).computed_by.weights == worker.name
        assert free_slots(fleet) == before


async def test_the_image_that_takes_down_a_device_with_two_batches_fails_alone():
    """The device begins the second batch before it answers the first; an image of the second one is to blame."""
    workers = [Worker(f"null:0#{number}", depth=2) for number in range(3)]
    async with dispatching(workers[0]) as fleet:
        before = free_slots(fleet)
        tasks = ask(fleet, 16)
        await turns()
        poison = workers[0].runs[1].slots[3]
        lost, answered = 0, set()
        while not all(task.done() for task in tasks):
            worker = workers[lost]
            begun = [run for run in worker.runs if run.batch_id not in answered]
            if any(poison in run.slots for run in begun):
                fleet._worker_gone(worker, "it died")
                lost += 1
                fleet._worker_ready(workers[lost])
            else:
                answered.add(begun[0].batch_id)
                hear(fleet, worker, done(begun[0]))
            await turns()
        failed = [task.exception() for task in tasks if task.exception()]
        assert [error.code for error in failed] == ["INFERENCE_FAILED"]
        assert lost == 2
        assert free_slots(fleet) == before


async def test_what_a_lost_worker_had_not_begun_is_computed_together():
    workers = [Worker("null:0#1"), Worker("null:0#2")]
    async with dispatching(workers[0]) as fleet:
        tasks = ask(fleet, 16)
        await turns()
        assert [len(run.slots) for run in workers[0].runs] == [8, 8]
        fleet._worker_gone(workers[0], "it died")
        fleet._worker_ready(workers[1])
        answered = 0
        await turns()
        while answered < len(workers[1].runs):
            hear(fleet, workers[1], done(workers[1].runs[answered]))
            answered += 1
            await turns()
        assert [len(run.slots) for run in workers[1].runs] == [1] * 8 + [8]
        await asyncio.gather(*tasks)


@pytest.mark.parametrize("end", ["the worker dies", "the batch fails", "the batch is done"])
async def test_the_slots_of_clients_that_left_are_free_in_the_end(end):
    worker = Worker()
    async with dispatching(worker) as fleet:
        before = free_slots(fleet)
        tasks = ask(fleet, 8)
        await turns()
        for task in tasks:
            task.cancel()
        await turns()
        assert free_slots(fleet) == before - 8, "the device may still look at them"
        if end == "the worker dies":
            fleet._worker_gone(worker, "it died")
        elif end == "the batch fails":
            hear(fleet, worker, Failed(worker.runs[0].batch_id, "it failed"))
        else:
            hear(fleet, worker, done(worker.runs[0]))
        assert free_slots(fleet) == before


async def test_a_batch_that_fails_is_tried_one_by_one_and_the_image_to_blame_fails_alone():
    worker = Worker()
    async with dispatching(worker) as fleet:
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


async def test_an_upload_that_outlives_an_unload_is_refused_and_does_not_wait_for_its_deadline():
    worker = Worker()
    async with dispatching(worker) as fleet:
        served = fleet.models["m"]
        before = free_slots(fleet)
        room = fleet.link.reserve(served, 2, Terms(time.monotonic() + 60))
        served.unloaded = True
        # While workers still have the model, what was accepted is answered.
        task = submit(fleet, room, 0, is_last=False)
        await turns()
        hear(fleet, worker, done(worker.runs[0]))
        await task
        fleet.scheduler.retire_worker(worker.name)
        fleet._worker_ready(Worker("null:0#2", models=(None,)))
        with pytest.raises(ServiceError, match="unloaded") as refusal:
            await submit(fleet, room, 1)
        assert refusal.value.code == "NOT_READY"
        assert free_slots(fleet) == before


async def test_between_a_workers_death_and_the_next_start_requests_wait():
    worker = Worker()
    async with dispatching(worker) as fleet:
        assert fleet.readiness.state("m") is ModelState.READY
        fleet._worker_gone(worker, "it died")
        # The replica hears of it later: its status is still "ready".
        assert fleet.readiness.state("m") is ModelState.STARTING
        [task] = ask(fleet)
        following = Worker("null:0#2")
        fleet._worker_ready(following)
        await turns()
        hear(fleet, following, done(following.runs[0]))
        assert (await task).computed_by.weights == following.name


@pytest.mark.parametrize(
    ("replicas", "unloaded", "state"),
    [
        (("starting",), False, ModelState.STARTING),
        (("restarting", "broken"), False, ModelState.STARTING),
        (("broken", "broken"), False, ModelState.UNAVAILABLE),
        (("stopped",), False, ModelState.UNAVAILABLE),
        (("ready",), True, ModelState.UNLOADED),
    ],
)
async def test_the_state_of_a_model_follows_from_replicas_and_unloading(replicas, unloaded, state):
    async with dispatching(replicas=replicas) as fleet:
        fleet.models["m"].unloaded = unloaded
        assert fleet.readiness.state("m") is state
        assert fleet.readiness.reason("m")
        if not state.accepts_requests:
            with pytest.raises(ServiceError):
                fleet.readiness.refuse_unless_served("m")


async def test_many_callers_share_one_release():
    worker = Worker()
    async with dispatching(worker) as fleet:
        tasks = [asyncio.create_task(fleet.release()) for _ in range(1000)]
        await turns()
        assert len([message for message in worker.sent if isinstance(message, Release)]) == 1
        tasks.pop().cancel()
        await turns()
        hear(fleet, worker, Released("request", {2: 7}, {2: 5}))
        assert await asyncio.gather(*tasks) == [{worker.name: ReturnedBytes({2: 7}, {2: 5})}] * 999


async def test_a_release_ends_with_its_worker():
    worker = Worker()
    async with dispatching(worker) as fleet:
        task = asyncio.create_task(fleet.release("null:0"))
        await turns()
        fleet._worker_gone(worker, "it died")
        assert await task == {worker.name: ReturnedBytes({}, {})}


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
        fleet._worker_gone(stuck, stuck.reason)
        fleet._worker_ready(other)
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
        before = free_slots(fleet)
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
        assert free_slots(fleet) == before


@pytest.mark.parametrize("undecoded", [(0,), (-1,), (9,)])
async def test_a_worker_is_not_believed_that_it_was_asked_to_decode_pixels(undecoded):
    worker = Worker()
    async with dispatching(worker) as fleet:
        before = free_slots(fleet)
        [task] = ask(fleet)
        await turns()
        hear(fleet, worker, undone(worker.runs[0], undecoded))
        await task
        assert free_slots(fleet) == before


async def test_files_of_a_batch_that_ended_its_worker_are_decoded_on_the_host_and_run_alone():
    workers, host = [Worker("null:0#1"), Worker("null:0#2")], Host()
    host.may_end.set()
    async with dispatching(workers[0]) as fleet:
        before = free_slots(fleet)
        tasks = ask_with_files(fleet, host, 3, {0, 1, 2})
        await turns()
        fleet._worker_gone(workers[0], "it died")
        await turns()
        assert len(host.asked) == 3
        fleet._worker_ready(workers[1])
        for number in range(3):
            await turns()
            assert [len(run.slots) for run in workers[1].runs] == [1] * (number + 1)
            assert workers[1].runs[-1].files == ()
            hear(fleet, workers[1], done(workers[1].runs[-1]))
        await asyncio.gather(*tasks)
        assert free_slots(fleet) == before


async def test_files_pass_only_where_every_worker_decodes_them():
    by_host, by_device = Worker("null:0#1"), Worker("null:0#2", decodes=True)
    async with dispatching(by_device) as fleet:
        served = fleet.models["m"]
        assert served.passes_files
        fleet._worker_ready(by_host)
        assert not served.passes_files
        fleet._worker_gone(by_host, "it died")
        assert served.passes_files
        fleet._worker_gone(by_device, "it died")
        assert not served.passes_files


async def of_device(fleet, worker, undecoded=()):
    """Send a batch of eight files, of which the device cannot decode those in `undecoded`."""
    tasks = ask_with_files(fleet, FILLED, 8, range(8))
    await turns()
    hear(fleet, worker, undone(worker.runs[-1], tuple(undecoded)))
    while not all(task.done() for task in tasks):
        await turns()
        if worker.runs[-1].files == () and fleet.scheduler.queues["m"].in_flight:
            hear(fleet, worker, done(worker.runs[-1]))
    await asyncio.gather(*tasks)


FILLED = Host()
FILLED.may_end.set()
BATCHES_IN_A_ROW = device_files.REFUSED_IN_A_ROW // 8


async def test_files_do_not_pass_for_a_while_after_a_row_that_the_device_cannot_decode(caplog, monkeypatch):
    loop, later, waits_s = asyncio.get_running_loop(), asyncio.get_running_loop().call_later, []

    def noted(delay_s, *given, **named):
        waits_s.append(delay_s)
        return later(delay_s, *given, **named)

    monkeypatch.setattr(loop, "call_later", noted)
    worker = Worker(decodes=True)
    async with dispatching(worker) as fleet:
        served = fleet.models["m"]
        for _ in range(BATCHES_IN_A_ROW - 1):
            await of_device(fleet, worker, range(8))
        await of_device(fleet, worker, range(7))  # One of them was decoded: strange files, a decoder that works.
        for _ in range(BATCHES_IN_A_ROW - 1):
            await of_device(fleet, worker, range(8))
        assert served.passes_files
        await of_device(fleet, worker, range(8))
        assert not served.passes_files
        assert "could decode none of the last 64 files for m" in caplog.text
        pause = fleet.dispatcher.files._pauses[served]
        assert not pause.cancelled()
        assert device_files.PAUSE_S in waits_s
        fleet.dispatcher.files._end_pause(served)
        assert served.passes_files
        await of_device(fleet, worker, range(8))  # The row begins anew.
        assert served.passes_files
        pause.cancel()


async def test_a_new_worker_ends_the_pause_of_files():
    worker = Worker(decodes=True)
    async with dispatching(worker) as fleet:
        for _ in range(BATCHES_IN_A_ROW):
            await of_device(fleet, worker, range(8))
        assert not fleet.models["m"].passes_files
        [pause] = fleet.dispatcher.files._pauses.values()
        fleet._worker_ready(Worker("null:0#2", decodes=True))
        assert fleet.models["m"].passes_files
        assert pause.cancelled()
