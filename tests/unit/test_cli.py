"""The command: exit codes and errors of one sentence."""

import pytest

from app.access import keys
from app.cli import main
from tests.support.photographs import FILES

PHOTO = str(FILES[0])
RANDOM = ("--weights", "random", "--engine", "eager", "--precision", "fp32")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["predict", "resnet19", PHOTO], "resnet"),
        (["predict", "resnet18", "missing.jpg", *RANDOM], "missing.jpg"),
        (["predict", "resnet18", __file__, *RANDOM], "not an image"),
        (["predict", "resnet18", PHOTO, "--device", "cup", "--weights", "random"], "cpu"),
        (["predict", "resnet18", PHOTO, "--calibrate", "/nope", "--weights", "random"], "/nope is no folder"),
        (["weights", "verify"], "nothing in"),
        (["weights", "fetch", "nonsense"], "nonsense"),
        (["weights", "convert", "missing.pth", "out.safetensors"], "missing.pth"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_sentence(tmp_path, monkeypatch, capsys, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ANYCHIP_CACHE_DIR", str(tmp_path))
    assert main(arguments) == 1
    captured = capsys.readouterr()
    *_, line = captured.err.splitlines()  # Before it a slow machine's commands say how far they are.
    assert line.startswith("anychip: ")
    assert sentence in line


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        (b"batch-sizes = [1]", "there is no setting batch-sizes; did you mean batch_sizes?"),
        (b"[xyz]", "there is no setting xyz: docs/settings.md names all"),
        (b"port = true", "port: it is neither on nor off"),
        (b"cors_origins = ['*', 'app.example.com']", "cors_origins: 'app.example.com' has no scheme"),
        (b"trace_endpoint = 'localhost:4318/v1'", "trace_endpoint: 'localhost:4318/v1' has no scheme"),
        (b"port 1", "anychip.toml is no TOML in UTF-8"),
        (b"port = 1\xff", "anychip.toml is no TOML in UTF-8"),
    ],
)
def test_what_is_wrong_with_the_file_is_said(tmp_path, monkeypatch, capsys, written, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "anychip.toml").write_bytes(written)
    assert main(["weights", "list"]) == 1
    assert capsys.readouterr().err.startswith(f"anychip: {sentence}")


def test_a_shortened_option_is_refused():
    """As --timeout, which others count in seconds, would be --timeout-ms."""
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "--models", "none.onnx", "--timeout", "30"])


def test_every_file_that_is_missing_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["serve", "--models", "a=one.onnx,resnet50,b=two.pt"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "anychip: There is no file 'one.onnx' for a.",
        "There is no file 'two.pt' for b.",
    ]


@pytest.mark.parametrize(
    "command", [[], ["serve"], ["demo"], ["predict"], ["devices"], ["weights"], ["weights", "fetch"]]
)
def test_help_shows_an_example(capsys, command):
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "anychip" in text
    if command:
        assert "example: anychip" in text


def test_a_key_is_printed_once_and_its_hash_is_in_the_file(tmp_path, capsys):
    file = tmp_path / "keys.txt"
    assert main(["keys", "add", "ops", "--role", "admin", "--file", str(file)]) == 0
    [key] = capsys.readouterr().out.split()
    assert key not in file.read_text()
    found = keys.Keys(file).find(key.encode())
    assert (found.name, found.role) == ("ops", "admin")
    assert main(["keys", "add", "ops", "--file", str(file)]) == 1
    assert "a key of the name ops" in capsys.readouterr().err
