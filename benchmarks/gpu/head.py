"""Question: YOLOv8n's head with the best anchors chosen on the device, beside all of them in float32, as before."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backends.engines.engine import DTYPES
from benchmarks.gpu.asked import Asked
from models.yolo.model import DetectionNetwork


class AllAnchors(DetectionNetwork):
    """Network that returns boxes, scores and classes of all anchors."""

    def compute(self, normalised: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Compute float32 [n, a, 4], [n, a], int32 [n, a]."""
        distances, logits = self.core.expected(self.core.raw(normalised))
        best, classes = logits.max(dim=2)
        return distances, best.sigmoid(), classes.to(torch.int32)


def ask(asked: Asked) -> dict[str, Any]:
    """Measure milliseconds of a batch and bytes that go back, and compare the best scores."""
    model = asked.models()[1]
    rows = []
    for size in asked.sizes:
        row: dict[str, Any] = {"batch": size}
        scores = []
        pixels = torch.randint(0, 256, (size, *model.input_shape), dtype=torch.uint8, device=asked.device)
        for name, kind in (("all", AllAnchors), ("best", DetectionNetwork)):
            made = model.network()
            network = kind(made.core, model.input_shape, model.mean, model.std).eval().requires_grad_(False)
            network.cast(DTYPES[asked.precision]).to(asked.device)
            with torch.inference_mode():
                outputs = network(pixels)
            scores.append(outputs[1].sort(dim=1, descending=True).values[:, :100].cpu())
            row[f"{name}_bytes"] = sum(each.nbytes for each in outputs)
            row[f"{name}_ms"] = round(1e3 * asked.time_s(asked.replay(network, pixels), 4), 4)
        row["of_best_scores_off_by"] = float((scores[0] - scores[1]).abs().max())
        rows.append(row)
    return {"rows": rows}
