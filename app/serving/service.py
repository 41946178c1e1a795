"""Service: the owner of queues, decoders and workers, behind its link (app.link).

All but decoding and large copies runs in the event loop's thread, so nothing here needs a lock.
"""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
import socket
import weakref
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

from anychip_base.extras import entry_points
from app.config import Settings
from app.config.values import CLIENT_GROUP, by_version, split
from app.decoder.messages import REGIONS_BYTES, DecodePlan
from app.decoding.pool import CREDITS, Decoders
from app.decoding.waiting import ImageLimits
from app.errors import ServiceError
from app.fleet.fleet import Fleet
from app.fleet.profiles import taken_up
from app.link import Tables
from app.link_messages import IngressBegin
from app.observability.metrics import Metrics
from app.observability.tracing import Tracing
from app.prepared import DECODERS
from app.processes.fork_server import discard_prepared
from app.serving.administration import ServiceAdministration
from app.serving.cascades import check_cascade, parse_cascade
from app.serving.ingresses import OWNERS_SHARE, Ingresses
from app.serving.opening import chosen
from app.serving.submissions import Submissions
from backends import Choice, host
from models import Model, ModelError, NormalisedModel, PixelModel

log = logging.getLogger("anychip.service")

_DECODE_QUEUE_SIZE = 256
_DECODE_TIMEOUT_S = 10.0
_BYTES_A_PIXEL = 40
"""Bytes a pixel during decoding: 16 for WebP at its worst, and as much again for copies and what allocators keep."""
_DECODER_BYTES = 1 << 30
"""Address space of a decoder beside its images."""


