"""Image models out of exported files: detectors, classifiers, masks, poses and turned boxes.

    file ─► (a child process reads and tries it) ─► Export ─► ExportedClassifier or ExportedDetector

Owns: the network around the file's graph, preprocessing as the exporter's own, and answers. Must not know how graphs
are stored (models.onnx.graph, models.exports.networks), what outputs mean (models.exports.layouts) or how files are
tried (models.exports.image_trial).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor, nn

from models.contract.geometry import Geometry
from models.contract.model import Array, Options, OutputSpec, PixelNetwork, Placement, Task
from models.exports.layouts import SIZES, Interpretation, Resize, decoded, instance_task
from models.onnx.torchvision_detectors import only_float32, untraced
from models.tasks.classification import Classifier
from models.tasks.detect import Fit, Found, InstanceTask
from models.tasks.detection import Detector
from models.tasks.instances import MAX_CANDIDATES

_GREY = 114


@dataclass(frozen=True)
class Export:
    """What is known of a file once it was tried. `batch`: the sizes it takes, (1, 1) one at a time.

    `freed`: whether an ONNX file that states batches of 1 is run with others. `keypoints`: their number and values.
    """

    how: Interpretation
    size: tuple[int, int]
    batch: tuple[int, int]
    freed: bool
    resize: Resize
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    keypoints: tuple[int, int] | None
    exporter: str
    licence: str


class ExportedNetwork(PixelNetwork):
    """A file's graph between normalised pixels and `decoded`."""

    def __init__(self, core: nn.Module, tail: nn.Module | None, export: Export) -> None:
        super().__init__(core, (*export.size, 3), export.mean, export.std)
        self.tail = tail
        self.how, self.size, self.single = export.how, export.size, export.batch == (1, 1)
        self.only_float32 = export.how.layout == "torchvision"

    def compute(self, normalised: Tensor) -> tuple[Tensor, ...]:
        """As `decoded` says. A graph that takes one image at a time gets one at a time."""
        if self.how.layout == "torchvision":
            alone = [decoded(self.how, self._outputs(image), self.size) for image in untraced(normalised)]
            return tuple(torch.cat(each) for each in zip(*alone, strict=True))
        if self.single and normalised.shape[0] > 1:
            found = [self._outputs(normalised[row : row + 1]) for row in range(normalised.shape[0])]
            outputs = [torch.cat(each) for each in zip(*found, strict=True)]
        else:
            outputs = self._outputs(normalised)
        return decoded(self.how, outputs, self.size)

    def cast(self, dtype: torch.dtype) -> PixelNetwork:
        """As the contract says; one that chooses boxes before its last layers does so in float32 alone."""
        return super().cast(only_float32(dtype) if self.only_float32 else dtype)

    def _outputs(self, normalised: Tensor) -> list[Tensor]:
        values = self.core(normalised)
        values = [each.float() if isinstance(each, Tensor) and each.is_floating_point() else each for each in values]
        return values if self.tail is None else list(self.tail(*values))


def build_network(file: str, architecture: str, export: Export) -> ExportedNetwork:
    """The network of a file, on the CPU in float32. Raises WeightsError."""
    return ExportedNetwork(*load_parts(file, architecture, export.freed), export).eval().requires_grad_(False)


def load_parts(file: str, architecture: str, freed: bool) -> tuple[nn.Module, nn.Module | None]:
    """The file's graph, and what of it stays float32, where the two are apart. Raises WeightsError."""
    if architecture in ("onnx", "xml"):
        from models.onnx.graph import load_onnx

        graph, _ = load_onnx(Path(file), SIZES)
        graph.free_batch = freed
        return graph.core, graph.tail
    from models.exports.networks import FORMS, load_graph

    loaded = load_graph(file, FORMS[f".{architecture}"])
    loaded.cast(torch.float32)  # Halves of the file, as of an ONNX file: the precision is the engine's choice.
    return loaded, None


@dataclass(frozen=True)
class ExportedClassifier(Classifier):
    """A classifier from a file: short side resized, centre cut out, as torchvision and Ultralytics do."""

    export: Export = field(kw_only=True)

    def network(self) -> ExportedNetwork:  # type: ignore[override]
        """As the contract says. Raises WeightsError."""
        assert self.weights_file is not None
        return build_network(self.weights_file, self.architecture, self.export)

    def batch_sizes(self, ladder: Sequence[int]) -> tuple[int, ...]:
        """As the file takes them."""
        return _batch_sizes(ladder, self.export)


