"""Compare exported files with Ultralytics' own predictions from them: images, exports, differences.

Owns: the images, the definition of the same instance. Ultralytics runs in a child process, from the same file.
docs/reports/ultralytics-exports.md has what was found.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from app.images.decoding import decode
from app.images.header import read_header
from benchmarks.sample_training.generator import detection_image
from models import Options, open_model, parse_spec
from models.contract.model import softmax
from models.tasks.detect import grid, polygons
from tests.support import warm

ROOT = Path(__file__).parents[2]
SIZES = [(320, 320), (640, 480), (480, 640), (333, 517), (97, 301), (1280, 720), (500, 375), (641, 479)]


def written_images(folder: Path, count: int) -> Path:
    """Write JPEGs of mixed sizes, a third of them turned by EXIF."""
    for index in range(count):
        rgb, _, _ = detection_image(77, index, SIZES[index % len(SIZES)])
        exif = Image.Exif()
        if index % 3 == 2:
            exif[0x112] = (6, 8, 3, 5)[index % 4]
        Image.fromarray(rgb).save(folder / f"{index:02}.jpg", quality=92, exif=exif)
    return folder


def exported(folder: Path, images: Path, tags: list[str], side: int = 320) -> Path:
    words = ("-m", "tests.support.ultralytics_exports", str(folder), str(images), *tags)
    done = warm.completed(ROOT, *words, environment={"ANYCHIP_TEST_SIDE": str(side)}, timeout_s=500)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


def opened(folder: Path, tag: str) -> Any:
    [file] = [path for end in (".onnx", ".torchscript", "_openvino_model") if (path := folder / f"{tag}{end}").exists()]
    return open_model(parse_spec(f"cars={file}"), folder, allow_download=False)


def predicted(model: Any, network: Any, encoded: bytes) -> tuple[Any, Any, Any]:
    header = read_header(encoded)
    out = torch.zeros(model.input_shape, dtype=torch.uint8)
    pixels = decode(encoded, header, model.decode_size(header.width, header.height))
    placement = model.preprocess(pixels, out, header.width, header.height)
    with torch.inference_mode():
        outputs = [output.numpy() for output in network(out[None])]
    reduced = model.reduce(outputs, 0, Options())
    return reduced, placement, model.postprocess(reduced, placement, Options())


def compare(folder: Path, images: Path, tag: str) -> dict[str, float]:
    """Compare with Ultralytics' predictions; return the largest differences."""
    model = opened(folder, tag)
    network = model.network()
    expected = json.loads((folder / f"{tag}.expected.json").read_text())
    masks = np.load(folder / f"{tag}.masks.npz")
    worst: dict[str, float] = {}
    instances = lost = 0

    def note(name: str, value: float) -> None:
        worst[name] = max(worst.get(name, 0.0), float(value))

    for file in sorted(images.iterdir()):
        reduced, placement, answer = predicted(model, network, file.read_bytes())
        theirs = expected[file.name]
        if "probabilities" in theirs:
            note("probability", np.abs(softmax(reduced[0]) - theirs["probabilities"]).max())
            instances += 1
            continue
        found = list(answer["detections"])
        inner, _, frame = model.adapter.found(reduced, placement, Options())
        rows = list(range(len(inner["scores"])))
        if "segments" in (found[0] if found else {}):
            rows = [row for row, rings in enumerate(polygons(inner, frame)) if rings is not None]
        instances += len(theirs["scores"])
        lost += abs(len(found) - len(theirs["scores"]))
        free = set(range(len(found)))
        for number, (score, class_id) in enumerate(zip(theirs["scores"], theirs["classes"], strict=True)):
            place = np.array(theirs["corners" if "corners" in theirs else "boxes"][number])
            if place.ndim == 1:  # It leaves RT-DETR's boxes beyond the image; ours never reach there.
                place = place.clip(0, [placement.width, placement.height] * 2)
            alike = [
                row
                for row in free
                if found[row]["class_id"] == int(class_id) and abs(found[row]["score"] - score) <= 0.01
            ]
            errors = {row: error for row in alike if (error := _distance(found[row], place)) <= 1}
            if not errors:
                lost += 1
                continue
            best = min(errors, key=lambda row: errors[row])
            free.discard(best)
            note("box", errors[best])
            note("score", abs(found[best]["score"] - score))
            if "keypoints" in theirs:
                points = np.array([[point["x"], point["y"]] for point in found[best]["keypoints"]])
                note("keypoint", np.abs(points - np.array(theirs["keypoints"][number])[:, :2]).max())
            if file.name in masks and number < 20:  # The best of an image: whole masks are slow.
                size = (placement.height, placement.width)
                theirs_mask = np.unpackbits(masks[file.name][number], axis=-1)[: size[0], : size[1]].astype(bool)
                one = slice(rows[best], rows[best] + 1)
                where = grid(inner["prototypes"], frame)
                note("mask in its box", _apart(where, inner, one, place[None], theirs_mask))
    return {**worst, "instances": instances, "lost": lost}


def _apart(where: Any, inner: dict[str, Any], one: slice, box: Any, reference: np.ndarray[Any, Any]) -> float:
    """Return one less the IoU of an instance's mask, cut at this box, with a mask of the whole image."""
    [(mask, x, y)] = where.masks(inner["coefficients"][one], inner["prototypes"], box)
    whole = np.zeros_like(reference)
    whole[y : y + mask.shape[0], x : x + mask.shape[1]] = mask[: whole.shape[0] - y, : whole.shape[1] - x]
    union = (whole | reference).sum()
    return float(1 - (whole & reference).sum() / union) if union else 0.0


def _distance(found: dict[str, Any], place: np.ndarray[Any, Any]) -> float:
    if place.ndim == 1:
        return float(np.abs(np.array([*found["box"].values()]) - place).max())
    corners = np.array(found["corners"])  # Any order around the box will do.
    return float(max(np.abs(corners - corner).max(axis=1).min() for corner in place))
