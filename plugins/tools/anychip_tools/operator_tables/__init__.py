"""Tables of the operators that each vendor's software lists: of this PyTorch's own devices by its dispatcher, of others
in files beside this one and in plug-ins' folders of this name. Their heads name source, version, date and command.

Must not be taken for a measurement: a name says that a kernel is registered, not that it takes every type and shape.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from anychip_base.extras import entry_points

_FOLDER = Path(__file__).parent
AS_WRITTEN = "aten::"
"""Namespace of the operators in the files, which leave it out."""
_BUILT = {"cuda": ("cuda", "CUDA"), "rocm": ("hip", "CUDA"), "xpu": ("xpu", "XPU")}
"""Member of torch.version that a build for the device has, and its dispatch key."""


@dataclass(frozen=True)
class OperatorTable:
    """Table of operators. `names`: with their overload, as PyTorch's dispatcher has them (`aten::add.Tensor`).

    `kind`: `kernels` of a device, or `converters` of a compiler, which fuses and leaves the rest to the device.
    `source`: where the names come from, with version and date.
    """

    name: str
    kind: str
    source: str
    names: frozenset[str]

    def has(self, operator: str) -> bool:
        """Return True if the table has this operator; any form of it counts for a compiler."""
        if operator in self.names or self.kind == "kernels":
            return operator in self.names
        # Tracing turns `relu_` into `relu` where it can; else the result goes into a new tensor.
        return not self._bases.isdisjoint({_base(operator), _base(operator).removesuffix("_")})

    @cached_property
    def _bases(self) -> frozenset[str]:
        return frozenset(map(_base, self.names))


def tables() -> tuple[str, ...]:
    """Return the names of all tables, with those of the devices that this PyTorch is built for."""
    import torch

    built = [name for name, (member, _) in _BUILT.items() if getattr(torch.version, member, None)]
    return tuple(sorted({*built, *_files()}))


def _files() -> dict[str, Path]:
    """Return the file of each table by its name. What plug-ins have is found without importing them."""
    packages = [importlib.util.find_spec(each.module.partition(".")[0]) for each in entry_points("anychip.backends")]
    folders = [_FOLDER, *(Path(each.origin).parent / _FOLDER.name for each in packages if each and each.origin)]
    return {path.stem: path for folder in folders for path in folder.glob("*.txt")}


@cache
def table(name: str) -> OperatorTable:
    """Read the table of this name. Raises KeyError, which names the tables there are."""
    if name not in tables():
        raise KeyError(f"there is no table of operators for {name!r}; there is {', '.join(tables())}")
    if name in _BUILT:
        return _table_of_torch(name)
    lines = _files()[name].read_text(encoding="utf-8").splitlines()
    head = dict(line[2:].split(": ", 1) for line in lines if line.startswith("# "))
    names = frozenset(name for line in lines if not line.startswith("#") for name in _unpacked(line))
    return OperatorTable(name, head["kind"], head["source"], names)


def _unpacked(line: str) -> Iterator[str]:
    """Yield the operators of a line: `add.|Tensor relu` has aten::add, aten::add.Tensor and aten::relu."""
    for word in line.split():
        base, _, forms = word.partition(".")
        base = base if "::" in base else f"{AS_WRITTEN}{base}"
        yield from (f"{base}.{form}" if form else base for form in forms.split("|"))


def _table_of_torch(name: str) -> OperatorTable:
    import torch

    with contextlib.suppress(Exception):  # Its import registers its operators; beside some builds it fails.
        importlib.import_module("torchvision")
    names = torch._C._dispatch_get_registrations_for_dispatch_key(_BUILT[name][1])
    return OperatorTable(name, "kernels", f"torch {torch.__version__}, its kernels in the dispatcher", frozenset(names))


def _base(operator: str) -> str:
    return operator.partition(".")[0]
