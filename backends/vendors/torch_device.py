"""Base of all accelerators that PyTorch reaches: a vendor brings its row, and DeviceHooks for what a row cannot say.

Must not import a vendor's package except in `_module`, in the process that owns the device. Run on an H100
(docs/hardware.md), unverified on other vendors' cards.
"""

from __future__ import annotations

import atexit
import gc
import glob
import importlib
import logging
import os
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from types import FunctionType, ModuleType
from typing import Any

import torch

from backends import detect, host
from backends.contract.backend import (
    DEFAULTS,
    Backend,
    CompileOptions,
    Device,
    ImageDecoder,
    LoadedNetwork,
    Memory,
    Network,
    Probe,
    Telemetry,
    wanted,
)
from backends.contract.errors import (
    BackendError,
    BackendUnavailableError,
    DeviceLostError,
    EngineRefusedError,
    OutOfDeviceMemoryError,
    first_line,
    translated_errors,
)
from backends.engines import Engine, compile_first, engines_of
from backends.operators import Operators
from backends.simulated import package, simulates
from backends.telemetry.sampling import Sampler, Tool
from backends.telemetry.tools import reader
from backends.vendors.table import Facts

log = logging.getLogger(__name__)


class DeviceHooks:
    """Steps beside the row of a vendor of a PyTorch device type: override those that your devices need.

    `engines`: those in the row that anychip itself does not have. anychip calls the methods in the process that owns
    the device. `module`: the device's module of torch, such as torch.npu, or its stand-in. Errors of the vendor's
    software are translated.
    """

    engines: tuple[type[Engine], ...] = ()

    def set_up(self, module: Any) -> None:
        """Set the vendor's software up: called once the device is chosen and the switches of its row are set."""

    def has_bf16(self, module: Any) -> bool:
        """Return True if the chip has bf16. A vendor's older chips lack it: 910A, 310P, MLU370 and before."""
        knows_bf16 = getattr(module, "is_bf16_supported", None)
        return knows_bf16 is None or bool(knows_bf16())

    def empty_host_cache(self, module: Any) -> None:
        """Give back pinned memory of the host that is kept and not used. For `cuda` and `xpu`, PyTorch itself does."""
        if hasattr(module, "host_empty_cache"):  # As torch_npu has it from 2.10 on.
            module.host_empty_cache()

    def image_decoder(self, device: str) -> ImageDecoder | None:
        """Return the vendor's decoder of JPEG on a device, by PyTorch's name of it; None without one."""
        return None

    def tool_index(self, index: int, visible: int | None) -> int | None:
        """Return the number in the vendor's tool of the device that torch calls `index`; None if unknown.

        `visible`: the number in the visibility variable, which hides devices from torch and not from the tools.
        """
        return visible


