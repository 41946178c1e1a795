"""models.catalog: what people write, where labels come from, and what every mistake is answered with."""

from __future__ import annotations

import json
import logging
import pickle
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torchvision import models as torchvision_models

from models import ModelError, ModelSpec, UnknownModelError, WeightsError, WeightsNotFoundError, open_model, parse_spec
from models import publishers as weights_module
from models.contract.digest import sha256_of
from models.tasks.coco import COCO_CLASSES
from models.yolo.model import YOLO
from models.yolo.yolo11 import YOLO11
from models.yolo.yolov8 import YOLOv8


def classifier_file(path: Path, classes: int, labels: list[str] | None = None) -> Path:
    state = torchvision_models.mobilenet_v3_small(weights=None, num_classes=classes).state_dict()
    save_file(state, path, {"labels": json.dumps(labels)} if labels else None)
    return path


# The grammar


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("resnet50", ModelSpec("resnet50", "resnet50", "official")),
        ("a=b.onnx?size=[1,2]", ModelSpec("a", "onnx", "b.onnx", sidecar="size=[1,2]")),
        (" yolov8n ", ModelSpec("yolov8n", "yolov8n", "official")),
        ("resnet50:sample", ModelSpec("resnet50", "resnet50", "sample")),
        ("dogs=resnet50:dogs.safetensors", ModelSpec("dogs", "resnet50", "dogs.safetensors")),
        ("dogs=resnet50", ModelSpec("dogs", "resnet50", "official")),
        ("dogs=resnet50:", ModelSpec("dogs", "resnet50", "official")),
        ("dogs=resnet50:dogs.ts", ModelSpec("dogs", "resnet50", "dogs.ts")),
        ("/models/bert-base.onnx", ModelSpec("bert-base", "onnx", "/models/bert-base.onnx")),
        ("qa=/models/a=b:c/bert.v2.pt2", ModelSpec("qa", "pt2", "/models/a=b:c/bert.v2.pt2")),
        ("dogs.v2-b_1=vit_b_16:/a=b/c:d.pt", ModelSpec("dogs.v2-b_1", "vit_b_16", "/a=b/c:d.pt")),
    ],
)
def test_a_model_is_written_as_name_architecture_weights(text: str, expected: ModelSpec) -> None:
    assert parse_spec(text) == expected


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("resnt50", "resnet50"),
        ("YOLOv8n", "yolov8n"),
        ("yolo8n", "yolov8n"),
        ("mobilenetv3_small", "mobilenet_v3_small"),
    ],
)
def test_a_misspelt_model_is_answered_with_the_nearest_names(text: str, near: str) -> None:
    with pytest.raises(UnknownModelError, match=rf"did you mean .*{near}"):
        parse_spec(text)


@pytest.mark.parametrize("text", ["", "=", "a=", "qqqq", ":sample"])
def test_a_model_of_no_known_kind_is_answered_with_where_names_are_listed(text: str) -> None:
    with pytest.raises(UnknownModelError, match="weights list"):
        parse_spec(text)


@pytest.mark.parametrize("name", ["", "a b", "ä", "a/b", "../a", "-a", "a" * 65, "a=b"])
def test_a_name_that_could_not_be_part_of_an_address_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match="cannot name a model"):
        parse_spec(f"{name}=resnet50")


# Weights and labels


def test_a_fine_tuned_file_brings_its_class_count_and_labels(tmp_path: Path) -> None:
    path = classifier_file(tmp_path / "dogs.safetensors", 3, ["pug", "husky", "corgi"])
    model = open_model(parse_spec(f"dogs=mobilenet_v3_small:{path}"), tmp_path)
    assert (model.labels, model.weights) == (("pug", "husky", "corgi"), path.name)
    assert model.files is not None
    assert (model.files.source, str(model.files.file)) == (str(path), model.weights_file)
    assert pickle.loads(pickle.dumps(model)) == model
    (logits,) = model.network()(torch.zeros(1, *model.input_shape, dtype=torch.uint8))
    assert logits.shape == (1, 3)


def test_labels_have_a_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    classifier_file(tmp_path / "dogs.safetensors", 3)
    spec = ModelSpec("dogs", "mobilenet_v3_small", str(tmp_path / "dogs.safetensors"))
    (tmp_path / "labels.txt").write_text(f"pug\n{'x' * 1001}\ncorgi\n")
    with pytest.raises(WeightsError, match="3 labels, the longest of 1001 characters"):
        open_model(spec, tmp_path)
    (tmp_path / "labels.txt").write_text("pug\nhusky\ncorgi\n")
    monkeypatch.setattr("models.catalog._MAX_LABELS", 2)
    with pytest.raises(WeightsError, match="3 labels, the longest of 5 characters: 2 of"):
        open_model(spec, tmp_path)


