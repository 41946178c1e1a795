"""What we call of vendors' packages must exist in their sources, with parameters that fit. Two are imported, the last.

For packages on the registry tests/support/vendor_sources.py has the newest wheel. For the others there are only lists
of public names, with which tests/unit/test_vendor_calls.py compares our code.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.vendor_sources import CALLS, TABLES, misfit, sources, unpacked, wheel

ROOT = Path(__file__).parents[2]
ON_REGISTRY = [
    pytest.param(name, call, id=f"{name}.{call['name']}") for name, call in CALLS if "package" in TABLES[name]
]


OLDER = [
    pytest.param(name, version, id=f"{name} of {version}")
    for name, table in TABLES.items()
    for version in table.get("older", ())
]


def lacks(name: str, call: dict[str, Any], version: str = "") -> str:
    """Return why a call does not fit a version's wheel; "" if it does."""
    found = sources(name, version).find(TABLES[name]["module"], call["name"])
    if found is None:
        return f"{call['name']} is not in {wheel(TABLES[name]['package'], version)}"
    if "." in call["name"] and not isinstance(found, ast.FunctionDef):
        return ""
    return misfit(found, call["positional"], call["keywords"])


@pytest.mark.parametrize(("name", "call"), ON_REGISTRY)
def test_what_we_call_is_in_the_wheel(name: str, call: dict[str, Any]) -> None:
    assert lacks(name, call) == ""


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "version"), OLDER)
def test_what_we_call_is_in_the_wheels_that_installations_have(name: str, version: str) -> None:
    """Nothing of them runs: no CPU build of their torch is on the registry for x86-64."""
    assert list(filter(None, (lacks(name, call, version) for call in TABLES[name]["calls"]))) == []
    assert lacks(name, {"name": "no_such_name", "positional": 0, "keywords": []}, version)


def test_what_is_not_in_the_wheel_is_not_found() -> None:
    npu = sources("torch_npu")
    for missing in ("OutOfMemoryError", "config.allow_everything", "npu_compat_mode", "contrib.transfer_to_npu"):
        assert npu.find("torch_npu.npu", missing) is None
    compile_mode = npu.find("torch_npu.npu", "set_compile_mode")
    assert compile_mode is not None
    assert misfit(compile_mode, 0, ["jit"]) == "has no parameter jit"


@pytest.mark.parametrize(
    "version", ["", *(pytest.param(each, marks=pytest.mark.nightly) for each in TABLES["torchair"]["older"])]
)
def test_torchair_has_the_options_that_are_set(version: str) -> None:
    """Attributes, which the table of calls cannot hold."""
    config = sources("torchair", version).tree("torchair.configs.compiler_config")
    experimental = sources("torchair", version).tree("torchair.configs.experimental_config")
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


def test_a_devices_module_is_asked_for_and_never_named() -> None:
    """What is asked for (`torch.get_device_module`) tests/support/vendor_calls.py follows."""
    named = re.compile(r"torch[._](npu|mlu|supa|musa)\.\w+")
    for path in sorted((ROOT / "backends").rglob("*.py")):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        found = [ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)]
        assert not [each for each in found if named.match(each)], path


# --- NVIDIA's wheels that no card has shown yet, as far as they run without one

DECODES = """
import sys
import torch
from app.images.decoding import decode
from app.images.header import read_header
from backends import BackendError
from benchmarks.gpu.nvimgcodec import NvimgcodecDecoder
from models.sample import IMAGES

files = [path.read_bytes() for path in sorted(IMAGES.glob("*.jpg"))[:4]]
tensors = [torch.frombuffer(bytearray(file), dtype=torch.uint8) for file in files]
decoder = NvimgcodecDecoder("cpu")
for file, image in zip(files, decoder.decode(tensors), strict=True):
    assert torch.equal(image, decode(file, read_header(file)).permute(2, 0, 1)), "libjpeg's pixels, chroma interpolated"
try:
    decoder.decode([tensors[0], tensors[1][:3000]])
except BackendError as error:
    assert "cannot decode 1 files" in str(error), error
    print("all as it should be")
"""


def said(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_cudnns_python_takes_our_graph_of_a_convolution(tmp_path: Path) -> None:
    environment = unpacked("nvidia-cudnn-frontend", tmp_path)
    test = "tests/unit/test_cudnn.py"
    assert "2 passed" in said(["-m", "pytest", "-q", "-p", "no:cacheprovider", test, "-k", "wheels"], environment)


def test_nvimagecodec_decodes_by_our_calls_on_the_cpu(tmp_path: Path) -> None:
    assert "all as it should be" in said(["-c", DECODES], unpacked("nvidia-nvimgcodec-cu13", tmp_path))
