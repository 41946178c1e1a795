"""Networks of timm and transformers: what is read of weights and configurations, and what is refused."""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from models import PixelModel, WeightsError, open_model, parse_spec
from models.exports import child, exported, library_files
from models.exports.answers import Tried
from models.exports.layouts import decoded, interpret
from models.exports.metadata import Description
from models.exports.networks import FORMS
from tests.support import library_folders as folders
from tests.support.library_folders import SIZE, photograph


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
    with contextlib.suppress(ImportError):  # The least safetensors is older than transformers wants; timm needs none.
        importlib.import_module("transformers").logging.set_verbosity_error()


def opened(folder: Path) -> PixelModel:
    model = open_model(parse_spec(f"mine={folder}"), folder)
    assert isinstance(model, PixelModel)
    assert not getattr(model, "witness", "").startswith("it was compared with nothing")
    return model


def run(model: PixelModel) -> tuple[torch.Tensor, list[Any]]:
    pixels = torch.zeros(model.input_shape, dtype=torch.uint8)
    model.preprocess(torch.from_numpy(photograph()), pixels, *SIZE)
    network = model.network()
    with torch.inference_mode():
        outputs = [each.numpy() for each in network(pixels[None])]
        seen = network.normalise(pixels[None])
    return seen, outputs


def test_weights_of_timm_for_one_channel_or_as_many_classes_as_imagenet_need_nothing_beside_them(
    tmp_path: Path,
) -> None:
    import timm

    network = folders.enliven(timm.create_model("test_resnet", in_chans=1))
    torch.save(network.state_dict(), tmp_path / "grey.pth")
    model: Any = open_model(parse_spec(f"x=timm/test_resnet:{tmp_path / 'grey.pth'}"), tmp_path)
    assert model.export.entry.channels == 1
    assert model.labels[526] == "desk"
    kept = {"state_dict": network.state_dict(), "class_to_idx": {f"mine {number}": number for number in range(1000)}}
    torch.save(kept, tmp_path / "own.pth")
    own: Any = open_model(parse_spec(f"x=timm/test_resnet:{tmp_path / 'own.pth'}"), tmp_path)
    assert own.labels[526] == "mine 526"
    seen, outputs = run(model)
    with torch.inference_mode():
        torch.testing.assert_close(torch.from_numpy(outputs[0]), network(seen[:, :1]), atol=1e-3, rtol=1e-3)


def test_a_network_of_timm_takes_the_fields_of_its_configuration(tmp_path: Path) -> None:
    folders.timm_folder("naflexvit_base_patch16_gap", tmp_path, embed_dim=48, depth=2, num_heads=4, global_pool="avg")
    assert "the largest difference is 0.0e+00" in str(opened(tmp_path))


