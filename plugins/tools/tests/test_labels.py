"""Labelled images for `anychip validate`: a folder for each class, COCO's JSON, and the accuracy that comes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from anychip_tools.validation.labels import Labelled, by_folder, measured_accuracy, of_coco
from app.arguments import CommandError
from models import open_model, parse_spec
from models.tasks.accuracy import Boxes, mean_average_precision

LABELS = ("cat", "dog", "2")


def image(path: Path, grey: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (64, 48), (grey, grey, grey)).save(path)
    return path


def coco(folder: Path, **changes: Any) -> Path:
    document = {
        "images": [{"id": 7, "file_name": "a.png"}, {"id": 8, "file_name": "b.png"}],
        "categories": [{"id": 1, "name": "Dog"}, {"id": 3, "name": "cat"}, {"id": 90, "name": "zebra"}],
        "annotations": [
            {"image_id": 7, "category_id": 1, "bbox": [10, 20, 30, 5]},
            {"image_id": 7, "category_id": 90, "bbox": [0, 0, 9, 9]},
            {"image_id": 7, "category_id": 3, "bbox": [0, 0, 9, 9], "iscrowd": 1},
            {"image_id": 99, "category_id": 3, "bbox": [0, 0, 9, 9]},
        ],
    }
    file = folder / "labels.json"
    file.write_text(json.dumps({**document, **changes}))
    return file


def test_a_folder_is_named_by_a_class_s_label_or_number(tmp_path: Path) -> None:
    dog = image(tmp_path / "Dog" / "a.png")
    deeper = image(tmp_path / "0" / "below" / "b.jpg")
    third = image(tmp_path / "2" / "c.png")
    found = {each.file: each.truth for each in by_folder(tmp_path, LABELS)}
    assert found == {dog: 1, deeper: 0, third: 2}


@pytest.mark.parametrize("place", ["a.png", "horse/a.png", "3/a.png"])
def test_an_image_that_no_class_can_be_told_of_is_refused_by_name(tmp_path: Path, place: str) -> None:
    image(tmp_path / place)
    with pytest.raises(CommandError, match=r"a\.png is not in a folder named by one of the 3 classes"):
        by_folder(tmp_path, LABELS)


def test_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="no image"):
        by_folder(tmp_path, LABELS)


def test_coco_s_categories_go_by_name_and_crowds_and_strangers_are_left_out(tmp_path: Path) -> None:
    first, second = of_coco(coco(tmp_path), tmp_path / "images", LABELS)
    assert first.file == tmp_path / "images" / "a.png"
    assert first.truth.boxes.tolist() == [[10, 20, 40, 25]]
    assert first.truth.classes.tolist() == [1]
    assert len(second.truth.boxes) == 0, "an image without objects counts: what is found there is wrong"


def test_what_is_not_coco_s_json_is_refused_in_a_sentence(tmp_path: Path) -> None:
    for changes in ({"images": 3}, {"categories": [{"id": 1}]}):
        with pytest.raises(CommandError, match="not COCO's JSON"):
            of_coco(coco(tmp_path, **changes), tmp_path, LABELS)
    with pytest.raises(CommandError, match="no object of a class that the model knows"):
        of_coco(coco(tmp_path, annotations=[]), tmp_path, LABELS)


class ByBrightness:
    """Answers each image with the class that its brightness stands for: 0, 10, 20, …"""

    batch_sizes = (1, 2)

    def run(self, pixels: Any) -> tuple[Any, ...]:
        logits = np.zeros((len(pixels), 1000), dtype=np.float32)
        logits[np.arange(len(pixels)), pixels[:, 112, 112, 0] // 10] = 9
        return (logits,)


def test_top1_counts_what_can_be_read_and_every_batch(tmp_path: Path) -> None:
    model = open_model(parse_spec("resnet18:random"), tmp_path)
    labelled = [Labelled(image(tmp_path / f"{number}.png", 10 * number), number) for number in range(3)]
    labelled.append(Labelled(image(tmp_path / "wrong.png", 50), 6))
    (tmp_path / "broken.png").write_text("no image")
    labelled.insert(1, Labelled(tmp_path / "broken.png", 0))
    found = measured_accuracy(model, ByBrightness(), labelled)  # type: ignore[arg-type]
    assert found == {"top1": 0.75, "images": 4}
    with pytest.raises(CommandError, match="none of the labelled images"):
        measured_accuracy(model, ByBrightness(), [labelled[1]])  # type: ignore[arg-type]


def test_mean_average_precision_is_over_ten_overlaps() -> None:
    """A box that covers 0.72 of the true one is right at 0.5, 0.55, … 0.7: five of ten."""
    truth = [Boxes(np.array([[0, 0, 100, 10]], np.float32), np.array([4]), np.ones(1, np.float32))]
    box = {"x1": 0, "y1": 0, "x2": 72, "y2": 10}
    answers = [{"detections": [{"class_id": 4, "score": 0.9, "box": box}]}]
    assert mean_average_precision(truth, answers) == pytest.approx(0.5)
