"""YOLOv8 and YOLO11 detectors: from a decoded image to boxes with labels.

Owns: letterbox, what a device returns, box decoding, non-maximum suppression, the answer's form. Must not know HTTP,
devices or how images and files are read.

The device returns distances in units of the stride; positions are computed here in float32. A low-precision engine
then errs relative to the size of a box, not to its place in the image (bfloat16 counts in steps of 4 beyond 512).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import log
from pathlib import Path
from typing import Any, TypeVar

import cv2
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from models.contract.errors import WeightsError
from models.contract.geometry import Geometry
from models.contract.model import Array, Finds, Options, OutputSpec, PixelModel, PixelNetwork, Placement, Task
from models.tasks.coco import COCO_CLASSES
from models.tasks.instances import MAX_CANDIDATES, suppress
from models.yolo.families import DETECTORS, PUBLISHED_DETECTORS, named_in, parts_of
from models.yolo.yolov8 import BOX_CHANNELS, YOLOv8, anchors

ARCHITECTURES: tuple[str, ...] = DETECTORS
PUBLISHED: tuple[str, ...] = PUBLISHED_DETECTORS
INPUT_SHAPE = (640, 640, 3)

Network = TypeVar("Network", bound=YOLOv8)
Core = TypeVar("Core", bound=nn.Module)

_PAD_GREY = 114
_AS_IT_IS = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)  # Mean and standard deviation: the network takes 0..1.
_DECODE_OVERSAMPLING = 6


def default_labels(architecture: str) -> tuple[str, ...]:
    """Labels of the published weights. Raises UnknownModelError."""
    parts_of(architecture)
    return COCO_CLASSES


def class_count(architecture: str, state: Mapping[str, Tensor]) -> int:
    """Number of classes of a state dict (meta tensors do), which must fit `architecture` in every name and shape.

    Raises UnknownModelError, WeightsError.
    """
    family, size, _ = parts_of(architecture)
    bias, found = state.get(family.class_bias[0]), named_in(state, "")
    if found and found != architecture:
        raise WeightsError(f"The weights are of {found}, not of {architecture}.")
    if not found or bias is None or bias.ndim != 1 or len(bias) == 0:
        raise WeightsError(f"The weights are not those of a {family.name} detector, so not of {architecture}.")
    with torch.device("meta"):
        expected = family.detector(size, len(bias)).state_dict()
    check_fits(architecture, state, expected)
    return len(bias)


def check_fits(architecture: str, state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Whether a state dict has the names and shapes of the expected one (meta tensors do). Raises WeightsError."""
    for name in sorted(expected.keys() | state.keys()):
        if name.endswith(".num_batches_tracked"):
            continue  # counts training steps; some formats leave it out
        if name not in state:
            raise WeightsError(f"The weights are not of {architecture}: {name} is missing.")
        if name not in expected:
            raise WeightsError(f"The weights are not of {architecture}: it has no {name}.")
        if state[name].shape != expected[name].shape:
            found, wanted = (tuple(tensors[name].shape) for tensors in (state, expected))
            raise WeightsError(f"The weights are not of {architecture}: {name} is {found}, not {wanted}.")


