"""torchvision's classifiers, all by name: their networks and the preprocessing of their published weights.

Must not know HTTP, devices or how images and files are read.
"""

from __future__ import annotations

import logging
import re
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.fusion import fuse_conv_bn_weights

from anychip_base.tracing import ThreadTracer
from models.contract.errors import UnknownModelError, WeightsError
from models.contract.networks import PixelNetwork
from models.contract.pixel_model import PixelModel
from models.contract.resize import Centre
from models.contract.task_adapter import AdaptedFile
from models.vision import torchvision
from models.weights.checkpoint import Checkpoint
from models.weights.state import Fitted, WithoutValues, check_fits, fitted_within, read_state

log = logging.getLogger(__name__)

ARCHITECTURES: tuple[str, ...] = tuple(torchvision.models.list_models(module=torchvision.models))

_WITH_AUXILIARY = {"googlenet": ("aux1", "aux2"), "inception_v3": ("AuxLogits",)}
_OLD_DENSENET_NAME = re.compile(r"(denselayer\d+\.(?:norm|relu|conv))\.([12]\.)")


def default_labels(architecture: str) -> tuple[str, ...]:
    """Return the labels of the published weights (ImageNet-1k). Raises UnknownModelError."""
    return tuple(_published(architecture).meta["categories"])


def fitted(architecture: str, found: Checkpoint) -> Fitted:
    """Fit a checkpoint, in every name and shape but for a prefix of all names. Meta tensors suffice.

    Raises UnknownModelError, WeightsError.
    """
    return fitted_within(found, _head(architecture), partial(_fitted, architecture))


def _fitted(architecture: str, found: Checkpoint) -> Fitted:
    if architecture.startswith("densenet"):  # The published files call `norm1` of a layer `norm.1`.
        renamed = {_OLD_DENSENET_NAME.sub(r"\1\2", name): tensor for name, tensor in found.state.items()}
        found = replace(found, state=renamed)
    state, head = found.state, _head(architecture)
    if head not in state or state[head].ndim == 0 or not len(state[head]):
        yolo = " (is this a YOLOv8 file?)" if any(name.startswith("model.22.") for name in state) else ""
        raise WeightsError(f"The weights are not of {architecture}: {head} is missing{yolo}.")
    auxiliary = tuple(f"{name}." for name in _WITH_AUXILIARY.get(architecture, ()))
    has_auxiliary = bool(auxiliary) and any(name.startswith(auxiliary) for name in state)
    network = _skeleton(architecture, len(state[head]), has_auxiliary)
    check_fits(architecture, state, network.state_dict())
    assumed, root = "", found.modules.get("")
    if root is not None and "transform_input" in root.facts:  # It was saved whole.
        setattr(network, "transform_input", bool(root.facts["transform_input"]))  # noqa: B010
    elif architecture in _WITH_AUXILIARY:
        assumed = (
            "it does not say its network's transform_input, which is taken as True, as in torchvision's published "
            "file: where it is False, as without weights, save the network whole, torch.save(network, …)"
        )
    return Fitted(found, len(state[head]), network, assumed)


class ClassificationNetwork(PixelNetwork):
    """A classifier in its served form."""

    def compute(self, normalised: Tensor) -> tuple[Tensor]:
        """Return float32 logits [n, classes]."""
        return (self.core(normalised).float(),)


