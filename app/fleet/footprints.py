"""Footprints: the device memory of models, measured when they were loaded and kept in the cache for the next start.

Owns: what such a measurement is valid for, its file, and the sentence that says what fits. Must not measure.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from app.config import Settings
from app.core import ServedOn
from app.fleet.process import WorkerProcess
from app.fleet.profiles import path_of, surroundings, write
from app.scheduling.residency import expected_load_s
from backends import Choice
from models import Model

log = logging.getLogger("anychip.service")

_FOLDER = "footprints"


@dataclass(frozen=True)
class Footprint:
    """Footprint of one model. `memory_bytes`: with its largest batch; `load_s`: to expect of the next load;
    `first_load_s`: of the first one, which may compile; the others find that in the cache.
    """

    model: str
    weights: str
    device: str
    engine: str
    precision: str
    batch_sizes: str
    memory_bytes: int
    load_s: float
    first_load_s: float


def keep(worker: WorkerProcess, loaded: Mapping[int, ServedOn], settings: Settings, choice: Choice) -> None:
    """Keep a worker's measurements of models, by their numbers, beside the times of the first loads, for the next start
    and `anychip devices`. Not for the loop; the worker may have unloaded the models by then.
    """
    device = choice.device(worker.device)
    if device.name != choice.device(choice.devices[0]).name:
        return  # Kept only for the first device, like profiles.
    try:
        for index, on in loaded.items():
            if (model := worker.plan.models[index]) is not None:
                _store(on, f"{choice.vendor} {device.name}", settings, choice, model)
    except OSError as error:
        log.warning("what models take of %s cannot be kept: %s", worker.device, error)


def _store(on: ServedOn, device: str, settings: Settings, choice: Choice, model: Model) -> None:
    """Keep a measurement beside the time of the first load. Raises OSError."""
    path = path_of(settings, _FOLDER, _valid_for(settings, choice, model))
    before = _read(path)
    kept = Footprint(
        model=model.name,
        weights=model.weights,
        device=device,
        engine=on.engine,
        precision=on.precision,
        batch_sizes=",".join(map(str, on.batch_sizes)),
        memory_bytes=on.memory_bytes,
        load_s=on.load_s if before is None else expected_load_s(before.load_s, on.load_s),
        first_load_s=on.load_s if before is None else before.first_load_s,
    )
    write(path, asdict(kept))


def say_what_fits(settings: Settings, choice: Choice, models: Sequence[Model]) -> None:
    """Log what fits, before anything is loaded. Not for the loop."""
    first, known = choice.device(choice.devices[0]), stored(settings, choice, models)
    fits, text = said(known, settings, models, first.memory_bytes)
    if known:
        log.log(logging.INFO if fits else logging.WARNING, "memory of %s as measured before: %s", first.id, text)


def stored(settings: Settings, choice: Choice, models: Iterable[Model]) -> dict[str, Footprint]:
    """Return the known footprints of these models here, by name. Not for the loop: it reads their weights' files."""
    found = {model.name: _read(path_of(settings, _FOLDER, _valid_for(settings, choice, model))) for model in models}
    return {name: each for name, each in found.items() if each is not None}


def every(cache_dir: Path) -> list[Footprint]:
    """Return all footprints that are kept, in order of device and model."""
    found = filter(None, map(_read, sorted((cache_dir.expanduser() / _FOLDER).glob("*.json"))))
    return sorted(found, key=lambda each: (each.device, each.model))


def said(known: Mapping[str, Footprint], settings: Settings, models: Sequence[Model], total: int) -> tuple[bool, str]:
    """Return True if these models, as far as known, fit into `total` bytes, and a sentence that says so. The largest of
    the models on demand has to fit beside the others.
    """
    stay, come = list[int](), [0]
    for name in [model.name for model in models if model.name in known]:
        (come if settings.is_on_demand(name) else stay).append(known[name].memory_bytes)
    needed = sum(stay) + max(come)
    parts = [f"{model.name} {in_words(known[model.name].memory_bytes)}" for model in models if model.name in known]
    unknown = [model.name for model in models if model.name not in known]
    text = f"{', '.join(parts) or 'nothing'}: {in_words(needed)} of {in_words(total)}"
    if unknown:
        text += f"; not loaded here so far: {', '.join(unknown)}"
    return needed <= total, text


def in_words(size_bytes: float) -> str:
    """Format a size in MB or GB, for people."""
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.0f} MB"


def _valid_for(settings: Settings, choice: Choice, model: Model) -> dict[str, str]:
    given = {name: str(getattr(settings, name)) for name in ("engine", "precision", "batch_sizes", "simulate")}
    return {**surroundings(settings, choice, model), **given, "form": type(model).__name__}


def _read(path: Path) -> Footprint | None:
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return Footprint(**document)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        log.warning("the measurement %s cannot be read and is left alone: %s", path, error)
        return None
