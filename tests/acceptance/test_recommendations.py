"""What messages tell to install is possible. Our packages are on no registry: anybody may take the names."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SAID = """
import json, sys
from anychip_base.extras import how_to_install
json.dump({extra: how_to_install(extra) for extra in sys.argv[1:]}, sys.stdout)
"""


def test_what_is_said_of_each_extra_can_be_done(anychip, empty):
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = re.findall(r"^(\w+) = \[", text.partition("[project.optional-dependencies]")[2].partition("\n[")[0], re.M)
    assert {"onnx", "grpc"} <= {*extras}
    python = str(anychip.command.with_name("python"))
    told = json.loads(anychip.completed([python, "-c", SAID, *extras], cwd=empty))
    for extra, said in told.items():
        make = f"ANYCHIP_EXTRAS={extra} make install, in anychip's sources"
        command, _, where = said.partition(", in ")
        assert said == make or re.search(r"\bpip install ", said), said
        assert not re.search(r"(?<![/\w'])anychip(-|\[)", said.replace(make, "")), said
        for folder in re.findall(r"\./[\w/-]+", command):
            assert where == "anychip's sources"
            assert (ROOT / folder / "pyproject.toml").is_file()
    # Of what is installed here, pip finds that nothing is missing: it knows the names, and the versions can be had.
    commands = [told[extra] for extra in ("cpu", "onnx", "timm", "transformers", "traces", "parquet")]
    joined = " ".join(each.partition("pip install ")[2] for each in commands)
    done = anychip.completed(["sh", "-c", f"exec {python} -m pip install --no-index --dry-run {joined}"], cwd=empty)
    assert "Would install" not in done
