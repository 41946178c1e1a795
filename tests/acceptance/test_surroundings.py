"""What surrounds the command where it is at home: small containers, odd locales, other people's defaults.

A current folder with modules called like ours is what test_files.py runs in. Compared with PyTorch's own module.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

CONTAINER = """
mount --make-rprivate / && mount -t tmpfs -o size=64m tmpfs /dev/shm &&
mount --bind "$HOME/.cache" "$HOME/.cache" && mount -o remount,bind,ro "$HOME/.cache" &&
! touch "$HOME/.cache/one" 2>/dev/null && ulimit -n 256 && exec "$@"
"""


def test_a_container_with_little_shared_memory_few_files_and_a_cache_that_is_read_only(
    anychip, empty, library_files, same_classes
):
    """/dev/shm of 64 MB, as docker gives it; `ulimit -n 256`; 16 images of 12 megapixels at once."""
    (anychip.home / ".cache" / "anychip").mkdir(parents=True)
    prefix = ("unshare", "--mount", "sh", "-c", CONTAINER, "sh")
    tried = subprocess.run(
        [*prefix, "true"],
        env={"HOME": str(anychip.home), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode != 0:
        pytest.skip(f"only root can mount: {tried.stderr}")
    built = library_files
    container = replace(anychip, prefix=prefix)
    with container.serving("serve", "--models", f"mine={built.folder}/mine.onnx", "--port", "0", cwd=empty) as service:
        same_classes(service.predict("mine", built.folder / "small.png")["classes"], built.answers["mine.onnx"])
        with ThreadPoolExecutor(16) as clients:
            answers = list(clients.map(lambda _: service.predict("mine", built.folder / "large.jpg"), range(16)))
        assert answers == [answers[0]] * 16


def test_plain_locale_private_files_and_no_assertions(anychip, tmp_path, library_files, same_classes):
    """`LANG=C`, `umask 077` and Python's `-O`, in a folder whose name is not ASCII."""
    folder = tmp_path / "données 狗"
    folder.mkdir()
    for name in ("mine.onnx", "mine.json", "small.png"):
        shutil.copy(library_files.folder / name, folder)
    plain = replace(
        anychip, prefix=("sh", "-c", 'umask 077; exec "$@"', "sh"), environment={"LANG": "C", "PYTHONOPTIMIZE": "1"}
    )
    found = plain.predict(f"mine={folder}/mine.onnx", folder / "small.png", cwd=folder)
    same_classes(found["classes"], library_files.answers["mine.onnx"])
