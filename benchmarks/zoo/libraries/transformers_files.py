"""transformers: folders as `save_pretrained` writes them, small networks of many architectures."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.zoo.alive import draw, enliven, measure, spread
from benchmarks.zoo.networks import LABELS, Kind, Made, Network, as_arrays
from benchmarks.zoo.pixels import Images

_CLASSES = len(LABELS)
_NAMED: dict[str, Any] = {"id2label": dict(enumerate(LABELS)), "label2id": {name: n for n, name in enumerate(LABELS)}}
_TINY: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
_VIT: dict[str, Any] = {"image_size": 64, "patch_size": 16, **_TINY}
_STAGES: dict[str, Any] = {
    "embedding_size": 16, "hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1], "layer_type": "basic",
}  # fmt: skip
_LAST = ["stage2", "stage3", "stage4"]
_DETR: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_queries": 30, "use_timm_backbone": False,
    "use_pretrained_backbone": False, "backbone": None,
}  # fmt: skip
_RT: dict[str, Any] = {
    "encoder_hidden_dim": 32, "encoder_in_channels": [32, 48, 64], "encoder_layers": 1, "encoder_ffn_dim": 64,
    "encoder_attention_heads": 2, "d_model": 32, "num_queries": 30, "decoder_in_channels": [32, 32, 32],
    "decoder_ffn_dim": 64, "decoder_layers": 2, "decoder_attention_heads": 2, "num_denoising": 0,
}  # fmt: skip
_HG: dict[str, Any] = {
    "embedding_size": 16, "hidden_sizes": [32, 32, 48, 64], "stem_channels": [3, 8, 16],
    "stage_in_channels": [16, 32, 32, 48], "stage_mid_channels": [8, 8, 8, 8], "stage_out_channels": [32, 32, 48, 64],
    "stage_num_blocks": [1, 1, 1, 1], "stage_numb_of_layers": [2, 2, 2, 2],
}  # fmt: skip


def _square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


def _given(processor: Any, images: Images) -> list[Any]:
    return [processor(images=each.convert("RGB"), return_tensors="pt") for each in images]


def _saved(folder: Path, network: Any, processor: Any) -> tuple[Any, Any]:
    """Save, and read again as the library does."""
    import transformers

    network.save_pretrained(folder / "saved")
    processor.save_pretrained(folder / "saved")
    read = transformers.AutoImageProcessor.from_pretrained(folder / "saved")
    return type(network).from_pretrained(folder / "saved").eval(), read


def _classes(parts: Callable[[], tuple[Any, Any]], folder: Path, images: Images, form: str = "softmax") -> Made:
    network, processor = parts()
    pixels = _given(processor, images)
    together = torch.cat([each["pixel_values"] for each in pixels])
    many = network.config.num_labels
    enliven(network, lambda: network(pixel_values=together), many)
    network, processor = _saved(folder, network, processor)
    with torch.inference_mode():
        found = [network(pixel_values=each["pixel_values"]).logits[0] for each in _given(processor, images)]
    if form == "values":
        return Made("{}/saved", "values", as_arrays(found))
    return Made(
        "{}/saved", "scores", as_arrays([each.softmax(0) if form == "softmax" else each.sigmoid() for each in found])
    )


def _boxes(
    parts: Callable[[], tuple[Any, Any]], folder: Path, images: Images, sidecar: dict[str, Any] | None = None
) -> Made:
    network, processor = parts()
    pixels = _given(processor, images)
    draw(network, 1.5)
    network.eval()

    def run() -> None:
        for each in pixels:
            network(**each)

    measure(network, run)
    several = len(getattr(network.config, "id2label", LABELS))
    has_background = any(isinstance(each, nn.Linear) and each.out_features == several + 1 for each in network.modules())
    level = -1.0 if has_background else -4.0  # Of sigmoids few pass: the library answers with one box a query at most.
    heads = [
        each
        for name, each in network.named_modules()
        if isinstance(each, nn.Linear) and each.out_features in (several, several + 1) and "bbox" not in name
    ]
    for head in heads:
        spread(head, run, 1.5, level=level)
    network, processor = _saved(folder, network, processor)
    answers = []
    with torch.inference_mode():
        for image, each in zip(images, _given(processor, images), strict=True):
            [found] = processor.post_process_object_detection(
                network(**each), threshold=0.25, target_sizes=[image.size[::-1]]
            )
            boxes = found["boxes"].clamp(min=0)
            boxes = torch.minimum(boxes, torch.tensor([*image.size, *image.size]))
            answers.append(torch.cat((boxes, found["scores"][:, None], found["labels"][:, None].float()), 1))
    return Made("{}/saved", "boxes", as_arrays(answers))


def _map(parts: Callable[[], tuple[Any, Any]], side: int, folder: Path, images: Images) -> Made:
    network, processor = parts()
    images = [each.resize((side, side)) for each in images]
    together = torch.cat([each["pixel_values"] for each in _given(processor, images)])
    enliven(network, lambda: network(pixel_values=together), _CLASSES)
    network, processor = _saved(folder, network, processor)
    with torch.inference_mode():
        found = [network(pixel_values=each["pixel_values"]) for each in _given(processor, images)]
        maps = [processor.post_process_semantic_segmentation(each, [(side, side)])[0].float() for each in found]
    return Made("{}/saved", "class_map", as_arrays(maps), sides=(side, side))


def _other(kind: Kind, output: str, parts: Callable[[], tuple[Any, Any]], folder: Path, images: Images) -> Made:
    """Depth and vectors: `output` is the library's name for them."""
    network, processor = parts()
    pixels = _given(processor, images)
    together = torch.cat([each["pixel_values"] for each in pixels])
    if hasattr(network, "get_image_features"):
        enliven(network.vision_model, lambda: network.vision_model(pixel_values=together))
    else:
        enliven(network, lambda: network(pixel_values=together))
    network, processor = _saved(folder, network, processor)
    with torch.inference_mode():
        if hasattr(network, "get_image_features"):
            found = [
                network.get_image_features(pixel_values=each["pixel_values"]) for each in _given(processor, images)
            ]
            found = [each if isinstance(each, torch.Tensor) else each[output] for each in found]
        else:
            found = [network(pixel_values=each["pixel_values"])[output] for each in _given(processor, images)]
    return Made("{}/saved", kind, as_arrays([each[0] for each in found]))


