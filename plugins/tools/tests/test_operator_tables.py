"""The vendors' lists of operators: what is in them, and that each can be read."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from anychip_tools.operator_tables import _FOLDER as FOLDER
from anychip_tools.operator_tables import _unpacked, table, tables
from anychip_tools.record import names_of
from benchmarks.operator_tables import kept_names, packed


@pytest.mark.parametrize("name", tables())
def test_a_table_names_its_source_and_the_operators_of_every_network(name: str) -> None:
    found = table(name)
    of_torch = found.source == f"torch {torch.__version__}, its kernels in the dispatcher"
    assert of_torch or re.search(r"\d\.\d|[0-9a-f]{7}.*\b20\d\d-\d\d-\d\d\b", found.source), "version and date"
    assert all(found.has(each) for each in ("aten::add.Tensor", "aten::relu", "aten::cat"))
    assert not found.has("aten::no_such_operator")
    if not of_torch:
        text = (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
        lines = text.splitlines(keepends=True)
        assert lines[2].startswith(f"# made: python -m benchmarks.operator_tables {name} --"), "the command is told"
        assert "".join(lines[3:]) == packed(kept_names(found.names)), "as the script writes it"


def test_a_table_is_packed_without_loss() -> None:
    names = ["aten::add", "aten::add.Tensor", "aten::add.out", "aten::cat.names", "aten::relu", "torchvision::nms"]
    assert packed(names) == "add.|Tensor|out cat.names relu torchvision::nms\n"
    assert list(_unpacked(packed(names))) == names


def test_a_compiler_is_asked_for_what_tracing_gives_it() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)).eval()
    traced = names_of(network, [torch.zeros(1, 3, 8, 8)], as_traced=True)
    assert [each.name for each in traced if not table("torchair").has(each.name)] == []
    assert "aten::relu" in {each.name for each in traced}
    plain = {each.name for each in names_of(network, [torch.zeros(1, 3, 8, 8)])}
    assert {"aten::relu_", "aten::native_batch_norm"} <= plain, "a device has these"
    assert table("torchair").has("aten::relu_")
    assert not table("mlu").has("aten::no_such_")
