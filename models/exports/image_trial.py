"""Trial of a file as a network of images: its task, its size, its layout and whether it takes batches.

    metadata + sidecar ─► Description ─► runs of one and of two images ─► what ExportedImages holds

Owns: these runs. In a process of its own (models.exports.child): must not be imported by the server.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from models.contract.errors import WeightsError, reason_of
from models.contract.task_adapter import Takes, task_class
from models.exports import layouts, library_files, witness
from models.exports.answers import USUAL, Entry, Export, TriedImages, entered, entry_of
from models.exports.images import load_parts
from models.exports.layouts import DETR_OUTPUTS, QUERIES, SIZES, Interpretation, Size, interpret, resize_of, scored
from models.exports.metadata import TASKS, Description, description, script_metadata, sidecar_of, yaml_metadata
from models.exports.networks import Graph, OpenVinoGraph
from models.exports.objects import NOTHING, check_axes, has_two_orders, located
from models.exports.scale import OperatorMode, Scale, at_first_layer, may_take_blue_first, scale_of
from models.onnx.file import DamagedError, OnnxFile, Value, read_onnx
from models.onnx.forms import as_detector
from models.onnx.graph import OnnxPart
from models.onnx.operators import as_tensor
from models.sample import IMAGES
from models.tasks.coco import COCO_CLASSES
from models.vision import torchvision

_IMAGES = 2  # The fewest that show whether images in a batch affect each other.
_AGREEMENT = 1e-3  # As a share of an output's largest number.
_GREATEST_BATCH = 2**31 - 1
_MOST_SIDE = 8_192
_LEAST_SIDE, _LEAST_SIDE_OF_CELLS = 8, 32
_PICTURES = 4
_DARK = 1 / 16
_FAR = 40.0  # Factor of a normalised picture: logits grow with it, probabilities stay within 0 to 1.
_OF_LEVELS = 0.05  # Greatest deviation, of pixels in 0 to 1, by which an owner states levels of 0 to 255.
_CELLS = 21  # Divides the candidates of three strides: each 32 x 32 pixels have 16, 4 and 1 cells.
_COCO_NUMBERS = 91  # With gaps, as torchvision and RF-DETR number COCO's 80 classes.

_WANTED = (
    "a network of images takes one input [n, 3, height, width] or [n, height, width, 3], of three channels or one; "
    "this one takes {}"
)

_PADDED = "images are padded to its input, as in the library's batches; one that comes alone it does not pad"
_IMAGENET = 'nothing states its normalisation, so pixels get ImageNet\'s: else state "mean" and "std", or "input"'
_UNSTATED = (
    "nothing says which pixels it takes, whose channels come last or which has no axis of a batch: state "
    '"channels", and "input": "levels" or "mean" and "std" of pixels in 0 to 1, of which 0.5 and 0.5 make -1 to 1'
)
_BLUE_FIRST = (
    "it exchanges red and blue before its first layer, or subtracts ImageNet's means in the order blue, green, red: "
    'state "channels": "bgr" where its input has blue first, as OpenCV reads images, else "rgb"'
)
_OF_INT8 = "its input is of int8, whose zero it does not say: export it with an input of uint8 or floats"
_NOT_READ = '"mean" and "std" are not read, as its input is of levels, which it normalises itself'
_IN_0_TO_1 = (
    "nothing states its normalisation, so pixels are 0 to 1, as for YOLO, RT-DETR and D-FINE: for others, such as "
    'DEIMv2 of DINOv3 and most of mmdeploy, state "mean" and "std"'
)
_DESCRIBED = {
    ("mean", "std", "input"): ("image.", "model_info mean_", "model_info scale_"),
    ("channels",): ("image.bitmappixelformat", "model_info reverse_"),
    ("resize",): ("model_info resize_type",),
    ("pad",): ("model_info resize_type fit_to_window",),
    ("scores",): ("model_info multilabel true",),
}
"""Keys of a sidecar, of which one has to be stated, and beginnings of what ONNX and Model API say of it in a file."""
_LAST_IS_BACKGROUND = (
    "its last class is taken for the background, as rfdetr writes since 1.4: trained by an earlier one it has an "
    "unused class first, so put a name for that before the labels"
)
_IN_FLOAT32 = "it divides by products of matrices, which may be near 0, and so it is served in float32"
_PRODUCTS = {"matmul", "mm", "bmm", "baddbmm"}
_LINEAR = {
    *("_to_copy", "_unsafe_view", "add", "alias", "chunk", "clamp", "clamp_min", "clone", "contiguous", "expand"),
    *("gather", "index", "index_select", "narrow", "permute", "reshape", "select", "slice", "split"),
    *("split_with_sizes", "squeeze", "to", "transpose", "unbind", "unsqueeze", "view"),
}
"""Operators whose result is near 0 where that of a product is."""
_LAYERS = {"addmm", "linear", "convolution", "_convolution", "conv2d"}  # Not those that may have no weights.
_UNBOUNDED = _LINEAR - {"clamp", "clamp_min"} | {"cat", "div", "flatten", "mean", "mul", "sub", "sum"}

Run = Callable[[Tensor], list[Tensor]]


def tried(  # noqa: PLR0917
    file: Path,
    form: str,
    sidecar: Mapping[str, Any] | None,
    labels: Sequence[str] | None,
    takes: Takes | None,
    open_size: tuple[int, int] | None = None,
    finished: Mapping[str, Any] | None = None,
) -> TriedImages | None:
    """Find the facts for ExportedImages; None for a file that is no network of images. `open_size`: the input's size
    for a file that takes any.

    `finished`: a runtime's facts on a finished file, which does not run here. Raises WeightsError.
    """
    onnx, implied = None, {}
    if form == "onnx":
        try:
            onnx = read_onnx(file)
        except DamagedError:
            raise
        except WeightsError:
            if sidecar is None:  # It may still be a network of tensors, which other readers read.
                return None
            raise
    metadata: Mapping[str, Any] = {} if finished else script_metadata(file) if onnx is None else onnx.metadata
    if finished or form == "openvino":
        metadata = yaml_metadata(file)
    architecture = file.suffix[1:]
    if library_files.library_of(form):
        metadata, architecture = {}, form
        if sidecar is None:
            implied = library_files.builder().implied_by(form, file)
            sidecar, takes = implied, task_class(implied["task"]).takes
    named = [] if onnx is None else [value.name for value in onnx.outputs]
    taken = set() if onnx is None else {value.name for value in onnx.inputs}
    is_detr = len(taken) == 2 and taken > SIZES.keys() and named == [*DETR_OUTPUTS]
    detector = None if onnx is None else as_detector(onnx)
    of_rfdetr = "" if onnx is None else _task_of_rfdetr(onnx)
    if of_rfdetr:
        metadata = {"task": of_rfdetr, **metadata}
    if onnx is not None and is_detr:
        onnx, metadata = onnx.with_constants(SIZES), {"task": "detect", **metadata}
    elif detector is not None:
        onnx, metadata = detector, {"task": "detect", **metadata}
    try:
        about = description(
            metadata, None if sidecar is None else sidecar_of(sidecar, "what its library says"), labels, takes
        )
        if about is None and form in ("openvino", "finished"):
            raise ValueError(f"what it is for, no metadata.yaml beside it says: state its task in {file.stem}.json")
        if about is None:
            return None
        if architecture.startswith("timm/") and about.takes == "classes" and not about.labels:
            about = about.model_copy(update={"labels": library_files.builder().names_of(architecture, file)})
        if (is_detr or of_rfdetr) and about.layout is None:
            about = about.model_copy(update={"layout": "detr" if is_detr else "rfdetr"})
        if of_rfdetr and onnx is not None and (onnx.outputs[1].shape or ())[-1:] == (_COCO_NUMBERS,):
            about = about.model_copy(update={"labels": _labels_of_torchvision(about.labels)})
        if detector is not None and about.takes != "outputs":
            about = about.model_copy(update={"layout": "torchvision", "labels": _labels_of_torchvision(about.labels)})
        if named[:2] == ["logits", "pred_boxes"]:
            about = about.model_copy(update={"boxes_second": True})
        texts = {name: text for name, text in metadata.items() if about.takes == "outputs" and isinstance(text, str)}
        if finished is not None:
            sides, sizes = (finished["size"][0], finished["size"][1]), finished["batch_sizes"]
            how = interpret(about, [list(shape) for shape in finished["shapes"]], sides)
            export = Export(how, (min(sizes), max(sizes)))
            return replace(_as_tried(about, export, sides, finished["shapes"]), metadata=texts)
        stated = {key for key, value in (sidecar or {}).items() if value is not None}
        return replace(_tried(file, about, onnx, architecture, open_size, stated), metadata=texts, implied=implied)
    except (ValueError, WeightsError) as error:
        if detector is not None and sidecar is None:  # It is served as tensors, as before.
            return None
        if isinstance(error, WeightsError):
            raise
        hint = ""
        if sidecar is None and form == "onnx":
            of_file = f" If its metadata is wrong, state the right value in {file.stem}.json beside it"
            hint = f"{of_file if metadata.get('task') else ' ' + example(file)}."
        raise WeightsError(f"{file.name}: {error}.{hint}") from error


def _tried(  # noqa: PLR0917
    file: Path, about: Description, onnx: OnnxFile | None, architecture: str, open_size: Size | None, own: set[str]
) -> TriedImages:
    size, stated_batch, is_open, entry = about.size, 1, False, USUAL
    core, tail = load_parts(str(file), architecture, False)
    described = core.described if isinstance(core, OpenVinoGraph) else onnx.metadata if onnx else {}
    if not about.exporter:
        _check_described(described, own)
    if not about.labels and (names := described.get("model_info labels", "").split()):
        about = about.model_copy(update={"labels": tuple(names)})
    if onnx is not None:
        size, stated_batch, is_open, entry = _input(onnx, size)
    elif isinstance(core, Graph):
        size, stated_batch, entry = _entry_of(core, size)
    size = tuple(open_size) if size is None and open_size else size  # type: ignore[assignment]
    if size is None:
        raise ValueError('for which size of image it is, it does not say: state "size": [height, width] beside it')
    is_single = about.layout == "torchvision"  # One image, without the axis of a batch.
    has_grid = about.takes not in ("classes", "outputs") and about.layout not in ("torchvision", *QUERIES)
    whole = not has_grid or all(side % 32 == 0 for side in size)
    least = _LEAST_SIDE_OF_CELLS if has_grid else _LEAST_SIDE
    if not whole or not all(least <= side <= _MOST_SIDE for side in size):
        raise ValueError(f"images of {size[0]} x {size[1]} are none that a network of this kind can take")
    integers: list[bool] = []  # For each output, whether its numbers are whole.

    def run(pixels: Tensor) -> list[Tensor]:
        try:
            with torch.inference_mode():
                values = core(pixels[0] if is_single else entered(entry, pixels))
                found = [as_tensor(each) for each in (values if tail is None else tail(*values))]
                integers[:] = [not each.is_floating_point() for each in found]
                return [each.float() for each in found]
        except WeightsError:
            raise
        except Exception as error:  # A graph that does not fit its input may raise anything.
            raise ValueError(f"it does not run on {list(pixels.shape)}: {reason_of(error)}") from error

    if about.layout == "yolox":  # Its own programs give it levels of 0 to 255, blue first.
        stated = about.input if about.input or about.mean or about.std else "levels"
        about = about.model_copy(update={"channels": about.channels or "bgr", "input": stated})
    entry = replace(entry, bgr=about.channels == "bgr" and entry.channels == 3)
    if entry.levels and about.input == "floats":
        raise ValueError('its input is of uint8, and "input": "floats" is stated for it')
    entry = replace(entry, levels=entry.levels or about.input == "levels")
    unread = _NOT_READ if entry.levels and (about.mean or about.std) else ""
    takes_bytes = isinstance(core, Graph) and list(core.signature.datatypes) == [None] and _takes_bytes(core, size)
    if takes_bytes:
        is_stated = about.input is not None or about.mean is not None or about.exporter
        if not is_stated and not scale_of(partial(at_first_layer, core), torch.zeros(1, 3, *size)):
            raise ValueError('it takes uint8 and floats alike: state "input": "levels" (it divides by 255) or "floats"')
        entry = replace(entry, of_bytes=entry.levels)
    is_known = onnx is not None or entry.channels == 1 or entry.last or entry.levels
    generator = torch.Generator().manual_seed(0)
    pixels = torch.rand((max(_IMAGES, stated_batch), 3, *size), generator=generator) * (255 if entry.levels else 1)
    try:
        outputs = run(pixels[:stated_batch])
    except ValueError:
        if is_known:
            raise
        # Libraries' networks and scripts state nothing of their input.
        for form in (Entry(channels=1), replace(entry, last=True), Entry(channels=1, last=True)):
            entry = form
            with contextlib.suppress(ValueError):
                outputs = run(pixels[:stated_batch])
                break
        else:
            raise
    by_itself, of_openvino = "", core if isinstance(core, OpenVinoGraph) else None
    at_layer = of_openvino.at_first_layer if of_openvino else partial(at_first_layer, core)
    if not about.exporter and not library_files.library_of(architecture):
        example = pixels[0] if is_single else entered(entry, pixels[:stated_batch])
        if not about.channels and entry.channels == 3:
            is_exchanged, axis = bool(of_openvino and of_openvino.is_exchanged), -1 if entry.last else -3
            if may_take_blue_first(at_layer, example, axis, is_exchanged=is_exchanged):
                raise ValueError(_BLUE_FIRST)
        if not entry.levels:
            levels, about, by_itself = _with_scale(about, scale_of(at_layer, example), is_openvino=bool(of_openvino))
            if levels:
                entry = replace(entry, levels=True, of_bytes=takes_bytes)
                pixels = pixels * 255
                outputs = run(pixels[:stated_batch])
    is_silent = about.mean is None and about.std is None and about.input is None and not entry.levels
    is_torchvision = by_itself and not entry.levels  # All its detectors normalise pixels of 0 to 1.
    if (entry.last and is_silent and not about.exporter) or (
        is_single and not is_torchvision and "channels" not in own
    ):
        raise ValueError(_UNSTATED)
    about = _normalised(about, entry)
    if about.takes == "classes" and integers[0] and outputs[0][0].numel() == 1:
        raise ValueError("its output is the number of a class (ArgMax): export the network with its scores")
    how = interpret(about, [[1, *output.shape[1:]] for output in outputs], size)
    if about.task in ("embed", "segment_semantic", "depth") and _has_channels_last(outputs[0].shape, size, entry.last):
        how, outputs = replace(how, last=True), [each.movedim(3, 1) if each.ndim == 4 else each for each in outputs]
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in _normalisation(about))
    pictures = (_pictures(size) - mean) / std
    if onnx is not None and onnx.inputs[0].dtype == np.float16:  # The witness can be given no others.
        pictures = pictures.half().float()
    batch, freed = (stated_batch, stated_batch), False
    if stated_batch == 1 and not is_single:
        freed = onnx is not None and not is_open
        _free(freed, core, tail)
        shades = torch.linspace(_DARK, 1, len(pixels)).view(-1, 1, 1, 1)  # A scale of the whole batch shows.
        batched = not about.is_unrolled and _takes_batches(run, (pixels * shades, pictures[:_IMAGES]), how)
        batch, freed = (1, _GREATEST_BATCH if batched else 1), freed and batched
        _free(freed, core, tail)  # In its served form.
    given = [_batch(pictures, number, stated_batch) for number in range(witness.PICTURES)]
    found = [run(each) for each in given]
    if stated_batch > 1:
        others = run(torch.cat((pictures[:1], pixels[1:stated_batch])))
        if not all(_agree(*pair) for pair in zip(found[0], others, strict=True) if len(pair[0]) == stated_batch):
            raise ValueError(
                f"its answer to an image depends on the others of its batch of {stated_batch}: export it anew"
            )
    if any(bool(output.isnan().any()) for each in (outputs, *found) for output in each):
        raise ValueError(
            'its outputs for pictures or noise are not numbers (NaN): state what its input is, "input": "levels", or '
            '"mean" and "std" of pixels in 0 to 1'
        )
    in_float32, is_layer = watched(core, partial(run, given[0]))
    note = ""
    far = (0.0, 255.0) if entry.levels else (-math.inf, math.inf)

    def clamped(given: Tensor) -> list[Tensor]:
        return run(given.clamp(*far))

    if how.takes == "classes":
        how, note = scored(how, about.scores, _seen(clamped, pictures, found), is_layer=is_layer)
        if integers[0] and not how.probabilities:
            raise ValueError("its scores are whole numbers without one sum: let the network give them as floats")
    elif how.takes == "outputs":
        if about.task == "segment_semantic" and (outputs[0].ndim == 3 or outputs[0].shape[1:2] == (1,)):
            numbers = torch.cat((outputs[0].flatten(1), _seen(clamped, pictures, found)))
            how, note = layouts.mapped(how, about, numbers, outputs[0].ndim, integers=integers[0], is_layer=is_layer)
        elif about.task == "segment_semantic" and not (about.scores or is_layer):
            are_shares = layouts.is_inside(_seen(clamped, pictures, found))
            how, note = replace(how, probabilities=are_shares), layouts.PROBABILITIES if are_shares else ""
    else:
        how, note = located(about, how, found, size)
        if note == NOTHING:  # Its own suppression may leave something of the others, or of noise.
            more = torch.cat((pictures[witness.PICTURES :], pixels))
            how, note = located(about, how, [run(_batch(more, n, stated_batch)) for n in range(len(more))], size)
        if has_two_orders(about, how):
            shown = range(witness.PICTURES)
            halves = [[run(_batch(each, number, stated_batch)) for number in shown] for each in _halves(pictures)]
            check_axes(how, halves[:2], halves[2:], size)
    shapes = [(1, *output.shape[2 if how.class_map and not place else 1 :]) for place, output in enumerate(outputs)]
    padded = library_files.library_of(architecture) == "transformers" and about.resize == "top-left"
    is_plain = entry.levels or about.exporter or by_itself or how.layout == "torchvision"
    assumed = _IMAGENET if mean.any() else "" if is_plain else _IN_0_TO_1
    of_rfdetr = how.layout == "rfdetr" and not library_files.library_of(architecture)
    shifted = _LAST_IS_BACKGROUND if of_rfdetr and outputs[how.logits].shape[2] > how.classes else ""
    facts = by_itself, assumed if is_silent else "", shifted, _PADDED if padded and about.multiple_of is None else ""
    notes = tuple(filter(None, (unread, *facts, note, _IN_FLOAT32 if in_float32 else "")))
    seen = [each[0] if is_single else entered(entry, each) for each in given]
    sentence = witness.compared(file, architecture, onnx, seen, found)
    export = Export(how, batch, freed, entry, in_float32)
    return replace(_as_tried(about, export, size, shapes), notes=notes, witness=sentence)


def _check_described(facts: Mapping[str, str], stated: set[str]) -> None:
    """Raise ValueError for facts on pixels and scores that the file has, and its owner does not state."""
    texts = [f"{key} {text}" for key, text in facts.items()]
    found = {keys: [text for text in texts if text.lower().startswith(of)] for keys, of in _DESCRIBED.items()}
    if unread := {keys: found[keys] for keys in found if found[keys] and not stated.intersection(keys)}:
        wanted = ", ".join(" or ".join(f'"{key}"' for key in keys) for keys in unread)
        quoted = ", ".join(dict.fromkeys(chain(*unread.values())))[:300]
        raise ValueError(f"its metadata says {quoted}, which is not read: state {wanted}")


class _Watched(OperatorMode):
    divides = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._products: Any = WeakTensorKeyDictionary()
        self.layers: Any = WeakTensorKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        name, found = func.overloadpacket.__name__, func(*args, **(kwargs or {}))
        given = [one for each in args for one in (each if isinstance(each, list | tuple) else [each])]
        for kept, begin, through in (self._products, _PRODUCTS, _LINEAR), (self.layers, _LAYERS, _UNBOUNDED):
            has = [isinstance(each, Tensor) and each in kept for each in given]
            self.divides |= kept is self._products and name == "div" and has[1:2] == [True]
            if name in begin or (name in through and any(has)):
                kept.update((each, True) for each in (found if isinstance(found, list | tuple) else [found]))
        return found


def watched(network: nn.Module, run: Callable[[], Sequence[Tensor]]) -> tuple[bool, bool]:
    """Return two facts. It divides by products of matrices, as linear attention does: where these are near 0, shorter
    types than float32 answer wrongly, though for few images. Its first output is a layer's, which nothing bounds.
    """
    if isinstance(network, OpenVinoGraph):
        return network.divides_by_products(), False  # Its numbers for images far from pictures have to tell.
    mode, found = _Watched(), list[Tensor]()
    with contextlib.suppress(Exception), torch.inference_mode(), mode:  # A library's code may refuse to be watched.
        found += run()
    return mode.divides, bool(found) and found[0] in mode.layers


def _free(free: bool, *parts: object) -> None:
    for part in parts:
        if isinstance(part, OnnxPart):
            part.free_batch = free


def _halves(pictures: Tensor) -> list[Tensor]:
    """Return pictures of which the left, the right, the upper and the lower half is visible; the rest is their mean."""
    found = []
    for axis in (3, 2):
        middle = pictures.shape[axis] // 2
        for first in (0, middle):
            half = pictures.mean((2, 3), keepdim=True).expand_as(pictures).clone()
            half.narrow(axis, first, middle).copy_(pictures.narrow(axis, first, middle))
            found.append(half)
    return found


def _batch(pictures: Tensor, first: int, size: int) -> Tensor:
    return pictures[(first + torch.arange(size)) % len(pictures)]


def _as_tried(
    about: Description, export: Export, size: tuple[int, int], shapes: Sequence[Sequence[int]]
) -> TriedImages:
    mean, std = _normalisation(about)
    return TriedImages(
        about.task,
        export,
        size,
        resize_of(about, export.how),
        mean,
        std,
        about.keypoints,
        about.exporter,
        about.labels or tuple(f"class {number}" for number in range(export.how.classes)),
        tuple(map(tuple, shapes)),
    )


def _seen(run: Run, pictures: Tensor, found: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return the first outputs, [n, numbers], for pictures; if none is below 0, for images far from pictures, too."""
    batch = len(found[0][0])
    seen = torch.cat([*(outputs[0].flatten(1) for outputs in found), _of_all(run, pictures[len(found) :], batch)])
    if (seen < 0).any():
        return seen
    far = _of_all(run, torch.cat((_FAR * pictures[:1], -_FAR * pictures[1:2])), batch)
    return torch.cat((seen, far[far.isfinite().all(1)]))


