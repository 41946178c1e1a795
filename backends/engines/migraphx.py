"""MIGraphX of AMD, through torch_migraphx, which is built from source or comes in AMD's images.

Its outputs lie in buffers of its own, which the next batch overwrites; it computes on the current stream, on which they
have been copied by then (fx/mgx_module.py). Shapes are fixed: dynamic ones cost memory and have crashed
(AMDMIGraphX#4846, #4618). Read in ROCm/torch_migraphx at b3a8957; unverified on hardware.
"""

from __future__ import annotations

from backends.contract.backend import CompileOptions, Executable, Network
from backends.engines.eager import placed
from backends.engines.engine import Engine, by_torch_compile, compiling, imported
from backends.engines.streamed import StreamedExecutable


class MIGraphXEngine(Engine):
    """MIGraphX: one program for each batch size. Not in bf16, its youngest type, which was never tried here."""

    name = "migraphx"
    takes = "minutes"
    package = "torch_migraphx"
    offers = ("fp16", "fp32")

    def compile(
        self, network: Network, device: str, precision: str, batch_sizes: tuple[int, ...], options: CompileOptions
    ) -> Executable:
        imported(self.package, "build it from github.com/ROCm/torch_migraphx, or take AMD's image")
        with compiling("MIGraphX", device):
            placed(network, device, precision, channels_last=False).requires_grad_(False)
            # Importing the package has made the name known to torch.compile.
            compiled = by_torch_compile(network, device, batch_sizes, "migraphx")
        return StreamedExecutable(device, network.input_shape, compiled)
