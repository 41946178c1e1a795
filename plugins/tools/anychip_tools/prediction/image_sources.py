"""Images that `anychip predict` reads: files, directories, globs and lists.

Owns: turning an argument into paths, one at a time: a hundred thousand files need no list of them. Must not open
an image.
"""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from app.arguments import CommandError

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif"})
"""Suffixes of the files taken from a directory. A file given by name is read with any suffix."""


class ImageSource(NamedTuple):
    """File to read. `relative`: place of its drawing below the folder of drawings, without its suffix."""

    path: str
    relative: str


def find_images(arguments: Sequence[str]) -> Iterator[ImageSource]:
    """Yield every file of the arguments, in order; of a directory those of `SUFFIXES`, at any depth, by name.

    `@FILE` names a list, one path a line; `@-` reads it from standard input. Only the names of one directory at a time
    are held. Raises CommandError for a glob without a match, OSError for a list that cannot be read.
    """
    for argument in arguments:
        if argument.startswith("@"):
            yield from _listed(argument[1:])
        elif os.path.isdir(argument):
            yield from _inside(argument, "")
        elif not os.path.exists(argument) and glob.has_magic(argument):
            yield from _matching(argument)
        else:
            yield _named(argument)


def _named(path: str) -> ImageSource:
    return ImageSource(path, Path(path).stem)


def _listed(name: str) -> Iterator[ImageSource]:
    if name == "-":
        yield from (_named(line) for line in map(str.strip, sys.stdin) if line)
        return
    with open(name, encoding="utf-8") as lines:
        yield from (_named(line) for line in map(str.strip, lines) if line)


def _matching(pattern: str) -> Iterator[ImageSource]:
    found = False
    for path in sorted(glob.iglob(pattern, recursive=True)):
        found = True
        if os.path.isdir(path):
            yield from _inside(path, "")
        else:
            yield _named(path)
    if not found:
        raise CommandError(f"nothing matches {pattern}")


def _inside(folder: str, prefix: str) -> Iterator[ImageSource]:
    with os.scandir(folder) as entries:
        listed = sorted((entry.name, entry.path, entry.is_dir(follow_symlinks=False)) for entry in entries)
    for name, path, is_folder in listed:
        if is_folder:
            yield from _inside(path, f"{prefix}{name}/")
        else:
            stem, _, ending = name.rpartition(".")  # os.path.splitext takes as long as all the rest.
            if f".{ending.lower()}" in SUFFIXES and stem.strip("."):
                yield ImageSource(path, prefix + stem)
