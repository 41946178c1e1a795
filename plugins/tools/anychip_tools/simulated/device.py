"""Simulated device in this process: its installation, its module of torch over csrc/device.cpp, and tests' controls.

A name that the vendor's module lacks is absent here too, so that code which relies on it fails here as it would there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.accelerator._utils import _get_device_index
from torch.utils import _pytree as pytree
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

from anychip_tools.behaviour import RECORDED, Simulation, row_of
from anychip_tools.simulated import configured
from backends.host import core_count
from backends.vendors.torch_device import complete

AnyDevice: TypeAlias = "torch.device | str | int | None"

_installed: Simulation | None = None
_quirks: list[torch.library.Library] = []  # Registrations last as long as their library.


def install(device_type: str) -> ModuleType:
    """Make the torch device and `torch.<device_type>`, as configured; a second call adds nothing.

    Raises BackendUnavailableError if nothing is simulated; RuntimeError if this process simulates another type.
    """
    global _installed  # noqa: PLW0603 - PyTorch has one slot a process, too.
    if _installed is None:
        simulation, library = configured()
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]
        backend_registration.rename_privateuse1_backend(simulation.device_type)
        made = _make(simulation.device_type)
        torch.ops.simdev.setup(simulation.device_type.upper(), simulation.devices)
        torch._register_device_module(simulation.device_type, made)
        backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
        _set_quirks(made, simulation.device_type)
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
            _add_graphs(made, row_of(simulation.device_type).graph_class, batches.begin)
        if simulation.sick >= 0:
            _make_sick(made, simulation.sick, row_of(simulation.device_type).visibility_variable)
        if simulation.fault:
            _fail(made, simulation.fault)
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


def _index(device: AnyDevice) -> int:
    return int(_get_device_index(device, optional=True))


def _set_quirks(made: Any, device_type: str) -> None:
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


def _make(device_type: str) -> Any:
    made: Any = ModuleType(f"torch.{device_type}")
    _add_devices(made, device_type)
    _add_memory(made)
    complete(made, device_type)
    if device_type == "musa":  # The public torch_musa has no such function.
        del made.is_bf16_supported
    return made


def _add_devices(made: Any, device_type: str) -> None:
    sample = row_of(device_type).sample
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


class _Capture(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[tuple[Callable[..., object], tuple[Any, ...], dict[str, Any], object]] = []

    def __torch_dispatch__(
        self, func: Callable[..., object], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        self.steps.append((func, args, kwargs or {}, result))
        return result


def _add_graphs(made: Any, graph_class: str, before_replay: Callable[[Tensor], None]) -> None:
    """Add graphs to a device's module. Each replay calls `before_replay` with the first tensor of its capture."""

    class Graph:
        def __init__(self) -> None:
            self._capture = _Capture()

        def replay(self) -> None:
            """Run the operators again, on the same tensors. Raises what an operator raises."""
            steps = self._capture.steps
            first = next((each for _, args, _, _ in steps for each in args if isinstance(each, Tensor)), None)
            if first is not None:
                before_replay(first)
            with torch.inference_mode():
                for func, args, kwargs, result in steps:
                    again = pytree.tree_leaves(func(*args, **kwargs))
                    for old, new in zip(pytree.tree_leaves(result), again, strict=True):
                        if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                            old.copy_(new)

        def reset(self) -> None:
            self._capture.steps.clear()

        def pool(self) -> tuple[int, int]:
            return 0, 0

    @contextmanager
    def graph(captured: Graph, pool: Any = None, stream: Any = None, **_: Any) -> Iterator[None]:
        with torch.inference_mode(), captured._capture:
            yield

    Graph.__qualname__ = Graph.__name__ = graph_class
    Graph.__module__ = made.__name__
    setattr(made, graph_class, Graph)
    made.graph, made.graph_pool_handle = graph, lambda: (0, 0)


def _fail(made: Any, name: str) -> None:
    """Let the module's function of this name, one of RECORDED, fail as recorded; do nothing if the module lacks it."""

    def failing(*_: object, **__: object) -> NoReturn:
        raise RuntimeError(RECORDED[name])

    if hasattr(made, name):
        setattr(made, name, failing)


def _make_sick(made: Any, sick: int, variable: str | None) -> None:
    """Let one device answer nothing, and none if it is the first visible one (torch_npu: NpuSysCtrl::Initialize)."""
    properties, set_device = made.get_device_properties, made.set_device
    visible = [name.strip() for name in os.environ.get(variable or "", "").split(",") if name.strip()]

    def check(index: str) -> None:
        if (visible[int(index)] if int(index) < len(visible) else index) == str(sick):
            raise RuntimeError("the device does not answer: it is simulated as sick")

    def get_device_properties(device: Any = None) -> Any:
        check("0")
        check(str(device).rpartition(":")[2])
        return properties(device)

    def checked_set_device(device: Any) -> None:
        check(str(device).rpartition(":")[2])
        set_device(device)

    made.get_device_properties, made.set_device = get_device_properties, checked_set_device
