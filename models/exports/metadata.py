"""What an exported file says of itself, and what its owner says beside it.

Owns: the keys that Ultralytics (8.0 to 8.4) and YOLOv5 write into ONNX and TorchScript files and beside those of
OpenVINO, and the sidecar `best.json`. Must not know graphs or tensors. Values in ONNX are Python literals, in
TorchScript JSON, beside OpenVINO YAML; all are read as data. Where both the file and the sidecar say something, the
sidecar holds.
"""

from __future__ import annotations

import ast
import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qsl

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from models.contract.errors import WeightsError
from models.contract.resize import ResizeHow
from models.contract.task_adapter import OWN, Takes, task_class, task_names
from models.tasks.coco import COCO_CLASSES

Layout = Literal["yolov5", "yolov8", "rows", "rtdetr", "detr", "rfdetr", "yolox", "torchvision", "classes"]
TASKS = tuple(entry.name for entry in OWN)
_MAX_TEXT = 1 << 20


class Sidecar(BaseModel):
    """`best.json` beside `best.onnx`; docs/your-network.md explains the keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    task: str | None = Field(default=None, description="One of ours, tensors, or one that another package brings")
    layout: Layout | None = None
    labels: Literal["coco"] | list[str] | dict[int, str] | None = None
    size: int | tuple[int, int] | None = None
    mean: tuple[float, float, float] | None = None
    std: tuple[float, float, float] | None = None
    scores: Literal["logits", "probabilities"] | None = None
    keypoints: tuple[int, int] | None = None
    resize: ResizeHow | None = None
    options: dict[str, Any] | None = Field(default=None, description="For a task that another package brings")


class Description(BaseModel):
    """What is known of a network of images before it is tried. `takes`: what its task takes of its outputs; `size`:
    height and width.
    """

    model_config = ConfigDict(frozen=True)

    task: str
    takes: Takes
    layout: Layout | None = None
    labels: tuple[str, ...] | None = None
    size: tuple[int, int] | None = None
    mean: tuple[float, float, float] | None = None
    std: tuple[float, float, float] | None = None
    scores: Literal["logits", "probabilities"] | None = None
    keypoints: tuple[int, int] | None = None
    resize: ResizeHow | None = None
    end_to_end: bool = False
    exporter: str = ""
    licence: str = ""


def read_sidecar(file: Path, stated: str = "") -> Sidecar | None:
    """`best.json` beside `best.onnx`, None where there is none or it is something else. Raises WeightsError.

    `stated`: the same as a query, `task=detect&size=[480,640]`: then no file is read.
    """
    beside = file.with_name(f"{file.stem}.json")
    if not stated and not beside.is_file():
        return None
    try:
        text = beside.read_text(encoding="utf-8-sig") if not stated else ""
        content = json.loads(text) if text else {name: _json(value) for name, value in parse_qsl(stated)}
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(f"{beside.name} beside {file.name} cannot be read as JSON: {str(error)[:200]}.") from error
    if not isinstance(content, dict) or not content.keys() & Sidecar.model_fields.keys():
        return None  # Labels, or of another purpose.
    try:
        sidecar = Sidecar.model_validate(content)
        if sidecar.task not in (None, *TASKS, "tensors") and sidecar.task not in task_names():
            known = ", ".join((*TASKS, "tensors", *task_names()[len(TASKS) :]))
            raise WeightsError(f"{beside.name} beside {file.name}: there is no task {sidecar.task!r}, but {known}.")
        return sidecar
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise WeightsError(f"{beside.name} beside {file.name}: {where}: {first['msg']}.") from error


def _json(text: str) -> Any:
    """A value as JSON, else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def script_metadata(file: Path) -> dict[str, Any]:
    """What the exporter put beside the code in a TorchScript or torch.export archive; empty where there is nothing."""
    try:
        with zipfile.ZipFile(file) as archive:
            for entry in archive.infolist():
                if entry.filename.endswith("/extra/config.txt") and entry.file_size <= _MAX_TEXT:
                    found = json.loads(archive.read(entry))
                    return found if isinstance(found, dict) else {}
    except (OSError, ValueError, zipfile.BadZipFile, RecursionError):
        pass
    return {}


