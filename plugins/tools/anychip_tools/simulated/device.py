"""Simulated device in this process, with the controls that tests use.

Owns: installing it under its name, and the simulation's effect on each batch. PyTorch has one slot for a device type
that is not its own, so that a process simulates one vendor.
"""

from __future__ import annotations

import time
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration

from anychip_tools.simulated import configured, graphs, module, recorded
from anychip_tools.simulated.behaviour import Simulation, row_of
from backends.host import core_count

_installed: Simulation | None = None


def install(device_type: str) -> ModuleType:
    """Make the torch device and `torch.<device_type>`, as configured; a second call adds nothing.

    Raises BackendUnavailableError if nothing is simulated; RuntimeError if this process simulates another type.
    """
    global _installed  # noqa: PLW0603 - PyTorch has one slot a process, too.
    if _installed is None:
        simulation, library = configured()
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]
        backend_registration.rename_privateuse1_backend(simulation.device_type)
        made = module.make(simulation.device_type)
        torch.ops.simdev.setup(simulation.device_type.upper(), simulation.devices)
        torch._register_device_module(simulation.device_type, made)
        backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
        module.set_quirks(made, simulation.device_type)
        # Each device gets its share of the cores, else their threads would wait for each other.
        torch.set_num_threads(max(1, core_count() // simulation.devices))
        _installed = simulation
        for index in range(simulation.devices):
            set_capacity(simulation.memory_mb << 20, index, simulation.others_mb << 20)
        for operator in simulation.lacks:
            deny(operator)
        set_copy_delay(simulation.copy_delay_ms)
        batches = _Batches(simulation)
        batches.watch_modules()
        if simulation.graphs:
            graphs.add_graphs(made, row_of(simulation.device_type).graph_class, batches.begin)
        if simulation.sick >= 0:
            recorded.make_sick(made, simulation.sick, row_of(simulation.device_type).visibility_variable)
        if simulation.fault:
            recorded.fail(made, simulation.fault)
    if _installed.device_type != device_type:
        raise RuntimeError(f"this process simulates {_installed.device_type}, not {device_type}")
    loaded: ModuleType = getattr(torch, device_type)
    return loaded


def count(what: str) -> int:
    """Return the count so far of `kernels`, `h2d`, `d2h`, `d2d`, `async_copy`, `synchronize`, or an operator's name."""
    return int(torch.ops.simdev.counter(what))


def set_capacity(memory_bytes: int, device: int = 0, others_bytes: int = 0) -> None:
    """Set the device's memory, and how much of it other processes hold."""
    torch.ops.simdev.capacity(device, memory_bytes, others_bytes)


def leak(leaked_bytes: int, device: int = 0, forever: bool = False) -> None:
    """Take memory that a cache release returns; if `forever`, memory that only the end of the process returns."""
    torch.ops.simdev.leak(device, leaked_bytes, forever)


def weigh(network: object, device: str) -> None:
    """Take as long and as much memory for a prepared network as the simulation says."""
    assert _installed is not None
    time.sleep(_installed.load_ms / 1e3)
    # It lives as long as the network.
    network.ballast = torch.empty(_installed.model_mb << 20, dtype=torch.uint8, device=device)  # type: ignore[attr-defined]


def fail_after(kernels: int, out_of_memory: bool = False, for_good: bool = False) -> None:
    """Fail a kernel after so many more, out of memory or with the vendor's fault; if `for_good`, all later ones."""
    assert _installed is not None
    sample = row_of(_installed.device_type).sample
    torch.ops.simdev.fault(kernels, out_of_memory, for_good, sample.fault if sample else "")


def deny(operator: str, denied: bool = True) -> None:
    """Remove the device's kernel for an operator, such as `aten::silu`."""
    torch.ops.simdev.deny(operator, denied)


def set_copy_delay(delay_ms: float) -> None:
    """Set the time of an asynchronous copy: it brings a missing synchronisation to light."""
    torch.ops.simdev.copy_delay(round(delay_ms * 1000))


class _Batches:
    """Effects on batches: each costs memory, and the chosen ones fail."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._depth = 0
        self._begun: dict[int, int] = {}

    def begin(self, images: Tensor) -> None:
        """Begin a batch of these images. Raise what the device raises for it; then it has not begun."""
        simulation = self._simulation
        if images.device.type != simulation.device_type or not torch.ops.simdev.any(images):
            return
        device = images.device.index
        self._begun[device] = self._begun.get(device, 0) + 1
        if self._begun[device] == simulation.oom:
            fail_after(0, out_of_memory=True)
        if self._begun[device] == simulation.lose:
            fail_after(0, for_good=True)
        leak(simulation.cache_mb << 20, device)
        leak(simulation.leak_mb << 20, device, forever=True)

    def watch_modules(self) -> None:
        """Count each outermost call of a module on the device as a batch."""
        simulation = self._simulation
        if not (simulation.cache_mb or simulation.leak_mb or simulation.oom or simulation.lose):
            return
        hooks = torch.nn.modules.module
        hooks.register_module_forward_pre_hook(self._before)
        hooks.register_module_forward_hook(self._after, always_call=True)

    def _before(self, _: object, arguments: tuple[Any, ...]) -> None:
        self._depth += 1
        device_type = self._simulation.device_type
        given = (each for each in arguments if isinstance(each, Tensor) and each.device.type == device_type)
        images = next(given, None) if self._depth == 1 else None
        if images is None:
            return
        try:
            self.begin(images)
        except BaseException:
            self._depth -= 1  # The call does not take place, so its depth must not remain.
            raise

    def _after(self, *_: object) -> None:
        self._depth -= 1
