"""Conversion of OpenVINO's layers to ONNX's operators of models.onnx.operators: one graph for devices and engines.

    best.xml ─► file.py ─► layers ─► nodes and constants, as models.onnx.file has them of an ONNX file

Owns: each layer's form in ONNX. One error names all layers, or forms of layers, that are not known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from anychip_compat.openvino.file import DTYPES, InvalidError, OpenVinoLayer, read_layers
from models.contract.errors import WeightsError
from models.contract.model import Array
from models.onnx.file import Length, Node, OnnxFile, Value

_OPSET = 18
_GREATEST = 2**31 - 1
_PADDINGS = {
    "explicit": "NOTSET",
    "": "NOTSET",
    "valid": "VALID",
    "same_upper": "SAME_UPPER",
    "same_lower": "SAME_LOWER",
}
_GELU = {"TANH": "tanh"}
_SAME = {
    "Add": "Add",
    "Subtract": "Sub",
    "Multiply": "Mul",
    "Divide": "Div",
    "Power": "Pow",
    "FloorMod": "Mod",
    "Maximum": "Max",
    "Minimum": "Min",
    "Equal": "Equal",
    "Greater": "Greater",
    "GreaterEqual": "GreaterOrEqual",
    "Less": "Less",
    "LessEqual": "LessOrEqual",
    "LogicalAnd": "And",
    "LogicalOr": "Or",
    "LogicalXor": "Xor",
    "LogicalNot": "Not",
    "Select": "Where",
    "Negative": "Neg",
    "ReLU": "Relu",
    "SoftPlus": "Softplus",
    "HSwish": "HardSwish",
    "Ceiling": "Ceil",
    "ShapeOf": "Shape",
    "Unsqueeze": "Unsqueeze",
    "Squeeze": "Squeeze",
    "Range": "Range",
    "NonZero": "NonZero",
    "ScatterNDUpdate": "ScatterND",
    "Tile": "Tile",
    **dict.fromkeys(
        ("Sigmoid", "Tanh", "Exp", "Log", "Sqrt", "Abs", "Erf", "Floor", "Sin", "Cos", "Atan", "Sign", "Mish"), ""
    ),
}
"""ONNX operator of each layer that needs no attributes; "" for the same name."""

_Attributes = Callable[[OpenVinoLayer], dict[str, Any]]
_WITH_ATTRIBUTES: dict[str, tuple[str, _Attributes]] = {
    "HSigmoid": ("HardSigmoid", lambda layer: {"alpha": 1 / 6, "beta": 0.5}),
    "Gelu": (
        "Gelu",
        lambda layer: {"approximate": _GELU.get(layer.data.get("approximation_mode", "").upper(), "none")},
    ),
    "Clamp": ("Clip", lambda layer: {name: float(layer.data[name]) for name in ("min", "max")}),
    "Mod": ("Mod", lambda layer: {"fmod": 1}),
    "FakeQuantize": ("FakeQuantize", lambda layer: {"levels": layer.numbers("levels")[0]}),
    "Reshape": ("Reshape", lambda layer: {"allowzero": int(not layer.flag("special_zero"))}),
    **{
        kind: (name, lambda layer: {"axis": layer.numbers("axis", "1")[0]})
        for kind, name in (
            ("Concat", "Concat"),
            ("SoftMax", "Softmax"),
            ("LogSoftmax", "LogSoftmax"),
            ("GatherElements", "GatherElements"),
        )
    },
    **{
        kind: (kind, lambda layer: {"keepdims": int(layer.flag("keep_dims"))})
        for kind in ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2")
    },
}
"""ONNX operator of each layer, with a function that makes its attributes from the layer's."""

_CASTS = {
    **dict.fromkeys(("f32", "f16", "bf16"), 1),
    "f64": 11,
    "u8": 2,
    "i8": 3,
    "i16": 5,
    "i32": 6,
    **dict.fromkeys(("i64", "u32", "u64"), 7),
    "boolean": 9,
}
"""ONNX type of each OpenVINO type. Halves become float32, as everywhere: the engine chooses the precision."""


