"""ONNX file of tensors: the values of each of its nodes, and the same file cut after any of them.

Owns: reading, widening and cutting such files (the onnx package). Must not know engines or limits.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from anychip_base.extras import how_to_install
from anychip_tools.validation.difference import Difference, difference
from anychip_tools.validation.traced import Layer, LayerTracingError
from models import TensorModel, TensorSpec
from models.exports.networks import GraphNetwork, load_graph

Array = npt.NDArray[Any]
_FLOATS = {1: "FP32", 10: "FP16", 11: "FP64"}  # Type numbers of TensorProto.


class OnnxLayers:
    """Nodes of an ONNX file, as layers named by their outputs, with their values in ONNX Runtime on the CPU.

    ONNX Runtime runs the file as it is written, without optimising it: that is the reference.
    """

    def __init__(self, model: TensorModel, folder: Path) -> None:
        """Read the model's file. `folder`: for the files that are made. Raises LayerTracingError."""
        try:
            import onnx
            import onnxruntime
        except ImportError as error:
            raise LayerTracingError(f"ONNX files are taken apart with onnx: {how_to_install('onnx')}") from error
        assert model.weights_file is not None
        self._onnx, self._runtime = onnx, onnxruntime
        self._model, self._folder = model, folder
        self._proto = onnx.shape_inference.infer_shapes(onnx.load(model.weights_file))
        graph = self._proto.graph
        known = [*graph.value_info, *graph.output]
        self._types = {value.name: value.type.tensor_type.elem_type for value in known}
        self.layers = tuple(
            Layer(output, output, node.op_type)
            for node in graph.node
            for output in node.output[:1]
            if self._types.get(output) in _FLOATS
        )
        if not self.layers:
            raise LayerTracingError("it has no layer whose type onnx can tell")

    def values(self, items: Array) -> dict[str, Array]:
        """Return every layer's values for items, uint8 [n, bytes of an item]."""
        names = [layer.name for layer in self.layers]
        file = self._written(names, "all.onnx", cut=False)
        options = self._runtime.SessionOptions()
        options.graph_optimization_level = self._runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 4
        session = self._runtime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        unpacked = self._model.unpack(items)
        arrays = [np.ascontiguousarray(each if self._model.batched else each[0]) for each in unpacked]
        feeds = dict(zip((spec.name for spec in self._model.inputs), arrays, strict=True))
        return dict(zip(names, session.run(names, feeds), strict=True))

    def prefix(self, layer: Layer) -> GraphNetwork:
        """Return the network that ends with this layer. Raises LayerTracingError."""
        file = self._written([layer.name], f"prefix{self.layers.index(layer)}.onnx", cut=True)
        result = TensorSpec(layer.name, _FLOATS[self._types[layer.name]], ())
        model = replace(self._model, results=(result,), weights_file=str(file))
        return GraphNetwork(model, load_graph(str(file), "onnx"), "onnx", str(file))

    def _written(self, names: list[str], file_name: str, *, cut: bool) -> Path:
        onnx = self._onnx
        proto = onnx.ModelProto()
        proto.CopyFrom(self._proto)
        if cut:
            wanted, kept = set(names), []
            for node in reversed(self._proto.graph.node):
                if wanted.intersection(node.output):
                    wanted.update(node.input)
                    kept.append(node)
            del proto.graph.node[:]
            proto.graph.node.extend(reversed(kept))
            del proto.graph.output[:]
            weights = [each for each in proto.graph.initializer if each.name in wanted]
            del proto.graph.initializer[:]
            proto.graph.initializer.extend(weights)
            del proto.graph.value_info[:]
        there = {each.name for each in proto.graph.output}
        proto.graph.output.extend(
            onnx.helper.make_tensor_value_info(name, self._types[name], None) for name in names if name not in there
        )
        target = self._folder / file_name
        onnx.save(proto, str(target))
        return target


def file_errors(
    reference: OnnxLayers, other: OnnxLayers, items: Array, tolerance: float
) -> list[tuple[Layer, Difference]]:
    """Compare each layer of one file with the layer of the same output in another; leave out unmatched layers."""
    expected, given = reference.values(items), other.values(items)
    return [
        (layer, difference([expected[layer.name]], [given[layer.name]], tolerance))
        for layer in reference.layers
        if layer.name in given
    ]
