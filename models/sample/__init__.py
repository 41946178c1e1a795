"""The sample images, and the generator of the images that the sample weights (plugins/samples) were trained on.

Owns: these files. Training lies outside the product, in benchmarks/sample_training.
"""

from pathlib import Path

IMAGES = Path(__file__).parent / "images"
"""Sample images `classify_*.jpg` and `detect_*.jpg`; `expected.json` holds their right answers."""