def _has_channels_last(shape: Sequence[int], size: tuple[int, int], is_usual: bool) -> bool:
    """Return True if the sides of a map [n, a, b, c] are a and b, by those of the input, and cannot be b and c."""

    def is_like(height: int, width: int) -> bool:
        return abs(height * size[1] - width * size[0]) <= max(size)

    return len(shape) == 4 and is_like(*shape[1:3]) and (is_usual or not is_like(*shape[2:4]))


def _of_all(run: Run, pixels: Tensor, batch: int) -> Tensor:
    count = len(pixels)
    return torch.cat([run(_batch(pixels, first, batch))[0].flatten(1) for first in range(0, count, batch)])[:count]


def _pictures(size: tuple[int, int]) -> Tensor:
    found = []
    for file in sorted(IMAGES.glob("*.jpg"))[:_PICTURES]:
        with Image.open(file) as image:
            array = np.array(image.convert("RGB").resize((size[1], size[0]), Image.Resampling.BILINEAR))
        found.append(torch.from_numpy(array).permute(2, 0, 1).float() / 255)
    return torch.stack(found)


def _with_scale(about: Description, scale: Scale, *, is_openvino: bool) -> tuple[bool, Description, str]:
    """Find whether an input of floats is of levels, by what the network does to it; the facts with it, and a note."""
    is_stated = about.mean is not None or about.std is not None
    if not scale and is_openvino and not is_stated and not about.input:
        raise ValueError(
            "OpenVINO may have put a division by 255 into its first weights, where nobody sees it, and it does not say "
            'whether it has: state "input": "levels" beside it where its input is 0 to 255, else "mean" and "std", or '
            '"input": "floats" for ImageNet\'s'
        )
    if about.input == "floats" or not scale:
        return False, about, ""
    mean, std = about.mean or (0.0,) * 3, about.std or (1.0,) * 3
    if scale == "levels" and is_stated and max(std) <= _OF_LEVELS:
        return False, about, ""
    span = "0 to 255" if scale == "levels" else "0 to 1"
    if is_stated and (scale == "levels" or mean != (0.0,) * 3 or std != (1.0,) * 3):
        raise ValueError(f'it normalises pixels of {span} itself: state no "mean" and "std", or "input": "floats"')
    usual = about.model_copy(update={"mean": (0.0,) * 3, "std": (1.0,) * 3})
    return scale == "levels", usual, f"it normalises its input itself, and gets pixels of {span}"


