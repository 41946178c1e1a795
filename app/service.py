"""The whole flow of a request, from bytes to predictions.

    predict ─► reserve places ─► decode into a slot ─► enqueue ─► dispatch ─► worker ─► postprocess ─► Answer

Owns: the models as served, the arena's slots, the items under way and what becomes of them when a worker fails. Must
not know HTTP. All but decoding and large postprocessing runs in the event loop's thread, so nothing here needs a lock.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt
import torch

from app import images
from app.arena import Arena, FreeSlots
from app.config import Settings
from app.errors import ServiceError
from app.metrics import MEMORY_KINDS, Metrics, ModelMetrics
from app.protocol import Done, Failed, Load, Loaded, Ready, Run, Stats
from app.scheduler import Batch, Item, QueueFullError, Scheduler
from app.workers import Events, Plan, WorkerProcess
from backends import Choice, choose
from models import Model, ModelError, Options, Placement

log = logging.getLogger("anychip.service")

Array = npt.NDArray[Any]
Encoded = bytes | memoryview
_INLINE_POSTPROCESS_BYTES = 16 * 1024
"""Results up to this size are postprocessed in the event loop: a hop to a thread would cost more than the work."""


@dataclass(slots=True)
class Timings:
    """Seconds of each stage; of several images, those of the slowest."""

    decode: float = 0.0
    queue: float = 0.0
    infer: float = 0.0
    postprocess: float = 0.0

    def include(self, seconds: Mapping[str, float]) -> None:
        """Take in another image's stages."""
        for stage, taken in seconds.items():
            setattr(self, stage, max(getattr(self, stage), taken))


@dataclass(frozen=True, slots=True)
class Answer:
    """Predictions in the order of the images, and who made them."""

    predictions: list[dict[str, Any]]
    device: str
    engine: str
    precision: str


@dataclass(slots=True)
class Request:
    """What a client asks beside its images. `deadline_s` is in `time.monotonic()`; `timings` are filled in."""

    options: Options
    deadline_s: float
    priority: int = 0
    timings: Timings = field(default_factory=Timings)
    reserved: int = 0  # Places in the queue it holds and has not filled yet.


@dataclass(eq=False, slots=True)
class _Waiting:
    """An item's payload: where its pixels are, and who waits for them."""

    slot: int
    placement: Placement
    options: Options
    future: asyncio.Future[tuple[tuple[Array, ...] | None, str, float]]


class ServedModel:
    """A model and what belongs to it here. Its arena pool has its `index`."""

    def __init__(self, index: int, model: Model, slots: int, metrics: Metrics) -> None:
        self.index = index
        self.model = model
        self.slots = FreeSlots(slots)
        self.metrics = ModelMetrics(metrics, model.name)
        self.images = 0
        self.loaded: dict[str, Loaded] = {}


