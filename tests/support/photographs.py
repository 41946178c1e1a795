"""Real photographs for the tests: decoded RGB arrays, uint8 [height, width, 3]."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

Photograph = npt.NDArray[np.uint8]


def _file(package: str, inside: str) -> Path:
    # The packages themselves are not imported: the import of one of them changes torch.
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / inside


_PLACES = {
    "china": _file("sklearn", "datasets/images/china.jpg"),
    "flower": _file("sklearn", "datasets/images/flower.jpg"),
    "bus": _file("ultralytics", "assets/bus.jpg"),
    "zidane": _file("ultralytics", "assets/zidane.jpg"),
}
FILES = [*_PLACES.values()]


PHOTOGRAPHS: dict[str, Callable[[], Photograph]] = {
    name: functools.partial(lambda file: np.array(Image.open(file).convert("RGB")), file)
    for name, file in _PLACES.items()
}
