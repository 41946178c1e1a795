"""Networks of timm and transformers, built from their configuration and local weights.

Owns: the class to build, the entries of a foreign configuration that pass, and the outputs that a task takes. Must not
know images, nor what becomes of outputs (models.exports.layouts). The code that runs is the installed library's:
`trust_remote_code` is never set, and a network whose code lies beside its weights is refused. Weights are safetensors,
for timm also a checkpoint read as data: both are read here, and the library gets tensors.

Entries that pass are parameters of the library's own classes. One by which it would read another file, download, or
choose other code is refused by its name; an unknown entry never reaches it.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anychip_base.extras import how_to_install
from models.contract.errors import WeightsError, reason_of
from models.contract.resize import GREY
from models.exports import library_files
from models.exports.library_files import CONFIG
from models.exports.metadata import read_sidecar
from models.weights.checkpoint import read

TIMM = "timm/"
_USUAL_CHANNELS = 3
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


def library(name: str) -> Any:
    """Import the library. Raises WeightsError, which says how to install it."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # No configuration can make it download.
    if (hub := sys.modules.get("huggingface_hub.constants")) is not None:  # It has read the environment already.
        vars(hub)["HF_HUB_OFFLINE"] = True
    try:
        found = importlib.import_module(name)
    except ImportError as error:
        raise WeightsError(
            f"networks of {name} need that library: {how_to_install(name)} ({reason_of(error)})."
        ) from error
    if name == "transformers":
        found.logging.set_verbosity_error()
        found.logging.disable_progress_bar()
    return found


def implied_by(architecture: str, file: Path) -> dict[str, Any]:
    """Return timm's facts on a network of weights without a configuration, as a sidecar's. Raises WeightsError."""
    timm, name = library("timm"), architecture.removeprefix(TIMM)
    cfg = timm.get_pretrained_cfg(name) if architecture.startswith(TIMM) else None
    if cfg is None or not timm.is_model(name):
        raise WeightsError(f"timm {timm.__version__} has no network {name!r}: `timm.list_models()` names those it has.")
    found = library_files.timm_preprocessing(cfg.to_dict())
    state = _own(timm, name, read(file, with_data=False).state)
    return {"task": "classify" if _class_count(timm, name, state) else "embed", **found}


def names_of(architecture: str, file: Path) -> tuple[str, ...] | None:
    """Return the weights' own names, or timm's of ImageNet's classes if there are as many classes; else None."""
    timm, name = library("timm"), architecture.removeprefix(TIMM)
    config = library_files.config_of(file.parent)
    weights = read(file, with_data=False)
    count = config.get("num_classes") or _class_count(timm, name, _own(timm, name, weights.state))
    subset = timm.data.infer_imagenet_subset({"num_classes": count})
    return weights.labels or (tuple(timm.data.ImageNetInfo(subset).label_descriptions()) if subset else None)


def built(file: Path, architecture: str, *, by_itself: bool = False) -> nn.Module:
    """Build an architecture's network with the weights of a file, on the CPU in float32. Raises WeightsError.

    It computes normalised pixels, float [n, 3, h, w] -> tuple of the task's tensors. `by_itself`: the library reads
    the files, as usual for it; for comparison, and in a confined process only.
    """
    name = library_files.library_of(architecture)
    found = library(name)
    config = library_files.config_of(file.parent)
    build = _of_timm if name == "timm" else _of_transformers
    try:
        core = build(found, file, architecture, config, by_itself)
    except WeightsError:
        raise
    except Exception as error:  # A library raises anything on a configuration or weights that do not fit.
        raise WeightsError(f"{name} cannot build {architecture} of {file.name}: {reason_of(error)}.") from error
    return core.float().eval().requires_grad_(False)


def _of_timm(timm: Any, file: Path, architecture: str, config: Mapping[str, Any], by_itself: bool) -> nn.Module:
    name = architecture.removeprefix(TIMM)
    is_wrapped = config.get("model_type") == library_files.TIMM_WRAPPER  # timm does not know its names.
    if by_itself and config and not is_wrapped:
        weights = {"file": str(file), "source": "", "hf_hub_id": None, "url": ""}
        return _First(timm.create_model(f"local-dir:{file.parent}", pretrained=True, pretrained_cfg_overlay=weights))
    state = _own(timm, name, read(file).state)
    count = config["num_classes"] if "num_classes" in config else _class_count(timm, name, state)
    given = _settings_of_timm(timm, name, config.get("model_args") or {})
    first = None if config else _weight(timm, name, state, "first_conv")
    if first is not None and first.ndim == 4 and first.shape[1] != _USUAL_CHANNELS:
        given["in_chans"] = first.shape[1]
    network: nn.Module = timm.create_model(name, pretrained=False, **{"num_classes": count, **given})
    if by_itself and not is_wrapped:
        timm.models.load_checkpoint(network, str(file))
    else:
        try:
            network.load_state_dict(state)
        except RuntimeError as error:
            more = {key.partition(".")[0]: key for key in sorted(state.keys() - network.state_dict().keys())}
            if names := ", ".join([*more.values()][:3]):
                raise WeightsError(
                    f"The weights in {file.name} are not of {architecture}, which has no {names}: save its "
                    "state_dict() alone. A head or a network of your own is served from an export: "
                    f'torch.onnx.export(network.eval(), torch.rand(1, 3, 224, 224), "{file.stem}.onnx").'
                ) from None
            if "size mismatch for pos_embed" not in str(error):
                raise
            raise WeightsError(
                f"The positions in {file.name} are of another image size than {architecture} has by default: save the "
                f"network with its {CONFIG}, timm.models.save_for_hf(network, 'folder'), and serve the folder."
            ) from None
    return _First(network)


