"""Write a table of operators: from PyTorch's dispatcher, from a vendor's list of functions, or from converters.

    python -m benchmarks.operator_tables npu --package torch_npu --key PrivateUse1 --source "torch_npu 2.13.0"
    python -m benchmarks.operator_tables mlu --functions mlu_functions.yaml --source "torch_mlu r2.4_develop"
    python -m benchmarks.operator_tables tensorrt --converters aten_ops_converters.py --source "…"

The first must run in a Python that has the vendor's package; a stub may stand in for its driver
(tests/support/stub_drivers.py). The others read sources as text and import nothing of them.

Owns: finding the names. Only the names of PyTorch's own operators and torchvision's are taken, and none of gradients
(`…_backward`), which inference never calls.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import re
import shlex
import sys
import textwrap
from collections.abc import Iterable
from datetime import date
from pathlib import Path

import anychip_tools.operator_tables
from anychip_tools.operator_tables import AS_WRITTEN

_FOLDER = Path(anychip_tools.operator_tables.__file__).parent
_WIDTH = 150
_KEPT = ("aten::", "torchvision::")
_FUNCTION = re.compile(r"^\s*-\s*func:\s*([\w.]+)", re.MULTILINE)
_CONVERTER = re.compile(r"torch\.ops\.(aten|torchvision)\.(\w+)(?:\.(\w+))?")


def main(arguments: list[str] | None = None) -> None:
    """Write one table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name")
    parser.add_argument("--package", help="a package to import first")
    parser.add_argument("--key", help="the dispatch key whose kernels are listed")
    parser.add_argument("--functions", type=Path, help="a YAML file with `- func:` lines")
    parser.add_argument("--converters", type=Path, help="Python sources, a file or a folder")
    parser.add_argument("--folder", type=Path, default=_FOLDER, help="operator_tables in a plug-in's package")
    parser.add_argument("--source", required=True, help="package and version; today's date is added")
    given = parser.parse_args(arguments)
    if given.functions:
        kind, names = "kernels", of_functions(given.functions.read_text(encoding="utf-8"))
    elif given.converters:
        kind, names = "converters", of_converters(given.converters)
    else:
        kind, names = "kernels", of_dispatcher(given.package, given.key)
    kept = kept_names(names)
    made = shlex.join(["python", "-m", "benchmarks.operator_tables", *(arguments or sys.argv[1:])])
    head = f"# source: {given.source}, {date.today()}\n# kind: {kind}\n# made: {made}\n"
    given.folder.mkdir(exist_ok=True)
    (given.folder / f"{given.name}.txt").write_text(head + packed(kept), encoding="utf-8")
    print(f"{given.name}: {len(kept)} operators")


def kept_names(names: Iterable[str]) -> list[str]:
    """Return the names that a table lists, in its order."""
    return sorted({name for name in names if name.startswith(_KEPT) and "_backward" not in name})


def packed(names: Iterable[str]) -> str:
    """Return the lines of a table, as anychip_tools.operator_tables reads them: each operator once, with its forms."""
    forms: dict[str, list[str]] = {}
    for name in names:
        base, _, form = name.removeprefix(AS_WRITTEN).partition(".")
        forms.setdefault(base, []).append(form)
    words = (base if each == [""] else f"{base}.{'|'.join(each)}" for base, each in forms.items())
    return textwrap.fill(" ".join(words), _WIDTH, break_long_words=False, break_on_hyphens=False) + "\n"


def of_dispatcher(package: str | None, key: str) -> Iterable[str]:
    """Return the operators with a kernel for a dispatch key."""
    import torch

    with contextlib.suppress(Exception):  # Its import registers its operators; beside some builds it fails.
        importlib.import_module("torchvision")
    if package:
        importlib.import_module(package)
    names: Iterable[str] = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return names


def of_converters(sources: Path) -> Iterable[str]:
    """Yield the operators of the decorators `…converter(torch.ops.…)`; leave out functions that only raise."""
    for path in sorted(sources.rglob("*.py")) if sources.is_dir() else [sources]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef) or _only_raises(node):
                continue
            for decorator in map(ast.unparse, node.decorator_list):
                for namespace, base, overload in _CONVERTER.findall(decorator if "converter" in decorator else ""):
                    yield f"{namespace}::{base}" + (f".{overload}" if overload not in ("", "default") else "")


def of_functions(text: str) -> Iterable[str]:
    """Return the functions of a vendor's YAML; if it has sections, those of `aten`."""
    sections = re.split(r"^(\w+):\s*$", text, flags=re.MULTILINE)
    chosen = dict(zip(sections[1::2], sections[2::2], strict=True)).get("aten", text)
    return [f"aten::{name}" for name in _FUNCTION.findall(chosen)]


def _only_raises(function: ast.FunctionDef) -> bool:
    body = [each for each in function.body if not isinstance(each, ast.Expr)]
    return bool(body) and isinstance(body[0], ast.Raise)


if __name__ == "__main__":
    main()
