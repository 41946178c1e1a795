"""Recording of the operators that a network runs on a device: how each ran, and its time.

The recorder sits below autograd and above the device's kernels. It computes a failed operator on the CPU itself, so
that one run shows all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from backends.contract.backend import Backend
from backends.contract.errors import BackendError, first_line
from backends.engines.eager import placed
from backends.operators import Operators, computed_on_cpu
from backends.vendors.torch_device import torch_device

How = Literal["native", "vendor-cpu", "cpu", "refused", "failed"]
ORDER: tuple[How, ...] = ("native", "vendor-cpu", "cpu", "refused", "failed")
"""Order from good to bad. `refused`: runs in float32, not in this type; `failed`: does not run on this device."""

_HALVES = (torch.float16, torch.bfloat16)


@dataclass
class OperatorRecord:
    """Operator with its overload. `calls`, `seconds`: of one run of the network. `reason`: why not native."""

    name: str
    how: How = "native"
    calls: int = 0
    seconds: float = 0.0
    reason: str = ""


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that sees every operator, after autograd and composite operators are taken apart."""

    def __init__(self, device: torch.device, synchronise: Callable[[], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.records: dict[str, OperatorRecord] = {}
        self.timing = False
        self._device, self._synchronise = device, synchronise

    def __torch_dispatch__(  # type: ignore[no-untyped-def]  # PyTorch's own signature has no types.
        self, func, types, args=(), kwargs=None
    ):
        record = self.records.setdefault(func.name(), OperatorRecord(func.name()))
        call = partial(func, *args, **(kwargs or {}))
        if not self.timing:
            record.calls += 1
            return self._classified(record, call)
        began_s = time.perf_counter()
        result = self._again(record, call)
        self._synchronise()
        record.seconds += time.perf_counter() - began_s
        return result

    def _classified(self, record: OperatorRecord, call: Any) -> Any:
        operators = Operators(self._device.type)
        try:
            result = operators.completed(call)
            self._synchronise()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # Vendors raise every kind.
            how, result = _refused_or_failed(call)
            self._note(record, how, first_line(error))
            return result
        instead = operators.found().get(record.name)
        if instead is not None:
            self._note(record, instead, f"{self._device.type} has no kernel for it")
        return result

    def _note(self, record: OperatorRecord, how: How, reason: str) -> None:
        if ORDER.index(how) > ORDER.index(record.how):
            record.how, record.reason = how, reason

    def _again(self, record: OperatorRecord, call: Any) -> Any:
        if record.how == "failed":
            return computed_on_cpu(call.func, call.args, call.keywords)
        if record.how == "refused":
            return _in_float32(call)
        return call()


def record(
    backend: Backend, network: Any, device: str, precision: str, inputs: Sequence[Tensor], *, runs: int = 3
) -> list[OperatorRecord]:
    """Run a network on a device: once to classify each operator, then `runs` times to measure their time.

    `network`: a module with `cast`, which the caller gives up. `inputs`: the module's, on the CPU; they are moved.
    Return the operators, the slowest first. Raises BackendError where even the CPU cannot compute an operator.
    """
    here = torch_device(backend, device)
    module = torch.get_device_module(here.type)

    def synchronise() -> None:
        if here.type != "cpu":
            module.synchronize()

    recorder = _Recorder(here, synchronise)
    try:
        placed(network, str(here), precision, False)
        given = [each.to(here) for each in inputs]
        with torch.no_grad():
            with recorder:
                network(*given)
            synchronise()
            recorder.timing = True
            for _ in range(runs):
                with recorder:
                    network(*given)
            synchronise()
    except BackendError:
        raise
    except Exception as error:  # The network is the user's and may raise anything.
        raise BackendError(f"The network does not run on {device}: {first_line(error)}") from error
    for each in recorder.records.values():
        each.seconds /= max(1, runs)
    return sorted(recorder.records.values(), key=lambda each: -each.seconds)


def names_of(network: nn.Module, inputs: Sequence[Tensor], *, as_traced: bool = False) -> list[OperatorRecord]:
    """Record a network's operators for other devices: on the CPU, without the CPU's own shortcuts.

    `as_traced`: as a compiler gets them, without operators that work in place (where the network can be written so),
    and with those that PyTorch's tracing puts in place of some (`_native_batch_norm_legit_no_training`).
    """
    called: Callable[..., object] = network
    tracing: AbstractContextManager[object] = nullcontext()
    if as_traced:
        called, tracing = torch.func.functionalize(network), enable_python_dispatcher()
    recorder = _Recorder(torch.device("cpu"), lambda: None)
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with torch.no_grad(), sdpa_kernel([SDPBackend.MATH]), tracing, recorder:
            called(*inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return list(recorder.records.values())


def is_composite(operator: str) -> bool:
    """Return True if PyTorch composes this operator of others on devices without a kernel for it."""
    keys = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CompositeImplicitAutograd")
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(operator, key) for key in keys)


def _refused_or_failed(call: Any) -> tuple[How, Any]:
    """Retry a call that raised: in float32 if it had halves, else on the CPU. Raises BackendError."""
    if any(tensor.dtype in _HALVES for tensor in _tensors((call.args, call.keywords))):
        try:
            return "refused", _in_float32(call)
        except Exception:  # Then it is not the type.
            pass
    try:
        return "failed", computed_on_cpu(call.func, call.args, call.keywords)
    except Exception as error:
        raise BackendError(f"{call.func.name()} fails, also on the CPU: {first_line(error)}") from error


def _in_float32(call: Any) -> Any:
    halves = [tensor.dtype for tensor in _tensors((call.args, call.keywords)) if tensor.dtype in _HALVES]

    def wide(value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) and value.dtype in _HALVES else value

    result = call.func(*pytree.tree_map(wide, list(call.args)), **pytree.tree_map(wide, dict(call.keywords)))

    def narrow(value: Any) -> Any:
        return value.to(halves[0]) if isinstance(value, Tensor) and value.dtype == torch.float32 else value

    return pytree.tree_map(narrow, result)


def _tensors(values: Any) -> list[Tensor]:
    return cast(list[Tensor], [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)])