def test_timm_s_folders_may_have_hugging_face_s_names_and_problem(tmp_path: Path) -> None:
    folders.timm_folder("test_resnet", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    named = {str(number): f"own {number}" for number in range(len(config.pop("label_names")))}
    (tmp_path / "config.json").write_text(json.dumps({**config, "id2label": named}))
    assert opened(tmp_path).labels[2] == "own 2"
    (tmp_path / "config.json").write_text(json.dumps({**config, "id2label": named, "problem_type": "regression"}))
    assert opened(tmp_path).task == "regress"


@pytest.mark.parametrize("prefix", ["module.", "model.", "_orig_mod.", "backbone."])
@pytest.mark.parametrize("library", ["timm", "transformers"])
def test_weights_under_a_prefix_are_those_without_it(tmp_path: Path, library: str, prefix: str) -> None:
    from safetensors.torch import load_file, save_file

    if library == "timm":
        folders.timm_folder("test_resnet", tmp_path)
    else:
        folders.vit_folder(tmp_path)
    file = tmp_path / "model.safetensors"
    seen, plain = run(opened(tmp_path))
    state = {prefix + name: tensor for name, tensor in load_file(file).items()}
    save_file(state, file, metadata={"format": "pt"})
    if (library, prefix) == ("transformers", "backbone."):
        with pytest.raises(
            WeightsError, match=r"has no classifier\.bias and \d+ others, which ViTForImage.* has: save"
        ):
            open_model(parse_spec(f"x={tmp_path}"), tmp_path)
        return
    model: Any = open_model(parse_spec(f"x={tmp_path}"), tmp_path)
    again, outputs = run(model)
    assert torch.equal(seen, again)
    np.testing.assert_array_equal(outputs[0], plain[0])


@pytest.mark.cold
@pytest.mark.parametrize("library", ["timm", "transformers"])
def test_a_folder_is_read_by_a_process_that_may_read_nothing_else(tmp_path: Path, library: str) -> None:
    if library == "timm":
        folders.timm_folder("resnet18", tmp_path)
    else:
        folders.vit_folder(tmp_path)
    assert opened(tmp_path).labels[0] == "thing 0"


def test_a_network_of_transformers_lacks_no_weights_but_a_pooler(tmp_path: Path) -> None:
    """The library would draw them at random; of a network without a pooler the first token answers."""
    import transformers
    from safetensors.torch import load_file, save_file

    network, _ = folders.vit_folder(tmp_path)
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
    seen, [vector] = run(opened(tmp_path))
    with torch.inference_mode():
        wanted = again(pixel_values=seen).last_hidden_state[:, 0]
    torch.testing.assert_close(torch.from_numpy(vector), wanted, atol=1e-4, rtol=1e-4)


def test_weights_that_do_not_fit_and_code_from_elsewhere_are_refused(tmp_path: Path) -> None:
    folders.vit_folder(tmp_path / "vit")
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
    with pytest.raises(WeightsError, match=r"another image size .* timm.models.save_for_hf\(network, 'folder'\)"):
        opened(tmp_path / "size")
    folders.timm_folder("resnet18", tmp_path / "resnet")
    with pytest.raises(WeightsError, match=r"timm/resnet10t, which has no conv1.* is served from an export: torch"):
        open_model(parse_spec(f"x=timm/resnet10t:{tmp_path / 'resnet' / 'model.safetensors'}"), tmp_path)
    with pytest.raises(WeightsError, match="timm cannot build timm/resnet34 of model"):
        open_model(parse_spec(f"x=timm/resnet34:{tmp_path / 'resnet' / 'model.safetensors'}"), tmp_path)


def test_a_configuration_has_no_other_weights_read(tmp_path: Path) -> None:
    """Nor other code, nor a download: by the names of what would, however deep."""
    folders.vit_folder(tmp_path)
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
    detr = {"architectures": ["DetrForObjectDetection"], "model_type": "detr", "backbone": "test_resnet"}
    (tmp_path / "config.json").write_text(json.dumps({**config, **detr, "backbone_kwargs": {"out_indices": [1]}}))
    with pytest.raises(WeightsError, match="has no bbox_predictor"):  # Not that the Hub did not answer.
        opened(tmp_path)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"checkpoint_path": "extra.bin"}, "'checkpoint_path' in config.json is not taken"),
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