def test_a_wrong_number_of_labels_is_an_error_that_names_both(tmp_path: Path) -> None:
    path = classifier_file(tmp_path / "dogs.safetensors", 3)
    (tmp_path / "labels.txt").write_text("pug\nhusky\n")
    with pytest.raises(WeightsError, match="3 classes, but 2 labels"):
        open_model(ModelSpec("m", "mobilenet_v3_small", str(path)), tmp_path)


def test_a_file_without_labels_gets_those_of_the_published_weights_if_they_fit(tmp_path: Path) -> None:
    path = classifier_file(tmp_path / "a.safetensors", 1000)
    labels = open_model(ModelSpec("m", "mobilenet_v3_small", str(path)), tmp_path).labels
    assert labels == tuple(torchvision_models.MobileNet_V3_Small_Weights.DEFAULT.meta["categories"])


def test_a_file_whose_labels_are_nowhere_gets_numbers_and_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = classifier_file(tmp_path / "dogs.safetensors", 3)
    with caplog.at_level(logging.WARNING, logger="models.catalog"):
        model = open_model(ModelSpec("m", "mobilenet_v3_small", str(path)), tmp_path)
    assert model.labels == ("class 0", "class 1", "class 2")
    assert "dogs.labels.txt" in caplog.text


@pytest.mark.parametrize("count", [80, 2])
def test_a_detector_file_is_opened(tmp_path: Path, count: int) -> None:
    path = tmp_path / "d.safetensors"
    save_file(YOLOv8("n", count).half().state_dict(), path)
    model = open_model(ModelSpec("d", "yolov8n", str(path)), tmp_path)
    assert isinstance(model, YOLO)
    assert model.labels == (COCO_CLASSES if count == 80 else ("class 0", "class 1"))
    assert model.network().input_shape == (640, 640, 3)


def test_published_weights_come_from_the_cache_and_are_checked_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = weights_module.official_source("mobilenet_v3_small")
    name = source.name
    torch.save(torchvision_models.mobilenet_v3_small(weights=None).state_dict(), tmp_path / name)
    with pytest.raises(WeightsError, match="not 047dcff4 as published"):
        open_model(parse_spec("mobilenet_v3_small"), tmp_path, allow_download=False)
    published = replace(source, sha256=sha256_of(tmp_path / name))
    monkeypatch.setattr(weights_module, "official_source", lambda *_: published)
    model = open_model(parse_spec("mobilenet_v3_small"), tmp_path, allow_download=False)
    assert (model.weights, model.weights_file, len(model.labels)) == ("official", str(tmp_path / name), 1000)


def test_published_weights_that_are_not_there_stop_the_start_with_advice(tmp_path: Path) -> None:
    with pytest.raises(WeightsNotFoundError, match=r"anychip weights fetch resnet50.*--weights sample"):
        open_model(parse_spec("resnet50"), tmp_path, allow_download=False)


def test_sample_weights_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_module, "SAMPLES_IN_SOURCES", tmp_path)
    path = classifier_file(tmp_path / "mobilenet_v3_small.safetensors", 2, ["disc", "ring"])
    model = open_model(parse_spec("mobilenet_v3_small:sample"), tmp_path / "cache")
    assert (model.weights, model.weights_file, model.labels) == ("sample", str(path), ("disc", "ring"))
    with pytest.raises(WeightsNotFoundError, match=r"there are: mobilenet_v3_small"):
        open_model(parse_spec("resnet18:sample"), tmp_path / "cache")


def test_a_wheel_without_the_sample_weights_names_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_module, "SAMPLES_IN_SOURCES", tmp_path / "none")
    monkeypatch.setitem(sys.modules, "anychip_samples", None)
    with pytest.raises(WeightsNotFoundError, match=r"pip install \./anychip_samples-[\d.]+-py3-none-any\.whl"):
        open_model(parse_spec("resnet50:sample"), tmp_path / "cache")


def test_a_path_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsNotFoundError, match=r"no weights file 'dogs\.pt' for dogs"):
        open_model(parse_spec("dogs=resnet50:dogs.pt"), tmp_path)


# A folder in the place of a file, as KServe's storage initialiser leaves one


def test_a_folder_with_one_weights_file_stands_for_it(tmp_path: Path) -> None:
    classifier_file(tmp_path / "dogs.safetensors", 2, ["terrier", "poodle"])
    (tmp_path / "README.txt").touch()
    model = open_model(parse_spec(f"dogs=mobilenet_v3_small:{tmp_path}"), tmp_path)
    assert (model.weights, model.labels) == ("dogs.safetensors", ("terrier", "poodle"))


