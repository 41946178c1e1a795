"""fp32 means float32: what vendors' software is told, whose defaults round more.

Defaults as in the vendors' files: PyTorch's cudnn.allow_tf32 (True; a ROCm torch hands it to MIOpen), ONNX Runtime's
cuda_execution_provider_info.h (`use_tf32{true}`), torch_tensorrt 2.8's dynamo/_defaults.py
(`USE_EXPLICIT_TYPING = False`, `ENABLED_PRECISIONS = {f32}`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from anychip_tools.verify.contract import (
    BrokenPromiseError,
    Subject,
    products_are_float32,
    run_checks,
)
from backends import Executable, LoadedNetwork
from backends.engines.tensorrt import _typing
from backends.vendors.cpu import CpuBackend
from backends.vendors.table import ACCELERATORS, CPU, Facts


@pytest.mark.parametrize("row", [row for row in ACCELERATORS if row.device_type == "cuda"], ids=lambda row: row.name)
def test_every_vendor_that_answers_to_torch_cuda_rounds_to_float32(row: Facts) -> None:
    for switch in ("torch.backends.cudnn.allow_tf32", "torch.backends.cuda.matmul.allow_tf32"):
        assert row.switches[switch] is False


def test_tensorrt_keeps_the_types_of_the_network_where_it_can_be_told() -> None:
    def of_2_8(exported: object, *, disable_tf32: bool = False, use_explicit_typing: bool = False) -> None: ...

    def without(exported: object, *, disable_tf32: bool = False) -> None: ...

    assert _typing(of_2_8) == {"use_explicit_typing": True}
    assert _typing(without) == {}


CONVOLUTIONS = (torch.ops.aten.conv2d.default, torch.ops.aten.convolution.default)
MATRIX_PRODUCTS = (torch.ops.aten.linear.default, torch.ops.aten.addmm.default, torch.ops.aten.mm.default)


def rounded(number: object, bits: int) -> object:
    """Round float32 to so many bits of the mantissa, to the nearest and to even, as a matrix unit does."""
    if not isinstance(number, Tensor) or number.dtype != torch.float32:
        return number
    lost, raw = 23 - bits, number.contiguous().view(torch.int32)
    half = (1 << (lost - 1)) - 1 + ((raw >> lost) & 1)
    return ((raw + half) & ~((1 << lost) - 1)).view(torch.float32)


class Rounding(TorchDispatchMode):
    """Compute these operators as a device does that rounds their numbers unasked."""

    def __init__(self, operators: tuple[Any, ...], bits: int) -> None:
        super().__init__()
        self.operators, self.bits = operators, bits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [rounded(each, self.bits) for each in args] if func in self.operators else args
        return func(*given, **(kwargs or {}))


class RoundingBackend(CpuBackend):
    """The CPU in the place of a device that rounds."""

    facts = replace(CPU, engines=("eager",), by_name=())

    def __init__(self, operators: tuple[Any, ...], bits: int) -> None:
        super().__init__(1)
        self.mode = Rounding(operators, bits)

    def load(self, *arguments: Any, **options: Any) -> LoadedNetwork:
        loaded = super().load(*arguments, **options)
        executable: Executable = loaded.executable
        execute = executable._execute

        def rounding(pixels: Any) -> Any:
            with self.mode:
                return execute(pixels)

        executable._execute = rounding  # type: ignore[method-assign]
        return loaded


@pytest.mark.parametrize(("bits", "what"), [(10, "TF32"), (11, "HF32")])
@pytest.mark.parametrize(
    ("operators", "named"),
    [
        (CONVOLUTIONS, "a convolution"),
        (MATRIX_PRODUCTS, "a matrix product"),
        (CONVOLUTIONS + MATRIX_PRODUCTS, "a conv"),
    ],
    ids=["convolutions", "matrix products", "both"],
)
def test_verify_finds_a_device_that_rounds_products_unasked(
    operators: tuple[Any, ...], named: str, bits: int, what: str
) -> None:
    with pytest.raises(BrokenPromiseError, match=f"eager rounds more than float32 does: {named}"):
        products_are_float32(Subject(RoundingBackend(operators, bits), "cpu:0"))


def test_verify_passes_a_device_that_does_not() -> None:
    found = {each.name: each for each in run_checks(Subject(RoundingBackend((), 10), "cpu:0"), ())}
    assert found["products in float32"].status == "PASS"
