"""Convolutions in int8 on NVIDIA by cuDNN's graph API (nvidia-cudnn-frontend), the only way without TensorRT.

    fp16 ─► times 127 / range, rounded ─► cuDNN: int8 convolution, scale of each channel, bias ─► fp16 ─► activation

Owns: these convolutions. No engine has them, as no card has run them. They follow the documentation
(docs.nvidia.com/deeplearning/cudnn, "Convolutions", mixed precision) and the Python of nvidia-cudnn-frontend 1.32,
which builds the graphs without a card up to the driver; benchmarks/gpu asks a card whether their answers are right, and
whether they beat the kernels that convert to int8.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_LEVELS = 127  # Symmetric for the tensor cores: no zero point.
_CHANNELS = 16  # cuDNN's int8 kernels need multiples of these channels, of the input and of the output.
_BATCH = 8  # Images at once in the search for ranges.


def ranges(network: nn.Module, pixels: Tensor) -> dict[str, tuple[nn.Conv2d, float]]:
    """Return the convolutions that can compute in int8, and the greatest input of each for these images.

    `pixels`: uint8 [n, height, width, 3].
    """
    found: dict[str, tuple[nn.Conv2d, float]] = {}

    def seen(name: str, of: nn.Conv2d, given: tuple[Tensor, ...]) -> None:
        before = found.get(name, (of, 0.0))[1]
        found[name] = of, max(before, float(given[0].abs().max()))

    hooks = [
        each.register_forward_pre_hook(partial(seen, name))
        for name, each in network.named_modules()
        if isinstance(each, nn.Conv2d) and each.groups == 1 and not (each.in_channels | each.out_channels) % _CHANNELS
    ]
    with torch.inference_mode():
        for row in range(0, len(pixels), _BATCH):
            network(pixels[row : row + _BATCH])
    for hook in hooks:
        hook.remove()
    return {name: each for name, each in found.items() if each[1]}


class Int8Convolution(nn.Module):
    """Convolution whose weights and inputs are int8. `greatest`: largest input; larger ones are cut off.

    Weights have a scale for each channel of the output. Graphs are made for each shape when it is first seen.
    """

    def __init__(self, api: Any, of: nn.Conv2d, greatest: float) -> None:
        super().__init__()
        self._api, self._of = api, of
        self._graphs: dict[tuple[int, ...], tuple[Any, tuple[Any, ...], Any]] = {}
        self.step = greatest / _LEVELS
        weight = of.weight.float()
        steps = (weight.abs().amax(dim=(1, 2, 3), keepdim=True) / _LEVELS).clamp_min(1e-12)
        rounded = (weight / steps).round().to(torch.int8).contiguous(memory_format=torch.channels_last)
        bias = torch.zeros(len(weight)) if of.bias is None else of.bias.float()
        self.register_buffer("weight", rounded)
        self.register_buffer("scale", (steps * self.step).reshape(1, -1, 1, 1))
        self.register_buffer("bias", bias.reshape(1, -1, 1, 1))

    def _apply(self, fn: Any, recurse: bool = True) -> Int8Convolution:
        """Move the buffers; keep their types."""
        for name, buffer in self._buffers.items():
            assert buffer is not None
            self._buffers[name] = fn(buffer).to(buffer.dtype)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Compute fp16 [n, c, h, w] -> fp16 [n, k, h', w'], both channels-last."""
        given = (x / self.step).round().clamp(-_LEVELS, _LEVELS).to(torch.int8)
        given = given.contiguous(memory_format=torch.channels_last)
        graph, (image, weight, scale, bias, out), handle = self._graph(tuple(given.shape))
        result = torch.empty(out.get_dim(), dtype=torch.float16, device=x.device, memory_format=torch.channels_last)
        workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=x.device)
        self._api.set_stream(handle=handle, stream=torch.cuda.current_stream(x.device).cuda_stream)
        tensors = {image: given, weight: self.weight, scale: self.scale, bias: self.bias, out: result}
        graph.execute(tensors, workspace, handle=handle)
        return result

    def _graph(self, shape: tuple[int, ...]) -> tuple[Any, tuple[Any, ...], Any]:
        if shape not in self._graphs:
            handle = self._api.create_handle()
            graph, tensors = graph_of(self._api, self._of, shape, handle)
            graph.build([self._api.heur_mode.A, self._api.heur_mode.FALLBACK])
            self._graphs[shape] = graph, tensors, handle
        return self._graphs[shape]


def graph_of(api: Any, of: nn.Conv2d, shape: tuple[int, ...], handle: Any) -> tuple[Any, tuple[Any, ...]]:
    """Describe cuDNN's graph of a convolution of int8 [n, c, h, w] to fp16; return it, not yet built, with its
    tensors: image, weight, scale, bias, result.
    """
    kinds = api.data_type

    def last(n: int, c: int, h: int, w: int) -> dict[str, list[int]]:
        return {"dim": [n, c, h, w], "stride": [c * h * w, 1, c * w, c]}

    graph = api.pygraph(
        io_data_type=kinds.HALF, intermediate_data_type=kinds.FLOAT, compute_data_type=kinds.FLOAT, handle=handle
    )
    image = graph.tensor(name="image", data_type=kinds.INT8, **last(*shape))
    weight = graph.tensor(name="weight", data_type=kinds.INT8, **last(*of.weight.shape))
    scale, bias = (
        graph.tensor(name=name, data_type=kinds.FLOAT, **last(1, of.out_channels, 1, 1)) for name in ("scale", "bias")
    )
    sides = {name: [int(side) for side in getattr(of, name)] for name in ("padding", "stride", "dilation")}
    whole = graph.conv_fprop(image=image, weight=weight, compute_data_type=kinds.INT32, **sides)
    whole.set_data_type(kinds.INT32)
    out = graph.add(a=graph.mul(a=whole, b=scale), b=bias)
    layout = last(*whole.get_dim())
    out.set_output(True).set_data_type(kinds.HALF).set_dim(layout["dim"]).set_stride(layout["stride"])
    return graph, (image, weight, scale, bias, out)
