"""What our code calls of a device's module through variables must be in what the vendors have published.

Of Cambricon's, Biren's and Moore Threads' packages the public names are known, not the sources of their newer wheels
(tests/support/vendor_api). Read here: every attribute of a variable that holds `torch.get_device_module(…)`.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LISTED = ("torch_mlu", "torch_supa", "torch_musa")


def held(function: ast.AST) -> set[str]:
    """Names in a function that hold a device's module, dotted."""
    names = {"self._module"}
    for node in ast.walk(function):
        if isinstance(node, ast.arg) and node.arg == "module" and isinstance(node.annotation, ast.Name):
            names |= {"module"} if node.annotation.id == "Any" else set()
        if isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = (
                    zip(target.elts, node.value.elts, strict=True)
                    if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                    else [(target, node.value)]
                )
                names |= {ast.unparse(one) for one, value in pairs if is_module(value)}
    return names


def is_module(value: ast.expr) -> bool:
    called = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
    return called in ("torch.get_device_module", "self._module")


def called(text: str) -> Iterator[str]:
    """Attributes of a device's module that a source needs: not those it asks for with hasattr or getattr first."""
    tree = ast.parse(text)
    asked = {
        node.args[1].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("hasattr", "getattr")
        and len(node.args) > 1
        and isinstance(node.args[1], ast.Constant)
    }
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            names = held(function)
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and ast.unparse(node.value) in names and node.attr not in asked:
                    yield node.attr


def needed() -> dict[str, set[str]]:
    files = [
        ROOT / "backends" / "torch_device.py",
        *sorted(path for path in (ROOT / "backends" / "engines").glob("*.py") if path.name != "tensorrt.py"),
    ]
    return {path.name: set(called(path.read_text(encoding="utf-8"))) for path in files}


@pytest.mark.parametrize("package", LISTED)
def test_the_vendor_has_what_is_called(package: str) -> None:
    table = json.loads((ROOT / "tests" / "support" / "vendor_api" / f"{package}.json").read_text(encoding="utf-8"))
    missing = {file: sorted(names - set(table["public"])) for file, names in needed().items()}
    assert {file: names for file, names in missing.items() if names} == {}


def test_the_reader_sees_what_is_held_in_variables() -> None:
    found = needed()
    assert {"set_device", "mem_get_info", "memory_reserved", "empty_cache"} <= found["torch_device.py"]
    assert {"Stream", "current_stream", "stream", "synchronize", "Event"} <= found["streamed.py"]
    text = (
        "def f(self, module: Any, other):\n"
        "    module.wrong(); other.fine()\n"
        "    device, held = self._torch_id(), self._module()\n"
        "    held.also_wrong\n"
        "    if hasattr(held, 'new'): held.new()\n"
    )
    assert set(called(text)) == {"wrong", "also_wrong"}
