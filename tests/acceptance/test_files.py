"""From files that libraries wrote to their own answers, by one command, in a folder whose own modules are none of ours.

Compared with: `ultralytics.YOLO.predict` (`best.pt`; `best.onnx` in test_readme.py), timm's network and transform, the
network and image processor of transformers, and PyTorch's own module (`.pt2`, `.ts`; `.onnx` in test_commands.py).
Several files are one service, as each start takes seconds: what is wrong with one is said with its name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

OURS = ("app", "models", "backends", "anychip_tools", "anychip_compat")
"""Not `anychip_base`, with which the command begins: Python looks into PYTHONPATH first."""
NAMES = (
    *OURS,
    *("torch", "torchvision", "numpy", "cv2", "PIL", "onnx", "onnxruntime", "openvino", "orjson", "msgspec"),
    *("json", "pickle", "random", "queue", "socket", "asyncio", "logging", "multiprocessing", "subprocess", "tempfile"),
    *("runpy", "signal", "struct", "pydantic"),
)
"""Ours, libraries, and modules of Python that no script of pip and no .pth file imports before the command begins."""


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    """Make a current folder with a module of each name, ours as packages, too: no process imports one."""
    folder = tmp_path / "project"
    mark = tmp_path / "imported.txt"
    text = f"import os\nopen({str(mark)!r}, 'a').write(__file__ + chr(10))\nos._exit(66)\n"
    for name in (*(f"{name}.py" for name in NAMES), *(f"{name}/__init__.py" for name in OURS)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    yield folder
    assert not mark.exists(), mark.read_text()


@pytest.fixture
def there(anychip, project):
    """Return the command that has this folder on PYTHONPATH, too."""
    return replace(anychip, environment={"PYTHONPATH": str(project)})


def test_best_pt_of_ultralytics_and_graphs_as_pytorch_saves_them(
    there, project, ultralytics_files, library_files, same_boxes, same_classes
):
    """By every kind of process: they try files, look for devices, fork, decode, compute, answer clients, read JSON."""
    theirs, own = ultralytics_files, library_files
    models = f"graph={own.folder}/graph.pt2,script={own.folder}/script.ts,cars={theirs.folder}/best.pt"
    # These are programs: one is named with its digest, which the refusal says, and the other trusted with all.
    serve = ("serve", "--device", "cpu", "--port", "0", "--ingresses", "1", "--models")
    said = there.run(*serve, models, cwd=project, status=1)
    named = re.search(r"name the file you trust as (\S+\.pt2@sha256:\w+),", said)
    assert named, said
    models = models.replace(named[1].partition("@")[0], named[1])
    with there.serving(*serve, models, "--trust-exported", "true", cwd=project) as service:
        same_boxes(service.predict("cars", theirs.folder / "street.jpg")["detections"], theirs.answers["best.pt"])
        for name in ("graph.pt2", "script.ts"):
            for in_json in (False, True):
                found = service.predict(name.partition(".")[0], own.folder / "small.png", in_json=in_json)
                same_classes(found["classes"], own.answers[name])


def test_folders_of_timm_and_hugging_face(there, project, library_files, same_classes):
    built = library_files
    models = f"dogs={built.folder}/convnext,street={built.folder}/vit"
    with there.serving("serve", "--models", models, "--device", "cpu", "--port", "0", cwd=project) as service:
        for model, name in (("dogs", "convnext"), ("street", "vit")):
            found = service.predict(model, built.folder / "small.png")
            same_classes(found["classes"], built.answers[name])
