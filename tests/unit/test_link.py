"""The link to an ingress in another process, both ends of it in this one: who hears what, and what ends with a request.

The owner's end is `Ingresses` with the fleet's double behind it, the ingress's `RemoteLink`; between them is the socket
that there is between processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from app import clock
from app.decoding.waiting import DecodeFailedError
from app.errors import ServiceError
from app.ingress.ingress import Replies
from app.ingress.remote import RemoteLink
from app.link import Frame, Regions, ServedModel, Terms
from app.link_messages import (
    ArrayAt,
    Ask,
    Cancel,
    Closed,
    CounterDeltas,
    EncodedAt,
    End,
    FrameAt,
    Here,
    IngressBegin,
    IngressReady,
    ItemFailed,
    Leave,
    NewConnection,
    NewModels,
    Reserve,
    Serves,
    Submit,
    ToIngress,
    Tunnelled,
)
from app.observability.counter_deltas import Counted, counter_deltas
from app.observability.metrics import Metrics, ModelMetrics
from app.observability.triton_statistics import STAGES, Duration, ModelStatistics
from app.processes.arena import ROOM, Blocks
from app.processes.channel import Channel, Talk, socket_pair
from app.processes.packing import read_packed
from app.processes.place import PlaceStatus, SupervisedChild
from app.serving import ingresses as ingresses_module
from app.serving.ingresses import Ingresses
from app.serving.submissions import Submissions
from models import Options
from models.contract.cascade import Region
from tests.support.doubles import (
    IMAGE,
    MODEL,
    Decoders,
    Process,
    SmallModel,
    Worker,
    counting,
    dispatching,
    done,
    free_slots,
    hear,
    tables_of,
    turns,
)
from tests.support.load import until

TWO = (MODEL, SmallModel("other"))
FAR = 10.0**9
"""A deadline."""


class Kept(Blocks):
    def __init__(self):
        super().__init__(ROOM << 16)
        self.used = []

    def write(self, data):
        self.used.append(start := super().write(data))
        return start

    def give(self, start, size):
        super().give(start, size)
        self.used.remove(start)


class Ingress:
    """The other end. `heard` is what the owner has said, `replies` what became of tokens."""

    def __init__(self, end):
        self.heard, self.replies, self.counted = [], [], []
        self._packets, self._channel = [], Channel(end)
        self.talk = self.link = None

    async def begin(self):
        """Until the owner's models are here; it says then that it is ready."""
        self._channel.send(msgspec.msgpack.encode([Here()]))
        while not self._packets:  # What is served.
            with contextlib.suppress(BlockingIOError):
                self._packets += self._channel.receive()
            await asyncio.sleep(0)
        [begin] = msgspec.msgpack.decode(self._packets[0], type=list[ToIngress])
        models = read_packed(self._channel.take_descriptor())
        self.metrics = Metrics()
        self.forms = [
            ServedModel(index, model, ModelMetrics(self.metrics, model.name), ModelStatistics())
            for index, model in enumerate(models)
        ]
        self.talk = Talk(self._channel, ToIngress, self._hear)
        self.blocks = Kept()
        tables = SimpleNamespace(
            settings=begin.settings,
            metrics=self.metrics,
            tracing=None,
            models={form.model.name: form for form in self.forms},
            cascades={},
            simulated=False,
            administration=None,
            traffic={},
        )
        self.link = RemoteLink(tables, self.forms, self.talk, self.blocks)
        self.link.connect(lambda token, reply: self.replies.append((token, reply)))
        self.talk.say(IngressReady(1000), descriptor=os.dup(self.blocks.descriptor))

    def close(self):
        if self.talk is None:
            self._channel.close()
        else:
            self.talk.end("the test is over")

    def _hear(self, message):
        self.heard.append(message)
        self.link.received(message)

    def reserve(self, count=1, lasts_s=60.0, model=0, **terms):
        return self.link.reserve(self.forms[model], count, Terms(clock.monotonic() + lasts_s, **terms))

    def submit(self, room, tokens=(0,), content=IMAGE, options=None, position=0):
        self.link.submit(room, tokens, content, options or Options(), position)

    def told(self, *kinds):
        """Return what the owner has said of these kinds, and forget all that it has said."""
        told = [each for each in self.heard if isinstance(each, kinds)]
        self.heard.clear()
        return told


