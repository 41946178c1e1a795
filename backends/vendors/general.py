"""PyTorch's general interface of accelerators, under the names that torch.cuda and the vendors' modules have.

Owns: the names that a device's module may lack. PyTorch asks for few in the module of a device type that is not its
own: its own example of a vendor, torch_openreg, has neither streams nor memory there, and torch.accelerator has both.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import ModuleType
from typing import Any

import torch

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
    """Add to a device's module of torch what it lacks and PyTorch has for every accelerator; return the module."""
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
