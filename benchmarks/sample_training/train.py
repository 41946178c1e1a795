"""Train the sample models from nothing on synthetic images, on the CPU.

    python -m benchmarks.sample_training.train resnet50
    python -m benchmarks.sample_training.train yolov8n --weights FILE --out /tmp/yolov8n

Owns: the two recipes, the loop, its checkpoints and the files it leaves (weights in float16, rounded to be packed
smaller, and their measured quality). With `--weights` it trains nothing and leaves the files of those weights.
Must not know how images are drawn or how quality is measured.

Small images come first, then larger ones, last the size at which the models are served: most of the learning does
not need many pixels. The learning rate follows the clock, so a run takes the minutes it is given on any machine.

Each of the shipped networks was trained in one run, stopped and resumed several times with longer schedules than at
first; the recipes below are the last of those. The quality of a fresh run was not measured.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from datetime import date
from itertools import islice
from math import cos, log, pi
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL
import torch
import torchvision
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from benchmarks.sample_training import evaluate
from benchmarks.sample_training.generator import KINDS
from benchmarks.sample_training.loss import Objects, detection_loss
from benchmarks.sample_training.rounding import rounded
from models.yolo.yolov8 import STRIDES, YOLOv8

SEED = 2026
VALIDATION_SEED = 2027
HELD_OUT_SEED = 2028
_WARM_UP = 0.03  # of the run, while the learning rate rises
_CHECKPOINT_S = 120.0
_EMA_DECAY = 0.99
_RECALIBRATION_IMAGES = 256


class Stage(NamedTuple):
    """Part of a run: it ends when `until` (0..1) of the time has passed."""

    until: float
    size: int
    batch: int
    difficulty: float = 1.0
    zoom: float = 1.0


class Recipe(ABC):
    """Training recipe of one network."""

    name: str
    stages: Sequence[Stage]
    learning_rate: float
    weight_decay: float
    minutes: float
    enough: float  # a run ends early when the quality on some validation images reaches this
    held_out: int  # images on which the final quality is measured
    steps: int  # of the shipped weights; more would make the files larger, fewer move answers near a threshold

    @abstractmethod
    def network(self) -> nn.Module:
        """Make a network with initial values."""

    @abstractmethod
    def dataset(self, stage: Stage, first: int) -> Dataset[Any]:
        """Return training images `first`, `first` + 1, ... for a stage."""

    @abstractmethod
    def loss(self, network: nn.Module, items: list[Any]) -> Tensor:
        """Compute the mean loss of a batch of `dataset`'s items."""

    @abstractmethod
    def quality(self, weights_file: Path, seed: int, count: int) -> dict[str, float]:
        """Measure shipped weights at the serving size on `count` images; return one measure by its name."""


class ClassificationRecipe(Recipe):
    """Recipe of torchvision's ResNet50."""

    name = "resnet50"
    stages = (
        Stage(0.05, 64, 32, difficulty=0.0),
        Stage(0.1, 64, 32, difficulty=0.5),
        Stage(0.22, 64, 32),
        Stage(0.42, 96, 32),
        Stage(0.55, 144, 32),
        Stage(0.85, 176, 32),
        Stage(1.0, evaluate.CLASSIFIER_SIZE, 32),
    )
    learning_rate = 5e-4
    weight_decay = 0.05
    minutes = 166.0
    enough = 0.99
    held_out = 1000
    steps = 128

    def network(self) -> nn.Module:  # noqa: D102
        network: nn.Module = torchvision.models.resnet50(weights=None, num_classes=len(KINDS))
        for module in network.modules():
            if isinstance(module, torchvision.models.resnet.Bottleneck):
                # Residual blocks begin near the identity (arXiv 1706.02677, section 5.1); from 0 Adam moves slowly.
                nn.init.constant_(module.bn3.weight, 0.25)
        return network

    def dataset(self, stage: Stage, first: int) -> Dataset[Any]:  # noqa: D102
        return evaluate.ClassificationImages(SEED, first, stage.size, stage.difficulty)

    def loss(self, network: nn.Module, items: list[Any]) -> Tensor:  # noqa: D102
        model = evaluate.classifier()
        mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (model.mean, model.std))
        logits = network((_pixels(items) - mean) / std)
        classes = torch.tensor([class_id for _, class_id in items])
        return functional.cross_entropy(logits.float(), classes, label_smoothing=0.05)

    def quality(self, weights_file: Path, seed: int, count: int) -> dict[str, float]:  # noqa: D102
        return {"top1": evaluate.top1(evaluate.classifier(weights_file), seed, count)}


