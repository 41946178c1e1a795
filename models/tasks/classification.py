"""Image classifiers: every one of torchvision's by name, from a decoded image to labels with scores.

Owns: the preprocessing that the published weights declare, the network around torchvision's module, the answer's form.
Must not know HTTP, devices or how images and files are read.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.utils.fusion import fuse_conv_bn_weights

from models.contract.errors import UnknownModelError, WeightsError
from models.contract.geometry import Geometry
from models.contract.model import Array, Finds, Options, OutputSpec, PixelModel, PixelNetwork, Placement, Task, softmax
from models.tasks.top_classes import best_in, with_best
from models.vision import torchvision
from models.weights.without_values import WithoutValues

ARCHITECTURES: tuple[str, ...] = tuple(torchvision.models.list_models(module=torchvision.models))

# Images up to this size are decoded in full. Larger JPEGs may be decoded at 1/2, 1/4 or 1/8 as long as they stay this
# many times larger than what they are resized to: on photographs of 12 to 50 megapixels the network's input then
# differs by at most 0.2 grey levels on average (saving the JPEG again at quality 75: 0.2 to 0.4), and decoding takes a
# third to two thirds of the time.
FULL_DECODE_PIXELS = 4_000_000
DECODE_RATIO = 4
# Beyond this, resizing all of a long strip only to cut out its centre would cost memory without bound.
_LONGEST_STRIP = 4
_LONGEST_STRIP_BY_PILLOW = 64  # Where all of it has to be as Pillow resizes it.

_WITH_AUXILIARY = {"googlenet": ("aux1", "aux2"), "inception_v3": ("AuxLogits",)}
_OLD_DENSENET_NAME = re.compile(r"(denselayer\d+\.(?:norm|relu|conv))\.([12]\.)")


def default_labels(architecture: str) -> tuple[str, ...]:
    """Labels of the published weights (ImageNet-1k). Raises UnknownModelError."""
    return tuple(_published(architecture).meta["categories"])


def class_count(architecture: str, state: Mapping[str, Tensor]) -> int:
    """Number of classes of a state dict (meta tensors do), which must fit `architecture` in every name and shape.

    Raises UnknownModelError, WeightsError.
    """
    state = _renamed(architecture, state)
    head = _head(architecture)
    if head not in state or state[head].ndim == 0 or not len(state[head]):
        yolo = " (is this a YOLOv8 file?)" if any(name.startswith("model.22.") for name in state) else ""
        raise WeightsError(f"The weights are not of {architecture}: {head} is missing{yolo}.")
    count = len(state[head])
    expected = _skeleton(architecture, count, _has_auxiliary(architecture, state)).state_dict()
    for name in sorted(expected.keys() | state.keys()):
        if name.endswith(".num_batches_tracked"):
            continue  # counts training steps; some formats leave it out
        if name not in state:
            raise WeightsError(f"The weights are not of {architecture}: {name} is missing.")
        if name not in expected:
            raise WeightsError(f"The weights are not of {architecture}: it has no {name}.")
        if state[name].shape != expected[name].shape:
            found, wanted = (list(tensors[name].shape) for tensors in (state, expected))
            raise WeightsError(f"The weights are not of {architecture}: {name} is {found}, not {wanted}.")
    return count


class ClassificationNetwork(PixelNetwork):
    """A torchvision classifier as it is served."""

    def compute(self, normalised: Tensor) -> tuple[Tensor]:
        """-> float32 logits [n, classes]."""
        return (self.core(normalised).float(),)


@dataclass(frozen=True)
class Classifier(PixelModel):
    """A torchvision classifier with the preprocessing of its published weights.

    The shorter side of an image is resized to `resize_size` with `interpolation` (`bilinear` or `bicubic`), then
    `input_shape` is cut from the centre; `mean` and `std` are per RGB channel for pixels in 0..1. `resize_by`: `pillow`
    gives a PIL image's pixels to the last bit, of images decoded in full; `torch` takes a fifth of the time.
    """

    resize_size: int
    interpolation: str
    antialias: bool
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resize_by: Literal["torch", "pillow"] = field(default="torch", kw_only=True)

    @classmethod
    def of(
        cls, name: str, architecture: str, labels: Sequence[str], weights: str, weights_file: str | None
    ) -> Classifier:
        """With the preprocessing that torchvision declares for `architecture`. Raises UnknownModelError."""
        declared = _published(architecture).transforms()
        crop_size = declared.crop_size[0]
        return cls(
            name,
            architecture,
            tuple(labels),
            weights,
            weights_file,
            input_shape=(crop_size, crop_size, 3),
            resize_size=declared.resize_size[0],
            interpolation=declared.interpolation.value,
            antialias=bool(declared.antialias),
            mean=tuple(declared.mean),
            std=tuple(declared.std),
        )

    @property
    def task(self) -> Task:
        """`classify`."""
        return "classify"

    @property
    def finds(self) -> Finds:
        """`classes`."""
        return "classes"

    @property
    def outputs(self) -> tuple[str, ...]:
        """What `ClassificationNetwork.forward` returns."""
        return ("logits",)

    def network(self) -> ClassificationNetwork:
        """The network on the CPU: float32, BatchNorm fused, channels-last weights, eval mode.

        Raises UnknownModelError, WeightsNotFoundError, WeightsError.
        """
        core = self._random_core() if self.weights == "random" else self._load()
        _fuse(core.eval())
        core.to(memory_format=torch.channels_last)
        network = ClassificationNetwork(core, self.input_shape, self.mean, self.std)
        return network.eval().requires_grad_(False)

    def network_of_shapes(self) -> ClassificationNetwork:
        """Random weights are zeros: they need not be measured. A file is read all the same, as it may not fit."""
        if self.weights != "random":
            return self.network()
        core = _skeleton(self.architecture, len(self.labels), auxiliary=False)
        state = core.state_dict()
        for name, tensor in state.items():
            if tensor.is_meta:
                state[name] = torch.zeros(tensor.shape, dtype=tensor.dtype)
        core.load_state_dict(state, assign=True)
        return ClassificationNetwork(core, self.input_shape, self.mean, self.std).eval().requires_grad_(False)

    def _random_core(self) -> nn.Module:
        """An untrained network that behaves like a trained one: layers of unit variance, logits that differ.

        Default weights alone fade out layer by layer (MobileNetV3 ends at 1e-10) and some heads start at zero, so
        BatchNorm and the head are measured on noise, smooth and sharp as images are: on two images, a faint one and one
        of much contrast, as each more makes every start slower.
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
        from models.weights.checkpoint import read

        if self.weights_file is None:
            raise WeightsError(f"{self.name} names no weights file.")
        state = _renamed(self.architecture, read(Path(self.weights_file)).state)
        count = class_count(self.architecture, state)
        if count != len(self.labels):
            raise WeightsError(f"{self.weights_file} has {count} classes, but there are {len(self.labels)} labels.")
        core = _skeleton(self.architecture, count, _has_auxiliary(self.architecture, state))
        values = OrderedDict(
            (name, tensor.float() if tensor.is_floating_point() else tensor) for name, tensor in state.items()
        )
        # MNASNet refuses to load without the version of its layout; every published file has the present one.
        values._metadata = {"": {"version": core._version}}  # type: ignore[attr-defined]
        core.load_state_dict(values, assign=True)
        for auxiliary in _WITH_AUXILIARY.get(self.architecture, ()):
            setattr(core, auxiliary, None)  # only used in training
        return core

    def decode_size(self, width: int, height: int) -> tuple[int, int]:
        """`DECODE_RATIO` times the resized image, for more than `FULL_DECODE_PIXELS`; in full where Pillow resizes."""
        scale = DECODE_RATIO * self.resize_size / min(width, height)
        if self.resize_by == "pillow" or width * height <= FULL_DECODE_PIXELS or scale >= 1:
            return width, height
        return ceil(width * scale), ceil(height * scale)

    def preprocess(self, image: Tensor, out: Tensor, width: int, height: int) -> Placement:
        """Resize the shorter side and cut out the centre, as torchvision does with a PIL image.

        Within one grey level of it with bilinear interpolation, within two with bicubic; by Pillow, the same.
        """
        target_height, target_width = target = self._resized_size(width, height)
        crop_height, crop_width = self.input_shape[:2]
        left, top = self._corner(target)
        covered_height, covered_width = covered = _covered(image.shape[0], image.shape[1], width, height)
        exact, kernel = covered == image.shape[:2], Image.Resampling[self.interpolation.upper()]
        if self.resize_by == "pillow" and exact and max(target) <= _LONGEST_STRIP_BY_PILLOW * self.resize_size:
            # All of it in one call: which pass Pillow does first is its choice, and was another before version 13.
            whole = Image.fromarray(image.numpy()).resize((target_width, target_height), kernel)
            centre = whole.crop((left, top, left + crop_width, top + crop_height))
            out.copy_(torch.from_numpy(np.array(centre)))
            return self.placement(width, height)
        if max(target) > _LONGEST_STRIP * self.resize_size:
            x_step, y_step = covered_width / target_width, covered_height / target_height
            box = (left * x_step, top * y_step, (left + crop_width) * x_step, (top + crop_height) * y_step)
            strip = Image.fromarray(image.numpy()).resize((crop_width, crop_height), kernel, box)
            out.copy_(torch.from_numpy(np.array(strip)))
            return self.placement(width, height)
        # torch rounds image * factor down to the target: not below it, whatever the last digit of the product.
        factors = (target_height / covered_height * (1 + 1e-9), target_width / covered_width * (1 + 1e-9))
        # Unsqueezed before the permutation, the strides are those of a channels-last batch, for which torch has a
        # vectorised kernel on bytes: twice as fast as on planes.
        resized = functional.interpolate(
            image.unsqueeze(0).permute(0, 3, 1, 2),
            size=target if exact else None,
            scale_factor=None if exact else factors,
            mode=self.interpolation,
            antialias=self.antialias,
        )[0].permute(1, 2, 0)
        out.copy_(resized[top : top + crop_height, left : left + crop_width])
        return self.placement(width, height)

    def placement(self, width: int, height: int) -> Placement:
        """The placement that `preprocess` returns."""
        left, top = self._corner(self._resized_size(width, height))
        return Placement(width, height, self.resize_size / min(width, height), -left, -top)

    def geometry(self, width: int, height: int) -> Geometry | None:
        """The geometry of `preprocess`; None for long strips."""
        target = self._resized_size(width, height)
        if max(target) > _LONGEST_STRIP * self.resize_size:
            return None
        left, top = self._corner(target)
        return Geometry(target[1], target[0], -left, -top, self.interpolation, self.antialias)

    def reduce(self, outputs: Sequence[Array], index: int, options: Options) -> tuple[Array, ...]:
        """Logits, float32 [classes]."""
        return (outputs[0][index].astype(np.float32, copy=True),)

    def reduce_all(self, outputs: Sequence[Array], options: Sequence[Options]) -> list[tuple[Array, ...]]:
        """Logits, and the best classes: found for a whole batch, and not in the server's event loop."""
        return with_best(outputs[0][: len(options)].astype(np.float32, copy=True), [each.top_k for each in options])

    def postprocess(self, outputs: Sequence[Array], placement: Placement, options: Options) -> dict[str, Any]:
        """The `top_k` classes by descending score; equal scores by ascending number."""
        return self._answer(*best_in(outputs, options.top_k), placement)

    def postprocess_all(
        self, outputs: Sequence[Sequence[Array]], placements: Sequence[Placement], options: Options
    ) -> list[dict[str, Any]]:
        """The same in a third of the time: what NumPy does costs by call more than by number."""
        if outputs:
            outputs = with_best(np.stack([each[0] for each in outputs]), [options.top_k] * len(outputs))
        return super().postprocess_all(outputs, placements, options)

    def _answer(self, best: Sequence[int], scores: Sequence[float], placement: Placement) -> dict[str, Any]:
        return {
            "classes": [
                {"label": self.labels[class_id], "class_id": class_id, "score": score}
                for class_id, score in zip(best, scores, strict=True)
            ],
            "width": placement.width,
            "height": placement.height,
        }

    @property
    def normalisation(self) -> tuple[Sequence[float], Sequence[float]]:
        """`mean` and `std`."""
        return self.mean, self.std

    @property
    def answers(self) -> tuple[OutputSpec, ...]:
        """The network's logits, and what softmax makes of them."""
        return tuple(OutputSpec(name, "FP32", (-1, len(self.labels))) for name in ("logits", "probabilities"))

    def tensors(self, outputs: Sequence[Array], placement: Placement, options: Options) -> dict[str, Array]:
        """float32 [classes] each."""
        return {"logits": outputs[0], "probabilities": softmax(outputs[0])}

    def _resized_size(self, width: int, height: int) -> tuple[int, int]:
        """(height, width), rounded as torchvision.transforms.functional.resize rounds."""
        size = self.resize_size
        if width <= height:
            return int(size * height / width), size
        return size, int(size * width / height)

    def _corner(self, target: tuple[int, int]) -> tuple[int, int]:
        """Left and top of what is cut out of an image resized to this (height, width)."""
        height, width = self.input_shape[:2]
        return round((target[1] - width) / 2), round((target[0] - height) / 2)