@pytest.mark.parametrize(
    ("names", "said"), [([], "no weights file"), (["a.pt", "b.pth"], "2 weights files (a.pt, b.pth)")]
)
def test_a_folder_with_none_or_several_is_refused(tmp_path: Path, names: list[str], said: str) -> None:
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(WeightsNotFoundError) as error:
        open_model(parse_spec(f"dogs=mobilenet_v3_small:{tmp_path}"), tmp_path)
    assert said in str(error.value)


def test_a_file_whose_digest_is_named_is_that_file_and_no_other(tmp_path: Path) -> None:
    path = classifier_file(tmp_path / "dogs.safetensors", 2, ["a", "b"])
    digest = sha256_of(path)
    model = open_model(parse_spec(f"dogs=mobilenet_v3_small:{path}@sha256:{digest.upper()}"), tmp_path)
    assert model.weights_sha256 == digest
    assert str(tmp_path) not in model.weights, "clients read that, and the folder is none of their business"
    classifier_file(path, 2, ["a", "c"])
    assert model.files is not None
    assert model.weights_file is not None
    model.files.check()  # It has a copy of what was opened.
    Path(model.weights_file).chmod(0o600)
    shutil.copy(path, model.weights_file)
    with pytest.raises(WeightsError, match=f"not {digest} as when dogs.safetensors was opened"):
        model.files.check()
    with pytest.raises(WeightsError, match=digest):
        open_model(parse_spec(f"dogs=mobilenet_v3_small:{path}@sha256:{digest}"), tmp_path)
    assert open_model(parse_spec(f"dogs=mobilenet_v3_small:{path}"), tmp_path).weights_sha256 == sha256_of(path)
    with pytest.raises(ModelError, match="random"):
        parse_spec(f"resnet18:random@sha256:{digest}")


@pytest.mark.parametrize("suffix", [".pt2", ".ts", ".torchscript"])
def test_a_file_that_is_a_program_wants_trust(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(b"a program")
    with pytest.raises(WeightsError, match=f"@sha256:{sha256_of(path)}, or trust all"):
        open_model(parse_spec(str(path)), tmp_path, trust_exported=False)


@pytest.mark.parametrize("name", ["best.engine", "cars=a/best.engine", "best_saved_model/"])
def test_what_exporters_write_as_well_is_named_and_not_read(name: str) -> None:
    with pytest.raises(UnknownModelError, match="is not read: export the network"):
        parse_spec(name)


@pytest.mark.parametrize("name", ["best.keras", "best.h5"])
def test_a_file_of_keras_is_answered_with_its_export(name: str) -> None:
    with pytest.raises(UnknownModelError, match=rf'load_model\("/there/{name}"\).export\("mine.onnx", format="onnx"\)'):
        parse_spec(f"x=/there/{name}")


@pytest.mark.parametrize(
    ("text", "name"),
    [("a/best_openvino_model/", "best"), ("cars=a/best_openvino_model", "cars"), ("a/best.xml", "best")],
)
def test_a_network_of_openvino_is_a_folder_or_its_file(tmp_path: Path, text: str, name: str) -> None:
    spec = parse_spec(text)
    assert (spec.name, spec.architecture) == (name, "xml")
    with pytest.raises(WeightsNotFoundError, match="There is no file"):
        open_model(spec, tmp_path)
    assert parse_spec(f"{text}@sha256:{'0' * 64}").sha256 == "0" * 64
    folder = tmp_path / "best_openvino_model"
    folder.mkdir()
    with pytest.raises(WeightsNotFoundError, match="holds 0 networks"):
        open_model(parse_spec(str(folder)), tmp_path)


def test_weights_say_what_they_are_of(tmp_path: Path) -> None:
    save_file({**YOLO11("s", 3).state_dict()}, tmp_path / "best.safetensors")
    spec = parse_spec(f"cars={tmp_path / 'best.safetensors'}")
    assert (spec.name, spec.architecture) == ("cars", "")
    model = open_model(spec, tmp_path)
    assert (model.name, model.architecture, len(model.labels)) == ("cars", "yolo11s", 3)
    assert parse_spec("best.pt").name == "best"


def test_the_size_of_the_training_is_that_of_the_input(tmp_path: Path) -> None:
    torch.save({"model": YOLOv8("n", 2).state_dict(), "train_args": {"imgsz": 330}}, tmp_path / "best.pt")
    assert open_model(parse_spec(f"{tmp_path / 'best.pt'}"), tmp_path).input_shape == (352, 352, 3)


def test_weights_that_do_not_say_what_they_are_of_want_a_name(tmp_path: Path) -> None:
    save_file({"head.weight": torch.zeros(7, 3)}, tmp_path / "mine.safetensors")
    with pytest.raises(WeightsError, match=r"1 tensors .* 7 rows.*dogs=resnet50:.*dogs=timm/convnext_tiny:"):
        open_model(parse_spec(f"dogs={tmp_path / 'mine.safetensors'}"), tmp_path)