class TorchBackend(Backend):
    """Backend of a vendor behind a PyTorch device type. `name` is the value for `--device`; ids are `name:index`."""

    def __init__(self, facts: Facts, hooks: DeviceHooks | None = None) -> None:
        self.facts, self.hooks, self.name = facts, hooks or DeviceHooks(), facts.name
        self._taken: tuple[Device, ...] | None = None  # Found by another process.

    def probe(self) -> Probe:
        """Probe; the first call in a process may take the child's time. No context is created here."""
        try:
            reason = self._refusal()
        except Exception as error:  # The contract: whatever happens, it is an answer.
            log.debug("probing %s", self.name, exc_info=True)
            reason = f"{self.facts.title} could not be probed: {first_line(error)}"
        return Probe(not reason, reason, not reason or self._is_here(), {} if reason else self._silent())

    def devices(self) -> list[Device]:
        if self._taken is not None:
            return list(self._taken)
        probe = self.probe()
        if not probe.available:
            raise BackendUnavailableError(probe.reason)
        # A CPU without fp16 units takes seconds for an image in it.
        precision = "fp32" if simulates(self.facts.device_type) else self.facts.precisions[0]
        return [
            Device(
                f"{self.name}:{index}",
                str(one["name"]),
                int(one["memory_bytes"]),
                precision,
                {key: str(one[key]) for key in ("uuid", "pci") if one.get(key)},
            )
            for index, one in enumerate(self._found.devices)
            if not one.get("error")
        ]

    def load(
        self,
        network: Network,
        device: str,
        engine: str,
        precision: str,
        batch_sizes: Sequence[int],
        *,
        options: CompileOptions = DEFAULTS,
    ) -> LoadedNetwork:
        precisions, options = wanted(self, device, precision, options)
        engines = engines_of(self.facts, engine, network, host.core_count(), self.hooks.engines)
        target = self._torch_id(device)
        module = self._module()
        with translated_errors(target):
            module.set_device(_index(device))
            _set_switches(module, self.facts.switches)
            self.hooks.set_up(module)
        if precisions[0] == "bf16" and not self.hooks.has_bf16(module):
            raise EngineRefusedError(f"{target} has no bf16: choose fp16 or fp32.")
        operators = Operators(self.facts.device_type)
        try:
            loaded = compile_first(
                engines, network, target, precisions, batch_sizes, options=options, completed=operators.completed
            )
            if simulates(self.facts.device_type):
                with translated_errors(target):
                    package().weigh(loaded.executable, target)
        except OutOfDeviceMemoryError as error:
            raise OutOfDeviceMemoryError(f"{error}{_held_by_others(self.memory, device)}") from error
        return loaded._replace(report=replace(loaded.report, operators=operators.found()))

    def memory(self, device: str) -> Memory:
        """Return the memory, in the process that owns the device: this creates a context."""
        target, module = self._torch_id(device), self._module()
        with translated_errors(target):
            allocated, reserved = int(module.memory_allocated(target)), int(module.memory_reserved(target))
        try:
            with translated_errors(target):
                free, total = module.mem_get_info(target)
        except DeviceLostError:
            raise
        except (BackendError, AttributeError, NotImplementedError) as error:
            # Some devices do not say how much is free (Intel's client GPUs: pytorch#159728). Then what others hold is
            # not known, and no reason to end a worker.
            log.debug("%s does not say how much memory is free: %s", device, error)
            total = max(reserved, int(getattr(module.get_device_properties(target), "total_memory", 0) or 0))
            free = total - reserved
        return Memory(allocated, reserved, int(total - free), int(total))

    def release_cache(self, device: str) -> int:
        """Return the bytes that the device's allocator gave back; the host's are not counted."""
        target, module = self._torch_id(device), self._module()
        with translated_errors(target):
            before = int(module.memory_reserved(target))
            gc.collect()
            module.empty_cache()
            returned = max(0, before - int(module.memory_reserved(target)))
        try:
            with translated_errors(target):
                _empty_host_cache(self.facts.device_type)
                self.hooks.empty_host_cache(module)
        except DeviceLostError:
            raise
        except BackendError as error:  # No allocator of pinned memory is known of the device type.
            log.debug("%s keeps its pinned memory: %s", device, error)
        return returned

    def beside(self, device: str) -> AbstractContextManager[object]:
        """Return a stream of its own: allocators give memory freed on a stream to the next user of that stream."""
        module = self._module()
        module.set_device(_index(device))
        stream: AbstractContextManager[object] = module.stream(module.Stream())
        return stream

    def telemetry(self, device: str) -> Telemetry:
        """Return the last sample of the vendor's tool, at once; NaN at first, without a tool, or if it is silent."""
        if simulates(self.facts.device_type) or not self.facts.telemetry:
            return Telemetry()
        number = _index(device)
        index = self.hooks.tool_index(number, _visible(number, self.facts.visibility_variable or ""))
        return Telemetry() if index is None else self._sampler.latest(index)

    def image_decoder(self, device: str) -> ImageDecoder | None:
        target = self._torch_id(device)
        if not simulates(self.facts.device_type):
            return self.hooks.image_decoder(target)
        module = self._module()  # Before PyTorch hears the device's name.
        decoder: ImageDecoder | None = package().image_decoder(target)
        if decoder is not None:
            module.set_device(_index(device))
        return decoder

    def take(self, devices: Sequence[Device]) -> None:
        self._taken = tuple(devices)

    @cached_property
    def _sampler(self) -> Sampler:
        made = Sampler(reader(self.facts.telemetry), Tool())
        atexit.register(made.close)
        return made

    @property
    def _found(self) -> detect.Found:
        return detect.found(self.facts.stand_in or self._package, self.facts.device_type)

    def _not_installed(self) -> str:
        """Return the reason why the software is missing, "" if it is there."""
        if self._package and not detect.installed(self._package):
            return f"{self._package} is not installed: {self.facts.install}."
        built_for = self.facts.torch_build or self.facts.device_type
        if built_for in ("cuda", "hip", "xpu") and not getattr(torch.version, built_for, None):
            return f"This torch is not built for {self.facts.title}: {self.facts.install}."
        return ""

    @property
    def _package(self) -> str:
        """Return the package to import, the first that is installed; "": the device type is part of torch."""
        packages = self.facts.packages
        return next((each for each in packages if detect.installed(each)), packages[-1] if packages else "")

    def _is_here(self) -> bool:
        """Return True for a package of the vendor's, or its driver and, if the system shows cards, a card."""
        cards = detect.system_evidence().pci
        card = not cards or not self.facts.pci_vendor or self.facts.pci_vendor in cards
        return (bool(driver_files(self)) and card) or (bool(self._package) and detect.installed(self._package))

    def _mistaken(self, answer: detect.Found) -> str:
        """Return the reason why the devices are not this vendor's, "" if they are."""
        return ""

    def _refusal(self) -> str:
        if reason := self._not_installed():
            return reason
        here = bool(driver_files(self)) or not self.facts.device_files  # Of no file it is known that it is missing.
        node = next(iter(self.facts.device_files), "").replace("[0-9]*", "0").replace("*", "128")
        missing = (
            f"the driver of {self.facts.title} is not there: {node} is missing; "
            "install the driver, and pass the device into the container"
        )
        # A preloaded library may stand in for a driver; a package of the vendor's may say more than a missing file.
        if not here and not self._package and not os.environ.get("LD_PRELOAD"):
            return _sentence(missing)
        answer = self._found
        if answer.error:
            what = self._package or "torch"
            return _sentence(
                f"{what} is installed and cannot be used: {answer.error.rstrip('.')}" + ("" if here else f"; {missing}")
            )
        if reason := self._mistaken(answer):
            return reason
        if answer.devices and all(one.get("error") for one in answer.devices):
            reasons = "; ".join(self._silent().values())
            return _sentence(f"No device of {self.facts.title} answers: {reasons.rstrip('.')}")
        if not answer.devices:
            variable = self.facts.visibility_variable or ""
            hint = variable if variable in os.environ else "the driver with the vendor's tool"
            return _sentence(
                f"{self.facts.title} has no device that this process may use; check {hint}" if here else missing
            )
        return ""

    def _silent(self) -> dict[str, str]:
        found = self._found.devices if self._taken is None else ()
        return {f"{self.name}:{index}": str(one["error"]) for index, one in enumerate(found) if one.get("error")}

    def _torch_id(self, device: str) -> str:
        return f"{self.facts.device_type}:{_index(device)}"

    def _module(self) -> Any:
        device_type = self.facts.device_type
        if self.facts.stand_in:
            with translated_errors(device_type):
                return complete(pkgutil.resolve_name(self.facts.stand_in)(), device_type)
        try:
            if self._package:
                importlib.import_module(self._package)
            return complete(torch.get_device_module(device_type), device_type)
        except Exception as error:  # Vendors raise every kind.
            raise BackendError(f"{self._package or 'torch'} cannot be used: {first_line(error)}") from error


