"""Smallest image classifier that is served: for tests of a device's behaviour with any network."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from models.exports.files import names_beside, names_within
from models.weights.opened import looked_at
from tests.support import exports_of_networks

PREDICT = "/v1/models/small:predict"


def written(folder: Path, name: str = "small", seed: int = 0) -> str:
    """Write a TorchScript file with two layers of fixed weights, 32 x 32, three classes; return it for `--models`."""
    features, classes = nn.Conv2d(3, 8, 3), nn.Linear(8, 3)
    generator = torch.Generator().manual_seed(seed)
    for parameter in (*features.parameters(), *classes.parameters()):
        parameter.data.copy_(torch.empty(parameter.shape).uniform_(-1, 1, generator=generator))
    return saved(folder, name, nn.Sequential(features, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), classes))


def by_colour(folder: Path, name: str, file: str, blind: int | None = None) -> str:
    """Write a network that tells red, green and blue apart; it never sees `blind`, one of them. Return as `written`."""
    classes = nn.Linear(3, 3)
    classes.weight.data.copy_(10 * torch.eye(3))
    classes.bias.data.zero_()
    if blind is not None:
        classes.bias.data[blind] = -100
    return saved(folder, file, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), classes)).replace(file, name, 1)


def saved(folder: Path, name: str, network: nn.Module) -> str:
    about = {"task": "classify", "size": 32, "labels": ["circle", "square", "star"]}
    file = exports_of_networks.written(folder / f"{name}.torchscript", network, torch.rand(1, 3, 32, 32), about)
    return f"{name}={file}@sha256:{digest_of(file)}"


def digest_of(file: Path) -> str:
    """Return the digest that pins a file with its own graph, and all files read beside it."""
    return looked_at(file, names_beside(file, is_graph=True), names_within).sha256
