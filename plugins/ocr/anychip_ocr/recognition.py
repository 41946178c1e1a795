"""The task `text-recognition`: reading one line of text, by Connectionist Temporal Classification."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from anychip_ocr.quadrilaterals import lines, place_line
from models.contract.measures import Limits
from models.contract.model import Array, Options, Placement
from models.contract.task_adapter import AdaptedFile, TaskAdapter

if TYPE_CHECKING:
    from torch import Tensor

_BLANK = 0

_LIMITS: Limits = {
    "fp32": {"distance": 0.0, "score": 0.005},
    "fp16": {"distance": 0.01, "score": 0.02},
    "bf16": {"distance": 0.03, "score": 0.045},
}


class TextRecognition(TaskAdapter):
    """A network with one output [n, steps, characters + 2]: probabilities of a blank, each character and a space."""

    limits = _LIMITS

    def __init__(self, file: AdaptedFile) -> None:
        super().__init__(file)
        named = file.metadata("character").splitlines() or file.option("characters", [])
        self.characters = ("", *named, " ")
        if len(file.shapes) != 1 or file.shapes[0][2:] != (len(self.characters),):
            raise ValueError(
                f"a network that reads {len(named)} characters has one output [n, steps, {len(self.characters)}], "
                f"not {file.shapes}"
            )

    @property
    def outputs(self) -> tuple[str, ...]:
        return "probabilities", "characters"

    def probes(self) -> Sequence[Array]:
        return lines()

    def measures(self, expected: Sequence[Array], outputs: Sequence[Array]) -> dict[str, float]:
        """Compute `distance`, the share of characters to edit in all readings, and `score`, the largest error of a
        reading's score if both read the same.
        """
        wanted, given = ([self.read(*line) for line in zip(*each, strict=True)] for each in (expected, outputs))
        pairs = list(zip(wanted, given, strict=True))
        edits = sum(edit_distance(one, other) for (one, _), (other, _) in pairs)
        errors = [abs(one[1] - other[1]) for one, other in pairs if one[0] == other[0]]
        return {"distance": edits / max(1, sum(len(text) for text, _ in wanted)), "score": max(errors, default=0.0)}

    def place(self, image: Array, out: Array, width: int, height: int) -> Placement:
        place_line(image, out)
        return Placement(width, height)

    def compute(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return each step's best character and its probability; on the device, as all of them are megabytes a line."""
        best, characters = outputs[0].max(dim=2)
        return best, characters.int()

    def postprocess(self, outputs: Sequence[Array], placement: Placement, options: Options) -> Mapping[str, Any]:
        text, score = self.read(*outputs)
        return {"text": text, "score": score}

    def read(self, probabilities: Array, characters: Array) -> tuple[str, float]:
        """Decode a line to text and score: repeated characters are one, unless a blank is between them."""
        kept = characters != _BLANK
        kept[1:] &= characters[1:] != characters[:-1]
        text = "".join(self.characters[number] for number in characters[kept].tolist())
        return text, round(float(probabilities[kept].mean(dtype=np.float64)), 5) if kept.any() else 0.0


def edit_distance(one: str, other: str) -> int:
    """Count the fewest characters to insert, delete or exchange that make one text the other (Levenshtein)."""
    row = list(range(len(other) + 1))
    for number, character in enumerate(one, 1):
        before, row[0] = row[0], number
        for place, against in enumerate(other, 1):
            before, row[place] = row[place], min(before + (character != against), row[place] + 1, row[place - 1] + 1)
    return row[-1]
