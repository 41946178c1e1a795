"""From an address to a file or folder on this machine, which then is like any other.

    hf://org/name ──────► models.hub ──────────┐
    s3://bucket/key ────► obstore signs it ─┐  ├─► models.download ─► CACHE/weights/fetched/…
    https://host/file ──────────────────────┴──┘

Owns: which address is fetched how, and where it is kept. Must not know what a model is. Asked only when the service or
a command begins, never by a client, and only for what a person named.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from pathlib import Path

from anychip_base.extras import how_to_install
from models import hub
from models.addresses import ModelAddress
from models.contract.errors import ModelError, WeightsNotFoundError, reason_of
from models.download import RemoteFile, downloaded

log = logging.getLogger("anychip.downloads")

_SIGNED_FOR = timedelta(hours=12)
_PATIENCE = timedelta(seconds=10)
"""Longest time for the credentials of the machine that runs this."""


def fetched(
    address: ModelAddress, weights_directory: Path, *, allow_download: bool = True, again: bool = False
) -> Path:
    """Return the file or folder of an address, downloading what is not here yet. A second start asks nobody.

    `again`: ask the Hub which commit a revision is now. Raises ModelError, WeightsNotFoundError, WeightsError.
    """
    store = weights_directory.absolute() / "fetched"
    try:
        if address.scheme == "hf":
            return hub.fetched(address, store / "hub", allow_download, again=again)
        return _file(address, store / address.sha256, allow_download)
    except OSError as error:
        raise WeightsNotFoundError(f"{store} cannot be written: {error.strerror or error}.") from error


def _file(address: ModelAddress, folder: Path, allow_download: bool) -> Path:
    here = folder / address.file_name
    said_by = "as the address says"
    if here.is_file():
        RemoteFile(here.name, "", address.sha256, said_by).check(here)
        return here
    if not allow_download:
        raise WeightsNotFoundError(
            f"{address.shown} is not in {folder}, and nothing is downloaded now: run `anychip weights fetch` with the "
            "whole address."
        )
    url, refused, moved = address.place, "check user, password or signature in the address.", {}
    if address.scheme == "s3":
        url, refused = _signed(address), "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, and the rights on the bucket."
        moved = dict.fromkeys((301, 400), "set AWS_REGION to the bucket's region.")
    remedy = "start again, which goes on where it stopped, or download the file and give its path."
    remedies = {401: refused, 403: refused, 404: f"check the address {address.shown}.", **moved}
    log.info("%s is downloaded to %s", address.shown, folder)
    return downloaded(RemoteFile(here.name, url, address.sha256, said_by, remedy=remedy, remedies=remedies), folder)


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
        raise WeightsNotFoundError(
            f"{address.shown} cannot be signed for, as there are no credentials: set AWS_ACCESS_KEY_ID and "
            f"AWS_SECRET_ACCESS_KEY, or give this machine a role ({reason_of(error)})."
        ) from None
