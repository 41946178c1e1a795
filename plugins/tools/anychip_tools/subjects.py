"""Network and device that a command is about, opened as `anychip serve` does."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from app import logs
from app.config import Settings
from app.config.values import split
from app.precision.gate import compile_options
from app.precision.probes import calibration, probes
from app.worker.load import unbuilt
from backends import Choice, LoadedNetwork, choose, simulated
from backends.contract.backend import Pixels
from models import Model, PixelModel, open_model, parse_spec
from models.exports.networks import GraphNetwork


def open_named(text: str, settings: Settings) -> Model:
    """Open a model of the catalogue, of a file or of an address. Raises ModelError."""
    if not logging.getLogger().handlers:
        logging.basicConfig(level=logging.ERROR, format="%(message)s")
        logs.say_downloads()
    spec = parse_spec(text, settings.weights)
    return open_model(spec, settings.weights_dir, mirror=settings.weights_mirror, trusted=settings.trust_exported)


def sample_model(name: str) -> PixelModel:
    """Open a model with the weights that come with anychip."""
    model = open_model(parse_spec(f"{name}:sample"), Path(), allow_download=False)
    assert isinstance(model, PixelModel)
    return model


def open_device(settings: Settings) -> tuple[Choice, str]:
    """Open the devices that the settings name; return them and the first one. Raises BackendError."""
    simulated.configure(settings.simulate, settings.null, settings.cache_dir.expanduser())
    for plugin in split(settings.plugins):
        importlib.import_module(plugin)
    choice = choose(settings.device)
    return choice, choice.devices[0]


def precisions_of(settings: Settings, choice: Choice) -> tuple[str, ...]:
    """Return the precisions of the devices, with int8 if there are images to calibrate it on."""
    return tuple(each for each in choice.backend.facts.precisions if each != "int8" or settings.calibrate)


def load(
    model: Model,
    settings: Settings,
    choice: Choice,
    *,
    engine: str,
    precision: str,
    sizes: Sequence[int],
    items: Pixels,
) -> LoadedNetwork:
    """Load a model on the first device, as `anychip serve` does: gate on these items, calibrated int8.

    Raises CalibrationError, EngineRefusedError, OutOfDeviceMemoryError, BackendError.
    """
    images = calibration(model, settings.calibrate) if precision == "int8" else None
    given = items if choice.backend.facts.computes else None
    options = compile_options(model, given, images, settings.cache_dir.expanduser())
    network = unbuilt(model, model.network)
    return choice.backend.load(network, choice.devices[0], engine, precision, sizes, options=options)


def inputs_of(model: Model, count: int) -> Tensor:
    """Return so many items for the model's network, on the CPU."""
    items = probes(model)
    return torch.from_numpy(np.resize(items, (count, *items.shape[1:])).copy())


def in_pytorch(model: Model) -> Any:
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
