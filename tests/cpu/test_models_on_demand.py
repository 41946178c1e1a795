"""Networks as they are published, on a CPU that has memory for half of them: loads, answers, what is left behind."""

from __future__ import annotations

import asyncio
import collections
import functools
import json
import os
import random
import re
import shutil
import time
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from models.classifiers import Classifier, default_labels
from tests.support.images import png
from tests.support.service_process import running
from tests.support.work import until

MB = 1 << 20
SMALL = ("squeezenet1_1", "shufflenet_v2_x1_0", "mobilenet_v2", "mobilenet_v3_large")
TWELVE = (
    *SMALL,
    *("resnet18", "efficientnet_b0", "regnet_y_400mf", "googlenet", "densenet121", "convnext_tiny"),
    *("resnet50", "vit_b_16"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("networks")


def given(folder, names):
    """Return an entry of `--models` for networks with weights files; write the files that are missing."""
    for name in names:
        if not (folder / f"{name}.safetensors").exists():
            network = Classifier.of(name, name, default_labels(name), "random", None)._random_core()
            state = {key: value.contiguous().clone() for key, value in network.state_dict().items()}
            save_file(state, folder / f"{name}.safetensors")
    return ",".join(f"{name}={name}:{folder / name}.safetensors" for name in names)


def private_bytes(worker):
    """Of a process, without what lies in files as well: code, and weights that are mapped."""
    status = Path(f"/proc/{worker.pid}/status").read_text()
    return int(re.findall(r"RssAnon:\s+(\d+)", status)[0]) << 10


class Clients:
    """They ask for models by their popularity, and compare every answer with the first one of that model."""

    def __init__(self, url, names, images):
        self.client = httpx.AsyncClient(base_url=url, timeout=90, trust_env=False)
        self._names, self._images = names, images
        self.known = {}
        self.outcomes = collections.Counter()
        self.answered = collections.Counter()
        self.worst = 0.0

    async def ask(self, name, number):
        answer = await self.client.post(f"/v1/models/{name}:predict?top_k=1000", content=self._images[number])
        code = "OK" if answer.status_code == 200 else answer.json()["code"]
        self.outcomes[code] += 1
        if code == "OK":
            self.answered[name] += 1
            scores = {each["label"]: each["score"] for each in answer.json()["predictions"][0]["classes"]}
            known = self.known.setdefault((name, number), scores)
            self.worst = max(self.worst, *(abs(scores[label] - known[label]) for label in known))
        elif code == "MODEL_LOADING":
            await asyncio.sleep(0.2)

    async def zipf(self, seed, until_s):
        dice, weights = random.Random(seed), [1 / place for place in range(1, len(self._names) + 1)]
        while time.monotonic() < until_s:
            await self.ask(dice.choices(self._names, weights)[0], dice.randrange(len(self._images)))

    async def each(self):
        """All in turn, each until it has answered twice: a large one may not find room while others are busy."""
        for name in self._names:
            while self.answered[name] < 2:
                await self.ask(name, 0)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("engine", "names", "seconds"),
    [("openvino", SMALL, 10), ("openvino", TWELVE, 240), ("eager", TWELVE, 120)],
)
async def test_models_in_half_the_memory_that_they_take(tmp_path, folder, engine, names, seconds):
    cache = tmp_path / "cache"
    options = ("--models", given(folder, names), "--models-on-demand", "all", "--device", "cpu", "--engine", engine)
    options += ("--cache-dir", str(cache), "--timeout-ms", "60000", "--decoders", "1", "--precision", "fp32")
    with running(tmp_path, *options):
        pass
    kept = map(Path.read_text, (cache / "footprints").glob("*.json"))
    rows = {row["model"]: row for row in map(json.loads, kept)}
    for name, row in rows.items():
        print(f"{name:20} {row['memory_bytes'] / 1e6:6.0f} MB {row['load_s']:6.2f} s")
    budget_bytes = sum(row["memory_bytes"] for row in rows.values()) // 2
    images = [png(colour) for colour in ("#c04020", "#20a060", "#3050d0")]
    with running(tmp_path, *options, "--device-memory", str(budget_bytes)) as service:
        worker, clients = service.worker(), Clients(service.url, names, images)
        while not clients.answered[names[0]]:  # What libraries take once, with the first model, is no model's.
            await clients.ask(names[0], 0)
        before, until_s, grown = private_bytes(worker), time.monotonic() + seconds, [0]
        tasks = [asyncio.create_task(clients.zipf(seed, until_s)) for seed in range(3)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0.2)
            grown.append(private_bytes(worker) - before)
        await asyncio.gather(*tasks)
        await clients.each()
        grown.append(private_bytes(worker) - before)
        await clients.client.aclose()
        print(dict(clients.outcomes), dict(clients.answered), f"largest difference {clients.worst}")
        loads, most = service.log.read_text().count(" is loaded: "), max(grown) / MB
        print(
            f"{loads} loads, {most:.0f} MiB more at most, of {budget_bytes / MB:.0f}; {grown[-1] / MB:.0f} at the end"
        )
        assert loads > len(names)
        assert set(clients.outcomes) <= {"OK", "MODEL_LOADING"}
        assert clients.worst < 1.5e-5  # Loaded again it answers as before, to a unit of the last digit that is sent.
        assert grown[-1] < 1.1 * budget_bytes + 64 * MB
        # What a load needs while it lasts comes on top: the gate's reference is as large as the model.
        assert max(grown) < 1.1 * budget_bytes + max(row["memory_bytes"] for row in rows.values()) + 64 * MB
        assert service.worker().pid == worker.pid


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # The exporter that needs no other package is the old one.
def test_a_damaged_copy_is_made_again_for_the_next_load(tmp_path):
    network, file = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3)), tmp_path / "small.onnx"
    torch.onnx.export(network, (torch.zeros(1, 3, 32, 32),), file, dynamo=False)
    (tmp_path / "small.json").write_text('{"task": "classify", "size": [32, 32]}')
    (tmp_path / "small.labels.txt").write_text("circle\nsquare\ntriangle\n")
    options = ("--models", f"small={file}", "--models-on-demand", "all", "--device", "cpu")
    options += ("--cache-dir", str(tmp_path / "cache"), "--timeout-ms", "20000")
    with running(tmp_path, *options) as service, service.client() as client:
        [copy] = (tmp_path / "cache").rglob("small.onnx")
        send = functools.partial(client.post, "/v1/models/small:predict", content=png())
        assert send().status_code == 200
        for damage in (lambda: os.truncate(copy, 9), lambda: shutil.rmtree(copy.parents[1])):
            copy.chmod(0o600)
            damage()
            service.worker().kill()  # Its successor loads the model that was there.
            until(lambda: send().status_code == 200)
            assert copy.read_bytes() == file.read_bytes()
        assert "threads that began before" not in service.log.read_text(), "ONNX Runtime's, which tells its makers"
