"""Addresses of models that are elsewhere: `hf://org/name@v1`, `s3://bucket/key#sha256=…`, `https://host/a.onnx#sha256=…`.

Owns: their grammar, and how they are shown without secrets. Must not know how anything is fetched; imports no library.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

from models.contract.errors import ModelError

_ELSEWHERE = re.compile(
    r"(?:(?P<name>[^=:/?#]*)=)?(?:(?P<architecture>[^=:?#]+):)?(?P<address>[A-Za-z][A-Za-z0-9+.-]*://.*)", re.DOTALL
)
_PINNED = re.compile(r"(.+)@sha256:([0-9A-Fa-f]{64})", re.DOTALL)
_DIGEST = re.compile(r"sha256=([0-9A-Fa-f]{64})(?:\?(.*))?", re.DOTALL)
_PART = r"[\w-][\w.-]*"
_HUB = re.compile(rf"({_PART})/({_PART})(?:@(refs/(?:pr|convert)/{_PART}|{_PART}))?((?:/[\w-][\w.+-]*)*)", re.ASCII)
# A name of a file, as it is written to the disk.
_FILE = re.compile(r"[\w-][\w .+@()-]{0,199}")


@dataclass(frozen=True)
class ModelAddress:
    """Place of a model: a file with a digest, or a repository of the Hub.

    `text`: as it was written, without a sidecar; `place`: for `hf`, `org/name`, else the URL alone; `revision`, `file`:
    of the repository, "" if not given; `sha256`: "" only for `hf`; `sidecar`: the text behind "?" that replaces one.
    """

    scheme: str
    text: str
    place: str
    file: str = ""
    revision: str = ""
    sha256: str = ""
    sidecar: str = ""

    @property
    def file_name(self) -> str:
        """The name that the file has in its place; "" for a whole repository."""
        return PurePosixPath(self.file).name

    @property
    def model_name(self) -> str:
        """The name of a model for which none was given."""
        return PurePosixPath(self.file).stem or self.place.rpartition("/")[2]

    @property
    def shown(self) -> str:
        """The address for messages and logs, without user, password, query."""
        return without_secrets(self.text)


def is_elsewhere(text: str) -> bool:
    """Return True for an entry of `--models` or for weights that name something elsewhere."""
    return _ELSEWHERE.fullmatch(text.strip()) is not None


def split(text: str, sha256: str = "") -> tuple[str | None, str, ModelAddress] | None:
    """Return the name (None without one), the architecture and the address in `[name=][architecture:]address`.

    None: this text names nothing elsewhere. `sha256`: the digest that was written behind it, and is not in the text any
    more. Raises ModelError.
    """
    found = _ELSEWHERE.fullmatch(text.strip())
    if found is None:
        return None
    if pinned := _PINNED.fullmatch(text.strip()):
        return split(pinned[1], pinned[2].lower())
    return found["name"], found["architecture"] or "", parse(found["address"], sha256)


def parse(text: str, sha256: str = "") -> ModelAddress:
    """Parse an address. Raises ModelError for one that is not fetched."""
    scheme = text.partition("://")[0].lower()
    if any(each.isspace() or not each.isprintable() for each in text):
        raise ModelError(f"{scheme}://… has a blank in it: write %20 for one of an https:// address.")
    if scheme == "hf":
        return _of_hub(text)
    if scheme not in ("s3", "https"):
        only = "hf://, s3:// and https:// are" if scheme != "http" else "http:// is not, https:// is"
        raise ModelError(f"{without_secrets(text)} cannot be fetched: {only}. Download the file, and give its path.")
    url, _, fragment = text.partition("#")
    try:
        parts = urlsplit(url)
        is_place = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_place = False
    if not is_place:
        raise ModelError(f"{scheme}://… is no address: write {scheme}://HOST/FILE, and %40 for an @ in a password.")
    file = url.rpartition("/")[2] if scheme == "s3" else unquote(parts.path.rpartition("/")[2])
    if not _FILE.fullmatch(file):
        raise ModelError(f"{without_secrets(text)} does not end with the name of a file that can be fetched.")
    pinned = _DIGEST.fullmatch(fragment)
    if (fragment and pinned is None) or not (pinned or sha256):
        raise ModelError(f"{without_secrets(text)} is fetched only with the SHA-256 behind it: #sha256=HEX.")
    found, sidecar = (pinned[1].lower(), pinned[2] or "") if pinned else (sha256, "")
    if sha256 not in ("", found):
        raise ModelError(f"{without_secrets(text)} has two different SHA-256 behind it.")
    return ModelAddress(scheme, f"{url}#sha256={found}", url, file, "", found, sidecar)


def _of_hub(text: str) -> ModelAddress:
    written, _, sidecar = text.partition("?")
    found = _HUB.fullmatch(written.partition("://")[2])
    if found is None:
        raise ModelError(f"{without_secrets(text)} is no address of the Hub: hf://ORG/NAME[@REVISION[/FILE]].")
    place = f"{found[1]}/{found[2]}"
    return ModelAddress("hf", written, place, found[4].lstrip("/"), found[3] or "", "", sidecar)


def without_secrets(text: str) -> str:
    """Return a text whose addresses have no user, password, query and fragment, which may be secrets."""
    shown = re.sub(r"(://)[^/?#\s]*@(?=[^/?#\s])", r"\1", text)
    return re.sub(r"(://[^?#\s]*)[?#]\S*", r"\1", shown)
