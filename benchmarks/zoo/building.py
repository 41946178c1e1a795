"""Writes rows' files and what their libraries answer: `FOLDER NAME…`, a process of its own for each library.

`FOLDER/NAME/made.json` and `answers.npz`, or `failed.txt`. The pictures lie in `FOLDER/NAME/pictures`.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
import traceback
import warnings
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("YOLO_OFFLINE", "true")
os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
warnings.filterwarnings("ignore")

import numpy as np  # noqa: E402
import torch  # noqa: E402

from benchmarks.zoo.networks import pictures  # noqa: E402
from benchmarks.zoo.table import NETWORKS  # noqa: E402


def main(folder: Path, names: list[str]) -> None:
    """Build each; one that fails stops no other."""
    torch.set_num_threads(1)
    for name in names:
        target = (folder / name).resolve()
        target.mkdir(parents=True, exist_ok=True)
        began_s = time.perf_counter()
        os.chdir(target)
        torch.manual_seed(0)
        try:
            images = pictures()
            made = NETWORKS[name].build(target, images)
        except Exception:
            (target / "failed.txt").write_text(traceback.format_exc())
            print(f"{name}: not built: {traceback.format_exc().strip().splitlines()[-1]}", flush=True)
            continue
        (target / "pictures").mkdir(exist_ok=True)
        for number, image in enumerate(images):
            sized = image.resize(made.sides) if made.sides else image
            sized.save(target / "pictures" / f"{number}.png")
        about = asdict(made)
        del about["answers"]
        about["version"] = _version(NETWORKS[name].package)
        np.savez(target / "answers.npz", *[np.asarray(each, np.float32) for each in made.answers])
        (target / "made.json").write_text(json.dumps(about, indent=1))
        print(f"{name}: built in {time.perf_counter() - began_s:.1f} s", flush=True)


def _version(package: str) -> str:
    [distribution, *_] = importlib.metadata.packages_distributions()[package]
    return importlib.metadata.version(distribution)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
