"""models.catalog: what people write, where labels come from, and what every mistake is answered with."""

from __future__ import annotations

import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torchvision import models as torchvision_models

from models import ModelError, ModelSpec, UnknownModelError, WeightsError, WeightsNotFoundError, open_model, parse_spec
from models import publishers as weights_module
from models.contract.files import sha256_of
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
        ("resnet50:sample", ModelSpec("resnet50", "resnet50", "sample")),
        ("dogs=resnet50:dogs.safetensors", ModelSpec("dogs", "resnet50", "dogs.safetensors")),
        ("dogs=resnet50:", ModelSpec("dogs", "resnet50", "official")),
        ("/models/bert-base.onnx", ModelSpec("bert-base", "onnx", "/models/bert-base.onnx")),
        ("qa=/models/a=b:c/bert.v2.pt2", ModelSpec("qa", "pt2", "/models/a=b:c/bert.v2.pt2")),
        ("dogs.v2-b_1=vit_b_16:/a=b/c:d.pt", ModelSpec("dogs.v2-b_1", "vit_b_16", "/a=b/c:d.pt")),
    ],
)
def test_a_model_is_written_as_name_architecture_weights(text: str, expected: ModelSpec) -> None:
    assert parse_spec(text) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("resnt50", "did you mean .*resnet50"),
        *((text, "weights list") for text in ("", "=", "a=", "qqqq", ":sample")),
        *(
            (text, r"export the network that it was made of as \.onnx instead\.$")
            for text in ("best.engine", "best_saved_model/")
        ),
        ("fcos_resnet50_fpn:w.pth", r"export\(network.eval\(\), \(\[image\],\), \"best.onnx\""),
        ("x=/there/best.keras", r'load_model\("/there/best.keras"\).export\("mine.onnx", format="onnx"\)'),
    ],
)
def test_what_is_no_model_is_answered_with_what_to_do(text: str, said: str) -> None:
    with pytest.raises(UnknownModelError, match=said):
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


def test_labels_have_a_measure(tmp_path: Path) -> None:
    classifier_file(tmp_path / "dogs.safetensors", 3)
    spec = ModelSpec("dogs", "mobilenet_v3_small", str(tmp_path / "dogs.safetensors"))
    (tmp_path / "labels.txt").write_text(f"pug\n{'x' * 1001}\ncorgi\n")
    with pytest.raises(WeightsError, match="one of over 1000 characters"):
        open_model(spec, tmp_path)
    (tmp_path / "labels.txt").write_text("pug\nhusky\n")
    with pytest.raises(WeightsError, match="3 classes, but 2 labels"):
        open_model(spec, tmp_path)


def test_published_weights_come_from_the_cache_and_are_checked_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = weights_module.official_source("mobilenet_v3_small")
    name = source.name
    torch.save(torchvision_models.mobilenet_v3_small(weights=None).state_dict(), tmp_path / name)
    with pytest.raises(WeightsError, match="not 047dcff4; delete"):
        open_model(parse_spec("mobilenet_v3_small"), tmp_path, allow_download=False)
    published = replace(source, sha256=sha256_of(tmp_path / name))
    monkeypatch.setattr(weights_module, "official_source", lambda *_: published)
    model = open_model(parse_spec("mobilenet_v3_small"), tmp_path, allow_download=False)
    assert (model.weights, model.weights_file, len(model.labels)) == ("official", str(tmp_path / name), 1000)


def test_sample_weights_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_module, "SAMPLES_IN_SOURCES", tmp_path)
    path = classifier_file(tmp_path / "mobilenet_v3_small.safetensors", 2, ["disc", "ring"])
    model = open_model(parse_spec("mobilenet_v3_small:sample"), tmp_path / "cache")
    assert (model.weights, model.weights_file, model.labels) == ("sample", str(path), ("disc", "ring"))
    with pytest.raises(WeightsNotFoundError, match=r"there are mobilenet_v3_small"):
        open_model(parse_spec("resnet18:sample"), tmp_path / "cache")


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
    with pytest.raises(WeightsError, match=r"dogs\.safetensors has changed since it was opened"):
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
        open_model(parse_spec(str(path)), tmp_path, trusted=False)


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


def test_a_graph_below_its_configuration_is_said_to_lie_there(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit", "architectures": ["ViTForImageClassification"]}')
    for folder in ("onnx", "mine"):
        (tmp_path / folder).mkdir()
        (file := tmp_path / folder / "model.onnx").write_bytes(b"graph")
    (tmp_path / "openvino_model.xml").touch()
    for given, said in (
        (file, "damaged, cut short, or not an ONNX file"),
        (tmp_path / "onnx" / file.name, r"copy config\.json and .* beside the file"),
        (tmp_path, r"Name a file of .*onnx, with a copy.* by its own name: .*openvino_model\.xml"),
    ):
        with pytest.raises(WeightsError, match=said):
            open_model(parse_spec(f"x={given}"), tmp_path / "cache")
    for shard in "12":
        (tmp_path / f"model-0000{shard}-of-00002.safetensors").touch()
    with pytest.raises(WeightsError, match=r"2 files of weights, .*max_shard_size='1TB'"):
        open_model(parse_spec(f"x={tmp_path}"), tmp_path / "cache")


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
