"""What a device does about operators it lacks."""

from __future__ import annotations

import warnings

import pytest
import torch

from backends import BackendError, operators
from backends.operators import Operators

# Shapes


@pytest.mark.parametrize(
    ("device_type", "error"),
    [
        ("npu", NotImplementedError("Could not run 'aten::x.y' with arguments from the 'PrivateUse1' backend. 'aten")),
        ("cuda", NotImplementedError("Could not run 'aten::x.y' with arguments from the 'CUDA' backend.")),
        ("mlu", NotImplementedError("The operator 'aten::x.y' is not currently implemented for the MLU device. If")),
        ("xpu", NotImplementedError("The operator 'aten::x.y' is not currently implemented for the XPU device. If")),
        (
            "npu",
            RuntimeError(
                "The operator 'aten::x.y' would execute its main computation on CPU through dispatcher "
                "backend fallback, but CPU fallback is disabled by TORCH_NPU_FALLBACK_CPU_DISABLE=1.\n"
            ),
        ),
    ],
)
def test_a_missing_operator_is_known_by_every_vendors_words(device_type, error):
    translated = BackendError("npu:0 failed")
    translated.__cause__ = error
    for each in (error, translated):
        assert Operators(device_type)._missing(each) == "aten::x.y"


def test_vendors_own_fallbacks_are_listed_and_other_warnings_stay(monkeypatch):
    monkeypatch.setattr(operators, "_reported", {})
    said = (
        "CAUTION: The operator 'aten::roll' is not currently supported on the NPU backend and will fall back to run on "
        "the CPU. This may have performance implications.",
        "CAUTION: The operator aten::logit, aten::logit_ and aten::logit.out is currently not supported on the NPU "
        "backend. Now this operator will fallback to run on the CPU and may have performance implications.",
        "The operator 'aten::cholesky on the XPU backend is falling back to run on the CPU.",
        "The operator 'aten::sin' fails on the MLU backend and will fall back to run on the CPU. This may have",
    )
    each = Operators("npu")
    with pytest.warns(DeprecationWarning, match="another") as others:
        each.completed(
            lambda: (
                [warnings.warn(text, UserWarning, stacklevel=1) for text in said]
                and warnings.warn("another", DeprecationWarning, stacklevel=1)
            )
        )
    assert [str(other.message) for other in others] == ["another"]
    names = ("aten::roll", "aten::logit", "aten::logit_", "aten::logit.out", "aten::cholesky", "aten::sin")
    assert each.found() == dict.fromkeys(names, "vendor-cpu")
    assert operators.fallback_counts() == {}
    assert not torch.is_warn_always_enabled()
