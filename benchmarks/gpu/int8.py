"""Question: int8 by cuDNN's graph API, each convolution of ResNet-50 and YOLOv8n beside fp16, and its errors."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from backends.engines.engine import DTYPES
from benchmarks.gpu.asked import Asked
from benchmarks.gpu.cudnn import Int8Convolution, ranges


def ask(asked: Asked) -> dict[str, Any]:
    """Measure the microseconds of both for each shape of convolution, and the mean error as a share of the answer."""
    try:
        api: Any = importlib.import_module("cudnn")
        missing = "" if asked.kind != "cpu" else "it needs a card"
    except Exception as error:
        api, missing = None, f"{type(error).__name__}: {error}"
    size, rows = asked.sizes[-1], []
    for model in asked.models():
        network: Any = model.network()
        shapes: dict[str, tuple[int, ...]] = {}
        hooks = [
            each.register_forward_pre_hook(partial(_note, shapes, name))
            for name, each in network.named_modules()
            if isinstance(each, nn.Conv2d)
        ]
        found = ranges(network, torch.randint(0, 256, (2, *model.input_shape), dtype=torch.uint8))
        for hook in hooks:
            hook.remove()
        seen = set()
        for name, (of, greatest) in list(found.items())[: 2 if asked.dry else None]:
            key = (shapes[name], of.out_channels, of.kernel_size, of.stride)
            if key in seen:
                continue
            seen.add(key)
            row: dict[str, Any] = {"network": model.name, "input": shapes[name], "outputs": of.out_channels}
            row |= {"kernel": of.kernel_size, "stride": of.stride, "batch": size}
            rows.append(row | _timed(asked, of, greatest, (size, *shapes[name]), None if missing else api))
    return {"rows": rows, "int8": missing or "measured"}


def _note(shapes: dict[str, tuple[int, ...]], name: str, _: nn.Module, given: tuple[Tensor, ...]) -> None:
    shapes[name] = tuple(given[0].shape[1:])


def _timed(asked: Asked, of: nn.Conv2d, greatest: float, shape: tuple[int, ...], api: Any) -> dict[str, Any]:
    dtype = DTYPES[asked.precision]
    x = (torch.rand(shape, device=asked.device, dtype=dtype) * greatest).contiguous(memory_format=torch.channels_last)
    plain = nn.Conv2d(of.in_channels, of.out_channels, of.kernel_size, of.stride, of.padding, bias=of.bias is not None)
    plain.load_state_dict(of.state_dict())
    plain = plain.to(device=asked.device, dtype=dtype, memory_format=torch.channels_last).requires_grad_(False)
    row: dict[str, Any] = {f"{asked.precision}_us": round(1e6 * asked.time_s(lambda: plain(x), 8), 1)}
    if api is None:
        return row
    try:
        ours = Int8Convolution(api, of, greatest).to(asked.device)
        with torch.inference_mode():
            expected, given = plain(x).float(), ours(x).float()
        row["int8_with_conversion_us"] = round(1e6 * asked.time_s(lambda: ours(x), 8), 1)
        row["error"] = round(float((given - expected).abs().mean() / expected.abs().mean()), 5)
    except Exception as error:
        row["refused"] = f"{type(error).__name__}: {error}"[:300]
    return row
