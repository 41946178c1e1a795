"""Networks of timm and transformers, from the folders that these write: compared with the libraries' own answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from models import Options, PixelModel, WeightsError, open_model, parse_spec
from models.exports import child, exported
from models.exports.answers import Tried
from models.exports.networks import FORMS
from tests.support import library_folders as folders
from tests.support.library_folders import SIZE, photograph

LEAST = Options(score_threshold=0.0)


@pytest.fixture(autouse=True)
def tried_here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are tried in this process, which has the libraries: not in one that imports them again for each."""
    if request.node.get_closest_marker("cold") is not None:
        return

    def tried(file: Path, declared: Mapping[str, Any], architecture: str = "") -> Tried:
        given = json.loads(json.dumps(declared))
        return child._tried(str(file), architecture or FORMS[file.suffix], given)

    monkeypatch.setattr(exported, "_tried", tried)


@pytest.fixture(autouse=True)
def quiet() -> None:
    pytest.importorskip("timm")
    pytest.importorskip("transformers").logging.set_verbosity_error()


def opened(folder: Path) -> PixelModel:
    model = open_model(parse_spec(f"mine={folder}"), folder)
    assert isinstance(model, PixelModel)
    assert not getattr(model, "witness", "").startswith("it was compared with nothing")
    return model


def run(model: PixelModel) -> tuple[torch.Tensor, list[Any], Any]:
    """Run a model on a photograph: its normalised input, its outputs, and the complete answer."""
    pixels = torch.zeros(model.input_shape, dtype=torch.uint8)
    placement = model.preprocess(torch.from_numpy(photograph()), pixels, *SIZE)
    network = model.network()
    with torch.inference_mode():
        outputs = [each.numpy() for each in network(pixels[None])]
        seen = network.normalise(pixels[None])
    return seen, outputs, model.postprocess(model.reduce(outputs, 0, LEAST), placement, LEAST)


def check_classes(model: PixelModel, theirs: torch.Tensor, outputs: list[Any]) -> None:
    mine = torch.from_numpy(outputs[0]).softmax(1)
    theirs = theirs.softmax(1)
    assert theirs.std() > 0.02
    [[first, second]] = theirs.topk(2).values
    assert first - second > 2 * 2e-3, "the folder's network does not tell its first class from its second"
    assert mine.argmax(1) == theirs.argmax(1)
    torch.testing.assert_close(mine, theirs, atol=2e-3, rtol=0)


@pytest.mark.parametrize("name", folders.TIMM)
def test_a_folder_of_timm_is_a_classifier_with_timms_pixels(tmp_path: Path, name: str) -> None:
    import timm

    network = folders.timm_folder(name, tmp_path)
    config = timm.data.resolve_data_config({}, model=network)
    transform: Any = timm.data.create_transform(**config)
    model = opened(tmp_path)
    assert (model.architecture, model.task, model.labels) == (f"timm/{name}", "classify", (*folders.LABELS.values(),))
    seen, outputs, _ = run(model)
    given = transform(Image.fromarray(photograph()))[None]
    torch.testing.assert_close(seen, given, atol=1e-5, rtol=0)
    with torch.inference_mode():
        check_classes(model, network(given), outputs)


def test_weights_of_timm_without_a_configuration_get_that_of_their_name(tmp_path: Path) -> None:
    network = folders.timm_folder("convnext_atto", tmp_path / "one")
    (tmp_path / "one" / "model.safetensors").rename(tmp_path / "mine.safetensors")
    model: Any = open_model(parse_spec(f"dogs=timm/convnext_atto:{tmp_path / 'mine.safetensors'}"), tmp_path)
    assert (model.name, model.labels[-1], model.input_shape) == ("dogs", "class 4", (224, 224, 3))
    _, outputs, _ = run(model)
    with torch.inference_mode():
        pixels = torch.zeros(model.input_shape, dtype=torch.uint8)
        model.preprocess(torch.from_numpy(photograph()), pixels, *SIZE)
        check_classes(model, network(model.network().normalise(pixels[None])), outputs)