@contextlib.asynccontextmanager
async def linked(*workers, decoders=None, models=(MODEL,), ingresses=1, clean=True):
    """Connect an owner to ready ingresses; yield its fleet with `ingresses`, and the first one's end as `ingress`."""
    async with dispatching(*workers, models=models, decoders=decoders) as fleet:
        ends, made = [], []

        async def spawn(begin, *, forks):
            ours, theirs = socket_pair()
            ends.append(Ingress(theirs))
            return Process(), Channel(ours)

        def link():
            made.append(Submissions(tables_of(fleet), fleet, decoders, reads_pixels=decoders is not None))
            return made[-1]

        fleet.tunnelled = []
        fleet.administration = SimpleNamespace(draining=False, traffic={})
        settings = {"log_level": "info", "log_format": "text", "trace_endpoint": ""}
        owner = Ingresses(
            ingresses,
            link,
            fleet,
            administration=fleet.administration,
            metrics=fleet._metrics,
            begin=IngressBegin(settings, {}, len(models), (-1,) * len(models), False, 0.5),
            tunnel=lambda *tunnelled: fleet.tunnelled.append(tunnelled),
        )
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(ingresses_module, "spawn", spawn)
            # Neither looks nor tells by itself: tests do.
            patched.setattr(SupervisedChild, "look_s", 3600)
            patched.setattr(ingresses_module, "_TICK_S", 3600)
            starting = asyncio.create_task(owner.start())
            await until(lambda: len(ends) == ingresses, blocks=False)
            for each in ends:
                await each.begin()
            await starting
            fleet.ingresses, fleet.ends, fleet.ingress, fleet.links = owner, ends, ends[0], made
            fleet.far = owner._places[0].child
            try:
                yield fleet
                await turns()
                assert not any(each._under_way for each in made)
                if clean:
                    assert [each.talk.ended.done() for each in ends] == [False] * len(ends)
                    assert fleet.ingress.blocks.used == []
                    assert (fleet.far._rooms, fleet.far._tokens) == ({}, {})
            finally:
                await owner.stop(hurry=True)
                for each in ends:
                    each.close()


async def computed(fleet, worker, results=None):
    await turns()
    for run in worker.runs:
        hear(fleet, worker, done(run, results))
    worker.sent.clear()
    await turns()


@pytest.mark.parametrize("size", [3, 20_000])
async def test_what_a_worker_computes_arrives_as_it_was_by_the_model_that_computed_it(size):
    """A large result comes in memory of its own."""
    worker = Worker()
    async with linked(worker) as fleet:
        with fleet.ingress.reserve() as room:
            fleet.ingress.submit(room)
            arrays = np.arange(size, dtype=np.float32), np.zeros((0, 4)), np.int64([[7]])
            await computed(fleet, worker, [arrays])
        [(token, result)] = fleet.ingress.replies
        assert token == 0
        for given, found in zip(arrays, result.arrays, strict=True):
            np.testing.assert_array_equal(given, found)
            assert given.dtype == found.dtype
        assert result.model.weights == result.computed_by.weights == worker.name
        assert result.computed_by == (worker.name, "null:0", "null", "fp32")
        assert (result.placement.width, result.placement.height) == (2, 2)
        assert result.infer_s == 0.001
        assert result.begun_s <= result.queued_s


