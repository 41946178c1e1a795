"""Make or renew the environment of the tests of plugins/ocr: it sees the packages of the one that runs this, and has
the plugin, anychip itself, and RapidOCR with PP-OCR's networks, besides.

Owns: what is in it. An environment of its own because anychip itself must not need any of this. Used by the
suite ocr; example: .venv/bin/python tests/environments/ocr_environment.py .venv-ocr
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from deploy.install import link_packages, make_venv, run_pip  # noqa: E402
from tests.environments.command import run  # noqa: E402

RAPIDOCR = "3.10.0"  # Its wheel holds the networks.
_OF_RAPIDOCR = ("pyclipper", "shapely", "omegaconf>=2.3", "colorlog", "six", "tqdm", "requests", "onnxruntime>=1.18")


def make(folder: Path) -> None:
    """Fill the environment in `folder`. Raises InstallError."""
    python = make_venv(folder)
    link_packages(python)
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
    run_pip([*pip, "setuptools>=77", *_OF_RAPIDOCR])
    # Without what they depend on: OpenCV and NumPy are there, in the versions that anychip is tested with.
    run_pip([*pip, "--no-deps", f"rapidocr=={RAPIDOCR}"])
    # anychip, too: a linked environment does not see what that one has from a checkout.
    editable = [word for folder in (ROOT, ROOT / "plugins" / "ocr") for word in ("--editable", str(folder))]
    run_pip([*pip, "--no-deps", "--no-build-isolation", *editable])


if __name__ == "__main__":
    run(make, "the environment of the tests of plugins/ocr", ROOT / ".venv-ocr")