def torch_device(backend: Backend, device: str) -> torch.device:
    """Return PyTorch's own name of a backend's device, ready to be used in this process. Raises BackendError.

    Tools use it to look into a network operator by operator; workers use `Backend.load`.
    """
    if not isinstance(backend, TorchBackend):
        return torch.device(device.partition(":")[0])
    module, target = backend._module(), backend._torch_id(device)
    with translated_errors(target):
        module.set_device(_index(device))
    return torch.device(target)


_IN_TORCH = {
    "synchronize": "synchronize",
    "current_stream": "current_stream",
    "empty_cache": "empty_cache",
    "memory_allocated": "memory_allocated",
    "memory_reserved": "memory_reserved",
    "mem_get_info": "get_memory_info",
}
"""Names in a device's module, and those of the same functions in torch.accelerator, which has memory from 2.9 on."""


def complete(module: Any, device_type: str) -> Any:
    """Add to a device's module of torch what it lacks and PyTorch has for every accelerator; return the module.

    PyTorch asks for few names in the module of a device type that is not its own: its own example of a vendor,
    torch_openreg, has neither streams nor memory there, and torch.accelerator has both.
    """
    if not isinstance(module, ModuleType):  # A substitute, where PyTorch does not reach the cards.
        return module
    general = getattr(torch, "accelerator", None)
    found: dict[str, Any] = {name: getattr(general, of_torch, None) for name, of_torch in _IN_TORCH.items()}
    found |= {"Stream": partial(torch.Stream, device_type), "Event": partial(torch.Event, device_type)}
    found["stream"] = lambda stream: nullcontext() if stream is None else stream  # A stream is its own context.
    for name, function in found.items():
        if function is not None and not hasattr(module, name):
            setattr(module, name, function)
    return module


