"""Detectors as torchvision exports them: Faster R-CNN, RetinaNet, FCOS, SSD, and the boxes of Mask and Keypoint R-CNN.

Owns: recognising such an ONNX file, and selecting the part to compute. It takes one image [3, h, w] in 0 to 1,
normalises and resizes it itself, and answers with as many boxes as it finds. Must not know what becomes of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from models.contract.model import Array
from models.onnx.file import Node, OnnxFile, Value

MOST_DETECTIONS = 300
"""Most boxes in an image's answer, the best: at least as many as torchvision's own networks give (100 to 300)."""


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
    return replace(guarded, nodes=[_stated(node, file.opset) for node in kept])


def untraced(images: Tensor) -> Tensor:
    """Return the same images. Raises RuntimeError if an engine traces the call: the number of boxes, and so the
    computation, differs for each image.
    """
    if torch._C._get_tracing_state() is not None or torch.compiler.is_compiling():
        raise RuntimeError("how many boxes it finds depends on the image, which only the eager engine computes")
    return images


def only_float32(dtype: torch.dtype) -> torch.dtype:
    """Return the same type. Raises RuntimeError for all but float32: shorter ones cannot hold the coordinates."""
    if dtype != torch.float32:
        raise RuntimeError("it chooses among boxes before its last layers, which takes float32")
    return dtype


def _stated(node: Node, opset: int) -> Node:
    """State the position of pixels in a node of RoiAlign; the default has changed with opset 16."""
    if node.operator != "RoiAlign":
        return node
    places = {"coordinate_transformation_mode": "half_pixel" if opset >= 16 else "output_half_pixel"}
    return replace(node, attributes={**places, **node.attributes})


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
    branches = [node.attributes.get(name) for name in ("then_branch", "else_branch")]
    if node.operator != "If" or len(node.inputs) != 1:
        return None
    nothing, something = branches
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
    if any(each.operator != "Constant" for each in nothing.nodes) or not _is_empty(nothing):
        return None
    is_suppression = any(each.operator == "NonMaxSuppression" for each in something.nodes)
    return something if is_suppression and len(something.outputs) == len(node.outputs) else None


def _is_empty(branch: OnnxFile) -> bool:
    values = [*branch.constants.values(), *(value for node in branch.nodes for value in node.attributes.values())]
    return all(isinstance(value, np.ndarray) and value.size == 0 for value in values)
