"""Forms of ONNX's operators that are computed: their attributes and outputs, in the terms of today's opset.

    nodes of a file of opset 9 to 28 ─► today's nodes, or the form that is not computed, by name

Owns: changes of meaning from opset to opset, and the attributes that each operator's function reads. Any other
attribute is refused, as it would be silently ignored. Must not compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from models.contract.errors import WeightsError
from models.onnx.file import Node, OnnxFile

OLDEST, NEWEST = 9, 28
"""Opsets: older ones have other operators; newer ones may have changed any (onnx.backend.test of onnx 1.23)."""

_WINDOW = "auto_pad dilations kernel_shape pads strides"
_REDUCTION = "axes keepdims noop_with_empty_axes"
_READ: Mapping[str, str] = {
    "ArgMax": "axis keepdims select_last_index",
    "AveragePool": f"{_WINDOW} ceil_mode count_include_pad",
    "BatchNormalization": "epsilon momentum",
    "Cast": "to",
    "Clip": "max min",
    "Concat": "axis",
    "ConstantOfShape": "value",
    "Conv": f"{_WINDOW} group",
    "ConvTranspose": f"{_WINDOW} group output_padding output_shape",
    "CumSum": "exclusive reverse",
    "DepthToSpace": "blocksize mode",
    "DequantizeLinear": "axis",
    "Dropout": "ratio seed",
    "Einsum": "equation",
    "Elu": "alpha",
    "Flatten": "axis",
    "Gather": "axis",
    "GatherElements": "axis",
    "GatherND": "batch_dims",
    "Gelu": "approximate",
    "Gemm": "alpha beta transA transB",
    "GridSample": "align_corners mode padding_mode",
    "HardSigmoid": "alpha beta",
    "InstanceNormalization": "epsilon",
    "LayerNormalization": "axis epsilon",
    "LeakyRelu": "alpha",
    "LogSoftmax": "axis",
    "MaxPool": f"{_WINDOW} ceil_mode",
    "Mod": "fmod",
    "NonMaxSuppression": "center_point_box",
    "Pad": "mode pads value",
    "QuantizeLinear": "axis",
    "ReduceL1": _REDUCTION,
    "ReduceL2": _REDUCTION,
    "ReduceMax": _REDUCTION,
    "ReduceMean": _REDUCTION,
    "ReduceMin": _REDUCTION,
    "ReduceProd": _REDUCTION,
    "ReduceSum": _REDUCTION,
    "Reshape": "allowzero",
    "Resize": "antialias axes coordinate_transformation_mode cubic_coeff_a exclude_outside extrapolation_value mode "
    "keep_aspect_ratio_policy nearest_mode",
    "RoiAlign": "coordinate_transformation_mode mode output_height output_width sampling_ratio spatial_scale",
    "ScatterElements": "axis reduction",
    "ScatterND": "reduction",
    "Shape": "end start",
    "Slice": "axes ends starts",
    "Softmax": "axis",
    "Split": "axis num_outputs split",
    "Squeeze": "axes",
    "Swish": "alpha",
    "TopK": "axis k largest sorted",
    "Transpose": "perm",
    "Unsqueeze": "axes",
    "Upsample": "mode",
}
"""Attributes that each function reads, or refuses itself. Operators that are not here have no attribute."""
_WITHOUT_EFFECT: Mapping[str, Mapping[str, Any]] = {
    "BatchNormalization": {"training_mode": 0, "spatial": 1},
    "Cast": {"saturate": 1, "round_mode": "up"},
    "DequantizeLinear": {"block_size": 0, "output_dtype": 0},
    "LayerNormalization": {"stash_type": 1},
    "MaxPool": {"storage_order": 0},
    "QuantizeLinear": {"block_size": 0, "output_dtype": 0, "precision": 0, "saturate": 1},
    "Range": {"stash_type": 1},
}
"""Attributes that are not read, with the value that is computed; any other value is refused."""
_CONSTANTS = ("value", "value_int", "value_ints", "value_float", "value_floats")
_SEVERAL = ("Split", "TopK")
"""Operators computed with several outputs; all others have one."""


def todays(file: OnnxFile, name: str) -> list[Node]:
    """Return the nodes of a file in the terms of today's opset. Raises WeightsError that names all uncomputed forms.

    `name`: of the file, for errors.
    """
    if not OLDEST <= file.opset <= NEWEST:
        raise WeightsError(f"{name} is of ONNX opset {file.opset}; {OLDEST} to {NEWEST} are read.")
    used = {each for node in file.nodes for each in node.inputs} | {value.name for value in file.outputs}
    refused = {f"{node.operator} with {what}" for node in file.nodes for what in _not_computed(node, file, used)}
    if refused:
        raise WeightsError(f"{name} uses {', '.join(sorted(refused))}, which is not computed here.")
    return [_renewed(node, file.opset) for node in file.nodes]


def _not_computed(node: Node, file: OnnxFile, used: set[str]) -> list[str]:
    if node.operator == "Constant":
        return [name for name in node.attributes if name not in _CONSTANTS]
    read, ignored = _READ.get(node.operator, "").split(), _WITHOUT_EFFECT.get(node.operator, {})
    found = [
        f"{name} {value}" if isinstance(value, str | int | float) else name
        for name, value in node.attributes.items()
        if name not in read and (name not in ignored or value != ignored[name])
    ]
    if node.operator == "Dropout" and len(node.inputs) > 2 and node.inputs[2]:
        training = file.constants.get(node.inputs[2])
        if training is None or training.any():
            found.append("training_mode")
    if node.operator == "BatchNormalization" and file.opset < 14 and any(node.outputs[1:]):
        found.append("outputs of training")
    beyond = [] if node.operator in _SEVERAL else [name for name in node.outputs[1:] if name in used and name]
    return [*found, *(f"the output {name!r}" for name in beyond[:1])]


def _renewed(node: Node, opset: int) -> Node:
    """Convert a node to one with the same meaning in today's opset."""
    if node.operator in ("Softmax", "LogSoftmax") and opset < 13:
        return replace(node, attributes={"axis": 1, **node.attributes, "flattened": 1})
    if node.operator == "Upsample" or (node.operator == "Resize" and opset < 11):
        corners = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "opset 10"}
        inputs = (node.inputs[0], "", *node.inputs[1:])
        return replace(node, operator="Resize", inputs=inputs, attributes={**node.attributes, **corners})
    return node