class _Graph:
    """Nodes and constants written so far."""

    def __init__(self, constants: dict[str, Array]) -> None:
        self.constants = constants
        self.nodes: list[Node] = []

    def add(self, operator: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> None:
        """Add one node."""
        self.nodes.append(Node(operator, tuple(inputs), tuple(outputs), attributes, outputs[0]))

    def constant(self, layer: OpenVinoLayer, suffix: str, value: Array) -> str:
        """Add a constant and return its name."""
        name = f"{layer.name}/{suffix}"
        self.constants[name] = value
        return name

    def known(self, layer: OpenVinoLayer, place: int) -> list[int]:
        """Return the integers of an input that must be a constant. Raises InvalidError."""
        found = self.constants.get(layer.inputs[place])
        if found is None:
            raise InvalidError(f"has a {layer.kind} whose input {place} is computed")
        return [int(each) for each in found.reshape(-1)]


_Writer = Callable[[_Graph, OpenVinoLayer], None]
_WRITERS: dict[str, _Writer] = {}


def _layer(*kinds: str) -> Callable[[_Writer], _Writer]:
    def register(function: _Writer) -> _Writer:
        _WRITERS.update(dict.fromkeys(kinds, function))
        return function

    return register


def _refuse(layer: OpenVinoLayer, what: str) -> NoReturn:
    raise InvalidError(f"has a {layer.kind} {what}, which is not computed here")


def _window(layer: OpenVinoLayer) -> dict[str, Any]:
    mode = _PADDINGS.get(layer.data.get("auto_pad", ""))
    if mode is None:
        _refuse(layer, f"of padding {layer.data['auto_pad'][:30]}")
    return {
        "strides": layer.numbers("strides"),
        "dilations": layer.numbers("dilations") or [1] * len(layer.numbers("strides")),
        "pads": layer.numbers("pads_begin") + layer.numbers("pads_end"),
        "auto_pad": mode,
    }


@_layer("Convolution", "ConvolutionBackpropData")
def _convolution(graph: _Graph, layer: OpenVinoLayer) -> None:
    _convolve(graph, layer, layer.inputs[1], 1)


@_layer("GroupConvolution", "GroupConvolutionBackpropData")
def _group_convolution(graph: _Graph, layer: OpenVinoLayer) -> None:
    # OpenVINO's weights have a first axis of groups; ONNX's first axis is groups times outputs.
    groups, first, *rest = layer.shapes[1]
    shape = graph.constant(layer, "shape", np.array([groups * first, *rest], np.int64))
    graph.add("Reshape", (layer.inputs[1], shape), (f"{layer.name}/weights",))
    _convolve(graph, layer, f"{layer.name}/weights", groups)


def _convolve(graph: _Graph, layer: OpenVinoLayer, weights: str, groups: int) -> None:
    attributes = {**_window(layer), "group": groups}
    if not layer.kind.endswith("BackpropData"):
        graph.add("Conv", (layer.inputs[0], weights), layer.outputs, **attributes)
        return
    if len(layer.inputs) > 2:
        _refuse(layer, "with a stated size")
    attributes["output_padding"] = layer.numbers("output_padding") or [0] * len(attributes["strides"])
    graph.add("ConvTranspose", (layer.inputs[0], weights), layer.outputs, **attributes)


@_layer("MatMul")
def _product(graph: _Graph, layer: OpenVinoLayer) -> None:
    names = []
    for place, key in enumerate(("transpose_a", "transpose_b")):
        names.append(layer.inputs[place])
        if layer.flag(key):
            axes = list(range(len(layer.shapes[place])))
            names[-1] = f"{layer.name}/{key}"
            graph.add("Transpose", (layer.inputs[place],), (names[-1],), perm=[*axes[:-2], *axes[:-3:-1]])
    graph.add("MatMul", names, layer.outputs)


@_layer("Swish")
def _swish(graph: _Graph, layer: OpenVinoLayer) -> None:
    factor = graph.constants.get(layer.inputs[1]) if len(layer.inputs) > 1 else np.ones(1)
    if factor is None or factor.size != 1:
        _refuse(layer, "with a factor that is computed")
    graph.add("Swish", layer.inputs[:1], layer.outputs, alpha=float(factor.reshape(())))


@_layer("MaxPool", "AvgPool")
def _pool(graph: _Graph, layer: OpenVinoLayer) -> None:
    attributes = {**_window(layer), "kernel_shape": layer.numbers("kernel")}
    attributes["ceil_mode"] = int(layer.data.get("rounding_type", "floor").startswith("ceil"))
    if layer.kind == "AvgPool":
        attributes["count_include_pad"] = int(not layer.flag("exclude-pad"))
    graph.add("MaxPool" if layer.kind == "MaxPool" else "AveragePool", layer.inputs, layer.outputs[:1], **attributes)


@_layer("AdaptiveAvgPool")
def _adaptive(graph: _Graph, layer: OpenVinoLayer) -> None:
    """Write windows that do not overlap: the input must be a multiple of the output."""
    given, wanted = list(layer.shapes[0])[2:], graph.known(layer, 1)
    if all(side == 1 for side in wanted):
        graph.add("GlobalAveragePool", layer.inputs[:1], layer.outputs)
        return
    if any(side < 1 or side % parts for side, parts in zip(given, wanted, strict=True)):
        _refuse(layer, f"from {given} to {wanted}")
    window = [side // parts for side, parts in zip(given, wanted, strict=True)]
    graph.add("AveragePool", layer.inputs[:1], layer.outputs, kernel_shape=window, strides=window)


@_layer("Interpolate")
def _interpolate(graph: _Graph, layer: OpenVinoLayer) -> None:
    modes = {"nearest": "nearest", "linear": "linear", "linear_onnx": "linear", "cubic": "cubic"}
    mode, rank = modes.get(layer.data["mode"]), len(layer.shapes[0])
    axes = list(range(rank)) if len(layer.inputs) < 3 else graph.known(layer, 2)
    pads = layer.numbers("pads_begin") + layer.numbers("pads_end")
    if mode is None or layer.version == "opset1" or layer.flag("antialias") or any(pads):
        _refuse(layer, f"of mode {layer.data['mode'][:30]}, version {layer.version}, with these options")
    if axes not in (list(range(rank)), list(range(2, rank))):
        _refuse(layer, f"of axes {axes}")
    is_scales = layer.data.get("shape_calculation_mode") == "scales"
    values = layer.inputs[1]
    if len(axes) < rank:
        first = graph.constant(layer, "first", np.ones(2, np.float32 if is_scales else np.int64))
        values = f"{layer.name}/all"
        graph.add("Concat", (first, layer.inputs[1]), (values,), axis=0)
    inputs = (layer.inputs[0], "", values) if is_scales else (layer.inputs[0], "", "", values)
    how = layer.data.get("coordinate_transformation_mode", "half_pixel")
    more: dict[str, Any] = {"nearest_mode": layer.data.get("nearest_mode", "round_prefer_floor")}
    more["cubic_coeff_a"] = float(layer.data.get("cube_coeff", "-0.75"))
    graph.add("Resize", inputs, layer.outputs, mode=mode, coordinate_transformation_mode=how, **more)


@_layer("Transpose")
def _transpose(graph: _Graph, layer: OpenVinoLayer) -> None:
    graph.add("Transpose", layer.inputs[:1], layer.outputs, perm=graph.known(layer, 1))


@_layer("Split", "VariadicSplit")
def _split(graph: _Graph, layer: OpenVinoLayer) -> None:
    [axis] = graph.known(layer, 1)
    graph.add("Split", (layer.inputs[0], *layer.inputs[2:]), layer.outputs, axis=axis)


@_layer("Gather", "GatherND")
def _gather(graph: _Graph, layer: OpenVinoLayer) -> None:
    if layer.numbers("batch_dims", "0") != [0]:
        _refuse(layer, "within a batch")
    if layer.kind == "GatherND":
        graph.add("GatherND", layer.inputs, layer.outputs)
    else:
        graph.add("Gather", layer.inputs[:2], layer.outputs, axis=graph.known(layer, 2)[0])


@_layer("TopK")
def _topk(graph: _Graph, layer: OpenVinoLayer) -> None:
    if layer.data.get("sort") == "index":
        _refuse(layer, "sorted by place")
    largest, is_sorted = layer.data.get("mode") == "max", layer.data.get("sort") == "value"
    axis = layer.numbers("axis", "-1")[0]
    graph.add("TopK", layer.inputs, layer.outputs, axis=axis, largest=int(largest), sorted=int(is_sorted))


@_layer("Broadcast")
def _broadcast(graph: _Graph, layer: OpenVinoLayer) -> None:
    if layer.data.get("mode", "numpy") not in ("numpy", "bidirectional") or len(layer.inputs) > 2:
        _refuse(layer, f"of mode {layer.data.get('mode', '')[:30]}")
    graph.add("Expand", layer.inputs, layer.outputs)


@_layer("Slice")
def _slice(graph: _Graph, layer: OpenVinoLayer) -> None:
    source, start, stop, step, *axes = layer.inputs
    graph.add("Slice", (source, start, stop, axes[0] if axes else "", step), layer.outputs)


@_layer("StridedSlice")
def _strided_slice(graph: _Graph, layer: OpenVinoLayer) -> None:
    if any(any(layer.numbers(key)) for key in ("new_axis_mask", "shrink_axis_mask", "ellipsis_mask")):
        _refuse(layer, "that changes the number of axes")
    starts, stops = graph.known(layer, 1), graph.known(layer, 2)
    steps = graph.known(layer, 3) if len(layer.inputs) > 3 else [1] * len(starts)
    if min(steps, default=1) < 1:
        _refuse(layer, "that goes back")
    for values, key, whole in ((starts, "begin_mask", 0), (stops, "end_mask", _GREATEST)):
        for place, masked in enumerate(layer.numbers(key)[: len(values)]):
            values[place] = whole if masked else values[place]
    lists = {"starts": starts, "stops": stops, "axes": list(range(len(starts))), "steps": steps}
    names = [graph.constant(layer, name, np.array(values, np.int64)) for name, values in lists.items()]
    graph.add("Slice", (layer.inputs[0], *names), layer.outputs)


@_layer("Convert")
def _convert(graph: _Graph, layer: OpenVinoLayer) -> None:
    kind = layer.data.get("destination_type", "")
    if kind not in _CASTS:
        _refuse(layer, f"to {kind[:30]}")
    graph.add("Cast", layer.inputs, layer.outputs, to=_CASTS[kind])


@_layer("Pad")
def _pad(graph: _Graph, layer: OpenVinoLayer) -> None:
    if layer.data.get("pad_mode") not in ("constant", "edge", "reflect"):
        _refuse(layer, f"of mode {layer.data.get('pad_mode', '')[:30]}")
    graph.add("Concat", layer.inputs[1:3], (f"{layer.name}/pads",), axis=0)
    graph.add(
        "Pad", (layer.inputs[0], f"{layer.name}/pads", *layer.inputs[3:]), layer.outputs, mode=layer.data["pad_mode"]
    )


@_layer("NonMaxSuppression")
def _suppress(graph: _Graph, layer: OpenVinoLayer) -> None:
    # OpenVINO sorts over all images and classes, ONNX within each: with one of each the result is the same.
    if layer.shapes[1][:2] != (1, 1) or len(layer.inputs) > 5:
        _refuse(layer, "of several images or classes")
    is_centre = layer.data.get("box_encoding", "corner") == "center"
    graph.add("NonMaxSuppression", layer.inputs, layer.outputs[:1], center_point_box=int(is_centre))


def read_openvino(path: Path) -> OnnxFile:
    """Read a network of OpenVINO into the form of an ONNX file, without metadata. Raises WeightsError."""
    layers, constants = read_layers(path)
    unknown = {
        each.kind for each in layers if each.kind not in (*_SAME, *_WITH_ATTRIBUTES, *_WRITERS, "Parameter", "Result")
    }
    if unknown:
        raise WeightsError(f"{path.name} uses operators that are not known here: {', '.join(sorted(unknown))}.")
    graph = _Graph(constants)
    inputs, outputs = [], []
    try:
        for layer in layers:
            if layer.kind == "Parameter":
                lengths: list[Length] = [int(each) if each.strip().isdigit() else None for each in _dimensions(layer)]
                inputs.append(Value(layer.outputs[0], DTYPES.get(layer.data["element_type"]), tuple(lengths)))
            elif layer.kind == "Result":
                outputs.append(Value(layer.inputs[0], None, None))
            elif layer.kind in _WRITERS:
                _WRITERS[layer.kind](graph, layer)
            elif layer.kind in _WITH_ATTRIBUTES:
                name, attributes = _WITH_ATTRIBUTES[layer.kind]
                graph.add(name, layer.inputs, layer.outputs, **attributes(layer))
            else:
                graph.add(_SAME[layer.kind] or layer.kind, layer.inputs, layer.outputs)
    except InvalidError as error:
        raise WeightsError(f"{path.name} {error}.") from error
    except (LookupError, ValueError, TypeError, OverflowError) as error:
        raise WeightsError(f"{path.name} has a {layer.kind} that is damaged.") from error
    return OnnxFile(_OPSET, {}, graph.nodes, graph.constants, tuple(inputs), tuple(outputs))


def _dimensions(layer: OpenVinoLayer) -> list[str]:
    return [each for each in layer.data.get("shape", "").split(",") if each.strip()]
