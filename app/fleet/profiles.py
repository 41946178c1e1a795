"""Records of models on a device in the cache folder: profiles, the settings found best; and footprints.

`anychip tune` finds a profile by trial. A first start finds batch sizes alone (workers.load), for the engine and
precision that it was given. A profile of tune comes before one of a start. A footprint is the device memory of a model,
measured when it was loaded.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import runpy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from app.config import Settings
from app.config.values import sizes_of
from app.core import Loaded
from app.fleet.process import WorkerProcess
from app.precision.described import weights_key
from app.scheduling.residency import expected_load_s
from backends import Choice, host
from backends.vendors.drivers import driver_version
from models import Model

T = TypeVar("T")

log = logging.getLogger("anychip.service")

OF_MODEL = ("engine", "precision", "batch_sizes")
OF_SERVICE = ("decoders", "workers_per_device")
"""Settings of the whole service: taken from a profile if the service has one model."""


@dataclass(frozen=True)
class Profile:
    """The best settings found. `images_per_s`, `p99_ms`: as measured then; `lead`: speed as a multiple of that without.

    `name`: the profile's name in /v1/models.
    """

    name: str
    engine: str
    precision: str
    batch_sizes: str
    decoders: int
    workers_per_device: int
    images_per_s: float
    p99_ms: float
    lead: float


@cache
def _torch_version() -> str:
    found = find_spec("torch")
    folder = Path(found.origin or "") if found else Path()
    return str(runpy.run_path(str(folder.with_name("version.py")))["__version__"])


def surroundings(settings: Settings, choice: Choice, model: Model) -> dict[str, str]:
    """Return what a profile is valid for: another card, driver, PyTorch or file wants another profile."""
    device = choice.device(choice.devices[0])
    return {
        "device": f"{choice.vendor} {device.name}",
        "count": str(len(choice.devices)),
        "driver": driver_version(choice.backend.facts.machine.driver),
        "torch": _torch_version(),
        "cores": str(host.core_count()),
        "null": settings.null,
        "weights": weights_key(model) or f"{model.architecture} {model.weights} {len(model.labels)}",
    }


def store(profile: Profile, settings: Settings, choice: Choice, model: Model) -> Path:
    """Keep a profile, in place of an earlier one; return its file. Raises OSError."""
    return _write(profile, settings, surroundings(settings, choice, model), model)


def _write(profile: Profile, settings: Settings, valid_for: Mapping[str, str], model: Model) -> Path:
    path = path_of(settings, "profiles", valid_for)
    write(path, {"valid_for": valid_for, "made_by": _maker(model), **asdict(profile)})
    return path


def store_sizes(sizes: Sequence[int], settings: Settings, choice: Choice, model: Model) -> Path:
    """Keep the batch sizes that a start has found. Raises OSError."""
    name = f"batch sizes found at a start, {time.strftime('%Y-%m-%d')}"
    values: dict[str, Any] = {each: getattr(settings, each) for each in (*OF_MODEL, *OF_SERVICE)}
    values["batch_sizes"] = ",".join(map(str, sizes))
    found = Profile(name, **values, images_per_s=0.0, p99_ms=0.0, lead=1.0)
    return _write(found, settings, _of_start(settings, choice, model), model)


def stored_sizes(settings: Settings, choice: Choice, model: Model) -> Profile | None:
    """Return the profile that a start has stored for a model with these settings but for batch sizes; None without."""
    found = _read(settings, _of_start(settings, choice, model), model)
    kept = {name: getattr(settings, name) for name in (*OF_MODEL, *OF_SERVICE) if name != "batch_sizes"}
    return None if found is None else replace(found, **kept)


def _of_start(settings: Settings, choice: Choice, model: Model) -> dict[str, str]:
    of_device = {"memory": str(choice.device(choice.devices[0]).memory_bytes)}
    given = {name: str(getattr(settings, name)) for name in ("engine", "precision", "workers_per_device")}
    return {**surroundings(settings, choice, model), **of_device, **given, "models": settings.shown_models}


def stored(settings: Settings, choice: Choice, model: Model) -> Profile | None:
    """Return the profile of tune for a model here; None if there is none, or none that can be read."""
    return _read(settings, surroundings(settings, choice, model), model)


def _maker(model: Model) -> dict[str, str]:
    file = model.files.source if model.files else model.weights_file
    return {"user": str(os.getuid()), "file": str(Path(file).absolute()) if file else ""}


def _read(settings: Settings, valid_for: Mapping[str, str], model: Model) -> Profile | None:
    """Read a profile; take that of another user, or of a copy of the file, only if `--profiles true` was given."""
    path = path_of(settings, "profiles", valid_for)

    def made(document: dict[str, Any]) -> Profile | None:
        profile = Profile(**{each.name: document[each.name] for each in fields(Profile)})
        Settings(**{name: getattr(profile, name) for name in (*OF_MODEL, *OF_SERVICE)})
        if document.get("made_by") == _maker(model) or "profiles" in settings.model_fields_set:
            return profile
        log.info("%s: %s was found by another user or in another folder; --profiles true takes it", model.name, path)
        return None

    return _document(path, "profile", made)


def _document(path: Path, kind: str, made: Callable[[dict[str, Any]], T | None]) -> T | None:
    try:
        return made(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("the %s %s cannot be read and is left alone: %s", kind, path, error)
        return None


def taken_up(settings: Settings, choice: Choice, models: Sequence[Model]) -> tuple[Settings, dict[str, Profile]]:
    """Return the settings, completed by profiles if not given, and the profile of each model that has one.

    With several models only the settings that may differ by model change: `of_model`.
    """
    if not settings.profiles:
        return settings, {}
    found = {model.name: stored(settings, choice, model) or stored_sizes(settings, choice, model) for model in models}
    profiles = {name: profile for name, profile in found.items() if profile is not None}
    for name, profile in profiles.items():
        log.info("%s: profile %s", name, profile.name)
    if len(models) != 1 or not profiles:
        return settings, profiles
    [profile] = profiles.values()
    free = [name for name in OF_SERVICE if name not in settings.model_fields_set]
    return settings.model_copy(update={name: getattr(profile, name) for name in free}), profiles


def of_model(settings: Settings, profile: Profile | None) -> Mapping[str, Any]:
    """Return engine, precision and batch sizes for one model: as given, else of its profile, else the defaults.

    `grows`: no batch sizes were given, and none are known yet. `--batch-sizes auto` counts as not given.
    """
    given = settings.model_fields_set - ({"batch_sizes"} if settings.batch_sizes == "auto" else set())
    chosen = {name: getattr(settings if profile is None or name in given else profile, name) for name in OF_MODEL}
    grows = settings.profiles and chosen["batch_sizes"] == "auto"
    return {**chosen, "batch_sizes": sizes_of(chosen["batch_sizes"]), "grows": grows}


def path_of(settings: Settings, folder: str, valid_for: Mapping[str, str]) -> Path:
    """Return the file, in a folder of the cache, that is valid for `valid_for`."""
    key = hashlib.sha256(json.dumps(valid_for, sort_keys=True).encode()).hexdigest()[:24]
    return settings.cache_dir.expanduser() / folder / f"{key}.json"


def write(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document to a file of the cache: a reader meanwhile finds the old one or the new one. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    part.replace(path)


@dataclass(frozen=True)
class Footprint:
    """Footprint of one model. `memory_bytes`: with its largest batch; `load_s`: to expect of the next load."""

    model: str
    memory_bytes: int
    load_s: float


def keep_footprints(worker: WorkerProcess, loaded: Sequence[Loaded], settings: Settings, choice: Choice) -> None:
    """Keep a worker's measurements of models for the next start. Not for the loop; the worker may have unloaded the
    models by then.
    """
    if choice.device(worker.device).name != choice.device(choice.devices[0]).name:
        return  # Kept only for the first device, like profiles.
    try:
        for on in loaded:
            if (model := worker.plan.models[on.model]) is not None:
                path = _footprint_path(settings, choice, model)
                before = _read_footprint(path)
                load_s = on.load_s if before is None else expected_load_s(before.load_s, on.load_s)
                write(path, asdict(Footprint(model.name, on.memory_bytes, load_s)))
    except OSError as error:
        log.warning("what models take of %s cannot be kept: %s", worker.device, error)


def footprints(settings: Settings, choice: Choice, models: Iterable[Model]) -> dict[str, Footprint]:
    """Return the known footprints of these models here, by name. Not for the loop: it reads their weights' files."""
    found = {model.name: _read_footprint(_footprint_path(settings, choice, model)) for model in models}
    return {name: each for name, each in found.items() if each is not None}


def in_words(size_bytes: float) -> str:
    """Format a size in MB or GB, for people."""
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.0f} MB"


def _footprint_path(settings: Settings, choice: Choice, model: Model) -> Path:
    given = {name: str(getattr(settings, name)) for name in ("engine", "precision", "batch_sizes", "simulate")}
    valid_for = {**surroundings(settings, choice, model), **given, "form": type(model).__name__}
    return path_of(settings, "footprints", valid_for)


def _read_footprint(path: Path) -> Footprint | None:
    return _document(path, "measurement", lambda document: Footprint(**document))
