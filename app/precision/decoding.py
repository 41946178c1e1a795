"""Whether a device may decode images: its answers to the same files are compared with those to the host's pixels.

Owns: the files, and how far answers may be apart. Must not know decoders: it is given pixels.

Two decoders of JPEG differ by grey levels, so that the limits of a float32 network are of no use here: they are those
of int8, the coarsest that is served. On the sample networks and images libjpeg's own quick upsampling, which is about
what nvJPEG does, takes a tenth of what they allow of a classifier's logits and half of what they allow of a detector's
scores; exchanged colours are over them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from app.precision.gate import outputs_of
from app.precision.measures import LIMITS, measures
from app.precision.probes import Pixels, seen
from backends import Executable, WrongAnswersError
from models import PixelModel


def probe_files() -> list[bytes]:
    """The images that come with anychip: photographs' sizes, 4:2:0."""
    from models.sample import IMAGES

    return [path.read_bytes() for path in sorted(IMAGES.glob("*.jpg"))]


def decoded_by_host(model: PixelModel) -> Pixels:
    """The network's input of each probe file: uint8 [n, *input_shape]."""
    return np.stack([seen(model, file)[0] for file in probe_files()])


def errors(model: PixelModel, executable: Executable, host: Pixels, device: Pixels) -> Mapping[str, float]:
    """The largest errors of the answers to the device's pixels against those to the host's.

    Raises WrongAnswersError where one is over its limit, and BackendError of the executable itself.
    """
    size = executable.batch_sizes[-1]
    expected, given = (outputs_of(executable.run, pixels, size) for pixels in (host, device))
    found = measures(model, expected, given)
    limits = LIMITS[model.task]
    for name, limit in limits.get("int8", limits["bf16"]).items():
        if not found[name] <= limit:
            raise WrongAnswersError(
                f"the answers to images that the device decodes are others: the error {name} is {found[name]:.3g}, and "
                f"{limit:g} is allowed"
            )
    return found
