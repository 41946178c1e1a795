"""`/openapi.json`: its examples work as they are printed."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import httpx
import pytest

from app.http.api_description import ADDRESS, ADMIN_ADDRESS
from tests.support.service_process import running

ROOT = Path(__file__).parents[2]
_CHANGES = ("/traffic", "/unload", "/load")
"""Of models, in an order in which each can be made."""
NULL = ("--device", "null", "--engine", "auto", "--precision", "auto", "--weights", "random")


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    options = ("--models", "resnet50,yolov8n", "--weights", "sample", "--batch-sizes", "1")
    with running(tmp_path_factory.mktemp("described"), *options) as service:
        yield service


@pytest.fixture(scope="module")
def description(service):
    """All of it, as the administration's port has it."""
    return httpx.get(f"{service.admin_url}/openapi.json").json()


def examples(description):
    """Return method, path and command of every route."""
    return [
        (method, path, re.search(r"```\n(.*?)\n```", operation["description"], re.DOTALL)[1])
        for path, operations in description["paths"].items()
        for method, operation in operations.items()
    ]


def failures(service, listed, folder):
    """Examples that do not work as they are printed, run in a folder that looks like a clone of the repository."""
    (folder / "models").symlink_to(ROOT / "models")
    failed = {}
    for method, path, command in listed:
        assert ADDRESS in command or ADMIN_ADDRESS in command
        script = f'curl() {{ command curl --fail --silent --show-error "$@"; }}\n{command}\n'
        script = script.replace(ADDRESS, service.url).replace(ADMIN_ADDRESS, service.admin_url)
        ended = subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, timeout=120, check=False)
        output = ended.stdout or b"".join(path.read_bytes() for path in folder.glob("answer.bin"))
        if ended.returncode or not output:
            failed[f"{method} {path}"] = (command, ended.stderr.decode())
    return failed


def test_every_example_works_as_it_is_printed(service, description, tmp_path):
    listed = [each for each in examples(description) if not each[1].endswith(_CHANGES)]
    assert len(listed) > 20
    assert failures(service, listed, tmp_path) == {}


def test_examples_that_change_models_work_one_after_the_other(description, tmp_path):
    changes = {path.rpartition("/")[2]: each for each in examples(description) if (path := each[1]).endswith(_CHANGES)}
    listed = [changes.pop(change[1:]) for change in _CHANGES]
    assert not changes
    with running(tmp_path, "--models", "resnet50,yolov8n,yolov8n@2=yolov8n", *NULL) as service:
        (tmp_path / "clone").mkdir()
        assert failures(service, listed, tmp_path / "clone") == {}
