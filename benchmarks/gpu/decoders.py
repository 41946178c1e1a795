"""Question: nvJPEG and nvImageCodec, files a second by length of the list, and their pixels against libjpeg's."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from backends.contract.backend import ImageDecoder
from backends.vendors.cuda import CudaHooks
from benchmarks.gpu.asked import Asked
from benchmarks.gpu.nvimgcodec import NvimgcodecDecoder
from models.sample import IMAGES


class Libjpeg(ImageDecoder):
    """Decoder of the host, for a dry run."""

    name = "libjpeg"

    def decode(self, files: list[Tensor]) -> list[Tensor]:  # type: ignore[override]
        """Decode one file after the other."""
        return [_by_host(file.numpy().tobytes()) for file in files]


def ask(asked: Asked) -> dict[str, Any]:
    """Measure each decoder that is here."""
    photo = (sorted(IMAGES.glob("*.jpg"))[0]).read_bytes()
    stream = io.BytesIO()
    Image.open(io.BytesIO(photo)).resize((1920, 1080)).save(stream, "JPEG", quality=90)
    files = {"sample": photo} if asked.dry else {"sample": photo, "1920x1080": stream.getvalue()}
    decoders: list[ImageDecoder | None] = [Libjpeg("cpu")] if asked.dry else [CudaHooks().image_decoder(asked.device)]
    refused = {}
    try:
        decoders.append(NvimgcodecDecoder(asked.device))
    except Exception as error:
        refused["nvImageCodec"] = f"{type(error).__name__}: {error}"[:300]
    rows = []
    for decoder in filter(None, decoders):
        for name, file in files.items():
            one = torch.from_numpy(np.frombuffer(file, np.uint8).copy())
            try:
                away = np.abs(decoder.decode([one])[0].cpu().numpy().astype(int) - _by_host(file).numpy())
                row: dict[str, Any] = {"decoder": decoder.name, "file": name, "pixels_off_mean": float(away.mean())}
                row["pixels_off_most"] = int(away.max())
                for count in (1, 2) if asked.dry else (1, 8, 64):
                    taken_s = asked.time_s(lambda decoder=decoder, one=one, count=count: decoder.decode([one] * count))
                    row[f"lists_of_{count}_files_per_s"] = round(count / taken_s)
            except Exception as error:
                row = {"decoder": decoder.name, "file": name, "refused": f"{type(error).__name__}: {error}"[:300]}
            rows.append(row)
    return {"rows": rows, "refused": refused}


def _by_host(file: bytes) -> Tensor:
    with Image.open(io.BytesIO(file)) as image:
        return torch.from_numpy(np.array(image.convert("RGB")).transpose(2, 0, 1).copy())
