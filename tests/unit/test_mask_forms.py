"""Masks as COCO's run lengths and as PNG."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.tasks.mask_forms import compressed, run_lengths, written


def mask_of(runs: list[int], width: int, height: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    values = np.repeat(np.arange(len(runs)) % 2, runs)
    assert len(values) == width * height
    mask: np.ndarray[tuple[int, ...], np.dtype[np.int64]] = values.reshape(width, height).T
    return mask


def lengths_of(text: str) -> list[int]:
    """As COCO's own `rleFrString`, from its description."""
    runs: list[int] = []
    place = 0
    while place < len(text):
        value = shift = 0
        while True:
            bits = ord(text[place]) - 48
            value |= (bits & 31) << shift
            place, shift = place + 1, shift + 5
            if not bits & 32:
                if bits & 16:
                    value |= -1 << shift
                break
        runs.append(value + (runs[-2] if len(runs) > 2 else 0))
    return runs


@given(st.data())
def test_a_mask_is_read_back_as_it_was(data: st.DataObject) -> None:
    width, height = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    x, y = data.draw(st.integers(0, width - 1)), data.draw(st.integers(0, height - 1))
    # A box may reach a pixel beyond the image.
    shape = data.draw(st.integers(1, height - y + 1)), data.draw(st.integers(1, width - x + 1))
    density = data.draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
    part = (np.random.default_rng(data.draw(st.integers(0, 99))).random(shape) < density).astype(np.uint8)
    runs = run_lengths(part, x, y, width, height)
    whole = np.zeros((height, width), np.uint8)
    whole[y : y + shape[0], x : x + shape[1]] = part[: height - y, : width - x]
    assert (mask_of(runs.tolist(), width, height) == whole).all()
    assert all(length > 0 for length in runs[1:])
    [text] = compressed([runs])
    assert lengths_of(text) == runs.tolist()


def test_the_text_is_the_one_that_coco_writes() -> None:
    # Lengths and text of the published annotation format: differences from the fourth on, five bits a character.
    assert compressed([np.array([6, 1, 40, 4, 5, 4, 5, 4, 21])]) == ["61X13mN000`0"]


@pytest.mark.parametrize("together", [0, 30, 100_000])
def test_masks_are_written_one_by_one_or_together_alike(monkeypatch: pytest.MonkeyPatch, together: int) -> None:
    monkeypatch.setattr("models.tasks.mask_forms._RUNS_TOGETHER", together)
    random = np.random.default_rng(0)
    parts = [((random.random((9, 7)) < share).astype(np.uint8), 2, 3) for share in (0.5, 0, 1, 0.2, 0.9, 0)]
    parts.append((np.zeros((0, 0), np.uint8), 5, 5))
    found = list(written("rle", iter(parts), 20, 30))
    assert [each is None for each in found] == [not mask.any() for mask, _, _ in parts]
    for each, (mask, x, y) in zip(found, parts, strict=True):
        if each is not None:
            whole = mask_of(lengths_of(each["counts"]), 20, 30)
            assert each["size"] == [30, 20]
            assert (whole[y : y + 9, x : x + 7] == mask).all()
            assert whole.sum() == mask.sum()
