"""The Open Inference Protocol without a transport: tensors by name in, tensors by name out.

    transport ─► Ask ─► prepare ─► Work ─► run ─► Results ─► transport
                          │ names, datatypes, shapes, sizes: everything a client can get wrong

Owns: what a model's inputs and outputs are called, what of them a request means, and the protocol's parameters
(deadline, priority, classification). Must not know HTTP, gRPC or how workers compute. REST (app.http) and gRPC
(app.grpc) are two ways into it, so that both accept, refuse and answer alike.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from app.errors import ServiceError
from app.observability.metrics import Exemplar
from app.observability.tracing import RequestTrace
from app.observability.triton_statistics import VERSION
from app.protocols import wire
from app.protocols.parameters import read_options, switch, whole
from app.protocols.wire import BYTES, DATATYPES, bad
from app.scheduling.served_model import ServedModel
from app.serving import inference
from app.serving.service import Encoded, Finish, Frame, Request, Service
from app.serving.timings import Timings
from models import Model, Options, OutputSpec, PixelModel, Placement, TensorModel

Array = npt.NDArray[Any]

EXTENSIONS = (
    "binary_tensor_data",
    "classification",
    "model_configuration",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "statistics",
)
"""As Triton names them; its clients ask for these."""

IMAGE, PIXELS, INPUT, PREDICTIONS = "image", "pixels", "input", "predictions"

NORMAL_PRIORITY, PRIORITIES = 2, 102
"""The protocol counts priorities from 1, the highest; ours from 0, the normal one, upwards: 1 is ours 1, 2 is 0, …"""

_LONGEST_TIMEOUT_US = 10**12
_MOST_DIMENSIONS = 8
_MOST_CLASSES = 100_000
_ID = re.compile(r"[^\x00-\x1f\x7f]{0,256}")


@dataclass(frozen=True, slots=True)
class Given:
    """An input as it was sent: as bytes (`content`) or as a list of `values`; of BYTES, a list of bytes."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    content: wire.Buffer | None = None
    values: Any = None
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Wanted:
    """An output as it is asked for; `classification`: as so many classes with their labels, 0: as it is."""

    name: str
    classification: int = 0


