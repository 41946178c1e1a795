"""Operators that a simulated device lacks: replaced, run on the CPU, named by `anychip ops`."""

from __future__ import annotations

import importlib.util
import json
import shutil
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from app.config import Settings
from tests.support import warm

ROOT = Path(__file__).parents[2]


_BEGIN = """
import sys, warnings
warnings.simplefilter("error")
from pathlib import Path
from backends.simulated import configure
configure("npu:1", "", Path(sys.argv[1]))
from anychip_tools.simulated.device import count, deny, install
from tests.support.rows import row
install("npu")
import json, torch
import numpy as np
from torch import nn
from backends.engines import EagerEngine, compile_first
from backends.operators import Operators, fallback_counts

class Net(nn.Module):
    input_shape = (16, 16, 3)

    def __init__(self, *layers):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), *layers)

    def cast(self, dtype):
        return self

    def forward(self, pixels):
        return (self.layers(pixels.permute(0, 3, 1, 2).float() / 255),)

class Of(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.forward = function

pixels = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3), dtype=np.uint8)

def load(net):
    operators = Operators("npu")
    engine = EagerEngine(row("fp32", channels_last=False))
    return compile_first([engine], net, "npu:0", ("fp32",), (1, 2), completed=operators.completed).executable, operators

def compared(*layers):
    net = Net(*layers)
    with torch.inference_mode():
        [expected] = net(torch.from_numpy(pixels))
    executable, operators = load(net)
    before = sum(fallback_counts().values())
    [answer] = executable.run(pixels)
    runs = sum(fallback_counts().values()) - before
    difference = float(np.abs(answer - expected.numpy()).max())
    return {"difference": difference, "found": operators.found(), "runs": runs}
"""


on_a_device = pytest.mark.skipif(
    importlib.util.find_spec("anychip_tools.simulated") is None or shutil.which("g++") is None,
    reason="no simulated device, or no compiler for it",
)


@pytest.fixture(scope="module")
def built():
    return Settings().cache_dir.expanduser()  # Compiled once for all tests.


def said_by(script, built, *args):
    """Return the last line that a new process prints, from JSON; PyTorch has one slot for such a device."""
    program = _BEGIN + textwrap.dedent(script)
    done = warm.completed(ROOT, "-c", program, str(built), *map(str, args))
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@on_a_device
def test_a_missing_operator_runs_on_the_cpu_and_is_counted(built):
    script = """
        for name in ("aten::sin", "aten::max", "aten::cat", "aten::sort", "aten::max_pool2d_with_indices"):
            deny(name)
        results = [
            compared(Of(torch.sin)),
            compared(Of(lambda x: x.sin_())),
            compared(Of(lambda x: torch.cat([x, x * 2], 1))),
            compared(Of(lambda x: x.sort(dim=2)[0]), Of(torch.sin)),
            compared(nn.MaxPool2d(2)),
            compared(nn.ReLU()),
        ]
        deny("aten::cos")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchScript is not what PyTorch recommends.
            traced = torch.jit.trace(torch.cos, torch.ones(1))
        results.append(compared(Of(traced)))
        deny("aten::convolution")
        results.append(compared(nn.ReLU()))
        print(json.dumps([results, fallback_counts()]))
    """
    results, counts = said_by(script, built)
    assert [each["difference"] for each in results] == [0] * 8
    assert [each["runs"] for each in results] == [1, 1, 1, 2, 1, 0, 1, 1]
    assert [set(each["found"].values()) for each in results] == [*[{"cpu"}] * 5, set(), {"cpu"}, {"cpu"}]
    assert counts.keys() == {name for each in results for name in each["found"]}
    assert all(count >= 3 for count in counts.values())  # Both warm-ups, and the batch.


