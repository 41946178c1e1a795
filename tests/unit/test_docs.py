"""The pages in docs/: what they name is there, and what is there is named."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from anychip_tools.doctor import CHECKS
from benchmarks import troubleshooting

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md")])


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    named = set(re.findall(r'<a id="([^"]+)">', text))  # In Chinese pages, for the links of both languages.
    return named | {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_between_pages_lead_somewhere() -> None:
    nowhere = []
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]+))?\)", page.read_text(encoding="utf-8")):
            linked = page.parent / target if target else page
            if not linked.exists() or (anchor and anchor not in anchors(linked.read_text(encoding="utf-8"))):
                nowhere.append((name_of(page), f"{target}#{anchor}"))
    assert nowhere == []


def test_files_that_pages_name_exist() -> None:
    rooms = "app|backends|benchmarks|deploy|docs|models|tests"
    named = re.compile(rf"(?<![\w./-])(?:{rooms})/[\w@./-]+(?![\w*{{])")
    found = {(name_of(page), name.rstrip(".,-")) for page in PAGES for name in named.findall(page.read_text("utf-8"))}
    assert {(page, name) for page, name in found if not (ROOT / name).exists()} == set()


ERROR_ROW = re.compile(r"^\| (\d+) \| `(\w+)` \|", re.MULTILINE)
API = (DOCS / "api.md").read_text(encoding="utf-8")


def test_the_api_page_has_every_error_with_its_status() -> None:
    from app.errors import ERRORS

    assert {code: int(status) for status, code in ERROR_ROW.findall(API)} == {
        code: kind.status for code, kind in ERRORS.items()
    }


def test_the_api_page_has_every_parameter_of_a_prediction_with_its_default_and_text() -> None:
    from app.protocols.options import OPTIONS, PREDICT
    from models import MASK_FORMS, Options

    # `tensors` follows from the outputs that a request names.
    assert [*(row.name for row in OPTIONS), "tensors"] == [each.name for each in dataclasses.fields(Options)]
    assert [*(row.default for row in OPTIONS), False] == list(dataclasses.astuple(Options()))
    assert OPTIONS[-1].choices == MASK_FORMS
    for row in PREDICT:
        default = "none" if row.default is None else row.default
        written = f"`{default}`" if row.choices else default if isinstance(default, str) else f"{default:g}"
        if row.place == "header":
            assert f"| `{row.name}` | {row.text}" in API
        elif row.name != "timeout_ms":
            assert f"| `{row.name}` | {written} | {row.text}" in API
        else:
            assert f"| `{row.name}` | `--timeout-ms` | {row.text}" in API


def test_the_api_page_names_every_route() -> None:
    """Read from the routes' sources; the versioned paths and the two spellings of Triton's are named in a sentence."""
    declared = {
        route
        for room in ("app/http/routes", "app/compat", "plugins/compat")
        for path in (ROOT / room).rglob("*.py")
        for route in re.findall(
            r'^@(?:router|devices)\.\w+\(\s*"([^"]+)"|^ROUTE = "([^"]+)"',
            path.read_text(encoding="utf-8"),
            re.MULTILINE,
        )
        for route in route
        if route
    }
    assert len(declared) > 15
    same = {"/v2/": "/v2", "/v2/stats": "/v2/models/stats"}
    for route in declared:
        if "/versions/" in route:
            continue
        base, _, last = same.get(route, route).rpartition("/")
        assert same.get(route, route) in API or (base in API and f"`/{last}`" in API), route


CHINESE = [page for page in PAGES if page.name.endswith(".zh-CN.md")]


def parts(text: str) -> tuple[list[str], list[dict[str, Any]]]:
    """Return blocks of code without comments, and of each section what both languages share: level, names, links …"""
    code = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
    sections = re.split(r"^(?=#+ )", code.sub("", text), flags=re.MULTILINE)[1:]
    return [re.sub(r"(?:^|(?<=\s))# .*", "#", block, flags=re.MULTILINE) for block in code.findall(text)], [
        {
            "level": len(section) - len(section.lstrip("#")),
            "names": set(re.findall(r"(?<!`)`([^`]+)`(?!`)", section)),
            "links": {link.replace(".zh-CN", "") for link in re.findall(r"\]\(([^)]+)\)", section)},
            "rows": len(re.findall(r"^\|", section, re.MULTILINE)),
            "bullets": len(re.findall(r"^- ", section, re.MULTILINE)),
        }
        for section in sections
    ]


@pytest.mark.parametrize("page", CHINESE, ids=name_of)
def test_a_chinese_page_says_what_the_english_one_says(page: Path) -> None:
    """Headings, commands, names, links, rows. Whoever changes the one changes the other."""
    chinese = page.read_text(encoding="utf-8")
    english = page.with_name(page.name.replace(".zh-CN", "")).read_text(encoding="utf-8")
    assert parts(english)[0] == parts(chinese)[0], "blocks of code"
    for number, (ours, theirs) in enumerate(zip(parts(english)[1], parts(chinese)[1], strict=True), 1):
        assert ours == theirs, f"section {number}"
    assert len(re.findall(r"[\u4e00-\u9fff]", chinese)) > 200


REFERENCE = ("api.md", "settings.md")
MOST_WORDS = 1800


def words_of(page: Path) -> int:
    """How many words are to be read. Tables and blocks of code are for looking things up: they do not count."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return sum(len(line.split()) for line in text.splitlines() if not line.startswith("|"))


def test_no_page_is_longer_than_one_reads() -> None:
    words = {name_of(page): words_of(page) for page in PAGES if page.name not in REFERENCE}
    assert {page: count for page, count in words.items() if count > MOST_WORDS} == {}


TOOLS = (DOCS / "tools.md").read_text(encoding="utf-8")
COMMANDS = ("ops", "validate", "bench", "tune", "profile")


@pytest.mark.parametrize("path", troubleshooting.PAGES, ids=lambda path: str(path.name))
def test_the_page_of_troubles_is_the_one_that_the_tables_make(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == troubleshooting.page(path), "run python -m benchmarks.troubleshooting"


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