@dataclass(frozen=True, slots=True)
class Ask:
    """An inference request. No `outputs`: all of them."""

    inputs: Sequence[Given]
    outputs: Sequence[Wanted] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Terms:
    """What a transport says beside the request itself, whose own parameters win.

    `started_s`: the request's first byte, in `time.monotonic()`; `timeout_s` counts from it; `timings` are filled in.
    """

    started_s: float
    timeout_s: float
    priority: int
    timings: Timings
    trace: RequestTrace | None = None
    exemplar: Exemplar | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """An output of the answer; `data` of BYTES are its elements."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Array | list[bytes]


@dataclass(frozen=True, slots=True)
class Answered:
    """The outputs in the order asked for; `made_by`: on what, and by which weights."""

    results: list[Result]
    made_by: dict[str, str | bool]


@dataclass(frozen=True, slots=True)
class Work:
    """A request found good: what the service is asked, images or a tensor model's arrays, and what is sent of it.

    `floats`: the images are normalised tensors.
    """

    request: Request
    outputs: Sequence[Wanted]
    floats: bool = False
    images: Sequence[Encoded | Frame] = ()
    arrays: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Signature:
    """A model as its metadata shows it; `batched`: the first dimension of every tensor is the batch."""

    platform: str
    inputs: tuple[OutputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    batched: bool = True


def signature(served: ServedModel) -> Signature:
    """What the model takes (of images, one of its inputs a request) and answers with."""
    if served.signature is None or served.signature[0] is not served.model:
        served.signature = served.model, _signature(served, served.model)
    kept: Signature = served.signature[1]
    return kept


def _signature(served: ServedModel, model: Model) -> Signature:
    if isinstance(model, TensorModel):
        inputs, outputs = (
            tuple(OutputSpec(spec.name, spec.datatype, spec.wire_shape(model.batched)) for spec in specs)
            for specs in (model.inputs, model.results)
        )
        return Signature(model.platform, inputs, outputs, model.batched)
    assert isinstance(model, PixelModel)
    height, width, channels = model.input_shape
    images = [OutputSpec(IMAGE, BYTES, (-1,)), OutputSpec(PIXELS, "UINT8", (-1, height, width, channels))]
    if served.floats is not None:
        images.append(OutputSpec(INPUT, "FP32", (-1, channels, height, width)))
    return Signature("pytorch_module", tuple(images), (*model.answers, OutputSpec(PREDICTIONS, BYTES, (-1,))))


def find(service: Service, name: str, version: str = "") -> ServedModel:
    """The model, in a version that exists. Raises MODEL_NOT_FOUND."""
    served = service.find(name)
    if version not in ("", VERSION):
        raise ServiceError("MODEL_NOT_FOUND", f"{name} has no version {version!r}; it has version {VERSION}")
    return served


def server_metadata() -> dict[str, Any]:
    """The server's metadata in the protocol's form."""
    return {"name": "anychip", "version": importlib.metadata.version("anychip"), "extensions": list(EXTENSIONS)}


def metadata(service: Service, name: str, version: str = "") -> dict[str, Any]:
    """A model's metadata in the protocol's form, and under "parameters" how it is served. Raises MODEL_NOT_FOUND."""
    served = find(service, name, version)
    model = served.model
    described = signature(served)
    tensors = {
        key: [{"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)} for spec in specs]
        for key, specs in (("inputs", described.inputs), ("outputs", described.outputs))
    }
    served_on = [
        {
            "device": device,
            "engine": loaded.report.engine,
            "precision": loaded.report.precision,
            "errors": dict(loaded.report.measures),
        }
        for device, loaded in service.dispatcher.loaded(served)
    ]
    parameters = {"task": model.task, "architecture": model.architecture, "weights": model.weights}
    return {
        "name": name,
        "versions": [VERSION],
        "platform": described.platform,
        **tensors,
        "parameters": {**parameters, "served_on": served_on},
    }


def raw(model: Model, content: wire.Buffer) -> Given:
    """The input of a request that is nothing but a tensor's content: an encoded image, or the model's only tensor.

    Raises INVALID_REQUEST where that leaves its shape open.
    """
    if not isinstance(model, TensorModel):
        return Given(IMAGE, BYTES, (1,), values=[content])
    spec = model.inputs[0]
    known = [length for length, name in zip(spec.shape, spec.named, strict=True) if not name]
    if len(model.inputs) > 1 or len(known) + 1 < len(spec.shape):
        raise bad(f"a raw request needs a model with one input and at most one open dimension; {model.name} has more")
    rest = len(content) // max(1, wire.size_of(known) * spec.dtype.itemsize)
    shape = tuple(rest if name else length for length, name in zip(spec.shape, spec.named, strict=True))
    return Given(spec.name, spec.datatype, (1, *shape) if model.batched else shape, content)


def checked_id(given: Any) -> str:
    """The client's name for its request. Raises INVALID_REQUEST."""
    if not isinstance(given, str) or not _ID.fullmatch(given):
        raise bad("the id must be a string of at most 256 characters, none of them a control character")
    return given


def checked_shape(name: str, shape: Any) -> tuple[int, ...]:
    """A shape that a tensor can have. Raises INVALID_REQUEST."""
    if not isinstance(shape, Sequence) or isinstance(shape, str | bytes) or len(shape) > _MOST_DIMENSIONS:
        raise bad(f"the shape of {name} must be a list of at most {_MOST_DIMENSIONS} dimensions")
    if any(type(length) is not int or not 0 <= length < 2**63 for length in shape):
        raise bad(f"the shape of {name} must be of whole numbers from 0, not {list(shape)!r}")
    return tuple(shape)


def classification_of(name: str, parameters: Mapping[str, Any]) -> int:
    """The classification extension's parameter of an output, 0 where it is not used. Raises INVALID_REQUEST."""
    return whole(parameters, "classification", 0, 0, _MOST_CLASSES)


