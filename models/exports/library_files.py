"""Files that timm and Hugging Face's transformers write beside weights: their task and their preprocessing.

Owns: reading `config.json` of both, `preprocessor_config.json` and `processor_config.json` as data, their conversion to
the keys of a sidecar (models.exports.metadata.Sidecar), and finding the package that builds their networks. Must not
import either library, nor read weights.

Sources: timm.data.create_transform (1.0.31), transformers' image processors (5.24) and the files that both write.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from anychip_base.extras import NOT_INSTALLED, entry_points
from models.contract.errors import WeightsError, reason_of
from models.contract.files import read_regular
from models.contract.model import LIBRARIES
from models.exports.processors import PROCESSORS, pixels_of

GROUP = "anychip.libraries"
"""Group of the entry point of a module with `library`, `implied_by` and `built` (anychip_compat.library_networks)."""
CONFIG, PREPROCESSOR, PROCESSOR = "config.json", "preprocessor_config.json", "processor_config.json"
OPEN_CLIP = "open_clip_config.json"
TIMM_WRAPPER = "timm_wrapper"
"""The model_type of transformers for a network that timm builds."""
MAX_SIDE = 1 << 16
_SIZED, _NORMALISED = {"resize", "size"}, {"mean", "std"}
"""Keys by which an owner states the size of images, and the scale of their levels: with all, no processor is read."""
_TASKS = {
    "ForImageClassification": "classify",
    "ForImageClassificationWithTeacher": "classify",
    "ForObjectDetection": "detect",
    "ForInstanceSegmentation": "segment",
    "ForSemanticSegmentation": "segment_semantic",
    "ForDepthEstimation": "depth",
}
"""Task by the endings of transformers' class names; other networks that take images answer with vectors."""
_LAYOUTS = {
    **dict.fromkeys(("detr", "yolos", "table-transformer"), "softmax"),
    **dict.fromkeys(("conditional_detr", "dab_detr", "deformable_detr", "lw_detr"), "deformable"),
}
"""Layouts by `model_type`; all others have `rfdetr`: each class has a score of its own, and there are as many answers
as queries.
"""


def library_of(architecture: str) -> str:
    """Return `timm`, `transformers`, or "" for an architecture of neither."""
    name, slash, _ = architecture.partition("/")
    return name if slash and name in LIBRARIES else ""


@cache
def builder() -> Any:
    """Return the module that builds networks of these libraries. Raises WeightsError if it is not installed."""
    for entry in entry_points(GROUP):
        return entry.load()
    raise WeightsError(f"networks of timm and transformers are built by anychip_compat: {NOT_INSTALLED}.")


def config_of(folder: Path) -> dict[str, Any]:
    """Read `config.json` of timm or transformers in a folder; empty if there is none of either. Raises WeightsError."""
    found = _json(folder / CONFIG)
    if isinstance(found.get("architecture"), str) and isinstance(found.get("pretrained_cfg", {}), Mapping):
        with _sense():
            return _timm_config(found)
    return found if isinstance(found.get("model_type"), str) else {}


def _timm_config(found: dict[str, Any]) -> dict[str, Any]:
    """Convert timm's configuration to its present form: before 2023 all keys of `pretrained_cfg` are at the top."""
    config = dict(found) if "pretrained_cfg" in found else {**found, "pretrained_cfg": found, "model_args": None}
    cfg = config["pretrained_cfg"]
    for key, other in (("label_names", "labels"), ("label_descriptions", ""), ("num_classes", "")):
        value = next(
            (each[name] for each in (config, cfg) for name in (key, other) if each.get(name) is not None), None
        )
        if value is not None:
            config[key] = value
    if config.get("model_type") == TIMM_WRAPPER and not class_of(config).endswith("ForImageClassification"):
        config["num_classes"] = 0
    return config


def is_timm(config: Mapping[str, Any]) -> bool:
    """Return True if timm builds the network of a configuration."""
    return "architecture" in config


def class_of(config: Mapping[str, Any]) -> str:
    """Return the class of a network of transformers, "" if its configuration names none. Raises WeightsError."""
    names = config.get("architectures") or [""]
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise WeightsError(f'"architectures" in {CONFIG} is {str(names)[:100]}, and no list of names.')
    return names[0]


@contextlib.contextmanager
def _sense() -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise WeightsError(
            f"{CONFIG} or {PREPROCESSOR} has a value that makes no sense: {reason_of(error)}."
        ) from error


def stated_in(folder: Path, config: Mapping[str, Any], own: Collection[str] = ()) -> dict[str, Any]:
    """Return the keys of a sidecar that files in the folder state. `own`: the keys that the owner states.

    Raises WeightsError.
    """
    with _sense():
        if not config:  # An exported network, whose folder is of no library.
            return preprocessor_of(folder, own)
        multiple = {"scores": "sigmoid"} if config.get("problem_type") == "multi_label_classification" else {}
        if is_timm(config):
            of_head = "regress" if config.get("problem_type") == "regression" else "classify"
            task = "embed" if config.get("num_classes") == 0 else of_head
            multiple = multiple if task == "classify" else {}
            return {"task": task, **_timm_labels(config), **multiple, **timm_preprocessing(config["pretrained_cfg"])}
        labels = config.get("id2label")
        names = {int(key): str(name) for key, name in labels.items()} if isinstance(labels, Mapping) else None
        task = task_of(config)
        known: dict[str, Any] = {} if names is None or task in ("embed", "depth") else {"labels": names}
        if task == "classify":
            known |= multiple  # As in its own pipeline; else softmax of logits.
        if task in ("detect", "segment"):
            known["layout"] = _LAYOUTS.get(str(config.get("model_type")), "rfdetr")
        return {"task": task, **known, **preprocessor_of(folder, own)}


