"""The sample models: synthetic images, the training that made the weights beside this file, and its loss.

Owns: everything needed to make the sample weights again. The service reads the files here and runs none of the code.
"""

from pathlib import Path

IMAGES = Path(__file__).parent / "images"
"""Sample images `classify_*.jpg` and `detect_*.jpg`; `expected.json` holds their right answers."""
