"""A network from a file that carries its own graph: `name=file.onnx`, `.xml`, `.pt2`, `.ts`, `.torchscript`.

Owns: telling networks of images and of tensors apart, the owner's declarations beside the file (`file.json` of images,
`file.tensors.json` of tensors, labels of both), and the child process that reads it first, so that a strange file harms
that process and not the server. What it finds is kept beside the copy of the file:

    digests of all files + what is stated beside them + versions ─► CACHE/opened/DIGEST/.tried-KEY.json
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from anychip_base.extras import entry_points
from anychip_base.interpreter import bare_environment, python_command
from models.contract.errors import WeightsError
from models.contract.files import OpenedFiles, digest_of_sources, read_regular
from models.contract.model import Array, Model
from models.contract.resize import Centre, Square
from models.contract.task_adapter import AdaptedFile, made, task_class
from models.contract.tensors import Form, TensorModel, item_bytes, random_arrays
from models.exports import library_files
from models.exports.answers import Tried, TriedImages, decode_tried
from models.exports.files import FINISHED, read_finished
from models.exports.images import ExportedImages
from models.exports.metadata import GEOMETRY, Sidecar, read_sidecar, sidecar_of
from models.exports.networks import FORMS, GraphNetwork, load_graph
from models.weights.checkpoint import labels_beside

log = logging.getLogger(__name__)

_CUT = (
    "its answers are for the centre that is cut out, stretched over the whole image as transformers does it: to see "
    'all of an image, state "resize": "stretch"'
)
_CENTRE = (
    "nothing states its resize, so the shorter side becomes its input's and the centre is seen: where it was trained "
    'otherwise, state "resize_to" (torchvision: 256 for an input of 224) or "crop"'
)

SUFFIXES = (".onnx", ".pt2", ".ts", ".torchscript", ".xml", *FINISHED)
_TIME_LIMIT_S = 600.0
_CHILD = Path(__file__).with_name("child.py")
_PROBES = 8
_COUNT = ("torch", "torchvision", "numpy", "pillow", "onnxruntime", "openvino", "timm", "transformers", "safetensors")
"""Packages that read files, compute them, or are the witness."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _AtMost(_Strict):
    at_most: int = Field(ge=1)


class _Input(_Strict):
    datatype: str | None = None
    shape: list[int | str] | None = None
    range: tuple[int, int] | None = None


class _Declared(_Strict):
    """Content of `file.tensors.json`: facts that the file itself lacks. docs/which-file.md."""

    inputs: dict[str, _Input] = {}
    outputs: list[str] = []
    dimensions: dict[str, int | _AtMost] = {}
    batched: bool | None = None


@dataclass(frozen=True)
class ExportedModel(TensorModel):
    """A network of tensors from a file. `architecture` is the file's suffix without the dot."""

    @property
    def form(self) -> Form:
        assert self.weights_file is not None
        return FORMS[Path(self.weights_file).suffix]

    @property
    def platform(self) -> str:
        """The Open Inference Protocol's name; a similar one for torch.export's programs, unknown to it."""
        return {"onnx": "onnx_onnxv1", "pt2": "pytorch_export"}.get(self.architecture, "pytorch_torchscript")

    @property
    def witness(self) -> str:
        """Statement that nothing was compared, as the numbers are those of the runtime that reads the file."""
        runtime = {"onnx": "ONNX Runtime", "pt2": "torch.export"}.get(self.architecture, "TorchScript")
        return f"{runtime} itself computes it, so that nothing was compared"

    def network(self) -> GraphNetwork:
        assert self.weights_file is not None
        network = GraphNetwork(self, load_graph(self.weights_file, self.form), self.form, self.weights_file)
        return network.requires_grad_(False)

    def probes(self) -> Array:
        arrays = random_arrays(self.inputs, _PROBES)
        items = np.zeros((_PROBES, *self.input_shape), np.uint8)
        for row in range(_PROBES):
            whole = {name: array if self.batched else array[row] for name, array in arrays.items()}
            self.pack(whole, row, items[row])
        return items


