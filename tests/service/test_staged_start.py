"""A start that serves at once with what is quick to compile, and changes to the best when that is ready."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from PIL import Image

from models.sample.generator import classification_image
from tests.support.load import WAIT_S, Load, until
from tests.support.photographs import FILES
from tests.support.service_process import running

PHOTO = FILES[0].read_bytes()
CALIBRATION = 32
"""Images to calibrate on and to try int8 on: the 384 that are drawn by default take a minute."""


def calibration_images(folder: Path) -> str:
    """Write images like those that the sample weights were trained on; return their folder."""
    folder.mkdir()
    for index in range(CALIBRATION):
        rgb, _ = classification_image(2063, index, (500, 375))
        Image.fromarray(rgb).save(folder / f"{index}.png")
    return str(folder)


async def test_a_staged_start_serves_at_once_and_swaps_without_losing_a_request(tmp_path):
    """int8 takes its time to quantise; the second start finds it in the cache."""
    pytest.importorskip("nncf")
    options = ("--models", "resnet50", "--weights", "sample", "--engine", "auto", "--precision", "int8")
    options += ("--batch-sizes", "1", "--cache-dir", str(tmp_path / "cache"))
    options += ("--calibrate", calibration_images(tmp_path / "images"))

    def served(service):
        [model] = httpx.get(f"{service.url}/v1/models", timeout=WAIT_S).json()["models"]
        return model["served_on"][0] if model["served_on"] else {"precision": "", "errors": {}, "refusals": {}}

    with running(tmp_path, *options) as service:
        assert served(service)["precision"] in ("bf16", "fp32")
        assert "takes over" in served(service)["refusals"]["openvino"]
        assert served(service)["staged"]
        async with Load(service.url, "/v1/models/resnet50:predict", PHOTO, 4) as load:
            await load.answers(20)
            await until(lambda: served(service)["precision"] == "int8")
            assert not served(service)["staged"]
            await load.answers(20)
        assert set(load.outcomes) == {(200, "OK")}
        assert set(served(service)["errors"]) == {"top1", "score", "cosine", "logit", "scale", "top1_loss"}
        assert served(service)["errors"]["top1_loss"] <= 0.01
        text = httpx.get(f"{service.url}/metrics", timeout=WAIT_S).text
        assert 'anychip_handovers_total{device="cpu:0",reason="compiled"} 1.0' in text
        assert 'anychip_precision_error{device="cpu:0",measure="logit",model="resnet50"}' in text
    with running(tmp_path, *options) as service:
        assert served(service)["precision"] == "int8"
        text = httpx.get(f"{service.url}/metrics", timeout=WAIT_S).text
        assert 'anychip_handovers_total{device="cpu:0",reason="compiled"} 0.0' in text


SIZES = [1, 2, 4, 8, 16, 32, 64, 128]


async def test_batches_grow_where_they_pay_while_the_service_serves_and_the_next_start_knows_them(tmp_path):
    """A batch takes 20 ms, however many images it has: each size pays, up to the largest that is tried."""
    options = ("--models", "resnet18", "--weights", "random", "--device", "null", "--engine", "auto")
    options += ("--precision", "auto", "--null", "delay_ms=20", "--batch-sizes", "auto")
    options += ("--cache-dir", str(tmp_path / "cache"))

    def model(service):
        [found] = httpx.get(f"{service.url}/v1/models", timeout=WAIT_S).json()["models"]
        return found

    def sizes(service):
        return [each["batch_sizes"] for each in model(service)["served_on"]]

    with running(tmp_path, *options) as service:
        async with Load(service.url, "/v1/models/resnet18:predict", PHOTO, 4) as load:
            await load.answers(4)
            await until(lambda: sizes(service) == [SIZES])
            await load.answers(20)
        assert set(load.outcomes) == {(200, "OK")}
    with running(tmp_path, *options) as service:
        assert sizes(service) == [SIZES]
        assert "found at a start" in model(service)["profile"]
        text = httpx.get(f"{service.url}/metrics", timeout=WAIT_S).text
        assert 'anychip_handovers_total{device="null:0",reason="compiled"} 0.0' in text