def _timm_wrapper(folder: Path, images: Images) -> Made:
    import timm
    import transformers as t

    known: Any = timm.get_pretrained_cfg("resnet10t")
    about = {key: value for key, value in known.to_dict().items() if not callable(value)}
    network = t.TimmWrapperForImageClassification(
        t.TimmWrapperConfig(architecture="resnet10t", pretrained_cfg=about, num_labels=_CLASSES)
    )
    processor = t.TimmWrapperImageProcessor(pretrained_cfg=about)
    together = torch.cat([processor(each.convert("RGB"), return_tensors="pt")["pixel_values"] for each in images])
    enliven(network, lambda: network(pixel_values=together), _CLASSES)
    network.save_pretrained(folder / "saved")
    processor.save_pretrained(folder / "saved")
    with torch.inference_mode():
        found = network(pixel_values=together).logits.softmax(1)
    return Made("{}/saved", "scores", as_arrays([*found]))


def _optimum(folder: Path, images: Images) -> Made:
    """Write an .onnx with optimum's names of inputs and outputs; both configurations stand beside it."""
    network, processor = _made_vit()
    together = torch.cat([each["pixel_values"] for each in _given(processor, images)])
    enliven(network, lambda: network(pixel_values=together), _CLASSES)
    network, processor = _saved(folder, network, processor)

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.network(pixel_values=pixels).logits
            return logits

    torch.onnx.export(
        Named(), (together[:1],), str(folder / "saved" / "model.onnx"), dynamo=False, input_names=["pixel_values"],
        output_names=["logits"], dynamic_axes={"pixel_values": {0: "batch_size"}, "logits": {0: "batch_size"}},
    )  # fmt: skip
    (folder / "saved" / "model.safetensors").unlink()
    with torch.inference_mode():
        found = [network(pixel_values=each["pixel_values"]).logits[0].softmax(0) for each in _given(processor, images)]
    return Made("{}/saved", "scores", as_arrays(found))


def _stretched(folder: Path, images: Images) -> Made:
    """Depth Anything whose sizes follow the picture: refused, until one size is stated, as a stretched one."""
    import transformers as t

    network = t.DepthAnythingForDepthEstimation(_depth_anything())
    processor = t.DPTImageProcessor(size=_square(70), keep_aspect_ratio=True, ensure_multiple_of=14)
    exact = t.DPTImageProcessor(size=_square(70))
    together = torch.cat([each["pixel_values"] for each in _given(exact, images)])
    enliven(network, lambda: network(pixel_values=together))
    network.save_pretrained(folder / "saved")
    processor.save_pretrained(folder / "saved")
    network.save_pretrained(folder / "stated")
    processor.save_pretrained(folder / "stated")
    with torch.inference_mode():
        found = [network(pixel_values=each["pixel_values"]).predicted_depth[0] for each in _given(exact, images)]
    (folder / "stated" / "model.json").write_text(json.dumps({"resize": "stretch", "size": [70, 70]}))
    return Made("{}/stated", "depth", as_arrays(found), refused="{}/saved", line='"resize": "stretch"')


