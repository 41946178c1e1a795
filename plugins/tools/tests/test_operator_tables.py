"""The vendors' lists of operators, and the remedies: what is in them, and that each can be read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from anychip_tools.operator_tables import _FOLDER as FOLDER
from anychip_tools.operator_tables import _unpacked, table, tables
from anychip_tools.record import names_of
from anychip_tools.remedies import STEPS, of_operator
from benchmarks.operator_tables import kept_names, of_converters, of_functions, packed


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


def test_what_this_pytorch_is_built_for_it_tells_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "cuda" not in tables()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "cuda" in tables()
    assert "rocm" not in tables()


def test_a_table_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(KeyError, match="npu"):
        table("abacus")


def test_a_compiler_converts_every_form_of_an_operator_it_knows() -> None:
    assert table("tensorrt").has("aten::silu.out") == table("tensorrt").has("aten::silu")
    assert not table("mlu").has("aten::add.no_such_form")


def test_a_compiler_is_asked_for_what_tracing_gives_it() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)).eval()
    traced = names_of(network, [torch.zeros(1, 3, 8, 8)], as_traced=True)
    assert [each.name for each in traced if not table("torchair").has(each.name)] == []
    assert "aten::relu" in {each.name for each in traced}
    plain = {each.name for each in names_of(network, [torch.zeros(1, 3, 8, 8)])}
    assert {"aten::relu_", "aten::native_batch_norm"} <= plain, "a device has these"
    assert table("torchair").has("aten::relu_")
    assert not table("mlu").has("aten::no_such_")


def test_names_are_taken_out_of_functions_and_converters(tmp_path: Path) -> None:
    text = "aten:\n  - func: add.Tensor\n    structured: True\n  - func: relu_\nvision:\n  - func: nms\n"
    assert list(of_functions(text)) == ["aten::add.Tensor", "aten::relu_"]
    assert kept_names(["torchvision::nms", "aten::relu", "aten::gelu_backward.grad_input", "mkldnn::_conv"]) == [
        "aten::relu",
        "torchvision::nms",
    ]
    source = tmp_path / "converters.py"
    source.write_text(
        "@register_converter(torch.ops.aten.silu.default)\ndef one(x):\n    '''Doc.'''\n    return x\n\n"
        "@register_converter(torch.ops.aten.silu.out)\ndef two(x):\n    '''Doc.'''\n    raise NotImplementedError\n"
        "@other(torch.ops.aten.relu.default)\ndef three(x):\n    return x\n"
    )
    assert list(of_converters(source)) == ["aten::silu"]


@pytest.mark.parametrize("how", ["cpu", "failed", "refused", "missing", "vendor-cpu"])
@pytest.mark.parametrize("device_type", ["npu", "cuda"])
def test_remedies_come_in_one_order_and_end_with_an_operator_of_your_own(how: str, device_type: str) -> None:
    steps = [each.step for each in of_operator("aten::silu", device_type, how, replaced_by_us=True)]
    assert steps[-1] == "custom"
    order = list(STEPS)
    ours = [step for step in steps if how != "refused" or step != "switch"]
    assert ours == sorted(ours, key=order.index)
