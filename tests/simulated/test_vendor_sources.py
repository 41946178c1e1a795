"""What we call of vendors' packages must exist in their sources, with parameters that fit. None of them is imported.

For packages on the registry tests/support/vendor_sources.py has the newest wheel. For the others there are only lists
of public names, with which tests/unit/test_vendor_calls.py compares our code.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.vendor_sources import CALLS, TABLES, Sources, misfit, sources, unlisted, wheel

ROOT = Path(__file__).parents[2]
ON_REGISTRY = [
    pytest.param(name, call, id=f"{name}.{call['name']}") for name, call in CALLS if "package" in TABLES[name]
]


@pytest.mark.parametrize(("name", "call"), ON_REGISTRY)
def test_what_we_call_is_in_the_wheel(name: str, call: dict[str, Any]) -> None:
    found = sources(name).find(TABLES[name]["module"], call["name"])
    assert found is not None, f"{TABLES[name]['module']}.{call['name']} is not in {wheel(TABLES[name]['package'])}"
    if "." not in call["name"] or isinstance(found, ast.FunctionDef):
        assert misfit(found, call["positional"], call["keywords"]) == ""


def test_what_is_not_in_the_wheel_is_not_found() -> None:
    npu = sources("torch_npu")
    for missing in ("OutOfMemoryError", "config.allow_everything", "npu_compat_mode", "contrib.transfer_to_npu"):
        assert npu.find("torch_npu.npu", missing) is None
    compile_mode = npu.find("torch_npu.npu", "set_compile_mode")
    assert compile_mode is not None
    assert misfit(compile_mode, 0, ["jit"]) == "has no parameter jit"


def test_torchair_has_the_options_that_are_set() -> None:
    """Attributes, which the table of calls cannot hold."""
    config = sources("torchair").tree("torchair.configs.compiler_config")
    experimental = sources("torchair").tree("torchair.configs.experimental_config")
    assert config is not None
    assert experimental is not None
    text = ast.unparse(config)
    assert "self.mode = OptionValue('max-autotune', ['max-autotune'," in text
    assert "self.experimental_config = _ExperimentalConfig()" in text
    assert "self.frozen_parameter = OptionValue(False, [True, False])" in ast.unparse(experimental)


def test_torchair_is_importable_once_torch_npu_is() -> None:
    registered = sources("torch_npu").tree("torch_npu.utils._dynamo")
    assert registered is not None
    assert "_install_lazy_torchair()" in ast.unparse(registered)


def test_tensorrt_names_what_it_has_taken() -> None:
    """By this name the engine sees whether any of a network went to TensorRT."""
    found = [text for path, text in sources("torch_tensorrt").texts() if "/dynamo/partitioning/" in path]
    assert any("_run_on_acc" in text for text in found)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "backends").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT))
)
def test_backends_use_only_listed_names(path: Path) -> None:
    assert unlisted(ast.parse(path.read_text(encoding="utf-8"))) == []


def test_reading_sources_imports_nothing_of_a_vendor() -> None:
    """The trap is set in a child: vendors' modules there raise when anything imports them."""
    code = (
        "import sys\n"
        "class Trap:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in {sorted(TABLES)!r}: raise SystemExit('imported ' + name)\n"
        "sys.meta_path.insert(0, Trap())\n"
        "from tests.support import vendor_sources as t\n"
        "s = t.Sources({'torch_npu/npu/__init__.py': 'raise SystemExit(1)\\ndef f(): pass\\n'})\n"
        "assert s.find('torch_npu.npu', 'f') is not None\n"
        "try:\n"
        "    import torch_npu\n"
        "except SystemExit: print('trapped')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "trapped"), done.stderr


def test_the_checker_sees_unlisted_names() -> None:
    text = (
        "torch.npu.empty_cache()\ntorch.npu.conv.allow_hf32 = False\nimport torch_npu\nfrom torch_npu import npu\n"
        "torch.npu.bogus()\ntorch_npu.npu_format_cast(x, 2)\nfrom torch_npu.contrib import transfer_to_npu\n"
        "torch.get_device_module('mlu').empty_cash()\ntorch.get_device_module(d).host_empty_cache()\n"
        "torch.get_device_module(d).synchronize(d)\ntorch.cuda.anything()\ntorch.npu.empty_cache_not()\n"
    )
    assert sorted(unlisted(ast.parse(text))) == [
        "torch.*.host_empty_cache",
        "torch.mlu.empty_cash",
        "torch.npu.bogus",
        "torch.npu.empty_cache_not",
        "torch_npu.contrib.transfer_to_npu",
        "torch_npu.npu_format_cast",
    ]


def test_the_checker_follows_imports_and_sees_misfits() -> None:
    found = Sources(
        {
            "p/__init__.py": "from .a import f as g\nfrom p import b\nfrom .b import *\nfrom . import b as c\n"
            "k = c.K()\n",
            "p/a.py": "def f(x, y=1, *, z): pass\n",
            "p/b.py": "class K:\n    def __setattr__(s, n, v):\n        if n == 'flag': pass\ndef h(**kwargs): pass\n",
        }
    )
    f, h = found.find("p", "g"), found.find("p", "h")
    assert isinstance(f, ast.FunctionDef)
    assert h is not None
    assert found.find("p", "b.h") is not None
    assert found.find("p", "k.flag") is not None
    assert found.find("p", "k.other") is None
    assert found.find("p", "missing") is None
    assert misfit(f, 1, ["z"]) == ""
    assert misfit(f, 3, ["z"]) == "takes 2 positional arguments, we give 3"
    assert misfit(f, 0, ["z"]) == "needs x"
    assert misfit(f, 1, ["z", "w"]) == "has no parameter w"
    assert misfit(h, 0, ["w"]) == "has no parameter w"
