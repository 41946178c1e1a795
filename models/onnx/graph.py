"""An ONNX file as a PyTorch module, so that it runs on every device and every engine that PyTorch has.

    file ─► models.onnx.file ─► nodes ─► one call of models.onnx.operators each ─► tensors

Owns: the order of calls and which weights they get. Nodes that depend on weights alone are computed once. Halves of the
file become float32: the precision is the engine's choice. Must not know what the outputs mean.
Operators that are not known are all named in one error before anything is computed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import models.onnx.layers  # noqa: F401  # It registers its operators.
from models.contract.errors import WeightsError
from models.contract.model import Array
from models.onnx.file import Node, OnnxFile, read_onnx
from models.onnx.forms import SEVERAL, as_detector, for_openvino, in_pairs, not_computed, todays
from models.onnx.operators import OPERATORS, UnsupportedError, as_numbers

_HEAVY = ("Conv", "ConvTranspose", "Gemm", "MatMul", "Einsum", "GridSample")
_NUMBERS = {"Clip": (1, 2), "NonMaxSuppression": (3, 4), "Pad": (1, 2), "Resize": (1, 2)}
"""Places of the inputs that an operator reads as numbers of the host."""
_MAX_CONSTANT_BYTES = 1 << 30  # Largest folded constant: a file of a few bytes may ask for any size.


@dataclass(frozen=True)
class OperatorCall(Node):
    """Call of an operator. `frees`: values that no later node needs."""

    frees: tuple[str, ...] = ()


class OnnxPart(nn.Module):
    """Part of a graph: nodes in an order of computation. Weights are buffers; numbers of the host stay Python's."""

    def __init__(
        self, name: str, nodes: Sequence[Node], known: Mapping[str, Any], inputs: Sequence[str], outputs: Sequence[str]
    ) -> None:
        super().__init__()
        self.file_name = name
        self.input_names, self.output_names = tuple(inputs), tuple(outputs)
        self.free_batch = False
        # Computes an operator in place of `computed`.
        self.instead: Callable[[OperatorCall, list[Any]], Any] | None = None
        self._calls = _planned(nodes, {*known, *outputs})
        self._host: dict[str, Any] = {}
        self._buffers_of: dict[str, str] = {}
        wanted = {each for node in nodes for each in node.inputs} | set(outputs)
        names: dict[int, str] = {}  # One name for each tensor: tracers refuse two.
        for number, key in enumerate(sorted(wanted & known.keys())):
            value = known[key]
            if isinstance(value, Tensor):
                if id(value) not in names:
                    names[id(value)] = f"constant_{number}"
                    self.register_buffer(f"constant_{number}", value.contiguous())
                self._buffers_of[key] = names[id(value)]
            else:
                self._host[key] = value

    def forward(self, *given: Any) -> tuple[Any, ...]:
        """Compute the values of `output_names` from those of `input_names`.

        With `free_batch`, a shape that is stated with a first axis of 1 takes any batch: so exports of batch 1 often
        run with others, which the caller must verify. Raises WeightsError for a form of an operator that is not known.
        """
        values: dict[str, Any] = dict(self._host)
        for key, attribute in self._buffers_of.items():
            values[key] = getattr(self, attribute)
        values.update(zip(self.input_names, given, strict=True))
        compute = self.instead or computed
        for call in self._calls:
            inputs = [values[name] for name in call.inputs]
            if self.free_batch and call.operator == "Reshape" and isinstance(inputs[0], Tensor):
                inputs[1] = _freed(inputs[0], as_numbers(inputs[1]))
            try:
                found = compute(call, inputs)
            except UnsupportedError as error:
                raise not_computed(self.file_name, str(error)) from error
            if isinstance(found, tuple):
                values.update(zip(call.outputs, found, strict=False))
            else:
                values[call.outputs[0]] = found
            for name in call.frees:
                del values[name]
        return tuple(values[name] for name in self.output_names)


def computed(call: OperatorCall, inputs: list[Any]) -> Any:
    """Compute an operator."""
    return OPERATORS[call.operator](inputs, call.attributes)


class _Layer(nn.Module):
    """One node as a module, so that a tracer of the network knows the node by its name."""

    def forward(self, call: OperatorCall, inputs: list[Any]) -> Any:
        return computed(call, inputs)


def with_named_nodes(network: nn.Module) -> nn.Module:
    """Make each node of an ONNX file a module of the network, in place, named by its first output: for tools that name
    layers.
    """
    for module in list(network.modules()):
        if isinstance(module, OnnxPart):
            module.nodes = nn.ModuleDict({_module_name(call.outputs[0]): _Layer() for call in module._calls})
            module.instead = partial(_by_layer, module.nodes)
    return network


