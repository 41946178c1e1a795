"""Models that a service starts with, read two at a time, and the devices that it is to use.

server ─► Begin, Wanted ─► a process with torch ─► how far it is, …, Opened ─► models and devices, as data
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import TYPE_CHECKING, Any

import msgspec

from anychip_base.interpreter import module_path
from app import clock
from app.config import Settings
from app.fleet.process import spawn
from app.precision.described import described
from app.processes.channel import Channel, ChannelError, reader, to_packet
from app.processes.forking import name_process
from app.processes.packing import read_packed, write_packed
from app.worker.main import Begin, in_bytes
from backends import BackendError, BackendUnavailableError, Choice, simulated
from models import Model, ModelError

if TYPE_CHECKING:
    from models import ModelSpec

log = logging.getLogger("anychip.service")

_PROGRAM = "app.serving.opening:main"
_ASKED = {"models", "weights", "weights_mirror", "cache_dir", "trust_exported", "device", "null", "simulate"}
_END_S = 2.0


class OpeningError(Exception):
    """Failure of the process that reads models, not of a model; the message says it in one sentence."""


_ERRORS = {"models": ModelError, "devices": BackendUnavailableError, "": OpeningError}


class Wanted(msgspec.Struct, frozen=True, array_like=True):
    """Question to the process. `model`: the only model to read, without a search for devices; "": all."""

    settings: dict[str, Any]
    model: str


class Opened(msgspec.Struct, frozen=True, tag=True):
    """Answer, with models and choice packed in a descriptor. `environment`, `path`: new values for later processes."""

    environment: dict[str, str]
    path: list[str]


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Reason of a failure, in one sentence. `kind`: a key of _ERRORS."""

    kind: str
    reason: str


class Opening:
    """Reader of models. `progress`: how far it is, in one sentence; any thread may read it."""

    progress = "the service is starting"

    async def apart(self, settings: Settings, model: str = "") -> tuple[list[Model], Choice | None]:
        """Read the models and choose the devices, as data, in a process that has torch; or read one `model` alone.

        Raises ModelError, BackendUnavailableError, OpeningError.
        """
        try:
            return await self._apart(settings, model)
        except (OSError, ChannelError, ValueError, TypeError, ImportError) as error:  # Of spawn, the channel, packing.
            raise OpeningError(f"the process that reads models cannot be begun or heard: {error}") from error

    async def _apart(self, settings: Settings, model: str) -> tuple[list[Model], Choice | None]:
        loop = asyncio.get_running_loop()
        content: tuple[list[Model], Choice | None] = [], None
        read = reader(Opened | Refused | str)
        received: asyncio.Future[Opened | Refused] = loop.create_future()
        ended = Refused("", "the process that reads models has ended")
        style = settings.log_level, settings.log_format
        begin = Begin("MainProcess", in_bytes(os.environ), style, module_path(), program=_PROGRAM)
        child, channel = await spawn(begin, forks=True)

        def readable() -> None:
            try:
                for answer in chain.from_iterable(map(read, channel.receive())):
                    if isinstance(answer, str):
                        self.progress = answer
                    elif not received.done():
                        received.set_result(answer)
            except (EOFError, OSError, ChannelError, msgspec.DecodeError):
                loop.remove_reader(channel.fileno())
                if not received.done():
                    received.set_result(ended)

        loop.add_reader(channel.fileno(), readable)
        try:
            given = settings.model_dump(mode="json", include=_ASKED & settings.model_fields_set)
            with contextlib.suppress(BrokenPipeError):  # It has ended already, which is seen next.
                channel.send(to_packet((Wanted(given, model),)))
            channel.flush_in(loop)  # A large environment does not fit into the socket at once.
            answer = await received
            if answer is ended and await child.ends_within(_END_S):
                answer = Refused(ended.kind, f"{ended.reason}, exit code {child.exited.result()}")
            elif isinstance(answer, Opened):
                content = await asyncio.to_thread(read_packed, channel.take_descriptor())
                for each in content[0]:  # The process that read them lets go of them with its end.
                    if each.files is not None:
                        each.files.hold()
        finally:
            loop.remove_reader(channel.fileno())
            loop.remove_writer(channel.fileno())
            channel.close()
            child.kill()
            await child.ends_within(_END_S)
        if isinstance(answer, Refused):
            raise _ERRORS[answer.kind](answer.reason)
        os.environ.update(answer.environment)
        sys.path[:] = answer.path
        return content

    def models(
        self, settings: Settings, only: str = "", *, progress: Callable[[str], None] = lambda _: None
    ) -> list[Model]:
        """Read all models of `--models`; download missing files. `progress`: gets the same sentences.

        `only`: the one model to read again, for a service that runs: it downloads nothing. Raises ModelError, which has
        a line for each of several models that cannot be read.
        """
        from models import ModelSpec, fetched, open_model, parse_spec

        specs, gone = list[ModelSpec](), None
        for text in settings.model_specs:
            try:
                spec = parse_spec(text, settings.weights)
            except ModelError as unread:
                if not only:
                    raise
                gone = unread  # Of another model, unless no text names this one: its folder was there at the start.
            else:
                specs += [spec] if only in ("", spec.name) else []
        if gone is not None and not specs:
            raise gone
        read: list[str] = []

        def say(text: str) -> None:
            self.progress = text
            progress(text)

        def here(spec: ModelSpec) -> ModelSpec:
            found = fetched(spec, settings.weights_dir, allow_download=not only)
            if found is not spec:
                say(f"{spec.name} is fetched; {len(specs)} models are still to be read")
            return found

        def opened(spec: ModelSpec) -> Model | ModelError:
            began_s = clock.monotonic()
            try:
                folder, mirror, trusted = settings.weights_dir, settings.weights_mirror, settings.trust_exported
                model = open_model(spec, folder, allow_download=not only, mirror=mirror, trusted=trusted)
            except ModelError as error:  # The others are read all the same: whoever mends one file hears of the next.
                return error
            read.append(spec.name)
            log.info("%s is read, %.1f s; %d of %d", *(spec.name, clock.monotonic() - began_s, len(read), len(specs)))
            missing = ", ".join(each.name for each in specs if each.name not in read)
            say(f"{len(read)} of {len(specs)} models are read ({', '.join(read)}); not yet: {missing}")
            return model

        # First all that is elsewhere: a library that builds a network ends every download in its process.
        specs = [here(spec) for spec in specs]
        with ThreadPoolExecutor(2) as pool:  # Files with a graph of their own are tried by child processes.
            found = list(pool.map(opened, specs))
        models = [each for each in found if not isinstance(each, ModelError)]
        failed = [(spec.name, each) for spec, each in zip(specs, found, strict=True) if isinstance(each, ModelError)]
        if len(failed) > 1:
            lines = (f"{name}: {error}" for name, error in failed)
            raise ModelError("\n".join([f"{len(failed)} of {len(specs)} models cannot be read.", *lines]))
        for _, error in failed:
            raise error
        say("all models are read, devices are being looked for")
        return models


