"""A file of each task on a simulated device: what the device computes of it there is what is answered."""

from __future__ import annotations

import pytest

from models.contract.task_adapter import OWN
from models.sample import IMAGES
from tests.support.service_process import running
from tests.support.task_files import written

WANTED = {
    "classify": lambda found: found["classes"][0]["label"] == "thing",
    "embed": lambda found: found["embedding"] == pytest.approx([3, 4], abs=1e-4),
    "regress": lambda found: found["values"] == pytest.approx({"nothing": 31.5, "thing": 1.75}, abs=1e-4),
    "segment_semantic": lambda found: [each["share"] for each in found["areas"]] == [0.5, 0.5],
    "depth": lambda found: (found["depth"]["min"], found["depth"]["max"]) == pytest.approx((1, 5), abs=1e-4),
    "detect": lambda found: found["detections"][0]["label"] == "thing",
    "segment": lambda found: len(found["detections"][0]["segments"][0]) > 3,
    "pose": lambda found: len(found["detections"][0]["keypoints"]) == 3,
    "obb": lambda found: found["detections"][0]["obb"]["angle"] == pytest.approx(0.7854, abs=1e-3),
}


def test_a_file_of_each_task_is_served_on_a_simulated_device(tmp_path):
    files = [written(tmp_path, entry.name) for entry in OWN]
    options = ("--models", ",".join(map(str, files)), "--batch-sizes", "1", "--simulate", "npu:1", "--device", "npu")
    with running(tmp_path, *options) as service, service.client() as client:
        assert {file.stem for file in files} == WANTED.keys()
        for task, is_right in WANTED.items():
            answer = client.post(f"/v1/models/{task}:predict", content=(IMAGES / "detect_1.jpg").read_bytes()).json()
            assert (answer["device"], answer["engine"], answer["simulated"]) == ("npu:0", "eager", True)
            assert is_right(answer["predictions"][0]), answer
