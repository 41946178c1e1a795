"""Checkpoints that ultralytics itself has written are read without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from models import WeightsError, open_model, parse_spec
from models.yolo.yolov8 import anchors
from tests.support import warm

WRITE_TASKS = """
import sys, torch
from torchvision.transforms import InterpolationMode
from ultralytics import YOLO
from ultralytics.data.augment import classify_transforms
from ultralytics.nn.tasks import DetectionModel
sys.path.insert(0, sys.argv[1])
from tests.support.ultralytics_exports import enliven
CLASSES = {"yolov8n": 1, "yolov8s": 7, "yolov8m": 200}
torch.set_num_threads(1)  # As importing ultralytics does, unless PyTorch has chosen already.
torch.manual_seed(0)
images = torch.rand(2, 3, 128, 128)
for name in sys.argv[2:]:
    kind = name.partition("-")[2]
    yolo = YOLO(f"{name}.yaml", verbose=False)
    if name in CLASSES:  # The head's width depends on how many there are.
        yolo.model = DetectionModel(f"{name}.yaml", nc=CLASSES[name], verbose=False)
    network = yolo.model.float()
    enliven(network, images)
    if kind == "cls":  # As training leaves them, and of one's own.
        if name.startswith("yolo11"):  # As Python 3.11 did before 3.11.5.
            InterpolationMode.__reduce_ex__ = lambda mode, protocol: (getattr, (InterpolationMode, mode.name))
        network.transforms = classify_transforms(224, interpolation="BICUBIC")
        yolo.save(f"{name}-own.pt")
        network.transforms = classify_transforms(224)
    yolo.save(f"{name}.pt")
    # Both compute from the halves that the file has, in float64: how float32 is rounded differs between processors.
    network.half().double().eval()
    with torch.no_grad():
        answer = network(images.double())
    found = [answer] if isinstance(answer, torch.Tensor) else list(answer)
    if isinstance(found[0], tuple):
        found = list(found[0])
    found = [each.float() for each in found if isinstance(each, torch.Tensor)]
    torch.save({"images": images, "outputs": found}, f"{name}.pth")
"""


NETWORKS = ("yolov8n", "yolov8s", "yolov8m", "yolov8n-seg", "yolov8n-pose", "yolov8n-obb", "yolov8n-cls",
            "yolo11n", "yolo11n-seg", "yolo11n-pose", "yolo11n-obb", "yolo11n-cls", "yolo11m",
            "yolo26n", "yolo26n-seg", "yolo26n-pose", "yolo26n-obb", "yolo26m-seg")  # fmt: skip


@pytest.fixture(scope="module")
def of_tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("ultralytics")
    folder = tmp_path_factory.mktemp("tasks")
    settings = {"YOLO_CONFIG_DIR": str(folder), "YOLO_OFFLINE": "1", "YOLO_VERBOSE": "0"}
    done = warm.completed(folder, "-c", WRITE_TASKS, str(Path(__file__).parents[2]), *NETWORKS, environment=settings)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("name", NETWORKS)
def test_our_networks_of_each_task_compute_as_theirs(of_tasks: Path, name: str) -> None:
    expected = torch.load(of_tasks / f"{name}.pth", weights_only=True)
    model: Any = open_model(parse_spec(f"mine={of_tasks / name}.pt"), of_tasks)
    assert (model.name, model.architecture) == ("mine", name)
    kind = name.partition("-")[2]
    assert model.task == {"": "detect", "seg": "segment", "pose": "pose", "obb": "obb", "cls": "classify"}[kind]
    network, images = model.network().double(), expected["images"].double()
    theirs = expected["outputs"][0]
    with torch.inference_mode():
        found = network.compute(images)
    if kind == "cls":
        torch.testing.assert_close(found[0].softmax(1), theirs, atol=1e-5, rtol=1e-4)
        return
    boxes, scores, classes, extras = found[:4]
    rows = theirs.transpose(1, 2)
    count = len(model.labels)
    if not kind:
        centres, strides = (each[extras] for each in anchors(*images.shape[2:]))
        sides = torch.cat((centres - boxes[..., :2], centres + boxes[..., 2:]), 2) * strides[..., None]
        boxes, rows = sides, rows.gather(1, extras.long()[..., None].expand(-1, -1, rows.shape[2]))
    best, wanted = rows[..., 4 : 4 + count].max(2)
    # BatchNorm is fused here and not there; YOLO11 and YOLO26 have more layers of it behind each other.
    rounding = 1 if name.startswith("yolov8") else 10
    torch.testing.assert_close(scores, best, atol=1e-5 * rounding, rtol=1e-4)
    assert (classes == wanted).float().mean() > 0.999
    centred = rows[..., :4]
    if kind != "obb":
        centred = torch.cat((centred[..., :2] - centred[..., 2:] / 2, centred[..., :2] + centred[..., 2:] / 2), 2)
    torch.testing.assert_close(boxes, centred, atol=5e-3, rtol=1e-4)
    if not kind:
        return
    torch.testing.assert_close(extras, rows[..., 4 + count :], atol=2e-2 if rounding > 1 else 5e-3, rtol=1e-4)
    if kind == "seg":
        torch.testing.assert_close(found[4], expected["outputs"][1], atol=1e-4 * rounding, rtol=1e-3)
    if kind == "pose":
        assert model.adapter.keypoints == (17, 3)


def test_a_file_of_another_task_is_refused_in_a_sentence(of_tasks: Path) -> None:
    with pytest.raises(WeightsError, match=r"not of yolov8n-pose"):
        open_model(parse_spec(f"mine=yolov8n-pose:{of_tasks / 'yolov8n-seg.pt'}"), of_tasks)
    with pytest.raises(WeightsError, match=r"size of yolov8n-seg, not of yolov8s-seg"):
        open_model(parse_spec(f"mine=yolov8s-seg:{of_tasks / 'yolov8n-seg.pt'}"), of_tasks)
    with pytest.raises(WeightsError, match=r"of yolo11n, not of yolov8n"):
        open_model(parse_spec(f"mine=yolov8n:{of_tasks / 'yolo11n.pt'}"), of_tasks)
    with pytest.raises(WeightsError, match=r"steps of its own, .*bicubic.*: serve its export"):
        open_model(parse_spec(f"mine={of_tasks / 'yolo11n-cls-own.pt'}"), of_tasks)