class DetectionNetwork(PixelNetwork):
    """Such a network as it is served: the best class of every anchor, boxes still relative to their anchors."""

    core: YOLOv8

    def __init__(self, core: YOLOv8, input_shape: tuple[int, int, int] = INPUT_SHAPE) -> None:
        super().__init__(core, input_shape, *_AS_IT_IS)

    def compute(self, normalised: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """-> distances, scores, classes.

        distances: float32 [n, anchors, 4], left, top, right, bottom in strides; scores: float32 [n, anchors] in 0..1;
        classes: int32 [n, anchors].
        """
        distances, logits = self.core.distances_and_logits(normalised)
        best, classes = logits.max(dim=2)
        return distances, best.sigmoid(), classes.to(torch.int32)


@dataclass(frozen=True)
class Detector(PixelModel):
    """A YOLOv8 or YOLO11 detector. `input_shape` must be a multiple of 32 in height and width."""

    input_shape: tuple[int, int, int] = INPUT_SHAPE

    @property
    def task(self) -> Task:
        """`detect`."""
        return "detect"

    @property
    def finds(self) -> Finds:
        """`objects`."""
        return "objects"

    @property
    def outputs(self) -> tuple[str, ...]:
        """What `DetectionNetwork.forward` returns."""
        return ("distances", "scores", "classes")

    def network(self) -> DetectionNetwork:
        """The network on the CPU: float32, BatchNorm fused, eval mode.

        Raises UnknownModelError, WeightsNotFoundError, WeightsError.
        """
        family, size, _ = parts_of(self.architecture)

        def made() -> YOLOv8:
            return family.detector(size, len(self.labels))

        core = enlivened(made) if self.weights == "random" else read_core(self, class_count, made)
        network = DetectionNetwork(core.fuse(), self.input_shape)
        return network.eval().requires_grad_(False)

    def decode_size(self, width: int, height: int) -> tuple[int, int]:
        """Six times what the network sees, for images of twice that or more; others are decoded in full.

        The reference samples the full image sparsely; a scaled decode averages, so the network sees other pixels.
        Measured with a trained YOLOv8s on photographs enlarged to 9-48 megapixels, half-size decoding: at six times
        and above boxes moved no more (IoU 0.977-0.998) than under a new JPEG quality or new noise (0.913-0.998);
        between two and five times some changed beyond that (0.705).
        """
        scale = _DECODE_OVERSAMPLING * min(self.input_shape[0] / height, self.input_shape[1] / width)
        if scale > 0.5:
            return width, height
        return max(1, round(width * scale)), max(1, round(height * scale))

    def preprocess(self, image: Tensor, out: Tensor, width: int, height: int) -> Placement:
        """Letterbox: the whole image, as large as fits, centred on grey.

        Rounding follows the reference implementation for a square input (`rect=False`). So does the resize, OpenCV's:
        another kernel, though within one grey level of it, was seen to move scores of trained weights by up to 0.003.
        """
        (new_width, new_height), (left, top), scale = self._letterbox(width, height)
        if image.shape[:2] != (new_height, new_width):
            pixels = np.ascontiguousarray(image.numpy())
            image = torch.from_numpy(cv2.resize(pixels, (new_width, new_height), interpolation=cv2.INTER_LINEAR))
        bottom, right = top + new_height, left + new_width
        out[:top] = _PAD_GREY
        out[bottom:] = _PAD_GREY
        out[top:bottom, :left] = _PAD_GREY
        out[top:bottom, right:] = _PAD_GREY
        out[top:bottom, left:right] = image
        return Placement(width, height, scale, left, top)

    def placement(self, width: int, height: int) -> Placement:
        """The placement that `preprocess` returns."""
        _, (left, top), scale = self._letterbox(width, height)
        return Placement(width, height, scale, left, top)

    def geometry(self, width: int, height: int) -> Geometry | None:
        """The geometry of `preprocess`."""
        (new_width, new_height), (left, top), _ = self._letterbox(width, height)
        return Geometry(new_width, new_height, left, top, grey=_PAD_GREY)

    def _letterbox(self, width: int, height: int) -> tuple[tuple[int, int], tuple[int, int], float]:
        """Width and height of the image within the input, its left upper corner there, and the scale."""
        input_height, input_width = self.input_shape[:2]
        scale = min(input_height / height, input_width / width)
        new_width, new_height = max(1, round(width * scale)), max(1, round(height * scale))
        # The reference breaks ties towards the upper left.
        left = round((input_width - new_width) / 2 - 0.1)
        return (new_width, new_height), (left, round((input_height - new_height) / 2 - 0.1)), scale

    def reduce(self, outputs: Sequence[Array], index: int, options: Options) -> tuple[Array, ...]:
        """Candidates by descending score: distances float32 [k, 4], scores [k], classes [k], anchors int32 [k]."""
        distances, scores, classes = (output[index] for output in outputs)
        chosen = np.flatnonzero(scores > options.score_threshold)
        chosen = chosen[np.argsort(-scores[chosen], kind="stable")[:MAX_CANDIDATES]]
        return distances[chosen], scores[chosen], classes[chosen], chosen.astype(np.int32)

    def postprocess(self, outputs: Sequence[Array], placement: Placement, options: Options) -> dict[str, Any]:
        """Detections by descending score, boxes in pixels of the image as displayed."""
        boxes, scores, classes = self._detections(outputs, placement, options)
        return {
            "detections": [
                {
                    "label": self.labels[class_id],
                    "class_id": class_id,
                    "score": score,
                    "box": dict(zip(("x1", "y1", "x2", "y2"), box, strict=True)),
                }
                for class_id, score, box in zip(
                    classes.tolist(), scores.astype(np.float64).round(5).tolist(), boxes.round(2).tolist(), strict=True
                )
            ],
            "width": placement.width,
            "height": placement.height,
        }

    @property
    def normalisation(self) -> tuple[Sequence[float], Sequence[float]]:
        """None: the network takes pixels in 0..1."""
        return _AS_IT_IS

    @property
    def answers(self) -> tuple[OutputSpec, ...]:
        """Detections by descending score; of a batch, images with fewer are filled up with zeros."""
        return (
            OutputSpec("boxes", "FP32", (-1, -1, 4)),
            OutputSpec("scores", "FP32", (-1, -1)),
            OutputSpec("classes", "INT32", (-1, -1)),
            OutputSpec("num_detections", "INT32", (-1,)),
        )

    def tensors(self, outputs: Sequence[Array], placement: Placement, options: Options) -> dict[str, Array]:
        """Boxes float32 [k, 4] as x1, y1, x2, y2 in pixels of the image, scores [k], classes [k], their number []."""
        boxes, scores, classes = self._detections(outputs, placement, options)
        return {
            "boxes": boxes.astype(np.float32),
            "scores": scores.astype(np.float32, copy=False),
            "classes": classes.astype(np.int32, copy=False),
            "num_detections": np.array(len(boxes), np.int32),
        }

    def _detections(
        self, outputs: Sequence[Array], placement: Placement, options: Options
    ) -> tuple[Array, Array, Array]:
        """Boxes float64 [k, 4] in pixels of the image as displayed, scores [k] and classes [k] of what remains."""
        distances, scores, classes, indices = outputs
        centres, strides = _anchors(self.input_shape[0], self.input_shape[1])
        corners = np.concatenate(
            (centres[indices] - distances[:, :2], centres[indices] + distances[:, 2:]), axis=1, dtype=np.float32
        )
        boxes = corners * strides[indices, None]
        kept = suppress(boxes, scores, classes, options.iou_threshold, options.max_detections)
        pad = np.array([placement.pad_x, placement.pad_y] * 2)
        size = np.array([placement.width, placement.height] * 2)
        return np.clip((boxes[kept].astype(np.float64) - pad) / placement.scale, 0, size), scores[kept], classes[kept]


@lru_cache(maxsize=8)
def _anchors(height: int, width: int) -> tuple[Array, Array]:
    centres, strides = anchors(height, width)
    return centres.numpy(), strides.numpy()


def read_core(
    model: PixelModel, class_count: Callable[[str, Mapping[str, Tensor]], int], made: Callable[[], Core]
) -> Core:
    """What `made` makes, with the weights of the model's file in float32 on the CPU.

    `class_count`: of an architecture's state dict. Raises WeightsError.
    """
    from models.weights.checkpoint import read

    if model.weights_file is None:
        raise WeightsError(f"{model.name} names no weights file.")
    state = read(Path(model.weights_file)).state
    count = class_count(model.architecture, state)
    if count != len(model.labels):
        raise WeightsError(f"{model.weights_file} has {count} classes, but there are {len(model.labels)} labels.")
    with torch.device("meta"):
        core = made()
    core.to_empty(device="cpu")
    core.load_state_dict({name: tensor.float() for name, tensor in state.items()}, strict=False)
    return core


def enlivened(made: Callable[[], Network]) -> Network:
    """An untrained network that is alive: layers of unit variance, and candidates on most images.

    Default weights alone fade out layer by layer, so BatchNorm is measured on coloured blocks under noise, and the
    class branches are scaled so that about one anchor in 200 of those passes a score of 0.25.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        core = made()
        blocks, noise = (functional.interpolate(torch.rand(8, 3, side, side), size=128) for side in (4, 32))
        images = 0.9 * (blocks > 0.5) + 0.1 * noise
        for module in core.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 1.0
        core.train()
        if type(core).forward is not YOLOv8.forward:
            core(images)  # Branches that `raw` does not run.
        for branch, level in zip(core.head.cv3, core.raw(images), strict=True):
            weight, bias = branch.get_parameter("2.weight"), branch.get_parameter("2.bias")
            logits = level[:, BOX_CHANNELS:] - bias.view(-1, 1, 1)
            gain = 1 / logits.std()
            weight.mul_(gain)
            bias.copy_(log(0.25 / 0.75) - (logits.amax(dim=1) * gain).quantile(0.995))
    return core