class Service:
    """Models served by workers. Made, started and stopped inside one running event loop."""

    def __init__(self, settings: Settings, models: Sequence[Model]) -> None:
        """Raises BackendUnavailableError when no device fits `settings.device`, ModelError for models of one name."""
        names = [model.name for model in models]
        if len(set(names)) < len(names):
            raise ModelError(f"two models have one name: {', '.join(sorted(names))}")
        self.settings = settings
        self.choice: Choice = choose(settings.device)
        self.metrics = Metrics()
        self.devices: dict[str, Ready] = {}
        self.draining = False
        self.refusing = False
        self._drained: asyncio.Event | None = None
        in_flight = 2 * settings.ladder[-1] * len(self.choice.devices)
        slots = settings.queue_size + in_flight + settings.decode_thread_count
        self.models = {model.name: ServedModel(index, model, slots, self.metrics) for index, model in enumerate(models)}
        self._scheduler = Scheduler(dict.fromkeys(self.models, settings.queue_size), settings.max_wait_ms / 1e3)
        for served in self.models.values():
            self._watch(served)
        self._arena = Arena([(math.prod(model.input_shape), slots) for model in models])
        self._decode_pool = images.DecodePool(settings.decode_thread_count)
        self._workers: dict[str, WorkerProcess] = {}
        self._wake: asyncio.TimerHandle | None = None

    def _watch(self, served: ServedModel) -> None:
        name = served.model.name
        served.metrics.queue_depth.set_function(lambda: self._scheduler.waiting(name))
        served.metrics.images_in_flight.set_function(lambda: served.images)

    async def start(self) -> None:
        """Start a worker on every device; returns when all are ready. Raises WorkerStartError."""
        torch.set_num_threads(1)  # Decode threads are the parallelism here; torch's own would multiply it.
        settings = self.settings
        for device in self.choice.devices:
            load = Load(
                models=tuple(served.model for served in self.models.values()),
                device=device,
                engine=settings.engine,
                precision=settings.precision,
                batch_sizes=settings.ladder,
            )
            plan = Plan(
                load, self.choice.backend.facts.environment, settings.start_timeout_s, log_level=settings.log_level
            )
            events = Events(self._worker_ready, self._worker_message, self._worker_gone)
            self.metrics.worker_up.labels(device).set(0)
            self._workers[device] = WorkerProcess(device, plan, self._arena, events)
        await asyncio.gather(*(worker.wait_ready() for worker in self._workers.values()))

    async def stop(self) -> None:
        """Stop workers and threads. What is still under way gets 503. Idempotent."""
        self.draining = True
        if self._wake is not None:
            self._wake.cancel()
        await asyncio.gather(*(worker.stop() for worker in self._workers.values()))
        await self._decode_pool.close()
        self._arena.close()

    async def drained(self) -> None:
        """Until no accepted image waits for its answer."""
        self._drained = asyncio.Event()
        while self.images_under_way():
            self._drained.clear()
            await self._drained.wait()

    def serves(self, name: str) -> bool:
        """Whether a worker is ready for the model."""
        return self._scheduler.serves(name)

    def worker_up(self, device: str) -> bool:
        """Whether the device's worker is ready."""
        return self._scheduler.has_worker(device)

    def count(self, name: str, code: str, seconds: float) -> None:
        """Count a request that has ended with `code` ("OK" or an error's) after `seconds`."""
        metrics = self.models[name].metrics
        metrics.answered(code)
        metrics.request_seconds.observe(seconds)

    def images_under_way(self) -> int:
        """Images accepted and not yet answered."""
        return sum(served.images for served in self.models.values())

    def not_ready(self) -> str:
        """Why the service is not ready, in one sentence; empty when it is."""
        if self.draining:
            return "the service is shutting down"
        missing = [name for name in self.models if not self._scheduler.serves(name)]
        return f"no worker is ready for {', '.join(missing)}" if missing else ""

    def find(self, name: str) -> ServedModel:
        """The model of this name. Raises MODEL_NOT_FOUND, naming those that exist."""
        served = self.models.get(name)
        if served is None:
            raise ServiceError("MODEL_NOT_FOUND", f"there is no model {name!r} here; there is {', '.join(self.models)}")
        return served

    async def predict(self, served: ServedModel, bodies: Sequence[Encoded], request: Request) -> Answer:
        """Predict for encoded images, all or nothing.

        Raises ServiceError; cancelled, it gives up its places at once.
        """
        name, count = served.model.name, len(bodies)
        if not self._scheduler.serves(name):
            raise ServiceError("NOT_READY", f"no worker is ready for {name}", retry_after_s=1)
        if time.monotonic() >= request.deadline_s:
            served.metrics.expired.inc(count)
            raise ServiceError("DEADLINE_EXCEEDED", "the deadline passed before the images had arrived")
        try:
            self._scheduler.reserve(name, count)
        except QueueFullError as error:
            served.metrics.queue_full.inc(count)
            retry_after_s = self._retry_after_s(name)
            raise ServiceError("QUEUE_FULL", f"{error}; try again", retry_after_s=retry_after_s) from None
        request.reserved = count
        served.images += count
        try:
            answers = [self._image(served, body, request) for body in bodies]
            results = [await answers[0]] if count == 1 else await _all_or_nothing(answers)
        finally:
            served.images -= count
            if self._drained is not None:
                self._drained.set()
            self._scheduler.release(name, request.reserved)
        worker = results[-1][1]
        loaded = served.loaded[worker]
        return Answer([prediction for prediction, _ in results], worker, loaded.engine, loaded.precision)

    async def _image(self, served: ServedModel, body: Encoded, request: Request) -> tuple[dict[str, Any], str]:
        """One image, one of the reserved places, to its prediction and the worker that made it."""
        loop = asyncio.get_running_loop()
        model, name = served.model, served.model.name
        started_s = time.monotonic()
        slot, placement = await self._decode(served, body)
        decoded_s = time.monotonic()
        waiting = _Waiting(slot, placement, request.options, loop.create_future())
        item = Item(name, waiting, request.deadline_s, request.priority)
        self._scheduler.enqueue(item, decoded_s)
        request.reserved -= 1
        self._dispatch()
        timer = loop.call_later(request.deadline_s - decoded_s, self._expire, item)
        try:
            result, worker, infer_s = await waiting.future
        finally:
            timer.cancel()
            if self._scheduler.discard(item):
                served.slots.give(slot)
        answered_s = time.monotonic()
        if result is None:
            log.error("%s answered with NaN or infinity", name)
            raise ServiceError("INFERENCE_FAILED", "the model could not answer")
        if sum(array.nbytes for array in result) <= _INLINE_POSTPROCESS_BYTES:
            prediction = model.postprocess(result, placement, request.options)
        else:
            prediction = await self._decode_pool.run(model.postprocess, result, placement, request.options)
        stages = {
            "decode": decoded_s - started_s,
            "queue": item.dispatched_s - decoded_s,
            "infer": infer_s,
            "postprocess": time.monotonic() - answered_s,
        }
        for stage, seconds in stages.items():
            served.metrics.stage_seconds[stage].observe(seconds)
        request.timings.include(stages)
        return prediction, worker

    async def _decode(self, served: ServedModel, body: Encoded) -> tuple[int, Placement]:
        """Decode one image into a slot. Raises ServiceError; the slot is free again when it does."""
        try:
            header = images.read_header(body)
            images.check_pixels(header, self.settings.max_image_pixels)
            slot = served.slots.take()
            target = torch.from_numpy(self._arena.slot(served.index, slot)).view(served.model.input_shape)
            try:
                placement = await self._decode_pool.run(
                    decode_into, served.model, body, header, target, pixels=header.width * header.height
                )
            except BaseException:
                served.slots.give(slot)
                raise
        except images.ImageTooLargeError as error:
            raise ServiceError("IMAGE_TOO_LARGE", str(error)) from None
        except images.InvalidImageError as error:
            raise ServiceError("INVALID_IMAGE", str(error)) from None
        return slot, placement

    def _dispatch(self) -> None:
        """Send what can be sent."""
        loop = asyncio.get_running_loop()
        now_s = time.monotonic()
        batches, expired = self._scheduler.dispatch(now_s)
        for item in expired:
            self._give_up(item)
        for batch in batches:
            self._send(batch)
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        wake_at = self._scheduler.wake_at()
        if wake_at is not None:
            self._wake = loop.call_later(wake_at - now_s, self._dispatch)

    def _send(self, batch: Batch) -> None:
        waiting: list[_Waiting] = [item.payload for item in batch.items]
        self.metrics.batch_size.labels(batch.model, batch.worker).observe(len(waiting))
        self.metrics.batch_padding.labels(batch.model, batch.worker).inc(batch.size - len(waiting))
        run = Run(
            batch.id,
            self.models[batch.model].index,
            tuple(each.slot for each in waiting),
            tuple(each.options for each in waiting),
            batch.size,
        )
        self._workers[batch.worker].send(run)

    def _expire(self, item: Item) -> None:
        """The deadline of an item has passed."""
        if self._scheduler.discard(item):
            self._give_up(item)
        elif not item.payload.future.done():
            # With a worker: the slot stays taken until the batch is done, the client need not wait for that.
            item.payload.future.set_exception(_too_late())

    def _give_up(self, item: Item) -> None:
        """An item that will not be computed, already out of its queue."""
        served = self.models[item.model]
        served.slots.give(item.payload.slot)
        served.metrics.expired.inc()
        if not item.payload.future.done():
            item.payload.future.set_exception(_too_late())

    def _worker_ready(self, worker: str, ready: Ready) -> None:
        self.devices[worker] = ready
        latency_s = {}
        for served, loaded in zip(self.models.values(), ready.loaded, strict=True):
            served.loaded[worker] = loaded
            latency_s[served.model.name] = loaded.latency_s
            labels = (served.model.name, worker, loaded.engine, loaded.precision, served.model.weights)
            self.metrics.model_info.labels(*labels).set(1)
        self._scheduler.add_worker(worker, latency_s)
        self.metrics.worker_up.labels(worker).set(1)
        log.info("%s is ready: %s", worker, ready.device_name)
        self._dispatch()

    def _worker_message(self, worker: str, message: Any) -> None:
        if isinstance(message, Done):
            batch = self._scheduler.finish(worker, message.batch_id, message.infer_s)
            self._free(batch)
            self._dispatch()  # The device first, then those who wait.
            for item, result in zip(batch.items, message.results, strict=True):
                if not item.payload.future.done():
                    item.payload.future.set_result((result, worker, message.infer_s))
        elif isinstance(message, Failed):
            batch = self._scheduler.finish(worker, message.batch_id, None)
            self._fail(batch, message.reason)
            self._dispatch()
        elif isinstance(message, Stats):
            vendor = self.devices[worker].vendor
            for kind in MEMORY_KINDS:
                self.metrics.device_memory.labels(worker, vendor, kind).set(getattr(message, kind))
            self.metrics.worker_resident.labels(worker).set(message.resident)

    def _worker_gone(self, worker: str, reason: str) -> None:
        self.metrics.worker_up.labels(worker).set(0)
        if not self.draining:
            self.metrics.worker_restarts.labels(worker, "died").inc()
        for batch in self._scheduler.remove_worker(worker):
            self._fail(batch, reason)

    def _fail(self, batch: Batch, reason: str) -> None:
        log.error("a batch of %d for %s failed: %s", len(batch.items), batch.model, reason)
        self._free(batch)
        for item in batch.items:
            if not item.payload.future.done():
                item.payload.future.set_exception(ServiceError("INFERENCE_FAILED", "the model could not answer"))

    def _free(self, batch: Batch) -> None:
        slots = self.models[batch.model].slots
        for item in batch.items:
            slots.give(item.payload.slot)

    def _retry_after_s(self, name: str) -> int:
        """Seconds until the queue has drained at the rate the workers show, at least one."""
        return max(1, math.ceil(min(self._scheduler.drain_time_s(name), 60.0)))


def _too_late() -> ServiceError:
    return ServiceError("DEADLINE_EXCEEDED", "the deadline passed before the answer was there")


def decode_into(model: Model, body: Encoded, header: images.Header, target: torch.Tensor) -> Placement:
    """Decode one image and place it in `target`, uint8 `model.input_shape`. Raises InvalidImageError."""
    size = model.decode_size(header.width, header.height)
    return model.preprocess(images.decode(body, header, size), target, header.width, header.height)


async def _all_or_nothing(answers: Sequence[Any]) -> list[Any]:
    """Gather; the first failure cancels the rest and waits for them, so that nothing is left under way."""
    tasks = [asyncio.ensure_future(answer) for answer in answers]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
