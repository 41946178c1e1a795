"""Hand-overs of a running service that go wrong: afterwards all workers serve the same weights, and none is left."""

import asyncio

import httpx
import psutil
import pytest
from safetensors.torch import save_file
from torchvision.models import resnet18

from tests.support.images import GREY, JPEG
from tests.support.load import WAIT_S, Load, until
from tests.support.null_service import MODEL, PREDICT, metric

LOAD = f"/v2/repository/models/{MODEL}/load"


@pytest.fixture
def write(tmp_path):
    """Write weights of so many classes, whose labels say how many there are."""

    def write(classes):
        save_file(resnet18(num_classes=classes).state_dict(), tmp_path / "dogs.safetensors")
        labels = "".join(f"dog {number} of {classes}\n" for number in range(classes))
        (tmp_path / "dogs.labels.txt").write_text(labels)

    write(3)
    return write


def labels(service, times=10):
    """Return the label suffixes in `times` answers."""
    answers = [httpx.post(service.url + PREDICT, content=GREY, headers=JPEG, timeout=WAIT_S) for _ in range(times)]
    found = [answer.json()["predictions"][0]["classes"] for answer in answers]
    return {each["label"].partition(" of ")[2] for classes in found for each in classes}


def pids(service):
    return {worker.pid for worker in service.workers()}


async def test_where_one_of_two_workers_cannot_start_both_serve_what_they_did(tmp_path, serve, write):
    model = f"{MODEL}={MODEL}:{tmp_path / 'dogs.safetensors'}"
    # The outputs are the model's, so that each class has its label.
    with serve("devices=2,delay_ms=20,import_ms=1000,output_mb=0", "--models", model, "--batch-sizes", "1") as service:
        old = pids(service)
        assert len(old) == 2
        async with Load(service.url, PREDICT, GREY, 8) as load:
            await load.answers(20)
            write(4)
            loading = asyncio.create_task(asyncio.to_thread(httpx.post, service.admin_url + LOAD, timeout=WAIT_S))
            await until(lambda: len(service.workers()) == 4)
            max(service.workers(), key=psutil.Process.create_time).kill()
            answer = await loading
            assert (answer.status_code, answer.json()["code"]) == (500, "INTERNAL")
            await load.answers(20)
        assert set(load.outcomes) == {(200, "OK")}
        await until(lambda: pids(service) == old)
        assert labels(service) == {"3"}
        assert metric(service, "anychip_handovers_total", reason="load") == 0
        # And the next one is as good as ever.
        assert httpx.post(service.admin_url + LOAD, timeout=WAIT_S).status_code == 200
        assert labels(service) == {"4"}
        assert not pids(service) & old
