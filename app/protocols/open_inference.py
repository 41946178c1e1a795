"""The Open Inference Protocol without a transport: what a request means, and all that a client can get wrong in it.

transport ─► InferenceRequest ─► prepare ─► Work ─► run ─► InferenceResponse ─► transport
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import orjson

from app.errors import invalid_request
from app.link import Array, Encoded, Frame, Link, ServedModel, Terms
from app.protocols import wire
from app.protocols.options import INFER, NORMAL_PRIORITY, PRIORITY, TIMEOUT_US, check_names
from app.protocols.parameters import DEFAULT_OPTIONS, deadline_s, read, read_options, switch
from app.protocols.signatures import Signature, cascade_signature, signature
from app.protocols.wire import BYTES, IMAGE, INPUT, PIXELS, PREDICTIONS
from models import Model, Options, PixelModel, Placement, TensorModel
from models.contract.cascade import Cascade

Labels: TypeAlias = tuple[str, ...]
Row: TypeAlias = tuple[dict[str, Any], Labels]
Finish = Callable[[PixelModel, Sequence[Array], Placement, Options], Row]

_AS_TENSORS = replace(DEFAULT_OPTIONS, tensors=True)


@dataclass(frozen=True, slots=True)
class Work:
    """A request found good: the input to compute, images or a tensor model's arrays, and the outputs to send.

    `floats`: the images are normalised tensors.
    """

    terms: Terms
    outputs: Sequence[wire.RequestedOutput]
    options: Options = DEFAULT_OPTIONS
    floats: bool = False
    images: Sequence[Encoded | Frame] = ()
    arrays: Mapping[str, Array] = field(default_factory=dict)
    cascade: Cascade | None = None


def raw(model: Model, content: wire.Buffer) -> wire.InputTensor:
    """Make the input of a request that is only a tensor's content: an encoded image, or the model's only tensor.

    Raises INVALID_REQUEST if that leaves its shape open.
    """
    if not isinstance(model, TensorModel):
        return wire.InputTensor(IMAGE, BYTES, (1,), elements=[content])
    spec = model.inputs[0]
    known = [length for length, name in zip(spec.shape, spec.named, strict=True) if not name]
    if len(model.inputs) > 1 or len(known) + 1 < len(spec.shape):
        raise invalid_request(
            f"a raw request needs a model with one input and at most one open dimension; {model.name} has more"
        )
    rest = len(content) // max(1, wire.size_of(known) * spec.dtype.itemsize)
    shape = tuple(rest if name else length for length, name in zip(spec.shape, spec.named, strict=True))
    return wire.InputTensor(spec.name, spec.datatype, (1, *shape) if model.batched else shape, content)


def prepare(
    link: Link, served: ServedModel, request: wire.InferenceRequest, terms: Terms, *, started_s: float, name: str
) -> Work:
    """Read a request for the model `name`; its own parameters replace those of `terms`: its timeout, from `started_s`.

    Raises INVALID_REQUEST, FORBIDDEN for a priority.
    """
    check_names(request.parameters, INFER)
    tensors: Sequence[wire.InputTensor | wire.RequestedOutput] = (*request.inputs, *request.outputs)
    check_names(name for tensor in tensors for name in tensor.parameters)
    timeout_us, level = read(TIMEOUT_US, request.parameters), read(PRIORITY, request.parameters)
    cascade = link.cascades.get(name)
    described = signature(served) if cascade is None else cascade_signature(cascade)
    outputs = _outputs(served, described, request.outputs)
    if timeout_us:
        terms.deadline_s = deadline_s(started_s, timeout_us / 1e6)
    if level:
        terms.priority = NORMAL_PRIORITY - level
        if terms.check_priority is not None:
            terms.check_priority(terms.priority)
    options = read_options(request.parameters)
    if isinstance(served.model, PixelModel):
        if any(output.name != PREDICTIONS for output in outputs):
            options = _AS_TENSORS if options is DEFAULT_OPTIONS else replace(options, tensors=True)
        floats, images = _images(served, served.model, request.inputs, link.settings.max_images)
        return Work(terms, outputs, options, floats, images, cascade=cascade)
    arrays = {tensor.name: tensor.array() for tensor in request.inputs}
    if len(arrays) < len(request.inputs):
        raise invalid_request("an input is given twice")
    for spec in described.inputs:  # Metadata shows one dimension more for a tensor that has only the batch.
        given = arrays.get(spec.name)
        if given is not None and len(spec.shape) == described.batched and given.shape[described.batched :] == (1,):
            arrays[spec.name] = given[..., 0]
    return Work(terms, outputs, arrays=arrays)


def size_bytes(rows: Array | Sequence[Array | bytes]) -> int:
    """Return the bytes of an output, given as a batch or in rows."""
    if isinstance(rows, np.ndarray):
        return rows.nbytes
    return sum(row.nbytes if isinstance(row, np.ndarray) else len(row) for row in rows)


def finisher(names: set[str]) -> Finish:
    """Return the function, for any thread, that makes these outputs of a worker's result, and its model's labels."""
    tensors = bool(names - {PREDICTIONS})

    def finish(model: PixelModel, outputs: Sequence[Array], placement: Placement, options: Options) -> Row:
        made: dict[str, Any] = dict(model.tensors(outputs, placement, options)) if tensors else {}
        if PREDICTIONS in names:
            made[PREDICTIONS] = orjson.dumps(model.postprocess(outputs, placement, options))
        return made, model.labels

    return finish


def _outputs(
    served: ServedModel, described: Signature, asked: Sequence[wire.RequestedOutput]
) -> Sequence[wire.RequestedOutput]:
    known = {spec.name: spec for spec in described.outputs}
    for output in asked:
        spec = known.get(output.name)
        if spec is None:
            raise invalid_request(f"{served.model.name} has no output {output.name!r}; it has {', '.join(known)}")
        if output.classification and (spec.datatype == BYTES or len(spec.shape) != 2):
            raise invalid_request(
                f"the output {output.name} cannot be given as a classification: it is no list of numbers"
            )
    if len({output.name for output in asked}) < len(asked):
        raise invalid_request("an output is asked for twice")
    return asked or [wire.RequestedOutput(name) for name in known]


def _images(
    served: ServedModel, model: PixelModel, inputs: Sequence[wire.InputTensor], most: int
) -> tuple[bool, Sequence[Encoded | Frame]]:
    """Return True if a request's images are normalised tensors, and the images. Raises INVALID_REQUEST."""
    names = [spec.name for spec in signature(served).inputs]
    if len(inputs) != 1:
        hint = "; --compat image-client is for clients that fill every input" if len(inputs) > 1 else ""
        raise invalid_request(
            f"{model.name} takes one input a request, {' or '.join(names)}; here are {len(inputs)}{hint}"
        )
    [tensor] = inputs
    if tensor.name not in names:
        hint = "; --compat triton has the service take it" if tensor.name == INPUT else ""
        raise invalid_request(f"{model.name} has no input {tensor.name!r}; it takes {' or '.join(names)}{hint}")
    is_batch = tensor.shape[1:] in ((), (1,)) if tensor.name == IMAGE else len(tensor.shape) == 4
    if tensor.shape and is_batch and tensor.shape[0] > most:  # Before any of them is made.
        raise invalid_request(f"{tensor.shape[0]} images are more than the {most} a request may hold")
    found: Sequence[Encoded | Frame]
    if tensor.name == IMAGE:
        found = _encoded(tensor)
    else:
        found = _frames(model, tensor) if tensor.name == PIXELS else _normalised(model, tensor)
    if not found:
        raise invalid_request(f"{tensor.name} is empty: a batch has at least one image")
    return tensor.name == INPUT, found


