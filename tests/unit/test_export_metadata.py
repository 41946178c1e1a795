"""What exported files and their sidecars say: whatever that is, it is understood or refused in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from models.contract.errors import WeightsError
from models.contract.resize import Centre
from models.exports.layouts import interpret
from models.exports.metadata import TASKS, Sidecar, description, read_sidecar, yaml_metadata

KEYS = ("task", "names", "imgsz", "stride", "kpt_shape", "args", "end2end", "head", "description", "version", "license")
NUMBERS = st.integers(-3, 9000) | st.floats() | st.booleans() | st.none()
PLAIN = st.recursive(
    NUMBERS | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.integers(-1, 4) | st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=8,
)
VALUES = PLAIN | PLAIN.map(str) | st.sampled_from([*TASKS, "{0: 'car'}", "[64, 64]", "[17, 3]", "{'nms': True}"])
SIDECARS = st.builds(
    Sidecar,
    task=st.sampled_from([None, *TASKS]),
    layout=st.sampled_from([None, "yolov5", "yolov8", "rows", "rtdetr", "detr", "rfdetr", "yolox"]),
    labels=st.sampled_from([None, "coco", ["a", "b"], {0: "a"}, {1: "a"}]),
    size=st.sampled_from([None, 64, (64, 96)]),
    keypoints=st.sampled_from([None, (3, 3), (0, 0), (-1, 3)]),
)
SHAPES = st.lists(st.lists(st.sampled_from([1, 2, 4, 5, 6, 7, 32, 84, 252, 300]), max_size=5), max_size=4)


def sentence_of(call: Callable[[], object], error: type[Exception]) -> str:
    """Return the message of a refused call; empty where it is not refused."""
    try:
        call()
    except error as found:
        return str(found) or "nothing"
    return ""


@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=7), st.none() | SIDECARS, SHAPES)
@example({"task": "pose", "kpt_shape": "[17, 3]"}, None, [[56, 84]])
@example({"task": "detect", "names": "{0: 'a', 2: 'b'}"}, None, [[6, 84]])
@example({"stride": "32", "names": "['a']"}, None, [[252, 6]])
@example({"task": "detect", "names": "{[]: 'a'}"}, None, [[6, 84]])
def test_any_metadata_is_understood_or_refused_in_a_sentence(
    metadata: dict[str, Any], sidecar: Sidecar | None, shapes: list[list[int]]
) -> None:
    def understood() -> None:
        found = description(metadata, sidecar, None)
        if found is not None:
            how = interpret(found, [[1, *shape] for shape in shapes], found.size or (64, 64))
            assert how.takes == found.takes

    sentence = sentence_of(understood, ValueError)
    assert "\n" not in sentence
    assert sentence != "nothing"


@given(st.binary(max_size=60) | PLAIN.map(lambda value: json.dumps(value).encode()), st.sampled_from([*KEYS, "size"]))
def test_any_sidecar_is_read_or_refused_in_a_sentence(tmp_path_factory: Any, content: bytes, key: str) -> None:
    folder: Path = tmp_path_factory.mktemp("sidecar", numbered=True)
    for beside in (content, b'{"%s": %s, "task": "detect"}' % (key.encode(), content or b"1")):
        (folder / "best.json").write_bytes(beside)
        sentence = sentence_of(lambda: read_sidecar(folder / "best.onnx"), WeightsError)
        assert "\n" not in sentence
        assert not sentence or sentence.startswith("best.json")


@pytest.mark.parametrize("stated", ["chanels=bgr", "pad=", "pad=1&pad=2", '{"maen":1}', '{"1":2,"1":2}', '{"epoch":1}'])
def test_a_misspelt_an_empty_and_a_doubled_key_are_refused(tmp_path: Path, stated: str) -> None:
    (tmp_path / "best.json").write_text(stated)
    sentence = sentence_of(lambda: read_sidecar(tmp_path / "best.onnx", stated.partition("{")[0]), WeightsError)
    assert bool(sentence) != ("epoch" in stated)  # Another program's.


def test_a_bomb_of_yaml_is_refused_before_it_is_unfolded(tmp_path: Path) -> None:
    """Each line ten times the one before: a kilobyte would be gigabytes of text."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    (tmp_path / "metadata.yaml").write_text("\n".join([*lines, "task: detect", "names: {0: *a11}"]))
    with pytest.raises(ValueError, match="cannot be read as YAML: it has aliases"):
        yaml_metadata(tmp_path / "best.xml")


