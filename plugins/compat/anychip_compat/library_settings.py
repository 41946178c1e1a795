"""Filter of foreign configurations for timm and transformers: only entries that describe a network pass.

Owns: the list, made of the parameters of the library's own classes. Must not build anything. An entry by which one
would read another file, download, or choose other code is refused by its name; an unknown entry never reaches it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torch import nn

from models.contract.errors import WeightsError
from models.exports.library_files import CONFIG

_NEVER = re.compile(
    r"checkpoint(_path|_file)?|(?!pretrained_window_sizes?$)pretrained.*|cache_dir|auto_map|custom_pipelines"
    r"|transformers_weights|gguf_file|quantization_config|fusion_config|kernel_config|trust_remote_code"
)
_COUNTS = re.compile(r"(.*_)?(layers|blocks|depths?)")
_MOST_LAYERS = 1000
"""Ten times as many as networks of images have. Each is built before the file's weights can contradict it."""
_ARGUMENTS = {"args", "kwargs", "cfg", "self", "device", "dtype"}
_NAME = re.compile(r"[\w.-]+")
_OF_BACKBONES = {"backbone", "use_timm_backbone", "use_pretrained_backbone", "backbone_kwargs"}
"""Keys that transformers before 5 wrote, and still reads."""
_ALWAYS = {"model_type", "num_labels", "out_features", "out_indices", "stage_names", "torch_dtype"}


def of_timm(timm: Any, name: str, given: Any) -> dict[str, Any]:
    """Check `model_args` of timm's config.json. Raises WeightsError."""
    if not _NAME.fullmatch(name) or not timm.is_model(name):
        raise WeightsError(f"timm {timm.__version__} has no network {name!r}: `timm.list_models()` names those it has.")
    _refuse_never(given, "model_args")
    module = inspect.getmodule(timm.models.model_entrypoint(name))
    assert module is not None
    networks = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, nn.Module)]
    taken = {
        argument
        for network in networks
        for each in network.__mro__
        if issubclass(each, nn.Module)
        for argument in inspect.signature(each.__init__).parameters
    }
    for key in given:
        if key not in taken - _ARGUMENTS:
            raise WeightsError(f"{key!r} of model_args in {CONFIG} is nothing that {name} of timm takes.")
    return dict(given)


def of_transformers(transformers: Any, kind: Any, given: Any) -> dict[str, Any]:
    """Check a configuration of transformers, for its class `kind`. Raises WeightsError."""
    _refuse_never(given, "")
    return _of_class(transformers, kind, given)


def _of_class(transformers: Any, kind: Any, given: Any) -> dict[str, Any]:
    within = getattr(kind, "sub_configs", None) or {}
    taken = {each.name for each in fields(kind)} | set(within) | set(kind.attribute_map) | _ALWAYS | _OF_BACKBONES
    found = {}
    for key, value in given.items():
        if key not in taken:
            continue
        if key == "backbone" and value is not None and not (isinstance(value, str) and _NAME.fullmatch(value)):
            raise WeightsError(f"{key!r} in {CONFIG} is {str(value)[:100]!r}, which is no name of a network.")
        if isinstance(value, Mapping) and (key in within or key.endswith("_config")):
            known, named = transformers.CONFIG_MAPPING, value.get("model_type")
            inner = known[named] if isinstance(named, str) and named in known else within.get(key)
            if not hasattr(inner, "attribute_map"):
                raise WeightsError(f"{key!r} in {CONFIG} does not say of which network of transformers it is.")
            value = _of_class(transformers, inner, value)  # noqa: PLW2901
        found[key] = value
    if "use_pretrained_backbone" in found:
        found["use_pretrained_backbone"] = False  # All weights are in the file.
    return found


def _refuse_never(given: Any, where: str) -> None:
    """Refuse forbidden entries at any depth."""
    if not isinstance(given, Mapping):
        raise WeightsError(f"{where or 'what'} in {CONFIG} is no object of names and values.")
    waiting: list[Any] = [given]
    while waiting:
        each = waiting.pop()
        if isinstance(each, Mapping):
            for key in each:
                if _NEVER.fullmatch(str(key)):
                    raise WeightsError(f"{key!r} in {CONFIG} is not taken: it could have other files or code read.")
                if _COUNTS.fullmatch(str(key)) and _largest(each[key]) > _MOST_LAYERS:
                    raise WeightsError(f"{key!r} in {CONFIG} is over {_MOST_LAYERS}: no such network is built.")
        if isinstance(each, Mapping | list):
            waiting += each.values() if isinstance(each, Mapping) else each


def _largest(value: Any) -> float:
    """Return the largest number in a value of JSON."""
    largest, waiting = 0.0, [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, list):
            waiting += each
        elif isinstance(each, int | float):
            largest = max(largest, each)
    return largest
