"""The sample models: synthetic pictures, the training that made the weights beside this file, and its loss.

Owns: everything needed to make the sample weights again. The service reads the files here and runs none of the code.
"""

from pathlib import Path

PICTURES = Path(__file__).parent / "pictures"
"""Sample pictures `classify_*.jpg` and `detect_*.jpg`; `expected.json` holds their right answers."""
