"""Part of `torch.npu`, `torch.mlu`, `torch.supa` and `torch.musa` that inference uses, under the vendors' names.

Owns: those modules over csrc/device.cpp, and a vendor's differences from CUDA. A name that the vendor's module lacks is
absent here too (torch.npu has no OutOfMemoryError), so that code which relies on it fails here as it would there.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.accelerator._utils import _get_device_index

from anychip_tools.simulated import behaviour
from backends.vendors.general import complete

AnyDevice: TypeAlias = "torch.device | str | int | None"


def _index(device: AnyDevice) -> int:
    return int(_get_device_index(device, optional=True))


_quirks: list[torch.library.Library] = []  # Registrations last as long as their library.


def set_quirks(made: Any, device_type: str) -> None:
    """Add the vendor's switches, which change nothing here, and its tensors' differences from CUDA's."""
    backends: Any = torch.backends
    if device_type == "mlu":
        backends.cnnl = SimpleNamespace(allow_tf32=True)
        backends.mlu = SimpleNamespace(matmul=SimpleNamespace(allow_tf32=False))
    elif device_type == "musa":
        backends.mudnn = SimpleNamespace(allow_tf32=False)
    if device_type != "npu":
        return
    made.set_compile_mode = lambda jit_compile=False: None
    made.config = SimpleNamespace(allow_internal_format=True)
    made.conv, made.matmul = SimpleNamespace(allow_hf32=True), SimpleNamespace(allow_hf32=False)

    def contiguous(tensor: Tensor, *, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
        if memory_format not in (torch.contiguous_format, torch.preserve_format):
            raise RuntimeError("NPU contiguous operator only supported contiguous memory format.")
        return tensor if tensor.is_contiguous() else tensor.clone(memory_format=torch.contiguous_format)

    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("contiguous", contiguous, "PrivateUse1")  # type: ignore[no-untyped-call]
    _quirks.append(library)


def make(device_type: str) -> Any:
    """Make `torch.<device_type>`; the caller registers it."""
    made: Any = ModuleType(f"torch.{device_type}")
    _add_devices(made, device_type)
    _add_memory(made)
    complete(made, device_type)
    if device_type == "musa":  # The public torch_musa has no such function.
        del made.is_bf16_supported
    return made


def _add_devices(made: Any, device_type: str) -> None:
    sample = behaviour.row_of(device_type).sample
    assert sample is not None
    state = SimpleNamespace(initialized=False)

    def init() -> None:  # PyTorch calls _lazy_init() before it touches the device.
        torch.ops.simdev.init()  # It raises in a forked child.
        state.initialized = True

    def in_bad_fork() -> bool:
        return bool(torch.ops.simdev.in_bad_fork())

    def device_count() -> int:  # torch.accelerator.device_count() calls this one: it must not call back.
        return int(torch.ops.simdev.device_count())

    def current_device() -> int:
        init()
        return torch.accelerator.current_device_index()

    def get_device_properties(device: AnyDevice = None) -> SimpleNamespace:
        number = _index(device)
        if not 0 <= number < device_count():
            raise AssertionError("Invalid device id")
        properties = SimpleNamespace(
            name=f"Simulated {sample.device}", total_memory=torch.ops.simdev.stat(number, "capacity")
        )
        if sample.capability:
            properties.major, properties.minor = sample.capability
        return properties

    made.init = made._lazy_init = init
    made.is_initialized = lambda: state.initialized and not in_bad_fork()
    made._is_in_bad_fork = in_bad_fork
    made.device_count, made.is_available = device_count, lambda: device_count() > 0
    made.current_device, made.set_device = current_device, torch.accelerator.set_device_index
    made.get_device_properties = get_device_properties
    made.device = lambda device: torch.accelerator.device_index(_index(device))
    made.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    made.get_device_name = lambda device=None: get_device_properties(device).name
    made.get_device_capability = lambda device=None: sample.capability  # torch.npu's answers None.
    made.is_bf16_supported = lambda *_, **__: True
    # Random numbers come from the CPU's generator, which torch.manual_seed has seeded already.
    made.manual_seed = made.manual_seed_all = lambda seed: None


def _add_memory(made: Any) -> None:
    def read(what: str) -> Any:
        return lambda device=None: int(torch.ops.simdev.stat(_index(device), what))

    def empty_cache() -> None:
        if made.is_initialized():
            for number in range(made.device_count()):
                torch.ops.simdev.empty_cache(number)

    made.empty_cache = empty_cache
    made.memory_allocated, made.memory_reserved = read("allocated"), read("reserved")
    made.max_memory_allocated = read("peak_allocated")
