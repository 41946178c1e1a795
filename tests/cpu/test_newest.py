"""Other people's newest releases whose internals ours subclass."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.vendor_sources import ROOT, unpacked

pytestmark = pytest.mark.nightly


def test_the_newest_uvicorn_fits_our_connection(tmp_path: Path) -> None:
    """pyproject.toml has no upper bound, so that installations get it before constraints.txt does."""
    environment = unpacked("uvicorn", tmp_path)
    tests = ("tests/unit/test_connection.py", "tests/virtual/test_hot.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
