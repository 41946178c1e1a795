"""Preprocessing of transformers' networks: its image processors, in the keys of a sidecar.

Owns: the processors whose pixels are known here, each one's defaults for missing keys, and the meaning of their keys.
Must not import the library, nor read files. A key that is not known, or that would give each image a size of its own,
is refused by its name: none is ignored.

Source: the image processors of transformers 5.24; tests/cpu/test_library_pixels.py compares all of them with these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from models.contract.errors import WeightsError

_RESAMPLE = {1: "lanczos", 2: "bilinear", 3: "bicubic"}
"""Values of PIL.Image.Resampling. Nearest is missing: torchvision and Pillow do not agree on the nearest pixel."""
_SUFFIXES = ("imageprocessorfast", "imageprocessorpil", "imageprocessor", "featureextractor")
_HALF = {"image_mean": (0.5,) * 3, "image_std": (0.5,) * 3}
_IMAGENET = {"image_mean": (0.485, 0.456, 0.406), "image_std": (0.229, 0.224, 0.225)}
_CLIP = {
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
    "resample": 3,
}
_EDGES = {"size": {"shortest_edge": 800, "longest_edge": 1333}, "do_pad": True, **_IMAGENET}


def _square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


def _cut(shorter: int, side: int) -> dict[str, Any]:
    return {"size": {"shortest_edge": shorter}, "crop_size": _square(side), "do_center_crop": True}


@dataclass(frozen=True)
class Processor:
    """An image processor. `given`: its defaults for missing keys; `models`: the `model_type` of networks whose files
    need not name it; `keys`: its own keys; `is_square`: whether one number is the size of a square, or the shorter
    side; `masks`: whether the network is told which pixels are the image's; `crops`: whether it knows `do_center_crop`;
    `antialias`: whether a smaller image is averaged; `floats`: whether it resizes numbers without rounding them;
    `multiple_of`: divides both sides of an image that keeps their ratio, and is seen without padding.
    """

    given: Mapping[str, Any]
    models: tuple[str, ...] = ()
    keys: frozenset[str] = frozenset()
    is_square: bool = field(default=True, kw_only=True)
    masks: bool = field(default=False, kw_only=True)
    crops: bool = field(default=True, kw_only=True)
    antialias: bool = field(default=True, kw_only=True)
    floats: bool = field(default=False, kw_only=True)
    multiple_of: int | None = field(default=None, kw_only=True)


_OF_BOXES = frozenset({"format", "do_convert_annotations", "max_size"})
_OF_DEPTH = frozenset({"keep_aspect_ratio", "ensure_multiple_of", "size_divisor", "prompt_scale_to_meter"})


def _edged(models: tuple[str, ...], given: Mapping[str, Any] = _EDGES, **further: Any) -> Processor:
    """Return a processor that keeps the sides' ratio, and knows no `do_center_crop`."""
    return Processor(given, models, _OF_BOXES, is_square=False, crops=False, **further)


def _depth(models: tuple[str, ...], **further: bool) -> Processor:
    given = {"size": _square(384), "resample": 3, "ensure_multiple_of": 1, **_HALF}
    return Processor(given, models, _OF_DEPTH, **further)


