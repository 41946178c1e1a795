"""`anychip predict` over many images: what is read, what is written, and what is left after an interruption."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from anychip_tools.prediction.drawing import draw
from anychip_tools.prediction.files import COLUMNS, FileOutcome, ImageSource, Journal, convert, find_images, read_lines
from app.arguments import CommandError
from app.cli import main
from models.tasks.instances import written

ROOT = Path(__file__).parents[2]
NULL = ("--weights", "random", "--device", "null", "--engine", "auto", "--precision", "auto")
BOX = {"x1": 1.0, "y1": 2.0, "x2": 11.0, "y2": 22.0}
DETECTION = {"label": "cat", "class_id": 3, "score": 0.5, "box": BOX}


def image(path, size=(8, 8)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, "red").save(path)
    return path


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_table(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


def outcome(name, *detections, error=""):
    prediction = None if error else {"detections": list(detections), "width": 30, "height": 40}
    return FileOutcome(ImageSource(name, name), prediction, error)


def test_directories_globs_lists_and_files_are_read_in_order(tmp_path):
    names = ["b/two.PNG", "b/a/one.jpg", "c.webp", "notes.txt"]
    for name in names[:3]:
        image(tmp_path / name)
    (tmp_path / "notes.txt").write_text(f"{tmp_path}/c.webp\n\n{tmp_path}/missing.jpg\n")
    found = list(find_images([str(tmp_path)]))
    assert [os.path.relpath(each.path, tmp_path) for each in found] == ["b/a/one.jpg", "b/two.PNG", "c.webp"]
    assert [each.relative for each in found] == ["b/a/one", "b/two", "c"]
    assert [each.path for each in find_images([f"{tmp_path}/*.webp"])] == [f"{tmp_path}/c.webp"]
    listed = [each.path for each in find_images([f"@{tmp_path}/notes.txt"])]
    assert listed == [f"{tmp_path}/c.webp", f"{tmp_path}/missing.jpg"]
    assert [each.path for each in find_images(["notes.txt"])] == ["notes.txt"]
    with pytest.raises(CommandError, match="nothing matches"):
        list(find_images([f"{tmp_path}/*.tiff"]))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(["good", "bad"]), max_size=12), st.integers(0, 400))
def test_whatever_an_interruption_leaves_is_gone_on_with(tmp_path_factory, kinds, cut):
    path = tmp_path_factory.mktemp("journal") / "out.jsonl"
    with Journal(path, "m", resume=False) as journal:
        for number, kind in enumerate(kinds):
            journal.write(outcome(f"{number}.jpg", error="" if kind == "good" else "broken"), "w")
    whole = path.read_bytes()
    path.write_bytes(whole[: max(0, len(whole) - cut)])
    left = {json.loads(line)["file"] for line in path.read_bytes().split(b"\n")[:-1] if b"error" not in line}
    with Journal(path, "m", resume=True) as journal:
        assert journal.done == len(left)
        for number in range(len(kinds)):
            assert journal.holds(f"{number}.jpg") == (f"{number}.jpg" in left)
            if not journal.holds(f"{number}.jpg"):
                journal.write(outcome(f"{number}.jpg"), "w")
    assert sorted(each["file"] for each in read_lines(path)) == sorted(f"{number}.jpg" for number in range(len(kinds)))


def test_another_models_answers_are_not_gone_on_with(tmp_path):
    path = tmp_path / "out.jsonl"
    with Journal(path, "one", resume=False) as journal:
        journal.write(outcome("a.jpg"), "w")
    before = path.read_bytes()
    with pytest.raises(CommandError, match="answers of one, not of two"):
        Journal(path, "two", resume=True)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_csv_parquet_and_coco_hold_what_the_lines_hold(tmp_path):
    path = tmp_path / "out.jsonl"
    with Journal(path, "m", resume=False) as journal:
        journal.write(outcome("a.jpg", DETECTION, {**DETECTION, "class_id": 5, "label": "dog"}), "w")
        journal.write(outcome("b.jpg", error="broken"), "w")
        journal.write(outcome("c.jpg"), "w")
    convert(path, tmp_path / "out.csv")
    table = read_table(tmp_path / "out.csv")
    assert tuple(table[0]) == COLUMNS
    assert table[1] == ["a.jpg", "30", "40", "cat", "3", "0.5", "1.0", "2.0", "11.0", "22.0", ""]
    assert [row[0] for row in table[1:]] == ["a.jpg", "a.jpg", "b.jpg", "c.jpg"]
    assert table[3][-1] == "broken"
    convert(path, tmp_path / "out.json")
    coco = json.loads((tmp_path / "out.json").read_text())
    assert [(each["id"], each["file_name"]) for each in coco["images"]] == [(1, "a.jpg"), (2, "c.jpg")]
    assert coco["annotations"][0] == {
        "id": 1,
        "image_id": 1,
        "category_id": 3,
        "score": 0.5,
        "bbox": [1.0, 2.0, 10.0, 20.0],
        "area": 200.0,
        "iscrowd": 0,
    }
    assert coco["categories"] == [{"id": 3, "name": "cat"}, {"id": 5, "name": "dog"}]
    parquet = pytest.importorskip("pyarrow.parquet")
    convert(path, tmp_path / "out.parquet")
    columns = parquet.read_table(tmp_path / "out.parquet").to_pydict()
    assert columns["label"] == ["cat", "dog", None, None]
    assert columns["x2"][:2] == [11.0, 11.0]
    assert columns["error"] == [None, None, "broken", None]


def test_coco_holds_masks_turned_boxes_and_points_and_is_written_whole_or_not(tmp_path):
    mask, square = {"size": [30, 40], "counts": "e24j00Z"}, [[0, 0], [4, 0], [4, 4], [0, 4]]
    forms = {"mask": mask}, {"segments": [[[1, 1], [2, 2]], square]}, {"mask": None}, {"corners": square[:3]}
    with Journal(tmp_path / "out.jsonl", "m", resume=False) as journal:
        found = [{**DETECTION, **form} for form in (*forms, {"keypoints": [{"x": 1.5, "y": 2, "score": 0.9}]})]
        journal.write(outcome("a.jpg", *found), "w")
    convert(tmp_path / "out.jsonl", tmp_path / "out.json")
    whole = (tmp_path / "out.json").read_bytes()
    written = json.loads(whole)["annotations"]
    flat = [0, 0, 4, 0, 4, 4, 0, 4]
    assert [each.get("segmentation") for each in written] == [mask, [flat], None, [flat[:6]], None]
    assert [each["area"] for each in written] == [8, 16, 200, 8, 200]
    assert (written[-1]["keypoints"], written[-1]["num_keypoints"]) == ([1.5, 2, 1], 1)
    with Journal(tmp_path / "other.jsonl", "m", resume=False) as journal:
        journal.write(FileOutcome(ImageSource("a.jpg", "a"), {"classes": [], "width": 3, "height": 4}), "w")
    with pytest.raises(CommandError, match=r"write \.jsonl or \.csv"):
        convert(tmp_path / "other.jsonl", tmp_path / "out.json")
    assert (tmp_path / "out.json").read_bytes() == whole
    assert len(list(tmp_path.iterdir())) == 3


def test_masks_are_drawn_in_every_form_and_what_a_form_has_no_place_for_is_named(tmp_path):
    file = image(tmp_path / "a.png", (80, 60))
    part = np.zeros((12, 20), np.uint8)
    part[2:9, 3:15] = 1
    for form in ("png", "rle"):
        [mask] = written(form, [(part, 8, 30)], 80, 60)
        found = {"label": "cat", "score": 0.5, "classes": [{"label": "tabby"}], "mask": mask}
        drawn = np.array(Image.open(draw(file.read_bytes(), {"detections": [found]}, tmp_path / "drawn.png")))
        changed = (drawn != np.array(Image.open(file)))[25:].any(2)
        assert (changed == (np.pad(part, ((5, 18), (8, 52))) > 0)).all(), form
    with Journal(tmp_path / "out.jsonl", "m", resume=False) as journal:
        journal.write(outcome("a.jpg", {**DETECTION, **found}), "w")
    assert convert(tmp_path / "out.jsonl", tmp_path / "out.csv") == ["classes", "mask"]
    assert convert(tmp_path / "out.jsonl", tmp_path / "out.json") == ["classes"]


def test_errors_are_the_files_own_and_the_exit_code_says_so(tmp_path, capsys):
    for name in ("a", "c"):
        image(tmp_path / "in" / f"{name}.png")
    (tmp_path / "in" / "b.jpg").write_text("no image")
    output = tmp_path / "out.jsonl"
    arguments = ["predict", "yolov8n", str(tmp_path / "in"), str(tmp_path / "none.jpg"), "--output", str(output), *NULL]
    assert main(arguments) == 1
    written = {Path(each["file"]).name: each for each in lines(output)}
    assert {name: "error" in each for name, each in written.items()} == {
        "a.png": False,
        "b.jpg": True,
        "c.png": False,
        "none.jpg": True,
    }
    assert "not an image" in written["b.jpg"]["error"]
    assert written["a.png"]["width"] == 8
    said = capsys.readouterr().err
    assert "b.jpg: " in said
    assert "4 images, 2 failed" in said
    assert main(arguments) == 1
    assert "exists: --resume goes on with it" in capsys.readouterr().err
    image(tmp_path / "in" / "b.jpg")
    image(tmp_path / "none.jpg")
    image(tmp_path / "in" / "latin-\udce9.png")
    assert main([*arguments, "--resume"]) == 0
    assert "3 images, 0 failed" in capsys.readouterr().err
    assert Path(lines(output)[-2]["file"]).name == "latin-\\udce9.png"
    assert main([*arguments, "--resume"]) == 0
    assert len(lines(output)) == 5
    assert main(["predict", "resnet18", str(tmp_path / "in"), "--output", str(tmp_path / "out.json"), *NULL]) == 1
    assert "COCO JSON holds boxes" in capsys.readouterr().err
    assert (tmp_path / "out.json.partial.jsonl").read_bytes() == b""


@pytest.mark.parametrize(("depth", "many"), [(1, False), (2, False), (2, True)])
def test_answers_are_in_order_however_many_batches_a_block_has_and_a_device_takes_at_a_time(
    tmp_path, monkeypatch, capsys, depth, many
):
    if many:  # A block of several batches, as no file's bytes are kept.
        monkeypatch.setattr("anychip_tools.predict._MANY", 10)
    for number in range(18):
        image(tmp_path / "in" / f"{number:02}.png", (8 + number, 8))
    (tmp_path / "in" / "05.png").write_text("no image")
    Image.new("RGB", (17, 8), "blue").save(tmp_path / "in" / "09.png")
    output = tmp_path / "out.jsonl"
    arguments = ["predict", "resnet18", str(tmp_path / "in"), "--output", str(output), "--batch-size", "4", *NULL]
    arguments += ["--decoders", "2"] + ([] if many else ["--save", str(tmp_path / "drawn")])
    assert main([*arguments, "--null", f"delay_ms=2,depth={depth}"]) == 1
    assert [line.get("width", 0) for line in lines(output)] == [0 if n == 5 else 8 + n for n in range(18)]
    assert many or len(list((tmp_path / "drawn").iterdir())) == 17
    # A device that fails ends the command; what was answered before is written.
    capsys.readouterr()
    assert main([*arguments, "--overwrite", "--null", f"delay_ms=2,depth={depth},fail=#0000ff"]) == 1
    assert "told to fail" in capsys.readouterr().err
    assert [Path(line["file"]).name for line in lines(output)] == [f"{number:02}.png" for number in range(8)]


def test_drawings_keep_the_folders_of_their_images(tmp_path):
    image(tmp_path / "in" / "x" / "same.png", (64, 48))
    image(tmp_path / "in" / "y" / "same.png", (64, 48))
    output = ("--output", str(tmp_path / "out.csv"), "--save", str(tmp_path / "drawn"))
    assert main(["predict", "resnet18", str(tmp_path / "in"), *output, *NULL]) == 0
    drawn = sorted(str(path.relative_to(tmp_path / "drawn")) for path in (tmp_path / "drawn").rglob("*.png"))
    assert drawn == ["x/same.png", "y/same.png"]
    assert not list(tmp_path.glob("*.partial.jsonl"))
    assert len(read_table(tmp_path / "out.csv")) == 1 + 2 * 5


def test_a_killed_run_goes_on_where_it_was(tmp_path):
    for number in range(60):
        image(tmp_path / "in" / f"{number:02}.png")
    output = tmp_path / "out.jsonl"
    command = ["predict", "resnet18", str(tmp_path / "in"), "--output", str(output), *NULL]
    slow = [sys.executable, "-m", "app", *command, "--null", "delay_ms=200", "--batch-size", "2"]
    process = subprocess.Popen(slow, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        while process.poll() is None and (not output.exists() or output.read_bytes().count(b"\n") < 4):
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    before = output.read_bytes()
    with output.open("ab") as file:
        file.write(b'{"file":"cut o')
    assert 4 <= before.count(b"\n") < 60
    assert main([*command, "--resume"]) == 0
    assert output.read_bytes().startswith(before)
    assert sorted(Path(each["file"]).name for each in lines(output)) == [f"{number:02}.png" for number in range(60)]


def test_what_a_worker_prints_is_no_part_of_the_answer(tmp_path):
    """As a compiler does from C++, where no redirection of Python's reaches."""
    (tmp_path / "printing.py").write_text("import os\nos.write(1, b'a graph of the network\\n')\n")
    image(tmp_path / "a.png")
    command = ["predict", "resnet18", str(tmp_path / "a.png"), "--json", "--plugins", "printing", *NULL]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT), *sys.path))}
    done = subprocess.run(
        [sys.executable, "-m", "app", *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert "a graph of the network" in done.stderr
    assert len(json.loads(done.stdout)["predictions"]) == 1