def _timm_labels(config: Mapping[str, Any]) -> dict[str, Any]:
    names, descriptions = config.get("label_names") or config.get("id2label"), config.get("label_descriptions")
    if not isinstance(names, list):
        return {"labels": names} if isinstance(names, Mapping) else {}
    if isinstance(descriptions, list) and len(descriptions) == len(names):
        return {"labels": descriptions}
    if isinstance(descriptions, Mapping) and all(name in descriptions for name in names):
        return {"labels": [descriptions[name] for name in names]}
    return {"labels": names}


def preprocessor_of(folder: Path, own: Collection[str] = ()) -> dict[str, Any]:
    """Return the preprocessing of files of transformers or open_clip, in a sidecar's keys, unless `own` has it all.

    Raises WeightsError.
    """
    with _sense():
        config = config_of(folder)
        is_sized = set(own) >= _SIZED
        where, found = PROCESSOR, _json(folder / PROCESSOR).get("image_processor")
        if not isinstance(found, Mapping):
            where, found = PREPROCESSOR, _json(folder / PREPROCESSOR)
        if is_sized and set(own) >= _NORMALISED:
            return {}
        if not found:
            if not config:
                return _of_open_clip(found) if (found := _json(folder / OPEN_CLIP)) else {}
            if not set(own) >= _NORMALISED:
                raise WeightsError(f'{PREPROCESSOR} is missing: write it, or state "mean" and "std" in a sidecar.')
            side = config.get("image_size")
            return {"size": side} if isinstance(side, int) else {}
        return pixels_of(found, str(config.get("model_type", "")), where, is_sized=is_sized)


def size_in(folder: Path) -> tuple[int, int] | None:
    """Return height and width of the input, if files in the folder state them. Raises WeightsError."""
    found = stated_in(folder, config).get("size") if (config := config_of(folder)) else None
    if found is None:
        return None
    with _sense():
        height, width = (found, found) if isinstance(found, int) else found
        if not all(isinstance(each, int) and 0 < each <= MAX_SIDE for each in (height, width)):
            raise ValueError(f"an input of {str(found)[:100]}")
        return height, width


def task_of(config: Mapping[str, Any]) -> str:
    """Return the task of a network of transformers. Raises WeightsError for one whose head answers none."""
    name = class_of(config)
    found = next((task for ending, task in _TASKS.items() if name.endswith(ending)), "embed")
    if name.startswith("UperNet"):
        return "segment_semantic"
    if found in ("detect", "segment") and "text_config" in config:
        raise WeightsError(f"{name} finds what texts name: export it as .onnx with its texts fixed.")
    if found == "embed" and (head := re.search(r"(For[A-Z]\w*|Backbone)$", name)):
        raise WeightsError(
            f"What {name} answers ({head[0]}) is no task: save the network below its head, or export it."
        )
    return "regress" if found == "classify" and config.get("problem_type") == "regression" else found


def timm_preprocessing(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a pretrained_cfg as timm.data.create_transform does for evaluation; Pillow resizes."""
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


def export_of(folder: Path) -> str:
    """Return how to export a folder of segmentation_models_pytorch or open_clip, whose networks are not built here; ""
    for any other. Raises WeightsError.
    """
    found = _json(folder / CONFIG)
    if isinstance(found.get("encoder_name"), str) and "_model_class" in found:
        given = f"torch.rand(1, {found.get('in_channels', 3)}, 512, 512)"
        return (
            f"{folder} is of segmentation_models_pytorch, and is served from an export: torch.onnx.export("
            f'segmentation_models_pytorch.from_pretrained("{folder}").eval(), {given}, "mine.onnx")'
            ', with {"task": "segment_semantic", "labels": […]} in mine.json beside it.'
        )
    found = _json(folder / OPEN_CLIP)
    if not found:
        return ""
    with _sense():
        stated = {"task": "embed", **_of_open_clip(found)}
        side = ((found.get("model_cfg") or {}).get("vision_cfg") or {}).get("image_size", 224)
        height, width = side if isinstance(side, list) else (side, side)
    return (
        f"{folder} is of open_clip, and its images' side is served from an export: torch.onnx.export(open_clip."
        f'create_model("local-dir:{folder}").visual.eval(), torch.rand(1, 3, {height}, {width}), "mine.onnx"), with '
        f"{json.dumps(stated)} in mine.json beside it."
    )


def _of_open_clip(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the preprocessing of open_clip's configuration in a sidecar's keys."""
    cfg, usual = found.get("preprocess_cfg") or {}, PROCESSORS["CLIP"].given
    how = {"squash": "stretch", "longest": "letterbox"}.get(cfg.get("resize_mode") or "shortest", "centre")
    return {
        "mean": cfg.get("mean", usual["image_mean"]),
        "std": cfg.get("std", usual["image_std"]),
        "resize": how,
        "crop": 1,
        "interpolation": cfg.get("interpolation") or "bicubic",
        "resize_by": "pillow",
        **({"pad": 0} if how == "letterbox" else {}),
    }


def _constant(name: str) -> float:
    if name == "NaN":
        raise ValueError("a number in it is NaN")
    return float(name)


def _json(file: Path) -> dict[str, Any]:
    content = read_regular(file)
    if content is None:
        return {}
    try:
        found = json.loads(content.decode("utf-8-sig"), parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{file.parent.name}/{file.name} cannot be read as JSON: {str(error)[:200]}.") from error
    return found if isinstance(found, dict) else {}
