"""Comparison of our reading of a file with a runtime that is not ours, on pictures.

    pictures ─► our reading, float32 ─► outputs ┐
    pictures ─► witness              ─► outputs ┴─► alike, or the first operator that differs, by name

Witness: ONNX Runtime without optimisations for .onnx. For the networks of a library it is that library's own reading of
the same files, for a program (.pt2, .ts) PyTorch's own loading of it. docs/verification.md says what may differ.
Must not be imported by the server (models.exports.child).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anychip_base.extras import how_to_install
from anychip_base.protobuf import head_of
from models.contract.errors import WeightsError, reason_of
from models.contract.model import Array
from models.exports import library_files
from models.exports.layouts import SIZES
from models.exports.networks import as_saved, unoptimised
from models.onnx.file import Node, OnnxFile, read_onnx
from models.onnx.graph import OnnxGraph, OperatorCall, computed
from models.onnx.operators import as_tensor, is_host
from models.weights.checkpoint import SAVE_ONE, read

PICTURES = 2
_WHOLE, _WHOLE_IN_HALVES = 1e-4, 1e-2
"""Limit for a network's outputs, as a share of the largest number of their like; beyond, operators are compared."""
_OF_HALVES = 10.0  # Limit for outputs of shorter types, in roundings of these: 1e-2 for float16, as above.
_LEAST_LIKE = 64  # Fewest numbers of a row or column with a scale of its own, e.g. of a detector's class.
_FLOOR = 1e-6
_ALONE = 2e-5
"""Limit for one operator, as a share of its largest number: float32 errs by 1e-6, in sums of thousands."""
_ALONE_IN_HALVES = 5e-3
_ROUNDINGS = 32  # Factor of our own rounding, measured by computing the operator in float64, too.
_EPSILON = 2.0**-24  # Rounding of float32; a sum of n numbers in sequence errs by about sqrt(n) times as much.
_AT_ONCE, _MOST_AT_ONCE = 8, 256
"""Operators whose values are held: at first, and at most."""
_BYTES_AT_ONCE = 256 << 20  # Rough limit for their values; those of all operators may be gigabytes.
_NUMBERS = 1 << 20  # Numbers compared in float64 at once.
_GREATEST_HALF = 65504.0
_EDGE = 0.01  # Share of boxes whose suppression rounding alone may decide.
_GRAPH, _VALUE, _NAME = 7, 12, 1  # onnx.proto3: ModelProto.graph, GraphProto.output, ValueInfoProto.name
_MOST_BYTES = 1 << 31  # Limit of a protobuf.
_FLOAT16 = 10  # onnx.proto3: TensorProto.DataType


def compared(
    file: Path, architecture: str, onnx: OnnxFile | None, given: Sequence[Tensor], ours: Sequence[Sequence[Tensor]]
) -> str:
    """Compare, and return a sentence without its end: what was compared, or why nothing was. Raises WeightsError.

    `given`: the network's inputs, of pictures; `ours`: the float32 outputs of our reading for each.
    """
    try:
        if onnx is not None:
            return _of_graph(file, onnx, given, ours)
        if library := library_files.library_of(architecture):
            try:
                theirs = library_files.builder().built(file, architecture, by_itself=True)
            except WeightsError as error:
                raise UnavailableError(str(error).rstrip(".")) from error
            return of_network(f"{library} itself", theirs, given, ours, file)
        if architecture == "pt2":
            return of_network("torch.export itself", as_saved(str(file)), given, ours, file)
        runtime = "OpenVINO" if architecture == "xml" else "TorchScript"
        return f"{runtime} itself computes it, so that nothing was compared"
    except UnavailableError as error:
        return f"it was compared with nothing, as {error}"


