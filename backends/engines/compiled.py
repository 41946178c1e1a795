"""What the engines around vendors' compilers have in common.

Owns: their import, their errors, and torch.compile for shapes that are fixed. Must not know vendors, models or images.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from backends.contract.backend import Network
from backends.contract.errors import BackendError, EngineRefusedError, first_line, translated_errors

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