@pytest.mark.parametrize("stated", [{}, {"pad": 7}])
def test_yolos_sees_each_image_of_a_batch_in_its_own_size_and_without_padding(
    tmp_path: Path, stated: dict[str, int]
) -> None:
    import transformers
    from PIL import Image

    torch.manual_seed(0)
    config = transformers.YolosConfig(
        image_size=[96, 128], num_detection_tokens=5, hidden_size=24, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, num_labels=3,
    )  # fmt: skip
    folders.enliven(transformers.YolosForObjectDetection(config)).save_pretrained(tmp_path)
    processor = transformers.YolosImageProcessor(size={"shortest_edge": 96, "longest_edge": 140})
    processor.save_pretrained(tmp_path)
    (tmp_path / "model.json").write_text(json.dumps(stated))
    network: Any = transformers.YolosForObjectDetection.from_pretrained(tmp_path).eval()
    model = opened(tmp_path)
    assert model.input_shape == (128, 128, 3)
    pictures = [Image.fromarray(photograph()).resize(size) for size in ((500, 333), (90, 300), (96, 96), (40, 300))]
    pixels = torch.zeros((len(pictures), *model.input_shape), dtype=torch.uint8)
    for picture, place in zip(pictures, pixels, strict=True):
        model.preprocess(torch.from_numpy(np.array(picture)), place, *picture.size)
    with torch.inference_mode():
        logits, boxes = model.network().core(model.network().normalise(pixels))
        for number, picture in enumerate(pictures):
            seen = processor(images=picture, return_tensors="pt")["pixel_values"]
            wanted = network(pixel_values=seen)
            shares = torch.tensor([seen.shape[3], seen.shape[2]]).repeat(2) / 128
            torch.testing.assert_close(logits[number], wanted.logits[0], atol=2e-2, rtol=2e-2)
            torch.testing.assert_close(boxes[number], wanted.pred_boxes[0] * shares, atol=2e-3, rtol=2e-2)


@pytest.mark.parametrize("queries", [30, 150])
@pytest.mark.parametrize(
    "name", ["RTDetr", "DFine RTDetr", "RfDetr", "LwDetr DeformableDetr", "ConditionalDetr", "DeformableDetr", "Detr"]
)
def test_a_detr_has_as_many_answers_as_its_library_gives(tmp_path: Path, name: str, queries: int) -> None:
    import transformers

    name, *_, kind = name.split() * 2
    config = getattr(transformers, f"{name}Config")(id2label=folders.LABELS)
    config.architectures = [f"{name}ForObjectDetection"]
    config.save_pretrained(tmp_path)
    processor: Any = getattr(transformers, f"{kind}ImageProcessor")(size={"height": 96, "width": 128})
    processor.save_pretrained(tmp_path)
    classes = folders.CLASSES + (name == "Detr")
    logits, boxes = (torch.randn((1, queries, length)) for length in (classes, 4))
    outputs: Any = SimpleNamespace(logits=logits, pred_boxes=boxes.sigmoid())
    [wanted] = processor.post_process_object_detection(outputs, 0.0, [(96, 128)])
    stated = library_files.stated_in(tmp_path, library_files.config_of(tmp_path))
    about = Description(task="detect", takes="boxes", layout=stated["layout"], labels=tuple(stated["labels"].values()))
    given = [outputs.logits, outputs.pred_boxes]
    found = decoded(interpret(about, [each.shape for each in given], (96, 128)), given, (96, 128))
    order = wanted["scores"].argsort(descending=True)
    for one, key in zip(found, ("boxes", "scores", "labels"), strict=True):
        torch.testing.assert_close(one[0], wanted[key][order].to(one.dtype))


def test_a_segmenter_of_one_label_is_served_where_its_owner_says_that_it_is_a_sigmoid_s(tmp_path: Path) -> None:
    """transformers takes the greatest of one score: this label everywhere. It trains such a network with a sigmoid."""
    import transformers

    sizes = {"hidden_sizes": [8] * 4, "decoder_hidden_size": 16, "num_attention_heads": [1] * 4, "depths": [1] * 4}
    config = transformers.SegformerConfig(id2label={0: "crack"}, **sizes)
    folders.enliven(transformers.SegformerForSemanticSegmentation(config)).save_pretrained(tmp_path)
    transformers.SegformerImageProcessor(size={"height": 64, "width": 64}).save_pretrained(tmp_path)
    with pytest.raises(WeightsError, match=r'one label, .* state \{"scores": "logits"\} in model\.json if it is'):
        opened(tmp_path)
    (tmp_path / "model.json").write_text('{"scores": "logits"}')
    _, outputs = run(opened(tmp_path))
    assert set(np.unique(outputs[0])) == {0, 1}
