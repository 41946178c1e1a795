"""Folders of compilers that keep what they make in their own way: one a network, precision, device and version.

Owns: their names, their size together, and a second try when what is in one cannot be used. What is read from them are
programs, so they lie below a folder that only this user may write to (engine_cache.private_folder).
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

import torch
from torch import nn

from backends.contract.backend import CompileOptions, Network
from backends.contract.errors import DeviceLostError, OutOfDeviceMemoryError, first_line
from backends.engines.cache import bound, private_folder

T = TypeVar("T")

log = logging.getLogger(__name__)


def with_own_folder(
    build: Callable[[Path | None], T],
    title: str,
    options: CompileOptions,
    *,
    network: Network,
    precision: str,
    machine: str,
) -> T:
    """`build`, with the folder of a network and what it is compiled for (`machine`); None: nothing may be kept.

    Where what is in the folder cannot be used, once more with the folder empty. Folders of others that were not used
    for longest are removed until all are within the limit.
    """
    folder = private_folder(options.cache_dir / title.lower()) if options.cache_dir else None
    if folder is None:
        return build(None)
    key = f"{options.key or _weights_of(cast(nn.Module, network))} {network.input_shape} {precision}"
    own = folder / digest(f"{key} {machine}")
    own.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.utime(own)  # It was used: others go first.
    bound(folder, own)
    kept = any(own.iterdir())
    try:
        return build(own)
    except (torch.OutOfMemoryError, OutOfDeviceMemoryError, DeviceLostError):
        raise
    except Exception as error:  # Vendors raise every kind.
        if not kept:
            raise
        log.warning("what %s has kept cannot be used and is built anew: %s", title, first_line(error))
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir(mode=0o700, parents=True, exist_ok=True)
    return build(own)


def digest(text: str) -> str:
    """A name for a folder."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _weights_of(module: nn.Module) -> str:
    """A network by its weights, where nothing else identifies it."""
    found = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def device_kind(device: str) -> str:
    """Its name and compute capability: what was compiled for it serves no other."""
    module = torch.get_device_module(torch.device(device).type)
    asked = [getattr(module, name, None) for name in ("get_device_name", "get_device_capability")]
    return " ".join(str(ask(device)) for ask in asked if ask is not None)
