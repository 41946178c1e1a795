"""The worker's loop, run in a thread: real models, a real channel, a real arena."""

from __future__ import annotations

import contextlib
import gc
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torchvision.models import resnet18

from app.core import Loaded
from app.processes.arena import Arena
from app.processes.channel import Channel, reader, socket_pair, to_packet
from app.worker.load import WorkerModel
from app.worker.loop import Worker
from app.worker.main import run
from app.worker.messages import Beat, Done, Failed, FromWorker, ModelPlan, Run, Stats, Stop, WorkerPlan
from backends import Device, Memory, OutOfDeviceMemoryError
from backends.vendors.cpu import CpuBackend
from models import Options, open_model, parse_spec
from models.classifiers import ClassificationNetwork

WAIT_S = 60
OPTIONS = Options()


class Talk:
    """The server's end of a worker that runs in a thread."""

    def __init__(
        self, *specs, device="cpu:0", engine="eager", precision="fp32", batch_sizes=(1, 2), weights=Path("nowhere")
    ):
        self.models = tuple(open_model(parse_spec(spec), weights) for spec in specs)
        self.arena = Arena([(int(np.prod(model.input_shape)), 4) for model in self.models])
        ours, theirs = socket_pair()
        self.channel = Channel(ours)
        self.said = []
        theirs_arena = Arena.opened(self.arena.pools, *self.arena.descriptors())
        plans = tuple(ModelPlan(model, engine, precision, batch_sizes) for model in self.models)
        load = WorkerPlan(plans, Device(device, "a device", 1 << 30, "fp32"))
        self.thread = threading.Thread(target=run, args=(Channel(theirs), theirs_arena, load))
        self.thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.channel.close()
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        self.arena.close()

    def send(self, message):
        self.channel.send(to_packet((message,)))

    def hear_any(self):
        for _ in range(WAIT_S):
            if self.said:
                break
            self.channel.wait(1)
            for packet in self.channel.receive():
                self.said += reader(FromWorker)(packet)
        assert self.said, "the worker says nothing"
        return self.said.pop(0)

    def ready(self):
        while not isinstance(self.hear_any(), Stats):
            pass

    def hear(self):
        """Return the next message that is not Loaded, Stats or Beat."""
        while isinstance(message := self.hear_any(), Loaded | Stats | Beat):
            pass
        return message

    def fill(self, slot, value, model=0):
        self.arena.slot(model, slot)[:] = value


def test_what_a_model_takes_is_without_what_the_gate_compared_it_with(monkeypatch):
    """Which of random weights is made at each load, and gone when it serves."""

    def networks(*_):
        count = sum(type(each) is ClassificationNetwork for each in gc.get_objects())
        return Memory(count, count, count, 1 << 30)

    monkeypatch.setattr(CpuBackend, "memory", networks)
    plan = ModelPlan(open_model(parse_spec("resnet18:random"), Path("nowhere")), "eager", "fp32", (1,), is_gated=True)
    load = WorkerPlan((plan,), Device("cpu:0", "a device", 1 << 30, "fp32"))
    loaded = WorkerModel(load, 0, CpuBackend(), None)
    assert loaded.report.errors
    assert loaded.report.memory_bytes == 1
    loaded.executable.close()


def test_padding_holds_no_image_of_an_earlier_batch(monkeypatch):
    computed = []
    results = Worker._results

    def watched(self, run, pixels):
        computed.append(pixels[: run.batch_size].copy())
        return results(self, run, pixels)

    monkeypatch.setattr(Worker, "_results", watched)
    with Talk("resnet18:random") as talk:
        talk.ready()
        talk.fill(0, 200)
        talk.fill(1, 100)
        talk.send(Run(1, 0, (0, 1), (OPTIONS, OPTIONS), 2))
        talk.hear()
        talk.send(Run(2, 0, (0,), (OPTIONS,), 2))
        talk.hear()
    assert [pixels.reshape(2, -1).max(axis=1).tolist() for pixels in computed] == [[200, 100], [200, 0]]


def test_a_batch_that_fails_does_not_end_the_worker():
    with Talk("resnet18:random") as talk:
        talk.ready()
        talk.send(Run(1, 0, (99,), (OPTIONS,), 1))
        failed = talk.hear()
        assert isinstance(failed, Failed)
        assert failed.batch_id == 1
        assert "99" in failed.reason
        talk.send(Run(2, 0, (0,), (OPTIONS,), 1))
        assert isinstance(talk.hear(), Done)


@pytest.mark.parametrize("architecture", ["resnet18", "yolov8n"])
def test_nan_and_infinity_are_never_answered(tmp_path, architecture):
    if architecture == "resnet18":
        state = resnet18().state_dict()
        state["fc.bias"][3] = float("inf")
    else:
        network = open_model(parse_spec("yolov8n:random"), tmp_path)
        state = type(network.network().core)("n", 80).state_dict()
        state["model.22.cv2.0.2.bias"][3] = float("inf")  # Its softmax is NaN.
    save_file(state, tmp_path / "broken.safetensors")
    with Talk(f"{architecture}:{tmp_path / 'broken.safetensors'}", batch_sizes=(1,), weights=tmp_path) as talk:
        talk.ready()
        talk.send(Run(1, 0, (0,), (OPTIONS,), 1))
        assert talk.hear().results == (None,)


@pytest.mark.parametrize("end", [lambda talk: talk.send(Stop()), lambda talk: talk.channel.close()])
def test_it_ends_when_told_to_and_when_the_server_is_gone(end):
    with Talk("resnet18:random") as talk:
        talk.ready()
        end(talk)
        talk.thread.join(WAIT_S)
        assert not talk.thread.is_alive()


@pytest.mark.parametrize("released", [(True, False), (False,)])
def test_a_batch_is_tried_once_more_as_it_is_where_a_release_has_made_room(released):
    """Without room the caller tries half of it."""
    tries, rooms = [], iter(released)

    def compute(pixels):
        tries.append(len(pixels))
        if len(tries) == 1:
            raise OutOfDeviceMemoryError("too little memory")
        return (pixels,)

    memory = SimpleNamespace(make_room=lambda: next(rooms))
    worker = Worker(SimpleNamespace(device="null:0", models={}), memory, None, None)
    outputs = worker._outputs(SimpleNamespace(run=compute), np.zeros((4, 1)))
    assert (outputs is not None, tries) == ((True, [4, 4]) if released[0] else (False, [4]))


def test_what_the_device_has_decoded_goes_to_its_network_and_not_by_way_of_the_host():
    decoded = torch.empty(2, 2, 3, dtype=torch.uint8, device="meta")  # Nothing of it can come to the host.
    given = []

    def start_rows(rows, size):
        given.append((rows, size))

    loaded = SimpleNamespace(
        model=SimpleNamespace(input_shape=(2, 2, 3)),
        executable=SimpleNamespace(depth=2, takes_rows=True, start_rows=start_rows),
        decoding=SimpleNamespace(on_device=lambda slots: ({row: decoded for row, _ in slots}, ())),
        report=SimpleNamespace(latency_s={4: 1.0}),
    )
    with contextlib.closing(Arena([(12, 4)])) as arena:
        arena.slot(0, 1)[:] = 7
        worker = Worker(SimpleNamespace(device="npu:0", models=[loaded]), None, arena, None)
        under_way = worker._start(Run(1, 0, (0, 1, 2), (OPTIONS,), 4, files=(0, 2)))
    assert under_way.undecoded == ()
    [((first, pixels, last), size)] = given
    assert first is decoded
    assert last is decoded
    assert (pixels == 7).all()
    assert size == 4
