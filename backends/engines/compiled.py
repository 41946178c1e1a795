"""Base of the engines around vendors' compilers.

Owns: their import, their errors, torch.compile for fixed shapes, and the folders of compilers that keep files in their
own way: one a network, precision, device and version. Those files are programs, so they lie below a folder that only
this user may write to (cache.private_folder). Must not know vendors, models or images.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import io
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
    """Import a compiler's package. Raises EngineRefusedError; `remedy` ends its sentence if it is not installed."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # They print; the command's output is not theirs.
            return importlib.import_module(package)
    except Exception as error:  # Vendors raise every kind.
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            raise EngineRefusedError(f"{package} is not installed: {remedy}") from error
        raise EngineRefusedError(f"{package} is installed and cannot be used: {first_line(error)}") from error


def version_of(package: str, remedy: str) -> str:
    """Return the version of a package, by its name on the index. Raises EngineRefusedError."""
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
def without_prints() -> Iterator[None]:
    """Drop what PyTorch's exporter prints: of a network that it cannot export, each operator."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


@contextlib.contextmanager
def compiling(title: str, device: str) -> Iterator[None]:
    """Compile inside this context: a compiler's prints go to the log's stream, and its errors become refusals.

    Too little memory and a lost device stay errors of their own.
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
"""Network for one batch size: uint8 on the device -> its outputs there."""


def by_torch_compile(
    network: Network, device: str, batch_sizes: tuple[int, ...], backend: str | Callable[..., Any]
) -> dict[int, Call]:
    """Compile the network, on its device, by `backend` for every batch size now: no request has to wait for it.

    It compiles in one piece (`fullgraph`): code that PyTorch cannot trace, and a size too many, is an error, and not a
    silent way back to eager.
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
    """Run `build` with the folder of a network and its target (`machine`); None: nothing may be kept.

    If the folder's contents cannot be used, run it again with the folder empty. The least recently used folders of
    others are removed until all are within the limit.
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
    """Return a name for the combination of these tensors and facts."""
    found = hashlib.sha256(repr([str(fact) for fact in facts]).encode())
    for name, tensor in sorted(tensors.items()):
        found.update(name.encode())
        if isinstance(tensor, Tensor):
            found.update(f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}".encode())
            found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()[:32]


def device_kind(device: str) -> str:
    """Return the device's name and compute capability: a program compiled for it serves no other."""
    module = torch.get_device_module(torch.device(device).type)
    asked = getattr(module, "get_device_name", None), getattr(module, "get_device_capability", None)
    return " ".join(str(ask(device)) for ask in asked if ask is not None)