def prepare(service: Service, served: ServedModel, ask: Ask, terms: Terms) -> Work:
    """What a request means. Raises INVALID_REQUEST."""
    timeout_us = whole(ask.parameters, "timeout", 0, 0, _LONGEST_TIMEOUT_US)
    level = whole(ask.parameters, "priority", 0, 0, PRIORITIES)
    outputs = _outputs(served, ask.outputs)
    request = Request(
        read_options(ask.parameters),
        terms.started_s + (timeout_us / 1e6 or terms.timeout_s),
        NORMAL_PRIORITY - level if level else terms.priority,
        terms.timings,
        finish=_finisher({wanted.name for wanted in outputs}),
        trace=terms.trace,
        exemplar=terms.exemplar,
    )
    if isinstance(served.model, PixelModel):
        floats, images = _images(served, served.model, ask.inputs, service.settings.max_images)
        return Work(request, outputs, floats, images)
    arrays = {given.name: _array(given) for given in ask.inputs}
    if len(arrays) < len(ask.inputs):
        raise bad("an input is given twice")
    return Work(request, outputs, arrays=arrays)


async def run(service: Service, served: ServedModel, work: Work) -> Answered:
    """Have it computed. Raises ServiceError; cancelled, it gives its reservation up."""
    if isinstance(served.model, PixelModel):
        form = served.floats if work.floats else served
        assert form is not None
        answer = await service.predict(form, work.images, work.request)
        made = {wanted.name: [each[wanted.name] for each in answer.predictions] for wanted in work.outputs}
        batches: Mapping[str, Array | list[bytes]] = {
            name: rows if name == PREDICTIONS else wire.stacked(rows) for name, rows in made.items()
        }
        made_by = service.made_by(answer)
    else:
        names = [wanted.name for wanted in work.outputs]
        tensors = await inference.infer(service, served, work.arrays, work.request, names)
        batches, made_by = tensors.outputs, service.made_by(tensors)
    return Answered([_result(wanted, batches[wanted.name], served) for wanted in work.outputs], made_by)


def _finisher(names: set[str]) -> Finish:
    tensors = bool(names - {PREDICTIONS})

    def finish(model: PixelModel, outputs: Sequence[Array], placement: Placement, options: Options) -> dict[str, Any]:
        made: dict[str, Any] = dict(model.tensors(outputs, placement, options)) if tensors else {}
        if PREDICTIONS in names:
            made[PREDICTIONS] = orjson.dumps(model.postprocess(outputs, placement, options))
        return made

    return finish


def _outputs(served: ServedModel, asked: Sequence[Wanted]) -> Sequence[Wanted]:
    known = {spec.name: spec for spec in signature(served).outputs}
    for wanted in asked:
        spec = known.get(wanted.name)
        if spec is None:
            raise bad(f"{served.model.name} has no output {wanted.name!r}; it has {', '.join(known)}")
        if wanted.classification and (spec.datatype == BYTES or len(spec.shape) != 2):
            raise bad(f"the output {wanted.name} cannot be given as a classification: it is no list of numbers")
    if len({wanted.name for wanted in asked}) < len(asked):
        raise bad("an output is asked for twice")
    return asked or [Wanted(name) for name in known]


def _images(
    served: ServedModel, model: PixelModel, inputs: Sequence[Given], most: int
) -> tuple[bool, Sequence[Encoded | Frame]]:
    """Whether a request's images are normalised tensors, and the images. Raises INVALID_REQUEST."""
    names = [spec.name for spec in signature(served).inputs]
    if len(inputs) != 1:
        raise bad(f"{model.name} takes one input a request, {' or '.join(names)}; here are {len(inputs)}")
    [given] = inputs
    if given.name not in names:
        hint = "; --float-input has the service take it" if given.name == INPUT else ""
        raise bad(f"{model.name} has no input {given.name!r}; it takes {' or '.join(names)}{hint}")
    found: Sequence[Encoded | Frame]
    if given.name == IMAGE:
        found = _encoded(given)
    else:
        found = _frames(model, given) if given.name == PIXELS else _normalised(model, given)
    if not found:
        raise bad(f"{given.name} is empty: a batch has at least one image")
    if len(found) > most:
        raise bad(f"{len(found)} images are more than the {most} a request may hold")
    return given.name == INPUT, found


