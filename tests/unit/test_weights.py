"""models.publishers: downloads against a server on this machine that misbehaves in every way servers do."""

from __future__ import annotations

import hashlib
import json
import re
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
from models.contract.errors import UnknownModelError, WeightsError, WeightsNotFoundError
from models.download import ATTEMPTS, RemoteFile, downloaded
from models.weights.checkpoint import read
from tests.support.hub import Hub, refuse, serving

CONTENT = bytes(number * 7 % 251 for number in range(300_000))
SHA256 = hashlib.sha256(CONTENT).hexdigest()
NAME = f"resnet50-{SHA256[:8]}.pth"


@dataclass
class Server(Hub):
    """Any file's address has its content; it misbehaves as it is told."""

    content: bytes = CONTENT
    etag: str = '"one"'
    says_length: bool = True

    def source(self, **changes: Any) -> RemoteFile:
        source = RemoteFile(NAME, f"{self.url}/{NAME}", SHA256, size_bytes=len(CONTENT), remedy="do this instead.")
        return replace(source, **changes)

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        asked = request.headers["Range"]
        self.ranges.append(asked)
        if self.status != 200:
            refuse(request, self.status)
            return
        start = 0
        if asked and request.headers.get("If-Range", self.etag) == self.etag:
            start = int(asked.removeprefix("bytes=").rstrip("-"))
        if start >= len(self.content) > 0:
            refuse(request, 416)
            return
        request.send_response(206 if start else 200)
        if start:
            request.send_header("Content-Range", f"bytes {start}-{len(self.content) - 1}/{len(self.content)}")
        if self.says_length:
            request.send_header("Content-Length", str(len(self.content) - start))
        request.send_header("ETag", self.etag)
        request.end_headers()
        request.wfile.write(self.content[start:][: self.cuts.pop(0) if self.cuts else None])


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(Server()) as running:
        yield running


def assert_whole(path: Path) -> None:
    assert path.read_bytes() == CONTENT
    assert {file.suffix for file in path.parent.iterdir()} <= {path.suffix, ".lock"}


def test_a_file_is_downloaded_checked_and_named(server: Server, tmp_path: Path) -> None:
    path = downloaded(server.source(), tmp_path / "new" / "directory")
    assert path.name == NAME
    assert_whole(path)


def test_the_beginning_of_a_checksum_is_enough_as_torchvision_names_it(server: Server, tmp_path: Path) -> None:
    assert_whole(downloaded(server.source(sha256=SHA256[:8], size_bytes=None), tmp_path))


def test_a_broken_connection_is_taken_up_where_it_ended(server: Server, tmp_path: Path) -> None:
    server.cuts = [100_000, 50_000]
    assert_whole(downloaded(server.source(), tmp_path))
    assert server.ranges == [None, "bytes=100000-", "bytes=150000-"]


def test_a_connection_that_always_breaks_ends_with_advice_and_keeps_what_came(server: Server, tmp_path: Path) -> None:
    server.cuts = [1000] * ATTEMPTS
    with pytest.raises(WeightsNotFoundError, match=r"; do this instead\.$"):
        downloaded(server.source(), tmp_path)
    (partial,) = tmp_path.glob("*.part")
    assert partial.read_bytes() == CONTENT[: 1000 * ATTEMPTS]
    assert_whole(downloaded(server.source(), tmp_path))
    assert server.ranges[-1] == f"bytes={1000 * ATTEMPTS}-"


WHOLE, MORE = len(CONTENT), len(CONTENT) + 5


@pytest.mark.parametrize(
    ("part", "etag", "ranges"),
    [
        (CONTENT[:250_000], "", [250_000]),
        (CONTENT[:250_000], '"one"', [250_000]),
        (b"x" * 250_000, '"zero"', [250_000]),
        (b"x" * 250_000, "", [250_000, None]),
        (CONTENT, "", [WHOLE]),
        (CONTENT.ljust(MORE, b"x"), "", [MORE, None]),
        (bytes(WHOLE), "", [WHOLE, None]),
        (bytes(MORE), "", [MORE, None]),
    ],
    ids=["", "the same", "changed since", "another file's", "all", "more", "another as long", "another, longer"],
)
def test_an_earlier_attempt_is_taken_up_or_thrown_away(
    server: Server, tmp_path: Path, part: bytes, etag: str, ranges: list[int | None]
) -> None:
    partial = tmp_path / f"{NAME}.part"
    partial.write_bytes(part)
    if etag:
        partial.with_name(f"{partial.name}.etag").write_text(etag)
    assert_whole(downloaded(server.source(), tmp_path))
    assert server.ranges == [start and f"bytes={start}-" for start in ranges]


