"""Decoder of JPEG files on Ascend's DVPP: JPEGD to YUV, VPC to RGB, both beside the AI cores.

Owns: its pictures and their strides. Must not know what becomes of the pixels, which come to the host.

Functions, formats and alignments are those of pyACL's source (media_jpeg.cpp), acl/ops/acl_dvpp.h (Ascend/pytorch,
third_party/acl/inc) and Ascend/samples (JpegDHelper; acllite's dvpp): JPEGD's rows are aligned to 128 bytes even if a
card needs only 64 or 16, its columns to 16; colours are BT.601 of the full range, like JPEG, by default.
Chroma is kept for every fourth pixel, whatever the file has. Unverified on hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from anychip_ascend.acl import DEVICE_TO_HOST, HOST_TO_DEVICE, AclCard, released
from backends.contract.errors import translated_errors
from backends.contract.image_decoder import ImageDecoder

_YUV_SEMIPLANAR_420, _RGB_888 = 1, 12  # acldvppPixelFormat


class DvppDecoder(ImageDecoder):
    """Decoder on one channel of a card. Pixels go to the host: without torch_npu, PyTorch has no other place."""

    name = "DVPP"

    def __init__(self, target: str, card: AclCard) -> None:
        """Open a channel. `target`: the card's name in torch_npu. Raises BackendError."""
        super().__init__("cpu")
        self._target, self._card = target, card
        with translated_errors(target):
            self._channel = card.acl.media.dvpp_create_channel_desc()
            card.call("media.dvpp_create_channel", self._channel)
            self._stream = card.call("rt.create_stream")

    def decode(self, files: Sequence[Tensor]) -> list[Tensor]:
        """Decode the files; submit all before waiting for the first."""
        undo: list[Callable[[], object]] = []
        try:
            with translated_errors(self._target):
                begun = [self._begin(file, undo) for file in files]
                self._card.call("rt.synchronize_stream", self._stream)
                return [self._pixels(*each) for each in begun]
        except BaseException:  # Files that were begun are still read and written.
            undo.append(partial(self._card.call, "rt.synchronize_stream", self._stream))
            raise
        finally:
            released(*reversed(undo))

    def _begin(self, file: Tensor, undo: list[Callable[[], object]]) -> tuple[int, int, int, int]:
        """Start a file; return width, height, bytes of a row, address. `undo`: gets steps that free the memory."""
        call, size_bytes = self._card.call, file.numel()
        width, height, _ = call("media.dvpp_jpeg_get_image_info", file.data_ptr(), size_bytes)
        source = self._memory(size_bytes, undo)
        call("rt.memcpy", source, size_bytes, file.data_ptr(), size_bytes, HOST_TO_DEVICE)
        wide, high = _aligned(width, 128), _aligned(height, 16)
        yuv, _ = self._picture(_YUV_SEMIPLANAR_420, (width, height), (wide, high), wide * high * 3 // 2, undo)
        call("media.dvpp_jpeg_decode_async", self._channel, source, size_bytes, yuv, self._stream)
        row, rows = 3 * _aligned(width, 16), _aligned(height, 2)
        rgb, place = self._picture(_RGB_888, (width, height), (row, rows), row * rows, undo)
        call("media.dvpp_vpc_convert_color_async", self._channel, yuv, rgb, self._stream)
        return width, height, row, place

    def _picture(
        self,
        form: int,
        size: tuple[int, int],
        strides: tuple[int, int],
        size_bytes: int,
        undo: list[Callable[[], object]],
    ) -> tuple[int, int]:
        """Make a picture's description and its memory. `size`, `strides`: width and height."""
        call, memory = self._card.call, self._memory(size_bytes, undo)
        picture = self._card.acl.media.dvpp_create_pic_desc()
        undo.append(partial(call, "media.dvpp_destroy_pic_desc", picture))
        said = {"data": memory, "size": size_bytes, "format": form}
        said |= dict(zip(("width", "height", "width_stride", "height_stride"), (*size, *strides), strict=True))
        for name, value in said.items():
            call(f"media.dvpp_set_pic_desc_{name}", picture, value)
        return picture, memory

    def _memory(self, size_bytes: int, undo: list[Callable[[], object]]) -> int:
        pointer: int = self._card.call("media.dvpp_malloc", size_bytes)
        undo.append(partial(self._card.call, "media.dvpp_free", pointer))
        return pointer

    def _pixels(self, width: int, height: int, row: int, place: int) -> Tensor:
        """Copy a picture to the host as uint8 [3, height, width]."""
        rows = torch.empty((height, row), dtype=torch.uint8)
        self._card.call("rt.memcpy", rows.data_ptr(), rows.numel(), place, rows.numel(), DEVICE_TO_HOST)
        return rows[:, : 3 * width].reshape(height, width, 3).permute(2, 0, 1)


def _aligned(length: int, to: int) -> int:
    return -(-length // to) * to
