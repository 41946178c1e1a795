"""What timm and Hugging Face's transformers write beside weights: which task they are for, and how images come in.

Owns: `config.json` of both and `preprocessor_config.json`, read as data and said in the keys of a sidecar
(models.exports.metadata.Sidecar), and finding the package that builds their networks. Must not import either library,
nor read weights.

Sources: timm.data.create_transform (1.0.31), transformers' image processors (5.24) and the files that both write.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from anychip_base.extras import how_to_install
from models.contract.errors import WeightsError, reason_of
from models.contract.model import LIBRARIES
from models.contract.regular import read_regular

GROUP = "anychip.libraries"
"""Of the entry point of the module with `library`, `implied_by` and `built` (anychip_compat.library_networks)."""
CONFIG, PREPROCESSOR = "config.json", "preprocessor_config.json"
MAX_SIDE = 1 << 16
_RESAMPLE = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}  # PIL.Image.Resampling
_TASKS = {
    "ForImageClassification": "classify",
    "ForImageClassificationWithTeacher": "classify",
    "ForObjectDetection": "detect",
    "ForInstanceSegmentation": "segment",
    "ForUniversalSegmentation": "segment",
    "ForSemanticSegmentation": "segment_semantic",
    "ForDepthEstimation": "depth",
}
"""By how the names of transformers' classes end; others are networks of vectors where they take images."""
_SOFTMAX = ("detr", "yolos", "table-transformer", "maskformer", "mask2former")
"""Of model_type: those that score "no object" as a class of its own, the last, and choose by softmax."""


def library_of(architecture: str) -> str:
    """`timm`, `transformers`, or "" for an architecture of neither."""
    name, slash, _ = architecture.partition("/")
    return name if slash and name in LIBRARIES else ""


@cache
def builder() -> Any:
    """The module that builds networks of these libraries. Raises WeightsError where it is not installed."""
    for entry in entry_points(group=GROUP):
        return entry.load()
    raise WeightsError(f"networks of timm and transformers are built by a package: {how_to_install('compat')}.")


def config_of(folder: Path) -> dict[str, Any]:
    """`config.json` of timm or transformers in a folder; empty where there is none of either. Raises WeightsError."""
    found = _json(folder / CONFIG)
    is_timm = isinstance(found.get("architecture"), str) and isinstance(found.get("pretrained_cfg", {}), Mapping)
    return found if is_timm or isinstance(found.get("model_type"), str) else {}


def is_timm(config: Mapping[str, Any]) -> bool:
    """Whether a configuration is timm's."""
    return "architecture" in config


def class_of(config: Mapping[str, Any]) -> str:
    """The class of a network of transformers, "" where its configuration names none. Raises WeightsError."""
    names = config.get("architectures") or [""]
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise WeightsError(f'"architectures" in {CONFIG} is {str(names)[:100]}, and no list of names.')
    return names[0]


