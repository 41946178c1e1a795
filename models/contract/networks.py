"""Networks in their served form: of pixels, and of pixels that a client has normalised. Must not know architectures."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from models.contract.tensors import TensorSpec, item_bytes, layout


class PixelNetwork(nn.Module):
    """A network in its served form: uint8 NHWC pixels in, a tuple of float32 (or integer) tensors out.

    Pixels cross the bus as bytes; normalisation happens here, in float32, on the device. `core` is the network proper;
    `cast` changes the precision of `core` alone, so that normalisation and decoding keep theirs.
    """

    form = "pixels"  # backends.Form
    input_shape: tuple[int, int, int]  # height, width, 3
    core: nn.Module
    mean: Tensor
    std: Tensor

    def __init__(
        self, core: nn.Module, input_shape: tuple[int, int, int], mean: Sequence[float], std: Sequence[float]
    ) -> None:
        """Set the normalisation: `mean` and `std` are per RGB channel for pixels in 0..1."""
        super().__init__()
        self.core = core
        self.input_shape = input_shape
        self.core_dtype = torch.float32
        scaled_mean = torch.tensor(mean, dtype=torch.float32).mul(255).view(1, 3, 1, 1)
        scaled_std = torch.tensor(std, dtype=torch.float32).mul(255).view(1, 3, 1, 1)
        self.register_buffer("mean", scaled_mean, persistent=False)
        self.register_buffer("std", scaled_std, persistent=False)

    def cast(self, dtype: torch.dtype) -> PixelNetwork:
        """Cast `core` (in place) to float32, float16 or bfloat16; normalisation and decoding stay float32."""
        self.core.to(dtype)
        self.core_dtype = dtype
        return self

    def normalise(self, pixels: Tensor) -> Tensor:
        """Convert uint8 [n, height, width, 3] to `core_dtype` [n, 3, height, width] (channels-last strides)."""
        x = pixels.permute(0, 3, 1, 2).to(torch.float32)
        # Libraries divide by 255, too: the reciprocal is off by a last digit, which a network in int8 enlarges.
        return ((x - self.mean) / self.std).to(self.core_dtype)

    def compute(self, normalised: Tensor) -> tuple[Tensor, ...]:
        """Compute, from the result of `normalise`, the outputs that `Model.reduce` takes."""
        raise NotImplementedError

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        """Compute, from uint8 [n, height, width, 3], the outputs that `Model.reduce` takes."""
        return self.compute(self.normalise(pixels))


class NormalisedNetwork(nn.Module):
    """Network of uint8 [n, bytes of an item] as float32 [n, 3, height, width]; its outputs are the image network's.

    `core` takes the tensor itself; with `inputs` and `places` an engine may pass it in its own way
    (backends.TensorNetwork).
    """

    file = ""
    batched = True

    def __init__(self, network: PixelNetwork) -> None:
        super().__init__()
        self.form = "openvino" if network.form == "openvino" else "program"
        height, width, channels = network.input_shape
        self.core = _Core(network)
        self.inputs = (TensorSpec("input", "FP32", (channels, height, width)),)
        self.places = layout(self.inputs)
        self.input_shape = (item_bytes(self.inputs),)

    def cast(self, dtype: torch.dtype) -> NormalisedNetwork:
        """Cast the image network; the input stays float32."""
        self.core.network.cast(dtype)
        return self

    def tensors(self, items: Tensor) -> tuple[Tensor, ...]:
        """Convert uint8 [n, bytes of an item] to the input of `core`."""
        [(start, stop)], [spec] = self.places, self.inputs
        return (items[:, start:stop].view(torch.float32).reshape(-1, *spec.shape),)

    def forward(self, items: Tensor) -> tuple[Tensor, ...]:
        """Compute outputs, each [n, ...], from uint8 [n, bytes of an item]."""
        outputs: tuple[Tensor, ...] = self.core(*self.tensors(items))
        return outputs


class _Core(nn.Module):
    def __init__(self, network: PixelNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, normalised: Tensor) -> tuple[Tensor, ...]:
        # The layout is that of the image network's pixels, so that the same kernels run. By permuting: torch_npu
        # refuses contiguous(memory_format=channels_last).
        laid_out = normalised.to(self.network.core_dtype).permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
        return self.network.compute(laid_out)
