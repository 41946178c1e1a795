"""An ONNX file as a PyTorch module, so that it runs wherever PyTorch does: every device and every engine.

    file ─► models.onnx_file ─► nodes ─► one call of models.onnx_operators each ─► tensors

Owns: the order of calls and which weights they get. Nodes that depend on weights alone are computed once. Must not know
what the outputs mean. Operators that are not known are all named in one error before anything is computed.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import models.onnx_layers  # noqa: F401  # Registers its operators.
from models.model import WeightsError
from models.onnx_file import Node, OnnxFile, read_onnx
from models.onnx_operators import OPERATORS, UnsupportedError, is_host

_MAX_CONSTANT_BYTES = 1 << 30  # Of what constants alone are computed to: a file of a few bytes may ask for any size.


@dataclass(frozen=True)
class _Call:
    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    frees: tuple[str, ...]  # Values that nobody needs afterwards.


class OnnxModule(nn.Module):
    """The graph of an ONNX file. Weights are buffers; halves of the file are float32 until the module is cast."""

    def __init__(self, file: OnnxFile, name: str) -> None:
        """`name`: what errors call the file. Raises WeightsError."""
        super().__init__()
        unknown = sorted({node.operator for node in file.nodes} - OPERATORS.keys() - {"Constant"})
        if unknown:
            raise WeightsError(f"{name} uses operators that are not known here: {', '.join(unknown)}.")
        if file.opset < 9:
            raise WeightsError(f"{name} is of ONNX opset {file.opset}; 9 and later are read.")
        self.file_name = name
        self.input_names = tuple(value.name for value in file.inputs)
        self.output_names = tuple(value.name for value in file.outputs)
        self._host: dict[str, Any] = {}  # Constants that stay numbers of the host.
        self._buffers_of: dict[str, str] = {}
        known: dict[str, Any] = {"": None}
        for key, array in file.constants.items():
            known[key] = _constant(array)
        nodes = self._sorted(file, known)
        remaining = [node for node in nodes if not self._folded(node, known)]
        needed = self._needed(remaining)
        self._calls = self._planned([node for node in remaining if needed.intersection(node.outputs)], known)
        wanted = {each for call in self._calls for each in call.inputs} | set(self.output_names)
        for number, key in enumerate(sorted(wanted & known.keys())):
            value = known[key]
            if isinstance(value, Tensor):
                self._buffers_of[key] = f"constant_{number}"
                self.register_buffer(f"constant_{number}", value.contiguous())
            else:
                self._host[key] = value

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The outputs, in the file's order. Raises WeightsError where an operator has a form that is not computed."""
        values: dict[str, Any] = dict(self._host)
        for key, attribute in self._buffers_of.items():
            values[key] = getattr(self, attribute)
        values.update(zip(self.input_names, tensors, strict=True))
        for call in self._calls:
            inputs = [values[name] for name in call.inputs]
            try:
                found = OPERATORS[call.operator](inputs, call.attributes)
            except UnsupportedError as error:
                raise WeightsError(f"{self.file_name} uses {error}, which is not computed here.") from error
            if isinstance(found, tuple):
                values.update(zip(call.outputs, found, strict=False))
            else:
                values[call.outputs[0]] = found
            for name in call.frees:
                del values[name]
        return tuple(values[name] for name in self.output_names)

    def _folded(self, node: Node, known: dict[str, Any]) -> bool:
        """Whether the node's outputs are constants; then they are known from here on. Raises WeightsError."""
        if node.operator == "Constant":
            known[node.outputs[0]] = _constant_of(node)
            return True
        if not all(name in known for name in node.inputs) or node.operator == "NonMaxSuppression":
            return False
        self._check_size(node, known)
        try:
            with torch.no_grad():
                found = OPERATORS[node.operator]([known[name] for name in node.inputs], _attributes(node))
        except Exception as error:
            raise WeightsError(f"{self.file_name} has a {node.operator} that cannot be computed: {error}.") from error
        results = found if isinstance(found, tuple) else (found,)
        known.update(zip(node.outputs, results, strict=False))
        return True

    def _check_size(self, node: Node, known: Mapping[str, Any]) -> None:
        if node.operator in ("ConstantOfShape", "Expand", "Tile", "Range", "Pad", "Resize"):
            numbers = [abs(int(each)) for name in node.inputs for each in _few(known[name])]
            if int(np.prod([max(1, each) for each in numbers], dtype=object)) * 4 > _MAX_CONSTANT_BYTES:
                raise WeightsError(f"{self.file_name} has a {node.operator} that asks for too much memory.")

    def _needed(self, nodes: list[Node]) -> set[str]:
        needed = set(self.output_names)
        for node in reversed(nodes):
            if needed.intersection(node.outputs):
                needed.update(node.inputs)
        return needed

    def _sorted(self, file: OnnxFile, known: Mapping[str, Any]) -> list[Node]:
        """The nodes in an order of computation, which is not always the file's. Raises WeightsError."""
        there = {*known, *self.input_names}
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
            raise WeightsError(f"{self.file_name} uses {name!r}, which is never computed.")
        if unset := set(self.output_names) - there - {name for node in nodes for name in node.outputs}:
            raise WeightsError(f"{self.file_name} never computes its output {min(unset)!r}.")
        return nodes

    def _planned(self, nodes: list[Node], known: Mapping[str, Any]) -> tuple[_Call, ...]:
        last: dict[str, int] = {}
        for place, node in enumerate(nodes):
            for name in (*node.inputs, *node.outputs):
                last[name] = place
        kept = {*known, *self.output_names}
        return tuple(
            _Call(
                node.operator,
                node.inputs,
                node.outputs,
                _attributes(node),
                tuple({n for n in (*node.inputs, *_given(node)) if last[n] == place and n not in kept}),
            )
            for place, node in enumerate(nodes)
        )


def load_onnx(path: Path) -> tuple[OnnxModule, OnnxFile]:
    """The module of a file, and the file. Raises WeightsError."""
    file = read_onnx(path)
    return OnnxModule(file, path.name).eval().requires_grad_(False), file


def _given(node: Node) -> tuple[str, ...]:
    """Outputs that the operator surely sets."""
    return node.outputs if node.operator in ("Split", "TopK") else node.outputs[:1]


def _attributes(node: Node) -> dict[str, Any]:
    attributes = {
        name: torch.from_numpy(np.array(value)) if isinstance(value, np.ndarray) else value
        for name, value in node.attributes.items()
    }
    attributes["outputs"] = len(node.outputs)
    return attributes


def _constant_of(node: Node) -> Any:
    for name, value in node.attributes.items():
        if name == "value":
            return _constant(value)
        if name in ("value_int", "value_ints"):
            return value
        if name in ("value_float", "value_floats"):
            return torch.tensor(value, dtype=torch.float32)
    return None


def _constant(array: np.ndarray[Any, np.dtype[Any]]) -> Any:
    if array.dtype in (np.int64, np.int32) and array.ndim <= 1 and array.size <= 64:
        return array.tolist()
    if array.dtype in (np.float16, np.float64):
        array = array.astype(np.float32)
    if array.dtype in (np.uint16, np.uint32, np.uint64):
        array = array.astype(np.int64)
    return torch.from_numpy(np.array(array))  # A copy: the file's bytes are not to be written to, nor to stay.


def _few(value: Any) -> list[Any]:
    """Numbers of a value where it is a shape or factors; of a large tensor its number of elements."""
    if value is None:
        return []
    if is_host(value):
        return value if isinstance(value, list) else [value]
    return value.reshape(-1).tolist() if value.numel() <= 16 and not value.is_floating_point() else [value.numel()]