def _covered(image_height: int, image_width: int, width: int, height: int) -> tuple[float, float]:
    """Height and width of the image itself within an image decoded at 1/2, 1/4 or 1/8, else the image's size.

    Such a decode rounds its size up, so its last row and column reach beyond the image; taking them for whole pixels
    would shift everything (measured: up to six times the error of the reduced decode itself).
    """
    for reduction in (2, 4, 8):
        if (image_height, image_width) == (ceil(height / reduction), ceil(width / reduction)):
            return height / reduction, width / reduction
    return image_height, image_width


def _published(architecture: str) -> Any:
    """torchvision's entry for the best published weights: its `meta`, `transforms` and `url`."""
    if architecture not in ARCHITECTURES:
        raise UnknownModelError(f"torchvision has no classifier called {architecture}.")
    return torchvision.models.get_model_weights(architecture).DEFAULT


def _build(architecture: str, count: int, auxiliary: bool) -> nn.Module:
    options: dict[str, Any] = {}
    if architecture in _WITH_AUXILIARY:
        # torchvision builds them so around its published weights.
        options = {"transform_input": True, "aux_logits": auxiliary, "init_weights": False}
    published = _published(architecture)
    if architecture.startswith("vit_"):
        options["image_size"] = published.meta["min_size"][0]  # 518 for vit_h_14, and its weights have that many parts.
    core: nn.Module = torchvision.models.get_model(architecture, weights=None, num_classes=count, **options)
    return core


