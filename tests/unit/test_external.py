"""Backends, engines and finished files that other packages bring, found through their entry points."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from anychip_base.extras import how_to_install
from backends import external, registry
from backends.contract.errors import EngineRefusedError
from backends.engines import EagerEngine, engines_of
from backends.vendors import table as vendors
from backends.vendors.table import Facts
from backends.vendors.torch_device import TorchBackend
from models import WeightsError, open_model, parse_spec
from models.exports import finished
from tests.support.networks import Brightness
from tests.support.rows import row

NPU = vendors.ASCEND


class Brought(EagerEngine):
    name = "brought"


class Theirs(TorchBackend):
    pass


def of(facts: Facts) -> TorchBackend:
    return Theirs(facts)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Any:
    """All backends with those of these rows, as if packages brought them; nothing of it stays."""
    monkeypatch.setattr(vendors, "_known", {row.name: row for row in (*vendors.ACCELERATORS, vendors.CPU)})

    def all_with(*rows: Facts) -> dict[str, Any]:
        entries = [EntryPoint(f"entry{number}", "theirs", external.GROUP) for number in range(len(rows))]
        made = iter(map(of, rows))
        monkeypatch.setattr(EntryPoint, "load", lambda self: next(made))
        monkeypatch.setattr(external, "entry_points", lambda group: entries)
        return {each.name: each for each in registry._all()}

    return all_with


def test_a_package_for_a_vendor_of_ours_stands_in_its_place(found: Any) -> None:
    theirs = replace(NPU, engines=("brought", "eager"))
    names = list(found())
    backends = found(theirs)
    assert list(backends) == names
    assert type(backends["npu"]).__name__ == "Theirs"
    assert vendors.of_type("npu") == (theirs,)


@pytest.mark.parametrize("ours", [vendors.NVIDIA, vendors.CPU], ids=["another vendor", "the CPU"])
def test_the_name_of_another_vendor_is_refused_and_ours_stays(found: Any, ours: Facts) -> None:
    backends = found(replace(ours, vendor="cpu"))
    assert f"another backend called {ours.name}" in backends["entry0"].probe().reason
    assert type(backends[ours.name]).__name__ != "Theirs"
    assert ours in vendors.known()


def test_a_backend_brings_engines_of_its_own() -> None:
    facts = row("fp32", name="acme", title="Acme")
    facts = replace(facts, engines=("brought", "eager"))
    made = engines_of(facts, "auto", Brightness(), 1, (Brought,))
    assert [type(each) for each in made] == [Brought, EagerEngine]
    with pytest.raises(EngineRefusedError, match="Acme has no engine 'om'; it has brought and eager"):
        engines_of(facts, "om", Brightness(), 1, (Brought,))


def test_a_finished_file_whose_reader_is_not_installed_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finished, "_CHILDREN", {})
    (tmp_path / "model.om").touch()
    with pytest.raises(WeightsError, match=rf"model\.om is not installed: {re.escape(how_to_install('ascend'))}\.$"):
        open_model(parse_spec(f"x={tmp_path / 'model.om'}"), tmp_path)