async def test_a_request_that_was_cancelled_is_answered_at_once_and_once_and_leaves_the_owners_queue():
    async with linked() as fleet:
        before = free_slots(fleet)
        room = fleet.ingress.reserve()
        fleet.ingress.submit(room)
        await turns()
        assert fleet.scheduler.queues["m"].depth == 1
        moved = counting(fleet._metrics)
        fleet.ingress.link.cancel(0)
        assert [(token, reply.code) for token, reply in fleet.ingress.replies] == [(0, "INTERNAL")]
        fleet.ingress.link.cancel(0)
        room.__exit__()
        assert len(fleet.ingress.blocks.used) == 1, "the owner may still read it"
        await turns()
        assert len(fleet.ingress.replies) == 1
        assert fleet.scheduler.queues["m"].depth == 0
        assert free_slots(fleet) == before
        assert moved() == {}, "nobody has left"


@pytest.mark.parametrize(("left", "counts"), [(True, {"cancelled m queue": 1}), (False, {})])
async def test_the_owner_hears_whether_the_client_has_left(left, counts):
    async with linked() as fleet:
        moved = counting(fleet._metrics)
        with fleet.ingress.reserve() as room:
            fleet.ingress.submit(room)
            await turns()
            room.terms.recorder.abandoned = left
            fleet.ingress.link.cancel(0)
        await turns()
        assert moved() == counts


async def test_a_cancel_that_crosses_the_answer_is_answered_once():
    worker = Worker()
    async with linked(worker) as fleet:
        with fleet.ingress.reserve() as room:
            fleet.ingress.submit(room)
            await turns()
            hear(fleet, worker, done(worker.runs[0]))
            fleet.ingress.link.cancel(0)
            await turns()
        await turns()
        assert [(token, reply.code) for token, reply in fleet.ingress.replies] == [(0, "INTERNAL")]


async def test_memory_is_the_ingresss_again_when_the_request_has_left_and_every_token_has_its_reply():
    """Not before: until then the owner may read it."""
    decoders, worker = Decoders(), Worker()
    async with linked(worker, decoders=decoders) as fleet:
        room = fleet.ingress.reserve(2)
        for number in range(2):
            fleet.ingress.submit(room, (number,), bytes([number]) * 9, position=number)
        await turns()
        assert [bytes(image.body) for image in decoders.given] == [b"\0" * 9, b"\1" * 9]
        decoders.end(DecodeFailedError("it cannot be"))
        await turns()
        assert len(fleet.ingress.replies) == 2
        assert len(fleet.ingress.blocks.used) == 2, "others of the request may come"
        room.__exit__()
        assert fleet.ingress.blocks.used == []
        await turns()


async def test_where_memory_is_used_up_each_token_hears_that_it_may_try_again():
    async with linked() as fleet:
        moved = counting(fleet.ingress.metrics)
        with fleet.ingress.reserve(3) as room:
            parts = [Region(0, 0, 1, 1)] * 3
            fleet.ingress.submit(room, (0, 1, 2), Regions(bytes(ROOM << 16), parts))
        assert [(token, reply.code, reply.retry_after_s) for token, reply in fleet.ingress.replies] == [
            (token, "QUEUE_FULL", 1) for token in range(3)
        ]
        assert moved() == {"rejected m buffer_full": 1}


@pytest.mark.parametrize("asks", [True, False], ids=["a check", "an image"])
@pytest.mark.parametrize("why", ["full", "draining", "not served", "deadline"])
async def test_a_refusal_of_the_owner_arrives_with_its_code_and_is_counted_there(asks, why):
    slow = {1: 3000.0, 8: 3000.0}
    workers = {"not served": [], "deadline": [Worker(latency_s=slow)]}.get(why, [Worker()])
    async with linked(*workers) as fleet:
        if why == "draining":
            fleet.links[0].refusing = True
        if why == "not served":
            fleet.replicas[0].status = PlaceStatus.BROKEN
        held = fleet.link.reserve(fleet.models["m"], 32, Terms(FAR)) if why == "full" else None
        moved = counting(fleet._metrics)
        lasts_s, count = 2000.0 if why == "deadline" else 60.0, 1 if asks else 2
        if asks:
            with pytest.raises(ServiceError) as refused:
                await fleet.ingress.link.check(fleet.ingress.forms[0], Terms(clock.monotonic() + lasts_s))
            code = refused.value.code
        else:
            with fleet.ingress.reserve(count, lasts_s) as room:
                for number in range(count):
                    fleet.ingress.submit(room, (number,), position=number)
                await turns()
            codes = [reply.code for _, reply in fleet.ingress.replies]
            assert codes == codes[:1] * count
            code = codes[0]
        expected = {
            "full": ("QUEUE_FULL", {"rejected m queue_full": count}),
            "draining": ("DRAINING", {}),
            "not served": ("NOT_READY", {"rejected m not_ready": 1}),
            "deadline": ("DEADLINE_UNREACHABLE", {"rejected m deadline": count}),
        }
        assert (code, moved()) == expected[why]
        if held is not None:
            held.__exit__()