def _expect(given: Given, *datatypes: str) -> None:
    if given.datatype in datatypes:
        return
    known = "" if given.datatype in DATATYPES or given.datatype == BYTES else ", and there is no such datatype"
    raise bad(f"the input {given.name} must be {' or '.join(datatypes)}, not {given.datatype!r}{known}")


def _encoded(given: Given) -> Sequence[Encoded]:
    _expect(given, BYTES)
    # [n, 1] is how clients write it that put a batch in front of a shape, as Triton's do.
    if len(given.shape) not in (1, 2) or given.shape[1:] not in ((), (1,)):
        raise bad(f"the input {given.name} must have the shape [n], not {list(given.shape)}")
    if given.content is None:
        found: Sequence[Encoded] = given.values
        if len(found) != given.shape[0]:
            raise bad(f"{given.name} has {len(found)} elements, but its shape holds {given.shape[0]}")
    else:
        found = wire.elements(given.name, given.shape[0], given.content)
    for number, element in enumerate(found):
        if not element:
            raise bad(f"element {number} of {given.name} is empty")
    return found


def _frames(model: PixelModel, given: Given) -> Sequence[Frame]:
    _expect(given, "UINT8")
    resized = switch(given.parameters, "resize")
    height, width, channels = model.input_shape
    wanted = f"[n, {'height' if resized else height}, {'width' if resized else width}, {channels}]"
    fits = len(given.shape) == 4 and given.shape[3] == channels and all(given.shape[1:3])
    if not fits or not (resized or given.shape[1:3] == (height, width)):
        hint = "" if resized else '; with the parameter "resize": true it may have any height and width'
        raise bad(f"the input {given.name} must have the shape {wanted}, not {list(given.shape)}{hint}")
    return [Frame(frame, given.shape[2], given.shape[1], placed=not resized) for frame in _array(given)]


def _normalised(model: PixelModel, given: Given) -> Sequence[Frame]:
    _expect(given, "FP32", "FP16")
    height, width, channels = model.input_shape
    if given.shape[1:] != (channels, height, width):
        wanted = f"[n, {channels}, {height}, {width}]"
        raise bad(f"the input {given.name} must have the shape {wanted}, not {list(given.shape)}")
    array = _array(given).astype(np.float32, copy=False)  # Of half precision exactly the same numbers.
    if not np.isfinite(array).all():
        raise bad(f"the input {given.name} holds NaN or infinity")
    return [Frame(tensor, width, height) for tensor in array]


def _array(given: Given) -> Array:
    if given.datatype not in DATATYPES:
        raise bad(f"the input {given.name} cannot be {given.datatype!r}; there is {', '.join(DATATYPES)}")
    if given.content is None:
        return wire.from_values(given.name, given.datatype, given.shape, given.values)
    return wire.from_bytes(given.name, given.datatype, given.shape, given.content)


def _result(wanted: Wanted, batch: Array | list[bytes], served: ServedModel) -> Result:
    if isinstance(batch, list):
        return Result(wanted.name, BYTES, (len(batch),), batch)
    if not wanted.classification:
        return Result(wanted.name, wire.datatype_of(batch), batch.shape, batch)
    best = np.argsort(-batch.astype(np.float64), axis=1, kind="stable")[:, : wanted.classification]
    labels = served.model.labels if batch.shape[1] == len(served.model.labels) else ()
    texts = [
        f"{batch[row, index]:f}:{index}{f':{labels[index]}' if labels else ''}".encode()
        for row, indices in enumerate(best)
        for index in indices.tolist()
    ]
    return Result(wanted.name, BYTES, (len(batch), best.shape[1]), texts)
