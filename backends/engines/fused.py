"""Fusion of convolutions with the operators behind them, on devices where such kernels exist and are faster.

PyTorch runs bias, sum and activation one after the other. Each reads and writes the convolution's whole output, and
that takes a fast card longer than the convolution itself (docs/hardware.md: an H100, where these kernels ran).
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Hashable, Mapping
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from anychip_base.tracing import ThreadTracer
from backends.contract.errors import first_line

log = logging.getLogger(__name__)

_TOLERANCE = 0.02  # Of the largest number of the trial: kernels may add in another order, and fp16 has three digits.
_ADDITIONS = (operator.add, operator.iadd, torch.add)
_SILU = "template <typename T> T biased_silu(T x, T bias) { T y = x + bias; return y / (T(1) + exp(-y)); }"


class _Fused(nn.Module):
    """Convolution with the operators behind it; shares its weights with the convolution that it replaces."""

    def __init__(self, convolution: nn.Conv2d) -> None:
        super().__init__()
        self.convolution = convolution

    def _placed(self) -> tuple[Any, ...]:
        each = self.convolution
        return each.stride, each.padding, each.dilation, each.groups


class _ConvReLU(_Fused):
    def forward(self, x: Tensor) -> Tensor:
        each = self.convolution
        return torch.cudnn_convolution_relu(x, each.weight, each.bias, *self._placed())


class _ConvAddReLU(_Fused):
    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        each = self.convolution
        if other.shape != self._shape(x):  # A sum that repeats one of its sides: cuDNN's takes equal ones.
            return functional.relu(each(x) + other)
        return torch.cudnn_convolution_add_relu(x, each.weight, other, 1.0, each.bias, *self._placed())

    def _shape(self, x: Tensor) -> tuple[int, ...]:
        each = self.convolution
        sides = zip(x.shape[2:], each.kernel_size, each.stride, cast(Any, each.padding), each.dilation, strict=True)
        spatial = (
            (side + 2 * pad - step * (kernel - 1) - 1) // stride + 1 for side, kernel, stride, pad, step in sides
        )
        return (len(x), each.out_channels, *spatial)


class _ConvSiLU(_Fused):
    def forward(self, x: Tensor) -> Tensor:
        each = self.convolution
        assert each.bias is not None
        y = functional.conv2d(x, each.weight, None, *self._placed())
        biased: Tensor = _biased_silu()(y, each.bias.view(1, -1, 1, 1))
        return biased


@cache
def _biased_silu() -> Callable[..., Tensor]:
    """Return the kernel; the driver's compiler makes it at its first call for a type, without a C++ compiler."""
    from torch.cuda import jiterator

    return cast(Callable[..., Tensor], jiterator._create_jit_fn(_SILU))


_AFTER: Mapping[type[_Fused], Callable[[nn.Conv2d, Tensor, Tensor], Tensor]] = {
    _ConvReLU: lambda convolution, x, other: functional.relu(convolution(x)),
    _ConvAddReLU: lambda convolution, x, other: functional.relu(convolution(x) + other),
    _ConvSiLU: lambda convolution, x, other: functional.silu(convolution(x)),
}
"""Reference for each kind, as PyTorch computes it by itself."""


def fuse(network: nn.Module, run_s: Callable[[], float], device: str, dtype: torch.dtype) -> bool:
    """Put fused layers into `network`, on the device, in place; return True if they serve.

    `run_s`: returns the seconds of a batch of the network. Layers that are not faster, or fail, are taken out again.
    """
    kinds = frozenset(kind for kind in _AFTER if _works(cast(Hashable, kind), device, dtype))
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    count = _fuse_children(network, kinds, replaced) if kinds else 0
    if not count:
        return False
    try:
        with_s = run_s()
        reason = ""
    except Exception as error:  # Something in the network asked for a layer by its name, say.
        reason, with_s = first_line(error), float("inf")
    fused = [(parent, name, parent.get_submodule(name)) for parent, name, _ in replaced]
    _put(replaced)
    without_s = run_s()
    if with_s < without_s:
        _put(fused)
        log.info("%d convolutions on %s are fused: a batch takes %.2g s, not %.2g s", count, device, with_s, without_s)
        return True
    log.info("convolutions on %s are not fused: %s", device, reason or f"{with_s:.2g} s a batch, not {without_s:.2g} s")
    return False


def _put(modules: list[tuple[nn.Module, str, nn.Module]]) -> None:
    for parent, name, module in modules:
        parent.add_module(name, module)