@on_a_device
def test_a_fallback_keeps_what_its_callers_rely_on(built):
    script = """
        operators = Operators("npu")
        for name in ("aten::sin", "aten::addcmul", "aten::max", "aten::linspace", "aten::nonzero", "aten::stack"):
            deny(name)
        x, said = torch.randn(3, 4).to("npu"), {}
        def check(what, function):
            said[what] = bool(operators.completed(function))
        def in_place():
            y, z = x.clone(), None
            z = y.sin_()
            return z is y and torch.equal(y.cpu(), x.cpu().sin())
        def half_of_it():
            y = x.clone()
            y[:, 1:3].sin_()
            wanted = x.cpu()
            wanted[:, 1:3].sin_()
            return torch.equal(y.cpu(), wanted)
        def out():
            y = torch.empty(0, device="npu")
            return torch.sin(x, out=y) is y and torch.equal(y.cpu(), x.cpu().sin())
        def outs():
            values, places = torch.empty(3, device="npu"), torch.empty(3, dtype=torch.long, device="npu")
            torch.max(x, 1, out=(values, places))
            return torch.equal(values.cpu(), x.cpu().max(1)[0]) and torch.equal(places.cpu(), x.cpu().max(1)[1])
        check("in place", in_place)
        check("through a view", half_of_it)
        check("out", out)
        # The kernel itself: PyTorch may put its own argument in the place of what a kernel returns.
        from backends.operators import _on_cpu
        def itself():
            y, sin_ = x.clone(), _on_cpu("test::sin_", torch.ops.aten.sin_.default)
            return sin_(y) is y and torch.equal(y.cpu(), x.cpu().sin())
        check("the kernel", itself)
        check("two outs", outs)
        h = x.cpu()
        check("scalars", lambda: torch.equal(x.addcmul(x, x, value=2).cpu(), h.addcmul(h, h, value=2)))
        check("a device", lambda: torch.linspace(0, 1, 5, device="npu:0").device == x.device)
        check("a size that depends", lambda: torch.equal((x > 0).nonzero().cpu(), (x.cpu() > 0).nonzero()))
        check("a list", lambda: torch.stack([x, x]).device == x.device)
        print(json.dumps([said, operators.found()]))
    """
    said, found = said_by(script, built)
    assert said == dict.fromkeys(said, True)
    assert len(said) == 9
    assert {"aten::sin", "aten::max", "aten::linspace", "aten::nonzero"} <= {name.partition(".")[0] for name in found}


# --- `anychip ops`: on simulated devices, other people's networks, and predictions


class Theirs(nn.Module):
    """A network of somebody else's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.mish(nn.functional.silu(self.first(x)))
        return torch.cumsum(self.second(x), 1)


def ops(folder: Path, *arguments: str) -> tuple[int, Any]:
    given = (*arguments, "--trust-exported", "true", "--runs", "1", "--json")
    done = warm.completed(folder, "-m", "app", "ops", *given)
    assert done.stdout, done.stderr[-3000:]
    return done.returncode, json.loads(done.stdout)


def rows(found: Any) -> dict[str, Any]:
    return {row["operator"]: row for row in found["operators"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("network")
    torch.export.save(torch.export.export(Theirs().eval(), (torch.zeros(1, 3, 16, 16),)), made / "theirs.pt2")
    return made


@on_a_device
def test_operators_that_a_device_lacks_are_named_with_share_and_remedy(folder: Path) -> None:
    lacking = "npu:1,lacks=aten::mish,lacks=aten::silu,lacks=aten::cumsum"
    code, found = ops(folder, "theirs.pt2", "--device", "npu", "--simulate", lacking)
    assert code == 1
    assert found["simulated"]
    assert not found["prediction"]
    by_name = rows(found)
    mish, silu = by_name["aten::mish"], by_name["aten::silu"]
    assert (mish["how"], mish["problem"], mish["calls"]) == ("cpu", True, 1)
    assert 0 < mish["share"] < 1
    assert [each["step"] for each in mish["remedies"]] == ["switch", "rewrite", "custom"]
    assert "tanh" in mish["remedies"][1]["text"]
    assert (silu["how"], silu["problem"]) == ("cpu", True)
    assert (by_name["aten::convolution"]["how"], by_name["aten::convolution"]["calls"]) == ("native", 2)
    assert sum(row["share"] for row in found["operators"]) == pytest.approx(1)
    kinds = len(found["operators"])
    assert found["support_by_kind"] == pytest.approx((kinds - 3) / kinds)
    assert found["support_by_calls"] == pytest.approx((found["calls"] - 3) / found["calls"])


def test_a_prediction_says_that_it_is_one_and_where_it_is_from(folder: Path) -> None:
    code, found = ops(folder, "theirs.pt2", "--against", "mlu")
    assert found["prediction"]
    assert "torch_mlu" in found["source"]
    by_name = rows(found)
    assert by_name["aten::convolution"]["how"] == "composite", "made of the device's own convolution"
    assert by_name["aten::silu"]["how"] == "native"
    missing = [name for name, row in by_name.items() if row["how"] == "missing"]
    assert code == (1 if missing else 0)
    assert all(by_name[name]["remedies"] for name in missing)