def test_weights_of_timm_for_one_channel_or_as_many_classes_as_imagenet_need_nothing_beside_them(
    tmp_path: Path,
) -> None:
    import timm

    network = folders.enliven(timm.create_model("test_resnet", in_chans=1))
    torch.save(network.state_dict(), tmp_path / "grey.pth")
    model: Any = open_model(parse_spec(f"x=timm/test_resnet:{tmp_path / 'grey.pth'}"), tmp_path)
    assert model.export.entry.channels == 1
    assert model.labels[526] == "desk"
    seen, outputs, _ = run(model)
    with torch.inference_mode():
        torch.testing.assert_close(torch.from_numpy(outputs[0]), network(seen[:, :1]), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("prefix", ["module.", "model.", "_orig_mod.", "backbone."])
@pytest.mark.parametrize("library", ["timm", "transformers"])
def test_weights_under_a_prefix_are_those_without_it(tmp_path: Path, library: str, prefix: str) -> None:
    from safetensors.torch import load_file, save_file

    if library == "timm":
        folders.timm_folder("test_resnet", tmp_path)
    else:
        folders.transformers_folder("vit", tmp_path)
    file = tmp_path / "model.safetensors"
    seen, plain, _ = run(opened(tmp_path))
    state = {prefix + name: tensor for name, tensor in load_file(file).items()}
    save_file(state, file, metadata={"format": "pt"})
    if (library, prefix) == ("transformers", "backbone."):
        with pytest.raises(
            WeightsError, match=r"has no classifier\.bias and \d+ others, which ViTForImage.* has: save"
        ):
            open_model(parse_spec(f"x={tmp_path}"), tmp_path)
        return
    model: Any = open_model(parse_spec(f"x={tmp_path}"), tmp_path)
    again, outputs, _ = run(model)
    assert torch.equal(seen, again)
    np.testing.assert_array_equal(outputs[0], plain[0])


def test_weights_averaged_in_training_are_served_as_timm_serves_them(tmp_path: Path) -> None:
    import timm

    raw, averaged = (folders.enliven(timm.create_model("test_resnet", num_classes=3), seed) for seed in (0, 1))
    states = {"state_dict": raw.state_dict(), "state_dict_ema": averaged.state_dict(), "epoch": 3}
    torch.save(states, tmp_path / "last.pth.tar")
    again = timm.create_model("test_resnet", num_classes=3, checkpoint_path=str(tmp_path / "last.pth.tar")).eval()
    model: Any = open_model(parse_spec(f"x=timm/test_resnet:{tmp_path / 'last.pth.tar'}"), tmp_path)
    seen, outputs, _ = run(model)
    with torch.inference_mode():
        torch.testing.assert_close(torch.from_numpy(outputs[0]), again(seen), atol=1e-3, rtol=1e-3)
        assert not torch.allclose(again(seen), raw(seen), atol=1e-1)


def test_a_network_of_timm_that_transformers_wraps_is_one_of_timm(tmp_path: Path) -> None:
    import timm
    import transformers

    cfg = timm.get_pretrained_cfg("test_resnet").to_dict()
    named = {"id2label": folders.LABELS, "label2id": {name: number for number, name in folders.LABELS.items()}}
    config = transformers.TimmWrapperConfig(architecture="test_resnet", pretrained_cfg=cfg, **named)
    network = folders.enliven(transformers.TimmWrapperForImageClassification(config))
    network.save_pretrained(tmp_path)
    processor: Any = transformers.TimmWrapperImageProcessor(pretrained_cfg=cfg)
    processor.save_pretrained(tmp_path)
    model = opened(tmp_path)
    assert (model.architecture, model.labels) == ("timm/test_resnet", (*folders.LABELS.values(),))
    seen, outputs, _ = run(model)
    given = processor(Image.fromarray(photograph()), return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(seen, given, atol=1e-5, rtol=0)
    with torch.inference_mode():
        theirs = network(pixel_values=given).logits
    torch.testing.assert_close(torch.from_numpy(outputs[0]), theirs, atol=1e-3, rtol=1e-3)


def test_mobilevit_sees_blue_first(tmp_path: Path) -> None:
    import transformers

    sizes = {"hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 24, 32, 32, 64], "num_attention_heads": 2}
    config = transformers.MobileViTConfig(image_size=64, **sizes, num_labels=5)
    network = folders.enliven(transformers.MobileViTForImageClassification(config))
    processor = transformers.MobileViTImageProcessor(size={"shortest_edge": 72}, crop_size={"height": 64, "width": 64})
    network.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    model: Any = opened(tmp_path)
    assert model.export.entry.bgr
    _, outputs, _ = run(model)
    with torch.inference_mode():
        given = processor(Image.fromarray(photograph()), return_tensors="pt")
        theirs = network(**given).logits
        red_first = network(pixel_values=given["pixel_values"].flip(1)).logits
    torch.testing.assert_close(torch.from_numpy(outputs[0]), theirs, atol=1e-3, rtol=1e-3)
    assert not torch.allclose(red_first, theirs, atol=1e-1)


def test_a_network_of_timm_without_classes_answers_with_vectors(tmp_path: Path) -> None:
    network = folders.timm_folder("vit_tiny_patch16_224", tmp_path, classes=0)
    model = opened(tmp_path)
    seen, _, answer = run(model)
    assert model.task == "embed"
    with torch.inference_mode():
        assert_same_direction(np.array(answer["embedding"]), network(seen)[0].numpy())


@pytest.mark.parametrize("name", folders.CLASSIFIERS)
def test_a_folder_of_transformers_is_a_classifier_with_its_pixels(tmp_path: Path, name: str) -> None:
    network, processor = folders.transformers_folder(name, tmp_path)
    model = opened(tmp_path)
    assert (model.task, model.labels) == ("classify", (*folders.LABELS.values(),))
    seen, outputs, _ = run(model)
    given = processor(Image.fromarray(photograph()), return_tensors="pt")
    torch.testing.assert_close(seen, given["pixel_values"], atol=1e-5, rtol=0)
    with torch.inference_mode():
        check_classes(model, network(**given).logits, outputs)


@pytest.mark.parametrize("name", folders.DETECTORS)
def test_a_folder_of_transformers_is_a_detector(tmp_path: Path, name: str) -> None:
    network, processor = folders.transformers_folder(name, tmp_path)
    model = opened(tmp_path)
    assert (model.task, model.labels) == ("detect", (*folders.LABELS.values(),))
    _, _, answer = run(model)
    given = processor(Image.fromarray(photograph()), return_tensors="pt")
    with torch.inference_mode():
        [found] = processor.post_process_object_detection(network(**given), threshold=0.02, target_sizes=[SIZE[::-1]])
    check_boxes(answer, found)


def check_boxes(answer: Mapping[str, Any], found: Mapping[str, torch.Tensor]) -> None:
    """Of the library's instances at least 98 % are there, with the same class, within a pixel and 2e-3."""
    mine = answer["detections"]
    boxes = np.array([[*each["box"].values()] for each in mine])
    scores = np.array([each["score"] for each in mine])
    classes = np.array([each["class_id"] for each in mine])
    theirs = found["boxes"].numpy().clip(0, [*SIZE, *SIZE])
    assert len(theirs) >= 10
    assert float(found["scores"].std()) > 0.01
    there = 0
    for box, score, label in zip(theirs, found["scores"].numpy(), found["labels"].numpy(), strict=True):
        alike = (np.abs(boxes - box).max(1) < 1) & (np.abs(scores - score) < 2e-3) & (classes == label)
        there += bool(alike.any())
    assert there >= 0.98 * len(theirs)


def assert_same_direction(mine: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any]) -> None:
    mine, theirs = mine.ravel().astype(np.float64), theirs.ravel().astype(np.float64)
    assert theirs.std() > 0
    assert mine @ theirs / np.linalg.norm(mine) / np.linalg.norm(theirs) >= 0.9999


@pytest.mark.parametrize("name", folders.SEGMENTERS)
def test_a_folder_of_transformers_names_the_class_of_each_pixel(tmp_path: Path, name: str) -> None:
    network, processor = folders.transformers_folder(name, tmp_path)
    model = opened(tmp_path)
    assert (model.task, model.labels) == ("segment_semantic", (*folders.LABELS.values(),))
    _, outputs, _ = run(model)
    given = processor(Image.fromarray(photograph()), return_tensors="pt")
    with torch.inference_mode():
        [classes] = processor.post_process_semantic_segmentation(network(**given), [model.input_shape[:2]])
    assert len(classes.unique()) > 1
    assert float((torch.from_numpy(outputs[0][0]) == classes).float().mean()) >= 0.999


@pytest.mark.parametrize("name", [*folders.DEPTHS, *folders.EMBEDDERS])
def test_a_folder_of_transformers_answers_with_depth_or_vectors(tmp_path: Path, name: str) -> None:
    network, processor = folders.transformers_folder(name, tmp_path)
    model = opened(tmp_path)
    assert model.task == ("depth" if name in folders.DEPTHS else "embed")
    _, outputs, _ = run(model)
    given = processor(Image.fromarray(photograph()), return_tensors="pt")
    with torch.inference_mode():
        found = network(**given)
    for key in ("predicted_depth", "image_embeds", "pooler_output"):
        if found.get(key) is not None:
            assert_same_direction(outputs[0], found[key].numpy())
            return
    pytest.fail("nothing to compare with")


@pytest.mark.cold
@pytest.mark.parametrize("library", ["timm", "transformers"])
def test_a_folder_is_read_by_a_process_that_may_read_nothing_else(tmp_path: Path, library: str) -> None:
    if library == "timm":
        folders.timm_folder("resnet18", tmp_path)
    else:
        folders.transformers_folder("vit", tmp_path)
    assert opened(tmp_path).labels[0] == "thing 0"


def test_a_network_of_transformers_lacks_no_weights_but_a_pooler(tmp_path: Path) -> None:
    """The library would draw them at random; of a network without a pooler the first token answers."""
    import transformers
    from safetensors.torch import load_file, save_file

    network, _ = folders.transformers_folder("vit", tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    save_file(
        {name: each for name, each in state.items() if "vit.layernorm" not in name}, file, metadata={"format": "pt"}
    )
    with pytest.raises(WeightsError, match=r"model\.safetensors has no vit\.layernorm\.bias and 1 others"):
        opened(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**written, "id2label": {"0": "a"}}))
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(
        WeightsError, match=r'classifier\.bias in .* is \[\d+\], and config\.json makes it \[1\]: "id2label"'
    ):
        opened(tmp_path)
    transformers.ViTModel(network.config, add_pooling_layer=False).save_pretrained(tmp_path)
    again: Any = transformers.ViTModel.from_pretrained(tmp_path).eval()
    seen, [vector], _ = run(opened(tmp_path))
    with torch.inference_mode():
        wanted = again(pixel_values=seen).last_hidden_state[:, 0]
    torch.testing.assert_close(torch.from_numpy(vector), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["ViTForMaskedImageModeling", "DetrForSegmentation", "SamForWhatever"])
def test_a_head_of_transformers_that_is_no_task_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    folders.transformers_folder("vit", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": [name]}))
    with pytest.raises(WeightsError, match=rf"What {name} answers .*AutoModel\.from_pretrained.*save_pretrained"):
        opened(tmp_path)


def test_weights_that_do_not_fit_and_code_from_elsewhere_are_refused(tmp_path: Path) -> None:
    folders.transformers_folder("vit", tmp_path / "vit")
    config = json.loads((tmp_path / "vit" / "config.json").read_text())
    other = {**config, "architectures": ["MyViT"], "auto_map": {"AutoModel": "modeling.MyViT"}}
    (tmp_path / "vit" / "config.json").write_text(json.dumps(other))
    (tmp_path / "vit" / "modeling.py").write_text("raise SystemExit('run')")
    with pytest.raises(
        WeightsError, match=r"config.json names MyViT, which is no class of transformers .* never run here"
    ):
        opened(tmp_path / "vit")
    folders.timm_folder("test_vit", tmp_path / "size")
    config = json.loads((tmp_path / "size" / "config.json").read_text())
    (tmp_path / "size" / "config.json").write_text(json.dumps({**config, "model_args": {"img_size": 96}}))
    with pytest.raises(WeightsError, match=r'another image size .*config.json, as "model_args": {"img_size": 384}'):
        opened(tmp_path / "size")
    folders.timm_folder("resnet18", tmp_path / "resnet")
    with pytest.raises(WeightsError, match="timm cannot build timm/resnet34 of model"):
        open_model(parse_spec(f"x=timm/resnet34:{tmp_path / 'resnet' / 'model.safetensors'}"), tmp_path)


def test_a_configuration_has_no_other_weights_read(tmp_path: Path) -> None:
    """Nor other code, nor a download: by the names of what would, however deep."""
    folders.transformers_folder("vit", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert opened(tmp_path)
    for given in (
        {"transformers_weights": "sub/model.safetensors"},
        {"auto_map": {"AutoModel": "modeling.MyViT"}},
        {"quantization_config": {"quant_method": "quark"}},
        {"backbone_config": {"model_type": "vit", "pretrained_model_name_or_path": "/etc"}},
        {"backbone": "hf-hub:a/b"},
        {"num_hidden_layers": 1e9},
        {"backbone_config": {"model_type": "swin", "depths": [2, [10**9]]}},
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **given}))
        with pytest.raises(WeightsError, match=r"'\w+' in config\.json is (not taken|'hf-hub|over 1000)"):
            opened(tmp_path)
    harmless = {"_name_or_path": "/etc/passwd", "attn_implementation": "kernels-community/x", "unheard_of": [1]}
    (tmp_path / "config.json").write_text(json.dumps({**config, **harmless}))
    assert opened(tmp_path).network()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"checkpoint_path": "extra.bin"}, "'checkpoint_path' in config.json is not taken"),
        ({"pretrained_cfg_overlay": {"file": "extra.bin"}}, "'pretrained_cfg_overlay' in config.json is not taken"),
        ({"pretrained": True}, "'pretrained' in config.json is not taken"),
        ({"cache_dir": "/tmp"}, "'cache_dir' in config.json is not taken"),
        (
            {"features_only": True},
            "'features_only' of model_args in config.json is nothing that resnet18 of timm takes",
        ),
        ([1], "model_args in config.json is no object"),
    ],
)
def test_arguments_of_timm_s_networks_are_those_of_networks(tmp_path: Path, given: Any, sentence: str) -> None:
    folders.timm_folder("resnet18", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_args": given}))
    with pytest.raises(WeightsError, match=sentence):
        opened(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_args": {"drop_rate": 0.1}}))
    assert opened(tmp_path)
    for name in ("hf-hub:timm/resnet18", "local-dir:/etc"):
        (tmp_path / "config.json").write_text(json.dumps({**config, "architecture": name}))
        with pytest.raises(WeightsError, match="has no network"):
            opened(tmp_path)


EXPORTED = ("vit", "convnext", "rt-detr", "rt-detr-v2", "d-fine", "yolos", "segformer", "dpt", "dinov2")


@pytest.mark.parametrize("name", EXPORTED)
def test_an_export_with_its_configuration_beside_it_answers_as_the_library(tmp_path: Path, name: str) -> None:
    network, processor = folders.transformers_folder(name, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    given = processor(Image.fromarray(photograph()), return_tensors="pt")
    with torch.inference_mode():
        theirs = network(pixel_values=given["pixel_values"])
    outputs = folders.optimum_export(network, given["pixel_values"], tmp_path / "model.onnx")
    model = opened(tmp_path)
    seen, found, answer = run(model)
    torch.testing.assert_close(seen, given["pixel_values"], atol=1e-5, rtol=0)
    if model.task == "classify":
        check_classes(model, theirs.logits, found)
    elif model.task == "detect":
        [instances] = processor.post_process_object_detection(theirs, threshold=0.02, target_sizes=[SIZE[::-1]])
        check_boxes(answer, instances)
    elif model.task == "segment_semantic":
        [classes] = processor.post_process_semantic_segmentation(theirs, [model.input_shape[:2]])
        assert float((torch.from_numpy(found[0][0]) == classes).float().mean()) >= 0.999
    else:
        assert_same_direction(found[0], theirs[outputs[-1]].numpy())