def _normalised(about: Description, entry: Entry) -> Description:
    if entry.levels:
        return about.model_copy(update={"mean": (0.0,) * 3, "std": (1 / 255,) * 3})
    if entry.channels == 1:  # The mean of three means, as in timm.
        mean, std = about.mean or (0.0,) * 3, about.std or (1.0,) * 3
        return about.model_copy(update={"mean": (sum(mean) / 3,) * 3, "std": (sum(std) / 3,) * 3})
    return about


def _entry_of(graph: Graph, size: tuple[int, int] | None) -> tuple[tuple[int, int] | None, int, Entry]:
    """Return height and width, the stated batch (1 if open), and the form that a program states. Raises ValueError."""
    datatypes, shapes = graph.signature.datatypes, graph.signature.shapes
    if len(shapes) != 1 or shapes[0] is None or len(shapes[0]) != 4:
        return size, 1, USUAL
    if datatypes[0] == "INT8":
        raise ValueError(_OF_INT8)
    seen = f"{graph.signature.names[0]} {list(shapes[0])}"
    size, batch, _, entry = _of_shape(shapes[0], "INT" in str(datatypes[0]), size, seen)
    return size, batch, replace(entry, of_bytes=entry.levels)


def _of_shape(
    shape: Sequence[int | str | None] | None, is_levels: bool, size: tuple[int, int] | None, seen: str
) -> tuple[tuple[int, int] | None, int, bool, Entry]:
    """Return height and width, the stated batch (1 if open), whether it is open, and the form. Raises ValueError."""
    found = None if shape is None or len(shape) != 4 else entry_of(shape, is_levels)
    if shape is None or found is None:
        raise ValueError(_WANTED.format(seen))
    entry, height, width = found
    if size is None:
        size = (height, width) if height and width else None
    elif (height or size[0], width or size[1]) != size:
        raise ValueError(f"its input is {height} x {width}, and {size[0]} x {size[1]} is stated for it")
    batch = shape[0]
    return size, batch if isinstance(batch, int) else 1, not isinstance(batch, int), entry


