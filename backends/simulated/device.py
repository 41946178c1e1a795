"""The simulated device in this process, and the hands that tests lay on it.

Owns: installing it under its name, and what the simulation does to each batch. PyTorch has one slot for a device type
that is not its own, so that a process simulates one vendor.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration

from backends import simulated
from backends.host import core_count
from backends.simulated import module
from backends.simulated.behaviour import Simulation, row_of

_installed: Simulation | None = None


def install(device_type: str) -> ModuleType:
    """Make the torch device and `torch.<device_type>`, as configured; again: nothing more.

    Raises BackendUnavailableError where nothing, or another type, is simulated.
    """
    global _installed  # noqa: PLW0603 - PyTorch has one slot a process, too.
    if _installed is None:
        simulation, library = simulated.configured()
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]
        backend_registration.rename_privateuse1_backend(simulation.device_type)
        made = module.make(simulation.device_type)
        torch.ops.simdev.setup(simulation.device_type.upper(), simulation.devices)
        torch._register_device_module(simulation.device_type, made)
        backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
        module.set_quirks(made, simulation.device_type)
        # Each device has its share of the cores, or their threads would wait for each other.
        torch.set_num_threads(max(1, core_count() // simulation.devices))
        _installed = simulation
        for index in range(simulation.devices):
            set_capacity(simulation.memory_mb << 20, index)
        for operator in simulation.lacks:
            deny(operator)
        set_copy_delay(simulation.copy_delay_ms)
        _misbehave(simulation)
    if _installed.device_type != device_type:
        raise RuntimeError(f"this process simulates {_installed.device_type}, not {device_type}")
    loaded: ModuleType = getattr(torch, device_type)
    return loaded


def stat(what: str, device: int = 0) -> int:
    """`allocated`, `reserved`, `peak_allocated`, `peak_reserved`, `capacity`, `leaked` in bytes; `ooms`, `retries`.

    Device -1 is pinned host memory.
    """
    return int(torch.ops.simdev.stat(device, what))


def count(what: str) -> int:
    """How often since `reset`: `kernels`, `h2d`, `d2h`, `d2d`, `async_copy`, `synchronize`, or an operator's name."""
    return int(torch.ops.simdev.counter(what))


def set_capacity(memory_bytes: int, device: int = 0, others_bytes: int = 0) -> None:
    """The device's memory, and how much of it other processes hold."""
    torch.ops.simdev.capacity(device, memory_bytes, others_bytes)


def leak(leaked_bytes: int, device: int = 0, forever: bool = False) -> None:
    """Take memory that comes back with the cache; if `forever`, with the end of the process."""
    torch.ops.simdev.leak(device, leaked_bytes, forever)


def fail_after(kernels: int, out_of_memory: bool = False, for_good: bool = False) -> None:
    """After so many more kernels one fails, out of memory or with the vendor's fault; if `for_good`, all later ones."""
    assert _installed is not None
    torch.ops.simdev.fault(kernels, out_of_memory, for_good, row_of(_installed.device_type).sample_fault)


def deny(operator: str, denied: bool = True) -> None:
    """Make an operator, such as `aten::silu`, one that the device lacks."""
    torch.ops.simdev.deny(operator, denied)


def set_copy_delay(delay_ms: float) -> None:
    """How long an asynchronous copy takes: it brings a missing synchronisation to light."""
    torch.ops.simdev.copy_delay(round(delay_ms * 1000))


def reset() -> None:
    """No faults and no delays, counters at zero, caches empty."""
    torch.ops.simdev.fault(-1, False, False, "")
    set_copy_delay(0)
    for index in range(torch.ops.simdev.device_count()):
        torch.ops.simdev.empty_cache(index)
        torch.ops.simdev.reset_peak(index)
    torch.ops.simdev.reset_counters()


def _misbehave(simulation: Simulation) -> None:
    """Let each batch cost, and the chosen ones fail: before and after each outermost call of a module on the device."""
    if not (simulation.cache_mb or simulation.leak_mb or simulation.oom or simulation.lose):
        return
    depth = 0
    batches: dict[int, int] = {}

    def before(_: object, arguments: tuple[Any, ...]) -> None:
        nonlocal depth
        depth += 1
        device = _of_batch(simulation, arguments) if depth == 1 else None
        if device is None:
            return
        batches[device] = batches.get(device, 0) + 1
        # The call has not begun: not even its depth may remain when it does not take place.
        if batches[device] == simulation.oom:
            fail_after(0, out_of_memory=True)
        if batches[device] == simulation.lose:
            fail_after(0, for_good=True)
        try:
            leak(simulation.cache_mb << 20, device)
            leak(simulation.leak_mb << 20, device, forever=True)
        except BaseException:
            depth -= 1
            raise

    def after(*_: object) -> None:
        nonlocal depth
        depth -= 1

    hooks = torch.nn.modules.module
    hooks.register_module_forward_pre_hook(before)
    hooks.register_module_forward_hook(after, always_call=True)


def _of_batch(simulation: Simulation, arguments: tuple[Any, ...]) -> int | None:
    for argument in arguments:
        if isinstance(argument, Tensor) and argument.device.type == simulation.device_type:
            return argument.device.index if torch.ops.simdev.any(argument) else None
    return None