class DetectionRecipe(Recipe):
    """Recipe of YOLOv8n."""

    name = "yolov8n"
    stages = (
        Stage(0.25, 256, 16),
        Stage(0.72, 384, 12, zoom=5 / 3),
        Stage(0.86, 512, 8, zoom=5 / 4),
        Stage(1.0, evaluate.DETECTOR_SIZE, 8),
    )
    learning_rate = 2e-3
    weight_decay = 0.02
    minutes = 155.0
    enough = 0.95
    held_out = 400
    steps = 256

    def network(self) -> nn.Module:  # noqa: D102
        network = YOLOv8("n", len(KINDS))
        for classes, stride in zip(network.head.cv3, STRIDES, strict=True):
            # A prior of five objects in a 640 x 640 image, so that training does not start with false alarms.
            nn.init.constant_(classes.get_parameter("2.bias"), log(5 / len(KINDS) / (640 / stride) ** 2))
        return network

    def dataset(self, stage: Stage, first: int) -> Dataset[Any]:  # noqa: D102
        return evaluate.DetectionImages(SEED, first, stage.size, stage.zoom)

    def loss(self, network: nn.Module, items: list[Any]) -> Tensor:  # noqa: D102
        assert isinstance(network, YOLOv8)
        x = _pixels(items)
        outputs = network.raw(x)
        valid = [torch.ones(len(classes), dtype=torch.bool) for _, _, classes in items]
        boxes = pad_sequence([boxes for _, boxes, _ in items], batch_first=True)
        classes = pad_sequence([classes for _, _, classes in items], batch_first=True)
        objects = Objects(boxes, classes, pad_sequence(valid, batch_first=True))
        with torch.autocast("cpu", enabled=False):
            return detection_loss(outputs, objects, (x.shape[2], x.shape[3]))

    def quality(self, weights_file: Path, seed: int, count: int) -> dict[str, float]:  # noqa: D102
        return {"map50": evaluate.map50(evaluate.detector(weights_file), seed, count)}


RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (ClassificationRecipe(), DetectionRecipe())}


def _pixels(items: list[Any]) -> Tensor:
    """Return float32 [n, 3, size, size] in 0..1, channels-last strides."""
    return torch.stack([item[0] for item in items]).permute(0, 3, 1, 2).float() / 255


