"""Detectors that torchvision exported, served as images: the service's boxes are torchvision's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from app.http.schemas import PredictAnswer
from app.images.decoding import decode
from app.images.header import read_header
from models.sample.generator import detection_image
from tests.support.images import encoded
from tests.support.service_process import running
from tests.support.torchvision_detectors import export

# Two networks are exported, and tried at the service's start.
pytestmark = pytest.mark.timeout(900)

NETWORKS = {"rcnn": "fasterrcnn_mobilenet_v3_large_320_fpn", "ssd": "ssdlite320_mobilenet_v3_large"}
LABELS = ["a", "b", "c", "d", "e"]


IMAGES = [encoded(Image.fromarray(detection_image(77, index, (320, 240))[0]), "JPEG", quality=92) for index in range(4)]


def tensor(image):
    return decode(image, read_header(image)).permute(2, 0, 1).float() / 255


@pytest.fixture(scope="module")
def networks(tmp_path_factory):
    """torchvision's own modules, and the folder with their files."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "rcnn.json").write_text('{"task": "detect", "labels": ["a", "b", "c", "d", "e"]}')
    seen = [tensor(image) for image in IMAGES[:2]]
    return folder, {name: export(folder / f"{name}.onnx", full, seen) for name, full in NETWORKS.items()}


@pytest.fixture(scope="module")
def service(networks, tmp_path_factory):
    folder, _ = networks
    models = ",".join(f"{name}={folder / name}.onnx" for name in NETWORKS)
    options = ("--device", "cpu", "--batch-sizes", "1,2")
    with running(tmp_path_factory.mktemp("torchvision"), "--models", models, *options) as service:
        yield service


def distance(one, other):
    return float(np.abs(np.array(one) - np.array(other)).max())


@pytest.mark.parametrize("name", NETWORKS)
def test_the_service_answers_as_torchvision_itself(service, networks, name):
    _, own = networks
    compared = lost = 0
    with service.client() as client:
        for image in IMAGES:
            answer = client.post(f"/v1/models/{name}:predict", content=image, headers={"Content-Type": "image/jpeg"})
            [found] = PredictAnswer.model_validate_json(answer.content, strict=True).model_dump()["predictions"]
            with torch.inference_mode():
                [expected] = own[name]([tensor(image)])
            chosen = expected["scores"] > 0.25
            boxes, scores, labels = (expected[key][chosen].tolist() for key in ("boxes", "scores", "labels"))
            assert len(scores) > 3
            assert [each["score"] for each in found["detections"]] == pytest.approx(scores, abs=0.01)
            free = list(found["detections"])
            for box, score, label in zip(boxes, scores, labels, strict=True):
                compared += 1
                alike = [
                    each
                    for each in free
                    if each["class_id"] == label
                    and abs(each["score"] - score) <= 0.01
                    and distance([*each["box"].values()], box) <= 1
                ]
                if not alike:
                    lost += 1
                    continue
                free.remove(alike[0])
                expected_label = LABELS[label - 1] if name == "rcnn" else f"class {label}"
                assert alike[0]["label"] == expected_label
    assert lost <= 0.005 * compared
