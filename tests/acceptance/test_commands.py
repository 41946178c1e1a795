"""Commands of a first hour that README has no line for, what messages tell to install, and what surrounds the command
where it is at home: small containers, odd locales, other people's defaults. Answers are those of PyTorch's own module.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SAID = """
import json, sys
from anychip_base.extras import how_to_install
json.dump({extra: how_to_install(extra) for extra in sys.argv[1:]}, sys.stdout)
"""
CONTAINER = """
mount --make-rprivate / && mount -t tmpfs -o size=64m tmpfs /dev/shm &&
mount --bind "$HOME/.cache" "$HOME/.cache" && mount -o remount,bind,ro "$HOME/.cache" &&
! touch "$HOME/.cache/one" 2>/dev/null && ulimit -n 256 && exec "$@"
"""


def test_the_version_is_said(anychip, empty):
    assert anychip.run("--version", cwd=empty) == f"anychip {importlib.metadata.version('anychip')}\n"


def test_validate_compares_a_file_with_float32(anychip, empty, library_files):
    model = f"mine={library_files.folder}/mine.onnx"
    said = anychip.run(
        "validate", model, "--device", "cpu", "--limit", "2", "--precisions", "fp32", "--no-layers", cwd=empty
    )
    assert "against float32 on the CPU" in said
    assert re.search(r"^\w+ +fp32 +agrees ", said, re.MULTILINE), said
    said = anychip.run("validate", f"{library_files.folder}/graph.pt2", cwd=empty, status=1)
    assert "graph.pt2 is a program that would run here with the service's rights" in said


def test_a_port_in_use_is_said_before_a_model_is_read(anychip, empty):
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        said = anychip.run("serve", "--weights", "random", "--port", address.partition(":")[2], cwd=empty, status=1)
    assert said.endswith(f"anychip: cannot listen on {address}; is another service there?\n")
    assert "Traceback" not in said
    messages = [json.loads(line)["message"] for line in said.splitlines() if line.startswith("{")]
    assert [each for each in messages if " is read" in each] == []


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


def test_a_container_with_little_shared_memory_few_files_and_a_cache_that_is_read_only(
    anychip, empty, library_files, same_classes
):
    """/dev/shm of 64 MB, as docker gives it; `ulimit -n 256`; 16 images of 12 megapixels at once."""
    (anychip.home / ".cache" / "anychip").mkdir(parents=True)
    prefix = ("unshare", "--mount", "sh", "-c", CONTAINER, "sh")
    tried = subprocess.run(
        [*prefix, "true"],
        env={"HOME": str(anychip.home), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode != 0:
        pytest.skip(f"only root can mount: {tried.stderr}")
    built = library_files
    container = replace(anychip, prefix=prefix)
    with container.serving("serve", "--models", f"mine={built.folder}/mine.onnx", "--port", "0", cwd=empty) as service:
        same_classes(service.predict("mine", built.folder / "small.png")["classes"], built.answers["mine.onnx"])
        with ThreadPoolExecutor(16) as clients:
            answers = list(clients.map(lambda _: service.predict("mine", built.folder / "large.jpg"), range(16)))
        assert answers == [answers[0]] * 16


def test_plain_locale_private_files_and_no_assertions(anychip, tmp_path, library_files, same_classes):
    """`LANG=C`, `umask 077` and Python's `-O`, in a folder whose name is not ASCII."""
    folder = tmp_path / "données 狗"
    folder.mkdir()
    for name in ("mine.onnx", "mine.json", "small.png"):
        shutil.copy(library_files.folder / name, folder)
    plain = replace(
        anychip, prefix=("sh", "-c", 'umask 077; exec "$@"', "sh"), environment={"LANG": "C", "PYTHONOPTIMIZE": "1"}
    )
    found = plain.predict(f"mine={folder}/mine.onnx", folder / "small.png", cwd=folder)
    same_classes(found["classes"], library_files.answers["mine.onnx"])