PROCESSORS: Mapping[str, Processor] = {
    "Beit": Processor(
        {"size": _square(224), "crop_size": _square(224), "resample": 3, **_HALF}, ("beit", "data2vec-vision")
    ),
    "Bit": Processor(
        {**_cut(224, 224), **_CLIP},
        ("bit", "dinov2", "dinov2_with_registers", "focalnet", "hiera", "pixio"),
        is_square=False,
    ),
    "Blip": Processor({"size": _square(384), **_CLIP}, ("blip", "blip-2")),
    "CLIP": Processor(
        {**_cut(224, 224), **_CLIP},
        ("clip", "clip_vision_model", "altclip", "aimv2", "aimv2_vision_model", "groupvit", "metaclip_2", "mlcd"),
        is_square=False,
    ),
    "ChineseCLIP": Processor({**_cut(224, 224), **_CLIP}, ("chinese_clip",), is_square=False),
    "ConditionalDetr": _edged(("conditional_detr",), masks=True),
    "ConvNext": Processor(
        {"size": {"shortest_edge": 384}, "resample": 3, "crop_pct": 0.875, **_HALF},
        ("convnext", "convnextv2", "cvt", "regnet", "resnet", "van"),
        frozenset({"crop_pct"}),
        is_square=False,
    ),
    "DINOv3ViT": Processor({"size": _square(224), **_IMAGENET}, ("dinov3_vit", "dinov3_convnext"), floats=True),
    "DPT": _depth(("dpt", "depth_anything")),
    "DeformableDetr": _edged(("deformable_detr", "lw_detr"), masks=True),
    "DeiT": Processor(
        {"size": _square(256), "crop_size": _square(224), "do_center_crop": True, "resample": 3, **_HALF}, ("deit",)
    ),
    "DepthPro": Processor({"size": _square(1536), **_HALF}, ("depth_pro",), antialias=False, floats=True, crops=False),
    "Detr": _edged(("detr", "table-transformer"), masks=True),
    "EfficientNet": Processor(
        {"size": _square(346), "crop_size": _square(289), "resample": 3, "include_top": True, **_HALF},
        ("efficientnet", "align"),
        frozenset({"include_top", "rescale_offset"}),
    ),
    "Levit": Processor({**_cut(224, 224), "resample": 3, **_IMAGENET}, ("levit",), is_square=False),
    "MobileNetV1": Processor({**_cut(256, 224), **_HALF}, ("mobilenet_v1",), is_square=False),
    "MobileNetV2": Processor({**_cut(256, 224), **_HALF}, ("mobilenet_v2",), is_square=False),
    "MobileViT": Processor(
        {**_cut(224, 256), "resample": 3, "do_flip_channel_order": True},
        ("mobilevit", "mobilevitv2"),
        frozenset({"do_flip_channel_order"}),
        is_square=False,
    ),
    **{
        f"PPDocLayoutV{version}": Processor(
            {"size": _square(800), "resample": 3, "image_mean": (0,) * 3, "image_std": (1,) * 3},
            (f"pp_doclayout_v{version}",),
            _OF_BOXES,
            antialias=False,
        )
        for version in (2, 3, 4)
    },
    "PoolFormer": Processor(
        {**_cut(224, 224), "resample": 3, "crop_pct": 0.9, **_IMAGENET},
        ("poolformer",),
        frozenset({"crop_pct"}),
        is_square=False,
    ),
    "PromptDepthAnything": _depth(("prompt_depth_anything",), crops=False),
    "Pvt": Processor({"size": _square(224), "resample": 3, **_IMAGENET}, ("pvt", "pvt_v2")),
    "RTDetr": _edged(
        ("rt_detr", "rt_detr_v2", "d_fine", "deim", "deimv2"),
        {"size": _square(640), "do_normalize": False, **_IMAGENET},
    ),
    "RfDetr": _edged(("rf_detr",), antialias=False, floats=True),
    "Sapiens2": Processor(
        {"size": {"height": 1024, "width": 768}, "crop_size": _square(224), **_IMAGENET},
        ("sapiens2",),
        frozenset({"keypoint_heatmap_downscale_factor", "keypoint_heatmap_sigma"}),
    ),
    "Segformer": Processor({"size": _square(512), **_IMAGENET}, ("segformer", "upernet"), crops=False),
    "Siglip": Processor(
        {"size": _square(224), "resample": 3, **_HALF}, ("siglip", "siglip_vision_model"), is_square=False
    ),
    "Tipsv2": Processor({"size": _square(448), "do_normalize": False}, ("tipsv2",)),
    "Tipsv2Dpt": Processor({"size": _square(448), "do_normalize": False}, ("tipsv2_dpt",)),
    "ViT": Processor(
        {"size": _square(224), **_HALF},
        ("vit", "dinat", "ijepa", "nat", "swiftformer", "swin", "swinv2", "vit_mae", "vit_msn"),
    ),
    "Yolos": _edged(("yolos",), multiple_of=16),
}
"""Processors by the beginnings of their names: ViTImageProcessor, ViTImageProcessorFast, ViTFeatureExtractor."""

_COMMON = frozenset(
    {
        *("size", "crop_size", "pad_size", "do_resize", "do_center_crop", "do_pad", "resample", "do_rescale"),
        *("rescale_factor", "do_normalize", "image_mean", "image_std"),
        *("image_processor_type", "feature_extractor_type"),
        # Keys of the call by a program, or for data beside images.
        *("do_convert_rgb", "data_format", "input_data_format", "return_tensors", "device", "disable_grouping"),
        *("processor_class", "image_seq_length", "model_input_names", "default_to_square", "transformers_version"),
        *("do_reduce_labels", "reduce_labels"),
    }
)