def write_weights(recipe: Recipe, state: Mapping[str, Tensor], out: Path) -> Path:
    """Write weights for shipping: float16, those of layers rounded."""
    path = out / f"{recipe.name}.safetensors"
    shipped = {
        name: (rounded(tensor.half(), recipe.steps) if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in state.items()
    }
    save_file(shipped, path, {"architecture": recipe.name, "labels": json.dumps(KINDS)})
    return path


def record_quality(recipe: Recipe, weights_file: Path, training: Mapping[str, Any]) -> dict[str, Any]:
    """Measure shipped weights and write the result into the quality.json beside them; keep its other entries."""
    file = weights_file.with_name("quality.json")
    quality = json.loads(file.read_text()) if file.exists() else {}
    quality[recipe.name] = {
        **quality.get(recipe.name, {}),
        **recipe.quality(weights_file, HELD_OUT_SEED, recipe.held_out),
        "images": recipe.held_out,
        "image_seed": HELD_OUT_SEED,
        "image_sizes": evaluate.PHOTO_SIZES,
        "measured_with": "the shipped float16 weights, eager float32 on the CPU",
        "rounded": f"layers' weights, to {recipe.steps} steps between 0 and the largest of an output channel",
        **training,
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "pillow": PIL.__version__,
        "numpy": np.__version__,
    }
    file.write_text(json.dumps(quality, indent=2) + "\n")
    found: dict[str, Any] = quality[recipe.name]
    return found


class _Run:
    """Training run: the state of a checkpoint, and the way to resume from one."""

    def __init__(self, recipe: Recipe, minutes: float, out: Path) -> None:
        self.recipe = recipe
        self.minutes = minutes
        self.out = out
        self.checkpoint = out / f"{recipe.name}.ckpt"
        self.network = recipe.network().to(memory_format=torch.channels_last)
        self.average = recipe.network().eval()
        self.average.load_state_dict(self.network.state_dict())
        decayed = [p for p in self.network.parameters() if p.requires_grad and p.ndim > 1]
        plain = [p for p in self.network.parameters() if p.requires_grad and p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, fused=True)
        self.elapsed_s = 0.0
        self.steps = 0
        self.images = 0
        if self.checkpoint.exists():
            self._resume()

    @property
    def progress(self) -> float:
        return self.elapsed_s / (self.minutes * 60)

    def train(self) -> None:
        for stage in self.recipe.stages:
            if self.progress >= stage.until:
                continue
            self._train_stage(stage)
            self.save()
            if stage.until > 0.5 and self._validated() >= self.recipe.enough:
                return

    def ship(self) -> None:
        """Write the weights as they are served, then their quality into quality.json."""
        self._recalibrate()
        training = {
            "training_seed": SEED,
            "training_images": self.images,
            "training_sizes": [stage.size for stage in self.recipe.stages],
            "training_minutes": round(self.elapsed_s / 60, 1),
        }
        self._say(f"shipped {record_quality(self.recipe, self._write_weights(), training)}")

    def _recalibrate(self) -> None:
        """Measure the statistics of BatchNorm at the serving size, for exactly the averaged weights."""
        for module in self.average.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.reset_running_stats()
                module.momentum = None  # the plain mean of all batches
                module.train()
        stage = self.recipe.stages[-1]
        loader = DataLoader(self.recipe.dataset(stage, self.images), batch_size=stage.batch, collate_fn=list)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            for items in islice(loader, _RECALIBRATION_IMAGES // stage.batch):
                self.recipe.loss(self.average, items)
        self.average.eval()

    def _write_weights(self) -> Path:
        return write_weights(self.recipe, self.average.state_dict(), self.out)

    def _validated(self) -> float:
        self._recalibrate()
        quality = self.recipe.quality(self._write_weights(), VALIDATION_SEED, 100)
        self._say(f"validation {quality}")
        return next(iter(quality.values()))

    def _train_stage(self, stage: Stage) -> None:
        loader = DataLoader(
            self.recipe.dataset(stage, self.images),
            batch_size=stage.batch,
            num_workers=1,
            prefetch_factor=4,
            collate_fn=list,
        )
        saved_s = self.elapsed_s
        mean_loss = 0.0
        clock = time.monotonic()
        for number, items in enumerate(loader, 1):
            loss = self._step(items)
            mean_loss += (loss - mean_loss) / min(number, 50)
            self.steps += 1
            self.images += len(items)
            now = time.monotonic()
            self.elapsed_s += now - clock
            clock = now
            if number % 25 == 0:
                self._say(f"size {stage.size} loss {mean_loss:.4f}")
            if self.elapsed_s - saved_s > _CHECKPOINT_S:
                self.save()
                saved_s = self.elapsed_s
            if self.progress >= stage.until:
                return

    def _step(self, items: list[Any]) -> float:
        rate = self.recipe.learning_rate * min(self.progress / _WARM_UP, 1.0)
        rate *= 0.01 + 0.99 * 0.5 * (1 + cos(pi * min(self.progress, 1.0)))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.network.train()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = self.recipe.loss(self.network, items)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.network.parameters(), 10.0)
        self.optimizer.step()
        decay = min(_EMA_DECAY, (1 + self.steps) / (10 + self.steps))
        with torch.no_grad():
            current = self.network.state_dict()
            for name, tensor in self.average.state_dict().items():
                if tensor.is_floating_point():
                    tensor.lerp_(current[name], 1 - decay)
                else:
                    tensor.copy_(current[name])
        return float(loss.detach())

    def save(self) -> None:
        state = {
            "network": self.network.state_dict(),
            "average": self.average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": {"elapsed_s": self.elapsed_s, "steps": self.steps, "images": self.images},
        }
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.checkpoint)

    def _resume(self) -> None:
        state = torch.load(self.checkpoint, weights_only=True)
        self.network.load_state_dict(state["network"])
        self.average.load_state_dict(state["average"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.elapsed_s = state["progress"]["elapsed_s"]
        self.steps = state["progress"]["steps"]
        self.images = state["progress"]["images"]
        self._say("resumed")

    def _say(self, what: str) -> None:
        rate = self.images / max(self.elapsed_s, 1e-9)
        print(f"{self.elapsed_s / 60:5.1f} min, {self.images} images ({rate:.0f}/s): {what}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train one network and write its weights and quality."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", choices=sorted(RECIPES))
    parser.add_argument("--minutes", type=float, help="wall-clock minutes of training")
    parser.add_argument("--out", type=Path, default=Path("runs/sample"), help="checkpoints, weights, quality.json")
    parser.add_argument("--weights", type=Path, help="round and measure these instead of training any")
    options = parser.parse_args(arguments)
    recipe = RECIPES[options.network]
    options.out.mkdir(parents=True, exist_ok=True)
    if options.weights:
        print(record_quality(recipe, write_weights(recipe, load_file(options.weights), options.out), {}))
        return
    torch.manual_seed(SEED)
    run = _Run(recipe, options.minutes or recipe.minutes, options.out)
    run.train()
    run.ship()


if __name__ == "__main__":
    main()