def _takes_bytes(script: Graph, size: tuple[int, int]) -> bool:
    for channels in (3, 1):
        try:
            with torch.inference_mode():
                script(torch.full((1, channels, *size), 128, dtype=torch.uint8))
        except Exception:  # A graph that takes no bytes may raise anything.
            continue
        return True
    return False


def _normalisation(about: Description) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return what is stated, else ImageNet's for RF-DETR, and for our tasks without boxes but of Ultralytics."""
    of_image = about.task in TASKS and about.takes in ("classes", "outputs")
    imagenet = (of_image and not about.exporter.startswith("ultralytics")) or about.layout == "rfdetr"
    mean = about.mean or ((0.485, 0.456, 0.406) if imagenet else (0.0, 0.0, 0.0))
    return mean, about.std or ((0.229, 0.224, 0.225) if imagenet else (1.0, 1.0, 1.0))


def example(file: Path) -> str:
    """Suggest a sidecar for an .onnx of images that does not state its task; "" for one that takes no images."""
    try:
        onnx = read_onnx(file)
        size, *_ = _input(onnx, None)
    except (WeightsError, ValueError):
        return ""
    task, classes = _likely(onnx.outputs, size or (0, 0))
    written = json.dumps({"task": task, "size": list(size or (224, 224))})
    names = f", and its {classes} labels, one a line, into {file.stem}.labels.txt" if classes else ""
    values = (*onnx.inputs, *onnx.outputs)
    lengths = [["n" if length is None else str(length) for length in value.shape or ()] for value in values]
    seen = ", ".join(f"{value.name} [{', '.join(each)}]" for value, each in zip(values, lengths, strict=True))
    return f"To serve it as images, write {written} into {file.stem}.json beside it{names} (it has {seen})"


