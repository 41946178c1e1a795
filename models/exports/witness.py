"""Comparison of our reading of a file with a runtime that is not ours, on pictures.

    pictures ─► our reading, float32 ─► outputs ┐
    pictures ─► witness              ─► outputs ┴─► alike, or the first operator that differs, by name

Witness: ONNX Runtime without optimisations for .onnx. For the networks of a library it is that
library's own reading of the same files, for a program (.pt2, .ts) PyTorch's own loading of it.

Owns: which runtime is asked, and the comparison of whole networks. Must not know how a file becomes a network, nor the
meaning of its outputs. In a process of its own (models.exports.child): must not be imported by the server.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from models.contract.errors import WeightsError, reason_of
from models.contract.model import Array
from models.exports import library_files
from models.exports.layouts import SIZES
from models.exports.networks import as_saved
from models.onnx.compared import first_different
from models.onnx.file import OnnxFile
from models.onnx.session import UnavailableError, Witness

PICTURES = 2
_WHOLE, _WHOLE_IN_HALVES = 1e-4, 1e-2
"""Limit for a network's outputs, as a share of the largest number of their like; beyond, operators are compared."""
_LEAST_LIKE = 64  # Fewest numbers of a row or column with a scale of its own, e.g. of a detector's class.
_FLOOR = 1e-6


def compared(
    file: Path,
    architecture: str,
    onnx: OnnxFile | None,
    given: Sequence[Tensor],
    ours: Sequence[Sequence[Tensor]],
) -> str:
    """Compare, and return a sentence without its end: what was compared, or why nothing was. Raises WeightsError.

    `given`: the network's inputs, of pictures; `ours`: the float32 outputs of our reading for each.
    """
    try:
        if onnx is not None:
            return of_graph(file, onnx, Witness(file, onnx), given, ours)
        if library := library_files.library_of(architecture):
            try:
                theirs = library_files.builder().built(file, architecture, by_itself=True)
            except WeightsError as error:
                raise UnavailableError(str(error).rstrip(".")) from error
            return of_network(f"{library} by itself", theirs, given, ours, file)
        if architecture == "pt2":
            return of_network("torch.export by itself", as_saved(str(file)), given, ours, file)
        runtime = "OpenVINO" if architecture == "xml" else "TorchScript"
        return f"{runtime} itself computes it, so that nothing was compared"
    except UnavailableError as error:
        return f"it was compared with nothing, as {error}"


def of_graph(
    file: Path,
    onnx: OnnxFile,
    witness: Witness,
    given: Sequence[Tensor],
    ours: Sequence[Sequence[Tensor]],
) -> str:
    """Compare a graph, operator by operator where its outputs differ. Raises WeightsError, UnavailableError."""
    [taken], names = onnx.inputs, [value.name for value in onnx.outputs]
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
            reason = first_different(onnx, file.name, inputs, witness)
        except UnavailableError as error:
            reason = f"the outputs differ by {found:.2g} of their largest number, whose operator is not known: {error}"
        if reason:
            raise WeightsError(
                f"{file.name} is not read as {witness.name} reads it, and is not served as a network of images: of the "
                f"same inputs {reason}. Please report it."
            )
        return (
            f"each operator computes what {witness.name} does of the same inputs, and the network enlarges rounding to "
            f"{found:.1e} of the largest number"
        )
    return _said(witness.name, len(given), largest)


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
                wanted = [each.float().numpy() for each in theirs(tensor)]
        except Exception as error:
            raise UnavailableError(f"{name} does not run: {reason_of(error)}") from error
        found = _largest(wanted, outputs)
        if not found <= _WHOLE:
            raise WeightsError(
                f"{file.name} is not read as {name} reads it, and is not served: outputs differ by {found:.2g} of "
                "their largest number. Please report it."
            )
        largest = max(largest, found)
    return _said(name, len(given), largest)


def _said(name: str, count: int, largest: float) -> str:
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
