"""Image models from exported files.

    file ─► (a child process reads and tries it) ─► Export and AdaptedFile ─► ExportedImages

Owns: the network around the file's graph. Must not know how graphs are stored (models.onnx.graph,
models.exports.networks), the meaning of outputs (models.exports.layouts), their postprocessing (models.tasks) or how
files are tried (models.exports.image_trial).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from models.contract.measures import Limits
from models.contract.networks import PixelNetwork
from models.contract.pixel_model import Form, PixelModel
from models.contract.resize import grey
from models.exports import library_files
from models.exports.answers import Export, entered
from models.exports.layouts import SIZES, decoded
from models.exports.networks import FORMS, load_graph


class ExportedNetwork(PixelNetwork):
    """A file's graph between normalised pixels and `decoded`."""

    def __init__(self, core: nn.Module, tail: nn.Module | None, model: ExportedImages) -> None:
        super().__init__(core, model.input_shape, model.mean, model.std)
        self.tail = tail
        self.how, self.size, self.entry = model.export.how, model.file.size, model.export.entry
        low, high = model.export.batch
        self.stated_batch = low if low == high else 0
        self.of_task = model.adapter.compute
        self.form = model.form

    def compute(self, normalised: Tensor) -> tuple[Tensor, ...]:
        """Compute the task's outputs from those of `decoded`, in batches of the size that the graph states, if any."""
        if self.how.layout == "torchvision":
            if torch._C._get_tracing_state() is not None or torch.compiler.is_compiling():
                raise RuntimeError("how many boxes it finds depends on the image, which only the eager engine computes")
            alone = [decoded(self.how, self._outputs(image), self.size) for image in normalised]
            return self.of_task([torch.cat(each) for each in zip(*alone, strict=True)])
        if self.stated_batch and normalised.shape[0] != self.stated_batch:
            outputs = self._in_pieces(normalised)
        else:
            outputs = self._outputs(normalised)
        return self.of_task(decoded(self.how, outputs, self.size))

    def normalise(self, pixels: Tensor) -> Tensor:
        """Normalise as any network does; a network of one channel makes the image grey before."""
        return super().normalise(grey(pixels) if self.entry.channels == 1 else pixels)

    def _in_pieces(self, normalised: Tensor) -> list[Tensor]:
        """Compute outputs of any number of images, in batches of the stated size, the last of which is filled up."""
        size, count = self.stated_batch, normalised.shape[0]
        found = []
        for first in range(0, count, size):
            piece = normalised[first : first + size]
            missing = size - piece.shape[0]
            if missing:
                piece = torch.cat((piece, piece[:1].expand(missing, -1, -1, -1)))
            found.append([each[: size - missing] for each in self._outputs(piece)])
        return [torch.cat(each) for each in zip(*found, strict=True)]

    def cast(self, dtype: torch.dtype) -> PixelNetwork:
        """Cast the graph; one that chooses boxes before its last layers takes float32 alone."""
        if self.how.layout == "torchvision" and dtype != torch.float32:  # Shorter ones cannot hold the coordinates.
            raise RuntimeError("it chooses among boxes before its last layers, which takes float32")
        return super().cast(dtype)

    def _outputs(self, normalised: Tensor) -> list[Tensor]:
        values = self.core(entered(self.entry, normalised))
        values = [each.float() if isinstance(each, Tensor) and each.is_floating_point() else each for each in values]
        return values if self.tail is None else list(self.tail(*values))


def load_parts(file: str, architecture: str, freed: bool) -> tuple[nn.Module, nn.Module | None]:
    """Load the file's graph, and its part that stays float32, if the two are separate. Raises WeightsError."""
    if architecture == "onnx":
        from models.onnx.graph import load_onnx

        graph, _ = load_onnx(Path(file), SIZES)
        graph.core.free_batch = graph.tail.free_batch = freed
        return graph.core, graph.tail
    if library_files.library_of(architecture):
        return library_files.builder().built(Path(file), architecture), None
    loaded = load_graph(file, FORMS[f".{architecture}"])
    loaded.cast(torch.float32)  # float16 becomes float32, as for ONNX: the engine chooses the precision.
    return loaded, None


class FinishedImages(ExportedNetwork):
    """Computation before and after a file that only a vendor's runtime runs (backends.FinishedNetwork)."""

    def __init__(self, model: ExportedImages, file: str) -> None:
        super().__init__(nn.Identity(), None, model)
        self.file = file

    def prepare(self, pixels: Tensor) -> Tensor:
        """Convert uint8 [n, height, width, 3] to float32 [n, 3, height, width], normalised."""
        return self.normalise(pixels)

    def finish(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Compute the task's outputs from the file's outputs."""
        values = [each.float() if each.is_floating_point() else each for each in outputs]
        return self.of_task(decoded(self.how, values, self.size))


@dataclass(frozen=True)
class ExportedImages(PixelModel):
    """A model of images from a file. `witness`: the comparison of its numbers when it was first read."""

    export: Export = field(kw_only=True)
    witness: str = field(default="", kw_only=True, compare=False)

    @property
    def form(self) -> Form:
        forms: dict[str, Form] = {"om": "finished", "xml": "openvino"}
        return forms.get(self.architecture, "pixels")

    @property
    def limits(self) -> Limits:
        """Limits of the precisions that the task is served in; of float32 alone if the network's own code wants it."""
        limits = super().limits
        return {"fp32": limits["fp32"]} if self.export.in_float32 else limits

    @property
    def has_reference(self) -> bool:
        """True if the CPU can compute the file's network."""
        return self.form != "finished"

    def network(self) -> ExportedNetwork:
        assert self.weights_file is not None
        if not self.has_reference:
            return FinishedImages(self, self.weights_file).eval()
        parts = load_parts(self.weights_file, self.architecture, self.export.freed)
        return ExportedNetwork(*parts, self).eval().requires_grad_(False)

    def batch_sizes(self, ladder: Sequence[int]) -> tuple[int, ...]:
        """Return the sizes that the file takes; any if images run one by one within a batch."""
        low, high = self.export.batch
        ladder = self.adapter.batch_sizes(ladder)
        if high == 1 and self.has_reference:
            return tuple(ladder)
        return tuple(size for size in ladder if low <= size <= high) or (low,)
