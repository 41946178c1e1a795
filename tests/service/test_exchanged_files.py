"""A model's files are exchanged on disk while a service runs: its workers go on serving what was opened."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import small_classifier
from tests.support.images import png
from tests.support.service_process import ServiceProcess, running


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServiceProcess, Path, bytes]]:
    """Start a service with one file; yield it, that file, and the content of another one."""
    folder = tmp_path_factory.mktemp("exchanged")
    for seed, name in enumerate(("small", "other"), 1):
        small_classifier.written(folder, name, seed)
    file = folder / "small.torchscript"
    others = (folder / "other.torchscript").read_bytes()
    models = f"small={file},other={folder / 'other.torchscript'}"
    options = ("--models", models, "--trust-exported", "true", "--device", "cpu", "--engine", "eager")
    with running(folder, *options, "--cache-dir", str(folder / "cache")) as service:
        yield service, file, others


def answer(service: ServiceProcess, name: str = "small") -> Any:
    with service.client() as client:
        found = client.post(
            f"/v1/models/{name}:predict",
            content=png(),
            headers={"Content-Type": "image/png", "X-Timeout-Ms": "240000"},  # A worker that was killed is replaced.
        )
    assert found.status_code == 200, found.text
    return [(each["label"], round(each["score"], 4)) for each in found.json()["predictions"][0]["classes"]]


def crash(service: ServiceProcess) -> None:
    for each in service.workers():
        each.kill()


def test_a_worker_after_a_crash_serves_what_was_opened_until_it_is_loaded_again(
    exchanged: tuple[ServiceProcess, Path, bytes],
) -> None:
    service, file, others = exchanged
    first = answer(service)
    with service.client() as client:
        named = client.get("/v1/models").json()["models"][0]["weights_sha256"]
    (file.parent / "new").write_bytes(others)
    os.rename(file.parent / "new", file)
    crash(service)
    assert answer(service) == first, "another file by its name"
    file.write_bytes(others[: len(others) // 2])
    crash(service)
    assert answer(service) == first, "half a file"
    file.unlink()
    crash(service)
    assert answer(service) == first, "no file"
    with service.client() as client:
        assert client.get("/v1/models").json()["models"][0]["weights_sha256"] == named
    file.write_bytes(others)
    with service.admin_client() as client:
        assert client.post("/v2/repository/models/small/load").status_code == 200
    with service.client() as client:
        assert (
            client.get("/v1/models").json()["models"][0]["weights_sha256"] == small_classifier.digest_of(file) != named
        )
    assert answer(service) != first


def test_a_damaged_copy_is_made_again_and_without_its_file_that_model_alone_is_unloaded(
    exchanged: tuple[ServiceProcess, Path, bytes],
) -> None:
    service, file, others = exchanged
    both = answer(service), answer(service, "other")
    original = file.with_name("other.torchscript")
    [copy] = (file.parent / "cache").rglob("other.torchscript")
    copy.chmod(0o600)
    copy.write_bytes(others[:-1] + b"!")
    crash(service)
    assert (answer(service), answer(service, "other")) == both
    assert small_classifier.digest_of(copy) == small_classifier.digest_of(original)
    copy.unlink()
    original.unlink()
    crash(service)
    assert answer(service) == both[0]
    with service.client() as client:
        refused = client.post("/v1/models/other:predict", content=png(), headers={"Content-Type": "image/png"})
    assert refused.status_code == 503
    assert re.search(r"other is unloaded: its copy in .* is damaged, and cannot be made again from", refused.text)
    original.write_bytes(others)
    with service.admin_client() as client:
        assert client.post("/v2/repository/models/other/load").status_code == 200
    assert (answer(service), answer(service, "other")) == both
