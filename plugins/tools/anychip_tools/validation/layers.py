"""Layers of a network, as torch.export's graph of operators has them, and their values one by one."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from backends.contract.backend import Array
from backends.operators import Operators
from models.exports.networks import unchecked_module
from models.onnx.graph import with_named_nodes

# The largest relative error of one layer on the inputs of the reference, by precision. Rounding of the result alone is
# 2^-11 in fp16 and 2^-8 in bf16; convolutions in TF32, which NVIDIA's cards use for float32, round to 2^-11.
LAYER_LIMITS = {"fp32": 2e-3, "fp16": 5e-3, "bf16": 2e-2, "int8": 0.2}
TOLERANCES = {"fp32": 1e-3, "fp16": 1e-2, "bf16": 5e-2, "int8": 0.2}
"""Tolerances by precision: an element is within if its error is below this part of its output's spread."""

# Operators that only copy, view or cast: they cannot be wrong, and not every precision's graph has them.
_PLAIN = ("_to_copy", "alias", "detach", "clone", "to", "contiguous", "lift_fresh_copy")


@dataclass(frozen=True)
class Difference:
    """Errors over all floating point elements. `relative`: norm of the error by norm of the truth; `cosine`: of both;
    `within`: share of elements within the tolerance. Infinite where shapes or the places of NaN differ.
    """

    max_abs: float
    mean_abs: float
    relative: float
    cosine: float
    within: float


NOWHERE = Difference(float("inf"), float("inf"), float("inf"), 0.0, 0.0)
EQUAL = Difference(0.0, 0.0, 0.0, 1.0, 1.0)


def difference(expected: Sequence[Array], given: Sequence[Array], tolerance: float) -> Difference:
    """Compare several outputs together; leave whole numbers to the measures that know their meaning."""
    if [each.shape for each in expected] != [each.shape for each in given]:
        return NOWHERE
    parts = []
    for one, other in zip(expected, given, strict=True):
        if one.dtype.kind != "f":
            continue
        wanted, have = one.astype(np.float64).reshape(-1), other.astype(np.float64).reshape(-1)
        finite = np.isfinite(wanted) & np.isfinite(have)
        if not np.array_equal(wanted[~finite], have[~finite], equal_nan=True):
            return NOWHERE
        wanted, have = wanted[finite], have[finite]
        spread = max(float(wanted.std()), 1e-12) if wanted.size else 1.0
        parts.append((wanted, have, np.abs(wanted - have) <= tolerance * spread))
    if not any(wanted.size for wanted, _, _ in parts):
        return EQUAL
    wanted, have, good = (np.concatenate(each) for each in zip(*parts, strict=True))
    errors = np.abs(wanted - have)
    error, truth, norm = (float(np.linalg.norm(each)) for each in (errors, wanted, have))
    relative = error / truth if truth else (float("inf") if error else 0.0)
    cosine = float(wanted @ have) / (truth * norm) if truth and norm else float(error == 0)
    return Difference(float(errors.max()), float(errors.mean()), relative, cosine, float(good.mean()))


class LayerTracingError(Exception):
    """Failure to take a network apart; the message says why."""


@dataclass(frozen=True)
class Layer:
    """Result of one operator. `name`: of the graph's node; `path`: of the module it belongs to, empty if unknown."""

    name: str
    path: str
    operator: str

    @property
    def title(self) -> str:
        """Place of the layer in the model, and its operator."""
        return f"{self.path} ({self.operator})" if self.path else f"{self.name} ({self.operator})"


@dataclass(frozen=True)
class LayerError:
    """Errors of a layer. `alone`: its own, on the reference's inputs; `sum`: with those of all layers before it."""

    layer: Layer
    alone: Difference
    sum: Difference


