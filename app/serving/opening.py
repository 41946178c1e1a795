"""The models that a service is started with, read two at a time.

Owns: what is said of it meanwhile. Must not know who asks, nor what serves the models.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor

from app.config import Settings
from app.serving.finished import learn_finished_files
from models import Model, ModelSpec, open_model, parse_spec

log = logging.getLogger("anychip.service")


class Opening:
    """`said`: how far it is, in one sentence; any thread may read it."""

    said = "the service is starting"

    def models(self, settings: Settings) -> list[Model]:
        """All that `--models` names; downloads what is missing. Raises ModelError."""
        learn_finished_files()
        specs = [parse_spec(spec, settings.weights) for spec in settings.model_specs]
        read: list[str] = []

        def opened(spec: ModelSpec) -> Model:
            began_s = time.monotonic()
            model = open_model(
                spec,
                settings.weights_dir,
                mirror=settings.weights_mirror or None,
                trust_exported=settings.trust_exported,
            )
            read.append(spec.name)
            log.info("%s is read, %.1f s; %d of %d", *(spec.name, time.monotonic() - began_s, len(read), len(specs)))
            missing = ", ".join(each.name for each in specs if each.name not in read)
            self.said = f"{len(read)} of {len(specs)} models are read ({', '.join(read)}); not yet: {missing}"
            return model

        with ThreadPoolExecutor(2) as pool:  # Files with a graph of their own are tried by child processes.
            models = list(pool.map(opened, specs))
        self.said = "all models are read, devices are being looked for"
        return models
