"""The whole flow of a request, from bytes to predictions.

    admit ─► (upload) ─► predict ─► reserve ─► decode into a slot ─► submit, outcome ─► postprocess ─► Answer

Owns: the models as served, admission, the decode pool and what a client is told. Must not know HTTP, nor how workers
are kept. All but decoding and large postprocessing runs in the event loop's thread, so nothing here needs a lock.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, Protocol

import numpy as np
import numpy.typing as npt
import torch

from app.config import Settings
from app.errors import ServiceError
from app.images.decoding import decode
from app.images.header import Header, ImageTooLargeError, InvalidImageError, check_pixels, read_header
from app.images.pool import DecodePool, DecodeQueueFullError
from app.observability.metrics import Exemplar, Metrics
from app.observability.surroundings import show_surroundings
from app.observability.tracing import RequestTrace, Tracing
from app.observability.triton_metrics import TritonMetrics
from app.scheduling.dispatcher import Dispatcher
from app.scheduling.outcome import too_late
from app.scheduling.readiness import ModelState
from app.scheduling.scheduler import DeadlineUnreachableError, QueueFullError, Reservation
from app.scheduling.served_model import ServedModel
from app.serving.timings import Timings
from backends import Choice, choose, host, null, simulated
from models import Model, ModelError, NormalisedModel, Options, PixelModel, Placement, TensorModel

log = logging.getLogger("anychip.service")

Encoded = bytes | memoryview
_INLINE_POSTPROCESS_BYTES = 16 * 1024
"""Results up to this size are postprocessed in the event loop: a hop to a thread would cost more than the work."""


@dataclass(frozen=True, slots=True)
class Frame:
    """An image that needs no decoding.

    `placed`: it is the network's input as it is, in whatever type and order; else uint8 [height, width, 3], and resized
    as a decoded image would be.
    """

    pixels: npt.NDArray[Any]
    width: int
    height: int
    placed: bool = True


@dataclass(frozen=True, slots=True)
class Answer:
    """What `Request.finish` made of each image, in the order of the images, and who computed it."""

    predictions: list[Any]
    weights: str
    device: str
    engine: str
    precision: str


class Computed(Protocol):
    """An answer of any kind: by which weights, on what."""

    @property
    def weights(self) -> str: ...  # noqa: D102
    @property
    def device(self) -> str: ...  # noqa: D102
    @property
    def engine(self) -> str: ...  # noqa: D102
    @property
    def precision(self) -> str: ...  # noqa: D102


Finish = Callable[[PixelModel, Sequence[npt.NDArray[Any]], Placement, Options], Any]


def prediction(model: PixelModel, outputs: Sequence[npt.NDArray[Any]], placement: Placement, options: Options) -> Any:
    """One entry of "predictions"."""
    return model.postprocess(outputs, placement, options)


@dataclass(slots=True)
class Request:
    """What a client asks beside its images. `deadline_s` is in `time.monotonic()`; `timings` are filled in.

    `finish`: what is made of what the worker sent for an image; pure, and may run in a thread. `abandoned`: the
    client is gone, so that what is cancelled now counts as its doing. `trace`: where its stages are recorded;
    `exemplar`: what its measurements are labelled with.
    """

    options: Options
    deadline_s: float
    priority: int = 0
    timings: Timings = field(default_factory=Timings)
    abandoned: bool = False
    finish: Finish = prediction
    trace: RequestTrace | None = None
    exemplar: Exemplar | None = None

    def abandon(self) -> None:
        """The client is gone."""
        self.abandoned = True


class Service:
    """Models served by workers. Made, started and stopped inside one running event loop."""

    def __init__(self, settings: Settings, models: Sequence[Model], tracing: Tracing | None = None) -> None:
        """Raises BackendUnavailableError when no device fits `settings.device`, ModelError for models of one name."""
        names = [model.name for model in models]
        if len(set(names)) < len(names):
            raise ModelError(f"two models have one name: {', '.join(sorted(names))}")
        self.settings = settings
        self.tracing = tracing
        if settings.null:
            null.configure(settings.null)
        if settings.simulate:
            simulated.configure(settings.simulate, settings.cache_dir.expanduser())
        self.choice: Choice = choose(settings.device)
        self.simulated = self.choice.simulated
        if self.simulated:
            log.warning("%s is simulated: the CPU computes its answers", self.choice.backend.name)
        self.metrics = Metrics(enabled=settings.metrics)
        if settings.metrics and settings.triton_metrics:
            self.metrics.registry.register(TritonMetrics(self.metrics))
        self.metrics.ready.set_function(lambda: not self.not_ready())
        self.metrics.cpu_fallback.set(bool(self.choice.refusals) and self.choice.backend.facts.device_type == "cpu")
        self.draining = False
        self.refusing = False
        images = [model for model in models if isinstance(model, PixelModel)] if settings.float_input else []
        forms = [*models, *map(NormalisedModel.of, images)]
        self.dispatcher = Dispatcher(settings, self.choice, forms, self.metrics, tracing)
        self.models = {name: self.dispatcher.models[name] for name in names}
        self._reads_pixels = self.choice.backend.facts.reads_pixels
        self._background: set[asyncio.Task[None]] = set()
        self._watchers: set[asyncio.Event] = set()  # Set whenever a request has ended.
        threads = settings.decode_threads or host.core_count()
        self._decode_pool = DecodePool(threads, settings.decode_queue_size)
        self.metrics.decode_depth.set_function(lambda: self._decode_pool.depth)
        self.metrics.decode_limit.set(settings.decode_queue_size)
        show_surroundings(self.metrics, self.choice, settings.cache_dir.expanduser())

    async def start(self) -> None:
        """Start a worker for every replica; returns when all are ready. Raises WorkerStartError."""
        torch.set_num_threads(1)  # Decode threads are the parallelism here; torch's own would multiply it.
        await self.dispatcher.start()

    async def stop(self) -> None:
        """Stop workers and threads. What is still under way gets 503. Idempotent."""
        self.draining = True
        await self._decode_pool.close()
        await self.dispatcher.stop()

    async def drained(self, served: ServedModel | None = None) -> None:
        """Until no accepted image (of a model, or of any) waits for its answer."""
        ended = asyncio.Event()
        self._watchers.add(ended)
        try:
            while served.images_under_way if served else self.images_under_way():
                ended.clear()
                await ended.wait()
        finally:
            self._watchers.discard(ended)

    def made_by(self, answer: Computed) -> dict[str, str | bool]:
        """What every answer says of itself: weights, device, engine, precision, and whether that is a simulation."""
        made_by: dict[str, str | bool] = {
            "weights": answer.weights,
            "device": answer.device,
            "engine": answer.engine,
            "precision": answer.precision,
        }
        if self.simulated:
            made_by["simulated"] = True
        return made_by

    def release_in_background(self) -> None:
        """Have every worker give cached memory back; the log says what came of it."""
        task = asyncio.create_task(self._release_all(), name="release")
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _release_all(self) -> None:
        for worker, returned in (await self.dispatcher.release()).items():
            log.info("%s gave back %d bytes", worker, sum(returned.values()))

    def count(self, name: str, code: str, seconds: float, exemplar: Exemplar | None = None) -> None:
        """Count a request that has ended with `code` ("OK" or an error's) after `seconds`."""
        served = self.models[name]
        served.metrics.answered(code, seconds, exemplar)
        served.statistics.request(code, seconds)

    def images_under_way(self) -> int:
        """Images accepted and not yet answered."""
        return sum(served.images_under_way for served in self.models.values())

    def not_ready(self) -> str:
        """Why the service is not ready, in one sentence; empty when it is."""
        if self.draining:
            return "the service is shutting down"
        readiness = self.dispatcher.readiness
        ready = (ModelState.READY, ModelState.UNLOADED)
        missing = [name for name in self.models if readiness.state(name) not in ready]
        return f"no worker is ready for {', '.join(missing)}: {readiness.replica_reasons()}" if missing else ""

    def model_not_ready(self, served: ServedModel) -> str:
        """Why the model is not ready, in one sentence; empty when it is."""
        if self.draining:
            return "the service is shutting down"
        return self.dispatcher.readiness.reason(served.model.name)

    def find(self, name: str) -> ServedModel:
        """The model of this name. Raises MODEL_NOT_FOUND, naming those that exist."""
        served = self.models.get(name)
        if served is None:
            raise ServiceError("MODEL_NOT_FOUND", f"there is no model {name!r} here; there is {', '.join(self.models)}")
        return served

    def refuse_if_stopping(self) -> None:
        """Raises DRAINING once nothing new is taken."""
        if self.refusing:
            raise ServiceError("DRAINING", "the service is shutting down", retry_after_s=5)

    def admit(self, served: ServedModel, deadline_s: float, priority: int) -> None:
        """Refuse a request of at least one image before its body is read, if it would be refused afterwards.

        Raises NOT_READY, QUEUE_FULL, DEADLINE_UNREACHABLE. It reserves nothing: an upload may take its time.
        """
        name = served.model.name
        self.dispatcher.refuse_unless_served(name)
        try:
            self.dispatcher.scheduler.check(name, 1, deadline_s, priority, time.monotonic())
        except (QueueFullError, DeadlineUnreachableError) as error:
            self._refuse(served, error, 1)

    async def predict(self, served: ServedModel, bodies: Sequence[Encoded | Frame], request: Request) -> Answer:
        """Predict for encoded images or decoded ones, all or nothing.

        Raises ServiceError; cancelled, it gives up its reservation at once.
        """
        if isinstance(served.model, TensorModel):
            raise ServiceError(
                "INVALID_REQUEST",
                f"{served.model.name} takes tensors, not images: POST /v2/models/{served.model.name}/infer",
            )
        count = len(bodies)
        reservation = self.reserve(served, count, request)
        try:
            if count == 1:
                results = [await self._image(served, bodies[0], request, reservation, 0)]
            else:
                results = await all_or_nothing(
                    [self._image(served, body, request, reservation, number) for number, body in enumerate(bodies)]
                )
        finally:
            self.settle(served, reservation)
        if count == 1:
            return results[0]
        return replace(results[-1], predictions=[prediction for each in results for prediction in each.predictions])

    def reserve(self, served: ServedModel, count: int, request: Request) -> Reservation:
        """Room in the queue for the `count` images or items of a request; `settle` must follow.

        Raises DEADLINE_EXCEEDED, QUEUE_FULL, DEADLINE_UNREACHABLE.
        """
        now_s = time.monotonic()
        if now_s >= request.deadline_s:
            served.metrics.expired["upload"].inc(count)
            raise ServiceError("DEADLINE_EXCEEDED", "the deadline passed before the request had arrived")
        try:
            reservation = self.dispatcher.scheduler.reserve(
                served.model.name, count, request.deadline_s, request.priority, now_s
            )
        except (QueueFullError, DeadlineUnreachableError) as error:
            self._refuse(served, error, count)
        served.images += count
        return reservation

    def settle(self, served: ServedModel, reservation: Reservation) -> None:
        """The request of this reservation has ended, however it did."""
        served.images -= reservation.images
        for watcher in self._watchers:
            watcher.set()
        self.dispatcher.scheduler.release(reservation)

    async def offload(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What `function` returns, run in a thread: for what would hold up the event loop."""
        return await self._decode_pool.run(function, *arguments)

    def _refuse(self, served: ServedModel, error: Exception, count: int) -> NoReturn:
        retry_after_s = self.dispatcher.retry_after_s(served.model.name)
        if isinstance(error, QueueFullError):
            served.metrics.rejected["queue_full"].inc(count)
            raise ServiceError("QUEUE_FULL", f"{error}; try again", retry_after_s=retry_after_s) from None
        served.metrics.rejected["deadline"].inc(count)
        message = f"{error}, and the deadline is before that; try again"
        raise ServiceError("DEADLINE_UNREACHABLE", message, retry_after_s=retry_after_s) from None

    async def _image(
        self, served: ServedModel, body: Encoded | Frame, request: Request, reservation: Reservation, position: int
    ) -> Answer:
        """One image, one of those reserved, to its prediction."""
        stage = "decode"
        started_s = time.monotonic()
        begun = [("decode", started_s)]  # Each stage lasts until the next one begins.
        batch = None
        try:
            if isinstance(body, Frame):
                slot, placement = await self._place(served, body)
            else:
                slot, placement = await self._decode(served, body)
            decoded_s = time.monotonic()
            if decoded_s >= request.deadline_s:
                served.slots.give(slot)
                served.metrics.expired["decode"].inc()
                raise too_late()
            stage = "queue"
            begun.append((stage, decoded_s))
            item = self.dispatcher.submit(reservation, slot, request.options, position, request.trace)
            outcome = await self.dispatcher.outcome(served, item)
            answered_s = time.monotonic()
            stage = "postprocess"
            # Whatever the device did not take was waiting, in our queue or in front of the worker.
            infer_begun_s = max(decoded_s, answered_s - outcome.infer_s)
            begun += [("infer", infer_begun_s), ("post", answered_s)]
            batch = outcome.batch
            # The worker's own model: after a hand-over the labels may be others than when the image came.
            worker = outcome.worker
            model = worker.model(served.index)
            assert isinstance(model, PixelModel | NormalisedModel)
            model = model.image_model
            if outcome.result is None:
                log.error("%s answered with NaN or infinity", model.name)
                raise ServiceError("INFERENCE_FAILED", "the model could not answer")
            if sum(array.nbytes for array in outcome.result) <= _INLINE_POSTPROCESS_BYTES:
                finished = request.finish(model, outcome.result, placement, request.options)
            else:
                finished = await self._decode_pool.run(
                    request.finish, model, outcome.result, placement, request.options
                )
        except asyncio.CancelledError:
            if request.abandoned:
                with_worker = stage == "queue" and item.dispatched_s
                served.metrics.cancelled["infer" if with_worker else stage].inc()
            raise
        finally:
            if request.trace is not None:
                request.trace.stages(begun, time.monotonic(), position, batch)
        now_s = time.monotonic()
        if now_s >= request.deadline_s:
            served.metrics.expired["postprocess"].inc()
            raise too_late()
        stages = {
            "decode": decoded_s - started_s,
            "queue": infer_begun_s - decoded_s,
            "infer": outcome.infer_s,
            "postprocess": now_s - answered_s,
        }
        for stage, seconds in stages.items():
            served.metrics.stage_seconds[stage].observe(seconds, request.exemplar)
        served.metrics.deadline_slack.observe(request.deadline_s - now_s)
        served.statistics.image(stages)
        request.timings.include(stages)
        assert worker.ready is not None
        loaded = worker.ready.loaded[served.index]
        assert loaded is not None
        return Answer([finished], model.weights, worker.device, loaded.report.engine, loaded.report.precision)

    async def _place(self, served: ServedModel, frame: Frame) -> tuple[int, Placement]:
        """Put a decoded image into a slot. Raises QUEUE_FULL."""
        slot = served.slots.take()
        target = self.dispatcher.arena.slot(served.index, slot)
        if not self._reads_pixels:
            return slot, Placement(frame.width, frame.height)
        if frame.placed:
            target[:] = np.ascontiguousarray(frame.pixels).reshape(-1).view(np.uint8)
            return slot, Placement(frame.width, frame.height)
        model = served.model
        assert isinstance(model, PixelModel)
        try:
            # A copy: torch wants memory that may be written to, and a body may not.
            pixels = torch.from_numpy(np.array(frame.pixels))
            out = torch.from_numpy(target).view(model.input_shape)
            placement = await self._decode_pool.decode(
                model.preprocess, pixels, out, frame.width, frame.height, pixels=frame.width * frame.height
            )
        except DecodeQueueFullError as error:
            served.slots.give(slot)
            served.metrics.rejected["decode_queue_full"].inc()
            raise ServiceError("QUEUE_FULL", f"{error}; try again", retry_after_s=1) from None
        except BaseException:
            served.slots.give(slot)
            raise
        return slot, placement

    async def _decode(self, served: ServedModel, body: Encoded) -> tuple[int, Placement]:
        """Decode one image into a slot. Raises ServiceError; the slot is free again when it does."""
        try:
            header = read_header(body)
            check_pixels(header, self.settings.max_image_pixels)
            slot = served.slots.take()
            if not self._reads_pixels:
                return slot, Placement(header.width, header.height)
            target = torch.from_numpy(self.dispatcher.arena.slot(served.index, slot)).view(served.model.input_shape)
            try:
                placement = await self._decode_pool.decode(
                    decode_into, served.model, body, header, target, pixels=header.width * header.height
                )
            except BaseException:
                served.slots.give(slot)
                raise
        except DecodeQueueFullError as error:
            served.metrics.rejected["decode_queue_full"].inc()
            raise ServiceError("QUEUE_FULL", f"{error}; try again", retry_after_s=1) from None
        except ImageTooLargeError as error:
            raise ServiceError("IMAGE_TOO_LARGE", str(error)) from None
        except InvalidImageError as error:
            raise ServiceError("INVALID_IMAGE", str(error)) from None
        return slot, placement


def decode_into(model: PixelModel, body: Encoded, header: Header, target: torch.Tensor) -> Placement:
    """Decode one image and place it in `target`, uint8 `model.input_shape`. Raises InvalidImageError."""
    size = model.decode_size(header.width, header.height)
    return model.preprocess(decode(body, header, size), target, header.width, header.height)


async def all_or_nothing(answers: Sequence[Any]) -> list[Any]:
    """Gather; the first failure cancels the rest and waits for them, so that nothing is left under way."""
    tasks = [asyncio.ensure_future(answer) for answer in answers]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
