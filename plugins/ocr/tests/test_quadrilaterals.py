"""From maps of probabilities to crops, in reading order."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
from anychip_ocr.detection import fitted
from anychip_ocr.quadrilaterals import (
    Thresholds,
    bucket_of,
    crop_of,
    found_in,
    in_image,
    ordered,
    place_line,
    reading_order,
    resized_width,
)


def drawn(*rectangles, shape=(200, 300), level=0.9):
    """Draw a map with rotated rectangles: centre, sides and angle."""
    found = np.zeros(shape, np.float32)
    for rectangle in rectangles:
        cv2.fillPoly(found, [cv2.boxPoints(rectangle).round().astype(np.int32)], level)
    return found


def test_a_box_is_expanded_by_its_area_over_its_perimeter():
    [quad], [score] = found_in(drawn(((150, 100), (100, 20), 0)), Thresholds())
    # A map of pixels 100..200 by 90..110 is 101 by 21, and dilated by one.
    distance = 101 * 21 * 1.6 / (2 * (101 + 21))
    assert quad[0] == pytest.approx((100 - distance, 90 - distance), abs=2)
    assert quad[2] == pytest.approx((200 + distance, 110 + distance), abs=2)
    assert 0.84 < score < 0.9, "the edge that dilation adds counts"


def test_what_is_weak_or_tiny_is_left_out():
    weak = drawn(((150, 100), (100, 20), 0), level=0.4)
    assert not len(found_in(weak, Thresholds())[0])
    assert len(found_in(weak, Thresholds(box=0.35))[0]) == 1
    assert not len(found_in(drawn(((150, 100), (1, 1), 0)), Thresholds())[0])
    several = drawn(*(((40, 20 + 30 * number), (50, 8), 0) for number in range(5)))
    assert len(found_in(several, Thresholds())[0]) == 5
    assert len(found_in(several, Thresholds(most=3))[0]) == 3


@pytest.mark.parametrize("angle", [-30, -7, 0, 7, 30])
def test_corners_are_clockwise_from_the_upper_left(angle):
    points = cv2.boxPoints(((150, 100), (100, 20), angle))
    for shift in range(4):
        found = ordered(np.roll(points, shift, axis=0))
        assert found[0, 0] < found[1, 0]
        assert found[3, 0] < found[2, 0]
        assert found[0, 1] < found[3, 1]
        assert found[1, 1] < found[2, 1]


def test_corners_are_whole_pixels_within_the_image():
    quads = np.array([[(-3, -3), (50, 0), (50, 20), (0, 20)], [(10, 10), (12, 10), (12, 12), (10, 12)]], np.float32)
    points, large = in_image(quads, (0.5, 0.5), 90, 40)
    assert points[0].tolist() == [[0, 0], [89, 0], [89, 39], [0, 39]]
    assert large.tolist() == [True, True]
    assert in_image(quads, (1, 1), 90, 40)[1].tolist() == [True, False]


def test_reading_order_is_by_lines_then_from_the_left():
    corners = [(200, 52), (10, 50), (100, 10), (5, 14), (5, 100)]
    quads = np.array([[(x, y), (x + 20, y), (x + 20, y + 9), (x, y + 9)] for x, y in corners], np.float32)
    assert reading_order(quads).tolist() == [3, 2, 1, 0, 4]
    assert reading_order(quads[:0]).tolist() == []


def test_lines_that_run_downwards_are_turned():
    across = crop_of(np.array([(0, 0), (100, 0), (100, 20), (0, 20)], np.float32))
    down = crop_of(np.array([(0, 0), (20, 0), (20, 100), (0, 100)], np.float32))
    assert (across.width, across.height, across.quarters, across.ratio) == (100, 20, 0, 5)
    assert (down.width, down.height, down.quarters, down.ratio) == (20, 100, 1, 5)


def test_a_line_is_placed_from_the_left_and_filled_up():
    image = np.zeros((24, 50, 3), np.uint8)
    image[..., 0] = 200
    out = np.zeros((48, 320, 3), np.uint8)
    place_line(image, out, 127)
    assert (out[:, :100] == (0, 0, 200)).all(), "channels are exchanged"
    assert (out[:, 100:] == 127).all()
    place_line(np.zeros((10, 2000, 3), np.uint8), out, 127)
    assert not out.any(), "what is too long is squeezed"


def test_widths_and_sizes():
    assert [resized_width(ratio, 48, 1000) for ratio in (0.001, 2, 2.01, 100)] == [1, 96, 97, 1000]
    assert [bucket_of(width, (320, 640)) for width in (1, 320, 321, 9999)] == [320, 320, 640, 640]
    assert fitted(1280, 960, (960, 1280)) == (1280, 960)
    assert fitted(800, 500, (960, 1280)) == (1184, 736), "the short side has at least 736 pixels"
    assert fitted(4000, 3000, (2016, 2016)) == (1984, 1504), "over 2,000 pixels it is made smaller"
    assert fitted(4000, 3000, (960, 1280)) == (1280, 960)
    assert fitted(10, 4000, (960, 1280)) == (32, 960)
