"""Sources of weights: a server that misbehaves in every way servers do, conversion, TorchServe's archives."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from app.cli import main
from models import publishers as weights
from models.contract.errors import WeightsError, WeightsNotFoundError
from models.download import RemoteFile, downloaded
from models.weights.checkpoint import read
from tests.support.hub import Hub, refuse, serving

CONTENT = bytes(number * 7 % 251 for number in range(300_000))
SHA256 = hashlib.sha256(CONTENT).hexdigest()
NAME = f"resnet50-{SHA256[:8]}.pth"


@dataclass
class Server(Hub):
    """Any file's address has its content; it misbehaves as it is told."""

    content: bytes = CONTENT

    def source(self, **changes: Any) -> RemoteFile:
        source = RemoteFile(NAME, f"{self.url}/{NAME}", SHA256, size_bytes=len(CONTENT), remedy="do this instead.")
        return replace(source, **changes)

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        if self.status != 200:
            refuse(request, self.status)
        else:
            self.send(request, self.content)


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(Server()) as running:
        yield running


def assert_whole(path: Path) -> None:
    assert path.read_bytes() == CONTENT
    assert {file.suffix for file in path.parent.iterdir()} <= {path.suffix, ".lock"}


WHOLE, MORE = len(CONTENT), len(CONTENT) + 5


@pytest.mark.parametrize(
    ("part", "ranges"),
    [
        (CONTENT[:250_000], [250_000]),
        (b"x" * 250_000, [250_000, None]),
        (CONTENT, [WHOLE]),
        (CONTENT.ljust(MORE, b"x"), [MORE, None]),
        (bytes(WHOLE), [WHOLE, None]),
        (bytes(MORE), [MORE, None]),
    ],
    ids=["", "another file's", "all", "more", "another as long", "another, longer"],
)
def test_an_earlier_attempt_is_taken_up_or_thrown_away(
    server: Server, tmp_path: Path, part: bytes, ranges: list[int | None]
) -> None:
    partial = tmp_path / f"{NAME}.part"
    partial.write_bytes(part)
    assert_whole(downloaded(server.source(), tmp_path))
    assert server.ranges == [start and f"bytes={start}-" for start in ranges]


def test_a_wrong_size_is_refused_before_the_download(server: Server, tmp_path: Path) -> None:
    server.content = CONTENT + b"x"
    with pytest.raises(WeightsError, match=r"300001 bytes, not 300000"):
        downloaded(server.source(), tmp_path)
    assert not list(tmp_path.glob("*.part"))


def test_a_file_cut_short_without_a_length_is_noticed(server: Server, tmp_path: Path) -> None:
    server.says_length = False
    server.cuts = [200_000]
    with pytest.raises(WeightsError, match="200000 bytes"):
        downloaded(server.source(), tmp_path)


def test_no_server_is_one_sentence_with_alternatives(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/{NAME}"
        with pytest.raises(WeightsNotFoundError, match=r"could not be downloaded \(.+\); do this instead"):
            downloaded(RemoteFile(NAME, url, SHA256, remedy="do this instead"), tmp_path)


def test_whoever_wants_the_same_file_meanwhile_waits_for_it(server: Server, tmp_path: Path) -> None:
    # Threads stand for processes: the lock belongs to an open file, and each opens its own.
    start = threading.Barrier(3)

    def wanted(_: int) -> Path:
        start.wait(30)
        return downloaded(server.source(), tmp_path)

    with ThreadPoolExecutor(3) as pool:
        paths = list(pool.map(wanted, range(3)))
    assert len(server.ranges) == 1
    assert set(paths) == {tmp_path / NAME}
    assert_whole(paths[0])


# Which files


def test_weights_are_fetched_by_the_command_and_what_is_another_file_is_not_kept(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("yolov8n", "yolov8s"):
        monkeypatch.setitem(weights._YOLOV8_FILES, name, (len(CONTENT), SHA256))
    fetch = ["weights", "fetch", "--cache-dir", str(tmp_path), "--weights-mirror", server.url]
    assert main([*fetch, "yolov8n", "yolov8s"]) == 0
    found = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert [path.name for path in found] == ["yolov8n.pt", "yolov8s.pt"]
    assert all(path.is_relative_to(tmp_path) for path in found)
    for path in found:
        assert_whole(path)
    assert main(["weights", "verify", "--cache-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{path}: OK" for path in found]
    found[0].unlink()
    server.content = b"x" + CONTENT[1:]
    assert main([*fetch, "yolov8n"]) == 1
    said = capsys.readouterr()
    assert (said.out, "SHA-256" in said.err, found[0].exists()) == ("", True, False)
    assert not list(tmp_path.rglob("*.part"))


# Conversion


def test_conversion_keeps_values_and_labels(tmp_path: Path) -> None:
    state = {"w": torch.randn(3, 4), "n": torch.tensor(5), "shared": torch.ones(2, 2).t()}
    torch.save({"state_dict": state, "names": ["cat", "Hündin"]}, tmp_path / "a.pt")
    weights.convert(tmp_path / "a.pt", tmp_path / "a.safetensors")
    found = read(tmp_path / "a.safetensors")
    assert found.labels == ("cat", "Hündin")
    assert torch.equal(found.state["w"], state["w"].half())
    assert found.state["n"].dtype == torch.int64
    weights.convert(tmp_path / "a.pt", tmp_path / "b.safetensors", torch.float32)
    assert torch.equal(read(tmp_path / "b.safetensors").state["w"], state["w"])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.pt", "a.safetensors", "b.safetensors"]


def test_conversion_refuses_values_that_do_not_fit(tmp_path: Path) -> None:
    save_file({"w": torch.tensor([1e6])}, tmp_path / "a.safetensors", {"labels": json.dumps(["a"])})
    with pytest.raises(WeightsError, match="too large"):
        weights.convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    with pytest.raises(WeightsError, match="cannot be written"):
        weights.convert(tmp_path / "a.safetensors", tmp_path / "no" / "b.safetensors", torch.float32)
