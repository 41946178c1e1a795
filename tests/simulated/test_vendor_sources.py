"""What we call of vendors' packages must exist in their sources, with parameters that fit.

For packages on the registry tests/support/vendor_sources.py has the newest wheel. For the others there are only lists
of public names, with which tests/unit/test_vendor_calls.py compares our code.
"""

from __future__ import annotations

import ast
from typing import Any

import pytest

from tests.support.vendor_sources import CALLS, TABLES, misfit, sources, wheel

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
    calls = (call for call in TABLES[name]["calls"] if version not in call.get("not_in", ()))
    assert list(filter(None, (lacks(name, call, version) for call in calls))) == []
    assert lacks(name, {"name": "no_such_name", "positional": 0, "keywords": []}, version)


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


NEVER_BY_DEFAULT = (
    *("USE_FP32_ACC", "SPARSE_WEIGHTS", "ENABLE_AUTOCAST", "TRUNCATE_DOUBLE", "DRYRUN", "VERSION_COMPATIBLE"),
    *("HARDWARE_COMPATIBLE", "STRIP_ENGINE_WEIGHTS", "REFIT_IDENTICAL_ENGINE_WEIGHTS", "OFFLOAD_MODULE_TO_CPU"),
)
"""What changes answers, engines or what their cache may give, and is not in our calls."""


@pytest.mark.parametrize(
    "version", ["", *(pytest.param(each, marks=pytest.mark.nightly) for each in TABLES["torch_tensorrt"]["older"])]
)
def test_tensorrt_computes_in_the_types_of_the_network(version: str) -> None:
    found = sources("torch_tensorrt", version)
    tree, compile_ = found.tree("torch_tensorrt.dynamo._defaults"), found.find("torch_tensorrt", "dynamo.compile")
    assert tree is not None
    assert isinstance(compile_, ast.FunctionDef)
    given = (node for node in tree.body if isinstance(node, ast.Assign))
    defaults = {ast.unparse(node.targets[0]): ast.unparse(node.value) for node in given}
    assert {name: defaults.get(name, "False") for name in NEVER_BY_DEFAULT} == dict.fromkeys(NEVER_BY_DEFAULT, "False")
    # `tensorrt._typing` sets this option. Where there is none, the network's types are all that there is.
    takes_it = "use_explicit_typing" in {each.arg for each in compile_.args.kwonlyargs}
    assert takes_it == ("USE_EXPLICIT_TYPING" in defaults) == ("ENABLED_PRECISIONS" in defaults)


def test_tensorrt_names_what_it_has_taken() -> None:
    """By this name the engine sees whether any of a network went to TensorRT."""
    found = [text for path, text in sources("torch_tensorrt").texts() if "/dynamo/partitioning/" in path]
    assert any("_run_on_acc" in text for text in found)
