"""What each worker is to load, from the settings: one plan per worker.

Must not know requests, nor how a worker is started.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from app.config import Settings, split
from app.precision.probes import calibration, probes
from app.scheduling.profiles import Profile, of_model
from app.workers.messages import Load, Tuned
from app.workers.process import WorkerPlan
from backends import Choice
from models import Model, NormalisedModel


def worker_devices(settings: Settings, choice: Choice) -> list[str]:
    """The device of each worker, in the order in which workers are started."""
    return [device for device in choice.devices for _ in range(settings.workers_per_device)]


def how_served(settings: Settings, profiles: Mapping[str, Profile], model: Model) -> Tuned:
    """What a model is served with. The form of a model that takes floats is as its images' are, and never grows."""
    how = Tuned(**of_model(settings, profiles.get(model.name)))
    return replace(how, grows=False) if isinstance(model, NormalisedModel) else how


def worker_plans(
    settings: Settings, choice: Choice, models: Sequence[Model], profiles: Mapping[str, Profile]
) -> list[tuple[str, WorkerPlan]]:
    """The device of each worker, and its plan. Computes the probes of the precision gate.

    `profiles`: of models, by name, that are to be served otherwise than the settings say.
    """
    facts = choice.backend.facts
    cache_dir = settings.cache_dir.expanduser()
    tried = tuple(probes(model) for model in models) if facts.computes else ()
    tuned = tuple(how_served(settings, profiles, model) for model in models)
    calibrations = tuple(
        calibration(model, settings.calibrate) if how.precision == "int8" else None
        for model, how in zip(models, tuned, strict=True)
    )

    def plan(device: str) -> WorkerPlan:
        load = Load(
            models=tuple(models),
            device=choice.device(device),
            engine=settings.engine,
            precision=settings.precision,
            batch_sizes=settings.ladder,
            guard=settings.guard_limits,
            plugins=split(settings.plugins),
            operator_libraries=split(settings.operator_libraries),
            probes=tried,
            calibrations=calibrations,
            cache_dir=cache_dir,
            quick=True,
            ballast=bytes(facts.ballast_bytes),
            tuned=tuned,
            decode=settings.decode,
        )
        return WorkerPlan(
            load,
            facts.variables(os.environ, cache_dir),
            forks=facts.late_environment,
            start_timeout_s=settings.start_timeout_s,
            batch_timeout_s=settings.batch_timeout_s,
            heartbeat_timeout_s=settings.heartbeat_timeout_s,
            log_style=(settings.log_level, settings.log_format),
        )

    return [(device, plan(device)) for device in worker_devices(settings, choice)]
