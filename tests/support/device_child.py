"""Python in a child process, over a stub driver or not: PyTorch has room for one accelerator a process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from tests.support import stub_drivers, warm
from tests.support.photographs import PHOTOGRAPHS

ROOT = Path(__file__).parents[2]
# A forked process has imported plug-ins of pytest before pytest did.
SUITE = ("-m", "pytest", "-q", "-rp", "-W", "ignore::pytest.PytestAssertRewriteWarning", "-p", "no:cacheprovider")


def child(
    python: str | Path, variables: Mapping[str, str], *arguments: str, autoload: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run `python` in the repository. `autoload`: importing torch imports vendors' installed packages."""
    if str(python) == sys.executable and not autoload:
        return warm.completed(ROOT, *arguments, environment=variables)
    environment = {"PYTHONPATH": str(ROOT), **variables}
    inherited = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    if not autoload:
        inherited["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    return subprocess.run(
        [str(python), *arguments],
        cwd=ROOT,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def over(stub: str) -> tuple[str | Path, dict[str, str]]:
    """Return Python and variables of a stub: `cuda`, `npu`, `npu-blocking`, or an older torch_npu's `npu-2.10.0`."""
    if stub == "cuda":
        return sys.executable, stub_drivers.cudart(sys.executable)
    if stub in ("npu", "npu-blocking"):
        variables = stub_drivers.cann(sys.executable)
        return sys.executable, {**variables, "ASCEND_LAUNCH_BLOCKING": "1"} if stub == "npu-blocking" else variables
    python = ROOT / ".venv-npu" / stub.removeprefix("npu-") / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{python} is missing: make npu-environment")
    return python, stub_drivers.cann(python)


def passed(done: subprocess.CompletedProcess[str]) -> set[str]:
    """Return the tests that a child passed, if it reports them (-rp); fail unless it passed all that it ran."""
    # If the process died, the cause stands before a long stack.
    died = re.search(r"^(terminate called|Fatal Python error).{,3000}", done.stderr, re.MULTILINE | re.DOTALL)
    assert done.returncode == 0, done.stdout[-6000:] + (died.group() if died else done.stderr[-3000:])
    found = set(re.findall(r"^PASSED \S+::(\w+)", done.stdout, re.MULTILINE))
    assert found, done.stdout[-2000:]
    return found


def contract(module: str, kind: str, python: str | Path, variables: Mapping[str, str], *options: str) -> set[str]:
    """Run the contract suite on the device of a module; return the tests that passed."""
    with tempfile.NamedTemporaryFile(suffix=".npz") as file:  # Other environments have no packages for images.
        np.savez(file, allow_pickle=False, **{name: read() for name, read in PHOTOGRAPHS.items()})
        file.flush()
        told = {"DEVICE_UNDER_TEST": module, "DEVICE_TYPE": kind, "PHOTOGRAPHS": file.name}
        return passed(child(python, {**told, **variables}, *SUITE, "tests/support/device_contract.py", *options))
