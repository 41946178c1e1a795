"""The smallest image classifier that is served: for tests of what a device does, whatever the network."""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path

import torch
from torch import nn

PREDICT = "/v1/models/small:predict"


def written(folder: Path, name: str = "small", seed: int = 0) -> str:
    """What `--models` takes: a TorchScript file with two layers of fixed weights, 32 x 32, three classes."""
    features, classes = nn.Conv2d(3, 8, 3), nn.Linear(8, 3)
    generator = torch.Generator().manual_seed(seed)
    for parameter in (*features.parameters(), *classes.parameters()):
        parameter.data.copy_(torch.empty(parameter.shape).uniform_(-1, 1, generator=generator))
    network = nn.Sequential(features, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), classes).eval()
    file = folder / f"{name}.torchscript"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is not what PyTorch recommends.
        torch.jit.save(torch.jit.trace(network, torch.rand(1, 3, 32, 32)), str(file))
    about = {"task": "classify", "size": 32, "labels": ["circle", "square", "star"]}
    file.with_suffix(".json").write_text(json.dumps(about))
    return f"{name}={file}@sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}"