def _of_graph(file: Path, onnx: OnnxFile, given: Sequence[Tensor], ours: Sequence[Sequence[Tensor]]) -> str:
    """Compare a graph, operator by operator where its outputs differ. Raises WeightsError, UnavailableError."""
    witness, [taken], names = Witness(file, onnx), onnx.inputs, [value.name for value in onnx.outputs]
    share, largest = _WHOLE_IN_HALVES if witness.in_halves else _WHOLE, 0.0
    others = {name: SIZES[name] for name in witness.inputs if name in SIZES}
    for tensor, outputs in zip(given, ours, strict=True):
        inputs = {taken.name: tensor.numpy().astype(taken.dtype or np.float32), **others}
        wanted = witness.values(inputs, names)
        found = _largest([wanted[name] for name in names], outputs)
        if found <= share:
            largest = max(largest, found)
            continue
        try:
            reason = _first_different(onnx, file.name, inputs, witness)
        except UnavailableError as error:
            reason = f"the outputs differ by {found:.2g} of their largest number, whose operator is not known: {error}"
        if reason:
            raise WeightsError(f"{file.name} is not read as {witness.name} reads it: {reason}. Please report it.")
        return (
            f"each operator computes what {witness.name} does of the same inputs, and the network enlarges rounding to "
            f"{found:.1e} of the largest number"
        )
    return _sentence(witness.name, len(given), largest)


def of_network(
    name: str,
    theirs: Callable[[Tensor], Sequence[Tensor]],
    given: Sequence[Tensor],
    ours: Sequence[Sequence[Tensor]],
    file: Path,
) -> str:
    """Compare a network as a whole. Raises WeightsError, UnavailableError."""
    largest = 0.0
    for tensor, outputs in zip(given, ours, strict=True):
        try:
            with torch.inference_mode():
                wanted = theirs(tensor)
        except Exception as error:
            raise UnavailableError(f"{name} does not run: {reason_of(error)}") from error
        found = _largest([each.float().numpy() for each in wanted], outputs)
        shortest = max((torch.finfo(each.dtype).eps for each in wanted if each.is_floating_point()), default=0.0)
        if not found <= max(_WHOLE, _OF_HALVES * shortest):
            line = ": export it in float32, after network.float()"
            if file.suffix != ".pt2":
                several = ", ".join(read(file, with_data=False).chosen)
                line = several and f": it holds several networks, under {several}: {SAVE_ONE}"
            raise WeightsError(f"{file.name} is not read as {name} reads it: outputs differ by {found:.2g}{line}.")
        largest = max(largest, found)
    return _sentence(name, len(given), largest)


def _sentence(name: str, count: int, largest: float) -> str:
    return f"compared with {name} on {count} pictures: the largest difference is {largest:.1e} of the largest number"


def _largest(wanted: Sequence[Array], ours: Sequence[Tensor]) -> float:
    """Return the largest difference, as a share of the largest number among its like; infinite for other shapes."""
    found = 0.0
    for theirs, mine in zip(wanted, ours, strict=True):
        if tuple(mine.shape) != theirs.shape:
            return float("inf")
        one, other = mine.numpy().astype(np.float64), theirs.astype(np.float64)
        if not other.size:
            continue
        if not (np.isfinite(one).all() and np.isfinite(other).all()):
            return 0.0 if np.array_equal(one, other, equal_nan=True) else float("inf")
        size = np.abs(other)
        scale = np.full(other.shape, size.max())
        for axis in range(other.ndim):
            rest = tuple(each for each in range(other.ndim) if each != axis)
            if other.size // other.shape[axis] >= _LEAST_LIKE:
                scale = np.minimum(scale, size.max(rest, keepdims=True))
        scale = np.maximum(scale, _FLOOR / _WHOLE * size.max()) + np.finfo(np.float32).tiny
        found = max(found, float((np.abs(one - other) / scale).max()))
    return found


class UnavailableError(Exception):
    """Lack of a result from the witness; the message says why."""


