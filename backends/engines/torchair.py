"""Huawei's graph engine (GE) through torchair, which comes inside torch_npu.

Owns: torchair's options. Must not know models or images.

The string "npu" as a backend of torch.compile is never used: without torchair it stands for eager, in silence. Names
are those of torch_npu 2.14.0's wheel. Unverified on hardware.
"""

from __future__ import annotations

from backends.backend import CompileOptions, Executable, Network
from backends.engines.compiled import by_torch_compile, compiling, imported, is_installed
from backends.engines.eager import placed
from backends.engines.engine import Engine
from backends.engines.streamed import StreamedExecutable


class TorchairEngine(Engine):
    """The whole network as one graph of GE, for each batch size."""

    name = "torchair"
    takes = "minutes"

    def __init__(self, precisions: tuple[str, ...], channels_last: bool | None = False) -> None:
        self.precisions = precisions
        self._channels_last = channels_last

    def compile(
        self, network: Network, device: str, precision: str, batch_sizes: tuple[int, ...], options: CompileOptions
    ) -> Executable:
        """Casts and moves `network` in place."""
        # torch_npu, which makes it findable, is imported before any engine is asked.
        torchair = imported("torchair", "this torch_npu was built without it")
        with compiling("torchair", device):
            config = torchair.CompilerConfig()
            config.mode = "max-autotune"  # GE, the default; "reduce-overhead" is what the graph engine does.
            # Weights stay where they are: else their addresses are set anew for each batch.
            config.experimental_config.frozen_parameter = True
            backend = torchair.get_npu_backend(compiler_config=config)
            placed(network, device, precision, self._channels_last)
            compiled = by_torch_compile(network, device, batch_sizes, backend)
        return StreamedExecutable(device, batch_sizes, compiled)

    def is_quick(self, network: Network, precision: str, options: CompileOptions) -> bool:
        """Only in refusing."""
        return not is_installed("torchair")
