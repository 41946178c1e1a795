"""The rooms of the house: who may import whom, read from the sources without importing them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

from anychip_base.interpreter import OURS

ROOT = Path(__file__).parents[2]
PLUGINS = {f"anychip_{name}": ROOT / "plugins" / name for name in ("ascend", "compat", "grpc", "hosting", "tools")}
ROOMS = [*(ROOT / name for name in OURS), *(folder / name for name, folder in PLUGINS.items())]
SOURCES = sorted(path for room in ROOMS for path in room.rglob("*.py"))
_SERVICE = {"fastapi", "starlette", "uvicorn", "prometheus_client"}
FORBIDDEN = {
    "anychip_base": {"ultralytics", *PLUGINS, "app", "backends", "models", *_SERVICE},
    "app": {"ultralytics", *PLUGINS},
    "models": {"ultralytics", *PLUGINS, "app", "backends", *_SERVICE},
    "backends": {"ultralytics", *PLUGINS, "app", "models", "PIL", *_SERVICE},
    **{name: {"ultralytics", *PLUGINS} - {name} for name in PLUGINS},
}
FORBIDDEN["anychip_tools"].remove("anychip_grpc")  # `bench` speaks it.
ORDER = (
    *("errors", "logs", "clock", "pace", "telling", "core", "processes", "prepared", "images", "precision"),
    *("decoder", "worker", "config", "observability", "access", "link", "link_messages", "scheduling", "decoding"),
    *("fleet", "serving", "protocols", "ingress", "http", "compat", "converter_main", "ingress_main", "arguments"),
    *("main", "cli", "__main__"),
)
"""Packages and modules of app: each may import those before it, and nothing that comes after it."""


def name_of(path: Path) -> str:
    return str(path.relative_to(next((each for each in PLUGINS.values() if path.is_relative_to(each)), ROOT)))


@functools.cache
def trees() -> dict[Path, ast.Module]:
    """Every source, read once. A rule goes through all of them and names each that breaks it."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}


def of_app() -> dict[Path, ast.Module]:
    return {path: tree for path, tree in trees().items() if path.is_relative_to(ROOT / "app")}


def parts_imported(tree: ast.Module) -> Iterator[str]:
    """Parts of app that a module imports anywhere, those that only types need included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("app."))
        elif isinstance(node, ast.ImportFrom) and node.module == "app":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("app."):
            yield node.module.split(".")[1]


def imported(tree: ast.Module) -> Iterator[str]:
    """Top-level packages that a module imports anywhere, however it is written."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield (node.module or "").partition(".")[0]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = ast.unparse(node.func)
            if called in ("__import__", "importlib.import_module", "import_module"):
                yield str(node.args[0].value).partition(".")[0]


def test_dependencies_point_one_way() -> None:
    found = {
        name_of(path): set(imported(tree)) & FORBIDDEN[name_of(path).partition("/")[0]]
        for path, tree in trees().items()
    }
    assert {name: packages for name, packages in found.items() if packages} == {}


def test_the_order_names_every_part_of_app() -> None:
    parts = {path.stem for path in (ROOT / "app").iterdir() if path.is_dir() or path.suffix == ".py"}
    assert parts - {"__init__", "__pycache__"} == set(ORDER)


def test_packages_of_app_import_only_what_is_below_them() -> None:
    above = {}
    for path, tree in of_app().items():
        part = path.relative_to(ROOT / "app").with_suffix("").parts[0]
        if part != "__init__":
            above[name_of(path)] = set(parts_imported(tree)) - set(ORDER[: ORDER.index(part) + 1])
    assert {name: parts for name, parts in above.items() if parts} == {}


PURE = ("logs", "errors", "scheduling")
"""What the scheduling of app may import of app: no asyncio, no process, no transport."""


def test_scheduling_is_pure() -> None:
    impure = {"asyncio", "os", "socket", "time", "torch", "models", "backends"}
    of_scheduling = {name_of(path): tree for path, tree in of_app().items() if path.parent.name == "scheduling"}
    found = {
        name: (set(parts_imported(tree)) - set(PURE)) | (set(imported(tree)) & impure)
        for name, tree in of_scheduling.items()
    }
    assert found
    assert {name: imports for name, imports in found.items() if imports} == {}


INGRESS = ("protocols", "ingress", "http", "compat")
OWNER = ("serving", "scheduling", "fleet", "decoding", "worker", "decoder")
"""The two halves of the service: they know each other by app.link alone. What starts both (main) knows both."""


def test_ingress_and_owner_know_only_the_link_of_each_other() -> None:
    found = {}
    for path, tree in trees().items():
        part = name_of(path).split("/")[1]
        if part in (*INGRESS, *OWNER) or "anychip_grpc" in path.parts:
            found[name_of(path)] = set(parts_imported(tree)) & set(INGRESS if part in OWNER else OWNER)
    assert found
    assert {name: parts for name, parts in found.items() if parts} == {}


def test_the_link_knows_neither_half() -> None:
    assert not set(parts_imported(trees()[ROOT / "app" / "link.py"])) & {*INGRESS, *OWNER}


def modules_imported(tree: ast.Module, known: Mapping[str, Path]) -> set[str]:
    """Modules of ours that a module imports anywhere, those that only types need included."""
    found: set[str] = set()
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in known else node.module for name in whole]
        found.update(name for name in names if name in known)
    return found


def test_no_two_files_import_each_other_in_a_circle() -> None:
    """Inside packages as well, and for types alone as well."""
    known = {name_of(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__"): path for path in SOURCES}
    left = {name: modules_imported(trees()[path], known) for name, path in known.items()}
    while free := {name for name, wanted in left.items() if not wanted & left.keys() - {name}}:
        for name in free:
            del left[name]
    assert not left, "these import each other, or what does"
