"""Inductor, PyTorch's compiler, ahead of time: one shared library for each batch size.

Owns: export, compilation, and the compiled packages in the cache directory. Must not know vendors, models or images.

Ahead of time (AOTInductor) and not `torch.compile`: as fast, but the latter's graphs depend on code that all networks
of a class share and that gives up after eight shapes (`recompile_limit`), and its modules with their constants stay in
the process (`PyCodeCache.modules`). A package goes with its executable, and the next start loads it.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from backends import host
from backends.contract.backend import CompileOptions, Executable, Network
from backends.contract.errors import EngineRefusedError, first_line
from backends.engines import quantised
from backends.engines.compiled import compiling, without_prints
from backends.engines.eager import placed, torch_executable
from backends.engines.engine import DTYPES, Engine, calibration_of, kept_or_made

log = logging.getLogger(__name__)

OPTIONS: Mapping[str, Any] = {"freezing": True}
"""Inductor's. Freezing makes weights constants, folded and laid out for the CPU's kernels."""
_OLDEST = (2, 6)  # AOTInductor's packages had another interface before.


class InductorEngine(Engine):
    """Inductor: seconds to minutes a batch size at the first start; `options.cache_dir` makes the next ones short."""

    name = "inductor"
    offers = (*DTYPES, "int8")

    def compile(
        self, network: Network, device: str, precision: str, batch_sizes: tuple[int, ...], options: CompileOptions
    ) -> Executable:
        if reason := _refusal(device.partition(":")[0]):
            raise EngineRefusedError(reason)
        from torch import _inductor

        calibration = calibration_of(options) if precision == "int8" else None

        @cache  # Quantising takes most of the time: it is done once for all sizes, and not for those that are kept.
        def module() -> nn.Module:
            placed_as = "fp32" if calibration else precision
            found = placed(network, device, placed_as, bool(self._facts.channels_last))
            return found if calibration is None else quantised.quantised(network, calibration())

        def loaded(size: int, folder: Path) -> Any:
            def make() -> Path:
                package = folder / f"{size}.pt2"
                _compile(_exported(module(), device, (size, *network.input_shape)), package)
                return package

            def save(made: Path, kept: Path) -> None:
                shutil.copy(made, kept / "network.pt2")

            parts = self.parts(network, precision, options, precision, size)
            package = kept_or_made(options, parts, make, save, lambda kept: kept / "network.pt2")
            return _inductor.aoti_load_package(str(package))

        with compiling("Inductor", device), tempfile.TemporaryDirectory(prefix="anychip-inductor-") as folder:
            by_size = {size: loaded(size, Path(folder)) for size in batch_sizes}
        return torch_executable(device, network.input_shape, by_size)

    def parts(self, network: Network, precision: str, options: CompileOptions, *more: object) -> Mapping[str, object]:
        """Return also what the packages depend on: PyTorch, its options, and the processor they are compiled for."""
        chip = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads(), host.sums_overflow()
        return super().parts(network, precision, options, torch.__version__, sorted(OPTIONS.items()), *chip, *more)

    def version(self, precision: str) -> str:
        """Return PyTorch's version, and torchao's for int8."""
        return f"{torch.__version__} {quantised.version()}" if precision == "int8" else ""


def _refusal(device_type: str) -> str:
    """Return the reason why Inductor cannot serve devices of this type, "" if it can."""
    # On cuda the package of a ResNet-50 ended the process that loaded it (aoti_load_package; H100, torch 2.11.0+cu130,
    # 2026-11-23).
    if device_type != "cpu":
        return f"Inductor serves the CPU, and is not for {device_type}"
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < _OLDEST:
        return f"PyTorch {torch.__version__} has no packages of compiled networks: 2.6 is the first that does"
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler

        get_cpp_compiler()
    except Exception as error:
        log.debug("no C++ compiler", exc_info=error)
        return "there is no C++ compiler: install g++, or name one in the environment variable CXX"
    return ""


def _exported(module: nn.Module, device: str, shape: tuple[int, ...]) -> Any:
    """Export the network. Raises EngineRefusedError."""
    example = torch.zeros(shape, dtype=torch.uint8, device=device)
    try:
        with torch.no_grad(), without_prints():
            return torch.export.export(module, (example,))
    except Exception as error:  # Whatever a network's Python does to the tracer.
        raise EngineRefusedError(f"PyTorch cannot export the network: {first_line(error)}") from error


def _compile(program: Any, package: Path) -> None:
    """Write the compiled program to `package`."""
    from torch import _inductor
    from torch._inductor.utils import fresh_inductor_cache

    log.info("compiling %s", package.name)
    # Inductor's intermediate files are as large as the weights and of no use once the package is written.
    # It reads its directory from the environment whenever it writes, and this sets and restores that.
    intermediate = tempfile.TemporaryDirectory(prefix="compiling-", dir=package.parent)
    with intermediate as directory, torch.no_grad(), fresh_inductor_cache(dir=directory):
        _inductor.aoti_compile_and_package(program, package_path=str(package), inductor_configs=dict(OPTIONS))
