"""A service a card: what several services say as one, and which cores a card's service gets."""

from __future__ import annotations

import os

import pytest

from app import cards
from app.access.rules import OF_ALL_CARDS, ROUTES
from app.processes import affinity


def test_metrics_of_cards_keep_families_together_and_say_which_card():
    head = "# HELP a_total what\n# TYPE a_total counter\n"
    one = head + 'a_total{code="OK"} 3.0\na_total{code="X"} 0.0\n# HELP b x\nb 1.0\n'
    other = head + 'a_total{code="OK"} 4.0\n# HELP c y\nc{} 2.0\n'
    assert cards.by_card({"npu:0": one, "npu:1": other}).splitlines() == [
        "# HELP a_total what",
        "# TYPE a_total counter",
        'a_total{card="npu:0",code="OK"} 3.0',
        'a_total{card="npu:0",code="X"} 0.0',
        'a_total{card="npu:1",code="OK"} 4.0',
        "# HELP b x",
        'b{card="npu:0"} 1.0',
        "# HELP c y",
        'c{card="npu:1"} 2.0',
    ]


def test_one_end_of_openmetrics_and_values_with_exemplars_stay():
    text = 'a_bucket{le="1.0"} 2 # {trace_id="x"} 0.5\n# EOF\n'
    assert cards.by_card({"a": text, "b": text}).splitlines() == [
        'a_bucket{card="a",le="1.0"} 2 # {trace_id="x"} 0.5',
        'a_bucket{card="b",le="1.0"} 2 # {trace_id="x"} 0.5',
        "# EOF",
    ]


def test_a_value_without_labels_whose_exemplar_has_braces_gets_its_label():
    assert cards.by_card({"a": 'n_total 2.0 # {trace_id="x"} 1.0\n'}) == 'n_total{card="a"} 2.0 # {trace_id="x"} 1.0\n'


def test_statistics_are_added_and_devices_listed():
    one = {
        "uptime_s": 5.0,
        "ready": True,
        "models": [{"model": "m", "ready": True, "requests": {"OK": 2}, "images": 2}],
        "devices": [{"device": "npu:0", "name": "N", "images": 2, "power_watts": None}],
    }
    other = {
        "uptime_s": 9.0,
        "ready": False,
        "models": [{"model": "m", "ready": True, "requests": {"OK": 1, "QUEUE_FULL": 4}, "images": 1}],
        "devices": [{"device": "npu:1", "name": "N", "images": 1, "power_watts": 3.0}],
    }
    assert cards.merged(one, other, adding=True) == {
        "uptime_s": 9.0,
        "ready": False,
        "models": [{"model": "m", "ready": True, "requests": {"OK": 3, "QUEUE_FULL": 4}, "images": 3}],
        "devices": [one["devices"][0], other["devices"][0]],
    }


def test_descriptions_are_listed_and_numbers_in_them_are_not_added():
    def model(device, ready):
        on = {"device": device, "batch_sizes": [1, 4]}
        return {"models": [{"name": "m", "classes": 10, "input_shape": [8, 8, 3], "ready": ready, "served_on": [on]}]}

    [found] = cards.merged(model("npu:0", True), model("npu:1", False))["models"]
    assert found["classes"] == 10
    assert found["input_shape"] == [8, 8, 3]
    assert found["ready"] is False
    assert [each["device"] for each in found["served_on"]] == ["npu:0", "npu:1"]


def a_machine(root, **devices):
    for address, (cpus, node) in devices.items():
        folder = root / "sys/bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "local_cpulist").write_text(cpus + "\n")
        (folder / "numa_node").write_text(f"{node}\n")
    return root


def test_cores_near_a_card_are_read_as_linux_lists_them(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)) | {9})
    root = a_machine(tmp_path, **{"0000:c1:00.0": ("0-3,8-11", 1), "0000:02:00.0": ("5", -1)})
    assert affinity.near("0000:C1:00.0", root) == (((0, 1, 2, 3), (9,)), 1)
    assert affinity.near("0000:02:00.0", root) == (((5,),), None)
    assert affinity.near("0000:99:00.0", root) == ((), None)


def test_cards_beside_each_other_share_the_cores_and_hyperthreads_stay_together(monkeypatch):
    near = {"a": (((0, 1, 2, 3), (16, 17, 18, 19)), 0), "b": (((0, 1, 2, 3), (16, 17, 18, 19)), 0), "c": (((8,),), 1)}
    monkeypatch.setattr(affinity, "near", near.__getitem__)
    devices = [("npu:0", "a"), ("npu:1", "b"), ("npu:2", "c"), ("npu:3", "")]
    assert cards.placed(devices, pinned=True) == [
        cards.Card("npu:0", (0, 1, 16, 17), 0),
        cards.Card("npu:1", (2, 3, 18, 19), 0),
        cards.Card("npu:2"),  # One core is too few.
        cards.Card("npu:3"),
    ]
    assert cards.placed(devices, pinned=False) == [cards.Card(device) for device, _ in devices]


@pytest.mark.parametrize("path", OF_ALL_CARDS)
def test_what_is_handed_on_is_a_route_whose_caller_is_checked(path):
    assert OF_ALL_CARDS[path] in ROUTES[path]
