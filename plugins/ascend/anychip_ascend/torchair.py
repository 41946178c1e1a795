"""Huawei's graph engine (GE) through torchair, which comes inside torch_npu.

The string "npu" as a backend of torch.compile is never used: without torchair it means eager, in silence. Names
are those of torch_npu's wheels from 2.5.1 to 2.14.0. torchair names an entry of its cache (`cache_compile`) by the
network's layers and its own options: not by weights, shapes, chip or version. So each network, precision, chip and
version has its own folder, and each batch size its own function: if PyTorch compiles one function twice, torchair
deletes its entry. Unverified on hardware.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from backends.contract.backend import CompileOptions, Executable, Network
from backends.engines.eager import placed
from backends.engines.engine import (
    Call,
    Engine,
    by_torch_compile,
    compiling,
    device_kind,
    imported,
    with_own_folder,
)
from backends.engines.streamed import StreamedExecutable


class TorchairEngine(Engine):
    """Engine that makes the whole network one graph of GE, for each batch size."""

    name = "torchair"
    takes = "minutes"  # Reading the cache counts as slow, too: it was never timed on a card.
    package = "torchair"

    def compile(
        self, network: Network, device: str, precision: str, batch_sizes: tuple[int, ...], options: CompileOptions
    ) -> Executable:
        # torch_npu, which makes it importable, is imported before any engine.
        torchair = imported(self.package, "this torch_npu was built without it")
        with compiling("torchair", device):
            config = torchair.CompilerConfig()
            config.mode = "max-autotune"  # GE, the default; the graph engine uses "reduce-overhead".
            # Weights keep their addresses: else each batch sets them again.
            config.experimental_config.frozen_parameter = True
            placed(network, device, precision, self._facts.channels_last)

            def build(own: Path | None) -> dict[int, Call]:
                if own is None:
                    backend = torchair.get_npu_backend(compiler_config=config)
                    return by_torch_compile(network, device, batch_sizes, backend)
                compile_cached = partial(
                    imported("torchair.inference", "this torch_npu was built without it").cache_compile,
                    config=config,
                    dynamic=False,
                    cache_dir=str(own),
                    ge_cache=True,  # Keeps GE's own result, too, not only PyTorch's traced graph.
                )
                by_size: dict[int, Call] = {}
                with torch.inference_mode():
                    for size in reversed(batch_sizes):
                        made = by_size[size] = compile_cached(MethodType(_own_function(size), network))
                        made(torch.zeros((size, *network.input_shape), dtype=torch.uint8, device=device))
                return by_size

            machine = f"{_versions()} {device_kind(device)}"
            compiled = with_own_folder(
                build, "torchair", options, network=network, precision=precision, machine=machine
            )
        return StreamedExecutable(device, network.input_shape, compiled)


def _forward(self: Any, pixels: Tensor) -> tuple[Tensor, ...]:
    outputs: tuple[Tensor, ...] = self(pixels)
    return outputs


def _own_function(size: int) -> FunctionType:
    """Rename `_forward`: PyTorch takes equal code for the same function, and torchair names its folder by it."""
    name = f"batch_of_{size}"
    return FunctionType(_forward.__code__.replace(co_name=name), _forward.__globals__, name)


def _versions() -> str:
    npu = sys.modules.get("torch_npu")
    toolkit = os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME") or ""
    # The folder is called after the version; `latest` is a link to it.
    return f"{torch.__version__} {getattr(npu, '__version__', '')} {os.path.realpath(toolkit) if toolkit else ''}"
