"""The service with `--decode`: files of requests that a simulated device decodes, and those that it does not."""

from __future__ import annotations

import asyncio
import re

import httpx
import numpy as np
import pytest
from PIL import Image

from models.sample import IMAGES
from tests.support import small_classifier
from tests.support.images import JPEG, encoded, turned
from tests.support.load import until
from tests.support.service_process import running

BROKEN_WIDTH = 333
"""`decode_error`: the device cannot decode images of this width, and says so of the whole list."""
SIMULATED = ("--device", "npu", "--simulate", f"npu:1,decode=1,decode_error={BROKEN_WIDTH}")
OPTIONS = ("--models", "resnet50", "--weights", "sample", *SIMULATED, "--batch-sizes", "4")
PREDICT = "/v1/models/resnet50:predict"


def picture(name="classify_star", size=None, mode="RGB", kind="JPEG", **options):
    with Image.open(IMAGES / f"{name}.jpg") as image:
        return encoded((image.resize(size) if size else image).convert(mode), kind, **options)


def counted(client):
    found = re.findall(
        r'^anychip_device_decodes_total{.*outcome="(\w+)"} ([\d.]+)', client.get("/metrics").text, re.MULTILINE
    )
    return {outcome: int(float(number)) for outcome, number in found}


def decoding(client):
    [model] = client.get("/v1/models").json()["models"]
    return model["served_on"][0]["decoding"]


def answers(client, *files, path=PREDICT):
    """Statuses and bodies of requests that are sent at the same time."""

    async def ask():
        async with httpx.AsyncClient(base_url=client.base_url, timeout=60) as asking:
            return await asyncio.gather(*(asking.post(path, content=file, headers=JPEG) for file in files))

    return [(each.status_code, each.json()) for each in asyncio.run(ask())]


def scores(body):
    found = {each["class_id"]: each["score"] for each in body["predictions"][0]["classes"]}
    return np.array([found.get(number, 0.0) for number in range(12)])


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """Serve the same with images decoded on the host, as the reference for answers."""
    with running(tmp_path_factory.mktemp("host"), *OPTIONS) as service:
        yield service


@pytest.fixture(scope="module")
def device(tmp_path_factory):
    with running(tmp_path_factory.mktemp("device"), *OPTIONS, "--decode", "device") as service:
        yield service


def test_the_device_decodes_what_it_can_and_answers_alike(host, device):
    files = {
        "plain": picture(),
        "grey": picture(mode="L"),
        "progressive": picture(progressive=True),
        "turned": picture(exif=turned(6)),
        "mirrored": picture(exif=turned(2)),
        "small": picture(size=(40, 30)),
        "upright": picture(size=(300, 400)),
    }
    with host.client() as asked, device.client() as client:
        assert decoding(client)["by"] == "device"
        assert 0 < decoding(client)["errors"]["logit"] < 0.1
        before = counted(client)
        expected, given = answers(asked, *files.values()), answers(client, *files.values())
        for name, (_, one), (status, other) in zip(files, expected, given, strict=True):
            assert status == 200, (name, other)
            assert np.abs(scores(one) - scores(other)).max() < 0.03, name
            assert [other["predictions"][0][side] for side in ("width", "height")] == [
                one["predictions"][0][side] for side in ("width", "height")
            ]
        # A grey level makes a difference, and so it is seen that the device has decoded them.
        assert any(
            np.abs(scores(one) - scores(other)).max() > 0 for (_, one), (_, other) in zip(expected, given, strict=True)
        )
        after = counted(client)
        assert after["decoded"] - before.get("decoded", 0) == len(files)
        assert after["refused"] == before.get("refused", 0)


def test_of_eight_images_the_one_that_the_device_cannot_decode_is_decoded_on_the_host_alone(host, device):
    broken = picture("classify_ring", size=(BROKEN_WIDTH, 250))
    files = [picture("classify_heart", size=(400 + number, 300)) for number in range(7)]
    files.insert(3, broken)
    with host.client() as asked, device.client() as client:
        before = counted(client)
        given = answers(client, *files)
        assert [status for status, _ in given] == [200] * 8
        after = counted(client)
        assert after["decoded"] - before.get("decoded", 0) == 7
        assert after["refused"] - before.get("refused", 0) == 1
        # By the host's pixels: the very same answer.
        [(_, expected)] = answers(asked, broken)
        assert given[3][1]["predictions"] == expected["predictions"]
        assert given[3][1]["predictions"][0]["classes"][0]["label"] == "ring"


def test_a_deadline_holds_for_what_is_decoded_twice(device):
    broken = picture(size=(BROKEN_WIDTH, 250))
    with device.client() as client:
        for timeout in ("60", "100", "140", "180", "220", "300"):
            answer = client.post(PREDICT, content=broken, headers={**JPEG, "x-timeout-ms": timeout})
            assert answer.status_code in (200, 503, 504), answer.text
        assert answers(client, broken)[0][0] == 200

        def slots():
            return re.findall(r'^anychip_slots_taken{model="resnet50"} (.+)', client.get("/metrics").text, re.MULTILINE)

        asyncio.run(until(lambda: slots() == ["0.0"]))


def small(folder):
    """Return the options of a service with a small network, since the network is not under test."""
    return ("--models", small_classifier.written(folder), "--device", "npu", "--batch-sizes", "4")


def test_a_decoder_that_can_nothing_leaves_all_to_the_host(tmp_path):
    words = (*small(tmp_path), "--simulate", "npu:1,decode=1,decode_error=1")
    with running(tmp_path, *words, "--decode", "auto") as service, service.client() as client:
        found = decoding(client)
        assert (found["by"], found["errors"]) == ("host", {})
        assert "Failed to decode batch" in found["refusal"]
        assert answers(client, picture(), path=small_classifier.PREDICT)[0][0] == 200
        assert counted(client) == {}
        assert "images are decoded on the host" in service.log.read_text()


def test_a_device_that_must_decode_and_decodes_otherwise_does_not_serve(tmp_path):
    words = (*small(tmp_path), "--simulate", "npu:1,decode=1,decode_off=150", "--decode", "device")
    with pytest.raises(AssertionError), running(tmp_path, *words):
        pass
    assert "are others" in (tmp_path / "service.log").read_text()
