"""What a device does about operators it lacks: the table, fixed shapes, and, on a simulated device, the dispatcher."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from backends import BackendError
from backends.operators import operators
from backends.operators.operators import Operators, fixed_shapes
from backends.operators.replacements import REPLACEMENTS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "operators.md"
HALVES = (torch.float16, torch.bfloat16)
DTYPES = (torch.float32, torch.float64, *HALVES)


def numbers(*shape, dtype=torch.float32):
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(1)) * 4
    values.view(-1)[0] = 60  # Where halves would overflow on the way, did they not compute in float32.
    values.view(-1)[1] = 30_000
    return values.to(dtype)


CASES = {
    "aten::silu": [(numbers(2, 3, 8, 8),)],
    "aten::hardsigmoid": [(numbers(2, 3, 8, 8),)],
    "aten::hardswish": [(numbers(2, 3, 8, 8),)],
    "aten::hardtanh": [(numbers(2, 3, 8, 8),), (numbers(2, 3, 8, 8), 0, 6)],
    "aten::gelu": [(numbers(4, 9),), (numbers(4, 9), {"approximate": "tanh"})],
    "aten::_softmax": [(numbers(4, 9), 1, False), (numbers(2, 4, 9), -2, False)],
    "aten::roll": [(numbers(4, 9), [2, -3], [0, 1]), (numbers(4, 9), [-11], [1]), (numbers(4, 9), [5])],
    "aten::_adaptive_avg_pool2d": [(numbers(2, 3, 7, 7), (1, 1)), (numbers(2, 3, 14, 9), (7, 4))],
    "aten::adaptive_avg_pool2d": [(numbers(2, 3, 7, 7), (3, 2)), (numbers(3, 6, 8), (3, 4))],
    "aten::upsample_nearest2d": [
        (numbers(2, 3, 5, 7), (10, 14), 2.0, 2.0),
        (numbers(2, 3, 5, 7), (10, 21)),
        (numbers(2, 3, 5, 7), (8, 5)),
        (numbers(2, 3, 5, 7), (7, 9), 1.5, 1.3),
    ],
}


def given(name, dtype):
    for *args, last in CASES[name]:
        options = last if isinstance(last, dict) else {}
        rest = args if options else [*args, last]
        yield rest[0].to(dtype), rest[1:], options


def packet(name):
    return getattr(torch.ops.aten, name.partition("::")[2])


def close(mine, theirs):
    # A unit in the last place for halves, a few of them for the others.
    assert mine.dtype == theirs.dtype
    torch.testing.assert_close(mine, theirs, rtol=torch.finfo(mine.dtype).eps * 8, atol=1e-6)


def test_every_replacement_has_a_case():
    assert CASES.keys() == REPLACEMENTS.keys()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", REPLACEMENTS)
def test_a_replacement_answers_as_the_operator_does(name, dtype):
    for x, rest, options in given(name, dtype):
        before = x.clone()
        close(REPLACEMENTS[name](x, *rest, **options), packet(name)(x, *rest, **options))
        assert torch.equal(x, before)


@pytest.mark.parametrize("name", [name for name in REPLACEMENTS if hasattr(torch.ops.aten, f"{name[6:]}_")])
def test_an_in_place_form_writes_into_its_argument(name):
    in_place = getattr(torch.ops.aten, f"{name[6:]}_").default
    kernel = operators._kernel(f"test::{name}_", in_place, REPLACEMENTS[name])
    for x, rest, options in given(name, torch.float32):
        expected, mine = packet(name)(x, *rest, **options), x.clone()
        assert kernel(mine, *rest, **options) is mine
        close(mine, expected)


def test_only_operators_whose_result_is_no_view_can_run_elsewhere():
    assert operators._kernel("test::view", torch.ops.aten.view.default, None) is None
    assert operators._kernel("test::sin", torch.ops.aten.sin.default, None) is not None


# Shapes


class Pools(nn.Module):
    def __init__(self):
        super().__init__()
        self.even = nn.AdaptiveAvgPool2d((2, 4))
        self.most = nn.AdaptiveMaxPool2d((4, None))
        self.uneven = nn.AdaptiveAvgPool2d(3)
        self.twice = nn.AdaptiveAvgPool2d(2)
        self.never = nn.AdaptiveAvgPool2d(1)
        self.shared = nn.ModuleList([self.even])

    def forward(self, pixels):
        x = pixels.permute(0, 3, 1, 2).float()
        y = (self.even(x), self.most(x), self.uneven(x), self.twice(x), self.twice(x[..., :4, :4]), self.shared[0](x))
        return tuple(each.flatten(1) for each in y)


def test_what_is_uneven_or_sees_two_sizes_is_left_alone():
    network, pixels = Pools().eval(), torch.randint(0, 256, (2, 8, 8, 3), dtype=torch.uint8)
    expected = network(pixels)
    assert sorted(fixed_shapes(network, (8, 8, 3))) == ["even", "most", "shared.0"]
    assert isinstance(network.most, nn.MaxPool2d)
    assert network.shared[0] is network.even
    assert all(isinstance(each, nn.AdaptiveAvgPool2d) for each in (network.uneven, network.twice, network.never))
    for mine, theirs in zip(network(pixels), expected, strict=True):
        torch.testing.assert_close(mine, theirs)


# Errors and warnings


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Could not run 'aten::sin' with arguments from the 'NPU' backend."),
        NotImplementedError("Could not run 'aten::sin' with arguments from the 'CPU' backend."),
        BackendError("no cause"),
        ValueError("Could not run 'aten::sin' with arguments from the 'NPU' backend."),
    ],
    ids=lambda error: f"{type(error).__name__} {error}"[:60],
)
def test_every_other_error_passes_at_once(error):
    tries = []

    def attempt():
        tries.append(1)
        raise error

    with pytest.raises(type(error)) as caught:
        Operators("npu").completed(attempt)
    assert caught.value is error
    assert len(tries) == 1


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
    monkeypatch.setattr(operators, "_heard", {})
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


def test_the_documented_table_is_the_one_there_is():
    assert set(re.findall(r"^\| `(aten::\w+)` \|", DOCS.read_text(), re.MULTILINE)) == set(REPLACEMENTS)