@dataclass(frozen=True)
class ExportedDetector(Detector):
    """Boxes, masks, poses or turned boxes from a file."""

    export: Export = field(kw_only=True)

    @property
    def task(self) -> Task:
        """As the file says."""
        task = self.export.how.task
        return "infer" if task == "adapted" else task

    @property
    def instances(self) -> InstanceTask:
        """What the instances of the task have."""
        return instance_task(self.export.how.task, self.export.keypoints)

    @property
    def outputs(self) -> tuple[str, ...]:
        """As `decoded` returns them."""
        return ("boxes", "scores", "classes", *self.instances.outputs)

    @property
    def normalisation(self) -> tuple[Sequence[float], Sequence[float]]:
        """As the file or its sidecar says."""
        return self.export.mean, self.export.std

    def network(self) -> ExportedNetwork:  # type: ignore[override]
        """As the contract says. Raises WeightsError."""
        assert self.weights_file is not None
        return build_network(self.weights_file, self.architecture, self.export)

    def batch_sizes(self, ladder: Sequence[int]) -> tuple[int, ...]:
        """As the file takes them."""
        return _batch_sizes(ladder, self.export)

    def preprocess(self, image: Tensor, out: Tensor, width: int, height: int) -> Placement:
        """Letterbox as our own detectors, or stretched, or from the upper left, as the network was trained."""
        if self.export.resize == "letterbox":
            return super().preprocess(image, out, width, height)
        fitted, placement = self._fitted(width, height)
        size = fitted.width, fitted.height
        resized = cv2.resize(np.ascontiguousarray(image.numpy()), size, interpolation=cv2.INTER_LINEAR)
        if resized.shape != self.input_shape:
            out[...] = _GREY
        out[: fitted.height, : fitted.width] = torch.from_numpy(resized)
        return placement

    def placement(self, width: int, height: int) -> Placement:
        """As `preprocess` returns it."""
        return super().placement(width, height) if self.export.resize == "letterbox" else self._fitted(width, height)[1]

    def geometry(self, width: int, height: int) -> Geometry | None:
        """As `preprocess`."""
        return super().geometry(width, height) if self.export.resize == "letterbox" else self._fitted(width, height)[0]

    def _fitted(self, width: int, height: int) -> tuple[Geometry, Placement]:
        """Stretched, or from the upper left."""
        if self.export.resize == "stretch":
            return Geometry(self.input_shape[1], self.input_shape[0], 0, 0), Placement(width, height)
        scale = min(self.input_shape[0] / height, self.input_shape[1] / width)
        fitted = Geometry(max(1, int(width * scale)), max(1, int(height * scale)), 0, 0, grey=_GREY)
        return fitted, Placement(width, height, scale)

    def strides(self) -> Array:
        """Pixels of the input that an error of 1 in a box stands for, float32 [anchors] or [1]."""
        height, width = self.export.size
        each = [np.full((height // s) * (width // s), s, np.float32) for s in self.export.how.strides]
        if not each or self.export.how.layout == "yolov5":
            return np.full(1, 16, np.float32)
        return np.concatenate(each)

    def reduce(self, outputs: Sequence[Array], index: int, options: Options) -> tuple[Array, ...]:
        """Candidates by descending score: boxes [k, 4], scores [k], classes [k], and what the task wants."""
        boxes, scores, classes, *others = (output[index] for output in outputs)
        # Rows that the network has filled up with zeros are none, whatever the threshold.
        chosen = np.flatnonzero(scores > max(options.score_threshold, 0.0))
        chosen = chosen[np.argsort(-scores[chosen], kind="stable")[:MAX_CANDIDATES]]
        return boxes[chosen], scores[chosen], classes[chosen], *self.instances.reduce(others, chosen)

    def _kept(self, outputs: Sequence[Array], options: Options) -> Array:
        if self.export.how.suppressed:
            return np.arange(min(len(outputs[1]), max(0, options.max_detections)))
        return self.instances.keep(outputs, options)

    def frame(self, placement: Placement) -> Fit:
        """Where an image lies in the input."""
        size = self.input_shape[:2]
        if self.export.resize == "stretch":
            scale = np.array([size[1] / placement.width, size[0] / placement.height])
            return Fit(placement, scale, np.zeros(2), size)
        if self.export.resize == "top-left":
            return Fit(placement, np.array([placement.scale, placement.scale]), np.zeros(2), size)
        # The sides of the resized image are whole pixels, so that each axis has a scale of its own.
        full = np.array([placement.width, placement.height])
        sides = [max(1, round(side * placement.scale)) for side in full.tolist()]
        return Fit(placement, np.array(sides) / full, np.array([placement.pad_x, placement.pad_y]), size)

    def found(self, outputs: Sequence[Array], kept: Array, frame: Fit) -> Found:
        """The instances that are kept of what `reduce` returned."""
        located = self.instances.locate(outputs, kept, frame)
        return {"scores": outputs[1][kept], "classes": outputs[2][kept].astype(np.int64), **located}

    def postprocess(self, outputs: Sequence[Array], placement: Placement, options: Options) -> dict[str, Any]:
        """Instances by descending score, all coordinates in pixels of the image as displayed."""
        frame = self.frame(placement)
        found = self.found(outputs, self._kept(outputs, options), frame)
        detections = [
            {
                "label": self._label(class_id),
                "class_id": class_id,
                "score": score,
                "box": dict(zip(("x1", "y1", "x2", "y2"), box, strict=True)),
                **more,
            }
            for class_id, score, box, more in zip(
                found["classes"].tolist(),
                found["scores"].astype(np.float64).round(5).tolist(),
                found["boxes"].round(2).tolist(),
                self.instances.describe(found, frame, options),
                strict=True,
            )
            if more is not None
        ]
        return {"detections": detections, "width": placement.width, "height": placement.height}

    def _label(self, class_id: int) -> str:
        return self.labels[class_id] if 0 <= class_id < len(self.labels) else f"class {class_id}"

    @property
    def answers(self) -> tuple[OutputSpec, ...]:
        """Instances by descending score; of a batch, images with fewer are filled up with zeros."""
        return super().answers + self.instances.specs(self.input_shape[:2])

    def tensors(self, outputs: Sequence[Array], placement: Placement, options: Options) -> dict[str, Array]:
        """As `Detector.tensors`, and what the task adds."""
        kept = self._kept(outputs, options)
        found = self.found(outputs, kept, self.frame(placement))
        return {
            "boxes": found["boxes"].astype(np.float32),
            "scores": found["scores"].astype(np.float32),
            "classes": found["classes"].astype(np.int32),
            "num_detections": np.array(len(kept), np.int32),
            **self.instances.tensors(found, outputs[0][kept], self.input_shape[:2]),
        }


def _batch_sizes(ladder: Sequence[int], export: Export) -> tuple[int, ...]:
    low, high = export.batch
    if high == 1:
        return tuple(ladder)  # One by one within a batch.
    return tuple(size for size in ladder if low <= size <= high) or (low,)
