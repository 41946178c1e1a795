"""Write the sample images and their right answers: `python -m benchmarks.sample_training.images models/sample/images`.

Owns: the choice of the generator's images.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.sample_training.generator import KINDS, classification_image, detection_image

SAMPLE_SEED = 7
CLASSIFICATION_SAMPLES = {"classify_heart.jpg": 16, "classify_ring.jpg": 18, "classify_star.jpg": 1}  # name: index
# Chosen among the first of their seed that the shipped detector answers without a mistake: a demonstration, no measure.
DETECTION_SAMPLES = {"detect_1.jpg": 11, "detect_2.jpg": 10, "detect_3.jpg": 18}


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the sample images and `expected.json`, their right answers, into a directory."""
    parser = argparse.ArgumentParser(description="Write the sample images and their right answers.")
    parser.add_argument("directory", type=Path)
    directory: Path = parser.parse_args(arguments).directory
    directory.mkdir(parents=True, exist_ok=True)
    expected: dict[str, Any] = {}
    for name, index in CLASSIFICATION_SAMPLES.items():
        rgb, class_id = classification_image(SAMPLE_SEED, index, (500, 375))
        expected[name] = {"label": KINDS[class_id]}
        Image.fromarray(rgb).save(directory / name, quality=80)
    for name, index in DETECTION_SAMPLES.items():
        rgb, boxes, classes = detection_image(SAMPLE_SEED, index, (640, 480))
        expected[name] = {
            "objects": [
                {"label": KINDS[class_id], "box": dict(zip(("x1", "y1", "x2", "y2"), box, strict=True))}
                for class_id, box in zip(classes.tolist(), boxes.tolist(), strict=True)
            ]
        }
        Image.fromarray(rgb).save(directory / name, quality=80)
    (directory / "expected.json").write_text(json.dumps(expected, indent=2) + "\n")


if __name__ == "__main__":
    main()
