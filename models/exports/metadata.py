"""Metadata of an exported file, and its owner's statements beside it.

Owns: the keys that Ultralytics (8.0 to 8.4) and YOLOv5 write into ONNX and TorchScript files and beside those of
OpenVINO, and the sidecar `best.json`. Must not know graphs or tensors. Values in ONNX are Python literals, in
TorchScript JSON, beside OpenVINO YAML; all are read as data. If both the file and the sidecar state a fact, the sidecar
holds.
"""

from __future__ import annotations

import ast
import json
import zipfile
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator

from models.contract.errors import WeightsError
from models.contract.files import read_regular, read_yaml
from models.contract.resize import GREY, Centre, Interpolation, Resize, ResizeBy, ResizeHow, Whole
from models.contract.task_adapter import OWN, Takes, task_class, task_names
from models.exports import library_files
from models.tasks.coco import COCO_CLASSES

Layout = Literal[
    "yolov5",
    "yolov8",
    "rows",
    "rtdetr",
    "detr",
    "rfdetr",
    "deformable",
    "softmax",
    "yolox",
    "torchvision",
    "mmdeploy",
    "end2end",
    "classes",
]
Scores = Literal["logits", "probabilities", "sigmoid"]
"""Form of classes' scores. `logits`: softmax is still to be done; `probabilities`: nothing is; `sigmoid`: each class
has a score of its own, whether or not the sigmoid is still to be done.
"""
Channels = Literal["rgb", "bgr"]
"""Order of an input's channels; mean and deviation are always of red, green and blue."""
Levels = Literal["levels", "floats"]
"""Content of an input. `levels`: numbers of 0 to 255, which the network itself normalises."""
TASKS = tuple(entry.name for entry in OWN)
_Side = Annotated[int, Field(strict=True, gt=0, le=library_files.MAX_SIDE)]
_Level = Annotated[int, Field(strict=True, ge=0, le=255)]
_Mean = Annotated[float, Field(strict=True, allow_inf_nan=False)]
_Deviation = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
_MAX_ENLARGED, _LEAST_MAX = 4, 2048
"""Largest side of the resized image of which an input is cut: so many times the input's, and at least that many pixels.
Every image of the model takes that memory.
"""
_SHARE = 10  # A greater mean or deviation is one of levels.
_MAX_TEXT = 1 << 20
GEOMETRY = {"resize", "resize_to", "crop", "pad", "multiple_of"}
_ONLY_OF: Mapping[str, tuple[Takes, ...]] = {
    "layout": ("boxes", "masks", "keypoints", "turned"),
    "scores": ("classes", "outputs", "boxes", "masks", "keypoints", "turned"),
    "keypoints": ("keypoints",),
}
"""Keys that have an effect only on some networks, with the forms of outputs that their tasks take."""