def _by_layer(nodes: nn.ModuleDict, call: OperatorCall, inputs: list[Any]) -> Any:
    return nodes[_module_name(call.outputs[0])](call, inputs)


def _module_name(output: str) -> str:
    name = output.strip("/").replace(".", "_").replace("/", "_") or "node"
    return f"{name}_" if hasattr(nn.ModuleDict, name) else name  # A ModuleDict refuses such a name.


class OnnxGraph(nn.Module):
    """The graph of an ONNX file in two parts, each an OnnxPart.

    `core`: everything up to the last convolutions and matrix products, which may be cast. `tail`: the nodes after them,
    such as the decoding of boxes. It stays float32: coordinates of hundreds of pixels do not fit shorter types.
    """

    def __init__(self, file: OnnxFile, name: str) -> None:
        super().__init__()
        unknown = sorted({node.operator for node in file.nodes} - OPERATORS.keys() - {"Constant", "Upsample"})
        if unknown:
            raise WeightsError(
                f"{name} uses operators that are not known here: {', '.join(unknown)}. Export the network with others "
                "(quantised: in the QDQ form; torchvision's detectors: of one image, ([image],), with dynamo=False), "
                f"or {for_openvino(name)}."
            )
        file = replace(file, nodes=todays(file, name))
        self.file_name = name
        inputs = tuple(value.name for value in file.inputs)
        outputs = tuple(value.name for value in file.outputs)
        known: dict[str, Any] = {"": None, **{key: _constant(array) for key, array in file.constants.items()}}
        nodes = [node for node in _sorted(file, known, name) if not self._folded(node, known)]
        makers = {each: node for node in nodes for each in node.outputs}
        nodes = [in_pairs(node, makers, known) if node.operator == "Pad" else node for node in nodes]
        needed = set(outputs)
        for node in reversed(nodes):
            if needed.intersection(node.outputs):
                needed.update(node.inputs)
        nodes = [_with_numbers(node, known) for node in nodes if needed.intersection(node.outputs)]
        heads, tails = _parted(nodes)
        made = {each for node in heads for each in node.outputs} | set(inputs)
        border = sorted(made & ({each for node in tails for each in node.inputs} | set(outputs)))
        self.core = OnnxPart(name, heads, known, inputs, border)
        held = {id(each) for each in self.core.buffers()}  # The tail has its own copies of shared buffers.
        for key in {each for node in tails for each in node.inputs} | set(outputs):
            value = known.get(key)
            if isinstance(value, Tensor) and id(value) in held:
                known[key] = value.clone()
        self.tail = OnnxPart(name, tails, known, border, outputs)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Compute the outputs, in the file's order. Raises WeightsError for an operator's form that is not computed."""
        values = self.core(*tensors)
        values = [each.float() if torch.is_tensor(each) and each.is_floating_point() else each for each in values]
        found: tuple[Tensor, ...] = self.tail(*values)
        return found

    def _folded(self, node: Node, known: dict[str, Any]) -> bool:
        """Compute a node of constants and add its outputs to `known`; False for any other node. Raises WeightsError."""
        if node.operator == "Constant":
            known[node.outputs[0]] = _constant_of(node)
            return True
        if not all(name in known for name in node.inputs) or node.operator == "NonMaxSuppression":
            return False
        if node.operator in ("ConstantOfShape", "Expand", "Tile", "Range", "Pad", "Resize"):
            numbers = [abs(int(each)) for name in node.inputs for each in _few(known[name])]
            if int(np.prod([max(1, each) for each in numbers], dtype=object)) * 4 > _MAX_CONSTANT_BYTES:
                raise WeightsError(f"{self.file_name} has a {node.operator} that asks for too much memory.")
        try:
            with torch.no_grad():
                found = OPERATORS[node.operator]([known[name] for name in node.inputs], _attributes(node))
        except Exception as error:
            raise WeightsError(f"{self.file_name} has a {node.operator} that cannot be computed: {error}.") from error
        results = found if isinstance(found, tuple) else (found,)
        known.update(zip(node.outputs, results, strict=False))
        return True


def load_onnx(path: Path, given: Mapping[str, Array] = MappingProxyType({})) -> tuple[OnnxGraph, OnnxFile]:
    """Load the module of a file, and the file, with the inputs of `given` as constants. Raises WeightsError."""
    file = read_onnx(path).with_constants(given)
    file = as_detector(file) or file
    return OnnxGraph(file, path.name).eval().requires_grad_(False), file


def _sorted(file: OnnxFile, known: Mapping[str, Any], file_name: str) -> list[Node]:
    """Return the nodes in an order of computation, which is not always the file's. Raises WeightsError."""
    there = {*known, *(value.name for value in file.inputs)}
    missing = {place: {name for name in node.inputs if name not in there} for place, node in enumerate(file.nodes)}
    users: dict[str, list[int]] = {}
    for place, names in missing.items():
        for name in names:
            users.setdefault(name, []).append(place)
    ready = [place for place in missing if not missing[place]]
    heapq.heapify(ready)
    nodes = []
    while ready:
        node = file.nodes[heapq.heappop(ready)]
        nodes.append(node)
        for name in node.outputs:
            for place in users.pop(name, ()):
                missing[place].discard(name)
                if not missing[place]:
                    heapq.heappush(ready, place)
    if len(nodes) < len(file.nodes):
        name = next(name for names in missing.values() for name in sorted(names))
        raise WeightsError(f"{file_name} uses {name!r}, which is never computed.")
    computed = {name for node in nodes for name in node.outputs}
    if unset := {value.name for value in file.outputs} - there - computed:
        raise WeightsError(f"{file_name} never computes its output {min(unset)!r}.")
    return nodes


