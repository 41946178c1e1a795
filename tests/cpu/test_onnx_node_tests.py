"""ONNX's own tests of its operators: our reader computes what they say, or refuses; it is never wrong in silence."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.contract.errors import WeightsError
from models.onnx.file import read_onnx
from models.onnx.graph import OnnxGraph

pytestmark = pytest.mark.nightly

_TOLERANCE = {"float16": 1e-2, "bfloat16": 2e-2}


def cases() -> list[Any]:
    pytest.importorskip("onnx")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Their code is older than the NumPy that runs it.
        from onnx.backend.test.case.node import collect_testcases

        return [case for case in collect_testcases(None) if case.model is not None]


def differs(wanted: Any, given: Any) -> str:
    """How an output is another than the one that is wanted, "" where it is not."""
    wanted, given = np.asarray(wanted), np.asarray(given)
    if wanted.shape != given.shape:
        return f"its shape is {given.shape}, not {wanted.shape}"
    if wanted.dtype.kind not in "fiub":
        return f"{wanted.dtype} is no type that is computed"
    tolerance = _TOLERANCE.get(str(wanted.dtype), 1e-4)
    one, other = wanted.astype(np.float64), given.astype(np.float64)
    return "" if np.allclose(one, other, tolerance, tolerance, equal_nan=True) else "its numbers are others"


def outcome(case: Any, file: Path) -> str:
    """`right`, `refused`, or what is wrong."""
    file.write_bytes(case.model.SerializeToString())
    names = [value.name for value in case.model.graph.input]
    for inputs, outputs in case.data_sets:
        try:
            read = read_onnx(file)
            graph = OnnxGraph(read, file.name)
            given = dict(zip(names, inputs, strict=False))
            tensors = [torch.from_numpy(np.array(given[value.name])) for value in read.inputs]
            halves = (torch.float16, torch.float64)  # As they are read: the precision is the engine's choice.
            with torch.inference_mode():
                found = graph(*(each.float() if each.dtype in halves else each for each in tensors))
        except WeightsError:
            return "refused"
        except Exception:  # It stops the start with whatever is said: no answer is given.
            return "refused"
        if len(found) != len(outputs):
            return f"it has {len(found)} outputs, not {len(outputs)}"
        for number, (wanted, tensor) in enumerate(zip(outputs, found, strict=True)):
            if reason := differs(wanted, tensor):
                return f"output {number}: {reason}"
    return "right"


def test_no_operator_is_wrong_in_silence(tmp_path: Path) -> None:
    found = {case.name: outcome(case, tmp_path / "model.onnx") for case in cases()}
    wrong = {name: said for name, said in found.items() if said not in ("right", "refused")}
    assert not wrong
    assert (
        sum(said == "right" for said in found.values()) > 600
    )  # Most of what is left are types and operators of text.
