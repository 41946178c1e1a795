"""An ingress in a process of its own: it answers the hot routes, over a link to the owner (--ingresses).

    owner ─► connections that it has accepted ─► http ─► ingress ─► RemoteLink ─► owner ─► results ─► answers

It has no models' networks, no devices and no port: connections come with their descriptors. One with a request for
another route goes to the owner for its rest. The process must not import torch.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from starlette.types import Receive, Scope, Send

from app.access.access import Access
from app.access.keys import KeysError
from app.access.tls import Tls
from app.compat import torchserve
from app.config import Settings
from app.errors import ServiceError
from app.http.hot import protocol
from app.http.server import Server, run
from app.ingress.budget import freeze
from app.ingress.ingress import Ingress
from app.ingress.listener import Listener, make_room
from app.ingress.remote import RemoteLink
from app.link import Administration, ServedModel, Tables
from app.link_messages import (
    Closed,
    CounterDeltas,
    Draining,
    End,
    Here,
    IngressBegin,
    IngressReady,
    Look,
    NewConnection,
    NewShares,
    ToIngress,
    Tunnelled,
)
from app.observability.counter_deltas import counter_deltas
from app.observability.metrics import Metrics, ModelMetrics
from app.observability.tracing import from_settings
from app.observability.triton_statistics import ModelStatistics
from app.processes.arena import ROOM, Blocks
from app.processes.channel import Channel, DescriptorLostError, Talk
from app.processes.forking import name_process
from app.processes.packing import read_packed
from app.serving.cascades import parse_cascade
from models.confinement import confine_server, python_files, refuse_rings

log = logging.getLogger("anychip.ingress")


def main(channel: Channel, messages: list[bytes]) -> None:
    """Run the process; `messages`: those that have come already."""
    name_process("anychip-ingress")
    refuse_rings()
    try:
        run(_Process().run(channel, messages))
    except (OSError, MemoryError, ServiceError, KeysError) as error:
        log.error("an ingress cannot start: %s", error)
        raise SystemExit(1) from None


_DESCRIPTORS = 2
"""Descriptors of a tunnelled connection: the client's, and the end of the socket that passes it to the owner."""


def _secrets(settings: Settings) -> set[Path]:
    """Return the folders of files that are read again after a change: another file may have their name then."""
    files = (settings.api_keys_file, settings.tls_cert, settings.tls_key, settings.tls_client_ca)
    found = [Path(each).expanduser().absolute() for each in files if each]
    return {folder for each in found for folder in (each.parent, each.resolve().parent)}


async def _nothing_else(_scope: Scope, _receive: Receive, _send: Send) -> None:
    raise AssertionError("what is not for a hot route goes to the owner")


@dataclass
class _OwnersState:
    """State that hot routes ask of `Administration`; the owner answers all other questions itself."""

    draining: bool = False


class _Server(Server):
    """Server that listens nowhere."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.listener = Listener(self.connection, self.connections, self.config.ssl)
        self.servers = [self.listener]
        self.started = True


class _Process:
    """State that the owner's messages change, and all that lives as long as this process."""

    def __init__(self) -> None:
        self._ending = asyncio.Event()
        self._state = _OwnersState()
        self._traffic: dict[str, Any] = {}
        self._server: _Server | None = None

    async def run(self, channel: Channel, messages: list[bytes]) -> None:
        """Serve until the owner says so, or has ended."""
        self._begun: asyncio.Future[IngressBegin] = asyncio.get_running_loop().create_future()
        self._talk = Talk(channel, ToIngress, self._received, messages)
        self._talk.say(Here())  # The owner sends the rest once we listen.
        ended = asyncio.ensure_future(asyncio.shield(self._talk.ended))
        await asyncio.wait((self._begun, ended), return_when=asyncio.FIRST_COMPLETED)
        if not self._begun.done():
            return
        begin, models = self._begun.result(), read_packed(self._talk.take_descriptor())
        settings = Settings(**begin.settings)
        room = make_room(settings.max_connections, _DESCRIPTORS)
        confine_server([*python_files(), *_secrets(settings)], network=bool(settings.trace_endpoint))
        metrics = Metrics()
        forms = [
            ServedModel(index, model, ModelMetrics(metrics, model.name), ModelStatistics())
            for index, model in enumerate(models)
        ]
        for form, floats in zip(forms, begin.floats, strict=False):
            if floats >= 0:
                form.floats = forms[floats]
                form.floats.metrics, form.floats.statistics = form.metrics, form.statistics
        served = {form.model.name: form for form in forms[: begin.names]}
        cascades = {each.name: each for each in (parse_cascade(text, begin.written) for text in settings.stage_specs)}
        tracing = from_settings(settings)
        tables = Tables(
            settings,
            served,
            cascades,
            metrics,
            tracing,
            begin.simulated,
            cast(Administration, self._state),
            self._traffic,
        )
        most_bytes = int(begin.share * settings.max_buffered_bytes)
        blocks = Blocks(ROOM * most_bytes)
        self._link = link = RemoteLink(tables, forms, self._talk, blocks)
        statistics = {name: form.statistics for name, form in served.items()}
        link.on_counted = lambda: self._talk.say(CounterDeltas(counter_deltas(metrics, statistics)))
        ingress = Ingress(link, Access(settings), begin.share)
        tls = Tls.of(settings)
        kind = protocol(ingress, more=(torchserve.HOT,), tunnel=self._open_tunnel)
        never = asyncio.Event()
        self._server = server = _Server(
            _nothing_else, kind, settings, ("", 0), ingress.connections, hurry=never, tls=tls
        )
        serving = asyncio.create_task(server.serve())
        renewing = [asyncio.create_task(tls.keep_fresh())] if tls else []
        while not server.started:  # noqa: ASYNC110 - uvicorn tells no other way
            await asyncio.sleep(0.001)
        freeze()
        self._talk.say(IngressReady(room), descriptor=blocks.descriptor)
        ending = asyncio.ensure_future(self._ending.wait())
        await asyncio.wait((ending, ended), return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            ingress.refuse_what_is_under_way()
            server.should_exit = True
            await asyncio.wait((serving, ended), return_when=asyncio.FIRST_COMPLETED)
            link.on_counted()
            self._talk.flush()
        for task in (serving, ending, *renewing):
            task.cancel()
        await asyncio.gather(serving, ending, *renewing, return_exceptions=True)
        await ingress.close()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)

    def _received(self, message: ToIngress) -> None:
        match message:
            case IngressBegin():
                self._begun.set_result(message)
            case NewConnection():
                assert self._server is not None
                try:
                    accepted = socket.socket(fileno=self._talk.take_descriptor())
                except DescriptorLostError:
                    self._closed(message.connection)
                    return
                made = self._server.connection()
                made.tunnel_as(message.connection)
                ended = partial(self._closed, message.connection)  # The owner counts connections.
                self._server.listener.begin(accepted, str(message.connection), ended, made)
            case NewShares():
                self._traffic.clear()
                self._traffic.update(message.shares)
            case Draining():
                self._state.draining = True
            case Look():
                self._link.on_counted()
                self._talk.say(Here())
            case End():
                self._ending.set()
            case _:
                self._link.received(message)

    def _open_tunnel(self, connection: int, encrypted: bool, theirs: socket.socket) -> None:
        self._talk.say(Tunnelled(connection, encrypted), descriptor=theirs.detach())

    def _closed(self, connection: int) -> None:
        self._talk.say(Closed(connection))
