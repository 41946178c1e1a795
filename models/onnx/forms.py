"""Changes of a file's nodes before they are computed: today's opset, Pads of PyTorch, and torchvision's detectors.

Owns: changes of meaning from opset to opset, the attributes that each operator's function reads (any other is refused,
as it would be silently ignored), and the part of torchvision's detectors that is computed: these take one image
[3, h, w] in 0 to 1, normalise and resize it, and answer with as many boxes as they find. Must not compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from models.contract.errors import WeightsError
from models.contract.model import Array
from models.onnx.file import Node, OnnxFile, Value

OLDEST, NEWEST = 9, 28
"""Opsets: older ones have other operators; newer ones may have changed any (onnx.backend.test of onnx 1.23)."""

_WINDOW = "auto_pad dilations kernel_shape pads strides"
_REDUCTION = "axes keepdims noop_with_empty_axes"
_READ: Mapping[str, str] = {
    **dict.fromkeys(("Concat", "Flatten", "Gather", "GatherElements", "LogSoftmax", "Softmax"), "axis"),
    **dict.fromkeys(("DequantizeLinear", "QuantizeLinear"), "axis"),
    **dict.fromkeys(("Elu", "LeakyRelu", "Swish"), "alpha"),
    **dict.fromkeys([f"Reduce{each}" for each in ("L1", "L2", "Max", "Mean", "Min", "Prod", "Sum")], _REDUCTION),
    **dict.fromkeys(("Squeeze", "Unsqueeze"), "axes"),
    "ArgMax": "axis keepdims",
    "AveragePool": f"{_WINDOW} ceil_mode count_include_pad",
    "BatchNormalization": "epsilon momentum",
    "Cast": "to",
    "Clip": "max min",
    "ConstantOfShape": "value",
    "Conv": f"{_WINDOW} group",
    "ConvTranspose": f"{_WINDOW} group output_padding output_shape",
    "DepthToSpace": "blocksize mode",
    "Dropout": "ratio seed",
    "Einsum": "equation",
    "Gelu": "approximate",
    "Gemm": "alpha beta transA transB",
    "GridSample": "align_corners mode padding_mode",
    "GroupNormalization": "epsilon num_groups",
    "HardSigmoid": "alpha beta",
    "InstanceNormalization": "epsilon",
    "LayerNormalization": "axis epsilon",
    "MaxPool": f"{_WINDOW} ceil_mode",
    "NonMaxSuppression": "center_point_box",
    "Pad": "mode pads value",
    "Reshape": "allowzero",
    "Resize": "antialias axes coordinate_transformation_mode cubic_coeff_a extrapolation_value mode nearest_mode",
    "RoiAlign": "coordinate_transformation_mode output_height output_width sampling_ratio spatial_scale",
    "ScatterElements": "axis",
    "Shape": "end start",
    "Slice": "axes ends starts",
    "Split": "axis num_outputs split",
    "TopK": "axis k largest sorted",
    "Transpose": "perm",
    "Trilu": "upper",
    "Upsample": "mode",
}
"""Attributes that each function reads, or refuses itself. Operators that are not here have no attribute."""
_WITHOUT_EFFECT: Mapping[str, Mapping[str, Any]] = {
    "ArgMax": {"select_last_index": 0},
    "BatchNormalization": {"training_mode": 0, "spatial": 1},
    "Cast": {"saturate": 1, "round_mode": "up"},
    "CumSum": {"exclusive": 0, "reverse": 0},
    "DequantizeLinear": {"block_size": 0, "output_dtype": 0},
    "GatherND": {"batch_dims": 0},
    "GroupNormalization": {"stash_type": 1},
    "LayerNormalization": {"stash_type": 1},
    "MaxPool": {"storage_order": 0},
    "Mod": {"fmod": 0},
    "QuantizeLinear": {"block_size": 0, "output_dtype": 0, "precision": 0, "saturate": 1},
    "Range": {"stash_type": 1},
    "Resize": {"exclude_outside": 0, "keep_aspect_ratio_policy": "stretch"},
    "RoiAlign": {"mode": "avg"},
    "ScatterElements": {"reduction": "none"},
    "ScatterND": {"reduction": "none"},
}
"""Attributes that are not read, with the value that is computed; any other value is refused."""
_CONSTANTS = ("value", "value_int", "value_ints", "value_float", "value_floats")
SEVERAL = ("Split", "TopK")
"""Operators computed with several outputs; all others have one."""


def todays(file: OnnxFile, name: str) -> list[Node]:
    """Return the nodes of a file in the terms of today's opset. Raises WeightsError that names all uncomputed forms.

    `name`: of the file, for errors.
    """
    if not OLDEST <= file.opset <= NEWEST:
        remedy = "onnx.version_converter.convert_version converts it"
        raise WeightsError(f"{name} is of ONNX opset {file.opset}; {OLDEST} to {NEWEST} are read: {remedy}.")
    used = {each for node in file.nodes for each in node.inputs} | {value.name for value in file.outputs}
    refused = {f"{node.operator} with {what}" for node in file.nodes for what in _not_computed(node, file, used)}
    if refused:
        raise not_computed(name, ", ".join(sorted(refused)))
    return [_renewed(node, file.opset) for node in file.nodes]


def for_openvino(name: str) -> str:
    """Say how a file that is not computed here is served by OpenVINO."""
    return f'for OpenVINO, which runs it on the CPU: openvino.save_model(openvino.convert_model("{name}"), "mine.xml")'


def not_computed(name: str, what: str) -> WeightsError:
    """Return the error for forms of operators that a file has."""
    remedy = f"export it otherwise, or {for_openvino(name)}"
    return WeightsError(f"{name} uses {what}, which is not computed here: {remedy}.")


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
    if node.operator == "GroupNormalization" and file.opset < 21:
        found.append("a scale for each group")
    if node.operator == "BatchNormalization" and file.opset < 14 and any(node.outputs[1:]):
        found.append("outputs of training")
    beyond = [] if node.operator in SEVERAL else [name for name in node.outputs[1:] if name in used and name]
    return [*found, *(f"the output {name!r}" for name in beyond[:1])]


def _renewed(node: Node, opset: int) -> Node:
    if node.operator in ("Softmax", "LogSoftmax") and opset < 13:
        return replace(node, attributes={"axis": 1, **node.attributes, "flattened": 1})
    if node.operator == "Upsample" or (node.operator == "Resize" and opset < 11):
        corners = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "opset 10"}
        inputs = (node.inputs[0], "", *node.inputs[1:])
        return replace(node, operator="Resize", inputs=inputs, attributes={**node.attributes, **corners})
    return node


def in_pairs(pad: Node, makers: Mapping[str, Node], known: Mapping[str, Any]) -> Node:
    """Let a Pad take its numbers before PyTorch's export turns them to ONNX's order by a matrix, which numbers of the
    host cannot be: in `pairs`, begin and end of each axis, from the last axis on. `known`: constants by name.
    """
    name, found = (*pad.inputs, "")[1], []
    for operator in ("Cast", "Reshape", "Transpose", "Slice", "Reshape"):
        node = makers.get(name)
        if node is not None and node.operator == operator:
            name = node.inputs[0]
            found += [node.attributes.get("perm"), *(known.get(each) for each in node.inputs[1:])]
    if [each for each in found if each is not None] != [[-1], [1, 0], [-1], [1 - 2**63], [0], [-1], [-1, 2]]:
        return pad
    return replace(pad, inputs=(pad.inputs[0], name, *pad.inputs[2:]), attributes={**pad.attributes, "pairs": 1})


def as_detector(file: OnnxFile) -> OnnxFile | None:
    """Return the file with only the outputs boxes [k, 4], scores [k] and labels [k], in this order; k is open. Return
    None if it is no such detector.
    """
    outputs = _outputs(file)
    if outputs is None:
        return None
    guarded = _without_guards(replace(file, outputs=outputs))
    needed = {value.name for value in outputs}
    makers = {name: node for node in guarded.nodes for name in node.outputs}
    waiting, seen = list(needed), set(needed)
    while waiting:
        node = makers.get(waiting.pop())
        new = set(node.inputs) - seen if node is not None else set()
        seen |= new
        waiting += new
    kept = [node for node in guarded.nodes if seen.intersection(node.outputs)]
    # The default has changed with opset 16.
    places = {"coordinate_transformation_mode": "half_pixel" if file.opset >= 16 else "output_half_pixel"}
    nodes = [
        replace(node, attributes={**places, **node.attributes}) if node.operator == "RoiAlign" else node
        for node in kept
    ]
    return replace(guarded, nodes=nodes)


def _outputs(file: OnnxFile) -> tuple[Value, Value, Value] | None:
    """Return boxes, scores and labels, in any order and with any names; others of as many rows may be present."""
    taken = [value.shape or () for value in file.inputs]
    if len(taken) != 1 or len(taken[0]) != 3 or taken[0][0] != 3:
        return None
    opened = [value for value in file.outputs if value.shape and not isinstance(value.shape[0], int)]
    boxes = [value for value in opened if value.shape is not None and value.shape[1:] == (4,)]
    lists = [value for value in opened if value.shape is not None and len(value.shape) == 1]
    labels = [value for value in lists if value.dtype is not None and value.dtype.kind == "i"]
    scores = [value for value in lists if value.dtype is not None and value.dtype.kind == "f"]
    if not (len(boxes) == len(labels) == len(scores) == 1):
        return None
    return boxes[0], scores[0], labels[0]


def _without_guards(file: OnnxFile) -> OnnxFile:
    """Remove torchvision's `If` before suppression, whose answer is empty if there are no boxes. Its other branch gives
    the same for no boxes, so that branch is always computed.
    """
    makers = {name: node for node in file.nodes for name in node.outputs}
    constants: dict[str, Array] = dict(file.constants)
    nodes: list[Node] = []
    for node in file.nodes:
        branch = _guarded(node, makers)
        if branch is None:
            nodes.append(node)
            continue
        constants.update(branch.constants)
        names = dict(zip((value.name for value in branch.outputs), node.outputs, strict=True))
        nodes += [
            replace(
                each,
                inputs=tuple(names.get(name, name) for name in each.inputs),
                outputs=tuple(names.get(name, name) for name in each.outputs),
            )
            for each in branch.nodes
        ]
    return replace(file, nodes=nodes, constants=constants)


def _guarded(node: Node, makers: Mapping[str, Node]) -> OnnxFile | None:
    """Return the suppression branch of an `If` that answers nothing if there are no boxes; else None."""
    nothing, something = (node.attributes.get(name) for name in ("then_branch", "else_branch"))
    if node.operator != "If" or len(node.inputs) != 1:
        return None
    if not isinstance(nothing, OnnxFile) or not isinstance(something, OnnxFile):
        return None
    asked = makers.get(node.inputs[0])
    while asked is not None and asked.operator in ("Cast", "Identity"):
        asked = makers.get(asked.inputs[0])
    if asked is None or asked.operator != "Equal":
        return None
    counted = [makers[name].operator for name in asked.inputs if name in makers]
    if not {"ReduceProd", "Size"}.intersection(counted):
        return None
    values = [*nothing.constants.values(), *(value for each in nothing.nodes for value in each.attributes.values())]
    is_empty = all(isinstance(value, np.ndarray) and value.size == 0 for value in values)
    if any(each.operator != "Constant" for each in nothing.nodes) or not is_empty:
        return None
    is_suppression = any(each.operator == "NonMaxSuppression" for each in something.nodes)
    return something if is_suppression and len(something.outputs) == len(node.outputs) else None