async def test_an_upload_that_came_too_late_is_counted_by_its_images_and_the_owner_does_not_hear_of_it():
    async with linked() as fleet:
        moved = counting(fleet.ingress.metrics)
        with pytest.raises(ServiceError) as late:
            fleet.ingress.reserve(3, lasts_s=-0.001)
        assert late.value.code == "DEADLINE_EXCEEDED"
        assert moved() == {"expired m upload": 3}
        await turns()
        assert fleet.scheduler.queues["m"].reserved == 0


async def test_what_an_ingress_has_counted_is_told_soon_and_added_once(monkeypatch):
    monkeypatch.setattr("app.ingress.remote._SENT_EVERY_S", 0.0)
    worker = Worker()
    async with linked(worker) as fleet:
        ingress = fleet.ingress
        statistics = {form.model.name: form.statistics for form in ingress.forms}

        def tell():
            ingress.counted.append(1)
            ingress.talk.say(CounterDeltas(counter_deltas(ingress.metrics, statistics)))

        ingress.link.on_counted = tell
        moved = counting(fleet._metrics)
        for round_ in (1, 2):
            for code in ("OK", "OK", "DRAINING"):
                ingress.link.count(ingress.forms[0], code, 0.01, Terms(0).recorder)
            await until(lambda round_=round_: len(ingress.counted) >= round_, blocks=False)
            await turns()
            assert len(ingress.counted) == round_, "once for all that ends within a moment"
            assert moved() == {
                "requests m OK": 2 * round_,
                "requests m DRAINING": round_,
                "request_seconds m": 2 * round_,
            }


async def test_after_a_load_new_requests_are_of_the_new_model_and_results_of_the_one_before_still_arrive():
    worker = Worker(models=TWO)
    async with linked(worker, models=TWO) as fleet:
        ingress = fleet.ingress
        with ingress.reserve() as room:
            ingress.submit(room)
            await turns()
            fleet.models["m"].model = SmallModel(weights="loaded anew")
            fleet.far.tell(())
            fleet.far.tell(())
            await turns()
            assert ingress.told(Serves, NewModels) == [NewModels({0: 2}), Serves({0: 2})]
            assert [form.model.weights for form in ingress.forms] == ["loaded anew", "random"]
            await computed(fleet, worker)
        [(_, result)] = ingress.replies
        assert result.model.weights == worker.name
        assert ingress.forms[0].model.weights == "loaded anew"
        # Of any number of loads, only the last ones are kept.
        for number in range(5):
            fleet.models["other"].model = SmallModel("other", weights=str(number))
            fleet.far.tell(())
            await turns()
            assert ingress.forms[1].model.weights == str(number)
        assert len(ingress.link._models) == len(fleet.far._objects) == 4
        assert len(fleet.far._numbers) == 4


async def test_a_connection_ends_with_its_ingress():
    async with linked(clean=False) as fleet:
        lost, (ours, theirs) = [], socket.socketpair()
        fleet.ingresses.take(ours, lambda: lost.append(1))
        await turns()
        os.close(fleet.ingress.talk.take_descriptor())
        fleet.far.kill("it was killed")
        assert lost == [1]
        assert not fleet.far.connections
        theirs.close()