def open_exported(name: str, files: OpenedFiles, stated: str = "", architecture: str = "") -> Model:
    """Read a file and try it, in a child process. Raises WeightsError.

    `stated`: replaces a sidecar, if none is to be read. `architecture`: of weights for a network that a library builds,
    `timm/resnet50`. It is a model of images if the file's metadata or `file.json` beside it says so, else of tensors.
    """
    file = files.file
    sidecar = read_sidecar(file, stated)
    declared = _declared(file)
    is_tensors = declared is not None or (sidecar is not None and sidecar.task == "tensors")
    if is_tensors and file.suffix in (".xml", *FINISHED):
        raise WeightsError(f"{file.name}: it is served for images only: export an .onnx for tensors.")
    images: dict[str, Any] | None = None
    if not is_tensors:
        if sidecar is None and not stated and file.with_suffix(".json").is_file() and labels_beside(file) is None:
            log.warning("%s.json is not read beside %s: its keys are not a sidecar's", file.stem, file.name)
        images = {
            "sidecar": None if sidecar is None else sidecar.model_dump(exclude={"options"}),
            "labels": labels_beside(file),
            "open_size": None if sidecar is not None and sidecar.size else library_files.size_in(file.parent),
            "takes": None if sidecar is None or sidecar.task is None else task_class(sidecar.task).takes,
        }
    if images is not None and file.suffix in FINISHED:
        images["finished"] = read_finished(file)
    asked = {
        **(declared or _Declared()).model_dump(),
        "images": images,
        "own": [str(path) for path in files.paths],
    }
    found = kept(files, asked, architecture, lambda: _tried(file, asked, architecture))
    if found.images is not None:
        return _image_model(name, file, found.images, sidecar, architecture)
    tensors = found.tensors
    assert tensors is not None
    if found.hint and declared is None:
        log.warning("%s: %s does not say what it is for, and is served as tensors. %s.", name, file.name, found.hint)
    return ExportedModel(
        name,
        file.suffix[1:],
        _labels(file),
        file.name,
        str(file.absolute()),
        (item_bytes(tensors.inputs),),
        tensors.inputs,
        tensors.results,
        tensors.batched,
        tensors.batch_range,
    )


def _image_model(name: str, file: Path, found: TriedImages, sidecar: Sidecar | None, architecture: str = "") -> Model:
    stated, how = sidecar or sidecar_of(found.implied, file.name), found.export.how
    if stated.resize_by is None and found.resize == "centre" and found.exporter.startswith("ultralytics"):
        stated = stated.model_copy(update={"resize_by": "pillow"})
        if found.size[0] != found.size[1] and not (stated.resize or stated.resize_to or stated.crop):
            stated = stated.model_copy(update={"resize_to": found.size})  # Ultralytics stretches to what is no square.
    try:
        resize = stated.resizing(found.size, found.resize)
        keys = {*GEOMETRY, "resize_by", "interpolation", "antialias"}
        if (found.exporter, found.task) == ("yolov5", "classify") and keys.isdisjoint(stated.model_fields_set):
            resize = Square(found.size)
    except ValueError as error:
        raise WeightsError(f"{file.name}: {error}.") from None
    options: dict[str, Any] = {} if sidecar is None else dict(sidecar.options or {})
    if found.keypoints is not None:
        options["keypoints"] = found.keypoints
    if found.task == "classify":
        options["scores"] = "sigmoid" if how.each else "softmax"
    elif sidecar is not None and sidecar.scores is not None and how.takes == "outputs":
        options["scores"] = sidecar.scores
    elif how.probabilities and found.task == "segment_semantic":
        options["scores"] = "probabilities"
    known = AdaptedFile(
        resize,
        found.labels,
        found.shapes,
        json.dumps(options),
        json.dumps(found.metadata),
        suppressed=how.suppressed,
        strides=() if how.layout == "yolov5" else how.strides,  # YOLOv5 has three anchors in a place.
        grey=found.export.entry.channels == 1,  # As in libraries: before resizing, which rounds.
    )
    is_cut = found.task in ("segment_semantic", "depth") and isinstance(resize, Centre) and not resize.keeps_all
    is_stated = found.exporter or stated.resize or stated.resize_to or stated.crop
    is_assumed = not is_cut and isinstance(resize, Centre) and not is_stated
    for note in (*found.notes, *[_CUT] * is_cut, *[_CENTRE] * is_assumed):
        log.warning("%s: %s: %s.", name, file.name, note)
    if found.witness:
        log.info("%s: %s: when it was first read: %s", name, file.name, found.witness)
    read = getattr(made(found.task, known), "number", 0)  # A file that does not fit its task stops the start.
    if len(found.shapes) > 1 and found.task in ("segment_semantic", "depth", "embed"):
        note = f"of its outputs 0 to {len(found.shapes) - 1}, {read} is read, {list(found.shapes[read][1:])}"
        log.warning("%s: %s: %s.", name, file.name, note)
    return ExportedImages(
        name,
        architecture or file.suffix[1:],
        known.labels,
        file.name,
        str(file.absolute()),
        (*found.size, 3),
        found.task,
        known,
        found.mean,
        found.std,
        export=found.export,
        witness=found.witness,
    )