class Witness:
    """An .onnx in ONNX Runtime. `inputs`: their names; `in_halves`: whether it computes in float16, as the file states,
    so that its numbers are coarser than ours. Raises UnavailableError.
    """

    def __init__(self, file: Path, onnx: OnnxFile) -> None:
        self.in_halves, self._file = _computes_halves(onnx), file
        try:
            import onnxruntime
        except ImportError as error:
            raise UnavailableError(f"ONNX Runtime is not installed ({how_to_install('onnx')})") from error
        self.name = f"ONNX Runtime {onnxruntime.__version__} without optimisations"
        self._session = self._opened(str(file))
        self.inputs = [each.name for each in self._session.get_inputs()]
        self._outputs = {each.name for each in self._session.get_outputs()}

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of all values of the file's own nodes; subgraphs keep theirs."""
        return frozenset(name for node in read_onnx(self._file).nodes for name in node.outputs if name)

    def values(self, given: Mapping[str, Array], names: Sequence[str]) -> dict[str, Array]:
        """Compute outputs, or other values, by name, from inputs by name."""
        session = self._session
        if not self._outputs.issuperset(names):
            session = self._with(names)
        try:
            return dict(zip(names, session.run(list(names), dict(given)), strict=True))
        except Exception as error:
            raise UnavailableError(f"ONNX Runtime cannot run it: {reason_of(error)}") from error

    def _with(self, names: Sequence[str]) -> Any:
        """Open a session of the same file with these values as outputs: appended bytes extend a protobuf message.

        Only these are added: memory of an output is not reused while the graph is computed.
        """
        added = b"".join(_field(_VALUE, _field(_NAME, each.encode())) for each in names if each not in self._outputs)
        if self._file.stat().st_size + len(added) >= _MOST_BYTES:
            raise UnavailableError("the file is too large")
        return self._opened(self._file.read_bytes() + _field(_GRAPH, added), str(self._file.parent))

    def _opened(self, source: str | bytes, folder: str = "") -> Any:
        try:
            return unoptimised(source, folder=folder)
        except Exception as error:
            raise UnavailableError(f"ONNX Runtime cannot load it: {reason_of(error)}") from error


def _computes_halves(file: OnnxFile) -> bool:
    constants = {node.outputs[0]: node.attributes.get("value") for node in file.nodes if node.operator == "Constant"}
    halves = {name for name, each in {**file.constants, **constants}.items() if getattr(each, "dtype", None) == "<f2"}
    return any(
        node.attributes.get("to") == _FLOAT16 if node.operator == "Cast" else not halves.isdisjoint(node.inputs)
        for node in file.nodes
    )


def _field(number: int, content: bytes) -> bytes:
    return head_of(number, len(content)) + content


class DifferentError(ValueError):
    """Difference of an operator; the message says which and how."""