def stated_in(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a sidecar, as far as files in the folder say them. Raises WeightsError."""
    with _sense():
        return _stated_in(folder, config)


@contextlib.contextmanager
def _sense() -> Iterator[None]:
    """Whatever else than these files ever hold is a WeightsError."""
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise WeightsError(
            f"{CONFIG} or {PREPROCESSOR} has a value that makes no sense: {reason_of(error)}."
        ) from error


def _stated_in(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    if is_timm(config):
        labels = config.get("label_names")
        known: dict[str, Any] = {"labels": labels} if isinstance(labels, list) else {}
        task = "embed" if config.get("num_classes") == 0 else "classify"
        return {"task": task, **known, **timm_preprocessing(config.get("pretrained_cfg", {}))}
    labels = config.get("id2label")
    known = {"labels": {int(key): str(name) for key, name in labels.items()}} if isinstance(labels, Mapping) else {}
    task = task_of(config)
    if task in ("embed", "depth"):
        known = {}
    if task == "classify":
        known |= scores_of(config)
    layout = {"layout": queries_of(config)} if task in ("detect", "segment") else {}
    return {"task": task, **known, **layout, **preprocessor_of(folder)}


def preprocessor_of(folder: Path) -> dict[str, Any]:
    """How images come into a network of transformers, in a sidecar's keys. Raises WeightsError."""
    with _sense():
        return _preprocessing(_json(folder / PREPROCESSOR), config_of(folder))


def size_in(folder: Path) -> tuple[int, int] | None:
    """Height and width of the input, where files in the folder say it. Raises WeightsError."""
    config = config_of(folder)
    found = stated_in(folder, config).get("size") if config else None
    if found is None or (isinstance(found, int) and 0 < found <= MAX_SIDE):
        return None if found is None else (found, found)
    with _sense():
        height, width = found
        if not all(isinstance(each, int) and 0 < each <= MAX_SIDE for each in (height, width)):
            raise ValueError(f"an input of {str(found)[:100]}")
        return height, width


def task_of(config: Mapping[str, Any]) -> str:
    """The task of a network of transformers."""
    name = class_of(config)
    found = next((task for ending, task in _TASKS.items() if name.endswith(ending)), "embed")
    if found == "classify" and config.get("problem_type") == "regression":
        return "regress"
    return "segment_semantic" if name.startswith("UperNet") else found


def scores_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The `scores` of a classifier of transformers, as its own pipeline has them: empty for softmax of logits."""
    return {"scores": "sigmoid"} if config.get("problem_type") == "multi_label_classification" else {}


def queries_of(config: Mapping[str, Any]) -> str:
    """The layout of a network's queries: `rfdetr` where each class has a score of its own, else `softmax`."""
    return "softmax" if config.get("model_type") in _SOFTMAX else "rfdetr"


def timm_preprocessing(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """What timm.data.create_transform makes of a pretrained_cfg, for evaluation; Pillow resizes."""
    _, height, width = cfg.get("input_size") or (3, 224, 224)
    how = {"squash": "stretch", "border": "letterbox"}.get(cfg.get("crop_mode") or "center", "centre")
    mean = cfg.get("mean") or (0.485, 0.456, 0.406)
    pad = {"pad": tuple(round(255 * each) for each in mean)} if how == "letterbox" else {}
    return {
        "size": (height, width),
        "resize": how,
        "crop": cfg.get("crop_pct") or 0.875,
        "interpolation": cfg.get("interpolation") or "bicubic",
        "resize_by": "pillow",
        "mean": mean,
        "std": cfg.get("std") or (0.229, 0.224, 0.225),
        **pad,
    }


def _preprocessing(cfg: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """What an image processor of transformers does, as far as one input of a fixed size can be given it."""
    if not cfg:
        side = config.get("image_size")
        return {"size": side} if isinstance(side, int) else {}
    kind = str(cfg.get("image_processor_type") or cfg.get("feature_extractor_type") or "")
    stated: dict[str, Any] = {"resize_by": "torch", "antialias": True}
    stated["interpolation"] = _RESAMPLE.get(cfg.get("resample", 2), "bilinear")
    if stated["interpolation"] == "lanczos":
        stated["resize_by"] = "pillow"
    # Pixels are divided by 255 here: another factor, and an offset after it, become part of mean and deviation.
    factor = 255 * (cfg.get("rescale_factor") or 1 / 255) if cfg.get("do_rescale", True) else 255
    offset = 1.0 if cfg.get("rescale_offset") else 0.0
    is_normalised = cfg.get("do_normalize", True) and cfg.get("image_mean") is not None
    mean = cfg["image_mean"] if is_normalised else (0.0, 0.0, 0.0)
    std = cfg["image_std"] if is_normalised else (1.0, 1.0, 1.0)
    stated["mean"] = tuple((each + offset) / factor for each in mean)
    stated["std"] = tuple(each / factor for each in std)
    if kind.startswith("EfficientNet") and cfg.get("include_top", True):  # It divides by the deviation once more.
        stated["std"] = tuple(one * other for one, other in zip(stated["std"], cfg["image_std"], strict=True))
    return stated | _size(cfg, kind, stated["mean"])


def _size(cfg: Mapping[str, Any], kind: str, mean: tuple[float, ...]) -> dict[str, Any]:
    size = cfg.get("size") or {}
    crop = cfg.get("crop_size") if cfg.get("do_center_crop") else None
    if isinstance(size, int):  # As files of before 2023 have it.
        stretches = not crop and not kind.startswith(("ConvNext", "Poolformer", "Levit", "Detr", "Yolos"))
        size = {"height": size, "width": size} if stretches else {"shortest_edge": size}
    if isinstance(crop, int):
        crop = {"height": crop, "width": crop}
    if not cfg.get("do_resize", True):
        return {"size": _pair(crop), "resize_to": _pair(crop)} if crop else {}
    shortest, longest = size.get("shortest_edge"), size.get("longest_edge")
    if kind.startswith("ConvNext") and shortest:
        if shortest >= 384:
            return {"size": shortest, "resize": "stretch"}
        return {"size": shortest, "resize": "centre", "resize_to": int(shortest / (cfg.get("crop_pct") or 224 / 256))}
    if crop and shortest:
        shortest = int(256 / 224 * shortest) if kind.startswith("Levit") else shortest
        return {"size": _pair(crop), "resize": "centre", "resize_to": shortest}
    if crop:
        return {"size": _pair(crop), "resize": "centre", "resize_to": _pair(size)}
    if shortest and longest:
        pad = tuple(min(255, max(0, round(255 * each))) for each in mean)
        padded = cfg.get("pad_size") or {"height": longest, "width": longest}
        return {"size": _pair(padded), "resize": "top-left", "resize_to": shortest, "pad": pad}
    if "height" in size:
        return {"size": _pair(size), "resize": "stretch"}
    return {"size": shortest, "resize": "centre", "resize_to": shortest} if shortest else {}


def _pair(size: Mapping[str, int]) -> tuple[int, int]:
    return size["height"], size["width"]


def _json(file: Path) -> dict[str, Any]:
    """The object in a file; empty where there is no file. Raises WeightsError."""
    content = read_regular(file)
    if content is None:
        return {}
    try:
        found = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{file.name} cannot be read as JSON: {str(error)[:200]}.") from error
    return found if isinstance(found, dict) else {}
