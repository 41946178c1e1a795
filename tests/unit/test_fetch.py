"""models.fetch: models from a double of the Hub and of a bucket on this machine, which fails in every way these do."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save
from torchvision import models as torchvision_models

from app.config import Settings
from app.serving import opening
from models import WeightsError, WeightsNotFoundError, download, fetch, fetched, open_model, parse_spec
from models.addresses import parse
from models.download import ATTEMPTS
from tests.support.hub import COMMIT, Hub, pretend, serving

pytest.importorskip("huggingface_hub")

WEIGHTS = bytes(number * 7 % 251 for number in range(100_000))
NAME = "hf://org/dogs"
FILES = {"config.json": b"{}", "model.safetensors": WEIGHTS, "model.py": b"raise SystemExit", "README.md": b"# Dogs"}


@pytest.fixture
def double(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving(Hub(files=dict(FILES))) as running:
        pretend(running, tmp_path / "of-the-hub", monkeypatch)
        monkeypatch.setattr(download.log, "handlers", [])  # A command in this process may have given it its own.
        monkeypatch.setattr(download.log, "propagate", True)
        yield running


def got(tmp_path: Path, address: str = NAME, **given: Any) -> Path:
    return fetch.fetched(parse(address), tmp_path / "weights", **given)


def content(folder: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in folder.iterdir() if each.suffix != ".lock"}


def test_of_a_repository_only_what_is_needed_comes_and_a_second_start_asks_nobody(
    double: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    folder = got(tmp_path)
    assert content(folder) == {name: FILES[name] for name in ("config.json", "model.safetensors")}
    assert double.downloads() == ["config.json", "model.safetensors"]  # what is large comes last
    assert f"{NAME} is commit {COMMIT}: 2 files are downloaded to {folder}, 0.1 MB" in caplog.text
    assert "secret-token" not in caplog.text
    asked = len(double.asked)
    assert got(tmp_path) == got(tmp_path, allow_download=False) == folder
    assert len(double.asked) == asked


def test_what_changed_in_the_cache_is_refused(double: Hub, tmp_path: Path) -> None:
    (got(tmp_path) / "model.safetensors").write_bytes(WEIGHTS[:-1] + b"?")
    with pytest.raises(WeightsError, match=r"model.safetensors has SHA-256 .*; delete it"):
        got(tmp_path)


def test_another_commit_comes_only_when_it_is_asked_for(double: Hub, tmp_path: Path) -> None:
    first = got(tmp_path)
    double.commit, double.files["config.json"] = "d" * 40, b'{"new": 1}'
    assert got(tmp_path) == first
    assert content(got(tmp_path, again=True))["config.json"] == b'{"new": 1}'
    assert content(got(tmp_path))["config.json"] == b'{"new": 1}'
    assert content(first)["config.json"] == b"{}"


def test_a_file_of_a_repository_at_a_revision(double: Hub, tmp_path: Path) -> None:
    double.files = {"onnx/model.onnx": WEIGHTS, "config.json": b"{}", "model.safetensors": WEIGHTS}
    file = got(tmp_path, f"{NAME}@v1/onnx/model.onnx")
    assert file.name == "model.onnx"
    assert content(file.parent) == {"model.onnx": WEIGHTS, "config.json": b"{}"}
    assert content(got(tmp_path, f"{NAME}@v1")) == {"model.safetensors": WEIGHTS, "config.json": b"{}"}


def test_a_download_goes_on_where_an_earlier_process_stopped(double: Hub, tmp_path: Path) -> None:
    double.cuts = [2] + [1000] * ATTEMPTS
    with pytest.raises(WeightsNotFoundError, match=r"could not be downloaded \(.*\); start again, which goes on"):
        got(tmp_path)
    assert WEIGHTS in content(got(tmp_path)).values()
    assert double.ranges[-1] == f"bytes={1000 * ATTEMPTS}-"


def test_a_login_is_sent_to_the_hub_alone(double: Hub, tmp_path: Path) -> None:
    double.token = "secret-token"
    with serving(Hub(others={"/cdn": WEIGHTS}, token="none")) as other:
        heard: list[str | None] = []
        answer = other.answer

        def hear(request: BaseHTTPRequestHandler) -> None:
            heard.append(request.headers["Authorization"])
            answer(request)

        other.answer = hear  # type: ignore[method-assign]
        double.moved[f"/org/dogs/resolve/{COMMIT}/model.safetensors"] = f"{other.url}/cdn"
        assert WEIGHTS in content(got(tmp_path)).values()
    assert heard == [None]


@pytest.mark.parametrize(
    ("address", "state", "said"),
    [
        ("hf://org/cats", {}, r"has no org/cats that you may read: accept its terms there, or set HF_TOKEN"),
        (NAME, {"token": "other"}, r"has no org/dogs that you may read: accept its terms there, or set HF_TOKEN"),
        (
            NAME,
            {"token": "other", "gated": True},
            r"HTTP 403.*accept the terms of org/dogs there, and set HF_TOKEN",
        ),
        (f"{NAME}@v9", {}, "no such branch, tag or commit"),
        (f"{NAME}/cats.pt", {}, "no such file in the repository"),
    ],
)
def test_what_the_hub_refuses_is_a_sentence_that_says_what_to_do(
    double: Hub, tmp_path: Path, address: str, state: dict[str, Any], said: str
) -> None:
    vars(double).update(state)
    with pytest.raises(WeightsNotFoundError, match=said) as raised:
        got(tmp_path, address)
    assert "\n" not in str(raised.value)
    assert "secret-token" not in str(raised.value)


def test_another_content_than_the_hub_lists_is_refused_and_does_not_stay(double: Hub, tmp_path: Path) -> None:
    double.lies = True
    with pytest.raises(WeightsError, match=r"config\.json"):
        got(tmp_path)
    assert {each.suffix for each in (tmp_path / "weights").rglob("*") if each.is_file()} == {".lock"}


# A bucket, and what a service does with all of it


def network() -> bytes:
    return save(torchvision_models.mobilenet_v3_small(weights=None, num_classes=2).state_dict())


@pytest.fixture
def bucket(double: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:
    pytest.importorskip("obstore")
    monkeypatch.setenv("AWS_ENDPOINT_URL", double.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    return double


def test_a_file_of_a_bucket_is_signed_for_and_served(
    bucket: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    weights = network()
    digest = hashlib.sha256(weights).hexdigest()
    bucket.others["/bucket/a+b/dogs.safetensors"] = weights
    spec = parse_spec(f"dogs=mobilenet_v3_small:s3://bucket/a+b/dogs.safetensors#sha256={digest}")
    model = open_model(spec, tmp_path)
    assert (model.name, model.weights, model.weights_sha256) == ("dogs", "dogs.safetensors", digest)
    assert open_model(spec, tmp_path, allow_download=False) == model
    assert bucket.asked == ["/bucket/a+b/dogs.safetensors"]
    assert "s3://bucket/a+b/dogs.safetensors is downloaded" in caplog.text
    assert "Signature" not in caplog.text


def test_a_service_fetches_when_it_starts_and_never_again(double: Hub, tmp_path: Path) -> None:
    double.files = {"dogs.safetensors": network()}
    given: dict[str, Any] = {"models": f"dogs=mobilenet_v3_small:{NAME}", "cache_dir": tmp_path}
    settings = Settings(**given)
    with pytest.raises(WeightsNotFoundError, match=f"is not here: run `anychip weights fetch {NAME}`"):
        opening.Opening().models(settings, "dogs")
    assert double.asked == []
    said: list[str] = []
    [model] = opening.Opening().models(settings, progress=said.append)
    assert (model.name, model.weights) == ("dogs", "dogs.safetensors")
    assert said[0] == "dogs is fetched; 1 models are still to be read"
    asked = len(double.asked)
    assert opening.Opening().models(settings, "dogs") == [model]
    assert len(double.asked) == asked


def test_a_pin_behind_a_repository_covers_its_files(double: Hub, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="as --models says"):
        open_model(parse_spec(f"x=timm/resnet18:{NAME}@sha256:{'0' * 64}"), tmp_path)
    assert fetched(parse_spec(f"x={NAME}"), tmp_path).weights.startswith(str(tmp_path))
    assert json.loads(next(tmp_path.rglob("main.json")).read_text())["commit"] == COMMIT
    assert fetch.log.name == download.log.name
