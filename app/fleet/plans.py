"""Plans of workers, from the settings: what each one loads. Must not know requests, nor how a worker is started."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from anychip_base.interpreter import bare_environment
from app.config import Settings
from app.config.values import split
from app.fleet.profiles import Profile, of_model
from app.precision.probes import calibration
from app.worker.messages import PROGRAMS, ModelPlan, WorkerPlan
from backends import Choice
from models import Model, NormalisedModel

CONFINED = "confined"
"""Folder in the cache of workers that are confined."""
_HEARTBEAT_TIMEOUT_S = 10.0


def worker_devices(settings: Settings, choice: Choice) -> list[str]:
    """Return the device of each worker, in the order in which workers are started."""
    return [device for device in choice.devices for _ in range(settings.workers_per_device)]


def how_served(settings: Settings, profiles: Mapping[str, Profile], model: Model) -> ModelPlan:
    """Return how a model is served. The form that takes floats is served as the model of images, and never grows."""
    how = ModelPlan(model, **of_model(settings, profiles.get(model.name)))
    image_model = model.image_model if isinstance(model, NormalisedModel) else model
    on_demand = settings.is_on_demand(image_model.name)
    # A model on demand has no time to try larger batches.
    return replace(how, on_demand=on_demand, grows=how.grows and not on_demand and image_model is model)


def has_own_workers(choice: Choice, model: Model) -> bool:
    """Return True if a model shares workers only with its forms: on the CPU a program may do what its writer liked."""
    return model.is_program and choice.backend.facts.device_type == "cpu"


def sharing_workers(choice: Choice, models: Sequence[Model]) -> list[tuple[int, ...]]:
    """Return the numbers of the models that share workers, one tuple for each group."""
    groups: dict[str, list[int]] = {}
    for index, model in enumerate(models):
        own = model.image_model.name if isinstance(model, NormalisedModel) else model.name
        groups.setdefault(own if has_own_workers(choice, model) else "", []).append(index)
    return [tuple(group) for group in groups.values()]


def memories(choice: Choice, models: Sequence[Model]) -> list[int]:
    """Return, for each model, the number of the arena's memory for its images: one for all that share workers."""
    groups = sharing_workers(choice, models)
    return [next(number for number, group in enumerate(groups) if index in group) for index in range(len(models))]


def worker_plans(
    settings: Settings, choice: Choice, models: Sequence[Model], profiles: Mapping[str, Profile]
) -> list[tuple[str, WorkerPlan]]:
    """Return the device of each worker, and its plan.

    `profiles`: of models, by name, that are to be served otherwise than the settings say.
    """
    facts = choice.backend.facts
    cache_dir = settings.cache_dir.expanduser()
    served = [
        replace(
            how,
            is_gated=facts.computes,
            calibration=calibration(model, settings.calibrate) if how.precision == "int8" else None,
            on_demand=how.on_demand and not has_own_workers(choice, model),
        )
        for model in models
        for how in [how_served(settings, profiles, model)]
    ]

    def plan(device: str, memory: int, serves: tuple[int, ...]) -> WorkerPlan:
        # A worker gets nothing of the others: a program may look at all that is there.
        # On the CPU alone: what drivers of other devices want cannot be listed for every vendor.
        confined = facts.device_type == "cpu" and any(models[index].is_foreign for index in serves)
        kept = cache_dir
        variables = facts.variables(os.environ, cache_dir)
        if confined:  # Others run the files that they keep: these must not be written here.
            first = models[serves[0]]
            kept = cache_dir / PROGRAMS / first.weights_sha256 if first.is_program else cache_dir / CONFINED
            variables |= bare_environment(str(kept))
        return WorkerPlan(
            plans=tuple(
                each if index in serves else replace(each, model=None, is_gated=False, calibration=None)
                for index, each in enumerate(served)
            ),
            device=choice.device(device),
            guard=settings.guard_policy,
            plugins=split(settings.plugins),
            cache_dir=kept,
            quick=True,
            ballast=bytes(facts.pretence.ballast_bytes if facts.pretence else 0),
            decode=settings.decode,
            confined=confined,
            environment=variables,
            forks=facts.forks,
            serves=serves,
            memory=memory,
            start_timeout_s=settings.start_timeout_s,
            batch_timeout_s=settings.batch_timeout_s,
            heartbeat_timeout_s=_HEARTBEAT_TIMEOUT_S,
            log_style=(settings.log_level, settings.log_format),
        )

    return [
        (device, plan(device, memory, serves))
        for memory, serves in enumerate(sharing_workers(choice, models))
        for device in worker_devices(settings, choice)
    ]
