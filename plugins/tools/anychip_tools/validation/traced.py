"""Network as a graph of its operators: its values layer by layer, and the same network cut after any layer.

Owns: tracing (torch.export) and cutting. Must not know engines or limits.
"""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass
from typing import Any, cast

import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from anychip_tools.validation.difference import Difference, difference
from backends.operators.operators import Operators
from models.exports.networks import unchecked_module
from models.onnx.graph import with_named_nodes

Array = npt.NDArray[Any]
# Operators that only copy, view or cast: they cannot be wrong, and not every precision's graph has them.
_PLAIN = ("_to_copy", "alias", "detach", "clone", "to", "contiguous", "lift_fresh_copy")


class LayerTracingError(Exception):
    """Failure to take a network apart; the message says why."""


@dataclass(frozen=True)
class Layer:
    """Result of one operator. `name`: of the graph's node; `path`: of the module it belongs to, empty if unknown.

    `ends_batch`: True if a network may end there: the result has a row for each item.
    """

    name: str
    path: str
    operator: str
    ends_batch: bool = True

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
        self._rows: set[str] = {str(batch)}
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
        recorder = _Kept(self.graph(torch.float32))
        with torch.no_grad():
            recorder.run(torch.from_numpy(items))
        return recorder.kept

    def errors(
        self, items: Array, dtype: torch.dtype, device: torch.device, tolerance: float, *, truth: TracedNetwork
    ) -> list[LayerError]:
        """Compare each layer on a device with float32 on the CPU, in order of computation. `truth`: reference."""
        expected = truth.values(items)
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

    def prefix(self, layer: Layer) -> PrefixNetwork:
        """Return the network that ends with this layer: its one output is [batch, numbers], float32."""
        return PrefixNetwork(self, layer.name)

    def cut(self, dtype: torch.dtype, name: str) -> GraphModule:
        """Cut the graph after a node. Raises LayerTracingError if this precision's graph has no such node."""
        whole = self.graph(dtype)
        graph, copies = Graph(), cast(dict[Node, Node], {})
        graph.graph_copy(whole.graph, copies)
        found = next((made for node, made in copies.items() if node.name == name), None)
        if found is None:
            raise LayerTracingError(f"there is no {name} in {dtype}")
        graph.output(found)
        graph.eliminate_dead_code()
        return GraphModule(whole, graph)

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
            if node.op == "placeholder" and isinstance(value, Tensor) and value.dtype is torch.uint8:
                self._rows.add(str(value.shape[0]))  # A symbol, where the batch may vary.
            if node.op != "call_function" or not isinstance(value, Tensor) or not value.is_floating_point():
                continue
            operator = _operator_of(node)
            if operator not in _PLAIN:
                ends_batch = bool(value.ndim) and str(value.shape[0]) in self._rows
                yield Layer(node.name, _path(node), operator, ends_batch)


class PrefixNetwork(nn.Module):
    """Network up to one of its layers, for backends to load."""

    def __init__(self, traced: TracedNetwork, name: str) -> None:
        super().__init__()
        self.input_shape = traced.input_shape
        self._cut: Callable[[torch.dtype], GraphModule] = lambda dtype: traced.cut(dtype, name)
        self._dtype = torch.float32
        self.core = self._cut(torch.float32)

    def cast(self, dtype: torch.dtype) -> PrefixNetwork:
        """Trace and cut again in this precision."""
        if dtype is not self._dtype:
            self.core, self._dtype = self._cut(dtype), dtype
        return self

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Move the module and the tensors that the graph makes itself."""
        device = torch._C._nn._parse_to(*args, **kwargs)[0]
        if device is not None:
            self.core = moved(self.core, device)
        return super().to(*args, **kwargs)

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        """Compute uint8 [n, *input_shape] -> float32 [n, numbers]."""
        return (self.core(pixels).to(torch.float32).flatten(1),)


class _Kept(torch.fx.Interpreter):
    """Interpreter that keeps every node's result."""

    def __init__(self, graph: GraphModule) -> None:
        super().__init__(graph)
        self.kept: dict[str, Tensor] = {}

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor) and n.op == "call_function":
            self.kept[n.name] = result
        return result


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
