"""Input of every question, and its tools to measure.

Owns: the device's module, networks, and times of asynchronous work of a device. Must not know questions.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backends import BACKENDS, Executable
from backends.contract.backend import CompileOptions
from backends.engines import graph
from models import PixelModel
from models.classifiers import Classifier
from models.tasks.coco import COCO_CLASSES
from models.yolo.model import YOLO

LEAST_RUNS = 3


@dataclass(frozen=True)
class Asked:
    """Device to ask. `device`: its name in PyTorch; `seconds`: of one measurement; `dry`: only check that everything
    runs, with small networks and images.
    """

    device: str
    sizes: tuple[int, ...] = (1, 8, 64, 128)
    seconds: float = 1.0
    dry: bool = False
    out: Path = Path()

    @property
    def kind(self) -> str:
        """Type of the device."""
        return self.device.partition(":")[0]

    @property
    def module(self) -> Any:
        """PyTorch's module for this type."""
        return torch.get_device_module(self.kind)

    @property
    def precision(self) -> str:
        """Precision that serves there."""
        return "fp32" if self.kind == "cpu" else "fp16"

    def models(self) -> list[PixelModel]:
        """Make ResNet-50 and YOLOv8n, with random weights: speed does not depend on them."""
        labels = tuple(f"class {number}" for number in range(1000))
        if self.dry:
            size = (64, 64)
            return [
                Classifier.of("resnet50", "squeezenet1_1", labels[:9], "random", None),
                YOLO.of("yolov8n", "yolov8n", COCO_CLASSES, "random", None, size=size),
            ]
        return [
            Classifier.of("resnet50", "resnet50", labels, "random", None),
            YOLO.of("yolov8n", "yolov8n", COCO_CLASSES, "random", None),
        ]

    def loaded(self, model: PixelModel) -> Executable:
        """Load by the engine that serves there, without the gate: graphs, except on the CPU."""
        backend = next(each for each in BACKENDS if each.name == self.kind)
        engine = "eager" if self.kind == "cpu" else "graph"
        device = self.device if ":" in self.device else f"{self.device}:0"
        return backend.load(
            model.network(), device, engine, self.precision, self.sizes, options=CompileOptions()
        ).executable

    def replay(self, network: Any, pixels: Tensor) -> Callable[[], object]:
        """Return a call of the network on these pixels, without any copy: a captured graph, except on the CPU."""
        if self.kind == "cpu":
            return lambda: network(pixels)
        facts = next(each for each in BACKENDS if each.name == self.kind).facts
        kind = getattr(self.module, facts.graph_class)
        captured = graph._capture(network, pixels, self.module, kind, None, copies=False)

        def replay() -> object:
            captured.graph.replay()
            return captured.outputs  # Kept alive: the graph owns their memory.

        return replay

    def time_s(self, call: Callable[[], object], within: int = 1) -> float:
        """Return the median seconds of a call; `within` calls begin before each wait for the device."""
        taken: list[float] = []
        with torch.inference_mode():
            call()
            self.module.synchronize()
            until_s = time.perf_counter() + self.seconds
            while len(taken) < LEAST_RUNS or time.perf_counter() < until_s:
                began_s = time.perf_counter()
                for _ in range(within):
                    call()
                self.module.synchronize()
                taken.append((time.perf_counter() - began_s) / within)
        return statistics.median(taken)


def gb_per_s(size: int, seconds: float) -> float:
    """Return the rate of a copy."""
    return round(size / seconds / 1e9, 2)


def best_of(rows: Sequence[dict[str, Any]], by: str) -> dict[str, Any]:
    """Return the row with the least of a figure."""
    return min(rows, key=lambda row: float(row[by]))
