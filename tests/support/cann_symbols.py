"""Symbols that torch_npu's libraries need of CANN when they load, for each wheel that set-up may choose.

    python -m tests.support.cann_symbols FOLDER    # of wheels of torch-npu; writes tests/support/cann_symbols.json

FOLDER holds wheels (`pip download --no-deps --only-binary=:all: torch-npu==2.12.0`, and so on for each of CANN_PAIRS in
deploy/install.py). Nothing of them is loaded or run: nm and readelf (binutils) read their ELF tables. Python
loads libraries with RTLD_NOW: if one name is offered by none of them, torch_npu cannot be imported.

Owns: the file. Left out are torchair's libraries (`dynamo/`), which need CANN's graph engine (libge_runner,
libfmk_parser, libascend_protobuf) and are loaded by the engine that uses them, and libop_plugin_atb, which needs
libatb and is loaded with its first operator: the stub has neither. Names that are looked up later (dlsym) may be
missing, and are not in the file.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_suffix(".json")
STUB = Path(__file__).parent / "stubs" / "cann.cpp"
AT_IMPORT = ("_C", "libtorch_npu", "libtensorpipe", "libnpu_profiler")
"""Libraries of a wheel that `import torch_npu` loads, by the beginning of their names."""
# Names of Huawei: ACL, HCCL, the profiler and the runtime in C, the graph engine in C++.
_OF_CANN = re.compile(r"acl|Hccl|Msprof|rt[A-Z]|_ZNK?2ge")
# Names of others: torch's and Python's libraries, those of the C and C++ compilers.
_OF_OTHERS = re.compile(
    r"_?Py|THP|ParameterClass$|aoti_torch|_ITM_|__cxa_|__gmon_start__$|__pthread|pthread_|dl(open|close|sym|error)$"
    r"|_Z[A-Z]*(St|N[A-Z]*(St|2at|3c10|4c10d|5torch|6caffe2|8pybind11|9libkineto|10THPPointer|21THManaged))"
    r"|_Z\d+(TH|get)|_Z(nw|na|dl|da)"
)


def main() -> None:
    """Read every wheel of the folder, and write the file."""
    found = {path.name.split("-")[1]: read_wheel(path) for path in sorted(Path(sys.argv[1]).glob("torch_npu-*.whl"))}
    everywhere = set.intersection(*(set(each["wants"]) for each in found.values()))
    document = {
        "source": "tests/support/cann_symbols.py",
        "wanted_by_all": sorted(everywhere),
        "wheels": {
            version: {
                "needs": each["needs"],
                "wants_also": sorted(set(each["wants"]) - everywhere),
                "unknown": each["unknown"],
            }
            for version, each in sorted(found.items(), key=lambda item: [int(n) for n in re.findall(r"\d+", item[0])])
        },
    }
    FILE.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"{FILE.relative_to(ROOT)}: {len(found)} wheels")


def read_wheel(path: Path) -> dict[str, list[str]]:
    """Read a wheel. `needs`: libraries of CANN; `wants`: names from them; `unknown`: names of unknown origin."""
    with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory() as folder:
        names = [name for name in archive.namelist() if name.endswith(".so")]
        chosen = [name for name in names if Path(name).name.startswith(AT_IMPORT) and "/dynamo/" not in name]
        libraries = [Path(archive.extract(name, folder)) for name in chosen]
        needs = {line for each in libraries for line in _needed(each)}
        undefined = _symbols("--undefined-only", libraries)
        # Only names of the C or C++ library have a version.
        wanted = {name for name in undefined if "@" not in name} - _symbols("--defined-only", libraries)
    return {
        "needs": sorted(needs - {each.name for each in libraries} - _not_of_cann(needs)),
        "wants": sorted(name for name in wanted if _OF_CANN.match(name)),
        "unknown": sorted(name for name in wanted if not _OF_CANN.match(name) and not _OF_OTHERS.match(name)),
    }


def _not_of_cann(needed: Iterable[str]) -> set[str]:
    others = re.compile(r"lib(torch|c10|stdc|gcc|m\.|c\.|dl\.|rt\.|pthread)|ld-linux")
    return {name for name in needed if others.match(name)}


def _needed(library: Path) -> list[str]:
    return re.findall(r"\(NEEDED\).*\[(.+)\]", _run("readelf", "--dynamic", "--wide", str(library)))


def _symbols(which: str, libraries: Iterable[Path]) -> set[str]:
    """Return the names of libraries: defined ones without their version, undefined ones unless they are weak."""
    printed = _run("nm", "--dynamic", which, *map(str, libraries))
    rows = [line.split() for line in printed.splitlines() if len(line.split()) > 1]
    names = {row[-1] for row in rows if which == "--defined-only" or row[-2] not in ("w", "v")}
    return {name.partition("@")[0] for name in names} if which == "--defined-only" else names


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def offered(stub: str) -> set[str]:
    """Return the functions that the source of the stub offers."""
    declared = r"^(?:API [\w ]+?[ *]+|IGNORED\(|UNSUPPORTED\()(\w+)[()]"
    return set(re.findall(declared, stub, re.MULTILINE))


def wanted(document: dict[str, Any], version: str) -> set[str]:
    """Return the names that a wheel needs of CANN."""
    return {*document["wanted_by_all"], *document["wheels"][version]["wants_also"]}


if __name__ == "__main__":
    main()
