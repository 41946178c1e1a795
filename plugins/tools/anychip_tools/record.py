"""Which operators a network runs on a device, how each of them ran, and how long it took.

    recorder ─► each operator: on the device │ by a replacement │ on the CPU │ refused the type │ failed

Owns: the recording, below autograd and above the device's kernels, and the device's placement of the network for it.
An operator that fails is computed on the CPU by the recorder itself, so that one run shows all of them. Must not know
what is to be done about them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
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
from backends.operators.operators import Operators, computed_on_cpu, fixed_shapes
from backends.vendors.torch_device import torch_device

How = Literal["native", "replaced", "vendor-cpu", "cpu", "refused", "failed"]
ORDER: tuple[How, ...] = ("native", "replaced", "vendor-cpu", "cpu", "refused", "failed")
"""From good to bad. `refused`: the type, which float32 is not; `failed`: no way on this device at all."""

# What vendors do in silence they then say, or leave to us (docs/operators.md has the sources).
SPOKEN_FALLBACKS = {
    "TORCH_NPU_FALLBACK_CPU_DISABLE": "1",
    "ENABLE_FALLBACK_TO_CPU": "0",
    "PYTORCH_DEBUG_XPU_FALLBACK": "1",
}
_HALVES = (torch.float16, torch.bfloat16)


@dataclass
class OperatorRecord:
    """One operator with its overload. `calls` and `seconds` are of one run of the network; `reason`: why not native."""

    name: str
    how: How = "native"
    calls: int = 0
    seconds: float = 0.0
    reason: str = ""
    dtypes: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Recording:
    """What a run showed. `rewritten`: modules that were changed before it, for fixed shapes. `seconds`: of one run."""

    operators: tuple[OperatorRecord, ...]
    rewritten: tuple[str, ...]
    seconds: float


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator once autograd and composite operators are taken apart."""

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
            record.dtypes.update(str(t.dtype).removeprefix("torch.") for t in _tensors((args, kwargs)))
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
) -> Recording:
    """Run a network on a device, once to see what becomes of each operator and `runs` times to take their time.

    `network`: a module with `cast`, the caller's no more. `inputs`: on the CPU, what the module takes; they are moved.
    Raises BackendError where even the CPU cannot compute an operator.
    """
    here = torch_device(backend, device)
    rewritten: list[str] = []
    if backend.facts.fixed_shapes and hasattr(network, "input_shape"):
        rewritten = fixed_shapes(network, network.input_shape)
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
            began_s = time.perf_counter()
            if all(each.how not in ("failed", "refused") for each in recorder.records.values()):
                network(*given)
            synchronise()
            whole_s = time.perf_counter() - began_s
    except BackendError:
        raise
    except Exception as error:  # The network is the user's and may raise anything.
        raise BackendError(f"The network does not run on {device}: {first_line(error)}") from error
    for each in recorder.records.values():
        each.seconds /= max(1, runs)
    records = sorted(recorder.records.values(), key=lambda each: -each.seconds)
    return Recording(tuple(records), tuple(rewritten), whole_s)


def names_of(network: nn.Module, inputs: Sequence[Tensor], *, as_traced: bool = False) -> Recording:
    """The operators that a network is made of for other devices: recorded on the CPU, without its own shortcuts.

    `as_traced`: as a compiler gets them, without operators that work in place (where the network can be written so),
    and with what PyTorch's tracing has in place of some (`_native_batch_norm_legit_no_training`).
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
    return Recording(tuple(recorder.records.values()), (), 0.0)


def is_composite(operator: str) -> bool:
    """Whether PyTorch makes this operator of others on devices that have no kernel of their own for it."""
    keys = (
        "CompositeExplicitAutograd",
        "CompositeExplicitAutogradNonFunctional",
        "CompositeImplicitAutograd",
    )
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(operator, key) for key in keys)


def speak_of_fallbacks(surroundings: Mapping[str, str]) -> None:
    """Set the vendors' switches so that their fallbacks are seen; what the surroundings say wins. Before any import."""
    os.environ.update({name: value for name, value in SPOKEN_FALLBACKS.items() if name not in surroundings})


def _refused_or_failed(call: Any) -> tuple[How, Any]:
    """An operator that raised: tried in float32 where it had halves, and else on the CPU. Raises BackendError."""
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
