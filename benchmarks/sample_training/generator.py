"""Synthetic images of ten kinds of shapes, with their right answers: the sample weights are trained on them.

Owns: drawing an image. An image is a pure function of (seed, index, size): no state, no thread, no clock. Must not know
networks or training.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from math import cos, pi, sin
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFilter

Rgb = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Mask = npt.NDArray[np.uint8]
Outline = list[tuple[float, float]]

KINDS = ("arrow", "bolt", "circle", "crescent", "cross", "heart", "ring", "square", "star", "triangle")

_MIN_VISIBLE = 0.7  # of a shape's area: less than that is neither drawn nor labelled
_SUPERSAMPLING = 4


def classification_image(seed: int, index: int, size: tuple[int, int], difficulty: float = 1.0) -> tuple[Rgb, int]:
    """Draw one shape on a background of distractors.

    `size`: (width, height). `difficulty` below 1 is for the start of training: 0 is a large shape on a plain colour.
    Returns uint8 [height, width, 3] RGB and the class, an index into `KINDS`.
    """
    rng = np.random.default_rng((seed, index))
    width, height = size
    short = min(size)
    class_id = int(rng.integers(len(KINDS)))
    canvas = _Canvas(rng, width, height, difficulty)
    canvas.clutter(int(rng.integers(4)))
    while not canvas.shapes:
        radius = short * rng.uniform(0.17 + 0.2 * (1 - difficulty), 0.46)
        # The middle square is what a centre crop keeps, so the shape lies there.
        reach = max(short / 2 - 0.9 * radius, 0.0)
        x, y = rng.uniform(-reach, reach, 2)
        canvas.place(class_id, width / 2 + x, height / 2 + y, radius)
    canvas.clutter(int(rng.integers(3)))
    return canvas.photograph(), class_id


def detection_image(
    seed: int, index: int, size: tuple[int, int], zoom: float = 1.0
) -> tuple[Rgb, Floats, npt.NDArray[np.int64]]:
    """Draw one to eight shapes, some of which overlap, on a background of distractors.

    `size`: (width, height). `zoom` enlarges the shapes: a small image then shows them in the pixels of a large one.
    Returns uint8 [height, width, 3] RGB, boxes float32 [m, 4] as x1, y1, x2, y2 in pixels, tight around the visible
    part of each shape, and classes int64 [m], indices into `KINDS`.
    """
    rng = np.random.default_rng((seed, index))
    width, height = size
    short = min(size)
    canvas = _Canvas(rng, width, height)
    canvas.clutter(int(rng.integers(4)))
    wanted = int(rng.integers(1, 9))
    tries = 0
    while len(canvas.shapes) < wanted and (tries < 3 * wanted or not canvas.shapes):
        tries += 1
        radius = short * zoom * 0.05 * 6.0 ** rng.random()
        canvas.place(int(rng.integers(len(KINDS))), rng.uniform(0, width), rng.uniform(0, height), radius)
    canvas.clutter(int(rng.integers(4)))
    boxes = np.array([_box(shape.visible) for shape in canvas.shapes], dtype=np.float32)
    classes = np.array([shape.class_id for shape in canvas.shapes], dtype=np.int64)
    return canvas.photograph(), boxes, classes


class _Patch(NamedTuple):
    left: int
    top: int
    coverage: Mask  # [h, w], 0..255

    @property
    def region(self) -> tuple[slice, slice]:
        """Rows and columns of the patch in the image."""
        height, width = self.coverage.shape
        return slice(self.top, self.top + height), slice(self.left, self.left + width)


class _Shape(NamedTuple):
    class_id: int
    area: int  # pixels, those outside the image included
    visible: npt.NDArray[np.bool_]  # [height, width]


class _Canvas:
    """An image in the making; `shapes` are those to label."""

    def __init__(self, rng: np.random.Generator, width: int, height: int, difficulty: float = 1.0) -> None:
        self.rng = rng
        self.difficulty = difficulty
        self.width = width
        self.height = height
        self.colours: list[Floats] = []
        self.shapes: list[_Shape] = []
        first, second = self._new_colour(), self._new_colour()
        self.pixels: Floats = _blend(first, second, self._texture(width, height))

    def place(self, class_id: int, x: float, y: float, radius: float) -> None:
        """Draw a shape with its centre at (x, y), unless too little of it or of another would stay visible."""
        rng = self.rng
        angle = rng.uniform(0, 2 * pi)
        stretch = rng.uniform(0.85, 1.15)
        shear = rng.uniform(-0.12, 0.12)
        c, s = radius * cos(angle), radius * sin(angle)
        rings = [
            [(x + c * (u * stretch + shear * v) - s * v, y + s * (u * stretch + shear * v) + c * v) for u, v in ring]
            for ring in _outline(KINDS[class_id], rng)
        ]
        patch, area = _drawn(rings, self.width, self.height)
        visible = np.zeros((self.height, self.width), dtype=np.bool_)
        visible[patch.region] = patch.coverage >= 128
        shape = _Shape(class_id, area, visible)
        if self._is_hidden(shape):
            return
        colour = self._new_colour()
        shade = np.clip(colour + rng.uniform(-45, 45, 3), 0, 255).astype(np.float32)
        height, width = patch.coverage.shape
        if self._paint(patch, _blend(colour, shade, self._texture(width, height))):
            self.shapes.append(shape)

    def clutter(self, count: int) -> None:
        """Draw `count` bars and scribbles, except those that would hide a shape."""
        rng = self.rng
        for _ in range(round(count * self.difficulty)):
            points = [(rng.uniform(0, self.width), rng.uniform(0, self.height)) for _ in range(rng.integers(2, 6))]
            thickness = min(self.width, self.height) * rng.uniform(0.008, 0.05)
            if len(points) > 2:
                thickness *= 0.5
            image = Image.new("L", (self.width, self.height))
            ImageDraw.Draw(image).line(points, fill=255, width=max(1, round(thickness)), joint="curve")
            left, top, right, bottom = image.getbbox() or (0, 0, 1, 1)
            patch = _Patch(left, top, np.asarray(image.crop((left, top, right, bottom))))
            self._paint(patch, self._new_colour())

    def photograph(self) -> Rgb:
        """Return the image as from a camera: lighting, blur, sensor noise, compression."""
        rng = self.rng
        dark, bright = sorted((rng.uniform(0.6, 1.2), rng.uniform(0.6, 1.2)))
        light = dark + (bright - dark) * _ramp(rng, self.width, self.height)
        pixels = self.pixels * light[:, :, None]
        image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
        if rng.random() < 0.5:
            image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 0.006 * min(image.size) + 0.4)))
        if rng.random() < 0.6:
            noise = (
                rng.standard_normal((self.height, self.width, 3), dtype=np.float32)
                * rng.uniform(2, 14)
                * self.difficulty
            )
            image = Image.fromarray(np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8))
        if rng.random() < 0.5:
            compressed = BytesIO()
            image.save(compressed, "JPEG", quality=int(rng.integers(30, 95)))
            image = Image.open(compressed)
        return np.array(image, dtype=np.uint8)

    def _texture(self, width: int, height: int) -> Floats:
        return _floats(_texture(self.rng, width, height) * np.float32(self.difficulty))

    def _new_colour(self) -> Floats:
        """Return the candidate that differs most from all colours in use, so that each shape stands out."""
        candidates = self.rng.uniform(0, 255, (6, 3)).astype(np.float32)
        gaps = [min((float(np.abs(c - used).sum()) for used in self.colours), default=0.0) for c in candidates]
        colour: Floats = candidates[int(np.argmax(gaps))]
        self.colours.append(colour)
        return colour

    def _paint(self, patch: _Patch, colours: Floats) -> bool:
        """Paint `colours` ([h, w, 3] or [3]) over the image; if that hides a shape, do nothing and return False."""
        remaining = [shape._replace(visible=shape.visible.copy()) for shape in self.shapes]
        for shape in remaining:
            shape.visible[patch.region] &= patch.coverage < 128
        if any(self._is_hidden(shape) for shape in remaining):
            return False
        self.shapes = remaining
        alpha = patch.coverage[:, :, None].astype(np.float32) / 255
        below = self.pixels[patch.region]
        below += alpha * (colours - below)
        return True

    @staticmethod
    def _is_hidden(shape: _Shape) -> bool:
        return int(np.count_nonzero(shape.visible)) < _MIN_VISIBLE * shape.area


def _outline(kind: str, rng: np.random.Generator) -> list[Outline]:
    """Return a shape in the unit disc: its outer ring, then rings cut out of it."""
    if kind == "circle":
        return [_arc(0, 0, 1, 0, 2 * pi)]
    if kind == "ring":
        return [_arc(0, 0, 1, 0, 2 * pi), _arc(0, 0, rng.uniform(0.45, 0.68), 0, 2 * pi)]
    if kind == "crescent":
        # Two arcs through the points where the circles meet, at +-60 degrees.
        half = pi / 3
        depth = rng.uniform(0.1, 0.3)
        inner_left = depth - 0.45  # where the inner arc cuts the axis; the outer one does at -1
        x, y = cos(half), sin(half)
        middle = (x * x + y * y - inner_left * inner_left) / (2 * (x - inner_left))
        angle = float(np.arctan2(y, x - middle))
        outer = _arc(0, 0, 1, half, 2 * pi - half)
        return [outer + _arc(middle, 0, middle - inner_left, 2 * pi - angle, angle)]
    if kind == "square":
        return [[(-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)]]
    if kind == "triangle":
        return [[(cos(a), sin(a)) for a in (pi / 2, pi * 7 / 6, pi * 11 / 6)]]
    if kind == "star":
        inner = rng.uniform(0.38, 0.5)
        return [[(r * cos(i * pi / 5), r * sin(i * pi / 5)) for i, r in enumerate((1.0, inner) * 5)]]
    if kind == "cross":
        t = rng.uniform(0.22, 0.34)
        quarter = [(1.0, -t), (1.0, t), (t, t)]
        return [[point for turn in range(4) for point in (_turned(p, turn) for p in quarter)]]
    if kind == "heart":
        angles = [i * 2 * pi / 48 for i in range(48)]
        return [
            [(sin(a) ** 3, (13 * cos(a) - 5 * cos(2 * a) - 2 * cos(3 * a) - cos(4 * a)) / 16 + 0.15) for a in angles]
        ]
    if kind == "arrow":
        t, neck = rng.uniform(0.18, 0.28), rng.uniform(-0.05, 0.25)
        return [[(1, 0), (neck, 0.75), (neck, t), (-1, t), (-1, -t), (neck, -t), (neck, -0.75)]]
    if kind == "bolt":
        return [[(0.25, 1), (-0.6, -0.1), (-0.05, -0.1), (-0.25, -1), (0.6, 0.15), (0.05, 0.15)]]
    raise ValueError(f"No shape is called {kind!r}.")


def _arc(x: float, y: float, radius: float, start: float, end: float) -> Outline:
    steps = 48
    angles = [start + (end - start) * i / steps for i in range(steps + 1)]
    return [(x + radius * cos(a), y + radius * sin(a)) for a in angles]


def _turned(point: tuple[float, float], quarters: int) -> tuple[float, float]:
    x, y = point
    for _ in range(quarters):
        x, y = -y, x
    return x, y


def _drawn(rings: Sequence[Outline], width: int, height: int) -> tuple[_Patch, int]:
    """Return the part of a shape within the image, and the whole shape's area in pixels."""
    left, top = (int(min(point[axis] for point in rings[0])) - 1 for axis in (0, 1))
    right, bottom = (int(max(point[axis] for point in rings[0])) + 2 for axis in (0, 1))
    scale = _SUPERSAMPLING
    image = Image.new("L", ((right - left) * scale, (bottom - top) * scale))
    draw = ImageDraw.Draw(image)
    for number, ring in enumerate(rings):
        draw.polygon([((x - left) * scale, (y - top) * scale) for x, y in ring], fill=0 if number else 255)
    whole: Mask = np.asarray(image.reduce(scale))
    x1, y1, x2, y2 = max(left, 0), max(top, 0), min(right, width), min(bottom, height)
    inside = whole[y1 - top : y2 - top, x1 - left : x2 - left]
    return _Patch(x1, y1, inside), int(np.count_nonzero(whole >= 128))


