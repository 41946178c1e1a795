"""From files that libraries wrote to their own answers, by one command, in a folder whose own modules are none of ours.

Compared with: `ultralytics.YOLO.predict` (`best.pt`; `best.onnx` in test_readme.py), timm's network and transform, the
network and image processor of transformers, and PyTorch's own module (`.pt2`, `.ts`; `.onnx` in test_surroundings.py).
Several files are one service, as each start takes seconds: what is wrong with one is said with its name.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Make a current folder with modules that are named like ours; an import of one fails."""
    folder = tmp_path / "project"
    for name in ("app/__init__.py", "app/cli.py", "backends/__init__.py", "models.py", "anychip_tools.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("raise SystemExit('this is a module of the current folder')")
    return folder


def test_best_pt_of_ultralytics_and_graphs_as_pytorch_saves_them(
    anychip, project, ultralytics_files, library_files, same_boxes, same_classes
):
    theirs, own = ultralytics_files, library_files
    models = f"graph={own.folder}/graph.pt2,script={own.folder}/script.ts,cars={theirs.folder}/best.pt"
    # These are programs: one is named with its digest, which the refusal says, and the other trusted with all.
    serve = ("serve", "--device", "cpu", "--port", "0", "--models")
    said = anychip.run(*serve, models, cwd=project, status=1)
    named = re.search(r"name the file you trust as (\S+\.pt2@sha256:\w+),", said)
    assert named, said
    models = models.replace(named[1].partition("@")[0], named[1])
    with anychip.serving(*serve, models, "--trust-exported", "true", cwd=project) as service:
        same_boxes(service.predict("cars", theirs.folder / "street.jpg")["detections"], theirs.answers["best.pt"])
        for name in ("graph.pt2", "script.ts"):
            found = service.predict(name.partition(".")[0], own.folder / "small.png")
            same_classes(found["classes"], own.answers[name])


def test_folders_of_timm_and_hugging_face(anychip, project, library_files, same_classes):
    built = library_files
    models = f"dogs={built.folder}/convnext,street={built.folder}/vit"
    with anychip.serving("serve", "--models", models, "--device", "cpu", "--port", "0", cwd=project) as service:
        for model, name in (("dogs", "convnext"), ("street", "vit")):
            found = service.predict(model, built.folder / "small.png")
            same_classes(found["classes"], built.answers[name])
