"""From an address to a file or folder on this machine, which then is like any other.

    hf://org/name ──────► huggingface_hub: commit, names, sizes, digests ─┐
    s3://bucket/key ────► obstore signs it ───────────────────────────────┼─► models.download ─► CACHE/weights/fetched/…
    https://host/file ────────────────────────────────────────────────────┘

Owns: which address is fetched how, the few files of a repository that a model needs, where they are kept so that a
second start asks nobody. huggingface_hub owns the address of the Hub or its mirror, and the login (HF_ENDPOINT,
HF_TOKEN). It does not download: what it has when it is interrupted is lost.
Asked only when the service or a command begins, never by a client, and only for what a person named. Never takes code.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import Any

from anychip_base.extras import how_to_install
from models.addresses import ModelAddress, without_secrets
from models.contract.errors import ModelError, WeightsError, WeightsNotFoundError, reason_of
from models.contract.files import most_bytes
from models.download import RemoteFile, downloaded, megabytes
from models.exports.files import names_beside

log = logging.getLogger("anychip.downloads")

_SIGNED_FOR = timedelta(hours=12)
_PATIENCE = timedelta(seconds=10)
"""Longest time for the credentials of the machine that runs this."""
_WHOLE = "model.safetensors", "pytorch_model.bin"
"""Names that timm and transformers give the weights of a whole network."""
_ALONE = ".safetensors", ".bin", ".onnx", ".pt", ".pth"
"""Suffixes of files that are taken without being named, if the repository has one of them; the first kind counts."""
_PARTS_OF_ONNX = "{}.data", "{}_data"
_Facts = Mapping[str, Any]
"""Size and digest of a file of a repository, as `_remote_file` takes them."""


def fetched(
    address: ModelAddress, weights_directory: Path, *, allow_download: bool = True, again: bool = False
) -> Path:
    """Return the file or folder of an address, downloading what is not here yet. A second start asks nobody.

    `again`: ask the Hub which commit a revision is now. Raises ModelError, WeightsNotFoundError, WeightsError.
    """
    store = weights_directory.absolute() / "fetched"
    try:
        if address.scheme == "hf":
            return _of_hub(address, store / "hub", allow_download, again=again)
        return _of_url(address, store / address.sha256, allow_download)
    except OSError as error:
        raise WeightsNotFoundError(f"{store} cannot be written: {error.strerror or error}.") from error


def _of_url(address: ModelAddress, folder: Path, allow_download: bool) -> Path:
    here = folder / address.file_name
    if here.is_file():
        RemoteFile(here.name, "", address.sha256).check(here)
        return here
    if not allow_download:
        raise WeightsNotFoundError(f"{address.shown} is not here: run `anychip weights fetch` with the whole address.")
    url = _signed(address) if address.scheme == "s3" else address.place
    remedy = f"check {address.shown} and the rights to read it (AWS_REGION, of a bucket), and start again."
    log.info("%s is downloaded to %s", address.shown, folder)
    return downloaded(RemoteFile(here.name, url, address.sha256, remedy=remedy), folder)


def _signed(address: ModelAddress) -> str:
    """Return a URL for one file of a bucket, which obstore signs for some hours. Raises ModelError."""
    try:
        import obstore
        from obstore.store import S3Store
    except ImportError as error:
        raise ModelError(f"s3:// needs obstore: {how_to_install('s3')} ({reason_of(error)}).") from error
    bucket, _, key = address.place.partition("://")[2].partition("/")
    patience = {"max_retries": 2, "retry_timeout": _PATIENCE}
    limits = {"connect_timeout": _PATIENCE, "timeout": _PATIENCE}
    try:
        store = S3Store(bucket, retry_config=patience, client_options=limits)
        return str(obstore.sign(store, "GET", key, _SIGNED_FOR))
    except Exception as error:  # Its errors say much of how it tried.
        raise WeightsNotFoundError(f"{address.shown} cannot be signed for: {reason_of(error)}.") from None


def _of_hub(address: ModelAddress, store: Path, allow_download: bool, *, again: bool) -> Path:
    """Return the folder with a repository's needed files, or the file that the address names."""
    store = store / address.place
    note = store / f"{_quoted(address.revision or 'main')}{_quoted('/' + address.file) if address.file else ''}.json"
    if not again and (kept := _kept(note, store, address)) is not None:
        return kept
    if not allow_download:
        raise WeightsNotFoundError(f"{address.shown} is not here: run `anychip weights fetch {address.shown}`.")
    library = _library()
    commit, listed = _listing(library, address)
    chosen = needed(listed, address)
    main, folder = next(iter(chosen)), store / commit / _quoted(next(iter(chosen.values())))
    facts = {name: listed[source] for name, source in chosen.items()}
    files = {name: _remote_file(name, **each) for name, each in facts.items()}
    missing = {name: source for name, source in chosen.items() if not _is_here(folder / name, files[name])}
    if missing:
        size_bytes = sum(facts[name]["size_bytes"] for name in missing)
        log.info(
            "%s is commit %s: %d files are downloaded to %s, %s (%s)",
            *(address.shown, commit, len(missing), folder, megabytes(size_bytes), ", ".join(missing)),
        )
    for name in sorted(missing, key=lambda each: each == main):  # The weights last: what is wrong is known early.
        downloaded(_remote(library, address, commit, missing[name], files[name]), folder)
    content = {"commit": commit, "files": facts, "folder": str(folder.relative_to(store)), "main": main}
    partial = note.with_name(f"{note.name}.{os.getpid()}.part")
    partial.write_text(json.dumps(content))
    partial.replace(note)
    return folder / main if address.file else folder


