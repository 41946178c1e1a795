"""Results of a file's trial, kept beside the copy of the file: the next start need not try it again.

    digests of all files + what is stated beside them + versions ─► CACHE/opened/DIGEST/.tried-KEY.json

Owns: what an answer depends on. Must not know how a file is tried. Refusals are not kept, nor anything without a copy.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from anychip_base.extras import entry_points
from models.contract.digest import OpenedFiles, digest_of_sources
from models.exports.answers import Tried, decode_tried

log = logging.getLogger(__name__)

_COUNT = ("torch", "torchvision", "numpy", "pillow", "onnxruntime", "openvino", "timm", "transformers", "safetensors")
"""Packages that read files, compute them, or are the witness."""


def kept(files: OpenedFiles, asked: Mapping[str, Any], architecture: str, find: Callable[[], Tried]) -> Tried:
    """Return the result of `find` for the files, or a kept one for the same files. Raises the errors of `find`."""
    if not files.is_copy:
        return find()
    stated = {name: value for name, value in asked.items() if name not in ("own", "probes")}  # Those are files.
    parts = json.dumps([files.digests, files.main, stated, architecture, _versions()], sort_keys=True)
    place = Path(files.folder, f".tried-{hashlib.sha256(parts.encode()).hexdigest()}.json")
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return decode_tried(place.read_bytes())
    found = find()
    with contextlib.suppress(OSError):  # No room: it is tried again.
        descriptor, partial = tempfile.mkstemp(prefix=".tried-", dir=files.folder)
        with open(descriptor, "wb") as file:
            file.write(msgspec.json.encode(found))
        os.replace(partial, place)
    return found


@cache
def _versions() -> list[str]:
    readers = {entry.module.partition(".")[0] for entry in entry_points("anychip.libraries")}
    found = [digest_of_sources(package) for package in ("models", *sorted(readers))]
    for name in _COUNT:
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return [*found, sys.version, platform.machine()]