def test_a_wrong_checksum_is_refused_and_nothing_stays(server: Server, tmp_path: Path) -> None:
    server.content = CONTENT[:-1] + b"x"
    with pytest.raises(WeightsError, match="SHA-256"):
        downloaded(server.source(), tmp_path)
    assert {file.suffix for file in tmp_path.iterdir()} == {".lock"}


def test_a_wrong_size_is_refused_before_the_download(server: Server, tmp_path: Path) -> None:
    server.content = CONTENT + b"x"
    with pytest.raises(WeightsError, match=r"300001 bytes, not the 300000"):
        downloaded(server.source(), tmp_path)
    assert not list(tmp_path.glob("*.part"))


def test_a_file_cut_short_without_a_length_is_noticed(server: Server, tmp_path: Path) -> None:
    server.says_length = False
    server.cuts = [200_000]
    with pytest.raises(WeightsError, match="200000 bytes"):
        downloaded(server.source(), tmp_path)


@pytest.mark.parametrize("status", [403, 404, 500, 503])
def test_a_refusal_of_the_server_is_one_sentence_with_alternatives(server: Server, tmp_path: Path, status: int) -> None:
    server.status = status
    with pytest.raises(WeightsNotFoundError, match=rf"HTTP {status}\); do this instead") as raised:
        downloaded(server.source(), tmp_path)
    assert "\n" not in str(raised.value)


def test_no_server_is_one_sentence_with_alternatives(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/{NAME}"
        with pytest.raises(WeightsNotFoundError, match=r"could not be downloaded \(.+\); do this instead"):
            downloaded(RemoteFile(NAME, url, SHA256, remedy="do this instead"), tmp_path)


@pytest.mark.parametrize("url", ["nonsense", "ftp://127.0.0.1/x", "http://[/x", "http://127.0.0.1:99999999/x"])
def test_a_mirror_that_is_no_address_is_one_sentence(tmp_path: Path, url: str) -> None:
    with pytest.raises(WeightsNotFoundError, match="could not be downloaded"):
        weights.official_file("yolov8n", tmp_path, allow_download=True, mirror=url)


def test_a_directory_that_cannot_be_made_is_one_sentence(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(WeightsNotFoundError, match="could not be written"):
        downloaded(server.source(), tmp_path / "file" / "cache")


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


def test_every_architecture_has_a_published_file_with_a_checksum() -> None:
    for architecture in weights.PUBLISHED:
        source = weights.official_source(architecture)
        assert source.url.startswith("https://")
        assert re.fullmatch(r"[0-9a-f]{8,64}", source.sha256), source
    assert weights.official_source("yolov8n").size_bytes == 6_549_796
    assert weights.official_source("resnet50").name == "resnet50-11ad3fa6.pth"
    with pytest.raises(UnknownModelError):
        weights.official_source("resnet51")


def test_a_mirror_serves_the_same_names(server: Server, tmp_path: Path) -> None:
    source = weights.official_source("yolov8s", mirror=server.url + "/")
    assert source.url == f"{server.url}/yolov8s.pt"
    assert source.sha256 == weights.official_source("yolov8s").sha256
    server.status = 404
    with pytest.raises(WeightsNotFoundError, match=re.escape(f"{server.url}/yolov8s.pt") + ".*fetch yolov8s"):
        weights.official_file("yolov8s", tmp_path, allow_download=True, mirror=server.url)


def test_the_cache_is_listed_and_verified(tmp_path: Path) -> None:
    assert weights.cached_files(tmp_path) == []
    with pytest.raises(WeightsNotFoundError):
        weights.verify("yolov8n", tmp_path)
    path = tmp_path / "yolov8n.pt"
    path.write_bytes(b"not the file")
    assert weights.cached_files(tmp_path) == [weights.CachedFile("yolov8n", path, 12)]
    with pytest.raises(WeightsError, match="12 bytes"):
        weights.official_file("yolov8n", tmp_path, allow_download=False)
    with pytest.raises(WeightsError, match="12 bytes"):
        weights.verify("yolov8n", tmp_path)
    (tmp_path / "resnet18-f37072fd.pth").write_bytes(b"x")
    with pytest.raises(WeightsError, match="SHA-256"):
        weights.verify("resnet18", tmp_path)


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


# Conversion


def test_conversion_keeps_values_labels_and_metadata(tmp_path: Path) -> None:
    state = {"w": torch.randn(3, 4), "n": torch.tensor(5), "shared": torch.ones(2, 2).t()}
    torch.save({"state_dict": state, "names": ["cat", "Hündin"], "version": "8.3"}, tmp_path / "a.pt")
    weights.convert(tmp_path / "a.pt", tmp_path / "a.safetensors")
    found = read(tmp_path / "a.safetensors")
    assert found.labels == ("cat", "Hündin")
    assert found.metadata == {"version": "8.3"}
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