def main(channel: Channel, messages: list[bytes]) -> None:
    """Answer one question in the process that has torch. `messages`: those received already."""
    name_process("anychip-opening")
    while not messages:
        channel.wait(None)
        messages = channel.receive()
    [question] = reader(Wanted)(messages[0])

    def say(answer: Opened | Refused | str, *descriptors: int) -> None:
        with contextlib.suppress(OSError):  # The server is gone, and this process will be.
            channel.send(to_packet((answer,)), descriptors)

    try:
        say(*_found(question, say))
    except ModelError as error:
        say(Refused("models", str(error)))
    except BackendError as error:
        say(Refused("devices", str(error)))
    except Exception as error:
        log.debug("models cannot be read", exc_info=True)
        say(Refused("", f"{error}" or type(error).__name__))
    while channel.waiting:
        channel.wait(None)
        channel.flush()


def _found(question: Wanted, say: Callable[[str], None]) -> tuple[Opened, int]:
    settings, before = Settings(**question.settings), dict(os.environ)
    models = Opening().models(settings, question.model, progress=say)
    choice = None if question.model else chosen(settings).as_data()
    changed = dict(os.environ.items() - before.items())
    content = write_packed(([described(each) for each in models], choice), "anychip-models")
    return Opened(changed, sys.path), content


def chosen(settings: Settings) -> Choice:
    """Ask the devices that the settings want, in seconds, and return the choice. Raises BackendUnavailableError."""
    from backends import choose

    simulated.configure(settings.simulate, settings.null, settings.cache_dir.expanduser())
    choice = choose(settings.device)
    if choice.simulated:
        log.warning("%s is simulated: the CPU computes its answers", choice.backend.name)
    for device, reason in choice.left_out.items():
        log.warning("%s does not answer and is left out: %s", device, reason)
    log.info("served by %s", ", ".join(f"{each} ({choice.device(each).name})" for each in choice.devices))
    if choice.refusals:
        without = choice.backend.facts.device_type == "cpu"
        text = "no accelerator can be used, the CPU serves" if without else "others do not serve"
        log.log(logging.WARNING if without else logging.INFO, "%s; anychip devices says why", text)
    return choice
