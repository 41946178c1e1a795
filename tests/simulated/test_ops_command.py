"""`anychip ops`: operators on simulated devices, exported files, other people's networks, and predictions."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm

ROOT = Path(__file__).parents[2]
CACHE = Path.home() / ".cache" / "anychip"
NETWORK = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)

    def forward(self, x):
        x = nn.functional.mish(nn.functional.silu(self.first(x)))
        return torch.cumsum(self.second(x), 1)
"""
on_a_device = pytest.mark.skipif(shutil.which("g++") is None, reason="simulated devices are compiled with g++")


def ops(folder: Path, *arguments: str) -> tuple[int, Any]:
    return anychip(folder, "ops", *arguments, "--runs", "1")


def anychip(folder: Path, *arguments: str) -> tuple[int, Any]:
    done = warm.completed(folder, "-m", "app", *arguments, "--json")
    assert done.stdout, done.stderr[-3000:]
    return done.returncode, json.loads(done.stdout)


def rows(found: Any) -> dict[str, Any]:
    return {row["operator"]: row for row in found["operators"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a network of somebody else's, and the same as an ONNX file."""
    made = tmp_path_factory.mktemp("network")
    (made / "theirs.py").write_text(NETWORK)
    code = (
        "import torch, theirs; net = theirs.Net().eval();"
        "torch.onnx.export(net, (torch.zeros(1, 3, 16, 16),), 'net.onnx', dynamo=False, opset_version=18)"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=made, check=True, capture_output=True, timeout=280)
    return made


@on_a_device
def test_operators_that_a_device_lacks_are_named_with_share_and_remedy(folder: Path) -> None:
    lacking = "npu:1,lacks=aten::mish,lacks=aten::silu,lacks=aten::cumsum"
    code, found = ops(folder, "theirs:Net", "--input", "1x3x16x16", "--device", "npu", "--simulate", lacking)
    assert code == 1
    assert found["simulated"]
    assert not found["prediction"]
    by_name = rows(found)
    mish, silu = by_name["aten::mish"], by_name["aten::silu"]
    assert (mish["how"], mish["problem"], mish["calls"]) == ("cpu", True, 1)
    assert 0 < mish["share"] < 1
    assert [each["step"] for each in mish["remedies"]] == ["switch", "rewrite", "custom"]
    assert "tanh" in mish["remedies"][1]["text"]
    assert (silu["how"], silu["problem"]) == ("replaced", False)
    assert (by_name["aten::convolution"]["how"], by_name["aten::convolution"]["calls"]) == ("native", 2)
    assert sum(row["share"] for row in found["operators"]) == pytest.approx(1)
    kinds = len(found["operators"])
    assert found["support_by_kind"] == pytest.approx((kinds - 2) / kinds)
    assert found["support_by_calls"] == pytest.approx((found["calls"] - 2) / found["calls"])


@on_a_device
def test_an_onnx_file_on_a_device_that_lacks_one_of_its_operators(folder: Path) -> None:
    lacking = "npu:1,lacks=aten::tanh"
    code, found = ops(folder, "net.onnx", "--device", "npu", "--simulate", lacking)
    assert code == 1
    assert [name for name, row in rows(found).items() if row["problem"]] == ["aten::tanh"]


def test_a_prediction_says_that_it_is_one_and_where_it_is_from(folder: Path) -> None:
    code, found = ops(folder, "theirs:Net", "--input", "1x3x16x16", "--against", "mlu")
    assert found["prediction"]
    assert "torch_mlu" in found["source"]
    by_name = rows(found)
    assert by_name["aten::convolution"]["how"] == "composite", "made of the device's own convolution"
    assert by_name["aten::silu"]["how"] == "native"
    missing = [name for name, row in by_name.items() if row["how"] == "missing"]
    assert code == (1 if missing else 0)
    assert all(by_name[name]["remedies"] for name in missing)