class Service:
    """Models served by workers. Made, started and stopped inside one running event loop."""

    def __init__(
        self,
        settings: Settings,
        models: Sequence[Model],
        tracing: Tracing | None = None,
        choice: Choice | None = None,
    ) -> None:
        """Make all parts. `choice`: the result of `chosen`, if the devices were already asked.

        Raises BackendUnavailableError when no device fits `settings.device`, ModelError for models of one name.
        """
        names = [model.name for model in models]
        if len(set(names)) < len(names):
            raise ModelError(f"two models have one name: {', '.join(sorted(names))}")
        self.tracing = tracing
        self.choice = choice or chosen(settings)
        settings, profiles = taken_up(settings, self.choice, models)
        if settings.max_images > settings.queue_size:
            log.info("a request may hold %d images: no more may wait (--queue-size)", settings.queue_size)
            settings = settings.model_copy(update={"max_images": settings.queue_size})
        self.settings = settings
        self.metrics = Metrics()
        for entry in entry_points(CLIENT_GROUP):
            if entry.name in split(settings.compat) and (collector := getattr(entry.load(), "collector", None)):
                self.metrics.registry.register(collector(self.metrics))
        self.metrics.ready.set_function(lambda: not self.administration.why_not())
        self.metrics.cpu_fallback.set(bool(self.choice.refusals) and self.choice.backend.facts.device_type == "cpu")
        takes_floats = "triton" in split(settings.compat)  # Triton's clients send normalised tensors of images.
        pixel_models = [model for model in models if takes_floats and isinstance(model, PixelModel)]
        forms = [*models, *map(NormalisedModel.of, pixel_models)]
        decoders = settings.decoders or host.core_count()
        # A decoder may still write to the slots of images whose clients have left.
        spare_slots = CREDITS * max(2, decoders)
        self.fleet = Fleet(
            settings, self.choice, forms, self.metrics, tracing, spare_slots=spare_slots, profiles=profiles
        )
        self.models = {name: self.fleet.models[name] for name in names}
        written = dict(zip(settings.model_specs, names, strict=False))
        cascades = {each.name: each for each in (parse_cascade(text, written) for text in settings.stage_specs)}
        for cascade in cascades.values():
            check_cascade(cascade, self.models)
        self.administration = ServiceAdministration(settings, self.fleet, self.models, self.choice, profiles)
        try:
            for name, shares in by_version(settings.traffic).items():
                self.administration.set_traffic(name, {version: float(share) for version, share in shares.items()})
        except (ValueError, ServiceError) as error:
            raise ModelError(f"--traffic: {error}.") from None
        for name in split(settings.models_on_demand):
            if name != "all" and (bare := name.removeprefix("-")) not in self.models:
                raise ModelError(f"--models-on-demand: there is no model {bare!r}.")
        self._tables = Tables(
            settings,
            self.models,
            cascades,
            self.metrics,
            tracing,
            self.choice.simulated,
            self.administration,
            self.administration.traffic,
        )
        self.decoders = self._made_decoders(forms, decoders) if self.choice.backend.facts.reads_pixels else None
        self._links: weakref.WeakSet[Submissions] = weakref.WeakSet()  # Nothing stays of an ingress that is gone.
        self.link = self.made_link()
        self._written = written
        self.on_stop: list[Callable[[], Awaitable[None]]] = []
        """Parts that others made for this service, to be ended with it."""
        self.metrics.decode_limit.set(self._decode_limit())
        for device in self.choice.found:
            if device.id in self.choice.devices:
                card = device.name, device.details.get("uuid", ""), device.details.get("pci", "")
                self.metrics.device_info.labels(device.id, self.choice.vendor, *card).set(1)
        self.metrics.cache_dir_free_bytes.set_function(partial(_free_bytes, settings.cache_dir.expanduser()))

    async def start(self) -> None:
        """Start decoders, and a worker for every replica; return when all are ready.

        Raises ChildStartError.
        """
        decoding = [] if self.decoders is None else [self.decoders.start()]
        if not decoding:
            discard_prepared(DECODERS)  # Nothing will be decoded.
        await asyncio.gather(self.fleet.start(), *decoding)

    async def stop(self) -> None:
        """Stop decoders and workers. Requests in flight get 503. Idempotent."""
        self.administration.draining = True
        for end in self.on_stop:
            await end()
        if self.decoders is not None:
            await self.decoders.stop()
        await self.fleet.stop()

    def _made_decoders(self, forms: Sequence[Model], count: int) -> Decoders | None:
        geometry = tuple(model if isinstance(model, PixelModel) else None for model in forms)
        if not any(geometry):
            return None
        settings, arena = self.settings, self.fleet.arena
        style = settings.log_level, settings.log_format
        memory_bytes = _DECODER_BYTES + _BYTES_A_PIXEL * settings.max_image_pixels
        buffer_bytes = settings.max_body_bytes + REGIONS_BYTES
        plan = DecodePlan(geometry, arena.pools, CREDITS, buffer_bytes, style, memory_bytes, arena.memories)
        limits = ImageLimits(self._decode_limit(), settings.max_image_pixels, timeout_s=_DECODE_TIMEOUT_S)
        restarts = self.metrics.decoder_restarts
        decoders = Decoders(plan, arena, count, limits, restarted=lambda reason: restarts.labels(reason).inc())
        self.metrics.decoders_up.set_function(lambda: len(decoders.ready))
        self.metrics.decode_depth.set_function(lambda: decoders.queue.held)
        return decoders

    def _decode_limit(self) -> int:
        """Return the most images in decoding or waiting for it: at least as many as may wait for one model."""
        return max(self.settings.queue_size, _DECODE_QUEUE_SIZE)

    def made_link(self) -> Submissions:
        """Return a new link's end for one more ingress."""
        reads_pixels = self.choice.backend.facts.reads_pixels
        link = Submissions(self._tables, self.fleet, self.decoders, reads_pixels=reads_pixels)
        link.refusing = any(each.refusing for each in self._links)
        self._links.add(link)
        return link

    def made_ingresses(
        self, count: int, tunnel: Callable[[socket.socket, str, bool, Callable[[], None]], None]
    ) -> Ingresses:
        """Return ingresses in processes of their own (app.serving.ingresses)."""
        forms = [*self.fleet.models.values()]
        begin = IngressBegin(
            self.settings.model_dump(mode="json"),
            self._written,
            len(self.models),
            tuple(-1 if form.floats is None else form.floats.index for form in forms),
            self.choice.simulated,
            (1 - OWNERS_SHARE) / count,
        )
        return Ingresses(
            count,
            self.made_link,
            self.fleet,
            administration=self.administration,
            metrics=self.metrics,
            begin=begin,
            tunnel=tunnel,
            names=self.link.cascades,
        )

    def refuse(self) -> None:
        """Take no requests any more."""
        for link in self._links:
            link.refusing = True

    def kill(self) -> None:
        """End every worker now, whatever it does: there is no time left to stop."""
        for replica in self.fleet.replicas:
            replica.kill("the service has no time left")

    async def drained(self) -> None:
        """Wait until every accepted image has its answer."""
        for pool in self.models.values():
            await pool.drained()

    def images_under_way(self) -> int:
        """Return the number of images accepted and not yet answered."""
        return sum(pool.images_under_way for pool in self.models.values())


def _free_bytes(folder: Path) -> float:
    """Return the bytes that this user may still write at `folder`, which may not exist yet; NaN if unknown."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return math.nan
