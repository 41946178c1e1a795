"""The pages about the tools: made of the same tables, naming the same options, with output of the same form."""

from __future__ import annotations

import argparse
import importlib
import re
from pathlib import Path

import pytest

from app.tools import bench, ops, tune, validate
from app.tools.bench import show as show_bench
from app.tools.doctor import CHECKS
from app.tools.troubleshooting import page

DOCS = Path(__file__).parents[2] / "docs"
COUNT = r"\d+ of \d+ operators are supported \([\d.]+%\), [\d.]+% of \d+ calls"
TOOLS = (DOCS / "tools.md").read_text(encoding="utf-8")
COMMANDS = ("ops", "validate", "bench", "tune", "profile")


def test_the_page_of_troubles_is_the_one_that_the_tables_make() -> None:
    assert (DOCS / "troubleshooting.md").read_text(encoding="utf-8") == page(), (
        "run python -m app.tools.troubleshooting"
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_of_a_command_is_in_the_page(command: str) -> None:
    parser = argparse.ArgumentParser()
    importlib.import_module(f"app.tools.{command}").add_arguments(parser)
    section = re.split(r"^## ", TOOLS, flags=re.MULTILINE)
    [text] = [part for part in section if part.startswith(f"anychip {command}")]
    own = [action for action in parser._actions if not (action.dest or "").startswith("setting_")]
    options = {option for action in own for option in action.option_strings if option.startswith("--")}
    assert not {option for option in options - {"--help", "--json"} if not re.search(rf"{option}\b", text)}


def test_every_check_of_the_doctor_is_in_the_page() -> None:
    assert not [name for name in CHECKS if f"`{name}`" not in TOOLS]


def shown(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def headings(command: str) -> list[str]:
    """The line with the columns' names in the page's example of a command."""
    blocks = re.findall(r"^```\n\$ anychip (\S+).*?\n(.*?)^```$", TOOLS, re.MULTILINE | re.DOTALL)
    return [line for name, text in blocks if name == command for line in text.splitlines()]


def words(line: str) -> list[str]:
    return re.split(r"\s{2,}", line.strip())


ENVIRONMENT = {"device": "cpu:0", "device_name": "x", "date": "2026-11-22"}


def test_the_example_of_ops_has_the_form_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    remedy = {"step": "rewrite", "text": "write it as x"}
    row = {
        "operator": "aten::a",
        "how": "cpu",
        "calls": 1,
        "share": 0.5,
        "reason": "",
        "remedies": [remedy],
        "problem": True,
    }
    rates = {"support_by_kind": 0.5, "support_by_calls": 0.5, "calls": 2}
    about = {"model": "m", "device": "npu:0", "precision": "fp32", "simulated": True, "prediction": False, "source": ""}
    ops.show({"operators": [row], "rewritten": [], **rates, **about}, every=False)
    lines = shown(capsys)
    example = headings("ops")
    assert words(lines[1]) == words(next(line for line in example if line.startswith("operator")))
    assert any(
        re.fullmatch(r"\d+ of \d+ operators are supported \([\d.]+%\), [\d.]+% of \d+ calls", each) for each in lines
    )
    assert any(
        re.fullmatch(r"\d+ of \d+ operators are supported \([\d.]+%\), [\d.]+% of \d+ calls", e) for e in example
    )


def test_the_example_of_validate_has_the_form_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    whole = {"max_abs": 0.1, "mean_abs": 0.1, "relative": 0.1, "cosine": 0.9, "within": 0.5}
    compared = {
        "engine": "eager",
        "precision": "fp32",
        "verdict": "agrees",
        "reason": "",
        "whole": whole,
        "agreement": {"top1": 1.0},
        "accuracy": {},
        "culprit": None,
        "cut_note": "",
    }
    worst = {"layer": "a (b)", "alone": 0.1, "sum": 0.2}
    layers = {"precision": "fp32", "limit": 0.1, "note": "", "count": 3, "first_divergent": None, "worst": [worst]}
    about = {"model": "m", "device": "cpu:0", "simulated": False, "environment": ENVIRONMENT}
    document = {**about, "comparisons": [compared], "layers": [layers]}
    validate.show(document)
    lines = [words(line) for line in shown(capsys)]
    example = [words(line) for line in headings("validate")]
    for first in ("engine", "precision"):
        wanted = next(line for line in example if line[0] == first)
        assert wanted in lines
    assert "| eager | fp32 | agrees |" in validate.markdown(document)


def test_the_example_of_bench_has_the_form_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    row = dict.fromkeys(bench._DEVICE, 1.0) | {"engine": "eager", "precision": "fp32", "joules_per_image": None}
    about = {"kind": "device", "model": "m", "simulated": False, "refusals": {}, "environment": ENVIRONMENT}
    show_bench({**about, "results": [row]}, bench._DEVICE)
    lines = [words(line) for line in shown(capsys)]
    assert next(words(line) for line in headings("bench") if line.startswith("engine")) in lines


def test_the_example_of_tune_has_the_form_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    candidate = {"engine": "auto", "precision": "auto", "batch_sizes": (1, 2), "workers": 1, "decoders": 0}
    figures = {"images_per_s": 5.0, "p99_ms": 3.0, "joules_per_image": None, "refusal": "", "served": ("eager", "fp32")}
    trial = {"candidate": candidate, **figures}
    about = {"model": "m", "complete": True, "confirmed": True, "lead": 1.0, "p99_ms": float("inf"), "profile": None}
    tune.show({**about, "trials": [trial], "best": trial, "default": trial})
    lines = [words(line) for line in shown(capsys)]
    assert next(words(line) for line in headings("tune") if line.startswith("engine")) in lines