def _skeleton(architecture: str, count: int, auxiliary: bool) -> nn.Module:
    """The module with weights on the meta device."""
    with WithoutValues():
        return _build(architecture, count, auxiliary)


@cache
def _head(architecture: str) -> str:
    """Name of the weight whose first dimension is the number of classes: the first that changes with it."""
    one, other = (_skeleton(architecture, count, auxiliary=False).state_dict() for count in (2, 3))
    return next(name for name in one if one[name].shape != other[name].shape)


def _has_auxiliary(architecture: str, state: Mapping[str, Tensor]) -> bool:
    names = tuple(f"{name}." for name in _WITH_AUXILIARY.get(architecture, ()))
    return bool(names) and any(name.startswith(names) for name in state)


def _renamed(architecture: str, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """With today's names: the published DenseNet files call `norm1` of a layer `norm.1`."""
    if not architecture.startswith("densenet"):
        return state
    return {_OLD_DENSENET_NAME.sub(r"\1\2", name): tensor for name, tensor in state.items()}


def _fuse(core: nn.Module) -> None:
    """Fold every BatchNorm that follows a convolution, and nothing else does, into that convolution (in place).

    The traced graph only tells which modules follow each other; the module itself stays a plain one.
    """
    try:
        graph = fx.Tracer().trace(core)
    except Exception:  # whatever data-dependent Python a network has; unfused it is as right, and a little slower
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
