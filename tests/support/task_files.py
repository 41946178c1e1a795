"""Small exported files of each task with known answers: one instance in the middle of the network's input."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import nn

from tests.support import exports_of_networks

SIDE = 64
_ANCHORS = sum((SIDE // stride) ** 2 for stride in (8, 16, 32))
_BOX = (32.0, 32.0, 30.0, 20.0)  # Centre, width and height in the input.
_EXTRAS: dict[str, list[float]] = {
    "detect": [],
    "segment": [1.0, *[0.0] * 31],
    "pose": [22.0, 27.0, 0.9, 42.0, 27.0, 0.9, 32.0, 37.0, 0.1],
    "obb": [math.pi / 4],
}


class Known(nn.Module):
    """Network that answers every image with the same instance, of the class `thing`."""

    def __init__(self, task: str) -> None:
        super().__init__()
        rows = torch.zeros(_ANCHORS, 4 + 2 + len(_EXTRAS[task]))
        rows[:] = torch.tensor([*_BOX, 0.01, 0.02, *_EXTRAS[task]])
        rows[:, :2] += torch.rand(_ANCHORS, 2, generator=torch.Generator().manual_seed(0))
        rows[40, :6] = torch.tensor([*_BOX, 0.05, 0.9])
        self.rows = nn.Parameter(rows.T[None])
        side = SIDE // 4
        self.masks = nn.Parameter(torch.ones(1, 32, side, side)) if task == "segment" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        nothing = x.mean((1, 2, 3)) * 1e-7
        rows: torch.Tensor = self.rows + nothing.reshape(-1, 1, 1)
        return rows if self.masks is None else (rows, self.masks + nothing.reshape(-1, 1, 1, 1))


def answers(task: str) -> torch.Tensor:
    if task == "classify":
        return torch.tensor([0.0, 3.0])
    if task == "embed":
        return torch.tensor([3.0, 4.0])
    if task == "regress":
        return torch.tensor([31.5, 1.75])
    if task == "depth":
        return torch.linspace(1, 5, SIDE).expand(1, SIDE, SIDE).clone()
    scores = torch.ones(2, SIDE // 4, SIDE // 4)  # The right half is of the class `thing`.
    scores[1, :, : SIDE // 8], scores[1, :, SIDE // 8 :] = 0, 2
    return scores


OF_IMAGES = ("embed", "segment_semantic", "depth", "regress")


class KnownAnswer(nn.Module):
    """Network that answers every image with the same numbers: a classifier with the class `thing`."""

    def __init__(self, task: str) -> None:
        super().__init__()
        self.answer = nn.Parameter(answers(task)[None])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.answer + x.mean((1, 2, 3)).reshape(-1, *[1] * (self.answer.dim() - 1)) * 1e-7


def network_of(task: str) -> nn.Module:
    return (Known(task) if task in _EXTRAS else KnownAnswer(task)).eval()


def written(folder: Path, task: str) -> Path:
    """Write `folder`/TASK.onnx, and a sidecar with the facts that the file lacks."""
    sidecar: dict[str, object] = {"task": task, "labels": ["nothing", "thing"]}
    if task in _EXTRAS:
        sidecar["layout"] = "yolov8"
    if task == "pose":
        sidecar["keypoints"] = [3, 3]
    return exports_of_networks.written(folder / f"{task}.onnx", network_of(task), torch.rand(1, 3, SIDE, SIDE), sidecar)
