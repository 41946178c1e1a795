"""List the networks that torchair compiles with each torch_npu that set-up may choose: operators against converters.

    python -m benchmarks.torchair_networks --wheels FOLDER      # writes tests/support/torchair_networks.json
    python -m benchmarks.torchair_networks --table              # prints the table of docs/operators.md from it

FOLDER holds wheels of torch-npu (`pip download --no-deps --only-binary=:all: torch-npu==2.12.0`, and so on for each of
CANN_PAIRS in deploy/install.py). They are read as text; nothing of them is imported or run. For each wheel the file
keeps the operators that torchair converts, and our calls (tests/support/vendor_api) that its sources lack.

Owns: the file and the table. A name in it says that a converter is registered, not that it takes every shape.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
FILE = ROOT / "tests" / "support" / "torchair_networks.json"
_INSIDE = "torch_npu/dynamo/"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--wheels", type=Path, help="folder of torch-npu wheels to read")
    parser.add_argument("--table", action="store_true", help="print the table of the documentation")
    given = parser.parse_args()
    if given.wheels:
        write(given.wheels)
    if given.table:
        print("\n".join(table(json.loads(FILE.read_text(encoding="utf-8")))))


def write(folder: Path) -> None:
    """Read wheels and networks, and write the file."""
    found = {path.name.split("-")[1]: read_wheel(path) for path in sorted(folder.glob("torch_npu-*.whl"))}
    everywhere = sorted(set.intersection(*(set(each["converts"]) for each in found.values())))
    document = {
        "source": "benchmarks/torchair_networks.py",
        "converted_by_all": everywhere,
        "wheels": {
            version: {
                "converts_also": sorted(set(each["converts"]) - set(everywhere)),
                "lacks_calls": each["lacks_calls"],
            }
            for version, each in sorted(found.items(), key=lambda item: _numbers(item[0]))
        },
        "networks": dict(networks()),
    }
    FILE.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"{FILE.relative_to(ROOT)}: {len(found)} wheels, {len(document['networks'])} networks")


def read_wheel(path: Path) -> dict[str, list[str]]:
    """Return the operators that torchair of a wheel converts, in any form, and our calls that the wheel lacks."""
    from benchmarks.operator_tables import of_converters
    from tests.support.vendor_sources import TABLES, Sources, misfit

    with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory() as folder:
        names = [name for name in archive.namelist() if name.endswith(".py")]
        archive.extractall(folder, [name for name in names if name.startswith(f"{_INSIDE}torchair/")])
        converts = {name.partition(".")[0] for name in of_converters(Path(folder))}
        texts = {name: archive.read(name).decode("utf-8", "replace") for name in names}
    lacks = []
    inner = {name.removeprefix(_INSIDE): text for name, text in texts.items() if name.startswith(_INSIDE)}
    for package, held in (("torch_npu", texts), ("torchair", inner)):
        sources, module = Sources(held), TABLES[package]["module"]
        for call in TABLES[package]["calls"]:
            definition = sources.find(module, call["name"])
            if definition is None:
                lacks.append(f"{module}.{call['name']}: it is not there")
            elif "." not in call["name"] and (why := misfit(definition, call["positional"], call["keywords"])):
                lacks.append(f"{module}.{call['name']}: it {why}")
    return {"converts": sorted(converts), "lacks_calls": lacks}


def networks() -> Iterator[tuple[str, list[str]]]:
    """Yield every architecture of the catalogue with its operators; one size of each YOLO, as the sizes are alike."""
    from models import classifiers
    from models.yolo import model as yolo

    detectors = [name for name in yolo.ARCHITECTURES if name.partition("-")[0].endswith("n")]
    for name in (*classifiers.ARCHITECTURES, *detectors):
        print(name, file=sys.stderr)
        yield name, operators_of(name)


def operators_of(architecture: str) -> list[str]:
    """Return the operators of a network as a compiler gets it, from bytes to answers, in any of their forms.

    Classifiers are made of tensors that have shapes and no values, so that nothing is computed.
    """
    from anychip_tools.record import names_of
    from models import PixelModel, classifiers, open_model, parse_spec

    model = open_model(parse_spec(f"{architecture}:random"), Path())
    assert isinstance(model, PixelModel)
    if architecture in classifiers.ARCHITECTURES:
        assert isinstance(model, classifiers.Classifier)
        core = classifiers._skeleton(architecture, len(model.labels), auxiliary=False).eval().to("meta")
        with torch.device("meta"):
            classifiers._fuse(core)
            network: torch.nn.Module = classifiers.ClassificationNetwork(
                core, model.input_shape, model.mean, model.std
            ).eval()
            pixels = torch.zeros((1, *model.input_shape), dtype=torch.uint8)
            found = names_of(network, [pixels], as_traced=True)
    else:
        pixels = torch.zeros((1, *model.input_shape), dtype=torch.uint8)
        found = names_of(model.network(), [pixels], as_traced=True)
    return sorted({each.name.partition(".")[0] for each in found})


def missing(document: Mapping[str, Any], version: str, operators: Iterable[str]) -> list[str]:
    """Return the operators that torchair of a wheel does not convert; an in-place form counts as converted."""
    converts = {*document["converted_by_all"], *document["wheels"][version]["converts_also"]}
    return sorted(name for name in operators if name not in converts and name.removesuffix("_") not in converts)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def table(document: Mapping[str, Any]) -> list[str]:
    """Return the lines of the table: networks with one result share a row, and the largest group is the last."""
    versions = list(document["wheels"])
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, operators in document["networks"].items():
        found = tuple(", ".join(missing(document, version, operators)) or "yes" for version in versions)
        rows.setdefault(found, []).append(name)
    lines = [f"| networks | {' | '.join(versions)} |", f"|---|{'---|' * len(versions)}"]
    *some, (most, others) = sorted(rows.items(), key=lambda row: len(row[1]))
    for found, named in (*((each, ", ".join(names)) for each, names in some), (most, f"the {len(others)} others")):
        cells = (" ".join(f"`{each}`" for each in cell.split(", ")) if cell != "yes" else cell for cell in found)
        lines.append(f"| {named} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