class TracedNetwork:
    """Network of `batch` items, traced in each precision that is asked for."""

    def __init__(self, build: Callable[[], Any], input_shape: tuple[int, ...], batch: int = 2) -> None:
        """Trace the network that `build` makes, in float32 on the CPU. Raises LayerTracingError."""
        self.input_shape, self.batch = input_shape, batch
        self._build = build
        self._graphs: dict[torch.dtype, GraphModule] = {}
        self.layers = tuple(self._layers(self.graph(torch.float32)))
        if not self.layers:
            raise LayerTracingError("it has no layer with numbers in it")

    def graph(self, dtype: torch.dtype) -> GraphModule:
        """Trace the network's operators, on the CPU, with weights of this type. Raises LayerTracingError."""
        if dtype not in self._graphs:
            network: Any = with_named_nodes(self._build())
            if dtype is not torch.float32:
                network.cast(dtype)
            self._graphs[dtype] = self._traced(network)
        return self._graphs[dtype]

    def values(self, items: Array) -> dict[str, Tensor]:
        """Return every operator's result in float32 on the CPU, by its node's name."""
        keeping = torch.fx.Interpreter(self.graph(torch.float32), garbage_collect_values=False)
        with torch.no_grad():
            keeping.run(torch.from_numpy(items))
        operators = ((node.name, value) for node, value in keeping.env.items() if node.op == "call_function")
        return {name: value for name, value in operators if isinstance(value, Tensor)}

    def errors(self, items: Array, dtype: torch.dtype, device: torch.device, tolerance: float) -> list[LayerError]:
        """Compare each layer on a device with float32 on the CPU, in order of computation."""
        expected = self.values(items)
        graph = moved(copy.deepcopy(self.graph(dtype)), device)

        def compared() -> _Comparison:
            comparison = _Comparison(graph, expected, device, tolerance)
            with torch.no_grad():
                comparison.run(torch.from_numpy(items).to(device))
            return comparison

        # Operators that the device lacks are replaced as for models that are served.
        comparison = compared() if device.type == "cpu" else Operators(device.type).completed(compared)
        layers = {layer.name: layer for layer in self.layers}
        return [LayerError(layers[name], *found) for name, found in comparison.found.items() if name in layers]

    def _traced(self, network: nn.Module) -> GraphModule:
        example = (torch.zeros((self.batch, *self.input_shape), dtype=torch.uint8),)
        automatic = getattr(torch.export.Dim, "AUTO", None)
        attempts: list[Any] = [({0: automatic},)] if automatic is not None and self.batch > 1 else []
        reason = ""
        for shapes in (*attempts, None):
            try:
                # What it could trace of a network that it cannot, torch prints on stderr: hundreds of lines.
                with warnings.catch_warnings(), torch.no_grad(), redirect_stderr(io.StringIO()):
                    warnings.simplefilter("ignore")
                    program = torch.export.export(network, example, dynamic_shapes=shapes, strict=False)
                    return cast(GraphModule, unchecked_module(program.run_decompositions({})))
            except Exception as error:  # Tracing runs code of the model's author.
                reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
        raise LayerTracingError(f"PyTorch cannot trace it: {reason}")

    def _layers(self, graph: GraphModule) -> Iterator[Layer]:
        for node in graph.graph.nodes:
            value = node.meta.get("val")
            if node.op != "call_function" or not isinstance(value, Tensor) or not value.is_floating_point():
                continue
            operator = _operator_of(node)
            if operator not in _PLAIN:
                yield Layer(node.name, _path(node), operator)


class _Comparison(torch.fx.Interpreter):
    """Interpreter that runs a graph as it is, and each node once more on the reference's inputs."""

    def __init__(
        self, graph: GraphModule, expected: Mapping[str, Tensor], device: torch.device, tolerance: float
    ) -> None:
        super().__init__(graph)
        self.found: dict[str, tuple[Difference, Difference]] = {}
        self._expected, self._device, self._tolerance = expected, device, tolerance
        self._clean: dict[Node, Any] = {}

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        self._clean[n] = result if n.op != "call_function" else self._compared(n, result)
        for last_used in self.user_to_last_uses.get(n, ()):
            self._clean.pop(last_used, None)
        return result

    def _compared(self, n: Node, result: Any) -> Any:
        """Return the value on which the next nodes are tried: the reference's, if there is one."""
        args, kwargs = torch.fx.map_arg((n.args, n.kwargs), lambda node: self._clean[node])
        alone = n.target(*args, **kwargs)  # type: ignore[operator]
        expected = self._expected.get(n.name)
        comparable = expected is not None and isinstance(alone, Tensor) and expected.shape == alone.shape
        if not comparable or _operator_of(n) in _PLAIN:
            return alone
        assert expected is not None
        if expected.is_floating_point():
            truth = [expected.float().numpy()]
            self.found[n.name] = (
                difference(truth, [alone.float().cpu().numpy()], self._tolerance),
                difference(truth, [result.float().cpu().numpy()], self._tolerance),
            )
        return expected.to(self._device, alone.dtype)


def moved(graph: GraphModule, device: torch.device) -> GraphModule:
    """Move the graph to a device, and the tensors that it makes itself."""
    device = torch.device("cpu") if device.type == "cpu" else device
    for node in graph.graph.nodes:
        if node.op == "call_function":
            node.args = pytree.tree_map(lambda v: device if isinstance(v, torch.device) else v, node.args)
            node.kwargs = pytree.tree_map(lambda v: device if isinstance(v, torch.device) else v, node.kwargs)
    graph.recompile()
    placed: GraphModule = graph.to(device)
    for name, value in list(vars(placed).items()):  # Constants are neither parameters nor buffers.
        if isinstance(value, Tensor):
            setattr(placed, name, value.to(device))
    return placed


def _operator_of(node: Node) -> str:
    packet = getattr(node.target, "overloadpacket", None)
    return str(packet.__name__ if packet is not None else getattr(node.target, "__name__", node.target))


def _path(node: Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    paths = [entry[0] for entry in stack.values() if entry[0]]
    return str(paths[-1]).replace("L['self'].", "") if paths else ""
