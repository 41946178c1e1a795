"""The rooms of the house: who may import whom, read from the sources without importing them."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from anychip_base.interpreter import OURS

ROOT = Path(__file__).parents[2]
PLUGINS = {f"anychip_{name}": ROOT / "plugins" / name for name in ("ascend", "compat", "grpc", "hosting", "tools")}
ROOMS = [*(ROOT / name for name in OURS), *(folder / name for name, folder in PLUGINS.items())]
SOURCES = sorted(path for room in ROOMS for path in room.rglob("*.py"))
_SERVICE = {"fastapi", "starlette", "uvicorn", "prometheus_client"}
FORBIDDEN = {
    "anychip_base": {"ultralytics", *PLUGINS, "app", "backends", "models", "torch", *_SERVICE},
    "app": {"ultralytics", *PLUGINS},
    "models": {"ultralytics", *PLUGINS, "app", "backends", *_SERVICE},
    "backends": {"ultralytics", *PLUGINS, "app", "models", "PIL", *_SERVICE},
    **{name: {"ultralytics", *PLUGINS} - {name} for name in PLUGINS},
}
FORBIDDEN["anychip_tools"].remove("anychip_grpc")  # `bench` speaks it.
ORDER = (
    "errors",
    "logs",
    "clock",
    "pace",
    "telling",
    "core",
    "processes",
    "prepared",
    "images",
    "precision",
    "decoder",
    "worker",
    "config",
    "observability",
    "access",
    "link",
    "link_messages",
    "scheduling",
    "decoding",
    "fleet",
    "serving",
    "protocols",
    "ingress",
    "http",
    "compat",
    "application",
    "converter_main",
    "ingress_main",
    "arguments",
    "main",
    "cli",
    "__main__",
)
"""Packages and modules of app: each may import those before it, and nothing that comes after it."""


def name_of(path: Path) -> str:
    return str(path.relative_to(next((each for each in PLUGINS.values() if path.is_relative_to(each)), ROOT)))


@functools.cache
def trees() -> dict[Path, ast.Module]:
    """Every source, read once. A rule goes through all of them and names each that breaks it."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}


def of_app() -> dict[Path, ast.Module]:
    """Return the sources in `app/`."""
    return {path: tree for path, tree in trees().items() if path.is_relative_to(ROOT / "app")}


def part_of(module: str) -> str:
    """Return the package or module of app that `app.part.…` names."""
    return module.split(".")[1]


def parts_imported(tree: ast.Module) -> Iterator[str]:
    """Parts of app that a module imports anywhere, those that only types need included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (part_of(alias.name) for alias in node.names if alias.name.startswith("app."))
        elif isinstance(node, ast.ImportFrom) and node.module == "app":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("app."):
            yield part_of(node.module or "")


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


def test_the_scan_sees_every_kind_of_import() -> None:
    text = "import a.b\ndef f():\n    from c.d import e\n    importlib.import_module('g.h')\n    __import__('i')\n"
    assert set(imported(ast.parse(text))) == {"a", "c", "g", "i"}


def test_dependencies_point_one_way() -> None:
    found = {
        name_of(path): set(imported(tree)) & FORBIDDEN[name_of(path).partition("/")[0]]
        for path, tree in trees().items()
    }
    assert {name: packages for name, packages in found.items() if packages} == {}


INVERTED = re.compile(r"\s*(What|Of|Whether|Where|Who|As|That|How|Which|When)\b")
"""Beginning of a docstring that names neither an action nor a thing."""


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield the docstrings of a module, its classes and its functions, and the strings behind attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


def test_the_scan_sees_every_kind_of_docstring() -> None:
    text = "'a'\nclass B:\n    'b'\n    c = 1\n    'c'\n    def d(self):\n        'd'\n        return 'e'"
    assert sorted(str(each.value) for each in docstrings(ast.parse(text))) == ["a", "b", "c", "d"]


def test_a_docstring_begins_with_a_verb_or_a_noun() -> None:
    """Ruff's D401 checks functions alone, and accepts words that it does not know."""
    rooms = [*OURS, "benchmarks", "plugins/*/anychip_*", "plugins/*/tests"]
    paths = [path for room in rooms for path in sorted(ROOT.glob(f"{room}/**/*.py"))]
    read = {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}
    assert read.keys() >= trees().keys()
    found = [
        f"{path.relative_to(ROOT)}:{each.lineno}: {each.value!r}"
        for path, tree in read.items()
        for each in docstrings(tree)
        if INVERTED.match(str(each.value))
    ]
    assert found == []


def test_the_scan_sees_every_part_of_app() -> None:
    text = "import app.a.b\nfrom app import c\ndef f():\n    from app.d.e import g\nfrom apple.h import i\n"
    assert set(parts_imported(ast.parse(text))) == {"a", "c", "d"}


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


def test_a_package_says_what_it_must_not_know() -> None:
    packages = {path: tree for path, tree in of_app().items() if path.match("app/*/__init__.py")}
    assert len(packages) > 10
    silent = [path for path, tree in packages.items() if "must not" not in (ast.get_docstring(tree) or "").lower()]
    assert [name_of(path) for path in silent] == []


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


def test_a_name_belongs_to_one_public_class() -> None:
    homes: dict[str, list[str]] = {}
    for path, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(name_of(path))
    assert not {name: paths for name, paths in homes.items() if len(paths) > 1}


def names_of(tree: ast.Module) -> list[str]:
    """Return the names that a module's own statements assign."""
    given = [each for each in tree.body if isinstance(each, ast.Assign | ast.AnnAssign)]
    targets = [one for each in given for one in (each.targets if isinstance(each, ast.Assign) else [each.target])]
    return [name.id for one in targets for name in ast.walk(one) if isinstance(name, ast.Name)]


def test_a_module_gives_a_name_once() -> None:
    assert names_of(ast.parse("a = 1\nb, a = 2, 3\nif c:\n    d = 4\ne: int = 5")) == ["a", "b", "a", "e"]
    times = {name_of(path): Counter(names_of(tree)) for path, tree in trees().items()}
    assert {path: name for path, of in times.items() for name in of if of[name] > 1} == {}
