"""What answers requests has no torch: neither its modules nor its libraries, whatever it is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from models.sample import IMAGES
from tests.support import small_classifier
from tests.support.service_process import ServiceProcess, libraries_of, own_mib, running

pytestmark = pytest.mark.cold

SERVED = "resnet50,yolov8n,yolov8n-seg:random,yolov8n-pose:random,yolov8n-obb:random,found=yolov8n > resnet50"
MODELS = ("resnet50", "yolov8n", "yolov8n-seg", "yolov8n-pose", "yolov8n-obb", "found")
MOST_MIB = 200
"""Of memory that the server has to itself; its processes share the rest."""


def ask(client: httpx.Client, model: str) -> Any:
    """Every image that comes with anychip, in one request."""
    files = [("images", (path.name, path.read_bytes(), "image/jpeg")) for path in sorted(IMAGES.glob("*.jpg"))[:4]]
    answer = client.post(f"/v1/models/{model}:predict?score_threshold=0.01", files=files)
    assert answer.status_code == 200, answer.text
    return answer.json()["predictions"]


def check(service: ServiceProcess) -> None:
    """Look at the server, and at ingresses beside it."""
    assert libraries_of(service.worker().pid), "the scan finds them where they are"
    for pid in (service.process.pid, *service.named("anychip-ingress")):
        assert not libraries_of(pid)
        assert own_mib(pid) < MOST_MIB


def test_the_server_maps_no_library_of_torch_whatever_is_asked(tmp_path: Path) -> None:
    options = ("--models", SERVED, "--weights", "sample", "--device", "null", "--engine", "auto", "--ingresses", "2")
    with running(tmp_path, *options, fresh=True) as service, service.client() as client:
        check(service)
        for model in MODELS:
            assert len(ask(client, model)) == 4
        for route in ("/v1/models", "/v2/health/ready", "/metrics", "/openapi.json", "/v2/models/yolov8n"):
            assert client.get(route).status_code == 200
        check(service)


def test_a_model_that_is_loaded_again_is_read_by_another_process(tmp_path: Path) -> None:
    """And an export is tried by one more."""
    options = ("--models", small_classifier.written(tmp_path), "--device", "cpu")
    with running(tmp_path, *options, fresh=True) as service, service.admin_client() as admin:
        assert admin.post("/v2/repository/models/small/load").status_code == 200
        assert len(ask(admin, "small")) == 4
        check(service)
