"""TorchScript, for stacks on which nothing newer compiles: traced once.

Owns: tracing, and the warnings of an interface that PyTorch means to give up. Must not know vendors, models or images.

Not frozen: the constants of a frozen graph outlive it (torch 2.14: twelve loads of 36 MB kept 413 MB). Nor treated with
optimize_for_inference, which wants it frozen: on the CPU float32 ResNet50 gained a third, YOLOv8n took three times as
long.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from backends.contract.backend import CompileOptions, Executable, Network, form_of
from backends.contract.errors import BackendError, EngineRefusedError, first_line, translated_errors
from backends.engines.eager import placed, torch_executable
from backends.engines.engine import Engine

_RUNS_TO_SETTLE = 2  # The executor watches a shape once and optimises at the next run.


class TorchScriptEngine(Engine):
    """TorchScript: one graph for all batch sizes."""

    name = "torchscript"
    forms = ("pixels", "script")

    def compile(
        self, network: Network, device: str, precision: str, batch_sizes: tuple[int, ...], options: CompileOptions
    ) -> Executable:
        if not hasattr(getattr(torch, "jit", None), "trace"):
            raise EngineRefusedError(f"PyTorch {torch.__version__} has no TorchScript any more")
        with translated_errors(device):
            # On the CPU frozen graphs were as fast or faster contiguous; those that are not frozen were not compared.
            on_cpu = torch.device(device).type == "cpu"
            module = placed(network, device, precision, channels_last=not on_cpu).eval()
        if form_of(network) != "pixels":
            # It is TorchScript.
            return torch_executable(device, network.input_shape, dict.fromkeys(batch_sizes, network))
        # Trace the largest size: a size of one might be taken for a dimension that never changes.
        examples = {size: torch.zeros((size, *network.input_shape), dtype=torch.uint8) for size in batch_sizes}
        try:
            graph = _traced(module, examples[batch_sizes[-1]].to(device))
            with torch.inference_mode():
                for size, example in examples.items():
                    answers = [graph(example.to(device)) for _ in range(_RUNS_TO_SETTLE)][-1]
                    if any(len(answer) != size for answer in answers):
                        raise EngineRefusedError("the network is written for one batch size, and tracing fixed it")
        except BackendError:
            raise
        except Exception as error:  # Whatever a network's Python does to the tracer.
            raise EngineRefusedError(f"TorchScript cannot trace the network: {first_line(error)}") from error
        return torch_executable(device, network.input_shape, dict.fromkeys(batch_sizes, graph))


def _traced(module: nn.Module, example: Tensor) -> Any:
    with torch.no_grad(), warnings.catch_warnings():
        # All of torch.jit is deprecated, of one category first and of another since; the tracer also warns of what it
        # takes for constants, which the check of every batch size and the gate judge by the answers.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", getattr(torch.jit, "TracerWarning", DeprecationWarning))
        trace: Callable[..., Any] = torch.jit.trace  # Some PyTorch's types know it, others do not.
        return trace(module, (example,), check_trace=False)