def pixels_of(cfg: Mapping[str, Any], model_type: str, where: str, *, is_sized: bool = False) -> dict[str, Any]:
    """Convert a file's image processor to a sidecar's keys. `where`: the file's name; `is_sized`: its owner states the
    geometry, and the file's rules for that are not read.

    Raises WeightsError for preprocessing that one input of a fixed size cannot have, and any error for senseless
    values.
    """
    name, kind = _processor_of(cfg, model_type, where)
    found: dict[str, Any] = {**kind.given, **{key: value for key, value in cfg.items() if value is not None}}
    # The library does no step whose key is null; of most other keys that are null it takes the default.
    undone = {
        key for key in cfg if cfg[key] is None and (key.startswith("do_") or (name, key) == ("PoolFormer", "crop_pct"))
    }
    found |= dict.fromkeys(undone, False)
    for key, value in found.items():
        if key not in _COMMON | kind.keys and not key.startswith("_") and value not in (None, False):
            _refuse(where, key, value, f"is nothing that {name}ImageProcessor is known to take")
    if found.get("resample", 2) not in _RESAMPLE:
        nearest = '{"crop": 1, "resize_by": "pillow", "interpolation": "nearest"}'
        why = f"is none of 1 to 3 (lanczos, bilinear, bicubic); for 0, nearest pixels, the closest is {nearest}"
        _refuse(where, "resample", found["resample"], why)
    interpolation = _RESAMPLE[found.get("resample", 2)]
    if kind.floats and interpolation in ("bicubic", "lanczos"):
        _refuse(where, "resample", found["resample"], "has this processor make levels outside those of a picture")
    if interpolation == "lanczos" and not kind.antialias:
        _refuse(where, "resample", found["resample"], "averages, which this processor does not")
    stated: dict[str, Any] = {"resize_by": "torch", "antialias": kind.antialias, "interpolation": interpolation}
    if found.get("do_flip_channel_order"):
        stated["channels"] = "bgr"
    mean, std = _normalisation(found, name)
    stated |= {"mean": mean, "std": std}
    if is_sized:
        return stated
    stated |= _size(found, name, kind, mean, where)
    if found.get("do_pad") and (padded := found.get("pad_size")) and _pair(_sides(padded, True)) != stated["size"]:
        _refuse(where, "pad_size", padded, "would fill up its images")
    if found.get("do_pad") and name == "Sapiens2":
        _refuse(where, "do_pad", True, "would keep the ratio of an image's sides, and fill it up")
    if interpolation == "lanczos" and stated["resize"] == "stretch":
        stated["crop"] = 1.0
    return stated


def _processor_of(cfg: Mapping[str, Any], model_type: str, where: str) -> tuple[str, Processor]:
    stated = str(cfg.get("image_processor_type") or cfg.get("feature_extractor_type") or "")
    if not stated:
        for name, kind in PROCESSORS.items():
            if model_type in kind.models:
                return name, kind
        raise WeightsError(f"{where} names no image_processor_type that is known: {_remedy(where)}.")
    short = stated.lower()
    for suffix in _SUFFIXES:
        short = short.removesuffix(suffix)
    for name, kind in PROCESSORS.items():
        if name.lower() == short:
            return name, kind
    raise WeightsError(f"{stated[:100]} in {where} is no known image processor: {_remedy(where)}.")