async def test_a_connection_is_for_the_ingress_with_the_fewest_and_is_given_back_once():
    async with linked(ingresses=2) as fleet:
        lost, others = [], []
        for number in range(5):
            ours, theirs = socket.socketpair()
            others.append(theirs)
            assert fleet.ingresses.take(ours, lambda number=number: lost.append(number))
        assert sorted(len(far.connections) for far in fleet.ingresses._ready) == [2, 3]
        await turns()
        [first, *_] = fleet.ends[0].told(NewConnection)
        fleet.ends[0].talk.say(Closed(first.connection))
        await turns()
        assert lost == [first.connection - 1]
        fleet.ingresses.end()
        fleet.ingresses.end()
        ours, theirs = socket.socketpair()
        assert not fleet.ingresses.take(ours, lambda: None), "new connections are the owner's"
        for each in (ours, theirs, *others):
            each.close()
        await turns()
        assert [len(each.told(End)) for each in fleet.ends] == [1, 1]


async def test_an_ingress_that_does_not_answer_gets_no_new_connections():
    async with linked(ingresses=2) as fleet:
        silent, other = fleet.ingresses._ready
        other.received_s = clock.monotonic()
        silent.received_s = other.received_s - 2 * silent.look_s - 1
        theirs = []
        for _ in range(3):
            ours, end = socket.socketpair()
            theirs.append(end)
            assert fleet.ingresses.take(ours, lambda: None)
        assert (len(silent.connections), len(other.connections)) == (0, 3)
        for each in theirs:
            each.close()


async def test_a_connection_that_is_carried_has_the_address_that_the_owner_saw_and_counts_until_both_ends_are_over():
    async with linked() as fleet:
        lost = []
        with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection(listening.getsockname()):
            accepted, _ = listening.accept()
            fleet.ingresses.take(accepted, lambda: lost.append(1))
            await turns()
            [new] = fleet.ingress.told(NewConnection)
            with socket.socket(fileno=fleet.ingress.talk.take_descriptor()):
                ours, theirs = socket.socketpair()
                fleet.ingress.talk.say(Tunnelled(new.connection, False), descriptor=theirs.detach())
                await turns()
        ours.close()
        [(end, address, encrypted, ended)] = fleet.tunnelled
        assert (address, encrypted) == ("127.0.0.1", False)
        fleet.ingress.talk.say(Closed(new.connection))
        await turns()
        assert lost == []
        end.close()
        ended()
        assert lost == [1]


async def test_who_says_too_much_is_ended_and_who_says_as_much_as_it_may_is_not(monkeypatch, virtual_time):
    monkeypatch.setattr(ingresses_module, "_BYTES_PER_S", 2560)
    async with linked(clean=False) as fleet:
        for _ in range(10):
            for _ in range(10):
                fleet.ingress.talk.say(Here())
            await asyncio.sleep(1)
        assert not fleet.far.talk.ended.done()
        for _ in range(21):
            fleet.ingress.talk.say(Here())
        await turns()
        assert "more than 2560 bytes a second" in fleet.far.talk.ended.result()


async def test_what_an_ingress_had_ends_with_it_and_another_one_is_begun():
    decoders, worker = Decoders(), Worker()
    async with linked(worker, decoders=decoders, clean=False) as fleet:
        before, lost, moved = free_slots(fleet), [], counting(fleet._metrics)
        ours, theirs = socket.socketpair()
        fleet.ingresses.take(ours, lambda: lost.append(1))
        ingress = fleet.ingress
        ingress.submit(ingress.reserve(3), content=b"image")  # One is decoded; of two nothing has come.
        ingress.reserve(4)
        await turns()
        assert fleet.models["m"].images_under_way == 7
        [image] = decoders.given
        far, submissions = fleet.far, fleet.links[0]
        ingress.talk.end("it died")
        await turns()
        assert fleet.models["m"].images_under_way == fleet.scheduler.queues["m"].reserved == 0
        assert decoders.dropped == [image]
        assert lost == [1]
        assert not submissions._under_way
        assert free_slots(fleet) == before - 1, "a decoder may still write to it"
        decoders.end(DecodeFailedError("it is not wanted any more"))
        assert free_slots(fleet) == before
        assert moved() == {"ingress_restarts": 1}, "nobody knows whether a client has left"
        assert far.process.killed
        await until(lambda: len(fleet.ends) == 2, blocks=False)
        await fleet.ends[1].begin()
        await turns()
        assert len(fleet.ingresses._ready) == 1
        assert far not in fleet.ingresses._ready
        theirs.close()