def _expect(tensor: wire.InputTensor, *datatypes: str) -> None:
    if tensor.datatype in datatypes:
        return
    known = "" if tensor.datatype in wire.DATATYPES or tensor.datatype == BYTES else ", and there is no such datatype"
    raise invalid_request(f"the input {tensor.name} must be {' or '.join(datatypes)}, not {tensor.datatype!r}{known}")


def _encoded(tensor: wire.InputTensor) -> Sequence[Encoded]:
    _expect(tensor, BYTES)
    # Clients that put a batch in front of a shape, as Triton's do, write [n, 1].
    if len(tensor.shape) not in (1, 2) or tensor.shape[1:] not in ((), (1,)):
        raise invalid_request(f"the input {tensor.name} must have the shape [n], not {list(tensor.shape)}")
    found: Sequence[Encoded] | None = tensor.elements
    if found is None:
        found = wire.elements(tensor.name, tensor.shape[0], tensor.content)
    for number, element in enumerate(found):
        if not element:
            raise invalid_request(f"element {number} of {tensor.name} is empty")
    return found


def _frames(model: PixelModel, tensor: wire.InputTensor) -> Sequence[Frame]:
    _expect(tensor, "UINT8")
    resized = switch(tensor.parameters, "resize")
    height, width, channels = model.input_shape
    expected = f"[n, {'height' if resized else height}, {'width' if resized else width}, {channels}]"
    fits = len(tensor.shape) == 4 and tensor.shape[3] == channels and all(tensor.shape[1:3])
    if not fits or not (resized or tensor.shape[1:3] == (height, width)):
        hint = "" if resized else '; with the parameter "resize": true it may have any height and width'
        raise invalid_request(f"the input {tensor.name} must have the shape {expected}, not {list(tensor.shape)}{hint}")
    return [Frame(frame, tensor.shape[2], tensor.shape[1], placed=not resized) for frame in tensor.array()]


