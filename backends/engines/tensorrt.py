"""TensorRT through torch_tensorrt's dynamo path, for NVIDIA. Unverified on hardware.

The parameters that the path uses and ignores were read in torch_tensorrt 2.14.0's sources: `enabled_precisions` does
nothing there. The cache of engines is off unless weights may change (`immutable_weights=False`), and an engine from it
is refitted with the given weights. Its key holds operators, input shapes and settings, but no weights and no shapes or
types of them, no GPU and no version of TensorRT. So each network, precision, GPU and version has a folder of its own.
For int8 NVIDIA's ModelOpt (0.47.0) inserts quantisers, and the rest of the network runs in fp16.

The cache is read by unpickling: a user who can write to `--cache-dir` can run code here.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anychip_base.extras import how_to_install
from backends.contract.backend import CompileOptions, Executable, Network
from backends.contract.errors import EngineRefusedError
from backends.engines.eager import placed
from backends.engines.engine import (
    DTYPES,
    Engine,
    calibration_of,
    compiling,
    device_kind,
    digest_of,
    imported,
    with_own_folder,
)
from backends.engines.streamed import StreamedExecutable

_ENGINE_CACHE_BYTES = 4 * 2**30  # Of one network.
_CALIBRATION_BATCH = 8
_TIMING_CACHE_BYTES = 64 * 2**20  # It only ever grows; ours of one model takes about one.


class TensorRTEngine(Engine):
    """TensorRT: an engine a batch size. Those in int8 are built at every start, as a refit does not include ranges."""

    name = "tensorrt"
    takes = "minutes"
    package = "torch_tensorrt"
    offers = (*DTYPES, "int8")
    forms = ("pixels",)  # It is given floats in place of bytes, and items of tensors are none.

    def compile(
        self, network: Network, device: str, precision: str, batch_sizes: tuple[int, ...], options: CompileOptions
    ) -> Executable:
        torch_tensorrt = imported(self.package, how_to_install("cuda"))
        in_int8 = precision == "int8"
        exporting: Callable[[], AbstractContextManager[Any]] = nullcontext
        with compiling("TensorRT", device):
            module = placed(network, device, "fp16" if in_int8 else precision, channels_last=False)
            module.requires_grad_(False)
            if in_int8:
                exporting = _quantise(module, device, options)

            packages = (torch, torch_tensorrt, sys.modules.get("tensorrt"))  # torch_tensorrt has imported the last.
            machine = " ".join([*(str(getattr(each, "__version__", "")) for each in packages), device_kind(device)])

            def build(own: Path | None) -> dict[int, Any]:
                settings = {} if own is None else _cache_settings(own, machine)
                engines = {}
                for size in reversed(batch_sizes):
                    # Floats: of bytes TensorRT takes little more than their cast.
                    example = torch.zeros((size, *network.input_shape), dtype=torch.float32, device=device)
                    with torch.no_grad():
                        with exporting():
                            exported = torch.export.export(module, (example,))
                        engines[size] = torch_tensorrt.dynamo.compile(
                            exported,
                            arg_inputs=(example,),
                            device=torch.device(device),
                            disable_tf32=True,  # fp32 means float32.
                            **_typing(torch_tensorrt.dynamo.compile),
                            **settings,
                        )
                return engines

            if in_int8:
                engines = build(None)
            else:
                engines = with_own_folder(
                    build, "TensorRT", options, network=network, precision=precision, machine=machine
                )
        # The parts it runs are in modules of this name; without any it has left everything to PyTorch.
        if not any("_run_on_acc" in name for name, _ in engines[batch_sizes[0]].named_modules()):
            raise EngineRefusedError("TensorRT takes no part of this network")
        by_size = {size: partial(_from_bytes, engine) for size, engine in engines.items()}
        return StreamedExecutable(device, network.input_shape, by_size)


def _typing(compile_: Callable[..., object]) -> dict[str, bool]:
    """Return the option that keeps the network's own types, if there is one.

    In the wheels of torch_tensorrt 2.8 to 2.14 (compared 2026-11-27) `dynamo.compile` takes each of our options, with
    one difference: this one is False by default in 2.8 and 2.9, where all is computed in float32 then, True in 2.10 to
    2.12, and gone from 2.13 on, which always keeps the types.
    """
    return {"use_explicit_typing": True} if "use_explicit_typing" in inspect.signature(compile_).parameters else {}


def _quantise(module: nn.Module, device: str, options: CompileOptions) -> Callable[[], AbstractContextManager[Any]]:
    """Put quantisers into the module, in place; return a maker of the context to export it in."""
    calibration = calibration_of(options)
    quantization = imported("modelopt.torch.quantization", "pip install nvidia-modelopt")
    pixels = torch.from_numpy(calibration())

    def show(module: nn.Module) -> None:
        for row in range(0, len(pixels), _CALIBRATION_BATCH):
            module(pixels[row : row + _CALIBRATION_BATCH].to(device, torch.float32))

    with torch.no_grad():
        quantization.quantize(module, quantization.INT8_DEFAULT_CFG, show)
    utils = imported("modelopt.torch.quantization.utils", "pip install nvidia-modelopt")
    exporting: Callable[[], AbstractContextManager[Any]] = utils.export_torch_mode
    return exporting


def _from_bytes(engine: Any, pixels: Tensor) -> tuple[Tensor, ...]:
    return tuple(engine(pixels.to(torch.float32)))


def _cache_settings(own: Path, machine: str) -> dict[str, Any]:
    """Return torch_tensorrt's cache options: engines in the network's own folder, timings for a machine beside it."""
    engines = own / "engines"  # To make room torch_tensorrt deletes whatever is in there.
    engines.mkdir(mode=0o700, exist_ok=True)
    timing = own.parent / f"timing-{digest_of({}, machine)}.bin"
    if timing.exists() and timing.stat().st_size > _TIMING_CACHE_BYTES:
        timing.unlink()
    return {
        "immutable_weights": False,
        "cache_built_engines": True,
        "reuse_cached_engines": True,
        "engine_cache_dir": str(engines),
        "engine_cache_size": _ENGINE_CACHE_BYTES,
        "timing_cache_path": str(timing),
    }
