"""Operators that a device lacks, computed on the CPU by a copy there and back, from the first failure on.

Registrations stay for the life of the process: PyTorch has one dispatcher. They are made at load only, in the thread
that owns the device. Must not know engines, or which vendor it helps.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.library import Library
from torch.utils import _pytree as pytree

Kind = Literal["cpu", "vendor-cpu"]
T = TypeVar("T")

# PyTorch's own words, then Cambricon's and Intel's when their fallback is off.
_LACKS = re.compile(
    r"Could not run '([\w:.]+)' with arguments from the '(\w+)' backend"
    r"|The operator '([\w:.]+)' is not currently implemented for the (\w+) device"
)
# PyTorch's for convolutions, which it asks each vendor for under a name of their own.
_NO_CONVOLUTION = "convolution_overrideable not implemented"
# Ascend's when its fallback is off; a plain RuntimeError.
_REFUSED = re.compile(r"The operator '([\w:.]+)' would execute its main computation on CPU .*_FALLBACK_CPU_DISABLE=1")
_VENDOR_FALLBACK = re.compile(r"fall(?:ing)? ?back to run on the CPU")
_OPERATOR = re.compile(r"\b[a-z_]\w*::\w+(?:\.\w+)?")
# A copy to the CPU is made of these, so that none of them can be made of a copy.
_NEEDED = {"copy_", "_copy_from", "_copy_from_and_resize", "_to_copy", "empty", "empty_strided", "resize_", "set_"}

_libraries: dict[str, Library] = {}  # By namespace; what is registered ends with its Library.
_provided: set[str] = set()
_runs: Counter[str] = Counter()
_reported: dict[str, Kind] = {}  # Vendors' fallbacks: they speak of each once a process.


class Operators:
    """Operators that one load needs on a device."""

    def __init__(self, device_type: str) -> None:
        self._key = device_type.upper() if device_type in ("cuda", "xpu") else "PrivateUse1"
        self._names = {device_type, self._key.lower()}
        self._found: dict[str, Kind] = {}
        self._warned: set[tuple[str, str, int]] = set()

    def completed(self, attempt: Callable[[], T]) -> T:
        """Run `attempt`, and again after each missing operator that can be provided.

        Every other error passes, and so does a missing operator that cannot be provided: one whose result is a view.
        """
        while True:
            before = _runs.copy()
            try:
                with self._listening():
                    result = attempt()
            except Exception as error:
                operator = self._missing(error)
                if not operator or not self._provide(operator):
                    raise
                continue
            self._found.update(dict.fromkeys(_runs - before, "cpu"))
            return result

    def found(self) -> dict[str, Kind]:
        """Return the substitutes that the last attempts needed, by operator; and vendors' fallbacks of the process."""
        return {**_reported, **self._found}

    def _missing(self, error: BaseException) -> str:
        """Return the operator that the device lacks, "" for any other error. Engines raise theirs from PyTorch's."""
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, RuntimeError):
            cause = cause.__cause__
        text = " ".join(str(cause).split())
        if _NO_CONVOLUTION in text:
            return "aten::convolution_overrideable"
        # TorchScript makes it a RuntimeError.
        says_so = isinstance(cause, NotImplementedError) or "failed in the TorchScript interpreter" in text
        if says_so and (found := _LACKS.search(text)):
            operator, backend = found[1] or found[3], found[2] or found[4]
            return operator if backend.lower() in self._names else ""
        refused = _REFUSED.search(text)
        return refused[1] if refused else ""

    def _provide(self, operator: str) -> bool:
        """Register a substitute for an operator; return False if there is nothing new to register."""
        namespace, _, rest = operator.partition("::")
        base, _, named = rest.partition(".")
        packet = getattr(getattr(torch.ops, namespace), base, None)
        if packet is None or base in _NEEDED:
            return False
        names = packet.overloads()
        wanted = [named or "default"]
        if wanted[0] not in names or _name(packet, wanted[0]) in _provided:
            wanted = [] if named else names  # Some devices do not say which of its forms they lack.
        provided = False
        for overload in (getattr(packet, each) for each in wanted):
            name = _name(packet, overload._overloadname)
            kernel = None if name in _provided else _on_cpu(name, overload)
            if kernel is not None:
                _provided.add(name)
                if namespace not in _libraries:
                    _libraries[namespace] = Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
                _libraries[namespace].impl(name.partition("::")[2], kernel, self._key)  # type: ignore[no-untyped-call]
                provided = True
        return provided

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Catch vendors' warnings of their own fallback; pass on all others, each once a load."""
        always = torch.is_warn_always_enabled()
        torch.set_warn_always(True)  # Else PyTorch's way to warn once hides all operators but the first.
        caught: list[warnings.WarningMessage] = []
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                yield
        finally:
            torch.set_warn_always(always)
            for each in caught:
                key = (str(each.message), each.filename, each.lineno)
                names = _OPERATOR.findall(key[0]) if _VENDOR_FALLBACK.search(key[0]) else []
                _reported.update(dict.fromkeys(names, "vendor-cpu"))
                if not names and key not in self._warned:
                    self._warned.add(key)
                    warnings.warn_explicit(each.message, each.category, each.filename, each.lineno, source=each.source)


def fallback_counts() -> dict[str, int]:
    """Return how often each operator ran on the CPU instead since the process began, without vendors' silent ones."""
    return dict(_runs)


def _name(packet: Any, overload: str) -> str:
    return str(packet._qualified_op_name) + ("" if overload == "default" else f".{overload}")


def _on_cpu(name: str, overload: Any) -> Callable[..., Any] | None:
    """Return the substitute for an overload; None if nothing can be: a view of a copy would be no view."""
    if any(each.alias_info is not None and not each.alias_info.is_write for each in overload._schema.returns):
        return None
    if name == "aten::convolution_overrideable":  # The CPU has it under its usual name alone.
        overload = torch.ops.aten.convolution.default

    def kernel(*args: Any, **kwargs: Any) -> Any:
        _runs[name] += 1
        return computed_on_cpu(overload, args, kwargs)

    return kernel


def computed_on_cpu(overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute an operator on the CPU from copies, write back the tensors that it writes, and return its result."""
    copies: dict[int, tuple[Tensor, Tensor]] = {}  # A tensor given twice is one tensor on the CPU, too.
    devices: list[torch.device] = []

    def there(value: Any) -> Any:
        device = value.device if isinstance(value, Tensor) else value
        if not isinstance(device, torch.device) or device.type == "cpu":
            return value
        devices.append(device)
        if not isinstance(value, Tensor):
            return torch.device("cpu")
        return copies.setdefault(id(value), (value, value.cpu()))[1]

    def back(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        # A tensor written in place comes back as the given tensor.
        given = next((original for original, copy in copies.values() if copy is value), None)
        return given if given is not None else value.to(devices[0]) if devices else value

    result = overload(*pytree.tree_map(there, list(args)), **pytree.tree_map(there, dict(kwargs)))
    schema = overload._schema.arguments
    given = {**dict(zip((each.name for each in schema), args, strict=False)), **kwargs}
    for argument in schema:
        if argument.alias_info is not None and argument.alias_info.is_write:
            for tensor in pytree.tree_leaves(given[argument.name]):
                if id(tensor) in copies:
                    written = copies[id(tensor)][1]
                    if tensor.shape != written.shape:  # As `out=` does.
                        tensor.resize_(written.shape)
                    tensor.copy_(written)
    return pytree.tree_map(back, result)