class _ComparedGraph(OnnxGraph):
    """An OnnxGraph whose calls continue with the witness's values, a few operators ahead, and are compared with them;
    its constants are compared while they are computed.
    """

    def __init__(self, file: OnnxFile, name: str, witness: Witness, given: Mapping[str, Array]) -> None:
        self._witness, self._given, self._alone = witness, given, _ALONE_IN_HALVES if witness.in_halves else _ALONE
        self._nodes_of = {name: node for node in file.nodes for name in node.outputs}
        self._order = [name for name in self._nodes_of if name in witness.names]
        self._places = {name: place for place, name in enumerate(self._order)}
        self._held: dict[str, Array] = {}
        self._count = _AT_ONCE
        super().__init__(file, name)
        self.core.instead = self.tail.instead = self._compared

    def _wanted(self, name: str) -> Array | None:
        place = self._places.get(name)
        if place is None:
            return None
        if name not in self._held:
            self._held = {}
            self._held = self._witness.values(self._given, self._order[place : place + self._count])
            mean_bytes = sum(each.nbytes for each in self._held.values()) // len(self._held)
            self._count = min(max(_AT_ONCE, _BYTES_AT_ONCE // max(1, mean_bytes)), _MOST_AT_ONCE)
        return self._held[name]

    def _compared(self, call: OperatorCall, inputs: list[Any]) -> Any:
        found = computed(call, inputs)
        results = list(found) if isinstance(found, tuple) else [found]
        for place, (name, ours) in enumerate(zip(call.outputs, results, strict=False)):
            wanted = self._wanted(name)
            if wanted is None:
                continue
            reason = self._difference(call, inputs, place, ours, wanted)
            if reason and self._witness.in_halves:
                reason = self._difference_at_once(call, inputs, place, name)
            if reason:
                node = self._nodes_of[name]
                raise DifferentError(f"{node.operator} {node.name or node.outputs[0]!r} {reason}")
            results[place] = _in_form(ours, wanted)
        return tuple(results)

    def _difference_at_once(self, call: OperatorCall, inputs: list[Any], place: int, name: str) -> str:
        """Compare an output with inputs of its own run: what is rounded to float16 depends on what is asked for."""
        asked = [each for each in call.inputs if each in self._places]
        values = self._witness.values(self._given, [*asked, name])
        pairs = zip(call.inputs, inputs, strict=True)
        given = [_in_form(old, values[each]) if each in values else old for each, old in pairs]
        found = computed(call, given)
        return self._difference(call, given, place, found[place] if isinstance(found, tuple) else found, values[name])

    def _difference(self, call: OperatorCall, inputs: list[Any], place: int, ours: Any, wanted: Array) -> str:
        if call.operator == "NonMaxSuppression":
            one, other = ({tuple(row) for row in rows.tolist()} for rows in (as_tensor(ours), wanted))
            count = len(one ^ other)
            return f"chooses {count} other boxes of {len(other)}" if count > _EDGE * len(other) else ""
        share = self._alone
        if call.operator.startswith(("Reduce", "GlobalAverage")) and isinstance(ours, Tensor) and ours.numel():
            # Of a witness that sums in sequence, where we sum in a tree.
            share = max(share, float(_ROUNDINGS * _EPSILON * (as_tensor(inputs[0]).numel() / ours.numel()) ** 0.5))
        reason = difference(ours, wanted, share)
        if not reason or not isinstance(ours, Tensor) or not ours.is_floating_point() or ours.shape != wanted.shape:
            return reason
        exact = computed(
            call, [each.double() if torch.is_tensor(each) and each.is_floating_point() else each for each in inputs]
        )
        exact = exact[place] if isinstance(exact, tuple) else exact
        least = _EPSILON if call.operator == "Sigmoid" else 0.0  # The witness adds 0.5 at its end, and rounds that.
        rounding = max(least, float((exact - ours).abs().nan_to_num().max()))
        return difference(exact, wanted, share, _ROUNDINGS * rounding)

    def _folded(self, node: Node, known: dict[str, Any]) -> bool:
        if not super()._folded(node, known):
            return False
        for name in node.outputs if node.operator != "Constant" else ():
            wanted = self._wanted(name)
            reason = "" if wanted is None else difference(known[name], wanted, self._alone)
            if reason:
                raise DifferentError(f"{node.operator} {node.name or node.outputs[0]!r} {reason}")
        return True


def _in_form(ours: Any, wanted: Array) -> Any:
    if isinstance(ours, Tensor):
        return torch.from_numpy(wanted).to(ours.dtype)
    return wanted.reshape(-1).tolist() if isinstance(ours, list) else wanted.item()


def _first_different(file: OnnxFile, name: str, given: Mapping[str, Array], witness: Witness) -> str:
    """Return the first operator that differs from the witness, and how; "" if none does. Raises WeightsError."""
    tensors = [torch.from_numpy(given[value.name]) for value in file.inputs]
    try:
        graph = _ComparedGraph(file, name, witness, given).eval()
        with torch.inference_mode():
            graph(*(each.float() if each.is_floating_point() else each for each in tensors))
    except DifferentError as error:
        return str(error)
    return ""


def difference(ours: Any, wanted: Array, share: float, rounding: float = 0.0) -> str:
    """Describe how a value differs from the wanted one, "" if it does not.

    Floats may differ by `share` of the largest number, and by `rounding`.
    """
    found = as_tensor(ours)
    given = found.numpy() if not is_host(ours) or wanted.size != found.numel() else found.numpy().reshape(wanted.shape)
    if given.shape != wanted.shape:
        return f"has the shape {list(given.shape)}, and not {list(wanted.shape)}"
    if wanted.dtype.kind != "f":
        count = int((given != wanted).sum())
        return f"has {count} other numbers of {given.size}" if count else ""
    largest = magnitude = 0.0
    flat, reference = np.ravel(given), np.ravel(wanted)
    for first in range(0, reference.size, _NUMBERS):
        one, other = (each[first : first + _NUMBERS].astype(np.float64) for each in (flat, reference))
        if wanted.dtype == np.float16:  # The largest number of float16 is _GREATEST_HALF.
            one = np.where(np.abs(one) > _GREATEST_HALF, np.copysign(np.inf, one), one)
        finite = np.isfinite(other)
        if not np.array_equal(one[~finite], other[~finite], equal_nan=True) or not np.isfinite(one[finite]).all():
            return "is not finite in the same places"
        if finite.any():
            magnitude = max(magnitude, float(np.abs(other[finite]).max()))
            largest = max(largest, float(np.abs(one[finite] - other[finite]).max()))
    if largest <= share * magnitude + rounding:
        return ""
    return f"differs by {largest:.3g} in numbers of up to {magnitude:.3g}"