def _fuse_children(
    parent: nn.Module, kinds: frozenset[type[_Fused]], replaced: list[tuple[nn.Module, str, nn.Module]]
) -> int:
    """Fuse convolutions of the children; return their number. A child that cannot be traced is searched in turn."""
    total = 0
    for name, child in list(parent.named_children()):
        try:
            traced = fx.GraphModule(child, ThreadTracer().trace(child))
            count = _rewrite(traced, kinds)
        except Exception as error:  # Whatever a network's Python does to the tracer.
            log.debug("%s is gone through child by child: %s", name, first_line(error))
            total += _fuse_children(child, kinds, replaced)
            continue
        if count:
            replaced.append((parent, name, child))
            parent.add_module(name, traced)
            total += count
    return total


def _rewrite(traced: fx.GraphModule, kinds: frozenset[type[_Fused]]) -> int:
    modules = dict(traced.named_modules())
    for node in list(traced.graph.nodes):
        if node.op == "call_module" and isinstance(modules[node.target], nn.Identity):  # Of a folded BatchNorm.
            node.replace_all_uses_with(node.args[0])
            traced.graph.erase_node(node)
    count = 0
    for node in list(traced.graph.nodes):
        found = _found(node, modules)
        if found is None or found[0] not in kinds:
            continue
        kind, convolution, inputs = found
        name = f"fused_{count}"
        traced.add_module(name, kind(cast(nn.Conv2d, modules[str(convolution.target)])))
        with traced.graph.inserting_before(node):
            node.replace_all_uses_with(traced.graph.call_module(name, inputs))
        count += 1
    if count:
        traced.graph.eliminate_dead_code()
        traced.recompile()
    return count


def _found(node: fx.Node, modules: Mapping[str, nn.Module]) -> tuple[type[_Fused], fx.Node, tuple[fx.Node, ...]] | None:
    """Return the pattern that ends in `node`: its kind, its convolution, and the inputs of both."""
    activation = _activation(node, modules)
    before = node.args[0] if activation and node.args else None
    if not isinstance(before, fx.Node) or len(before.users) != 1:
        return None
    if _is_convolution(before, modules):
        kind = _ConvReLU if activation == "relu" else _ConvSiLU
        return kind, before, (cast(fx.Node, before.args[0]),)
    if activation != "relu" or before.op != "call_function" or before.target not in _ADDITIONS or before.kwargs:
        return None
    left, right = before.args[:2]
    for convolution, other in ((left, right), (right, left)):
        if (
            isinstance(convolution, fx.Node)
            and isinstance(other, fx.Node)
            and convolution is not other
            and len(convolution.users) == 1
            and _is_convolution(convolution, modules)
        ):
            return _ConvAddReLU, convolution, (cast(fx.Node, convolution.args[0]), other)
    return None


def _activation(node: fx.Node, modules: Mapping[str, nn.Module]) -> str:
    if node.op == "call_module":
        return {nn.ReLU: "relu", nn.SiLU: "silu"}.get(type(modules[str(node.target)]), "")
    if node.op == "call_function":
        names: dict[Any, str] = {torch.relu: "relu", functional.relu: "relu", functional.silu: "silu"}
        return names.get(node.target, "")
    return ""


def _is_convolution(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
        return False
    module = modules[str(node.target)]
    plain = type(module) is nn.Conv2d and module.padding_mode == "zeros" and not isinstance(module.padding, str)
    return plain and cast(nn.Conv2d, module).bias is not None


@cache
def _works(kind: type[_Fused], device: str, dtype: torch.dtype) -> bool:
    try:
        generator = torch.Generator().manual_seed(0)
        convolution = nn.Conv2d(8, 16, 3, padding=1).to(device, dtype).to(memory_format=torch.channels_last)
        x = torch.randn(2, 8, 9, 9, generator=generator).to(device, dtype).to(memory_format=torch.channels_last)
        other = torch.randn(2, 16, 9, 9, generator=generator).to(device, dtype).to(memory_format=torch.channels_last)
        inputs = (x, other) if kind is _ConvAddReLU else (x,)
        with torch.inference_mode():
            ours, plain = kind(convolution)(*inputs).cpu().double(), _AFTER[kind](convolution, x, other).cpu().double()
    except Exception as error:  # The operator, its compiler or the kernel is not there.
        log.debug("no %s on %s", kind.__name__, device, exc_info=error)
        return False
    return bool((ours - plain).abs().max() <= _TOLERANCE * plain.abs().max())
