"""The sample images, which benchmarks/sample_training draws."""

from pathlib import Path

IMAGES = Path(__file__).parent / "images"
"""Sample images `classify_*.jpg` and `detect_*.jpg`; `expected.json` holds their right answers."""