def _box(visible: npt.NDArray[np.bool_]) -> tuple[int, int, int, int]:
    rows, columns = np.flatnonzero(visible.any(axis=1)), np.flatnonzero(visible.any(axis=0))
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


def _blend(first: Floats, second: Floats, weight: Floats) -> Floats:
    return _floats(first + (second - first) * weight[:, :, None])


def _texture(rng: np.random.Generator, width: int, height: int) -> Floats:
    """Return a pattern, float32 [height, width] in 0..1."""
    kind = int(rng.integers(6))
    if kind == 0:
        return np.zeros((height, width), dtype=np.float32)
    if kind == 1:
        return _ramp(rng, width, height)
    if kind == 2:
        return _stripes(rng, width, height)
    if kind == 3:
        # Faint, or every field of a chequerboard would rightly be called a square.
        return _floats(np.abs(_stripes(rng, width, height) - _stripes(rng, width, height)) * np.float32(0.3))
    blobs = _noise(rng, width, height, int(rng.integers(3, 9)))
    if kind == 4:
        return blobs
    return _floats((blobs + _noise(rng, width, height, 48)) * np.float32(0.5))


def _ramp(rng: np.random.Generator, width: int, height: int) -> Floats:
    angle = rng.uniform(0, 2 * pi)
    x = (np.arange(width, dtype=np.float32) / width - 0.5) * np.float32(cos(angle))
    y = (np.arange(height, dtype=np.float32) / height - 0.5) * np.float32(sin(angle))
    reach = np.float32(abs(cos(angle)) + abs(sin(angle)))
    return _floats((y[:, None] + x[None, :]) / reach + np.float32(0.5))


def _stripes(rng: np.random.Generator, width: int, height: int) -> Floats:
    bands = np.floor(_ramp(rng, width, height) * np.float32(rng.uniform(4, 30)))
    return _floats(np.mod(bands, np.float32(2)))


def _noise(rng: np.random.Generator, width: int, height: int, cells: int) -> Floats:
    grid = rng.integers(0, 256, (cells, cells), dtype=np.uint8)
    image = Image.fromarray(grid).resize((width, height), Image.Resampling.BICUBIC)
    return _floats(np.asarray(image).astype(np.float32) / np.float32(255))


def _floats(array: npt.NDArray[Any]) -> Floats:
    floats: Floats = array.astype(np.float32, copy=False)
    return floats