def _parted(nodes: Sequence[Node]) -> tuple[list[Node], list[Node]]:
    """Split nodes into those that are, or precede, a layer with weights; and all others."""
    leading: set[str] = set()
    heads, tails = [], []
    for node in reversed(nodes):
        if node.operator in _HEAVY or leading.intersection(node.outputs):
            leading.update(node.inputs)
            heads.append(node)
        else:
            tails.append(node)
    return heads[::-1], tails[::-1]


def _with_numbers(node: Node, known: dict[str, Any]) -> Node:
    """Give an operator its constant numbers on the host: tracers and device graphs do not read them from tensors."""
    inputs = list(node.inputs)
    for place in _NUMBERS.get(node.operator, ()):
        if place < len(inputs) and isinstance(value := known.get(inputs[place]), Tensor):
            inputs[place] = f"numbers of {inputs[place]}"
            known[inputs[place]] = as_numbers(value)
    return replace(node, inputs=tuple(inputs))


def _planned(nodes: Sequence[Node], kept: set[str]) -> tuple[OperatorCall, ...]:
    last = {name: place for place, node in enumerate(nodes) for name in (*node.inputs, *node.outputs)}
    calls = []
    for place, node in enumerate(nodes):
        set_by_it = node.outputs if node.operator in SEVERAL else node.outputs[:1]
        frees = tuple({name for name in (*node.inputs, *set_by_it) if last[name] == place and name not in kept})
        calls.append(OperatorCall(node.operator, node.inputs, node.outputs, _attributes(node), frees=frees))
    return tuple(calls)


def _freed(tensor: Tensor, shape: list[Any]) -> list[Any]:
    if len(shape) < 2 or not isinstance(shape[0], int) or shape[0] != 1:
        return shape
    return [tensor.shape[0] if -1 in shape[1:] else -1, *shape[1:]]


def _attributes(node: Node) -> dict[str, Any]:
    arrays = {name: _constant(value) for name, value in node.attributes.items() if isinstance(value, np.ndarray)}
    return {**node.attributes, **arrays, "outputs": len(node.outputs)}


def _constant_of(node: Node) -> Any:
    for name, value in node.attributes.items():
        if name == "value" and value is not None:  # A damaged file may leave it out.
            return _constant(value)
        if name in ("value_int", "value_ints"):
            return value
        if name in ("value_float", "value_floats"):
            return torch.tensor(value, dtype=torch.float32)
    return None


# Types with which PyTorch computes little, and those with their numbers.
_SIGNED = {np.dtype(np.uint16): np.int32, np.dtype(np.uint32): np.int64, np.dtype(np.uint64): np.int64}


def _constant(array: np.ndarray[Any, np.dtype[Any]]) -> Any:
    if array.dtype in (np.int64, np.int32) and array.ndim <= 1 and array.size <= 64:
        return array.tolist()
    if array.dtype in (np.float16, np.float64):
        array = array.astype(np.float32)
    if array.dtype in _SIGNED:
        array = array.astype(_SIGNED[array.dtype])
    return torch.from_numpy(np.array(array))  # A copy: the file's bytes must not be written to, nor kept.


def _few(value: Any) -> list[Any]:
    if isinstance(value, Tensor) and (value.numel() > 16 or value.is_floating_point()):
        return [value.numel()]
    return [] if value is None else as_numbers(value)