def yaml_metadata(file: Path) -> dict[str, Any]:
    """What Ultralytics writes into `metadata.yaml` beside a network of OpenVINO, YOLOv5 into `best.yaml`; else empty.

    Raises ValueError, with a sentence, for what cannot be read.
    """
    import yaml  # Here, in the process that tries a file: the server reads none.

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """Without aliases: a few lines of them stand for more than any memory holds."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.events.AliasEvent):
                raise yaml.YAMLError("it has aliases")
            return super().compose_node(parent, index)

    for beside in (file.with_name("metadata.yaml"), file.with_suffix(".yaml")):
        if beside.is_file() and beside.stat().st_size <= _MAX_TEXT:
            try:
                found = yaml.load(beside.read_bytes(), Loader)
            except (yaml.YAMLError, ValueError, OSError, RecursionError) as error:
                line = str(error).splitlines()[0][:200]
                raise ValueError(f"{beside.name} beside it cannot be read as YAML: {line}") from error
            return found if isinstance(found, dict) else {}
    return {}


def description(
    metadata: Mapping[str, Any], sidecar: Sidecar | None, labels: Sequence[str] | None, takes: Takes | None = None
) -> Description | None:
    """What is known of the network; None where neither says that it is of a task that is known.

    `labels`: from a file beside it. `takes`: of the sidecar's task, whose class may be another package's. Raises
    ValueError, with a sentence, for what makes no sense.
    """
    values = {key: _literal(value) for key, value in metadata.items()}
    task = values.get("task")
    yolov5 = task is None and {"stride", "names"} <= values.keys()
    if sidecar is not None and sidecar.task is not None:
        task = sidecar.task
    elif yolov5:
        task = "detect"
    if takes is None:
        if task not in TASKS:
            return None
        takes = task_class(task).takes
    found = Description(
        task=str(task),
        takes=takes,
        labels=tuple(labels) if labels else _names(values.get("names")),
        size=_size(values.get("imgsz")),
        keypoints=_size(values.get("kpt_shape")),
        layout=_layout(values, takes, yolov5),
        end_to_end=_is_end_to_end(values),
        exporter=_exporter(values, yolov5),
        licence=str(values.get("license", ""))[:200],
        scores="logits" if yolov5 else "probabilities" if takes == "classes" and "task" in values else None,
    )
    if sidecar is None:
        return found
    stated = {
        name: value
        for name, value in sidecar.model_dump().items()
        if value is not None and name not in ("task", "options")
    }
    if "labels" in stated:
        stated["labels"] = _stated_labels(stated["labels"])
    if isinstance(stated.get("size"), int):
        stated["size"] = (stated["size"], stated["size"])
    return found.model_copy(update=stated)


def _literal(value: Any) -> Any:
    """A value that may be text of a Python literal; the text itself where it is none."""
    if not isinstance(value, str) or len(value) > _MAX_TEXT:
        return value
    text = value.strip()
    if not text[:1] or text[0] not in "[{(-0123456789TFN":
        return value
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return value


def _names(value: Any) -> tuple[str, ...] | None:
    if isinstance(value, Mapping):
        try:
            numbered = {int(number): name for number, name in value.items()}
        except (TypeError, ValueError):
            return None
        if sorted(numbered) != list(range(len(numbered))):
            raise ValueError("its names are not numbered from 0 on without gaps")
        value = [numbered[number] for number in range(len(numbered))]
    if not isinstance(value, list | tuple) or not value:
        return None
    if any(isinstance(name, Mapping | list | tuple | set) for name in value):
        raise ValueError("its names are no words")
    return tuple(str(name) for name in value)


def _stated_labels(value: Any) -> tuple[str, ...]:
    if value == "coco":
        return COCO_CLASSES
    if isinstance(value, dict):
        return _names(value) or ()
    return tuple(value)


def _size(value: Any) -> tuple[int, int] | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return (value, value)
    if isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(each, int) for each in value):
        return (value[0], value[1])
    return None


def _is_end_to_end(values: Mapping[str, Any]) -> bool:
    arguments = values.get("args")
    nms = arguments.get("nms") if isinstance(arguments, Mapping) else None
    return values.get("end2end") is True or nms is True


def _layout(values: Mapping[str, Any], takes: Takes, yolov5: bool) -> Layout | None:
    if takes == "classes":
        return "classes"
    if yolov5:
        return "yolov5"
    about = f"{values.get('head', '')} {values.get('description', '')}".lower()
    if "rtdetr" in about or "rt-detr" in about:
        return "rtdetr"
    return "rows" if _is_end_to_end(values) else None


def _exporter(values: Mapping[str, Any], yolov5: bool) -> str:
    if yolov5:
        return "yolov5"
    return f"ultralytics {values['version']}" if "version" in values else ""
