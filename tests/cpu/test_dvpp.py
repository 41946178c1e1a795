"""DVPP's JPEG decoder over the double of pyACL: what libjpeg makes of a file, but for its chroma."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from backends import BackendError, DeviceLostError
from backends.contract.image_decoder import ImageDecoder
from tests.support.cann_double import Cann
from tests.support.photographs import PHOTOGRAPHS

NAMES = sorted(PHOTOGRAPHS)[:2]


def jpeg(rgb: Any) -> torch.Tensor:
    file = io.BytesIO()
    Image.fromarray(rgb).save(file, "JPEG", quality=95, subsampling=2)
    return torch.from_numpy(np.frombuffer(file.getvalue(), np.uint8).copy())


@pytest.fixture
def decoder(cann: Cann) -> ImageDecoder:
    cann.backend._module().set_device("npu:0")
    made = cann.backend.image_decoder("npu:0")
    assert made is not None
    return made


@pytest.mark.parametrize("size", [(500, 375), (33, 47), (128, 16)], ids=str)
def test_pixels_are_those_of_libjpeg_but_for_chroma(decoder: ImageDecoder, size: tuple[int, int]) -> None:
    files = [jpeg(np.asarray(Image.fromarray(PHOTOGRAPHS[name]()).resize(size))) for name in NAMES]
    for file, pixels in zip(files, decoder.decode(files), strict=True):
        expected = np.asarray(Image.open(io.BytesIO(file.numpy().tobytes())).convert("RGB")).transpose(2, 0, 1)
        assert pixels.shape == expected.shape
        assert pixels.dtype == torch.uint8
        assert np.abs(pixels.numpy().astype(int) - expected).mean() < 3


def test_a_broken_file_is_the_backends_error_and_the_next_one_is_decoded(cann: Cann, decoder: ImageDecoder) -> None:
    sound = jpeg(PHOTOGRAPHS[NAMES[0]]())
    for broken in (torch.zeros(100, dtype=torch.uint8), sound[: len(sound) // 50]):
        with pytest.raises(BackendError) as caught:
            decoder.decode([sound, broken])
        assert type(caught.value) is BackendError
    assert len(decoder.decode([sound])) == 1
    assert cann.acl.leftovers()["device"] == 0


def test_memory_is_freed_after_what_was_begun_has_ended(
    cann: Cann, decoder: ImageDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []

    def noted(room: Any, name: str) -> None:
        real = getattr(room, name)

        def step(*given: Any) -> Any:
            steps.append(name)
            return real(*given)

        monkeypatch.setattr(room, name, staticmethod(step))

    noted(cann.acl.rt, "synchronize_stream")
    noted(cann.acl.media, "dvpp_free")
    with pytest.raises(BackendError):
        decoder.decode([jpeg(PHOTOGRAPHS[NAMES[0]]()), torch.zeros(100, dtype=torch.uint8)])
    assert steps[:2] == ["synchronize_stream", "dvpp_free"]


def test_a_lost_card_is_said(cann: Cann, decoder: ImageDecoder) -> None:
    cann.acl.knobs["fail"] = {"media.dvpp_jpeg_decode_async": 507018}
    with pytest.raises(DeviceLostError, match="507018"):
        decoder.decode([jpeg(PHOTOGRAPHS[NAMES[0]]())])
    cann.acl.knobs["fail"] = {}
    assert cann.acl.leftovers()["device"] == 0
