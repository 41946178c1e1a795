"""From the file that a library wrote to its own answer, by one command, in a folder whose own modules are none of ours.

Compared with: `ultralytics.YOLO.predict` (`best.pt`; `best.onnx` in test_readme.py), timm's network and transform, the
network and image processor of transformers, and PyTorch's own module (`.pt2`, `.ts`; `.onnx` in test_surroundings.py).
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A current folder with modules that are called like ours: whatever imports them fails."""
    folder = tmp_path / "project"
    for name in ("app/__init__.py", "app/cli.py", "backends/__init__.py", "models.py", "anychip_tools.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("raise SystemExit('this is a module of the current folder')")
    return folder


def test_best_pt_of_ultralytics(anychip, project, ultralytics_files, same_boxes):
    built = ultralytics_files
    found = anychip.predict(f"cars={built.folder}/best.pt", built.folder / "street.jpg", cwd=project)
    same_boxes(found["detections"], built.answers["best.pt"])


@pytest.mark.parametrize("name", ["convnext", "vit"])
def test_a_folder_of_timm_and_of_hugging_face(anychip, project, library_files, same_classes, name):
    built = library_files
    found = anychip.predict(f"dogs={built.folder}/{name}", built.folder / "small.png", cwd=project)
    same_classes(found["classes"], built.answers[name])


@pytest.mark.parametrize("name", ["graph.pt2", "script.ts"])
def test_a_network_of_ones_own_as_pytorch_saves_it(anychip, project, library_files, same_classes, name):
    built = library_files
    digest = hashlib.sha256((built.folder / name).read_bytes()).hexdigest()
    model = f"mine={built.folder}/{name}@sha256:{digest}"
    found = anychip.predict(model, built.folder / "small.png", cwd=project)
    same_classes(found["classes"], built.answers[name])
