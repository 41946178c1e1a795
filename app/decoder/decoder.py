"""Decoding of one image after the other: from its bytes in the inbox to its pixels in the arena.

Owns: the meaning of a job, and an answer for every failure. Must not know sockets or processes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from app.decoder.messages import MAX_TEXT, Decoded, DecodePlan, Inbox, Job, Kind, Status
from app.images.decoding import Encoded, decode, part_of
from app.images.header import Header, ImageTooLargeError, InvalidImageError, check_pixels, read_header
from app.processes.arena import Arena
from app.processes.channel import reader
from models import PixelModel, Placement
from models.contract.cascade import Region

_regions = reader(tuple[int, Region])


class Decoder:
    """Decoder that answers jobs over an inbox and an arena. Used by one thread."""

    def __init__(self, plan: DecodePlan, inbox: Inbox, arena: Arena) -> None:
        self._models = plan.models
        self._inbox = inbox
        self._arena = arena

    def answer(self, job: Job) -> Decoded:
        """Do a job, and return its result. Cannot raise for a client's bytes."""
        self._inbox.begin(job.token)
        try:
            return self._placed(job)
        except ImageTooLargeError as error:
            status, text = Status.TOO_LARGE, str(error)
        except InvalidImageError as error:
            status, text = Status.INVALID, str(error)
        except MemoryError:
            status, text = Status.FAILED, "there is no memory for its pixels"
        except Exception as error:  # Ours, not the client's: the next image may well be fine.
            status, text = Status.FAILED, f"{type(error).__name__}: {error}"
        finally:
            self._inbox.end()
        return Decoded(job.token, status, text=text[:MAX_TEXT])

    def _placed(self, job: Job) -> Decoded:
        model = self._models[job.model]
        if model is None:
            raise ValueError(f"model {job.model} takes no images")
        data = self._inbox.buffer(job.buffer, job.size)
        out = torch.from_numpy(self._arena.slot(job.model, job.slot)).view(model.input_shape)
        if job.kind == Kind.PIXELS:
            image = torch.frombuffer(data, dtype=torch.uint8).view(job.height, job.width, 3)
            placement = model.preprocess(image, out, job.width, job.height)
        else:
            data, tail = data[: job.size - job.tail], data[job.size - job.tail :]
            header = read_header(data)
            check_pixels(header, job.max_pixels)
            if header.width * header.height >= job.large_pixels:
                return Decoded(job.token, Status.LARGE, header.width, header.height)
            if job.kind == Kind.REGIONS:
                self._place(model, job.model, decode(data, header), _regions(bytes(tail)))
                placement = Placement(header.width, header.height)
            else:
                placement = decode_into(model, data, header, out)
        where = placement.scale, placement.pad_x, placement.pad_y
        return Decoded(job.token, Status.PLACED, placement.width, placement.height, *where)

    def _place(self, model: PixelModel, index: int, image: torch.Tensor, regions: Sequence[tuple[int, Region]]) -> None:
        """Place each region of an image as if it were an image itself. Raises InvalidImageError for one outside."""
        for slot, region in regions:
            out = torch.from_numpy(self._arena.slot(index, slot)).view(model.input_shape)
            part = part_of(image, region)
            model.preprocess(part, out, part.shape[1], part.shape[0])


def decode_into(model: PixelModel, body: Encoded, header: Header, target: torch.Tensor) -> Placement:
    """Decode one image and place it in `target`, uint8 `model.input_shape`. Raises InvalidImageError."""
    size = model.decode_size(header.width, header.height)
    return model.preprocess(decode(body, header, size), target, header.width, header.height)
