"""ultralytics as a black box, in a child process: importing it changes torch, and it writes settings files.

Tests call `predictions(...)`; the same file is the script that they start.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support import warm

Array = npt.NDArray[Any]


def perturbed(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Make random weights and BatchNorm statistics that depend on names and shapes only: the same in every process.

    Meta tensors do for `state`.
    """
    generator = torch.Generator().manual_seed(7)
    pool = torch.randn(1_000_003, generator=generator)  # drawing afresh for 125 million weights takes half a minute
    start, filled = 0, {}
    for name in sorted(state):
        shape, count = state[name].shape, state[name].numel()
        start = (start + 7919) % (len(pool) // 2)
        values = pool[start : start + count]
        if count > len(values):
            values = pool.repeat(count // len(pool) + 1)[:count]
        values = values.view(shape)
        if name.endswith("num_batches_tracked"):
            filled[name] = torch.zeros(shape, dtype=torch.int64)
        elif ".dfl." in name:
            filled[name] = torch.arange(16, dtype=torch.float32).view(shape)
        elif len(shape) == 4:
            filled[name] = values * (2 / math.prod(shape[1:])) ** 0.5
        elif name.endswith(("bn.weight", "running_var")):
            filled[name] = 1 + 0.1 * values.clamp(-3, 3)
        else:
            filled[name] = 0.1 * values
    return filled


def image_batch(side: int) -> Tensor:
    """Make float64 [2, 3, side, side + 32] in 0..1, the same in every process."""
    return torch.rand(2, 3, side, side + 32, generator=torch.Generator().manual_seed(1)).double()


def predictions(
    out: Path, weights: Path, class_count: int, images: Sequence[Array], thresholds: Sequence[float]
) -> list[tuple[Array, Array, Array]]:
    """Return boxes [k, 4], scores [k], classes [k] of `predict(rect=False)`, per RGB image and score threshold."""
    files = []
    for index, image in enumerate(images):
        files.append(str(out.with_name(f"{out.stem}-{index}.npy")))
        np.save(files[-1], image)
    _run(
        out,
        {"weights": str(weights), "class_count": class_count, "images": files, "thresholds": list(thresholds)},
    )
    found = np.load(out)
    return [(found[f"{i}/xyxy"], found[f"{i}/conf"], found[f"{i}/cls"]) for i in range(len(files))]


def _run(out: Path, task: dict[str, Any]) -> None:
    environment = {
        "YOLO_CONFIG_DIR": str(out.parent),
        "YOLO_OFFLINE": "true",
        "YOLO_AUTOINSTALL": "false",
        "YOLO_VERBOSE": "false",
    }
    words = ("-m", "tests.support.reference_yolov8", str(out), json.dumps(task))
    done = warm.completed(out.parent, *words, environment=environment)
    assert done.returncode == 0, done.stderr[-2000:]


def _main(out: Path, task: dict[str, Any]) -> None:
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    np.savez(out, allow_pickle=False, **_predictions(task))


def _predictions(task: dict[str, Any]) -> dict[str, Array]:
    from ultralytics.models import YOLO
    from ultralytics.nn.tasks import DetectionModel

    yolo: Any = YOLO("yolov8n.yaml")
    model: Any = DetectionModel("yolov8n.yaml", nc=task["class_count"], verbose=False)
    yolo.model = model
    missing, unexpected = model.load_state_dict(
        {name: tensor.float() for name, tensor in load_file(task["weights"]).items()}, strict=False
    )
    assert not unexpected
    assert all(name.endswith("num_batches_tracked") for name in missing)
    arrays = {}
    for index, (file, threshold) in enumerate(zip(task["images"], task["thresholds"], strict=True)):
        bgr = np.ascontiguousarray(np.load(file)[..., ::-1])
        results: Any = yolo.predict(bgr, rect=False, imgsz=640, device="cpu", conf=threshold, iou=0.7, verbose=False)
        found = results[0].boxes
        for what in ("xyxy", "conf", "cls"):
            arrays[f"{index}/{what}"] = getattr(found, what).numpy()
    return arrays


if __name__ == "__main__":
    _main(Path(sys.argv[1]), json.loads(sys.argv[2]))
