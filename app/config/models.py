"""Settings of models and their files."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field, field_validator

from app.config.values import CommaSeparated, ModelList, is_cascade, split, written_in

if TYPE_CHECKING:
    from models.addresses import ModelAddress

_FILES = (".onnx", ".pt2", ".ts", ".torchscript", ".xml", ".om", ".pt", ".pth", ".safetensors")
"""Endings of models' files (models.exports.exported, models.weights.checkpoint, which load PyTorch)."""
_BEHIND = re.compile(r"(\?.*)?(@sha256:[0-9A-Fa-f]{64})?$", re.DOTALL)


def _parts(entry: str) -> tuple[str, str, Path]:
    """Return the name in an entry of `models`, the text after it, and that text as a path, which may not exist.

    This only reads text: models.catalog interprets entries, and takes seconds to load.
    """
    name, equals, text = _BEHIND.sub("", entry.strip(), count=1).partition("=")
    name, text = (name, text) if equals else ("", name)
    head, colon, chosen = text.partition(":")
    return name, text, Path(chosen if colon and not head.endswith(_FILES) else text).expanduser()


def _address(entry: str) -> ModelAddress | None:
    """Return the address in an entry of `models`; None without one. Raises ModelError."""
    from models import addresses  # Here, as `--help` has to answer at once.

    found = addresses.split(entry)
    return None if found is None else found[2]


def absent(entry: str) -> str:
    """Return the sentence for an entry of `models` whose file is missing; "" if it exists, or if it names no file.

    Raises ModelError for an address from which nothing is fetched.
    """
    if _address(entry) is not None:
        return ""
    name, _, path = _parts(entry)
    is_path = path.name.endswith(_FILES) or str(path).startswith(("/", "./", "../"))
    if not is_path or path.exists():
        return ""
    others = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, others, 1)
    hint = f"; did you mean {str(path.parent / near[0])!r}?" if near else "."
    return f"There is no file {str(path)!r} for {name or path.stem}{hint}"


class ModelSettings(BaseModel):
    """Models and their files"""

    models: ModelList = Field(
        "resnet50,yolov8n",
        description="Models to serve: names, or name=architecture:weights (official, sample, random or a path), "
        "or name=file.onnx, .pt2, .ts, or 'name=detector > classifier'; @sha256:… behind a file: that one alone; or "
        "name=hf://ORG/NAME, s3://… or https://…#sha256=…, downloaded before the service starts (docs/model-files.md)",
    )
    weights: str = Field("official", description="Weights of models that name none: official, sample, random, a path")
    weights_mirror: str = Field(
        "",
        description="Address that official weights are fetched from, in place of their publishers'; checksums stay",
    )
    trust_exported: bool = Field(
        False,
        description="Whether .pt2 and .ts files, which are programs, are read though --models does not name their "
        "SHA-256 (name=file.pt2@sha256:…)",
    )
    tiles: CommaSeparated = Field(
        "",
        description="Detectors that look at large images in tiles where a request says nothing of it: name=640, or "
        "name=640:0.2 with the overlap (docs/answers.md)",
    )
    cache_dir: Path = Field(
        Path("~/.cache/anychip"),
        description="Folder for downloaded weights, compiled engines and what the gate and the vendors' compilers "
        "keep; where XDG_CACHE_HOME is set, anychip in there",
        validate_default=True,
    )
    models_on_demand: CommaSeparated = Field(
        "",
        description="Models that are loaded when they are asked for, and make room for others: names, or all, or all "
        "but some, as in all,-dogs; the others stay loaded (docs/many-models.md)",
    )
    traffic: CommaSeparated = Field(
        "",
        description="Shares of the requests for a model that each of its versions answers: dogs=1:95,2:5; all are "
        "version 1's where nothing is said (docs/rollout.md)",
    )
    profiles: bool = Field(
        True,
        description="Take up what anychip tune, or the first start, has found best here; what is set otherwise stays "
        "(docs/tools.md)",
    )

    @field_validator("cache_dir")
    @classmethod
    def _where_the_user_has_caches(cls, path: Path) -> Path:
        """Follow the XDG Base Directory Specification 0.8: a path there that is not absolute is ignored."""
        caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
        return caches / "anychip" if path == Path("~/.cache/anychip") and caches.is_absolute() else path

    @property
    def model_specs(self) -> tuple[str, ...]:
        """Return the entries of `models`, and each model of a cascade that has no entry of its own."""
        found = [entry for entry in split(self.models) if not is_cascade(entry)]
        for entry in self.stage_specs:
            for text in written_in(entry):
                if text not in found and not any(each.partition("=")[0].strip() == text for each in found):
                    found.append(text)
        return tuple(found)

    @property
    def shown_models(self) -> str:
        """Return `models` for people and logs, its addresses without user, password, query and digest."""
        from models.addresses import without_secrets

        return ",".join(map(without_secrets, split(self.models)))

    @property
    def stage_specs(self) -> tuple[str, ...]:
        """Return the cascades of `models`: `name=detector?options > classifier`, `name=KIND:REST`."""
        return tuple(entry for entry in split(self.models) if is_cascade(entry))

    def is_on_demand(self, model: str) -> bool:
        """Return True if a model of this name is loaded on demand."""
        named = split(self.models_on_demand)
        return model in named or ("all" in named and f"-{model}" not in named)

    @property
    def weights_dir(self) -> Path:
        """Return the folder of downloaded weights."""
        return self.cache_dir.expanduser() / "weights"
