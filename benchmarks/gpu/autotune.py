"""Question: PyTorch's compiler with max-autotune inside a captured graph, beside the graph that serves."""

from __future__ import annotations

import time
from typing import Any, cast

import torch
from torch import nn

from backends.engines.eager import placed
from benchmarks.gpu.asked import Asked


def ask(asked: Asked) -> dict[str, Any]:
    """Measure milliseconds of a batch by both, and the seconds of compiling."""
    size, rows = asked.sizes[-1] if asked.dry else 64, []
    for model in asked.models()[: 1 if asked.dry else None]:
        pixels = torch.zeros((size, *model.input_shape), dtype=torch.uint8, device=asked.device)
        network = model.network()
        placed(network, asked.device, asked.precision, True)
        row: dict[str, Any] = {"network": model.name, "batch": size}
        row["eager_captured_ms"] = round(1e3 * asked.time_s(asked.replay(network, pixels), 4), 4)
        options: dict[str, Any] = {"backend": "eager"} if asked.dry else {"mode": "max-autotune-no-cudagraphs"}
        compiled = torch.compile(cast(nn.Module, network), dynamic=False, fullgraph=True, **options)
        began_s = time.perf_counter()
        try:
            with torch.inference_mode():
                compiled(pixels)
            row["compiled_in_s"] = round(time.perf_counter() - began_s, 1)
            row["autotuned_captured_ms"] = round(1e3 * asked.time_s(asked.replay(compiled, pixels), 4), 4)
        except Exception as error:
            row["refused"] = f"{type(error).__name__}: {error}"[:500]
        rows.append(row)
    return {"rows": rows}