@pytest.mark.parametrize(
    "text",
    [
        *("task: " + "[" * 300_000, "task: " + "{a: " * 200_000, "- " * 100_000 + "x", "x: [" + "a, " * 300_000 + "a]"),
        *("x: 1" + ":1" * 3000, "task: !!bool x", "x: !!int ''", "x: !!float '1" + ":1" * 400 + ".'"),
    ],
    ids=["lists", "maps", "dashes", "long", "base 60", "no bool", "no int", "no float"],
)
def test_yaml_is_as_deep_and_long_as_such_files_are(tmp_path: Path, text: str) -> None:
    """The C library's reader ends the process where it is nested deep enough."""
    (tmp_path / "metadata.yaml").write_text(text)
    with pytest.raises(ValueError, match="cannot be read as YAML"):
        yaml_metadata(tmp_path / "best.xml")


def test_metadata_is_read_as_yaml(tmp_path: Path) -> None:
    (tmp_path / "metadata.yaml").write_text(
        "description: 'Ultralytics YOLO26n '\nversion: 8.4.190\nstride: 32\ntask: pose\nimgsz:\n- 64\n- 96\n"
        "names:\n  0: person\n  1: 'n: o'\nkpt_shape:\n- 17\n- 3\nargs:\n  nms: false\nend2end: true\n"
    )
    about: Any = description(yaml_metadata(tmp_path / "best.xml"), None, None)
    assert (about.task, about.size, about.labels, about.keypoints) == ("pose", (64, 96), ("person", "n: o"), (17, 3))
    assert (about.end_to_end, about.is_unrolled) == (True, False)
    (tmp_path / "metadata.yaml").write_text("task: semantic\nversion: 8.4.190\nnames: {0: road}\n")
    semantic: Any = description(yaml_metadata(tmp_path / "best.xml"), None, None)
    assert (semantic.task, semantic.resize) == ("segment_semantic", "letterbox")
    assert semantic.labels == ("background", "road")
    (tmp_path / "metadata.yaml").write_text("names: [")
    with pytest.raises(ValueError, match=r"metadata\.yaml beside it cannot be read"):
        yaml_metadata(tmp_path / "best.xml")
    (tmp_path / "metadata.yaml").unlink()
    (tmp_path / "best.yaml").write_text("stride: 32\nnames: [a, b]\n")
    yolov5: Any = description(yaml_metadata(tmp_path / "best.xml"), None, None)
    assert (yolov5.layout, yolov5.labels) == ("yolov5", ("a", "b"))


@pytest.mark.parametrize(
    ("processor", "size", "shorter"),
    [
        ({"size": {"shortest_edge": 224}, "crop_pct": 0.875}, 224, 256),
        ({"size": {"shortest_edge": 224}, "crop_pct": 0.875}, 320, 365),
        ({"size": {"shortest_edge": 256}, "crop_size": 224, "do_center_crop": True}, 518, 592),
    ],
)
def test_a_folders_crop_grows_with_the_input(
    tmp_path: Path, processor: dict[str, Any], size: int, shorter: int
) -> None:
    """ConvNeXt's processor does so for another size. The others would leave a black frame."""
    kind = "ConvNextImageProcessor" if "crop_pct" in processor else "BitImageProcessor"
    means = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 3}
    config = {"model_type": "convnext", "architectures": ["ConvNextForImageClassification"], "image_size": 224}
    (tmp_path / "config.json").write_text(json.dumps({**config, "id2label": {"0": "a", "1": "b"}}))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": kind, **processor, **means}))
    stated = read_sidecar(tmp_path / "model.safetensors")
    assert stated is not None
    resize = stated.resizing((size, size), "centre")
    assert isinstance(resize, Centre)
    assert resize.shorter == shorter
    (tmp_path / "model.json").write_text(json.dumps({"size": size, "resize_to": 600}))
    of_owner = read_sidecar(tmp_path / "model.safetensors")
    assert of_owner is not None
    assert of_owner._scaled((size, size)) == 600
