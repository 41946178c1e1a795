"""What the engines around vendors' compilers have in common.

Owns: their import, their errors, torch.compile for shapes that are fixed, and the folders of compilers that keep what
they make in their own way: one a network, precision, device and version. What is read from those are programs, so they
lie below a folder that only this user may write to (cache.private_folder). Must not know vendors, models or images.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from backends.contract.backend import CompileOptions, Network
from backends.contract.errors import (
    BackendError,
    DeviceLostError,
    EngineRefusedError,
    OutOfDeviceMemoryError,
    first_line,
    translated_errors,
)
from backends.engines.cache import bound, private_folder

T = TypeVar("T")

log = logging.getLogger(__name__)

_MANY = 4096


def imported(package: str, remedy: str) -> Any:
    """A compiler's package. Raises EngineRefusedError; `remedy` is the end of the sentence when it is not installed."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # They print; the command's output is not theirs.
            return importlib.import_module(package)
    except Exception as error:  # Vendors raise every kind.
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            raise EngineRefusedError(f"{package} is not installed: {remedy}") from error
        raise EngineRefusedError(f"{package} is installed and cannot be used: {first_line(error)}") from error


def version_of(package: str, remedy: str) -> str:
    """Of a package that is asked for by its name on the index. Raises EngineRefusedError."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError as error:
        raise EngineRefusedError(f"int8 needs {package}: {remedy}") from error


def is_installed(package: str) -> bool:
    """Look for the package without importing it: an engine whose package is missing refuses at once."""
    try:
        return importlib.util.find_spec(package) is not None
    except Exception:  # torch_npu's stand-in for torchair is loaded by the question, and may fail.
        return True


@contextlib.contextmanager
def compiling(title: str, device: str) -> Iterator[None]:
    """Around compilation: what a compiler prints goes where logs go, whatever it raises becomes a refusal.

    But too little memory and a lost device stay what they are.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr), translated_errors(device):
            yield
    except BackendError as error:
        if type(error) is BackendError:
            raise EngineRefusedError(f"{title} cannot compile this network: {error}") from error
        raise
    except Exception as error:
        raise EngineRefusedError(f"{title} cannot compile this network: {first_line(error)}") from error


Call = Callable[[Tensor], Sequence[Tensor]]
"""A network that is ready for one batch size: uint8 on the device -> its outputs there."""


def by_torch_compile(
    network: Network, device: str, batch_sizes: tuple[int, ...], backend: str | Callable[..., Any]
) -> dict[int, Call]:
    """The network, on its device, compiled by `backend` for every batch size now: nothing is left for a request.

    In one piece (`fullgraph`): what PyTorch cannot trace, and a size too many, is an error, and not a silent way back
    to eager.
    """
    module: Call = torch.compile(cast(nn.Module, network), backend=backend, dynamic=False, fullgraph=True)
    # By default eight shapes of the same code, whichever network it belongs to.
    limits = {"cache_size_limit": _MANY, "accumulated_cache_size_limit": _MANY}
    patched: Any = torch._dynamo.config.patch(limits)
    with patched, torch.inference_mode():
        for size in reversed(batch_sizes):
            module(torch.zeros((size, *network.input_shape), dtype=torch.uint8, device=device))
    return dict.fromkeys(batch_sizes, module)


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
    weights = {} if options.key else cast(nn.Module, network).state_dict()
    own = folder / digest_of(weights, options.key, network.input_shape, precision, machine)
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


def digest_of(tensors: Mapping[str, Any], *facts: object) -> str:
    """A name for what consists of these tensors and facts."""
    found = hashlib.sha256(repr([str(fact) for fact in facts]).encode())
    for name, tensor in sorted(tensors.items()):
        found.update(name.encode())
        if isinstance(tensor, Tensor):
            found.update(f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}".encode())
            found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()[:32]


def device_kind(device: str) -> str:
    """Its name and compute capability: what was compiled for it serves no other."""
    module = torch.get_device_module(torch.device(device).type)
    asked = [getattr(module, name, None) for name in ("get_device_name", "get_device_capability")]
    return " ".join(str(ask(device)) for ask in asked if ask is not None)
