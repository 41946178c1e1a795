"""The worker's loop, run in a thread: real models, a real pipe, a real arena."""

from __future__ import annotations

import multiprocessing
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torchvision.models import resnet18

from app.workers.arena import Arena
from app.workers.messages import Beat, Done, Ended, Failed, Load, Ready, Run, Stats, Stop
from app.workers.worker import run
from models import Options, open_model, parse_spec

WAIT_S = 60
OPTIONS = Options()


class Talk:
    """The server's end of a worker that runs in a thread."""

    def __init__(self, *specs, device="cpu", engine="eager", precision="fp32", batch_sizes=(1, 2)):
        self.models = tuple(open_model(parse_spec(spec), Path("nowhere")) for spec in specs)
        self.arena = Arena([(int(np.prod(model.input_shape)), 4) for model in self.models])
        self.connection, theirs = multiprocessing.Pipe()
        self.thread = threading.Thread(target=run, args=(theirs, self.arena))
        self.thread.start()
        self.connection.send(Load(self.models, device, engine, precision, batch_sizes))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.connection.close()
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        self.arena.close()

    def hear(self):
        """The next message that is neither Stats nor Beat."""
        while True:
            assert self.connection.poll(WAIT_S), "the worker says nothing"
            message = self.connection.recv()
            if not isinstance(message, Stats | Beat):
                return message

    def fill(self, slot, value, model=0):
        self.arena.slot(model, slot)[:] = value


def test_it_loads_measures_and_answers():
    with Talk("resnet18:random", "yolov8n:random") as talk:
        ready = talk.hear()
        assert isinstance(ready, Ready)
        assert ready.device == "cpu:0"
        assert [loaded.report.engine for loaded in ready.loaded] == ["eager", "eager"]
        assert all(set(loaded.latency_s) == {1, 2} for loaded in ready.loaded)
        assert all(seconds > 0 for loaded in ready.loaded for seconds in loaded.latency_s.values())

        rng = np.random.default_rng(0)
        for slot in (3, 1):
            talk.fill(slot, rng.integers(0, 256, 224 * 224 * 3, dtype=np.uint8))
        talk.connection.send(Run(7, 0, (3, 1), (OPTIONS, OPTIONS), 2))
        done = talk.hear()
        assert isinstance(done, Done)
        assert done.batch_id == 7
        assert done.infer_s > 0
        network = talk.models[0].network()
        pixels = np.stack([talk.arena.slot(0, slot).reshape(224, 224, 3) for slot in (3, 1)])
        with torch.inference_mode():
            expected = network(torch.from_numpy(pixels))[0].numpy()
        for row in range(2):
            np.testing.assert_allclose(done.results[row][0], expected[row], rtol=1e-4, atol=1e-4)

        talk.connection.send(Run(8, 1, (0,), (OPTIONS,), 1))
        assert talk.hear().batch_id == 8


def test_padding_is_computed_and_not_answered():
    with Talk("resnet18:random") as talk:
        talk.hear()
        talk.connection.send(Run(1, 0, (0,), (OPTIONS,), 2))
        assert len(talk.hear().results) == 1


def test_memory_is_reported():
    with Talk("resnet18:random") as talk:
        assert isinstance(talk.connection.recv(), Ready)
        stats = talk.connection.recv()
        assert isinstance(stats, Stats)
        assert stats.resident > 10_000_000
        assert 0 < stats.used <= stats.total
        assert 0 <= stats.utilization_ratio <= 1


def test_it_says_that_it_lives():
    with Talk("resnet18:random") as talk:
        talk.hear()
        heard = []
        while not any(isinstance(message, Beat) for message in heard):
            assert talk.connection.poll(WAIT_S)
            heard.append(talk.connection.recv())


def test_a_batch_that_fails_does_not_end_the_worker():
    with Talk("resnet18:random") as talk:
        talk.hear()
        talk.connection.send(Run(1, 0, (99,), (OPTIONS,), 1))
        failed = talk.hear()
        assert isinstance(failed, Failed)
        assert failed.batch_id == 1
        assert "99" in failed.reason
        talk.connection.send(Run(2, 0, (0,), (OPTIONS,), 1))
        assert isinstance(talk.hear(), Done)


@pytest.mark.parametrize("architecture", ["resnet18", "yolov8n"])
def test_nan_is_never_answered(tmp_path, architecture):
    if architecture == "resnet18":
        state = resnet18().state_dict()
        state["fc.bias"][3] = float("nan")
    else:
        network = open_model(parse_spec("yolov8n:random"), tmp_path)
        state = type(network.network().core)("n", 80).state_dict()
        state["model.22.cv3.0.2.bias"][3] = float("nan")
    save_file(state, tmp_path / "broken.safetensors")
    with Talk(f"{architecture}:{tmp_path / 'broken.safetensors'}", batch_sizes=(1,)) as talk:
        assert isinstance(talk.hear(), Ready)
        talk.connection.send(Run(1, 0, (0,), (OPTIONS,), 1))
        assert talk.hear().results == (None,)


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"device": "npu"}, "npu"), ({"engine": "magic"}, "magic"), ({"precision": "fp3"}, "fp3")],
)
def test_what_it_cannot_start_with_is_said_in_one_sentence(options, reason):
    with Talk("resnet18:random", **options) as talk:
        failed = talk.hear()
        assert isinstance(failed, Ended)
        assert reason in failed.reason
        talk.thread.join(WAIT_S)
        assert not talk.thread.is_alive()


def test_it_ends_when_told_to():
    with Talk("resnet18:random") as talk:
        talk.hear()
        talk.connection.send(Stop())
        talk.thread.join(WAIT_S)
        assert not talk.thread.is_alive()


def test_it_ends_when_the_server_is_gone():
    with Talk("resnet18:random") as talk:
        talk.hear()
        talk.connection.close()
        talk.thread.join(WAIT_S)
        assert not talk.thread.is_alive()
