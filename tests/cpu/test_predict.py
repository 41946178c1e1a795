"""`anychip predict` over many images: what is read, what is written, and what is left after an interruption."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import orjson
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from anychip_tools.null import backend as null
from anychip_tools.prediction.image_sources import ImageSource, find_images
from anychip_tools.prediction.offline import LocalPredictor
from anychip_tools.prediction.offline_decoding import Decode, DecodingProcesses, DecodingThreads, _progress
from anychip_tools.prediction.outcomes import FileOutcome, Journal, read_lines
from anychip_tools.prediction.tables import COLUMNS, convert
from app.arguments import CommandError
from app.cli import main
from app.config import Settings
from backends import host
from models import Options, open_model, parse_spec
from tests.support.photographs import FILES

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


def test_memory_does_not_grow_with_the_number_of_answers(tmp_path):
    path = tmp_path / "out.jsonl"

    def write(count):
        tracemalloc.reset_peak()
        with Journal(path, "m", resume=False) as journal:
            for number in range(count):
                journal.write(outcome(f"{number}.jpg", DETECTION), "w")
        for kind in ("csv", "json"):
            convert(path, tmp_path / f"out.{kind}")
        return tracemalloc.get_traced_memory()[1]

    tracemalloc.start()
    try:
        write(100)  # Whatever is made once.
        few, many = write(500), write(5000)
    finally:
        tracemalloc.stop()
    assert many < 1.2 * few + 100_000


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
    assert main([*arguments, "--resume"]) == 0
    assert "2 images, 0 failed" in capsys.readouterr().err
    assert len(lines(output)) == 4


@pytest.mark.parametrize(("depth", "by_processes"), [(1, False), (2, False), (2, True)])
def test_answers_are_in_order_however_images_are_decoded_and_however_many_batches_a_device_takes_at_a_time(
    tmp_path, monkeypatch, capsys, depth, by_processes
):
    if by_processes:
        monkeypatch.setattr("anychip_tools.predict._MANY", 10)
    for number in range(18):
        image(tmp_path / "in" / f"{number:02}.png", (8 + number, 8))
    (tmp_path / "in" / "05.png").write_text("no image")
    Image.new("RGB", (17, 8), "blue").save(tmp_path / "in" / "09.png")
    output = tmp_path / "out.jsonl"
    arguments = ["predict", "resnet18", str(tmp_path / "in"), "--output", str(output), "--batch-size", "4", *NULL]
    arguments += ["--decoders", "2", "--save", str(tmp_path / "drawn")]
    assert main([*arguments, "--null", f"delay_ms=2,depth={depth}"]) == 1
    assert [line.get("width", 0) for line in lines(output)] == [0 if n == 5 else 8 + n for n in range(18)]
    assert len(list((tmp_path / "drawn").iterdir())) == 17
    # A device that fails ends the command; what was answered before is written.
    capsys.readouterr()
    assert main([*arguments, "--overwrite", "--null", f"delay_ms=2,depth={depth},fail=#0000ff"]) == 1
    assert "told to fail" in capsys.readouterr().err
    assert [Path(line["file"]).name for line in lines(output)] == [f"{number:02}.png" for number in range(8)]
    left = [each for each in psutil.Process().children() if "offline_decoding.main()" in " ".join(each.cmdline())]
    assert left == []


def test_a_process_that_ends_while_it_decodes_is_named_with_its_files(tmp_path):
    paths = [str(image(tmp_path / f"{number}.png")) for number in range(2)]
    model = open_model(parse_spec("resnet18:random"), tmp_path)
    decoding = DecodingProcesses(Decode(model, 1_000_000, keeps_encoded=True), 1, blocks=2, block_size=2)
    try:
        decoding.wait()
        decoding.begin(1, paths)
        assert [(each.placement.width, each.encoded) for each in decoding.finish()] == [
            (8, Path(path).read_bytes()) for path in paths
        ]
        assert (decoding.pixels[1] == torch.tensor([255, 0, 0], dtype=torch.uint8)).all(), "red, in its own batch"
        assert not decoding.pixels[0].any()
        os.kill(decoding._processes[0].pid, signal.SIGSTOP)
        decoding.begin(0, paths)
        os.kill(decoding._processes[0].pid, signal.SIGKILL)
        with pytest.raises(CommandError, match=r"exit code -9\) with one of .*0\.png to .*1\.png"):
            decoding.finish()
        with pytest.raises(CommandError, match=r"has ended"):
            decoding.begin(1, paths)
    finally:
        decoding.close()


def test_a_process_that_is_held_up_leaves_its_files_to_the_others(tmp_path):
    paths = [str(image(tmp_path / f"{number:02}.png", (8 + number, 8))) for number in range(12)]
    model = open_model(parse_spec("resnet18:random"), tmp_path)
    decoding = DecodingProcesses(Decode(model, 1_000_000, keeps_encoded=False), 2, blocks=1, block_size=12)
    try:
        decoding.wait()
        os.kill(decoding._processes[1].pid, signal.SIGSTOP)
        decoding.begin(0, paths)
        while _progress(decoding._arena, 0).tolist() != [1, 11]:
            assert decoding._processes[0].poll() is None
        os.kill(decoding._processes[1].pid, signal.SIGCONT)
        assert [each.placement.width for each in decoding.finish()] == list(range(8, 20))
    finally:
        os.kill(decoding._processes[1].pid, signal.SIGCONT)
        decoding.close()


def test_small_images_are_decoded_in_blocks_of_several_batches(tmp_path):
    """18 images in blocks of 12: three batches, and two of which the last is half full."""
    for number in range(18):
        image(tmp_path / "in" / f"{number:02}.png", (8 + number, 8))
    model = open_model(parse_spec("resnet18:random"), tmp_path)
    settings = Settings(device="null", null="delay_ms=1,depth=2", decoders=2)
    null.configure(settings.null)
    predictor = LocalPredictor(model, settings, Options(), 4, many=True)
    try:
        assert predictor.block_size == 32
        predictor.block_size = 12
        found = list(predictor.outcomes(find_images([str(tmp_path / "in")])))
    finally:
        predictor.close()
        null.configure("")
    assert [each.prediction["width"] for each in found] == [8 + number for number in range(18)]
    assert [Path(each.source.path).name for each in found] == [f"{number:02}.png" for number in range(18)]


def test_a_decoder_computes_alone_and_the_device_s_thread_with_every_core(tmp_path):
    wanted = Settings(device="cpu", engine="eager", precision="fp32", cache_dir=tmp_path, decoders=3)
    model = open_model(parse_spec("resnet18:random"), tmp_path)
    predictor = LocalPredictor(model, wanted, Options(), 1)
    try:
        assert isinstance(predictor.decoding, DecodingThreads)
        asked = [predictor.decoding.threads.submit(torch.get_num_threads) for _ in range(9)]
        assert {future.result() for future in asked} == {1}
        assert predictor._device_thread.submit(torch.get_num_threads).result() == host.core_count()
    finally:
        predictor.close()


def test_drawings_keep_the_folders_of_their_images(tmp_path):
    image(tmp_path / "in" / "x" / "same.png", (64, 48))
    image(tmp_path / "in" / "y" / "same.png", (64, 48))
    output = ("--output", str(tmp_path / "out.csv"), "--save", str(tmp_path / "drawn"))
    assert main(["predict", "resnet18", str(tmp_path / "in"), *output, *NULL]) == 0
    drawn = sorted(str(path.relative_to(tmp_path / "drawn")) for path in (tmp_path / "drawn").rglob("*.png"))
    assert drawn == ["x/same.png", "y/same.png"]
    assert not list(tmp_path.glob("*.partial.jsonl"))
    assert len(read_table(tmp_path / "out.csv")) == 1 + 2 * 5


def test_masks_boxes_and_key_points_are_drawn(tmp_path):
    from anychip_tools.prediction.drawing import draw

    source = image(tmp_path / "in.png", (100, 100)).read_bytes()
    square = [[10, 10], [60, 10], [60, 60], [10, 60]]
    plain = Image.open(draw(source, {"detections": []}, tmp_path / "plain.png")).tobytes()
    for extra in (
        {"segments": square},
        {"segments": [square]},
        {"box": BOX},
        {"corners": [{"x": x, "y": y} for x, y in square]},
        {"keypoints": [[30, 30, 0.9], [50, 50, 0.1]]},
    ):
        found = {"label": "cat", "class_id": 1, "score": 0.5, **extra}
        drawn = Image.open(draw(source, {"detections": [found]}, tmp_path / "drawn.png"))
        assert drawn.tobytes() != plain


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


RANDOM = ("--weights", "random", "--engine", "eager", "--precision", "fp32")
PHOTO = str(FILES[0])


def test_classes_are_printed_and_drawn(tmp_path, capsys):
    assert main(["predict", "resnet18", PHOTO, "--top-k", "2", "--save", str(tmp_path), *RANDOM]) == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert lines[0].startswith(f"{PHOTO} (640 x 427)")
    assert len(lines) == 3
    with Image.open(tmp_path / "china.png") as drawn, Image.open(PHOTO) as original:
        assert drawn.size == original.size
        assert drawn.tobytes() != original.tobytes()
    assert "china.png" in said.err


def test_json_of_several_images_is_printed(capsys):
    assert main(["predict", "mine=resnet18:random", PHOTO, str(FILES[1]), "--json", *RANDOM]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["model"], answer["weights"]) == ("mine", "random")
    assert list(answer["predictions"]) == [PHOTO, str(FILES[1])]
    assert len(answer["predictions"][PHOTO]["classes"]) == 5


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--output", "out.txt"], "must end with"),
        (["--resume"], "need an --output"),
        (["--output", "out.csv", "--resume", "--overwrite"], "opposite"),
        (["--url", "http://127.0.0.1:9"], "nothing answers"),
        (["--batch-size", "0"], "at least 1"),
    ],
)
def test_what_cannot_be_done_is_said_before_any_work(tmp_path, monkeypatch, capsys, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    image(tmp_path / "a.png")
    assert main(["predict", "resnet18", "a.png", *arguments, *NULL]) == 1
    assert sentence in capsys.readouterr().err


def test_a_line_that_is_none_of_ours_is_refused(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(orjson.dumps(["no", "object"]) + b"\n")
    with pytest.raises(CommandError, match="line 1"):
        list(read_lines(path))