@dataclass(frozen=True)
class Classifier(PixelModel):
    """A torchvision classifier with the preprocessing of its published weights."""

    @classmethod
    def of(
        cls, name: str, architecture: str, labels: Sequence[str], weights: str, weights_file: str | None
    ) -> Classifier:
        """Build a classifier with torchvision's preprocessing for `architecture`. Raises UnknownModelError."""
        published = _published(architecture, weights_file)
        declared = published.transforms()
        if weights_file is not None and weights not in ("official", "sample"):
            log.info("%s: preprocessing as of torchvision's %s", name, published)
        side = declared.crop_size[0]
        kernel, antialias = declared.interpolation.value, bool(declared.antialias)
        return cls(
            name,
            architecture,
            tuple(labels),
            weights,
            weights_file,
            input_shape=(side, side, 3),
            task_name="classify",
            file=AdaptedFile(Centre((side, side), declared.resize_size[0], kernel, antialias), tuple(labels)),
            mean=tuple(declared.mean),
            std=tuple(declared.std),
        )

    def network(self) -> ClassificationNetwork:
        """Build the network on the CPU: float32, BatchNorm fused, channels-last weights, eval mode. Raises
        UnknownModelError, WeightsNotFoundError, WeightsError.
        """
        core = self._random_core() if self.weights == "random" else self._load()
        _fuse(core.eval())
        core.to(memory_format=torch.channels_last)
        return self._around(core)

    def network_of_shapes(self) -> ClassificationNetwork:
        """Build zeros for random weights, which need no measuring. Read a file all the same, as it may not fit."""
        if self.weights != "random":
            return self.network()
        core = _skeleton(self.architecture, len(self.labels), auxiliary=False)
        state = core.state_dict()
        for name, tensor in state.items():
            if tensor.is_meta:
                state[name] = torch.zeros(tensor.shape, dtype=tensor.dtype)
        core.load_state_dict(state, assign=True)
        return self._around(core)

    def _around(self, core: nn.Module) -> ClassificationNetwork:
        return ClassificationNetwork(core, self.input_shape, self.mean, self.std).eval().requires_grad_(False)

    def _random_core(self) -> nn.Module:
        """Build an untrained network that behaves like a trained one: layers of unit variance, logits that differ.

        Default weights fade out layer by layer. So BatchNorm and the head are measured on two images of noise.
        """
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            core = _build(self.architecture, len(self.labels), auxiliary=False)
            sides = [(side, side) for side in (2, 6, 24, 96)]
            noise = [functional.interpolate(torch.randn(2, 3, *side), self.input_shape[:2]) for side in sides]
            images = torch.stack(noise).mean(dim=0) * torch.tensor([0.5, 2]).view(-1, 1, 1, 1)
            head = core.get_parameter(_head(self.architecture))
            head.normal_()
            for module in core.eval().modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.train().momentum = 1.0
            head.mul_(2 / core(images).std())
        return core

    def _load(self) -> nn.Module:
        read = read_state(self, fitted)
        core, values = read.network, OrderedDict(read.found.state)
        # MNASNet refuses to load without the version of its layout; every published file has the present one.
        values._metadata = {"": {"version": core._version}}  # type: ignore[attr-defined]
        core.load_state_dict(values, assign=True)
        for auxiliary in _WITH_AUXILIARY.get(self.architecture, ()):
            setattr(core, auxiliary, None)  # only used in training
        return core


def _published(architecture: str, file: str | None = None) -> Any:
    """Return the published weights that have this file's name, else the default ones. Raises UnknownModelError."""
    if architecture not in ARCHITECTURES:
        raise UnknownModelError(f"torchvision has no classifier called {architecture}.")
    every = torchvision.models.get_model_weights(architecture)
    named = PurePath(file or "").name
    return next((each for each in every if each.url.rpartition("/")[2] == named), every.DEFAULT)


def _build(architecture: str, count: int, auxiliary: bool) -> nn.Module:
    options: dict[str, Any] = {}
    if architecture in _WITH_AUXILIARY:
        # torchvision builds them so around its published weights.
        options = {"transform_input": True, "aux_logits": auxiliary, "init_weights": False}
    published = _published(architecture)
    if architecture.startswith("vit_"):
        options["image_size"] = published.meta["min_size"][0]  # 518 for vit_h_14, as its weights require.
    core: nn.Module = torchvision.models.get_model(architecture, weights=None, num_classes=count, **options)
    return core


def _skeleton(architecture: str, count: int, auxiliary: bool) -> nn.Module:
    with WithoutValues():
        return _build(architecture, count, auxiliary)


@cache
def _head(architecture: str) -> str:
    """Return the name of the first weight whose shape changes with the number of classes."""
    one, other = (_skeleton(architecture, count, auxiliary=False).state_dict() for count in (2, 3))
    return next(name for name in one if one[name].shape != other[name].shape)


def _fuse(core: nn.Module) -> None:
    """Fold a BatchNorm into the convolution before it (in place), if nothing else uses that convolution's output."""
    try:
        graph = ThreadTracer().trace(core)
    except Exception:  # data-dependent Python of a network; unfused it is as right, and a little slower
        return
    modules = dict(core.named_modules())
    calls = Counter(str(node.target) for node in graph.nodes if node.op == "call_module")
    for node in graph.nodes:
        if node.op != "call_module" or type(modules[node.target]) is not nn.BatchNorm2d:
            continue
        before = node.args[0]
        if before.op != "call_module" or type(modules[before.target]) is not nn.Conv2d or len(before.users) != 1:
            continue
        if calls[node.target] == calls[before.target] == 1:
            conv, norm = modules[before.target], modules[node.target]
            conv.weight, conv.bias = fuse_conv_bn_weights(
                *(conv.weight, conv.bias, norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias)
            )
            core.set_submodule(node.target, nn.Identity())
