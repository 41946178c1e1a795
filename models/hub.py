"""Repositories of the Hugging Face Hub: the few files of one that a model needs, in a folder of ours.

    hf://org/name@v1 ─► huggingface_hub: commit, names, sizes, digests ─► what is needed ─► models.download ─► folder

Owns: which files are needed, and what is kept so that a second start asks nobody. huggingface_hub owns the address of
the Hub or its mirror, the login and its own cache (HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE, HF_HUB_CACHE). It does
not download: what it has when it is interrupted is lost. Must not read weights. Never takes code.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import logging
import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from anychip_base.extras import how_to_install
from models.addresses import ModelAddress, without_secrets
from models.contract.errors import ModelError, WeightsError, WeightsNotFoundError, reason_of
from models.contract.regular import most_bytes
from models.download import RemoteFile, check_room, downloaded, megabytes
from models.exports.files import names_beside

log = logging.getLogger("anychip.downloads")

_WHOLE = "model.safetensors", "pytorch_model.bin"
"""Names that timm and transformers give the weights of a whole network."""
_ALONE = ".safetensors", ".bin", ".onnx", ".pt", ".pth"
"""Suffixes of files that are taken without being named, if the repository has one of them; the first kind counts."""
_PARTS_OF_ONNX = "{}.data", "{}_data"
_MAIN = "main"

Facts = Mapping[str, Any]
"""Size and digest of a file of a repository, as `_file` takes them."""


def fetched(address: ModelAddress, store: Path, allow_download: bool, *, again: bool) -> Path:
    """Return the folder with a repository's needed files, or the file that the address names, downloading what is
    missing. `again`: ask which commit the revision is now. Raises ModelError, WeightsNotFoundError, WeightsError.
    """
    store = store / address.place
    note = store / f"{_quoted(address.revision or _MAIN)}{_quoted('/' + address.file) if address.file else ''}.json"
    if not again and (kept := _kept(note, store, address)) is not None:
        return kept
    if not allow_download:
        raise WeightsNotFoundError(
            f"{address.shown} is not in {store}, and nothing is downloaded now: run `anychip weights fetch "
            f"{address.shown}`."
        )
    library = _library()
    commit, listed = _listing(library, address)
    chosen = needed(listed, address)
    main, folder = next(iter(chosen)), store / commit / _quoted(next(iter(chosen.values())))
    facts = {name: listed[source] for name, source in chosen.items()}
    files = {name: _file(name, **each) for name, each in facts.items()}
    missing = {name: source for name, source in chosen.items() if not _is_here(folder / name, files[name])}
    for name, source in list(missing.items()):
        found = library.try_to_load_from_cache(address.place, source, revision=commit)
        if isinstance(found, str) and _taken(found, folder / name, files[name]):
            del missing[name]
    if missing:
        size_bytes = sum(facts[name]["size_bytes"] for name in missing)
        log.info(
            "%s is commit %s: %d files are downloaded to %s, %s (%s)",
            *(address.shown, commit, len(missing), folder, megabytes(size_bytes), ", ".join(missing)),
        )
        folder.mkdir(parents=True, exist_ok=True)
        check_room(folder, size_bytes, address.shown)
    for name in sorted(missing, key=lambda each: each == main):  # The weights last: what is wrong is known early.
        downloaded(_remote(library, address, commit, missing[name], files[name]), folder)
    content = {"commit": commit, "files": facts, "folder": str(folder.relative_to(store)), "main": main}
    partial = note.with_name(f"{note.name}.{os.getpid()}.part")
    partial.write_text(json.dumps(content))
    partial.replace(note)
    return folder / main if address.file else folder


def needed(names: Collection[str], address: ModelAddress) -> dict[str, str]:
    """Choose the files of a repository, as local name and name there: first the weights, then what is read with them.

    Raises WeightsNotFoundError if it has none that is served, or if the choice is not clear.
    """
    main = address.file or _weights_of(names, address)
    if main not in names:
        near = difflib.get_close_matches(main, names, 1)
        hint = f"; did you mean {near[0]}?" if near else "."
        raise WeightsNotFoundError(f"{address.shown}: there is no such file in the repository{hint}")
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
            raise WeightsNotFoundError(
                f"{address.shown} has {len(found)} files of weights ({', '.join(found[:20])}): name one, "
                f"{address.shown}/{found[0]}."
            )
    inside = sorted(name for name in names if name.endswith(_ALONE))
    hint = f"; name one in its folders, {address.shown}/{inside[0]}." if inside else "."
    raise WeightsNotFoundError(f"{address.shown} has no weights that are served ({', '.join(_ALONE)}){hint}")


def _quoted(name: str) -> str:
    """Return a name of one level for names that may have several."""
    return name.replace("/", "%2F")


def _kept(note: Path, store: Path, address: ModelAddress) -> Path | None:
    """Return what an earlier start has fetched, if it is whole. Raises WeightsError if a file has changed since."""
    try:
        content = json.loads(note.read_text())
        folder, main = store / str(content["folder"]), str(content["main"])
        files = [_file(name, **each) for name, each in content["files"].items()]
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


def _listing(library: Any, address: ModelAddress) -> tuple[str, Mapping[str, Facts]]:
    """Ask the Hub; without a network, or offline, read what its own cache has. Raises ModelError.

    Return the commit of the revision, and its files.
    """
    from huggingface_hub import errors

    repository, endpoint = address.place, without_secrets(library.constants.ENDPOINT)
    log.info("%s is looked up at %s", address.shown, endpoint)
    try:
        info = library.HfApi().model_info(repository, revision=address.revision or None, files_metadata=True)
    except errors.GatedRepoError:
        raise WeightsNotFoundError(_gated(library, address)) from None
    except errors.RevisionNotFoundError:
        raise WeightsNotFoundError(f"{address.shown}: the repository has no such branch, tag or commit.") from None
    except errors.RepositoryNotFoundError as error:
        raise WeightsNotFoundError(
            f"{endpoint} has no repository {repository} that you may read (HTTP {error.response.status_code}): check "
            f"the name; if it is private, set HF_TOKEN, or run `hf auth login`."
        ) from None
    except errors.HFValidationError as error:
        raise ModelError(f"{address.shown} is no address of the Hub: {reason_of(error)}.") from None
    except Exception as error:  # Its HTTP library is another in each of its versions.
        if (cached := _cached(library, address)) is not None:
            log.warning("%s: the Hub is not asked (%s); its own cache serves", address.shown, _why(error))
            return cached
        raise WeightsNotFoundError(
            f"{address.shown} could not be asked for at {endpoint} ({_why(error)}), and the Hub's cache "
            f"{library.constants.HF_HUB_CACHE} does not have it: run `hf download {repository}` where there is a "
            "network, or name a mirror in HF_ENDPOINT."
        ) from None
    return info.sha, {
        each.rfilename: {"size_bytes": each.lfs.size, "sha256": each.lfs.sha256}
        if each.lfs is not None
        else {"size_bytes": each.size or 0, "git_sha1": each.blob_id or ""}
        for each in info.siblings
    }


def _why(error: Exception) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return f"HTTP {status}" if status else without_secrets(reason_of(error))


def _gated(library: Any, address: ModelAddress) -> str:
    where = f"{without_secrets(library.constants.ENDPOINT)}/{address.place}"
    return (
        f"{address.shown} may not be read with this login: accept its terms at {where}, and set HF_TOKEN, or run "
        "`hf auth login`."
    )


def _remote(library: Any, address: ModelAddress, commit: str, source: str, file: RemoteFile) -> RemoteFile:
    from huggingface_hub.utils import build_hf_headers

    return replace(
        file,
        url=library.hf_hub_url(address.place, source, revision=commit),
        headers={key: value for key, value in build_hf_headers().items() if key.lower() == "authorization"},
        remedy="start again, which goes on where it stopped, or name a mirror in HF_ENDPOINT.",
        remedies=dict.fromkeys((401, 403), _gated(library, address)),
    )


def _file(name: str, size_bytes: int, sha256: str = "", git_sha1: str = "") -> RemoteFile:
    """Return what is known of a file: the SHA-256 of a large one, Git's SHA-1 of others. Raises WeightsError if what
    comes could not be checked, or is too large.
    """
    if not (sha256 or git_sha1):
        raise WeightsError(f"the Hub says no digest of {name}, so that what comes cannot be checked.")
    if size_bytes > most_bytes(name):
        raise WeightsError(f"{name} is larger than {most_bytes(name)} bytes.")
    return RemoteFile(name, "", sha256, "as the Hub says", git_sha1, size_bytes=size_bytes)


def _is_here(path: Path, file: RemoteFile) -> bool:
    """Return True for a file with this digest; remove another one, which a download would not replace."""
    if not path.is_file():
        return False
    with contextlib.suppress(WeightsError):
        file.check(path)
        return True
    path.unlink()
    return False


# The Hub's own cache, which `hf download` and other programs fill: snapshots/COMMIT/NAME leads to blobs/DIGEST.


def _taken(found: str, target: Path, file: RemoteFile) -> bool:
    """Take a file out of the Hub's own cache, without a copy if it is on the same disk; return False for another."""
    target.parent.mkdir(parents=True, exist_ok=True)
    blob = os.path.realpath(found)
    try:
        os.link(blob, target)
    except OSError:
        partial = target.with_name(f"{target.name}.{os.getpid()}.copy")
        shutil.copyfile(blob, partial)
        partial.replace(target)
    return _is_here(target, file)


def _cached(library: Any, address: ModelAddress) -> tuple[str, Mapping[str, Facts]] | None:
    """Return as `_listing` does what the Hub's own cache has; the names of its blobs are their digests."""
    base = Path(library.constants.HF_HUB_CACHE, f"models--{address.place.replace('/', '--')}")
    revision = address.revision or _MAIN
    with contextlib.suppress(OSError):
        revision = (base / "refs" / revision).read_text().strip()
    snapshot, files = base / "snapshots" / revision, {}
    for path in snapshot.rglob("*"):
        if path.is_symlink() and path.is_file():
            digest = Path(os.readlink(path)).name
            kind = {64: "sha256", 40: "git_sha1"}.get(len(digest))
            if kind is not None:
                files[path.relative_to(snapshot).as_posix()] = {"size_bytes": path.stat().st_size, kind: digest}
    return (snapshot.name, files) if files else None
