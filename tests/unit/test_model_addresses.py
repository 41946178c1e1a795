"""models.addresses: what people write for a model that is elsewhere, and what is shown of it."""

from __future__ import annotations

import pytest

from app import telling
from app.config import absent
from app.pace import Pace
from models import ModelError, ModelSpec, parse_spec
from models.addresses import parse, without_secrets
from models.fetch import needed

DIGEST = "0123456789abcdef" * 4
IN_BUCKET = f"s3://b/k/d.pth#sha256={DIGEST}"
PINNED = f"https://u:pw@host:8443/a/best.onnx?sig=SECRET#sha256={DIGEST}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf://org/name", ModelSpec("name", "", "hf://org/name")),
        ("x=hf://timm/resnet18.a1_in1k@v1", ModelSpec("x", "", "hf://timm/resnet18.a1_in1k@v1")),
        ("x=hf://o/n@refs/pr/1/a/b.onnx?size=64", ModelSpec("x", "", "hf://o/n@refs/pr/1/a/b.onnx", sidecar="size=64")),
        ("hf://o/n/a/b.onnx", ModelSpec("b", "", "hf://o/n/a/b.onnx")),
        (f"x=hf://o/n@sha256:{DIGEST.upper()}", ModelSpec("x", "", "hf://o/n", DIGEST)),
        ("x=timm/convnext_tiny:hf://o/n", ModelSpec("x", "timm/convnext_tiny", "hf://o/n")),
        (f"x={PINNED}", ModelSpec("x", "", PINNED, DIGEST)),
        (f"x={PINNED}?task=detect", ModelSpec("x", "", PINNED, DIGEST, "task=detect")),
        (f"https://h/a=b/m.pt@sha256:{DIGEST}", ModelSpec("m", "", f"https://h/a=b/m.pt#sha256={DIGEST}", DIGEST)),
        (f"x=resnet50:s3://b/k/d.pth#sha256={DIGEST}", ModelSpec("x", "resnet50", IN_BUCKET, DIGEST)),
    ],
)
def test_a_model_may_be_named_by_an_address(text: str, expected: ModelSpec) -> None:
    assert parse_spec(text) == expected
    assert absent(text) == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x=https://h/m.onnx", r"https://h/m\.onnx is fetched only with the SHA-256.*#sha256="),
        ("x=s3://b/m.onnx", r"s3://b/m\.onnx is fetched only with the SHA-256"),
        (f"x=https://h/m.onnx#sha256={DIGEST}@sha256:{'0' * 64}", "two different SHA-256"),
        (f"x=http://h/m.onnx#sha256={DIGEST}", "http:// is not, https:// is"),
        ("x=gs://b/k", r"gs://b/k cannot be fetched: hf://, s3:// and https:// are\. Download the file"),
        ("x=hf://name", "is no address of the Hub: hf://ORG/NAME"),
        ("x=hf://o/n/../../a", "is no address of the Hub"),
        (f"x=https://h/#sha256={DIGEST}", "does not end with the name of a file"),
        (f"x=https://h/a%2F..%2Fb#sha256={DIGEST}", "does not end with the name of a file"),
        (f"x=s3://b/a b?sig=SECRET#sha256={DIGEST}", "s3://… has a blank in it"),
        ("x=https://h:port/m.onnx", "is no address"),
        ("a b=hf://o/n", "cannot name a model"),
    ],
)
def test_another_address_is_refused_in_a_sentence(text: str, said: str) -> None:
    with pytest.raises(ModelError, match=said) as raised:
        parse_spec(text)
    assert "\n" not in str(raised.value)
    assert "SECRET" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"x={PINNED}", "x=https://host:8443/a/best.onnx"),
        ("x=hf://org/name@v1", "x=hf://org/name@v1"),
        ("HTTP 403 for https://cdn/x?X-Amz-Signature=abc, again", "HTTP 403 for https://cdn/x again"),
        ("resnet50?a=b", "resnet50?a=b"),
    ],
)
def test_no_secret_of_an_address_is_shown(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


# Which files of a repository

TRANSFORMERS = {"README.md", "config.json", "model.safetensors", "modeling.py", "preprocessor_config.json"}
BESIDE = {"config.json", "preprocessor_config.json"}


@pytest.mark.parametrize(
    ("names", "file", "chosen"),
    [
        (TRANSFORMERS | {"pytorch_model.bin", "tf_model.h5"}, "", {"model.safetensors", *BESIDE}),
        ({"config.json", "pytorch_model.bin", "a.py"}, "", {"pytorch_model.bin", "config.json"}),
        (
            {"config.json", "dogs.safetensors", "dogs.labels.txt"},
            "",
            {"dogs.safetensors", "config.json", "dogs.labels.txt"},
        ),
        ({"a.onnx", "a.onnx.data", "a.onnx_data", "b.pt"}, "", {"a.onnx", "a.onnx.data", "a.onnx_data"}),
        ({"best.pt", "args.yaml", "x/y.pt"}, "", {"best.pt"}),
        ({"a.xml", "a.bin", "metadata.yaml"}, "a.xml", {"a.xml", "a.bin", "metadata.yaml"}),
    ],
)
def test_only_what_a_model_needs_is_taken_and_no_code(names: set[str], file: str, chosen: set[str]) -> None:
    found = needed(names, parse(f"hf://o/n/{file}" if file else "hf://o/n"))
    assert found == {name: name for name in chosen}


def test_a_step_says_no_secret_of_an_address(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telling, "_PACE", Pace(15, 1))
    telling.say("opening dogs=https://user:PASSWORD@host/dogs.onnx?signature=SECRET#sha256=12, 1 of 2")
    assert capfd.readouterr().err == "opening dogs=https://host/dogs.onnx 1 of 2\n"
