"""Finding the first wrong layer by halving, the measures of differences, and charts."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anychip_tools.charts import Chart, draw
from anychip_tools.validation.difference import difference
from anychip_tools.validation.whole import first_wrong


@given(st.integers(1, 300), st.data())
def test_the_first_wrong_layer_is_found_in_few_questions(count: int, data: st.DataObject) -> None:
    wrong_from = data.draw(st.integers(0, count - 1))
    asked: list[int] = []

    def agrees(number: int) -> bool:
        asked.append(number)
        return number < wrong_from

    assert first_wrong(count, agrees) == wrong_from
    assert len(asked) <= count.bit_length()


@given(st.integers(2, 60), st.data())
def test_layers_of_which_nothing_can_be_told_are_passed_over(count: int, data: st.DataObject) -> None:
    wrong_from = data.draw(st.integers(0, count - 1))
    silent = data.draw(st.sets(st.integers(0, count - 1)))
    found = first_wrong(count, lambda number: None if number in silent else number < wrong_from)
    assert found is not None
    told = [number for number in range(wrong_from, count) if number not in silent]
    assert found == min([*told, count - 1]), "the first that can be told to be wrong, else the last"


def test_without_layers_there_is_no_first() -> None:
    assert first_wrong(0, lambda _: True) is None


def test_differences_are_those_of_the_textbook() -> None:
    found = difference([np.array([3.0, 4.0])], [np.array([3.0, 4.5])], tolerance=0.5)
    assert found.max_abs == pytest.approx(0.5)
    assert found.mean_abs == pytest.approx(0.25)
    assert found.relative == pytest.approx(0.1)
    assert found.within == 0.5
    assert found.cosine == pytest.approx((9 + 18) / (5 * np.hypot(3, 4.5)))


def test_nan_and_another_shape_are_infinitely_far() -> None:
    ones = np.ones(3, dtype=np.float32)
    assert difference([ones], [ones * np.nan], 0.1).relative == np.inf
    assert difference([ones], [ones[:2]], 0.1).max_abs == np.inf
    assert difference([ones * np.inf], [ones * np.inf], 0.1).max_abs == 0


def test_a_chart_has_its_texts_as_they_are(tmp_path: Path) -> None:
    series = {"a < b": [(1.0, 10.0), (2.0, 1000.0), (3.0, float("nan"))], "$x$": [(1.0, 0.0), (3.0, 5.0)]}
    charts = [Chart("t & t", "x", "y", series, log_y=True, marks={"here": 2.0}), Chart("none", "x", "y", {})]
    draw(charts, tmp_path / "drawn.svg")
    texts = {"".join(each.itertext()).strip() for each in ElementTree.parse(tmp_path / "drawn.svg").iter()}
    assert {"t & t", "a < b", "$x$", "here", "none"} <= texts
