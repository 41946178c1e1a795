"""The service's life on a real device: starts that are refused, and the grace period.

tests/service/test_faults.py has what a device can do wrong.
"""

from __future__ import annotations

import signal

import httpx
import pytest

from tests.support import warm
from tests.support.images import JPEG
from tests.support.photographs import FILES
from tests.support.service_process import running
from tests.support.work import until

PHOTO = FILES[0].read_bytes()
PREDICT = "/v1/models/resnet18:predict"
OPTIONS = ("--models", "resnet18", "--weights", "random", "--batch-sizes", "1,2")
WAIT_S = 120


def ready(service):
    return httpx.get(f"{service.url}/v2/health/ready", timeout=WAIT_S)


def test_during_the_grace_period_it_is_not_ready_and_still_answers(tmp_path):
    with running(tmp_path, *OPTIONS, "--grace-s", "60") as service:
        service.process.send_signal(signal.SIGTERM)
        until(lambda: ready(service).status_code == 503)
        assert ready(service).json()["code"] == "DRAINING"
        assert ready(service).headers["connection"] == "close"
        assert httpx.post(service.url + PREDICT, content=PHOTO, headers=JPEG, timeout=WAIT_S).status_code == 200
        service.process.send_signal(signal.SIGTERM)  # A second one: no more patience.
        assert service.process.wait(WAIT_S) == 0


def anychip(folder, *arguments):
    """Run a command that ends by itself."""
    return warm.completed(folder, "-m", "app", *arguments, timeout_s=WAIT_S * 3)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--models", "resnet19"), "resnet"),
        (("--models", "resnet18", "--weights", "missing.pth"), "missing.pth"),
        (("--models", "resnet18,resnet18", "--weights", "random"), "one name"),
        (("--models", "resnet18:random", "--device", "npu"), "npu"),
        (
            ("--models", "resnet18:random", "--device", "null", "--null", "load_ms=100000", "--start-timeout-s", "1"),
            "not ready within 1 s",
        ),
        (("--models", "resnet18:random", "--engine", "tensorrt"), "tensorrt"),
        (("--models", "resnet18:random", "--precision", "int4"), "int4"),
        (("--port", "70000"), "port"),
    ],
)
def test_what_cannot_be_served_stops_the_start_with_one_sentence(tmp_path, arguments, sentence):
    ended = anychip(tmp_path, "serve", *(arguments if "--port" in arguments else (*arguments, "--port", "0")))
    assert ended.returncode == 1
    lines = [line for line in ended.stderr.splitlines() if line.startswith("anychip: ")]
    assert len(lines) == 1
    assert sentence in lines[0]
    assert "Traceback" not in ended.stderr