def _normalised(model: PixelModel, tensor: wire.InputTensor) -> Sequence[Frame]:
    _expect(tensor, "FP32", "FP16")
    height, width, channels = model.input_shape
    if tensor.shape[1:] != (channels, height, width):
        expected = f"[n, {channels}, {height}, {width}]"
        raise invalid_request(f"the input {tensor.name} must have the shape {expected}, not {list(tensor.shape)}")
    array = tensor.array().astype(np.float32, copy=False)  # Half precision gives exactly the same numbers.
    if not np.isfinite(array).all():
        raise invalid_request(f"the input {tensor.name} holds NaN or infinity")
    return [Frame(tensor, width, height) for tensor in array]


def results(
    outputs: Sequence[wire.RequestedOutput], made: Mapping[str, Any], labels: Sequence[Labels]
) -> list[wire.OutputTensor]:
    """Make the outputs to send, of batches or of their rows, which have their workers' labels. May run in a thread."""
    found = []
    for output in outputs:
        rows = made[output.name]
        batch = rows if isinstance(rows, np.ndarray) or output.name == PREDICTIONS else wire.stacked(rows)
        found.append(result(output, batch, labels))
    return found


def result(output: wire.RequestedOutput, batch: Array | list[bytes], labels: Sequence[Labels]) -> wire.OutputTensor:
    """Make an output to send, of its batch. `labels`: those of each row, or of all."""
    if isinstance(batch, list):
        return wire.OutputTensor(output.name, BYTES, (len(batch),), batch)
    if not output.classification:
        return wire.OutputTensor(output.name, wire.datatype_of(batch), batch.shape, batch)
    best = np.argsort(-batch.astype(np.float64), axis=1, kind="stable")[:, : output.classification]
    own = [each if batch.shape[1] == len(each) else () for each in labels]
    texts = [
        f"{batch[row, index]:f}:{index}{f':{names[index]}' if (names := own[row % len(own)]) else ''}".encode()
        for row, indices in enumerate(best)
        for index in indices.tolist()
    ]
    return wire.OutputTensor(output.name, BYTES, (len(batch), best.shape[1]), texts)
