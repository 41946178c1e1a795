"""Models that change while the service runs: unloaded, loaded, exchanged on disk, compiled better."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from benchmarks.sample_training.generator import classification_image
from tests.support import small_classifier
from tests.support.answers import assert_error
from tests.support.images import JPEG, png
from tests.support.load import WAIT_S, Load, until
from tests.support.photographs import FILES
from tests.support.service_process import ServiceProcess, running

PHOTO = FILES[0].read_bytes()
REPOSITORY = "/v2/repository"


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    options = ("--device", "null", "--engine", "auto", "--null", "delay_ms=20", "--compat", "triton")
    options += ("--models", "kept=resnet18:random,other=resnet18:random")
    with running(tmp_path_factory.mktemp("service"), *options) as service:
        yield service


@pytest.fixture(scope="module")
def client(service):
    """Of the administration, which answers everything else, too."""
    with service.admin_client() as client:
        yield client


def states(client, **asked):
    return {each["name"]: each["state"] for each in client.post(f"{REPOSITORY}/index", json=asked).json()}


async def test_unloading_and_loading_under_load_loses_nothing(service, client):
    def post(path, **body):
        return client.post(f"{REPOSITORY}/models/other/{path}", json=body)

    async with Load(service.url, "/v1/models/kept:predict", PHOTO, clients=4) as kept:
        async with Load(service.url, "/v1/models/other:predict", PHOTO, clients=4) as other:
            await asyncio.gather(kept.answers(20), other.answers(20))
            unloaded = await asyncio.to_thread(post, "unload", parameters={"unload_dependents": False})
            await other.answers(4)
        assert unloaded.json() == {"name": "other"}
        # Those who asked before were answered, those who ask now are refused.
        assert set(other.outcomes) == {(200, "OK"), (503, "NOT_READY")}
        assert states(client) == {"kept": "READY", "other": "UNAVAILABLE"}
        assert states(client, ready=True) == {"kept": "READY"}
        refused = client.post("/v1/models/other:predict", content=PHOTO, headers=JPEG)
        assert "load" in assert_error(refused, 503, "NOT_READY")
        assert_error(client.get("/v2/models/other/ready"), 503, "NOT_READY")
        for path in ("/v2/health/ready", "/ping"):
            assert "other" in assert_error(client.get(path), 503, "NOT_READY")
        assert (await asyncio.to_thread(post, "unload")).status_code == 200, "a second time changes nothing"
        await kept.answers(20)
        assert (await asyncio.to_thread(post, "load")).json() == {"name": "other", "weights": "random"}
        await kept.answers(20)
    assert set(kept.outcomes) == {(200, "OK")}
    assert states(client) == {"kept": "READY", "other": "READY"}
    assert client.post("/v1/models/other:predict", content=PHOTO, headers=JPEG).status_code == 200
    await until(lambda: len(service.workers()) == 1)


@pytest.mark.parametrize(
    ("path", "content", "status", "code"),
    [
        ("/models/nobody/load", b"", 404, "MODEL_NOT_FOUND"),
        ("/models/other/load", b"no JSON", 400, "INVALID_REQUEST"),
        ("/models/other/load", b'{"parameters": {"file:1/model": "aGk="}}', 400, "INVALID_REQUEST"),
        ("/models/other/load", b" " * 100_000, 400, "INVALID_REQUEST"),
    ],
)
def test_requests_that_make_no_sense(client, path, content, status, code):
    assert_error(client.post(f"{REPOSITORY}{path}", content=content), status, code)


async def test_a_staged_start_serves_at_once_and_swaps_without_losing_a_request(tmp_path):
    """int8 takes its time to quantise; the second start finds it in the cache."""
    pytest.importorskip("nncf")
    options = ("--models", "resnet50", "--weights", "sample", "--engine", "auto", "--precision", "int8")
    options += ("--batch-sizes", "1", "--cache-dir", str(tmp_path / "cache"))
    folder = tmp_path / "images"
    folder.mkdir()
    for index in range(32):  # To calibrate on and to try int8 on: like those that the sample weights were trained on.
        rgb, _ = classification_image(2063, index, (500, 375))
        Image.fromarray(rgb).save(folder / f"{index}.png")
    options += ("--calibrate", str(folder))

    def served(service):
        [model] = httpx.get(f"{service.url}/v1/models", timeout=WAIT_S).json()["models"]
        return model["served_on"][0] if model["served_on"] else {"precision": "", "errors": {}, "refusals": {}}

    with running(tmp_path, *options) as service:
        assert served(service)["precision"] in ("bf16", "fp32")
        assert "takes over" in served(service)["refusals"]["openvino"]
        assert served(service)["staged"]
        async with Load(service.url, "/v1/models/resnet50:predict", PHOTO, 4) as load:
            await load.answers(20)
            await until(lambda: served(service)["precision"] == "int8")
            assert not served(service)["staged"]
            await load.answers(20)
        assert set(load.outcomes) == {(200, "OK")}
        assert set(served(service)["errors"]) == {"top1", "score", "cosine", "logit", "scale", "top1_loss"}
        assert served(service)["errors"]["top1_loss"] <= 0.01
    with running(tmp_path, *options) as service:
        assert served(service)["precision"] == "int8"


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
