"""Files as libraries write them, answered by the installed command and by their library: a table in Markdown.

    python -m benchmarks.zoo                                   # all rows
    python -m benchmarks.zoo timm-regnety own-uint8            # some
    python -m benchmarks.zoo --python /path/to/python          # builds with an interpreter that has more libraries
    python -m benchmarks.zoo --results zoo.json --table        # prints the table again of what was kept

Each row is built by its library in a process of its own, with random weights that tell classes apart, and served by
`anychip serve` over HTTP from an empty folder and an environment of PATH and HOME: in fp32, then in the default
precision. Three pictures are compared. Seconds are those of the first start in fp32: reading the file (with what it
is compared with), making it ready, and the first answer; the other files of that service are read beside it.
A file that is refused counts as right where the refusal has the line that helps and what that line makes is right.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.zoo.asking import Asked, Command
from benchmarks.zoo.comparing import DEFAULT, FLOAT32, compare
from benchmarks.zoo.networks import Network
from benchmarks.zoo.table import NETWORKS

_ROOT = Path(__file__).resolve().parents[2]
RIGHT, REFUSED, WRONG, USELESS = "right", "refused, with the line", "**wrong**", "refused, without a line"


def main() -> None:
    """Build, ask, compare, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help="all of them where none is named")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has the libraries")
    parser.add_argument("--command", default=str(Path(sysconfig.get_path("scripts")) / "anychip"))
    parser.add_argument("--device", default="cpu", help="as --device of `anychip serve`")
    parser.add_argument("--group", type=int, default=8, help="files of one service")
    parser.add_argument("--folder", type=Path, help="keeps files, and takes those that are there already")
    parser.add_argument("--results", type=Path, help="a file that keeps rows, and to which others are added")
    parser.add_argument("--table", action="store_true", help="print what --results has, and measure nothing")
    parser.add_argument("--build-only", action="store_true")
    given = parser.parse_args()
    unknown = [name for name in given.rows if name not in NETWORKS]
    if unknown:
        parser.error(f"no row {', '.join(unknown)}; there are {', '.join(NETWORKS)}")
    rows = [NETWORKS[name] for name in given.rows or NETWORKS]
    kept = json.loads(given.results.read_text()) if given.results and given.results.is_file() else {}
    if not given.table:
        with tempfile.TemporaryDirectory(prefix="zoo-") as passing:
            folder = (given.folder or Path(passing)).resolve()
            folder.mkdir(parents=True, exist_ok=True)
            _build(rows, folder, given.python)
            if given.build_only:
                return
            with tempfile.TemporaryDirectory(prefix="zoo-home-") as home:
                command = Command(Path(given.command), Path(home), given.device)
                built = [row for row in rows if (folder / row.name / "made.json").is_file()]
                for first in range(0, len(built), given.group):
                    kept |= _measure(built[first : first + given.group], folder, command)
                    if given.results:
                        given.results.write_text(json.dumps(kept, indent=1))
    print("\n".join(table(kept)))


def _build(rows: list[Network], folder: Path, python: str) -> None:
    """Build what is not there, one process a library."""
    missing = [row for row in rows if not (folder / row.name / "made.json").is_file()]
    for library in dict.fromkeys(row.library for row in missing):
        names = [row.name for row in missing if row.library == library]
        subprocess.run(
            [python, "-m", "benchmarks.zoo.building", str(folder), *names], cwd=_ROOT, check=True, env=dict(os.environ)
        )


def _measure(rows: list[Network], folder: Path, command: Command) -> dict[str, Any]:
    """Ask for a group of rows, and say of each what came out."""
    about = {row.name: json.loads((folder / row.name / "made.json").read_text()) for row in rows}
    asked = {
        row.name: Asked(
            row.name, about[row.name]["model"].replace("{}", str(folder / row.name)), about[row.name]["kind"],
            sorted((folder / row.name / "pictures").iterdir()),
        )
        for row in rows
    }  # fmt: skip
    single = command.ask([*asked.values()], "fp32")
    served = [each for name, each in asked.items() if not single[name].said]
    default = command.ask(served, "auto")
    found = {}
    for row in rows:
        made, one, two = about[row.name], single[row.name], default.get(row.name)
        kept = np.load(folder / row.name / "answers.npz")
        theirs = [kept[key] for key in sorted(kept.files, key=lambda key: int(key.removeprefix("arr_")))]
        result: dict[str, Any] = {
            "library": row.library,
            "version": made["version"],
            "file": row.file,
            "reference": row.reference,
            "line": made["line"],
            "said": one.said or (two.said if two else ""),
        }
        result |= {"load": round(os.getloadavg()[0], 1), "when": time.strftime("%Y-%m-%d")}
        if one.said or two is None or two.said:
            result["result"] = USELESS
        else:
            exact = compare(made["kind"], theirs, one.answers, FLOAT32)
            usual = compare(made["kind"], theirs, two.answers, DEFAULT)
            result |= {"fp32": exact.words, "default": usual.words, "seconds": round(one.seconds, 1)}
            result |= {"how": f"{two.engine} {two.precision}"}
            result["result"] = RIGHT if exact.same and usual.same else WRONG
            if made["refused"]:
                model = made["refused"].replace("{}", str(folder / row.name))
                said = command.refusal(model, asked[row.name].pictures[0])
                result["refusal"] = said
                if result["result"] == RIGHT:
                    result["result"] = REFUSED if said and made["line"] in said else USELESS
        print(f"{row.name}: {result}", file=sys.stderr, flush=True)
        found[row.name] = result
    return found


def table(kept: dict[str, Any]) -> list[str]:
    """Return the Markdown: what was counted, by library and in all, and each row."""
    columns = ("library", "version", "reference", "networks", *map(_plain, _RESULTS))
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for library in dict.fromkeys(row["library"] for row in kept.values()):
        rows = [row for row in kept.values() if row["library"] == library]
        references = "; ".join(dict.fromkeys(row["reference"] for row in rows))
        counts = [str([row["result"] for row in rows].count(each)) for each in _RESULTS]
        lines.append(f"| {' | '.join((library, rows[0]['version'], references, str(len(rows)), *counts))} |")
    results = [row["result"] for row in kept.values()]
    counted = ", ".join(f"{results.count(each)} {_plain(each)}" for each in _RESULTS)
    libraries = {row["library"] for row in kept.values()}
    lines += ["", f"{len(results)} networks of {len(libraries)} libraries: {counted}."]
    days = sorted({row["when"] for row in kept.values()})
    when = " to ".join(dict.fromkeys((days[0], days[-1])))
    lines += [f"Measured {when}, {platform.machine()}, {os.cpu_count()} processors."]
    lines += ["", "| network | file | fp32 | default | s | |", "|---|---|---|---|---|---|"]
    for name, row in kept.items():
        default = f"{row['default']} ({row['how']})" if "default" in row else "-"
        result = row["result"] + (f" `{row['line']}`" if row["line"] else "")
        lines.append(
            f"| {name} | {row['file']} | {row.get('fp32', '-')} | {default} | {row.get('seconds', '-')} | {result} |"
        )
    return lines


_RESULTS = (RIGHT, REFUSED, USELESS, WRONG)


def _plain(result: str) -> str:
    return result.strip("*")


if __name__ == "__main__":
    main()