def _index(device: str) -> int:
    """Return the number in a device's name: all that PyTorch's own example of a vendor takes for its `set_device`."""
    return int(device.partition(":")[2] or "0")


def _empty_host_cache(device_type: str) -> None:
    """Give back pinned memory of the host that is kept and not used, on the device types that are torch's own.

    torch 2.14 has a call for every accelerator (torch/accelerator/memory.py), before it one for what answers to
    torch.cuda (torch/_C/__init__.pyi). A vendor's own device type may have no such allocator: there the call may end
    the process (seen with torch 2.14.1). A vendor's hook calls what its package has.
    """
    if device_type not in ("cuda", "xpu"):
        return
    general = getattr(getattr(torch, "accelerator", None), "empty_host_cache", None)
    if empty := general or (device_type == "cuda" and getattr(torch._C, "_host_emptyCache", None)):
        empty()


def _visible(index: int, variable: str) -> int | None:
    """Return the number that a visibility variable has for torch's device `index`; None if it names it otherwise."""
    visible = os.environ.get(variable)
    if not visible:
        return index
    names = [name.strip() for name in visible.split(",")]
    return int(names[index]) if index < len(names) and names[index].isdigit() else None


def _set_switches(module: Any, switches: Mapping[str, bool]) -> None:
    """Set the switches, and log those that are not there: a newer package may have renamed one, and takes any name."""
    for path, value in switches.items():
        *holders, name = path.removeprefix("torch.").split(".")
        target: Any = torch if path.startswith("torch.") else module
        try:
            for holder in holders:
                target = getattr(target, holder)
            if not _is_known(target, name):
                log.warning("%s is set to %s, and is not known: the gate judges the answers", path, value)
            setattr(target, name, value)
        except AttributeError as error:
            log.warning("%s is not set to %s: %s", path, value, first_line(error))


def _is_known(target: Any, name: str) -> bool:
    """Return False for a switch that torch_npu's objects do not have: of those that can be read, newer ones give None.
    Those of 2.12 and before cannot be read.
    """
    try:
        return getattr(target, name) is not None
    except AttributeError:
        return isinstance(vars(type(target)).get("__setattr__"), classmethod | FunctionType)


def _held_by_others(memory_of: Callable[[str], Memory], device: str) -> str:
    """Return a hint for a device that is too small, if others hold a quarter of its memory; else ""."""
    try:
        memory = memory_of(device)
    except BackendError:
        return ""
    others = memory.used - memory.reserved
    if others < memory.total / 4:
        return ""
    held = f"{others / 2**30:.1f} of {memory.total / 2**30:.1f} GiB"
    return f" Other processes hold {held} of {device}: end them, or choose another device."


def driver_files(backend: TorchBackend) -> list[str]:
    """Return the device files of the backend's vendor's driver that exist, whether or not they may be opened."""
    return [path for pattern in backend.facts.device_files for path in glob.glob(pattern)]


def _sentence(text: str) -> str:
    return f"{text[0].upper() if text.startswith('the ') else text[0]}{text[1:]}."
