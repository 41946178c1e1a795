"""Questions that existing commands answer: the contract suite, `anychip verify`, JPEGs over HTTP.

Owns: their command lines. A dry run asks each command whether it has these options.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.gpu.asked import Asked
from models.sample import IMAGES

_PYTEST = ("pytest", "hypothesis", "pytest_asyncio")


def contract(asked: Asked) -> dict[str, Any]:
    """Check what every backend promises of its devices (tests/support/device_contract.py), if pytest is installed."""
    lacking = [name for name in _PYTEST if importlib.util.find_spec(name) is None]
    if lacking:
        return {"left out": f"it needs {', '.join(lacking)}"}
    photographs = asked.out / "photographs.npz"
    images = {path.stem: np.array(Image.open(path).convert("RGB")) for path in sorted(IMAGES.glob("*.jpg"))[:4]}
    np.savez(photographs, **images)  # type: ignore[arg-type]
    command = ["pytest", "-q", "-rs", "-p", "no:cacheprovider", "tests/support/device_contract.py"]
    more = ("--collect-only",) if asked.dry else ()
    variables = {"DEVICE_UNDER_TEST": "tests.support.devices.plain", "DEVICE_TYPE": asked.kind}
    return _run([*command, *more], {**variables, "PHOTOGRAPHS": str(photographs)})


def tensorrt(asked: Asked) -> dict[str, Any]:
    """Build engines of TensorRT for both sample models in each of its precisions, check their answers, measure them."""
    sizes = ",".join(map(str, asked.sizes))
    options = ("--device", asked.device, "--engines", "tensorrt", "--parts", "engines", "--sizes", sizes)
    return _command(asked, ("app", "verify"), (*options, "--budget-s", "270", "--out", str(asked.out / "tensorrt")))


def verify(asked: Asked) -> dict[str, Any]:
    """Measure what serves by default, through the gate, and the memory that batches leave behind."""
    sizes = ",".join(map(str, asked.sizes))
    options = ("--device", asked.device, "--sizes", sizes, "--seconds", "1", "--budget-s", "270")
    return _command(asked, ("app", "verify"), (*options, "--out", str(asked.out)))


def load(asked: Asked) -> dict[str, Any]:
    """Load one service, and several that share the card."""
    return _load(asked, "card_load", "--services", "1,2,4")


def load_by_ingresses(asked: Asked) -> dict[str, Any]:
    """Load one service with 0, 2, 4 and 8 ingresses."""
    return _load(asked, "card_load_ingresses", "--services", "1", "--ingresses", "0,2,4,8")


def load_decoded_by_card(asked: Asked) -> dict[str, Any]:
    """Load one service whose files the card decodes."""
    return _load(asked, "card_load_decode", "--services", "1", "--options", "--decode device")


def load_decoded_by_ingresses(asked: Asked) -> dict[str, Any]:
    """Load one service whose files the card decodes, with 0, 2 and 4 ingresses."""
    more = ("--ingresses", "0,2,4", "--options", "--decode device")
    return _load(asked, "card_load_decode_ingresses", "--services", "1", *more)


def _load(asked: Asked, name: str, *options: str) -> dict[str, Any]:
    """Send JPEGs over HTTP with these options; write the figures to a file of this name."""
    every = ("--device", asked.device, "--seconds", "5", "--rounds", "1", "--json", str(asked.out / f"{name}.json"))
    return _command(asked, ("benchmarks.card_load",), (*every, *options))


def _command(asked: Asked, command: tuple[str, ...], options: tuple[str, ...]) -> dict[str, Any]:
    if not asked.dry:
        return _run([*command, *options], {})
    found = _run([*command, "--help"], {})
    known = set(re.findall(r"--[a-z-]+", found.pop("said")))
    found["unknown"] = sorted(
        {option for option in options if option.startswith("--") and option != "--decode device"} - known
    )
    return found


def _run(command: list[str], variables: dict[str, str]) -> dict[str, Any]:
    environment = {**os.environ, **variables}
    done = subprocess.run(
        [sys.executable, "-m", *command], env=environment, capture_output=True, text=True, check=False
    )
    return {"command": " ".join(command), "status": done.returncode, "said": (done.stdout + done.stderr)[-6000:]}