def _normalisation(cfg: Mapping[str, Any], name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and deviation of pixels divided by 255, with any other factor and an offset included in them."""
    factor = 255 * cfg.get("rescale_factor", 1 / 255) if cfg.get("do_rescale", True) else 255
    offset = 1.0 if cfg.get("rescale_offset") and cfg.get("do_rescale", True) else 0.0
    is_normalised = cfg.get("do_normalize", True) and name != "MobileViT"  # Its class does not, in spite of this key.
    mean, std = (_three(cfg[key]) for key in ("image_mean", "image_std")) if is_normalised else ((0.0,) * 3, (1.0,) * 3)
    deviation = tuple(each / factor for each in std)
    if name == "EfficientNet" and cfg.get("include_top", True):  # It divides by the deviation once more.
        deviation = tuple(one * two for one, two in zip(deviation, _three(cfg["image_std"]), strict=True))
    return tuple((each + offset) / factor for each in mean), deviation


def _three(value: Any) -> tuple[float, ...]:
    values = (value,) if isinstance(value, int | float) else tuple(value)
    return values * 3 if len(values) == 1 else values


def _size(cfg: Mapping[str, Any], name: str, kind: Processor, mean: tuple[float, ...], where: str) -> dict[str, Any]:
    knows = kind.is_square or kind.crops
    is_square = knows and bool(cfg.get("default_to_square", kind.is_square))
    size = _sides(cfg["size"], is_square, cfg.get("max_size"))
    crop = _sides(cfg["crop_size"], True) if cfg.get("do_center_crop") and kind.crops else None
    shorter, longer = size.get("shortest_edge"), size.get("longest_edge")
    if not cfg.get("do_resize", True):
        _refuse_own_size(where, "do_resize", False)
    if cfg.get("keep_aspect_ratio"):
        _refuse_own_size(where, "keep_aspect_ratio", True)
    if "height" in size:
        return _of_shape(cfg, _pair(size), crop, where)
    is_unpadded = kind.multiple_of is not None and not cfg.get("pad_size")
    if (kind.masks or is_unpadded) and shorter and longer and crop is None:
        pad = tuple(min(255, max(0, round(255 * each))) for each in mean)
        padded = _pair(_sides(cfg.get("pad_size") or longer - longer % (kind.multiple_of or 1), True))
        if cfg.get("pad_size") and min(padded) < longer:
            _refuse(where, "pad_size", cfg["pad_size"], f"has no room for images of {longer} pixels")
        found = {"size": padded, "resize": "top-left", "resize_to": (shorter, longer), "pad": pad}
        return {**found, "multiple_of": kind.multiple_of}
    if not shorter or longer:
        _refuse_own_size(where, "size", cfg["size"])
    if name == "ConvNext":
        if crop is not None:
            _refuse(where, "do_center_crop", True, "would cut out of what this processor has cut out")
        if shorter >= 384:
            return {"size": shorter, "resize": "stretch"}
        return {"size": shorter, "resize": "centre", "resize_to": int(shorter / cfg["crop_pct"])}
    if crop is None:
        _refuse_own_size(where, "size", cfg["size"])
    if name == "PoolFormer" and cfg["crop_pct"]:
        shorter = int(shorter / cfg["crop_pct"])
    if name == "Levit":
        shorter = int(256 / 224 * shorter)
    return {"size": _pair(crop), "resize": "centre", "resize_to": shorter}


def _of_shape(
    cfg: Mapping[str, Any], shape: tuple[int, int], crop: Mapping[str, int] | None, where: str
) -> dict[str, Any]:
    if multiple := cfg.get("ensure_multiple_of"):
        shape = round(shape[0] / multiple) * multiple, round(shape[1] / multiple) * multiple
    if share := cfg.get("crop_pct"):  # PoolFormer's key: the shorter side, for a square input.
        if crop is None:
            _refuse_own_size(where, "crop_pct", share)
        larger = int(shape[0] / share), int(shape[1] / share)
        return {"size": _pair(crop), "resize": "centre", "resize_to": larger[0] if shape[0] == shape[1] else larger}
    seen = shape if crop is None else _pair(crop)
    divisor = cfg.get("size_divisor")
    is_padded = cfg.get("do_pad", "ensure_multiple_of" not in cfg)
    if divisor and is_padded and any(side % divisor for side in seen):
        _refuse(where, "size_divisor", divisor, f"would fill up images of {seen[0]} x {seen[1]}")
    if crop is not None:
        return {"size": seen, "resize": "centre", "resize_to": shape}
    return {"size": shape, "resize": "stretch"}


def _sides(size: Any, is_square: bool, longest: Any = None) -> dict[str, int]:
    if isinstance(size, Mapping):
        return {key: value for key, value in size.items() if value is not None}
    if isinstance(size, int):
        found = _square(size) if is_square else {"shortest_edge": size}
        return {**found, "longest_edge": longest} if longest and not is_square else found
    height, width = size
    return {"height": height, "width": width}


def _pair(size: Mapping[str, int]) -> tuple[int, int]:
    return size["height"], size["width"]


def _remedy(where: str) -> str:
    return (
        'state "size", "resize", "resize_by", "interpolation", "mean" and "std" in a sidecar beside the weights '
        f"(docs/which-file.md), and {where} is not read"
    )


def _refuse(where: str, key: str, value: Any, why: str) -> NoReturn:
    raise WeightsError(f'"{key}": {str(value)[:100]} in {where} {why}: {_remedy(where)}.')


def _refuse_own_size(where: str, key: str, value: Any) -> NoReturn:
    edge = value.get("shortest_edge") if isinstance(value, Mapping) else value
    raise WeightsError(
        f'"{key}": {str(value)[:100]} in {where} gives each image a size of its own: state one in a sidecar beside '
        f'the weights, {{"resize": "stretch", "size": {[edge, edge] if edge and edge % 14 == 0 else [480, 640]}}}.'
    )