WHOLE = EncodedAt(0, 4)
PARTS = EncodedAt(0, 4, (Region(0, 0, 1, 1),) * 2)
PIXELS = FrameAt(ArrayAt("|u1", (9,), 0, 4), 2, 2, True)


def reserve(room=1, model=0, count=1, deadline_s=FAR):
    return Reserve(room, model, count, deadline_s, 0, "", "")


SECONDS = [0] * len(Metrics().request_seconds.labels("m").counts)


def counted(*counters, series=(), statistics=None, clients=None):
    of_models = {"m": ModelStatistics(**statistics)} if statistics else {}
    return CounterDeltas(msgspec.msgpack.encode(Counted(list(counters), list(series), of_models, clients or {})))


LIES = {
    "a model before the first": [reserve(model=-1)],
    "a model behind the last": [reserve(model=1)],
    "a model before the first, asked": [Ask(1, -1, FAR, 0, "")],
    "no deadline, asked": [Ask(1, 0, math.nan, 0, "")],
    "no images": [reserve(count=0)],
    "a room twice": [reserve(), reserve()],
    "no deadline": [reserve(deadline_s=math.nan)],
    "a room that is not there": [Submit(9, (1,), 0, WHOLE, Options())],
    "a room that was left": [reserve(), Leave(1), Submit(1, (1,), 0, WHOLE, Options())],
    "more than there is room for": [reserve(), *[Submit(1, (each,), 0, WHOLE, Options()) for each in (1, 2)]],
    "a token twice": [reserve(count=2), *[Submit(1, (1,), each, WHOLE, Options()) for each in (0, 1)]],
    "a token twice at once": [reserve(count=2), Submit(1, (1, 1), 0, PARTS, Options())],
    "a position before the first": [reserve(), Submit(1, (1,), -1, WHOLE, Options())],
    "no options": [reserve(), Submit(1, (1,), 0, WHOLE)],
    "two tokens for an image": [reserve(count=2), Submit(1, (1, 2), 0, WHOLE, Options())],
    "a token for two parts": [reserve(count=2), Submit(1, (1,), 0, PARTS, Options())],
    "no token": [reserve(), Submit(1, (), 0, WHOLE, Options())],
    "memory that is not there": [reserve(), Submit(1, (1,), 0, EncodedAt(ROOM << 16, 1), Options())],
    "pixels of another shape": [reserve(), Submit(1, (1,), 0, PIXELS, Options())],
    "leaving what it has not": [Leave(1)],
    "cancelling what it has not": [Cancel(1, 1, True)],
    "the end of what it has not": [Closed(1)],
    "counts that are none": [CounterDeltas(b"junk")],
    "a model that nobody serves": [counted(("requests", ("other", "OK"), 1.0))],
    "a code that there is not": [counted(("requests", ("m", "0" * 10_000), 1.0))],
    "labels of a device": [counted(("out_of_memory", ("m", "null:0"), 1.0))],
    "fewer labels": [counted(("requests", ("m",), 1.0))],
    "a count that is no number": [counted(("requests", ("m", "OK"), math.nan))],
    "a client with a long name": [counted(clients={"x" * 10_000: (1, 0)})],
    "fewer requests of a client than none": [counted(clients={"x": (-1, 0)})],
    "fewer than none in a bucket": [counted(series=[("request_seconds", ("m",), [-1, *SECONDS[1:]], 1.0, {})])],
    "seconds that are no number": [counted(statistics={"success": Duration(1, math.nan)})],
    "fewer seconds than none": [counted(statistics={"success": Duration(1, -0.1)})],
    "seconds of a stage that are no number": [counted(statistics={"stages": dict.fromkeys(STAGES, math.nan)})],
    "fewer images than none, counted": [counted(statistics={"images": -1})],
    "exemplars that are no traces": [
        counted(series=[("request_seconds", ("m",), SECONDS, 1.0, {0: ({"x": "y"}, 1.0)})])
    ],
    "a long name of a client": [Reserve(1, 0, 1, FAR, 0, "x" * 1000, "")],
    "a long name of a request": [Reserve(1, 0, 1, FAR, 0, "", "x" * 1000)],
    "a long name, asked": [Ask(1, 0, FAR, 0, "x" * 1000)],
    "a bucket that is not there": [counted(series=[("request_seconds", ("m",), SECONDS, 1.0, {99: ({}, 1.0)})])],
    "a connection of somebody else": [Tunnelled(9, False)],
    "to be ready twice": [IngressReady(1000)],
}


