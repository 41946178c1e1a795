"""Image models out of exported files: detectors, classifiers, masks, poses and turned boxes.

    file ─► (a child process reads and tries it) ─► Export ─► ExportedClassifier or ExportedDetector

Owns: the network around the file's graph, preprocessing as the exporter's own, and answers. Must not know how graphs
are stored (models.onnx_graph, models.exported_networks), what outputs mean (models.exported_layouts) or how files are
tried (models.exported_image_trial).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor, nn

from models.classification import Classifier
from models.detection import Detector
from models.exported_layouts import SIZES, Interpretation, Resize, decoded, output_names
from models.geometry import Geometry
from models.instances import (
    MAX_CANDIDATES,
    MaskGrid,
    combined,
    corners_of,
    mask_reduction,
    polygons_of,
    regular,
    suppress,
    suppress_turned,
)
from models.mask_forms import written
from models.model import Array, MaskForm, Options, OutputSpec, PixelNetwork, Placement, Task
from models.torchvision_exports import only_float32, untraced

_GREY = 114
_POINTS = 50_000  # Of all polygons of an image, but each may have the least.
_LEAST_POINTS = 200
_MASK_PIXELS = 64_000_000


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
        from models.onnx_graph import load_onnx

        graph, _ = load_onnx(Path(file), SIZES)
        graph.free_batch = freed
        return graph.core, graph.tail
    from models.exported_networks import FORMS, load_graph

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
    def outputs(self) -> tuple[str, ...]:
        """As `decoded` returns them."""
        return output_names(self.export.how.task)

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
        """Candidates by descending score: boxes [k, 4], scores [k], classes [k], extras [k, e], and prototypes."""
        boxes, scores, classes, *others = (output[index] for output in outputs)
        # Rows that the network has filled up with zeros are none, whatever the threshold.
        chosen = np.flatnonzero(scores > max(options.score_threshold, 0.0))
        chosen = chosen[np.argsort(-scores[chosen], kind="stable")[:MAX_CANDIDATES]]
        reduced = [boxes[chosen], scores[chosen], classes[chosen]]
        reduced += [other[chosen] for other in others[: 1 if self.export.how.extras else 0]]
        if self.task == "segment":
            prototypes = others[-1] if len(chosen) else others[-1][:0]
            reduced.append(np.array(prototypes, np.float32))
        return tuple(reduced)

    def _kept(self, outputs: Sequence[Array], options: Options) -> Array:
        boxes, scores, classes = outputs[:3]
        most = options.max_detections
        if self.export.how.suppressed:
            return np.arange(min(len(scores), max(0, most)))
        if self.task == "obb":
            return suppress_turned(boxes, outputs[3][:, 0], classes, options.iou_threshold, most)
        if self.export.how.layout == "rtdetr":
            return np.arange(min(len(scores), max(0, most)))
        return suppress(boxes, scores, classes, options.iou_threshold, most)

    def _scales(self, placement: Placement) -> tuple[Array, Array]:
        """Of x and y: pixels of the input for one of the image, and where its first pixel lies."""
        input_height, input_width = self.input_shape[:2]
        if self.export.resize == "stretch":
            return np.array([input_width / placement.width, input_height / placement.height]), np.zeros(2)
        if self.export.resize == "top-left":
            return np.array([placement.scale, placement.scale]), np.zeros(2)
        # The sides of the resized image are whole pixels, so that each axis has a scale of its own.
        sides = (max(1, round(side * placement.scale)) for side in (placement.width, placement.height))
        scale = np.array([side / full for side, full in zip(sides, (placement.width, placement.height), strict=True)])
        return scale, np.array([placement.pad_x, placement.pad_y])

    def _instances(self, outputs: Sequence[Array], placement: Placement, options: Options) -> dict[str, Array]:
        """What remains, in pixels of the image: `boxes` float64 [k, 4], `scores`, `classes` and what the task adds."""
        kept = self._kept(outputs, options)
        scale, pad = self._scales(placement)
        limit = np.array([placement.width, placement.height] * 2)
        boxes = outputs[0][kept].astype(np.float64)
        found: dict[str, Array] = {"scores": outputs[1][kept], "classes": outputs[2][kept].astype(np.int64)}
        if self.task == "obb":
            boxes, angles = regular(boxes, outputs[3][kept, 0].astype(np.float64))
            boxes = (boxes - np.concatenate((pad, np.zeros(2)))) / np.concatenate((scale, scale))
            found["turned"] = np.concatenate((boxes, angles[:, None]), axis=1)
            found["corners"] = corners_of(boxes, angles)
            upright = np.concatenate((found["corners"].min(axis=1), found["corners"].max(axis=1)), axis=1)
            found["boxes"] = upright.clip(0, limit)
            return found
        found["boxes"] = ((boxes - np.tile(pad, 2)) / np.tile(scale, 2)).clip(0, limit)
        if self.task == "pose":
            assert self.export.keypoints is not None
            points = outputs[3][kept].astype(np.float64).reshape(len(kept), *self.export.keypoints)
            places = ((points[..., :2] - pad) / scale).clip(0, limit[:2])
            visible = points[..., 2:3] if points.shape[2] > 2 else np.ones((*points.shape[:2], 1))
            found["keypoints"] = np.concatenate((places, visible), axis=2)
        if self.task == "segment":
            found["coefficients"], found["prototypes"] = outputs[3][kept], outputs[4]
        return found

    def postprocess(self, outputs: Sequence[Array], placement: Placement, options: Options) -> dict[str, Any]:
        """Instances by descending score, all coordinates in pixels of the image as displayed."""
        found = self._instances(outputs, placement, options)
        detections = [
            {
                "label": self._label(class_id),
                "class_id": class_id,
                "score": score,
                "box": dict(zip(("x1", "y1", "x2", "y2"), box, strict=True)),
            }
            for class_id, score, box in zip(
                found["classes"].tolist(),
                found["scores"].astype(np.float64).round(5).tolist(),
                found["boxes"].round(2).tolist(),
                strict=True,
            )
        ]
        masks = self._masks(found, placement, options.masks) if self.task == "segment" else []
        for number, detection in enumerate(detections):
            if self.task == "pose":
                detection["keypoints"] = [
                    {"x": round(x, 2), "y": round(y, 2), "score": round(score, 5)}
                    for x, y, score in found["keypoints"][number].tolist()
                ]
            if self.task == "obb":
                x, y, width, height, angle = found["turned"][number].tolist()
                detection["obb"] = {
                    "cx": round(x, 2),
                    "cy": round(y, 2),
                    "w": round(width, 2),
                    "h": round(height, 2),
                    "angle": round(angle, 5),
                }
                detection["corners"] = found["corners"][number].round(2).tolist()
            if masks and masks[number] is not None:
                detection.update(masks[number] or {})
        if masks:  # As the reference does: an instance without a pixel is none.
            detections = [found for found, mask in zip(detections, masks, strict=True) if mask is not None]
        return {"detections": detections, "width": placement.width, "height": placement.height}

    def _label(self, class_id: int) -> str:
        return self.labels[class_id] if 0 <= class_id < len(self.labels) else f"class {class_id}"

    def grid(self, prototypes: Array, placement: Placement, factor: float = 1.0) -> MaskGrid:
        """Where prototypes [m, h, w] lie in an image reduced by `factor`."""
        scale, (left, top) = self._scales(placement)
        size = np.array([placement.width, placement.height])
        right, bottom = np.array([left, top]) + scale * size
        width, height = (max(1, round(side * factor)) for side in size.tolist())
        ratio = (prototypes.shape[2] / self.input_shape[1], prototypes.shape[1] / self.input_shape[0])
        return MaskGrid.of(ratio, (float(left), float(top), float(right), float(bottom)), (width, height))

    def _polygons(self, found: Mapping[str, Array], placement: Placement) -> list[list[list[list[float]]] | None]:
        """Each instance's rings of points in pixels of the image; None where its mask is empty."""
        most = max(_LEAST_POINTS, _POINTS // max(1, len(found["scores"])))
        factor = mask_reduction(placement.width, placement.height)
        polygons: list[list[list[list[float]]] | None] = []
        for mask, x, y in self._within_boxes(found, placement, factor):
            rings = polygons_of(mask, x, y, most) if mask.size else None
            if rings is None:
                polygons.append(None)
                continue
            whole = factor == 1  # Then the points are pixels.
            polygons.append([(ring if whole else (ring / factor).round(1)).tolist() for ring in rings])
        return polygons

    def _masks(self, found: Mapping[str, Array], placement: Placement, form: MaskForm) -> list[dict[str, Any] | None]:
        """What each detection gets for its mask; None where the mask is empty. Of all masks together at most
        `_MASK_PIXELS` are looked at: the instances after that go without one.
        """
        if form == "none":
            return []
        if form == "polygon":
            return [None if rings is None else {"segments": rings} for rings in self._polygons(found, placement)]
        sides = np.maximum(0, np.ceil(found["boxes"][:, 2:]) - np.ceil(found["boxes"][:, :2]))
        within = int((sides.prod(axis=1).cumsum() <= _MASK_PIXELS).sum())
        first = {name: found[name][:within] for name in ("scores", "coefficients", "boxes")}
        parts = self._within_boxes({**first, "prototypes": found["prototypes"]}, placement, 1.0)
        masks = [mask and {"mask": mask} for mask in written(form, parts, placement.width, placement.height)]
        return [*masks, *({"mask": None} for _ in found["scores"][within:])]

    def _within_boxes(
        self, found: Mapping[str, Array], placement: Placement, factor: float
    ) -> Iterator[tuple[Array, int, int]]:
        """Each instance's mask within its box, and its first pixel, in an image reduced by `factor`."""
        if len(found["scores"]):
            grid = self.grid(found["prototypes"], placement, factor)
            yield from grid.masks(found["coefficients"], found["prototypes"], found["boxes"] * factor)

    @property
    def answers(self) -> tuple[OutputSpec, ...]:
        """Instances by descending score; of a batch, images with fewer are filled up with zeros."""
        specs = super().answers
        if self.task == "obb":
            specs += (OutputSpec("turned", "FP32", (-1, -1, 5)), OutputSpec("corners", "FP32", (-1, -1, 4, 2)))
        if self.task == "pose":
            assert self.export.keypoints is not None
            specs += (OutputSpec("keypoints", "FP32", (-1, -1, self.export.keypoints[0], 3)),)
        if self.task == "segment":
            height, width = self.input_shape[:2]
            specs += (OutputSpec("masks", "UINT8", (-1, -1, height // 4, width // 4)),)
        return specs

    def tensors(self, outputs: Sequence[Array], placement: Placement, options: Options) -> dict[str, Array]:
        """As `Detector.tensors`; and `turned` [k, 5], `corners` [k, 4, 2], `keypoints` [k, points, 3] or `masks`."""
        found = self._instances(outputs, placement, options)
        count = len(found["scores"])
        answer = {
            "boxes": found["boxes"].astype(np.float32),
            "scores": found["scores"].astype(np.float32),
            "classes": found["classes"].astype(np.int32),
            "num_detections": np.array(count, np.int32),
        }
        for name in ("turned", "corners", "keypoints"):
            if name in found:
                answer[name] = found[name].astype(np.float32)
        if self.task == "segment":
            answer["masks"] = self._small_masks(found, outputs, options)
        return answer

    def _small_masks(self, found: Mapping[str, Array], outputs: Sequence[Array], options: Options) -> Array:
        """uint8 [k, h/4, w/4]: the masks as the network sees them, in a quarter of its input, cut at their boxes."""
        height, width = (side // 4 for side in self.input_shape[:2])
        prototypes = found["prototypes"]
        masks = np.zeros((len(found["scores"]), height, width), np.uint8)
        boxes = outputs[0][self._kept(outputs, options)] / 4
        if not len(masks) or prototypes.shape[1:] != (height, width):
            return masks
        for number, (x1, y1, x2, y2) in enumerate(np.ceil(boxes).clip(0, (width, height) * 2).astype(int)):
            one = found["coefficients"][number : number + 1]
            masks[number, y1:y2, x1:x2] = combined(one, prototypes[:, y1:y2, x1:x2])[0] > 0
        return masks


def _batch_sizes(ladder: Sequence[int], export: Export) -> tuple[int, ...]:
    low, high = export.batch
    if high == 1:
        return tuple(ladder)  # One by one within a batch.
    return tuple(size for size in ladder if low <= size <= high) or (low,)