def needed(names: Collection[str], address: ModelAddress) -> dict[str, str]:
    """Choose the files to download from a repository: first the weights, then the files that are read with them.

    Returns the file's name in the repository by the name that it gets here. Raises WeightsNotFoundError if the
    repository has no weights that anychip can serve, or several.
    """
    main = address.file or _weights_of(names, address)
    if main not in names:
        raise WeightsNotFoundError(f"{address.shown}: there is no such file in the repository.")
    path = PurePosixPath(main)
    beside = [*names_beside(Path(path.name), is_graph=True)]
    if path.suffix == ".onnx":
        beside += [part.format(path.name) for part in _PARTS_OF_ONNX]
    chosen = {path.name: main}
    for name in beside:  # transformers.js keeps its networks in a folder, and their configuration above it.
        found = next((each for each in (str(path.with_name(name)), name) if each in names), None)
        if found is not None:
            chosen.setdefault(name, found)
    return chosen


def _weights_of(names: Collection[str], address: ModelAddress) -> str:
    top = sorted(name for name in names if "/" not in name)
    for name in _WHOLE:
        if name in top:
            return name
    for suffix in _ALONE:
        found = [name for name in top if name.endswith(suffix)]
        if len(found) == 1:
            return found[0]
        if found:
            raise WeightsNotFoundError(f"{address.shown} has {len(found)} files of weights: name one, as /{found[0]}.")
    inside = sorted(name for name in names if name.endswith(_ALONE))
    hint = f"; name one in its folders, {address.shown}/{inside[0]}." if inside else "."
    raise WeightsNotFoundError(f"{address.shown} has no weights that are served ({', '.join(_ALONE)}){hint}")


def _quoted(name: str) -> str:
    return name.replace("/", "%2F")


def _kept(note: Path, store: Path, address: ModelAddress) -> Path | None:
    try:
        content = json.loads(note.read_text())
        folder, main = store / str(content["folder"]), str(content["main"])
        files = [_remote_file(name, **each) for name, each in content["files"].items()]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    for file in files:
        if not (folder / file.name).is_file():
            return None
        file.check(folder / file.name)  # Other users who may write to the cache may have changed it.
    return folder / main if address.file else folder


def _library() -> Any:
    try:
        import huggingface_hub.constants
    except ImportError as error:
        raise ModelError(f"hf:// needs huggingface_hub: {how_to_install('hub')} ({reason_of(error)}).") from error
    return huggingface_hub


def _listing(library: Any, address: ModelAddress) -> tuple[str, Mapping[str, _Facts]]:
    from huggingface_hub import errors

    repository, endpoint = address.place, without_secrets(library.constants.ENDPOINT)
    log.info("%s is looked up at %s", address.shown, endpoint)
    try:
        info = library.HfApi().model_info(repository, revision=address.revision or None, files_metadata=True)
    except errors.RevisionNotFoundError:
        raise WeightsNotFoundError(f"{address.shown}: the repository has no such branch, tag or commit.") from None
    except errors.RepositoryNotFoundError:
        remedy = "accept its terms there, or set HF_TOKEN"
        raise WeightsNotFoundError(f"{endpoint} has no {repository} that you may read: {remedy}.") from None
    except Exception as error:  # Its HTTP library is another in each of its versions.
        status = getattr(getattr(error, "response", None), "status_code", None)
        why = f"HTTP {status}" if status else without_secrets(reason_of(error))
        raise WeightsNotFoundError(
            f"{address.shown} could not be asked for at {endpoint} ({why}): name a mirror in HF_ENDPOINT, or give the "
            f"folder that `hf download {repository} --local-dir FOLDER` makes where there is a network."
        ) from None
    return info.sha, {
        each.rfilename: {"size_bytes": each.lfs.size, "sha256": each.lfs.sha256}
        if each.lfs is not None
        else {"size_bytes": each.size or 0, "git_sha1": each.blob_id or ""}
        for each in info.siblings
    }


def _remote(library: Any, address: ModelAddress, commit: str, source: str, file: RemoteFile) -> RemoteFile:
    from huggingface_hub.utils import build_hf_headers

    return replace(
        file,
        url=library.hf_hub_url(address.place, source, revision=commit),
        headers={key: value for key, value in build_hf_headers().items() if key.lower() == "authorization"},
        remedy=f"start again, which goes on where it stopped; if the Hub refuses, accept the terms of {address.place} "
        "there, and set HF_TOKEN, or run `hf auth login`.",
    )


def _remote_file(name: str, size_bytes: int, sha256: str = "", git_sha1: str = "") -> RemoteFile:
    if not (sha256 or git_sha1):
        raise WeightsError(f"the Hub says no digest of {name}, so that what comes cannot be checked.")
    if size_bytes > most_bytes(name):
        raise WeightsError(f"{name} is larger than {most_bytes(name)} bytes.")
    return RemoteFile(name, "", sha256, git_sha1, size_bytes=size_bytes)


def _is_here(path: Path, file: RemoteFile) -> bool:
    """Return True for a file with this digest; remove another one, which a download would not replace."""
    if not path.is_file():
        return False
    with contextlib.suppress(WeightsError):
        file.check(path)
        return True
    path.unlink()
    return False