@pytest.mark.parametrize("lie", LIES)
async def test_who_names_what_it_does_not_have_is_ended_and_costs_nobody_anything(lie, caplog):
    async with linked(Worker(), decoders=Decoders(), clean=False) as fleet:
        for message in LIES[lie]:
            fleet.ingress.talk.say(message)
        await turns()
        assert fleet.far.talk.ended.done()
        assert "cannot be read" in fleet.far.talk.ended.result()
        fleet.link._filling._decoders.end(DecodeFailedError("it is not wanted any more"))
        assert fleet.models["m"].images_under_way == fleet.scheduler.queues["m"].reserved == 0
        assert not any(each._under_way for each in fleet.links)


async def test_a_request_of_an_ingress_is_answered_as_one_of_the_owners_own():
    """The same steps through both: the same replies, and the owner counts the same."""

    async def steps(fleet, worker, link, forms):
        moved = counting(fleet._metrics)
        replies = Replies(link)
        heard = []
        with link.reserve(forms[0], 3, Terms(clock.monotonic() + 60)) as room:
            submitted = [replies.submit(room, IMAGE, Options(), number)[0] for number in range(3)]
            await turns()
            link.cancel(submitted[1][0])
            await computed(fleet, worker, [(np.float32([number]),) for number in range(3)])
            for _, future in submitted:
                try:
                    heard.append((await future).arrays[0].tolist())
                except ServiceError as error:
                    heard.append((error.code, error.message))
        await turns()
        return heard, moved()

    worker = Worker()
    async with linked(worker) as fleet:
        own = await steps(fleet, worker, fleet.link, [fleet.models["m"]])
        far = await steps(fleet, worker, fleet.ingress.link, fleet.ingress.forms)
    assert own == far
    assert own[0] == [[0.0], ("INTERNAL", "the request was cancelled"), [2.0]]
    assert own[1] == {"wasted m": 1, "batch_size m null:0": 1, "batch_seconds m null:0": 1, "batch_padding m null:0": 5}


async def test_a_frame_of_pixels_is_read_where_it_lies():
    async with linked(decoders=(decoders := Decoders())) as fleet:
        pixels = np.arange(4, dtype=np.uint8)
        with fleet.ingress.reserve(2) as room:
            fleet.ingress.submit(room, (1,), Frame(pixels, 2, 2))
            grey = Frame(pixels[None, ::2, None].repeat(3, 2), 2, 1, placed=False)
            fleet.ingress.submit(room, (2,), grey, position=1)
            await turns()
            item = fleet.links[0]._under_way[1]
            assert fleet.arena.slot(0, item.slot).tolist() == [0, 1, 2, 3]
            [image] = decoders.given
            assert (bytes(image.body), image.width, image.height) == (b"\0\0\0\2\2\2", 2, 1)
            decoders.end(DecodeFailedError("it cannot be"))
            fleet.ingress.link.cancel(1)
            await turns()
        assert [reply.code for _, reply in fleet.ingress.replies] == ["INTERNAL"] * 2
        assert fleet.ingress.told(ItemFailed)
