"""Quantisation to int8 in PyTorch's own programs, after training (PT2E, in torchao).

Owns: torchao's arguments. Must not know what compiles the program afterwards.

torchao 0.18 was read and run: its quantizer for x86 finds operators to fuse by the module of a node, and raises
ValueError for a module that is called twice (as ResNet's ReLUs are). So each node gets a source of its own first.
"""

from __future__ import annotations

import importlib
import logging
import operator
import platform
import warnings
from typing import Any, cast

import torch
from torch import nn

from anychip_base.extras import how_to_install
from backends import host
from backends.contract.backend import Network, Pixels
from backends.contract.errors import EngineRefusedError, first_line
from backends.engines.compiled import version_of, without_prints

_MODULES = ("quantize_pt2e", "quantizer.x86_inductor_quantizer")
_BATCH = 8  # Images at once to calibrate on.


def version() -> str:
    """Return torchao's version. Raises EngineRefusedError if it is not installed."""
    return version_of("torchao", how_to_install("inductor"))


def quantised(network: Network, pixels: Pixels) -> nn.Module:
    """Return the network in int8 where x86 has kernels for it, with ranges from these images; any batch size.

    `pixels`: uint8 [n, height, width, 3]. Raises EngineRefusedError.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        raise EngineRefusedError(f"torchao's kernels for int8 are for x86, not for {platform.machine()}")
    version()
    try:
        # torchao 0.18 warns of its own parts that PyTorch deprecates, through warnings and through its logger.
        logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
        with torch.no_grad(), without_prints(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            steps, x86 = (importlib.import_module(f"torchao.quantization.pt2e.{name}") for name in _MODULES)
            example = torch.zeros((2, *network.input_shape), dtype=torch.uint8)
            batch = torch.export.Dim("batch", min=1)
            program = torch.export.export(
                cast(nn.Module, network), (example,), dynamic_shapes=({0: batch},), strict=False
            ).module()
            _tell_apart(program)
            quantizer = x86.X86InductorQuantizer()
            reduced = host.sums_overflow()
            quantizer.set_global(x86.get_default_x86_inductor_quantization_config(reduce_range=reduced))
            prepared = steps.prepare_pt2e(program, quantizer)
            for row in range(0, len(pixels), _BATCH):
                prepared(torch.from_numpy(pixels[row : row + _BATCH]))
            return cast(nn.Module, steps.convert_pt2e(prepared))
    except Exception as error:  # Whatever a network's Python does to the tracer, and torchao to its graph.
        raise EngineRefusedError(f"torchao cannot quantise the network: {first_line(error)}") from error


def _tell_apart(program: Any) -> None:
    """Make every node its own source: see above."""
    aten = torch.ops.aten
    sources: dict[Any, Any] = {
        aten.conv2d.default: nn.Conv2d,
        aten.linear.default: nn.Linear,
        aten.relu.default: nn.ReLU,
        aten.relu_.default: nn.ReLU,
        aten.silu.default: nn.SiLU,
        aten.silu_.default: nn.SiLU,
        aten.hardtanh.default: nn.Hardtanh,
        aten.hardtanh_.default: nn.Hardtanh,
        aten.hardswish.default: nn.Hardswish,
        aten.hardswish_.default: nn.Hardswish,
        aten.add.Tensor: operator.add,
        aten.add_.Tensor: operator.add,
    }
    for node in program.graph.nodes:
        if node.target in sources:
            node.meta["source_fn_stack"] = [(node.name, sources[node.target])]
