"""A network from a file that carries its own graph: `name=file.onnx`, `.xml`, `.pt2`, `.ts`, `.torchscript`.

Owns: telling networks of images and of tensors apart, the owner's declarations beside the file (`file.json` of images,
`file.tensors.json` and `file.probes.npz` of tensors, `file.labels.txt`), and the child process that reads it first, so
that a strange file harms that process and not the server. Must not know how graphs are called (models.exports.networks,
models.exports.images).
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from anychip_base.interpreter import bare_environment, python_command
from models.contract.digest import OpenedFiles
from models.contract.errors import WeightsError, WeightsNotFoundError, reason_of
from models.contract.model import Array, Model
from models.contract.regular import read_regular
from models.contract.task_adapter import AdaptedFile, made, task_class
from models.contract.tensors import TensorModel, TensorSpec, item_bytes, random_arrays
from models.exports import library_files
from models.exports.answers import Tried, TriedImages, decode_tried
from models.exports.files import names_beside, names_within
from models.exports.finished import FINISHED, read_finished
from models.exports.images import ExportedImages
from models.exports.kept import kept
from models.exports.metadata import Sidecar, read_sidecar, sidecar_of
from models.exports.networks import FORMS, GraphNetwork, load_graph
from models.weights.checkpoint import labels_beside
from models.weights.opened import looked_at

log = logging.getLogger(__name__)

SUFFIXES = (".onnx", ".pt2", ".ts", ".torchscript", ".xml", *FINISHED)
PLATFORMS = {
    "onnx": "onnx_onnxv1",
    "pt2": "pytorch_export",
    "ts": "pytorch_torchscript",
    "torchscript": "pytorch_torchscript",
}
TIME_LIMIT_S = 600.0
_CHILD = Path(__file__).with_name("child.py")
_PROBES = 8


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
    """A network of tensors from a file. `architecture` is the file's suffix without the dot; `probes_file`: the name of
    its owner's probes beside it, None: random ones.
    """

    probes_file: str | None

    @property
    def platform(self) -> str:
        """The Open Inference Protocol's name; a similar one for torch.export's programs, unknown to it."""
        return PLATFORMS[self.architecture]

    @property
    def witness(self) -> str:
        """Statement that nothing was compared, as the numbers are those of the runtime that reads the file."""
        runtime = {"onnx": "ONNX Runtime", "pt2": "torch.export"}.get(self.architecture, "TorchScript")
        return f"{runtime} itself computes it, so that nothing was compared"

    def network(self) -> GraphNetwork:
        """Load the file's graph on the CPU, as it was saved. Raises WeightsError."""
        assert self.weights_file is not None
        form = FORMS[Path(self.weights_file).suffix]
        network = GraphNetwork(self, load_graph(self.weights_file, form), form, self.weights_file)
        return network.requires_grad_(False)

    def probes(self) -> Array:
        """Return random items, or its owner's. Raises WeightsError."""
        if self.probes_file is None:
            arrays = random_arrays(self.inputs, _PROBES)
        else:
            assert self.weights_file is not None
            arrays = read_probes(Path(self.weights_file).with_name(self.probes_file), self.inputs)
        count = len(next(iter(arrays.values())))
        items = np.zeros((count, *self.input_shape), np.uint8)
        for row in range(count):
            whole = {name: array if self.batched else array[row] for name, array in arrays.items()}
            self.pack(whole, row, items[row])
        return items


