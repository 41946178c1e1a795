"""Commands with models that are elsewhere: over https with a digest, and a folder of timm's from a double Hub."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import save
from torchvision import models as torchvision_models

from app.cli import main
from tests.support.certificates import openssl
from tests.support.hub import Hub, pretend, serving
from tests.support.library_folders import timm_folder
from tests.support.photographs import FILES

PHOTO = str(FILES[0])
EAGER = ("--engine", "eager", "--precision", "fp32")


@pytest.fixture
def secure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Serve files over https by a certificate that SSL_CERT_FILE names."""
    if shutil.which("openssl") is None:
        pytest.skip("certificates are made by openssl")
    key, certificate = tmp_path / "host.key", tmp_path / "host.pem"
    written = "-keyout", key, "-out", certificate
    curve = "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", 2
    openssl("req", "-x509", *curve, "-subj", "/CN=host", "-addext", "subjectAltName=IP:127.0.0.1", *written)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with serving(Hub(), (certificate, key)) as running:
        yield running


def test_a_model_over_https_with_its_digest(
    secure: Hub, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = save(torchvision_models.mobilenet_v3_small(weights=None, num_classes=2).state_dict())
    digest = hashlib.sha256(weights).hexdigest()
    secure.others["/dogs.safetensors"] = weights
    secure.moved = {"/old/dogs.safetensors": "/dogs.safetensors", "/plain/dogs.safetensors": "http://127.0.0.1:9/dogs"}
    monkeypatch.setenv("ANYCHIP_CACHE_DIR", str(tmp_path / "cache"))
    where = secure.url.replace("https://", "https://user:PASSWORD@")

    def predict(path: str, sha256: str = digest) -> tuple[int, str, str]:
        address = f"{where}/{path}?signature=SECRET#sha256={sha256}"
        code = main(["predict", f"dogs=mobilenet_v3_small:{address}", PHOTO, *EAGER])
        said = capfd.readouterr()
        assert "SECRET" not in said.out + said.err
        assert "PASSWORD" not in said.out + said.err
        return code, said.out, said.err

    code, _, said = predict("plain/dogs.safetensors")
    assert (code, "is not encrypted" in said) == (1, True)
    code, _, said = predict("dogs.safetensors", "0" * 64)
    assert (code, f"has SHA-256 {digest}, not {'0' * 64}" in said) == (1, True)
    code, _, said = predict("missing.safetensors")
    assert (code, "could not be downloaded (HTTP 404); check http" in said) == (1, True)
    code, out, said = predict("old/dogs.safetensors")
    assert (code, out.startswith(PHOTO)) == (0, True)
    assert "dogs.safetensors: 0.0 MB of 6.2 MB are here, the rest is being downloaded from https://127.0.0.1" in said
    asked = len(secure.asked)
    code, again, said = predict("old/dogs.safetensors")
    assert (code, again, len(secure.asked), "download" in said) == (0, out, asked, False)


def test_a_folder_of_the_hub_is_fetched_and_predicted_with(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("timm")
    monkeypatch.setenv("HF_HUB_OFFLINE", os.environ.get("HF_HUB_OFFLINE", ""))
    timm_folder("mobilenetv3_small_050", tmp_path / "saved")
    files = {each.name: each.read_bytes() for each in (tmp_path / "saved").iterdir()}
    with serving(Hub(repository="timm/mobilenetv3_small_050.x", files={**files, "train.py": b"1/0"})) as hub:
        pretend(hub, tmp_path / "of-the-hub", monkeypatch)
        predict = ["predict", PHOTO, *EAGER, "--cache-dir", str(tmp_path / "cache")]
        fetch = ["weights", "fetch", "hf://timm/mobilenetv3_small_050.x", "--cache-dir", str(tmp_path / "cache")]
        assert main(fetch) == 0
        folder = Path(capfd.readouterr().out.strip())
    assert {each.name for each in folder.iterdir() if each.suffix != ".lock"} == {"config.json", "model.safetensors"}
    assert main([predict[0], "hf://timm/mobilenetv3_small_050.x", *predict[1:]]) == 0
    fetched = capfd.readouterr().out
    assert main([predict[0], f"x={tmp_path / 'saved'}", *predict[1:]]) == 0
    assert capfd.readouterr().out == fetched
    assert "thing " in fetched
