"""Networks of tests as files with a sidecar, and what their models answer."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models import Options, open_model, parse_spec
from models.contract.model import Placement


def written(
    file: Path, network: nn.Module, given: Any, beside: Mapping[str, Any] | None = None, **options: Any
) -> Path:
    """Export a network to an .onnx or a .ts, by its suffix, with a sidecar. `given`: what it is called with."""
    network, given = network.eval(), given if isinstance(given, tuple) else (given,)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Exporters and PyTorch are not of one version's mind.
        if file.suffix == ".onnx":
            torch.onnx.export(network, given, str(file), dynamo=False, **{"opset_version": 17, **options})
        else:
            torch.jit.save(torch.jit.trace(network, given), str(file))
    if beside is not None:
        file.with_suffix(".json").write_text(json.dumps(beside))
    return file


def opened(file: Path) -> Any:
    """Open the model of a file, which keeps what it needs in the file's folder."""
    return open_model(parse_spec(str(file)), file.parent)


def answered(model: Any, pixels: Tensor, placement: Placement | None = None, row: int = 0, **options: Any) -> Any:
    """Return the answer for an image of a batch of the network's inputs, uint8 [n, height, width, 3]."""
    with torch.inference_mode():
        outputs = [each.numpy() for each in model.network()(pixels)]
    height, width = pixels.shape[1:3]
    asked = Options(**options)
    return model.postprocess(model.reduce(outputs, row, asked), placement or Placement(width, height), asked)