def _declared(file: Path) -> _Declared | None:
    beside = file.with_name(f"{file.stem}.tensors.json")
    content = read_regular(beside)
    if content is None:
        return None
    try:
        return _Declared.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise WeightsError(f"{beside.name}: {where + ': ' if where else ''}{first['msg']}.") from error


def _labels(file: Path) -> tuple[str, ...]:
    content = read_regular(file.with_name(f"{file.stem}.labels.txt"))
    try:
        return tuple(line.strip() for line in (content or b"").decode("utf-8-sig").strip().splitlines())
    except ValueError as error:
        raise WeightsError(f"{file.stem}.labels.txt, the labels of {file.name}, cannot be read: {error}.") from error


def _tried(file: Path, declared: Mapping[str, Any], architecture: str = "") -> Tried:
    with tempfile.TemporaryDirectory(prefix="anychip-") as folder, tempfile.TemporaryFile() as output:
        environment = bare_environment(folder)
        answer = Path(folder) / "answer.json"
        kinds = {".xml": "openvino", **dict.fromkeys(FINISHED, "finished")}
        form = architecture or kinds.get(file.suffix) or FORMS[file.suffix]
        given = Path(folder) / "declared.json"
        given.write_text(json.dumps(declared))
        command = python_command(str(_CHILD), str(file.absolute()), form, str(given), str(answer))
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
        )
        try:
            code = child.wait(_TIME_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise WeightsError(f"{file.name} was not read and tried within {_TIME_LIMIT_S:g} s.") from None
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        if not answer.is_file():
            output.seek(0)
            lines = output.read().decode(errors="replace").strip().splitlines()
            last = lines[-1][:200].rstrip(".") if lines else "it said nothing"
            raise WeightsError(f"{file.name} ended the process that read it (status {code}): {last}.")
        found = decode_tried(answer.read_bytes())
    if found.error:
        raise WeightsError(found.error)
    return found


def kept(files: OpenedFiles, asked: Mapping[str, Any], architecture: str, find: Callable[[], Tried]) -> Tried:
    """Return the result of `find` for the files, or a kept one for the same files. Raises the errors of `find`."""
    if not files.is_copy:
        return find()
    stated = {name: value for name, value in asked.items() if name != "own"}  # Those are files.
    parts = json.dumps([files.digests, files.main, stated, architecture, _versions()], sort_keys=True)
    place = Path(files.folder, f".tried-{hashlib.sha256(parts.encode()).hexdigest()}.json")
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return decode_tried(place.read_bytes())
    found = find()
    with contextlib.suppress(OSError):  # No room: it is tried again.
        descriptor, partial = tempfile.mkstemp(prefix=".tried-", dir=files.folder)
        with open(descriptor, "wb") as file:
            file.write(msgspec.json.encode(found))
        os.replace(partial, place)
    return found


@cache
def _versions() -> list[str]:
    readers = {entry.module.partition(".")[0] for entry in entry_points("anychip.libraries")}
    found = [digest_of_sources(package) for package in ("models", *sorted(readers))]
    for name in _COUNT:
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return [*found, sys.version, platform.machine()]