def _own(timm: Any, name: str, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Remove prefixes that all names have, as `timm_model.` of transformers and `backbone.`, unless timm has them."""
    own = {layer.partition(".")[0] for kind in ("classifier", "first_conv") for layer in _layers(timm, name, kind)}
    while all("." in key for key in state):
        first = {key.partition(".")[0] for key in state}
        if len(first) != 1 or first <= own:
            break
        state = {key.partition(".")[2]: tensor for key, tensor in state.items()}
    return state


def _class_count(timm: Any, name: str, state: Mapping[str, Tensor]) -> int:
    weight = _weight(timm, name, state, "classifier")
    return 0 if weight is None else len(weight)


def _weight(timm: Any, name: str, state: Mapping[str, Tensor], kind: str) -> Tensor | None:
    """Return the weight of the layer, or of the first of several, under this key of timm's configuration."""
    return state.get(f"{next(iter(_layers(timm, name, kind)), '')}.weight")


def _layers(timm: Any, name: str, kind: str) -> Sequence[str]:
    found = getattr(timm.get_pretrained_cfg(name), kind, None) or ()
    return (found,) if isinstance(found, str) else found


def _of_transformers(
    transformers: Any, file: Path, architecture: str, config: Mapping[str, Any], by_itself: bool
) -> nn.Module:
    name = library_files.class_of(config)
    kind = getattr(transformers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        if not name:
            raise WeightsError(
                f'{CONFIG} does not say which network it is: state "architectures": '
                '["ViTForImageClassification"] there, with the class that wrote it.'
            )
        raise WeightsError(
            f"{CONFIG} names {name}, which is no class of transformers "
            f"{transformers.__version__}, and code beside weights is never run here: export it as .onnx instead."
        )
    known: Any = kind
    _refuse_never(config, "")
    if config.get("backbone") and (given := config.get("backbone_kwargs")) and not config.get("backbone_config"):
        of_timm = {"model_type": "timm_backbone", "backbone": config["backbone"], **given}
        config = {**config, "backbone": None, "backbone_config": of_timm}  # Else transformers 5 asks the Hub for it.
    settings = _of_class(transformers, known.config_class, config)
    # The library gets the tensors and no folder: it would read other files of a folder, too.
    if by_itself:
        # Without the choice of kernels, which may be foreign code.
        config_of_file = known.config_class.from_dict({k: v for k, v in config.items() if "attn_impl" not in k})
        if file.suffix == ".safetensors":
            state = importlib.import_module("safetensors.torch").load_file(str(file))
        else:
            state = torch.load(file, map_location="cpu", weights_only=True)
    else:
        config_of_file, state = known.config_class.from_dict(settings), read(file).state
    network, found = known.from_pretrained(
        None,
        config=config_of_file,
        state_dict=state,
        local_files_only=True,
        trust_remote_code=False,
        dtype=torch.float32,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # Else its reason is a table that it prints.
    )
    if found["mismatched_keys"]:
        key, in_file, wanted = min(found["mismatched_keys"])
        raise WeightsError(
            f'{key} in {file.name} is {list(in_file)}, and config.json makes it {list(wanted)}: "id2label" names every '
            "class of a head, and other keys state the network's sizes."
        )
    # The library would draw them at random. Many files of ViT have no pooler, which then answers nothing.
    missing = sorted(found["missing_keys"])
    without = [key for key in missing if "pooler." not in key]
    if without and by_itself:
        raise WeightsError("transformers does not know the names of these weights, which have a prefix.")
    if without:
        raise WeightsError(
            f"{file.name} has no {without[0]}{f' and {len(without) - 1} others' if without[1:] else ''}, which {name} "
            "has: save the whole network by save_pretrained."
        )
    task = library_files.task_of(config)
    if task == "embed":
        return _Vectors(network, pooled=not missing)
    sidecar = read_sidecar(file)
    assert sidecar is not None
    # Networks that take a mask get one for an image at the upper left and its padding.
    masked = task == "detect" and "pixel_mask" in inspect.signature(network.forward).parameters
    mean, std = sidecar.mean or (0.0,) * 3, sidecar.std or (1.0,) * 3
    pad: list[float] = []
    multiple_of = sidecar.multiple_of if task == "detect" and not masked else None
    if (masked or multiple_of) and sidecar.resize == "top-left":
        colour = GREY if sidecar.pad is None else sidecar.pad
        levels = colour if isinstance(colour, tuple) else (colour,) * 3
        pad = [(level / 255 - m) / s for level, m, s in zip(levels, mean, std, strict=True)]
    return _Outputs(network, task, pad, max(std), multiple_of)


class _First(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixels: Tensor) -> tuple[Tensor]:
        return (self.network(pixels),)


class _Vectors(nn.Module):
    """Network that gives one vector an image: projected if it compares images with texts, else `pooled`, else the
    first token; or all places, or patches, if no token is the image's.
    """

    def __init__(self, network: Any, *, pooled: bool) -> None:
        super().__init__()
        self.network, self.names = network, ("image_embeds", *(("pooler_output",) if pooled else ()))

    def forward(self, pixels: Tensor) -> tuple[Tensor]:
        network: Any = self.network
        if hasattr(network, "get_image_features"):
            found = network.get_image_features(pixel_values=pixels)
        else:
            found = network(pixel_values=pixels)
        if isinstance(found, Tensor):
            return (found,)
        for name in self.names:
            if found.get(name) is not None:
                return (found[name].flatten(1),)
        last = found["last_hidden_state"]
        patch = getattr(network.config, "patch_size", None)
        patches = (pixels.shape[2] // patch) * (pixels.shape[3] // patch) if isinstance(patch, int) else 0
        return (last if last.ndim == 4 or last.shape[1] == patches else last[:, 0],)


class _Outputs(nn.Module):
    """Network that gives a task's outputs, in the order of models.exports.layouts.

    `pad`: colour, as the network sees it, of the padding right of and below images at the upper left corner. The
    network is then told which pixels are the image, or gets each image alone and cut out if `multiple_of` says what
    divides its sides. Its boxes, which are parts of the image, become parts of the input.
    """

    pad: Tensor | None

    def __init__(self, network: nn.Module, task: str, pad: list[float], std: float, multiple_of: int | None) -> None:
        super().__init__()
        self.network, self.task, self.multiple_of, self.tolerance = network, task, multiple_of, 0.5 / 255 / std
        self.register_buffer("pad", torch.tensor(pad).view(1, 3, 1, 1) if pad else None, persistent=False)

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        if self.pad is None:
            found = self.network(pixel_values=pixels)
            return self._wanted(found)
        # Rows and columns up to the last one of another colour belong to the image.
        seen = ((pixels - self.pad).abs() > self.tolerance).any(dim=1)
        rows, columns = (seen.any(dim=axis).flip(1).long().cumsum(1).flip(1) > 0 for axis in (2, 1))
        shares = torch.stack((columns.float().mean(1), rows.float().mean(1)), dim=1)
        if self.multiple_of is None:
            mask = rows.unsqueeze(2) & columns.unsqueeze(1)
            logits, boxes = self._wanted(self.network(pixel_values=pixels * mask.unsqueeze(1), pixel_mask=mask.long()))
        elif torch.compiler.is_compiling() or torch._C._is_tracing():
            raise RuntimeError("it sees each image in a size of its own, which a graph of one size cannot")
        else:
            # Rounded up: an image may have the padding's colour itself.
            size = shares.new_tensor([pixels.shape[3], pixels.shape[2]])
            sides = (shares * size).round().div(self.multiple_of).ceil().clamp_min(1) * self.multiple_of
            cuts = zip(pixels.unsqueeze(1), sides.int().tolist(), strict=True)
            found = [self._wanted(self.network(pixel_values=each[..., :high, :wide])) for each, (wide, high) in cuts]
            shares = sides / size
            logits, boxes = (torch.cat(each) for each in zip(*found, strict=True))
        return logits, boxes * shares.repeat(1, 2).unsqueeze(1).to(boxes.dtype)

    def _wanted(self, found: Any) -> tuple[Tensor, ...]:
        if self.task == "detect":
            return found["logits"], found["pred_boxes"]
        if self.task == "segment":
            if "pred_masks" in found:
                return found["logits"], found["pred_boxes"], found["pred_masks"]
            return found["class_queries_logits"], found["masks_queries_logits"]
        if self.task == "depth":
            if (view := found.get("field_of_view")) is not None:  # As `post_process_depth_estimation` of DepthPro.
                factor = 2 * (view.deg2rad() / 2).tan().view(-1, 1, 1)
                return (1 / (found["predicted_depth"] * factor).clamp(1e-4, 1e4),)
            return (found["predicted_depth"],)
        return (found["logits"][0] if isinstance(found["logits"], tuple) else found["logits"],)


def _settings_of_timm(timm: Any, name: str, given: Any) -> dict[str, Any]:
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
    # NaFlexViT takes the fields of its configuration, too.
    taken |= {one.name for each in vars(module).values() if is_dataclass(each) for one in fields(each)}
    for key in given:
        if key not in taken - _ARGUMENTS:
            raise WeightsError(f"{key!r} of model_args in {CONFIG} is nothing that {name} of timm takes.")
    return dict(given)


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
    largest, waiting = 0.0, [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, list):
            waiting += each
        elif isinstance(each, int | float):
            largest = max(largest, each)
    return largest