def _likely(outputs: Sequence[Value], size: tuple[int, int]) -> tuple[str, int]:
    """Return the most frequent task of such outputs for images of a size, and the number of its classes, 0 for none."""
    shapes = [value.shape or () for value in outputs]
    ranks = sorted(len(shape) for shape in shapes)
    first = shapes[0] if shapes else ()
    last = first[1] if len(first) > 1 and isinstance(first[1], int) else 0
    if ranks in ([1], [2], [2, 2]) or first[2:] == (1, 1):
        return ("regress", 0) if ranks == [2] and last == 1 else ("classify", last)
    width = first[-1] if first and isinstance(first[-1], int) else 0
    if len(first) == 4 and first[1:3] == size:
        return "segment_semantic", width
    if first[-2:] == size and len(first) < 5:
        if len(first) == 4 and last > 1:
            return "segment_semantic", last
        is_class_map = len(ranks) > 1 or (outputs[0].dtype is not None and outputs[0].dtype.kind in "iu")
        return ("segment_semantic" if is_class_map else "depth"), 0
    if first[1:2] + first[3:] == (1, 7):  # SSD's rows.
        return "detect", 0
    if (ranks in ([4], [3]) and last in (0, 1)) or (ranks == [3] and width > 100 and width % _CELLS):
        return ("depth", 0) if ranks == [4] or last == 0 else ("embed", 0)
    if ranks == [4]:
        return "segment_semantic", last
    return ("segment", 0) if 4 in ranks else ("detect", 0)


