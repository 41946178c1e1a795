"""The pages about the tools: made of the same tables, naming the same options, with output of the same form."""

from __future__ import annotations

import argparse
import importlib
import json
import re
from math import inf
from pathlib import Path

import pytest

from anychip_tools import bench, ops, profile, tune, validate
from anychip_tools.bench import show as show_bench
from anychip_tools.doctor import CHECKS
from anychip_tools.doctor_vendor import Check
from app.cli import main
from benchmarks.troubleshooting import PAGES, page

DOCS = Path(__file__).parents[2] / "docs"
COUNT = r"\d+ of \d+ operators are supported \([\d.]+%\), [\d.]+% of \d+ calls"
TOOLS = (DOCS / "tools.md").read_text(encoding="utf-8")
COMMANDS = ("ops", "validate", "bench", "tune", "profile")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.name))
def test_the_page_of_troubles_is_the_one_that_the_tables_make(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == page(path), "run python -m benchmarks.troubleshooting"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_of_a_command_is_in_the_page(command: str) -> None:
    parser = argparse.ArgumentParser()
    importlib.import_module(f"anychip_tools.{command}").add_arguments(parser)
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
    """Return the lines of the page's example of a command."""
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
    about = {"model": "m", "device": "cpu:0", "simulated": False, "environment": ENVIRONMENT, "first_read": ""}
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
    rounds = {"images_per_s": [5.0], "p99_ms": [3.0]}
    second = {**trial, "candidate": {**candidate, "workers": 2}, "images_per_s": 4.0}
    comparison = [{**trial, "lead": 1.0, "rounds": rounds}, {**second, "lead": 1.25, "rounds": rounds}]
    about = {"model": "m", "complete": True, "lead": 1.0, "lead_over_second": 1.25, "p99_ms": inf, "profile": None}
    tune.show({**about, "trials": [trial, second], "comparison": comparison, "best": trial, "default": trial})
    lines = [words(line) for line in shown(capsys)]
    heads = [words(line) for line in headings("tune") if line.startswith(("engine", "turn"))]
    assert len(heads) == 3
    assert all(head in lines for head in heads)
    assert ["the defaults are best: 1.25 times as good as the second best"] in lines


def test_the_examples_of_bench_for_services_decoding_and_comparison_have_the_form_of_the_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    example = [words(line) for line in headings("bench")]
    for columns in (bench._SERVICE, bench._DECODING):
        row = dict.fromkeys(columns, 1.0) | ({"protocol": "predict", "mode": "closed"} if "mode" in columns else {})
        about = {"kind": "x", "model": "m", "simulated": False, "refusals": {}, "environment": ENVIRONMENT}
        show_bench({**about, "results": [row]}, columns)
        lines = [words(line) for line in shown(capsys)]
        assert any(line in lines for line in example), columns


def test_the_example_of_profile_has_the_form_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    about = {"model": "m", "engine": "eager", "precision": "fp32", "batch_size": 2, "batches": 3, "simulated": False}
    stages = [{"stage": "decode", "ms_per_image": 1.0, "share": 0.5}]
    operators = [{"operator": "aten::a", "calls": 1, "cpu_ms": 1.0, "device_ms": 0.0}]
    profile.show(
        {
            **about,
            "images_per_s": 5.0,
            "stages": stages,
            "operators": operators,
            "trace": "t.json",
            "environment": ENVIRONMENT,
        }
    )
    lines, example = shown(capsys), headings("profile")
    for first in ("stage", "operator"):
        wanted = next(words(line) for line in example if words(line)[0] == first)
        assert wanted in [words(line) for line in lines]
    form = r"\S+ on \S+, \w+ \w+, \d+ batches of \d+: [\d.]+ images/s, one after the other"
    assert re.fullmatch(form, lines[0])
    assert any(re.fullmatch(form, line) for line in example)


def test_the_example_of_the_doctor_has_the_form_of_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [Check("torch", "PASS", "torch 2"), Check("port", "FAIL", "taken", "use another")]
    monkeypatch.setattr("anychip_tools.doctor.examine", lambda *_: iter(found))
    assert main(["doctor"]) == 1
    check, remedy = re.compile(r"(PASS|WARN|FAIL|SKIP)  ([a-z-]+) +\S.*"), re.compile(r" {20}-> \S.*")
    lines = shown(capsys)
    assert [bool(check.fullmatch(line)) for line in lines] == [True, True, False]
    assert remedy.fullmatch(lines[-1])
    example = headings("doctor")
    assert all(check.fullmatch(line) or remedy.fullmatch(line) for line in example)
    assert [match[2] for line in example if (match := check.fullmatch(line))] == list(CHECKS)
    assert any(remedy.fullmatch(line) for line in example)


def test_the_example_of_a_comparison_has_the_form_of_the_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name, rate in (("before", 20.0), ("after", 10.0)):
        measured = {"engine": "eager", "precision": "fp32", "batch_size": 4, "images_per_s": rate}
        (tmp_path / f"{name}.json").write_text(json.dumps({"results": [measured], "environment": {"torch": name}}))
    assert main(["bench", "--compare", str(tmp_path / "before.json"), str(tmp_path / "after.json")]) == 1
    lines = [words(line) for line in shown(capsys)]
    example = [words(line) for line in headings("bench")]
    wanted = ["row", "figure", "before", "after", "better by"]
    assert wanted in lines
    assert wanted in example
    shown_row = next(line for line in lines if line[0].startswith("engine eager, precision fp32"))
    assert shown_row[1:] == ["images_per_s", "20", "10", "-50.0%", "slower"]
    rows = [line for line in example if line[0].startswith("engine ") and len(line) > 4]
    assert rows
    assert all(re.fullmatch(r"[+-][\d.]+%", line[4]) for line in rows)
