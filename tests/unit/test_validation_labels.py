"""Labels of `anychip validate`: folders of classes, COCO's JSON, and the accuracy that follows from them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from app.tools.arguments import CommandError
from app.tools.validation.labels import accuracy, by_folder, of_coco
from models import open_model, parse_spec

BRIGHT, DARK = 250, 5


@pytest.fixture
def folder(tmp_path):
    """Dark images in the folder of class 0, bright ones in that of class 1; one of them is no image."""
    for name, level in (("0", DARK), ("goldfish", BRIGHT)):
        (tmp_path / name).mkdir()
        for number in range(2):
            Image.new("RGB", (32, 24), (level, level, level)).save(tmp_path / name / f"{number}.png")
    (tmp_path / "0" / "broken.png").write_bytes(b"no image")
    return tmp_path


@pytest.fixture(scope="module")
def model():
    return open_model(parse_spec("resnet18:random"), Path())


def looking(right):
    """An executable that sees brightness: class 1 where it is bright, or the other way round."""

    def run(pixels):
        logits = np.zeros((len(pixels), 1000), dtype=np.float32)
        bright = pixels.reshape(len(pixels), -1).mean(1) > 128
        logits[np.arange(len(pixels)), np.where(bright == right, 1, 0)] = 9
        return (logits,)

    return SimpleNamespace(batch_sizes=(2,), run=run)


@pytest.mark.parametrize(("right", "top1"), [(True, 1.0), (False, 0.0)])
def test_folders_are_classes_by_label_or_number_and_broken_files_are_left_out(folder, model, right, top1):
    images = by_folder(folder, model.labels)
    assert sorted(each.truth for each in images) == [0, 0, 0, 1, 1]
    found = accuracy(model, looking(right), images, lambda _: None)
    assert found == {"top1": top1, "images": 4}


def test_a_folder_of_no_class_is_named(folder, model):
    (folder / "unicorn").mkdir()
    Image.new("RGB", (8, 8)).save(folder / "unicorn" / "a.png")
    with pytest.raises(CommandError, match="unicorn"):
        by_folder(folder, model.labels)


def test_coco_s_boxes_are_corners_by_the_categories_names(tmp_path):
    document = {
        "categories": [{"id": 7, "name": "Cat"}, {"id": 9, "name": "unknown"}],
        "images": [{"id": 1, "file_name": "a.jpg"}, {"id": 2, "file_name": "b.jpg"}],
        "annotations": [
            {"image_id": 1, "category_id": 7, "bbox": [10, 20, 30, 40]},
            {"image_id": 1, "category_id": 9, "bbox": [0, 0, 1, 1]},
            {"image_id": 1, "category_id": 7, "bbox": [0, 0, 9, 9], "iscrowd": 1},
        ],
    }
    file = tmp_path / "labels.json"
    file.write_text(json.dumps(document))
    first, second = of_coco(file, tmp_path, ("dog", "cat"))
    assert first.truth.boxes.tolist() == [[10, 20, 40, 60]]
    assert first.truth.classes.tolist() == [1]
    assert second.truth.boxes.shape == (0, 4)
    with pytest.raises(CommandError, match="no object"):
        of_coco(file, tmp_path, ("dog",))
    file.write_text("[]")
    with pytest.raises(CommandError, match="COCO"):
        of_coco(file, tmp_path, ("dog",))