class _Stated(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    layout: Layout | None = None
    scores: Scores | None = None
    keypoints: tuple[int, int] | None = Field(default=None, description="their number, and how many numbers each has")
    resize: ResizeHow | None = None
    multiple_of: _Side | None = None
    channels: Channels | None = None
    input: Levels | None = None


class Sidecar(_Stated):
    """Content of `best.json` beside `best.onnx`; docs/which-file.md explains the keys."""

    size: _Side | tuple[_Side, _Side] | None = Field(default=None, description="a side, or height and width")
    mean: tuple[_Mean, _Mean, _Mean] | None = Field(default=None, description="one number or three")
    std: tuple[_Deviation, _Deviation, _Deviation] | None = Field(default=None, description="one or three over 0")
    resize_to: _Side | tuple[_Side, _Side] | None = Field(default=None, description="a side, or height and width")
    crop: float | None = Field(default=None, strict=True, gt=0, le=4, description="a share of up to 4")
    interpolation: Interpolation | None = None
    antialias: bool | None = None
    pad: _Level | tuple[_Level, _Level, _Level] | None = Field(default=None, description="a level up to 255, or three")
    resize_by: ResizeBy | None = None
    task: str | None = Field(default=None, description="the name of a task, or tensors")
    labels: Literal["coco"] | list[str] | dict[int, str] | None = Field(default=None, description='names, or "coco"')
    options: dict[str, Any] | None = Field(default=None, description="an object, for a task of another package")
    _resize_to_for: tuple[int, int] | None = PrivateAttr(None)
    """Input's size for which the folder's files say `resize_to`."""

    @field_validator("mean", "std", mode="before")
    @classmethod
    def _of_each(cls, value: Any) -> Any:
        if isinstance(value, int | float):
            value = [value]
        if isinstance(value, list | tuple) and any(isinstance(each, int | float) and each > _SHARE for each in value):
            raise ValueError("it is for pixels in 0 to 1, and not in 0 to 255: divide it by 255")
        return (*value,) * 3 if isinstance(value, list | tuple) and len(value) == 1 else value

    def resizing(self, size: tuple[int, int], usual: ResizeHow) -> Resize:
        """Return the geometry of images for an input of this size; `usual`: the default. Raises ValueError for keys
        that have no effect together with the others.
        """
        how = self.resize or usual
        if self.crop is not None and self.resize_to is not None:
            raise ValueError('"crop" and "resize_to" say the same in two ways: state one of them')
        if self.crop is None and how not in ("centre", "top-left") and self.resize_to is not None:
            raise ValueError(f'"resize_to" has no effect where "resize" is {how!r}: "centre" and "top-left" know it')
        if self.pad is not None and how not in ("top-left", "letterbox"):
            raise ValueError(f'"pad" has no effect where "resize" is {how!r}: nothing is left to fill')
        if self.multiple_of is not None and (how != "top-left" or self.multiple_of > min(size)):
            raise ValueError('"multiple_of" is for "resize": "top-left", and at most the shorter side of the input')
        if self.crop is not None and how == "top-left":
            raise ValueError('"crop" has no effect where "resize" is "top-left": all of the image is seen')
        if self.antialias and (self.interpolation == "nearest" or self.resize_by == "opencv"):
            raise ValueError('"antialias": true has no effect on "nearest", nor where OpenCV resizes: state false')
        if how == "centre" or self.crop is not None:
            return self._centre(size, how)
        if self.resize_by == "pillow":
            raise ValueError(f'"resize_by": "pillow" has no effect where "resize" is {how!r} without "crop"')
        by = self.resize_by or ("torch" if self.antialias else "opencv")
        averages = by == "torch" and self.antialias is not False and self.interpolation != "nearest"
        kernel = self.interpolation or "bilinear", averages, GREY if self.pad is None else self.pad
        if kernel[0] == "lanczos":
            raise ValueError(f'"interpolation": "lanczos" is Pillow\'s, and "resize": {how!r} does without it')
        edges = self.resize_to if isinstance(self.resize_to, tuple) else (self.resize_to or 0, 0)
        return Whole(size, how, edges[0], *kernel, edges[1], self.multiple_of or 1, by)

    def _centre(self, size: tuple[int, int], how: ResizeHow) -> Centre:
        share, resize_to = self.crop or 1.0, self._scaled(size)
        resized = resize_to or (size[0] / share, size[1] / share)
        sides = resized if isinstance(resized, tuple) else (resized,)
        most = max(_LEAST_MAX, _MAX_ENLARGED * max(size))
        if not 1 <= min(sides) <= max(sides) <= most:
            what = '"crop"' if resize_to is None else '"resize_to"'
            raise ValueError(f"{what} resizes images to {sides[-1]:.0f} pixels: 1 to {most} are possible")
        shape = int(size[0] / share), int(size[1] / share)
        keep: Literal["", "cover", "within"] = {"stretch": "", "letterbox": "within"}.get(how, "cover")  # type: ignore[assignment]
        interpolation, by = self.interpolation or "bilinear", self.resize_by or "torch"
        if interpolation in ("nearest", "lanczos"):
            if self.resize_by == "opencv" or (interpolation, self.resize_by) == ("nearest", "torch"):
                raise ValueError(f'"resize_by": "{by}" knows no "{interpolation}" where images are cut: state "pillow"')
            by = "pillow"
        if by == "pillow" and self.antialias is False and interpolation != "nearest":
            raise ValueError('"antialias": false has no effect where Pillow resizes, as with "lanczos": state true')
        kernel = interpolation, by == "pillow" or (by == "torch" and self.antialias is not False), by
        pad = 0 if self.pad is None else self.pad
        rounds = self.resize_by != "torch"  # torchvision and timm do so, transformers does not.
        if isinstance(resize_to, tuple):
            return Centre(size, 0, *kernel, resize_to, "", pad, rounds)
        if resize_to is not None or (how == "centre" and shape[0] == shape[1]):
            return Centre(size, resize_to or shape[0], *kernel, pad=pad, rounds=rounds)
        return Centre(size, 0, *kernel, shape, keep, pad, rounds)

    def _scaled(self, size: tuple[int, int]) -> int | tuple[int, int] | None:
        """Return `resize_to` in proportion to the input: else a larger one has an image with a black frame."""
        of, sides = self._resize_to_for, self.resize_to
        if of is None or of == size or sides is None:
            return sides
        if isinstance(sides, tuple):
            return sides[0] * size[0] // of[0], sides[1] * size[1] // of[1]
        return max(sides * size[0] // of[0], sides * size[1] // of[1])


class Description(_Stated):
    """Facts about a network of images before its trial. `takes`: the form of outputs for its task; `size`: height and
    width; `is_unrolled`: its loop over the images of a batch was written out for the export's.
    """

    task: str
    takes: Takes
    labels: tuple[str, ...] | None = None
    size: tuple[int, int] | None = None
    mean: tuple[float, float, float] | None = None
    std: tuple[float, float, float] | None = None
    end_to_end: bool = False
    is_unrolled: bool = False
    boxes_second: bool = False
    exporter: str = ""


def read_sidecar(file: Path, stated: str = "") -> Sidecar | None:
    """Read `best.json` beside `best.onnx`, and timm's and Hugging Face's files in its folder; None if there are none or
    they are of another purpose. Raises WeightsError.

    `stated`: the same as a query, `task=detect&size=[480,640]`: then no `best.json` is read.
    """
    config = library_files.config_of(file.parent)
    given = _stated_beside(file, stated)
    if given is not None and given.task == "tensors":
        return given
    own = {} if given is None else given.model_dump(exclude_none=True)
    implied = library_files.stated_in(file.parent, config, own) if config or given is not None else {}
    # A file knows its own, unless it takes any: then models.exports.image_trial asks for it.
    implied_size = _size(implied.pop("size", None))
    if implied.get("resize") == "top-left" and "resize" not in own and file.suffix != ".safetensors":
        size = list(library_files.size_in(file.parent) or (480, 640))
        raise WeightsError(
            f'{file.name} cannot be told which part of its input is the image: state {{"resize": "stretch", "size": '
            f"{size}}} in {file.stem}.json, or another size."
        )
    if implied.get("task") == "segment_semantic" and len(implied.get("labels", "")) == 1 and "scores" not in own:
        raise WeightsError(
            f"{library_files.CONFIG} beside {file.name} has one label, which transformers answers everywhere: state "
            f'{{"scores": "logits"}} in {file.stem}.json if it is a sigmoid\'s, and pixels under 0.5 are background.'
        )
    if given is not None and not implied:
        return given
    if own.keys() & GEOMETRY - {"pad", "multiple_of"}:
        implied = {key: value for key, value in implied.items() if key not in GEOMETRY}
    where = f"{library_files.CONFIG} beside {file.name}"
    if given is not None:
        sidecar_of(implied, where)
        where = f"{library_files.CONFIG} and {file.stem}.json beside {file.name}"
    elif not implied:
        return None
    found = sidecar_of({**implied, **own}, where)
    if "resize_to" in implied:
        found._resize_to_for = implied_size
    return found


def sidecar_of(content: Mapping[str, Any], where: str) -> Sidecar:
    """Validate these keys. Raises WeightsError with one sentence, which `where` begins."""
    try:
        return Sidecar.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(str(each) for each in first["loc"][:1])
        given = json.dumps(content.get(at), default=str)[:100]
        why = first["msg"].removeprefix("Value error, ").replace("Input should be", "it should be")
        if at not in Sidecar.model_fields:
            why = f"no such key; there are {', '.join(sorted(Sidecar.model_fields))}"
        elif first["type"] != "value_error" and (expected := Sidecar.model_fields[at].description):
            why = f"it takes {expected}"
        raise WeightsError(f"{where}: {at} is {given}: {why}.") from error


def _stated_beside(file: Path, stated: str) -> Sidecar | None:
    where = f"{file.name}?{stated}" if stated else f"{file.stem}.json beside {file.name}"
    found = None if stated else read_regular(file.with_name(f"{file.stem}.json"))
    if not stated and found is None:
        return None
    try:
        text = (found or b"").decode("utf-8-sig")
        query = [(name, _json(value)) for name, value in parse_qsl(stated, keep_blank_values=True)]
        content = json.loads(text, object_pairs_hook=_once) if text else _once(query)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{where} cannot be read: {str(error)[:200]}.") from error
    keys = set(content) if isinstance(content, dict) else set[str]()
    near = [name for name in keys if get_close_matches(name.lower(), Sidecar.model_fields, 1, 0.75)]
    if not (keys & Sidecar.model_fields.keys() or (stated and keys) or 2 * len(near) > len(keys)):
        return None  # It is of labels, or of another purpose: of a sidecar's misspelt keys, most are nearly right.
    sidecar = sidecar_of(content, where)
    useless = sorted(content.keys() - {"task"}) if sidecar.task == "tensors" else []
    if useless:
        raise WeightsError(f"{where}: {useless[0]!r} has no effect on tensors.")
    if sidecar.task not in (None, *TASKS, "tensors") and sidecar.task not in task_names():
        known = ", ".join((*TASKS, "tensors", *task_names()[len(TASKS) :]))
        raise WeightsError(f"{where}: there is no task {sidecar.task!r}, but {known}.")
    return sidecar


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return the values by name. Raises ValueError for a name that is given twice."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} is given twice: state it once")
        found[name] = value
    return found


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def script_metadata(file: Path) -> dict[str, Any]:
    """Read the exporter's text beside the code in a TorchScript or torch.export archive; empty if there is none."""
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
    """Read Ultralytics' `metadata.yaml` beside a network of OpenVINO, or YOLOv5's `best.yaml`; else empty.

    Raises ValueError, with a sentence, for unreadable text, WeightsError for a path that is no file of the folder.
    """
    for beside in (file.with_name("metadata.yaml"), file.with_suffix(".yaml")):
        content = read_regular(beside, _MAX_TEXT)
        if content is not None:
            try:
                found = read_yaml(content)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{beside.name} beside it cannot be read as YAML: {str(error)[:200]}") from error
            return found if isinstance(found, dict) else {}
    return {}


def description(
    metadata: Mapping[str, Any], sidecar: Sidecar | None, labels: Sequence[str] | None, takes: Takes | None = None
) -> Description | None:
    """Combine the facts on the network; return None if neither source names a known task.

    `labels`: from a file beside it. `takes`: of the sidecar's task, whose class may be another package's. Raises
    ValueError, with a sentence, for values that make no sense.
    """
    values = {key: _literal(value) for key, value in metadata.items()}
    is_semantic = values.get("task") == "semantic"  # Ultralytics letterboxes these networks' images, too.
    task = "segment_semantic" if is_semantic else values.get("task")
    yolov5 = task is None and {"stride", "names"} <= values.keys()
    if sidecar is not None and sidecar.task is not None:
        task = sidecar.task
    elif yolov5:
        task = "detect"
    if takes is None:
        if task not in TASKS:
            return None
        takes = task_class(task).takes
    names = tuple(labels) if labels else _names(values.get("names"))
    if is_semantic and names is not None and len(names) == 1:
        names = ("background", *names)
    arguments = values.get("args")  # Ultralytics' `nms=True` finds nothing in images beyond those it was exported for.
    has_nms = isinstance(arguments, Mapping) and arguments.get("nms") is True
    end_to_end = has_nms or values.get("end2end") is True
    found = Description(
        task=str(task),
        takes=takes,
        labels=names,
        size=_size(values.get("imgsz")),
        keypoints=_size(values.get("kpt_shape")),
        layout=_layout(values, takes, yolov5, end_to_end),
        resize="letterbox" if is_semantic else None,
        end_to_end=end_to_end,
        is_unrolled=has_nms,
        exporter="yolov5" if yolov5 else f"ultralytics {values['version']}"[:100] if "version" in values else "",
        scores=None if takes != "classes" else "logits" if yolov5 else "probabilities" if "task" in values else None,
    )
    if sidecar is None:
        return found
    stated = {
        name: value
        for name, value in sidecar.model_dump().items()
        if value is not None and name in Description.model_fields and name != "task"
    }
    for name, takers in _ONLY_OF.items():
        if name in stated and takes not in takers:
            raise ValueError(f'"{name}" has no effect on a network for {task}')
    if "labels" in stated:
        stated["labels"] = COCO_CLASSES if stated["labels"] == "coco" else _names(stated["labels"]) or ()
    if isinstance(stated.get("size"), int):
        stated["size"] = (stated["size"], stated["size"])
    return found.model_copy(update=stated)


def _literal(value: Any) -> Any:
    if not isinstance(value, str) or len(value) > _MAX_TEXT:
        return value
    text = value.strip()
    if not text[:1] or text[0] not in "[{(-0123456789TFN":
        return value
    try:
        return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
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


def _size(value: Any) -> tuple[int, int] | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return (value, value)
    if isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(each, int) for each in value):
        return (value[0], value[1])
    return None


def _layout(values: Mapping[str, Any], takes: Takes, yolov5: bool, end_to_end: bool) -> Layout | None:
    if takes == "classes":
        return "classes"
    if yolov5:
        return "yolov5"
    about = f"{values.get('head', '')} {values.get('description', '')}".lower()
    if "rtdetr" in about or "rt-detr" in about:
        return "rtdetr"
    return "rows" if end_to_end else None
