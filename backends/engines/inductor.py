"""Inductor, PyTorch's compiler, ahead of time: one shared library for each batch size.

Owns: export, compilation, and the compiled packages in the cache directory. Must not know vendors, models or images.

Ahead of time (AOTInductor) and not `torch.compile`: as fast, but the latter's graphs depend on code that all networks
of a class share and that gives up after eight shapes (`recompile_limit`), and its modules with their constants stay in
the process (`PyCodeCache.modules`). A package goes with its executable, and the next start loads it.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from backends import host
from backends.contract.backend import CompileOptions, Executable, Network
from backends.contract.errors import EngineRefusedError, first_line
from backends.engines import quantised
from backends.engines.cache import private_folder
from backends.engines.compiled import compiling, digest_of, without_prints
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
        in_int8 = precision == "int8"
        shapes = {size: (size, *network.input_shape) for size in batch_sizes}
        with compiling("Inductor", device), tempfile.TemporaryDirectory(prefix="anychip-inductor-") as temporary:
            module = placed(network, device, "fp32" if in_int8 else precision, bool(self._facts.channels_last))
            if in_int8:
                folder = self._int8(network, device, shapes, options, Path(temporary))
                compiled = {size: _inductor_package(folder / f"{size}.pt2") for size in shapes}
            else:
                # Sorted out by `_fingerprint`: the same directory serves every network, device and version.
                kept = private_folder(options.cache_dir / "inductor") if options.cache_dir else None
                directory = kept or Path(temporary)
                compiled = {size: _compiled(module, device, shape, directory) for size, shape in shapes.items()}
        return torch_executable(device, network.input_shape, compiled)

    def _int8(
        self,
        network: Network,
        device: str,
        shapes: Mapping[int, tuple[int, ...]],
        options: CompileOptions,
        temporary: Path,
    ) -> Path:
        """Return the folder with the packages by batch size.

        The key is made of their sources: quantising again, only to compare, takes most of the time.
        """
        calibration = calibration_of(options)

        def make() -> Path:
            module = quantised.quantised(network, calibration())
            for size, shape in shapes.items():
                _compile(_exported(module, device, shape), temporary / f"{size}.pt2")
            return temporary

        reduced = " reduced" if host.sums_overflow() else ""
        chip = f"{torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()}{reduced}"
        parts = self.parts(network, "int8", options, tuple(shapes), chip)

        def save(made: Path, folder: Path) -> None:
            shutil.copytree(made, folder, dirs_exist_ok=True)

        return kept_or_made(options, parts, make, save, lambda folder: folder)

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


def _compiled(module: nn.Module, device: str, shape: tuple[int, ...], directory: Path) -> Any:
    """Return the network for one shape, from the directory if it is there. Raises EngineRefusedError."""
    program = _exported(module, device, shape)
    package = directory / f"{_fingerprint(program, device, shape)}.pt2"
    if package.is_file():
        try:
            return _inductor_package(package)
        except Exception as error:
            log.warning("%s cannot be used and is compiled again: %s", package, first_line(error))
    _compile(program, package)
    return _inductor_package(package)


def _exported(module: nn.Module, device: str, shape: tuple[int, ...]) -> Any:
    """Export the network. Raises EngineRefusedError."""
    example = torch.zeros(shape, dtype=torch.uint8, device=device)
    try:
        with torch.no_grad(), without_prints():
            return torch.export.export(module, (example,))
    except Exception as error:  # Whatever a network's Python does to the tracer.
        raise EngineRefusedError(f"PyTorch cannot export the network: {first_line(error)}") from error


def _inductor_package(package: Path) -> Any:
    from torch import _inductor

    return _inductor.aoti_load_package(str(package))


def _compile(program: Any, package: Path) -> None:
    """Write the compiled program to `package`, which appears complete or not at all."""
    from torch import _inductor
    from torch._inductor.utils import fresh_inductor_cache

    log.info("compiling %s", package.name)
    # Inductor's intermediate files are as large as the weights and of no use once the package is written.
    # It reads its directory from the environment whenever it writes, and this sets and restores that.
    with tempfile.TemporaryDirectory(prefix="compiling-", dir=package.parent) as directory:
        finished = Path(directory) / "finished.pt2"
        with torch.no_grad(), fresh_inductor_cache(dir=directory):
            _inductor.aoti_compile_and_package(program, package_path=str(finished), inductor_configs=dict(OPTIONS))
        os.replace(finished, package)


def _fingerprint(program: Any, device: str, shape: tuple[int, ...]) -> str:
    """Return a name made of graph, weights, versions, and the processor that the program is compiled for.

    The shape counts, too: graphs of two batch sizes may read alike, and a program for one answers wrongly to the other.
    """
    facts = (
        torch.__version__,
        sorted(OPTIONS.items()),
        device,
        shape,
        torch.backends.cpu.get_cpu_capability(),
        torch.get_num_threads(),
        program.graph,
    )
    return digest_of({**program.state_dict, **program.constants}, *facts)
