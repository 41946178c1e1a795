"""Question: why a package of AOTInductor ends the process that loads it; one child a variant, of three networks.

python -m benchmarks.gpu.inductor DEVICE NETWORK PRECISION OPTIONS BATCH     command line of a child
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from backends.engines.eager import placed
from backends.engines.inductor import OPTIONS
from benchmarks.gpu.asked import Asked

_VARIANTS: dict[str, dict[str, Any]] = {
    "as it would serve": {},
    "frozen, as it was": {"freezing": True},
    "frozen, constants folded at run time": {"freezing": True, "aot_inductor.use_runtime_constant_folding": True},
    "weights in files of their own": {"aot_inductor.force_mmap_weights": True},
}
_LIMIT_S = 100


class One(nn.Module):
    """Convolution of pixels."""

    input_shape = (32, 32, 3)

    def __init__(self) -> None:
        super().__init__()
        self.core = nn.Conv2d(3, 8, 3)

    def cast(self, dtype: torch.dtype) -> One:
        """Cast the weights."""
        self.core.to(dtype)
        return self

    def forward(self, pixels: Tensor) -> tuple[Tensor]:
        """Compute float32 [n, 8, h - 2, w - 2]."""
        return (self.core((pixels.permute(0, 3, 1, 2) / 255).to(self.core.weight.dtype)).float(),)


def ask(asked: Asked) -> dict[str, Any]:
    """Report each child: its exit status, below 0 the signal that ended it, and its last line."""
    rows = []
    until_s = time.monotonic() + (30 if asked.dry else 280)
    networks = ("one",) if asked.dry else ("one", "resnet18", "resnet50")
    for network in networks:
        for name, options in list(_VARIANTS.items())[: 1 if asked.dry else None]:
            for precision in ("fp32",) if network == "one" else ("fp32", "fp16"):
                row: dict[str, Any] = {"network": network, "precision": precision, "variant": name}
                rows.append(row)
                if time.monotonic() > until_s:
                    row["status"] = "no time"
                    continue
                what = (asked.device, network, precision, json.dumps(options), "dry" if asked.dry else "8")
                command = [sys.executable, "-X", "faulthandler", "-m", __name__, *what]
                try:
                    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
                    lines = (done.stdout + done.stderr).strip().splitlines()
                    row |= {"status": done.returncode, "said": lines[-1][:300] if lines else ""}
                    if done.returncode:
                        row["traceback"] = "\n".join(lines[-25:])[:4000]
                except subprocess.TimeoutExpired:
                    row["status"] = f"not done within {_LIMIT_S} s"
    return {"rows": rows}


def _child(device: str, name: str, precision: str, given: str, batch: str) -> None:
    from benchmarks.gpu.asked import Asked
    from models.classifiers import Classifier

    labels = tuple(f"class {number}" for number in range(1000))
    made: Any = One() if name == "one" else Classifier.of(name, name, labels, "random", None).network()
    module = placed(made.eval().requires_grad_(False), device, precision, True)
    pixels = torch.zeros((1 if batch == "dry" else int(batch), *made.input_shape), dtype=torch.uint8, device=device)
    with torch.no_grad():
        program = torch.export.export(cast(nn.Module, module), (pixels,))
        expected = module(pixels)
    if batch == "dry":
        print(f"exported {len(program.graph.nodes)} nodes")
        return
    from torch import _inductor

    with tempfile.TemporaryDirectory() as folder:
        package = str(Path(folder) / "package.pt2")
        options = {**(OPTIONS if device.startswith("cpu") else {}), **json.loads(given)}
        _inductor.aoti_compile_and_package(program, package_path=package, inductor_configs=options)
        print("compiled", flush=True)
        loaded: Any = _inductor.aoti_load_package(package)
        print("loaded", flush=True)
        found = loaded(pixels)
        away = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
        taken_s = Asked(device).time_s(lambda: loaded(pixels), 4)
        print(f"answers off by {away:.2g}, {1e3 * taken_s:.3f} ms a batch of {batch}")


if __name__ == "__main__":
    _child(*sys.argv[1:])
