"""Network and device that a command is about, opened as `anychip serve` does.

    resnet50, dogs=resnet50:dogs.safetensors ─┐
    best.onnx, net.pt2, net.ts               ─┼─► NamedNetwork: a network in float32 on the CPU, and inputs for it
    package.module:callable                  ─┘

Owns: the names that a person may write for a network. Must not run anything on a device.
"""

from __future__ import annotations

import copy
import importlib
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from app import logs
from app.arguments import CommandError
from app.config import Settings, split
from app.precision.gate import compile_options
from app.precision.probes import calibration, probes
from app.worker.load import load_plugins
from backends import Choice, LoadedNetwork, Unbuilt, choose, simulated
from models import ARCHITECTURES, Model, PixelModel, fetched, open_model, parse_spec
from models.exports.networks import GraphNetwork

_CALLABLE = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_][\w.]*)")
_SHAPE = re.compile(r"(\d+(?:x\d+)*)(?::(\w+))?")
DEFAULT_INPUT = "1x3x224x224"


@dataclass(frozen=True)
class NamedNetwork:
    """Network with its inputs.

    `build`: makes a new network in float32 on the CPU, a module with `cast`. `inputs`: makes inputs on the CPU for
    `n` items.
    """

    name: str
    build: Callable[[], Any]
    inputs: Callable[[int], tuple[Tensor, ...]]


class _Called(nn.Module):
    """Operator's module with the `cast` that devices need: floating-point inputs take the weights' type."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._dtype = torch.float32

    def cast(self, dtype: torch.dtype) -> _Called:
        self.module.to(dtype)
        self._dtype = dtype
        return self

    def forward(self, *inputs: Tensor) -> Any:
        return self.module(*(each.to(self._dtype) if each.is_floating_point() else each for each in inputs))


def open_subject(text: str, settings: Settings, shapes: Sequence[str] = ()) -> NamedNetwork:
    """Open a network by its name. `shapes`: inputs of module:callable. Raises ModelError, CommandError."""
    named = _CALLABLE.fullmatch(text)
    if named and named[1] not in ARCHITECTURES and "=" not in text:
        return _of_callable(named[1], named[2], shapes or (DEFAULT_INPUT,))
    if shapes:
        raise CommandError("--input is for module:callable; other networks say themselves what they take")
    model = open_named(text, settings)
    items = probes(model)

    def inputs(count: int) -> tuple[Tensor, ...]:
        return (torch.from_numpy(np.resize(items, (count, *items.shape[1:])).copy()),)

    return NamedNetwork(model.name, lambda: _in_pytorch(model), inputs)


def open_named(text: str, settings: Settings) -> Model:
    """Open a model of the catalogue, of a file or of an address. Raises ModelError."""
    [model] = open_all([text], settings)
    return model


def open_all(texts: Sequence[str], settings: Settings) -> list[Model]:
    """Open models as `open_named` does, and download what is missing before the first is opened: a library that builds
    a network ends every download in its process. Raises ModelError.
    """
    if not logging.getLogger().handlers:
        logging.basicConfig(level=logging.ERROR, format="%(message)s")
        logs.say_downloads()
    specs = [fetched(parse_spec(text, settings.weights), settings.weights_dir) for text in texts]
    return [open_model(spec, settings.weights_dir, mirror=settings.weights_mirror or None) for spec in specs]


def sample_model(name: str) -> PixelModel:
    """Open a model with the weights that come with anychip."""
    model = open_model(parse_spec(f"{name}:sample"), Path(), allow_download=False)
    assert isinstance(model, PixelModel)
    return model


def open_device(settings: Settings) -> tuple[Choice, str]:
    """Open the devices that the settings name; return them and the first one. Raises BackendError."""
    simulated.configure(settings.simulate, settings.null, settings.cache_dir.expanduser())
    load_plugins(split(settings.plugins))
    choice = choose(settings.device)
    return choice, choice.devices[0]


def precisions_of(model: Model, settings: Settings, choice: Choice) -> tuple[str, ...]:
    """Return the precisions of the devices, with int8 if there are images to calibrate it on."""
    calibrated = bool(settings.calibrate) or model.weights == "sample"
    return tuple(each for each in choice.backend.facts.precisions if each != "int8" or calibrated)


def load(
    model: Model,
    settings: Settings,
    choice: Choice,
    *,
    engine: str,
    precision: str,
    sizes: Sequence[int],
    items: npt.NDArray[np.uint8],
) -> LoadedNetwork:
    """Load a model on the first device, as `anychip serve` does: gate on these items, calibrated int8.

    Raises CalibrationError, EngineRefusedError, OutOfDeviceMemoryError, BackendError.
    """
    images = calibration(model, settings.calibrate) if precision == "int8" else None
    given = items if choice.backend.facts.computes else None
    options = compile_options(model, given, images, settings.cache_dir.expanduser())
    network: Any
    if isinstance(model, PixelModel):
        network = Unbuilt(model.input_shape, model.network, model.form)
    else:
        network = model.network()
    return choice.backend.load(network, choice.devices[0], engine, precision, sizes, options=options)


def _in_pytorch(model: Model) -> Any:
    """Build the network. PyTorch computes an ONNX file of tensors here; elsewhere ONNX Runtime is its reference."""
    network = model.network()
    if getattr(network, "form", "pixels") == "onnx":
        from models.exports.networks import Graph
        from models.onnx.graph import load_onnx

        class _Computed(Graph):
            def __init__(self, graph: nn.Module, signature: Any) -> None:
                super().__init__()
                self.graph, self.signature = graph, signature

            def cast(self, dtype: torch.dtype) -> None:
                self.graph.core.to(dtype)

            def to(self, *args: Any, **kwargs: Any) -> Any:
                return nn.Module.to(self, *args, **kwargs)

            def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
                found: tuple[Tensor, ...] = self.graph(*tensors)
                return found

        assert isinstance(network, GraphNetwork)
        graph, _ = load_onnx(Path(network.file))
        network.core = _Computed(graph, network.core.signature)
    return network


def _of_callable(module_name: str, attribute: str, shapes: Sequence[str]) -> NamedNetwork:
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
        made = found if isinstance(found, nn.Module) else found()
    except Exception as error:  # It is the operator's own code.
        raise CommandError(f"{module_name}:{attribute} cannot be called: {type(error).__name__}: {error}") from error
    finally:
        sys.path.pop(0)
    if not isinstance(made, nn.Module):
        raise CommandError(f"{module_name}:{attribute} returns {type(made).__name__}, and not a torch.nn.Module")
    network = made.eval().requires_grad_(False)

    parsed = [_parsed_shape(text) for text in shapes]

    def inputs(count: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        made: list[Tensor] = []
        for shape, dtype in parsed:
            whole = (count, *shape[1:])
            if dtype.is_floating_point:
                made.append(torch.randn(whole, generator=generator).to(dtype))
            else:
                made.append(torch.randint(0, 2, whole, generator=generator).to(dtype))
        return tuple(made)

    return NamedNetwork(f"{module_name}:{attribute}", lambda: _Called(copy.deepcopy(network)), inputs)


def _parsed_shape(text: str) -> tuple[tuple[int, ...], torch.dtype]:
    found = _SHAPE.fullmatch(text)
    dtype = getattr(torch, found[2] or "float32", None) if found else None
    if not found or not isinstance(dtype, torch.dtype):
        raise CommandError(f"--input {text!r} is not like 1x3x224x224 or 1x77:int64")
    return tuple(int(length) for length in found[1].split("x")), dtype
