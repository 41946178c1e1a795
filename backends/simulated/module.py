"""The part of `torch.npu`, `torch.mlu`, `torch.supa` and `torch.musa` that inference uses, under the vendors' names.

Owns: those modules over csrc/device.cpp, and where a vendor differs from CUDA. A name that the vendor's module lacks is
absent here too (torch.npu has no OutOfMemoryError), so that code which relies on it fails here as it would there.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from backends.simulated import behaviour

AnyDevice: TypeAlias = "torch.device | str | int | None"


_quirks: list[torch.library.Library] = []  # What is registered lasts as long as its library.


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
    """`torch.<device_type>`, not yet registered."""
    made: Any = ModuleType(f"torch.{device_type}")
    _add_devices(made, device_type)
    _add_memory(made, device_type)
    _add_streams(made, device_type)
    if device_type == "musa":  # The public torch_musa does not offer these.
        del made.StreamContext, made.is_bf16_supported
    for value in vars(made).values():
        if isinstance(value, type):
            value.__module__, value.__qualname__ = made.__name__, value.__name__
    return made


def _index(device_type: str, device: AnyDevice) -> int:
    """The device's number, as torch._utils._get_device_index(optional=True) has it."""
    if device is None or (isinstance(device, int) and device < 0):
        return torch.accelerator.current_device_index()
    if isinstance(device, int):
        return device
    device = torch.device(device)
    if device.type != device_type:
        raise ValueError(f"Expected a {device_type} device, but got: {device}")
    return torch.accelerator.current_device_index() if device.index is None else device.index


def _add_devices(made: Any, device_type: str) -> None:
    sample = behaviour.row_of(device_type).sample
    assert sample is not None
    state = SimpleNamespace(initialized=False)

    def index(given: AnyDevice) -> int:
        return _index(device_type, given)

    def init() -> None:  # PyTorch calls _lazy_init() before it touches the device.
        torch.ops.simdev.init()  # It raises in a forked child.
        state.initialized = True

    def in_bad_fork() -> bool:
        return bool(torch.ops.simdev.in_bad_fork())

    def device_count() -> int:  # torch.accelerator.device_count() asks this one: it must not ask back.
        return int(torch.ops.simdev.device_count())

    def current_device() -> int:
        init()
        return torch.accelerator.current_device_index()

    def set_device(device: AnyDevice) -> None:
        torch.accelerator.set_device_index(index(device))

    def synchronize(device: AnyDevice = None) -> None:
        init()
        torch.accelerator.synchronize(index(device))

    def get_device_properties(device: AnyDevice = None) -> SimpleNamespace:
        number = index(device)
        if not 0 <= number < device_count():
            raise AssertionError("Invalid device id")
        properties = SimpleNamespace(
            name=f"Simulated {sample.device}", total_memory=torch.ops.simdev.stat(number, "capacity")
        )
        if sample.capability:
            properties.major, properties.minor = sample.capability
        return properties

    class device:  # noqa: N801 - The vendors' name.
        def __init__(self, device: AnyDevice) -> None:
            self.idx = index(device)
            self.prev_idx = -1

        def __enter__(self) -> None:
            self.prev_idx = torch.accelerator.current_device_index()
            torch.accelerator.set_device_index(self.idx)

        def __exit__(self, *_: object) -> None:
            torch.accelerator.set_device_index(self.prev_idx)

    made.init = made._lazy_init = init
    made.is_initialized = lambda: state.initialized and not in_bad_fork()
    made._is_in_bad_fork = in_bad_fork
    made.device_count, made.is_available = device_count, lambda: device_count() > 0
    made.current_device, made.set_device, made.synchronize, made.device = (
        current_device,
        set_device,
        synchronize,
        device,
    )
    made.get_device_properties = get_device_properties
    made.get_device_name = lambda device=None: get_device_properties(device).name
    made.get_device_capability = lambda device=None: sample.capability  # torch.npu's answers None.
    made.is_bf16_supported = lambda *_, **__: True
    # Random numbers come from the CPU's generator, which torch.manual_seed has seeded already.
    made.manual_seed = made.manual_seed_all = lambda seed: None


def _add_memory(made: Any, device_type: str) -> None:
    def read(what: str) -> Any:
        return lambda device=None: int(torch.ops.simdev.stat(_index(device_type, device), what))

    def empty_cache() -> None:
        if made.is_initialized():
            for number in range(made.device_count()):
                torch.ops.simdev.empty_cache(number)

    def mem_get_info(device: AnyDevice = None) -> tuple[int, int]:
        return torch.accelerator.get_memory_info(_index(device_type, device))

    made.empty_cache, made.mem_get_info = empty_cache, mem_get_info
    made.memory_stats = lambda device=None: torch.accelerator.memory_stats(_index(device_type, device))
    made.memory_allocated, made.max_memory_allocated = read("allocated"), read("peak_allocated")
    made.memory_reserved, made.max_memory_reserved = read("reserved"), read("peak_reserved")
    made.reset_peak_memory_stats = lambda device=None: torch.ops.simdev.reset_peak(_index(device_type, device))


def _add_streams(made: Any, device_type: str) -> None:
    class Stream(torch.Stream):
        def __new__(cls, device: AnyDevice = None, priority: int = 0, **known: Any) -> Any:
            if known:
                return super().__new__(cls, **known)
            return super().__new__(cls, torch.device(device_type, _index(device_type, device)), priority=priority)

    class Event:  # A plain torch.Event: its elapsed_time() takes no subclass.
        def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
            device = torch.device(device_type)
            return torch.Event(device, enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)

    def current_stream(device: AnyDevice = None) -> Stream:
        stream = torch.accelerator.current_stream(_index(device_type, device))
        made_stream: Stream = Stream(
            stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
        )
        return made_stream

    def default_stream(device: AnyDevice = None) -> Stream:
        number, kind = _index(device_type, device), torch._C._autograd.DeviceType.PrivateUse1
        made_stream: Stream = Stream(stream_id=0, device_index=number, device_type=kind.value)
        return made_stream

    def set_stream(stream: torch.Stream | None) -> None:
        if stream is not None:
            torch.accelerator.set_stream(stream)

    class StreamContext:
        def __init__(self, stream: Stream | None) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            if self.stream is not None:
                self.before = current_stream(), current_stream(self.stream.device)
                set_stream(self.stream)

        def __exit__(self, *_: object) -> None:
            if self.stream is not None:
                set_stream(self.before[1])
                set_stream(self.before[0])

    made.Stream, made.Event, made.StreamContext, made.stream = Stream, Event, StreamContext, StreamContext
    made.current_stream, made.default_stream, made.set_stream = current_stream, default_stream, set_stream