def _depth_anything() -> Any:
    import transformers as t

    return t.DepthAnythingConfig(
        backbone_config=t.Dinov2Config(
            image_size=70, patch_size=14, **{**_TINY, "num_hidden_layers": 4},
            out_features=["stage1", "stage2", "stage3", "stage4"], reshape_hidden_states=False,
        ),
        reassemble_hidden_size=32, neck_hidden_sizes=[8, 16, 24, 32], fusion_hidden_size=16, head_hidden_size=8,
    )  # fmt: skip


def _made_vit(**more: Any) -> tuple[Any, Any]:
    import transformers as t

    return t.ViTForImageClassification(t.ViTConfig(**_VIT, **{**_NAMED, **more})), t.ViTImageProcessor(size=_square(64))


def _made(name: str) -> tuple[Any, Any]:
    """Return the network and the image processor of a row."""
    import transformers as t

    def resnet(*stages: str) -> Any:
        return t.ResNetConfig(**_STAGES, out_features=list(stages))

    edges = {"shortest_edge": 256, "longest_edge": 352}
    crop = t.BitImageProcessor
    known: dict[str, Callable[[], tuple[Any, Any]]] = {
        "beit": lambda: (t.BeitForImageClassification(t.BeitConfig(**_VIT, **_NAMED)),
                         t.BeitImageProcessor(size=_square(72), crop_size=_square(64), do_center_crop=True)),
        "swinv2": lambda: (t.Swinv2ForImageClassification(t.Swinv2Config(
            image_size=64, embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=4, **_NAMED)),
            t.ViTImageProcessor(size=_square(64), resample=3)),
        "dinov2": lambda: (t.Dinov2ForImageClassification(t.Dinov2Config(
            image_size=70, patch_size=14, **_TINY, **_NAMED)), crop(size={"shortest_edge": 80}, crop_size=_square(70))),
        "bit": lambda: (t.BitForImageClassification(t.BitConfig(
            embedding_size=16, hidden_sizes=[32, 32, 64, 64], depths=[1, 1, 1, 1], num_groups=8, **_NAMED)),
            crop(size={"shortest_edge": 72}, crop_size=_square(64))),
        "focalnet": lambda: (t.FocalNetForImageClassification(t.FocalNetConfig(
            image_size=64, embed_dim=16, depths=[1, 1, 1, 1], hidden_sizes=[16, 32, 64, 128], **_NAMED)),
            crop(size={"shortest_edge": 72}, crop_size=_square(64))),
        "pvt_v2": lambda: (t.PvtV2ForImageClassification(t.PvtV2Config(
            image_size=64, depths=[1, 1, 1, 1], hidden_sizes=[8, 16, 24, 32], num_attention_heads=[1, 1, 2, 2],
            **_NAMED)), t.PvtImageProcessor(size=_square(64))),
        "levit": lambda: (t.LevitForImageClassification(t.LevitConfig(
            image_size=64, hidden_sizes=[32, 48, 64], num_attention_heads=[2, 3, 4], depths=[1, 1, 1],
            key_dim=[8, 8, 8], **_NAMED)), t.LevitImageProcessor(size={"shortest_edge": 64}, crop_size=_square(64))),
        "mobilenetv1": lambda: (t.MobileNetV1ForImageClassification(t.MobileNetV1Config(
            image_size=64, depth_multiplier=0.25, **_NAMED)),
            t.MobileNetV1ImageProcessor(size={"shortest_edge": 72}, crop_size=_square(64))),
        "dinov2-registers": lambda: (t.Dinov2WithRegistersForImageClassification(t.Dinov2WithRegistersConfig(
            image_size=70, patch_size=14, **_TINY, **_NAMED)), crop(size={"shortest_edge": 80}, crop_size=_square(70))),
        "mobilevitv2": lambda: (t.MobileViTV2ForImageClassification(t.MobileViTV2Config(image_size=64, **_NAMED)),
                                t.MobileViTImageProcessor(size={"shortest_edge": 72}, crop_size=_square(64))),
        "poolformer": lambda: (t.PoolFormerForImageClassification(t.PoolFormerConfig(
            hidden_sizes=[16, 24, 32, 40], depths=[1, 1, 1, 1], **_NAMED)), t.PoolFormerImageProcessor(
            size={"shortest_edge": 64}, crop_size=_square(64), crop_pct=0.8)),
        "regnet": lambda: (t.RegNetForImageClassification(t.RegNetConfig(
            embedding_size=16, hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1], groups_width=16, **_NAMED)),
            t.ConvNextImageProcessor(size={"shortest_edge": 64}, crop_pct=0.9)),
        "detr": lambda: (t.DetrForObjectDetection(t.DetrConfig(**_DETR, **_NAMED, backbone_config=resnet("stage4"))),
                         t.DetrImageProcessor(size=edges, pad_size=_square(352))),
        "table-transformer": lambda: (t.TableTransformerForObjectDetection(t.TableTransformerConfig(
            **_DETR, **_NAMED, backbone_config=resnet("stage4"))),
            t.DetrImageProcessor(size=edges, pad_size=_square(352))),
        "deformable-detr": lambda: (t.DeformableDetrForObjectDetection(t.DeformableDetrConfig(
            **_DETR, **_NAMED, backbone_config=resnet(*_LAST), num_feature_levels=3)),
            t.DeformableDetrImageProcessor(size=edges, pad_size=_square(352))),
        "rt-detr": lambda: (t.RTDetrForObjectDetection(t.RTDetrConfig(**_RT, **_NAMED,
            backbone_config=t.RTDetrResNetConfig(**_STAGES, out_features=_LAST))),
            t.RTDetrImageProcessor(size=_square(160))),
        "d-fine": lambda: (t.DFineForObjectDetection(t.DFineConfig(**_RT, **_NAMED,
            backbone_config=t.HGNetV2Config(**_HG, out_features=_LAST))), t.RTDetrImageProcessor(size=_square(160))),
        "yolos": lambda: (t.YolosForObjectDetection(t.YolosConfig(
            image_size=[160, 160], num_detection_tokens=30, **_TINY, **_NAMED)), t.YolosImageProcessor(size=edges)),
        "segformer": lambda: (t.SegformerForSemanticSegmentation(t.SegformerConfig(
            hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], decoder_hidden_size=32,
            num_attention_heads=[1, 1, 2, 2], **_NAMED)), t.SegformerImageProcessor(size=_square(96))),
        "beit-seg": lambda: (t.BeitForSemanticSegmentation(t.BeitConfig(
            **{**_VIT, "num_hidden_layers": 4}, out_indices=[1, 2, 3, 4], use_auxiliary_head=False, **_NAMED)),
            t.BeitImageProcessor(size=_square(64), do_center_crop=False)),
        "dpt": lambda: (t.DPTForDepthEstimation(t.DPTConfig(
            **{**_VIT, "num_hidden_layers": 4}, backbone_out_indices=[0, 1, 2, 3], fusion_hidden_size=16,
            neck_hidden_sizes=[8, 16, 24, 32], is_hybrid=False)), t.DPTImageProcessor(size=_square(64))),
        "siglip": lambda: (t.SiglipModel(t.SiglipConfig(
            vision_config=_VIT, text_config={**_TINY, "vocab_size": 20, "pad_token_id": 0, "bos_token_id": 1,
                                             "eos_token_id": 2})), t.SiglipImageProcessor(size=_square(64))),
        "clip": lambda: (t.CLIPVisionModelWithProjection(t.CLIPVisionConfig(**_VIT, projection_dim=16)),
                         t.CLIPImageProcessor(size={"shortest_edge": 64}, crop_size=_square(64))),
    }  # fmt: skip
    return known[name]()