def open_exported(
    name: str, file: Path, stated: str = "", architecture: str = "", files: OpenedFiles | None = None
) -> Model:
    """Read a file and try it, in a child process. Raises WeightsNotFoundError, WeightsError.

    `stated`: replaces a sidecar, if none is to be read. `architecture`: of weights for a network that a library builds,
    `timm/resnet50`. `files`: all of the model's, None: those beside it now. It is a model of images if the file's
    metadata or `file.json` beside it says so, else one of tensors.
    """
    if not file.is_file():
        raise WeightsNotFoundError(f"There is no file {str(file)!r} for {name}.")
    sidecar = read_sidecar(file, stated)
    declared, probes = _declared(file), file.with_name(f"{file.stem}.probes.npz")
    probes_file = probes.name if probes.is_file() else None
    is_tensors = declared is not None or (sidecar is not None and sidecar.task == "tensors")
    if is_tensors and file.suffix in (".xml", *FINISHED):
        raise WeightsError(f"{file.name}: it is served for images only: export an .onnx for tensors.")
    if is_tensors:
        images: dict[str, Any] | None = None
    else:
        images = {
            "sidecar": None if sidecar is None else sidecar.model_dump(exclude={"options"}),
            "labels": labels_beside(file),
            "open_size": None if sidecar is not None and sidecar.size else library_files.size_in(file.parent),
            "takes": None if sidecar is None or sidecar.task is None else task_class(sidecar.task).takes,
        }
    if images is not None and file.suffix in FINISHED:
        known = read_finished(file)
        shapes = [(1, *shape[1:]) for shape in known.outputs]
        images["finished"] = {"size": known.size, "shapes": shapes, "batch_sizes": known.batch_sizes}
    files = files or looked_at(file, names_beside(file, is_graph=True), names_within)
    given = None if probes_file is None else str(probes.absolute())
    asked = {
        **(declared or _Declared()).model_dump(),
        "probes": given,
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
        probes_file,
    )


def _image_model(name: str, file: Path, found: TriedImages, sidecar: Sidecar | None, architecture: str = "") -> Model:
    stated, how = sidecar or sidecar_of(found.implied, file.name), found.export.how
    if stated.resize_by is None and found.resize == "centre" and found.exporter.startswith("ultralytics"):
        stated = stated.model_copy(update={"resize_by": "pillow"})
        if found.size[0] != found.size[1] and not (stated.resize or stated.resize_to or stated.crop):
            stated = stated.model_copy(update={"resize_to": found.size})  # Ultralytics stretches to what is no square.
    try:
        resize = stated.resizing(found.size, found.resize)
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
    for note in found.notes:
        log.warning("%s: %s: %s.", name, file.name, note)
    if found.witness:
        log.info("%s: %s: when it was first read: %s", name, file.name, found.witness)
    made(found.task, known)  # A file that does not fit its task stops the start.
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


def read_probes(file: Path, inputs: Sequence[TensorSpec]) -> dict[str, Array]:
    """Read arrays [n, …] of an .npz by the inputs' names, n the same for all. Raises WeightsError."""
    try:
        with np.load(file, allow_pickle=False) as archive:
            arrays = {spec.name: np.ascontiguousarray(archive[spec.name]) for spec in inputs}
    except Exception as error:
        raise WeightsError(
            f"{file.name} cannot be read as probes, an array for each input: {reason_of(error)}."
        ) from error
    for spec in inputs:
        array = arrays[spec.name]
        if array.dtype != spec.dtype or array.shape[1:] != spec.shape or not len(array):
            raise WeightsError(
                f"{spec.name} in {file.name} must be {spec.datatype} [n, {', '.join(map(str, spec.shape))}], "
                f"not {array.dtype} {list(array.shape)}."
            )
    if len({len(array) for array in arrays.values()}) > 1:
        raise WeightsError(f"the arrays in {file.name} are of different lengths.")
    return arrays


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
    """Try a file in models.exports.child and return its answer. Raises WeightsError."""
    with tempfile.TemporaryDirectory(prefix="anychip-") as folder, tempfile.TemporaryFile() as said:
        environment = bare_environment(folder)
        answer = Path(folder) / "answer.json"
        kinds = {".xml": "openvino", **dict.fromkeys(FINISHED, "finished")}
        form = architecture or kinds.get(file.suffix) or FORMS[file.suffix]
        given = Path(folder) / "declared.json"
        given.write_text(json.dumps(declared))
        command = python_command(str(_CHILD), str(file.absolute()), form, str(given), str(answer))
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=environment, start_new_session=True
        )
        try:
            code = child.wait(TIME_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise WeightsError(f"{file.name} was not read and tried within {TIME_LIMIT_S:g} s.") from None
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        if not answer.is_file():
            said.seek(0)
            lines = said.read().decode(errors="replace").strip().splitlines()
            last = lines[-1][:200].rstrip(".") if lines else "it said nothing"
            raise WeightsError(f"{file.name} ended the process that read it (status {code}): {last}.")
        found = decode_tried(answer.read_bytes())
    if found.error:
        raise WeightsError(found.error)
    return found