def _task_of_rfdetr(onnx: OnnxFile) -> str:
    """Return the task of an export of RF-DETR, by its names and boxes without a score; "" for other files."""
    first = onnx.outputs[0].shape or (0,) if onnx.outputs else (0,)
    tasks = {("input", "dets", "labels"): "detect", ("input", "dets", "labels", "masks"): "segment"}
    return tasks.get(tuple(value.name for value in (*onnx.inputs, *onnx.outputs)), "") if first[-1] == 4 else ""


def _labels_of_torchvision(labels: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return names by torchvision's numbers: 0 is the background, and COCO's objects have 91 with gaps."""
    if labels is None or (labels and labels[0].strip(" _").lower() in ("background", "bg")):
        return None if labels is None else tuple(labels)
    if tuple(labels) == COCO_CLASSES:
        weights = torchvision.models.detection.FasterRCNN_MobileNet_V3_Large_320_FPN_Weights.DEFAULT
        return tuple(weights.meta["categories"])
    return ("__background__", *labels)


def _input(onnx: OnnxFile, size: tuple[int, int] | None) -> tuple[tuple[int, int] | None, int, bool, Entry]:
    seen = ", ".join(f"{value.name} {list(value.shape or ())}" for value in onnx.inputs)
    if len(onnx.inputs) > 1:
        seen += ": constants have to be in it (Keras: export with KERAS_BACKEND=torch)"
    shapes = [value.shape for value in onnx.inputs]
    if len(shapes) == 1 and shapes[0] is not None and len(shapes[0]) == 3 and as_detector(onnx) is not None:
        shapes = [(1, *shapes[0])]
    kind = onnx.inputs[0].dtype
    if kind == np.int8:
        raise ValueError(_OF_INT8)
    return _of_shape(shapes[0] if len(shapes) == 1 else None, kind is not None and kind.kind in "ui", size, seen)


def _agree(one: Tensor, other: Tensor) -> bool:
    """Return True if the first images of two batches have the same numbers, but for their last digits."""
    one, other = one[:1], other[:1]
    if one.shape != other.shape or not other.numel():
        return False
    return torch.allclose(one, other, rtol=0, atol=_AGREEMENT * float(other.abs().nan_to_num(posinf=0).max()) + 1e-6)


def _takes_batches(run: Run, tries: Sequence[Tensor], how: Interpretation) -> bool:
    """Return True if images in a batch are answered as each is alone.

    False if no image has a box: a loop over images that is written out for one leaves the others empty.
    """
    for pixels in tries:
        try:
            together = run(pixels)
            alone = [run(pixels[row : row + 1]) for row in range(len(pixels))]
        except (ValueError, WeightsError):
            return False
        if any(each.ndim == 0 or len(each) != len(pixels) for each in together):
            return False
        pairs = [(each[row : row + 1], one[n]) for n, each in enumerate(together) for row, one in enumerate(alone)]
        if not all(_agree(*pair) for pair in pairs):
            return False
        if not how.suppressed or alone[-1][how.boxes].any():
            return True
    return False