def _row(name: str, file: str, build: Callable[[Path, Images], Made]) -> Network:
    return Network(f"hf-{name}", "transformers", file, build, "transformers", "network and its image processor")


_FOLDER = "save_pretrained"
_CLASSIFIERS = (
    "beit", "swinv2", "dinov2", "bit", "focalnet", "pvt_v2", "levit", "mobilenetv1", "dinov2-registers",
    "mobilevitv2", "poolformer", "regnet",
)  # fmt: skip
_DETECTORS = ("detr", "table-transformer", "deformable-detr", "rt-detr", "d-fine", "yolos")

ROWS = [
    *(_row(name, _FOLDER, partial(_classes, partial(_made, name))) for name in _CLASSIFIERS),
    _row("vit-multi-label", f"{_FOLDER}, problem_type multi_label_classification", partial(
        _classes, partial(_made_vit, problem_type="multi_label_classification"), form="sigmoid")),
    _row("vit-regression", f"{_FOLDER}, problem_type regression", partial(_classes, partial(
        _made_vit, problem_type="regression", id2label={0: "age"}, label2id={"age": 0}), form="values")),
    _row("timm-wrapper", f"{_FOLDER} of TimmWrapper", _timm_wrapper),
    _row("optimum", ".onnx and both configurations", _optimum),
    *(_row(name, _FOLDER, partial(_boxes, partial(_made, name))) for name in _DETECTORS),
    _row("segformer", _FOLDER, partial(_map, partial(_made, "segformer"), 96)),
    _row("beit-seg", _FOLDER, partial(_map, partial(_made, "beit-seg"), 64)),
    _row("dpt", _FOLDER, partial(_other, "depth", "predicted_depth", partial(_made, "dpt"))),
    _row("depth-anything", f"{_FOLDER}, keep_aspect_ratio", _stretched),
    _row("siglip", f"{_FOLDER}, with its text network", partial(
        _other, "vector", "pooler_output", partial(_made, "siglip"))),
    _row("clip", _FOLDER, partial(_other, "vector", "image_embeds", partial(_made, "clip"))),
]  # fmt: skip
