"""A service a card, behind one port, by one command: `anychip serve --per-card`.

    clients ──► port ── the system deals connections out ─┬► service of npu:0 ◄─┐
                                                          └► service of npu:1 ◄─┤ asks all, starts, restarts
    port + 2, and what each service hands on: /metrics, ready, loads ─────────► this process

Owns: the services' processes and where they run (cores, memory), which of them is restarted when, and the answers that
are of all cards: readiness, metrics, statistics, devices, changes of models. Each card's service has queues, decoders
and workers of its own: what breaks one costs the others nothing. Must not see an image, nor import torch: it lives as
long as the service.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from anychip_base.interpreter import python_command
from app import logs
from app.access.rules import HEADERS_FOR_CARDS, OF_ALL_CARDS
from app.config import Settings
from app.config.network import ADMIN_PORT_DISTANCE, LOOPBACK
from app.errors import ERRORS, Code
from app.fleet.breaker import Breaker
from app.ingress.interrupt import ended_before
from app.processes import affinity

log = logging.getLogger("anychip.cards")

_POLL_S = 0.5
_POLL_TIMEOUT_S = 5.0
_SILENT_POLLS = 6
"""So many questions without an answer in a row: the service of a card has hung, and is killed."""
_EVENTS_S = 0.5
_LEAST_DECODERS = 2
_LEAST_GRACE_S = 1.0
"""A card's service that ends answers for so long before it refuses, and closes the connections that it answers: their
clients go on at another card."""


class Card(NamedTuple):
    """A device, and what is near it: `cores` it is pinned to (empty: none), `node` of memory (None: any)."""

    device: str
    cores: tuple[int, ...] = ()
    node: int | None = None


class CardService:
    """The service of one card: a process that is started again when it ends. `port`: of its administration."""

    def __init__(self, card: Card, command: Callable[[Card, int], Sequence[str]]) -> None:
        self.card, self._command = card, command
        self.ready = False
        self.restarts = 0
        self.port = 0
        self._breaker = Breaker()
        self._process: asyncio.subprocess.Process | None = None
        self._ending = asyncio.Event()
        self._commanded: asyncio.subprocess.Process | None = None  # It was told to end, so that another begins.
        self.first_ready = asyncio.Event()
        """Set when it is ready for the first time, or has ended before that."""

    async def keep(self, client: httpx.AsyncClient) -> None:
        """Start the service, watch it, start it again: until `end`."""
        while not self._ending.is_set():
            began_s = time.monotonic()
            code, was_ready = await self._run(client)
            self.first_ready.set()
            if self._ending.is_set():
                return
            commanded, self._commanded = self._commanded, None
            if commanded is not None and self._process is commanded:
                log.info("the service of %s has ended as it was told; the next begins", self.card.device)
                continue
            now_s = time.monotonic()
            pause_s = self._breaker.died(now_s, answered=was_ready, served_s=now_s - began_s if was_ready else 0.0)
            self.restarts += 1
            log.error("the service of %s ended (exit code %d); the next in %g s", self.card.device, code, pause_s)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ending.wait(), pause_s)

    async def _run(self, client: httpx.AsyncClient) -> tuple[int, bool]:
        """One process from its start to its end; its exit code, and whether it has been ready."""
        self.port = _free_port()
        place = partial(affinity.settle, self.card.cores, self.card.node)
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *self._command(self.card, self.port), stdout=asyncio.subprocess.DEVNULL, preexec_fn=place
            )
        except (OSError, subprocess.SubprocessError) as error:
            log.error("the service of %s could not be started: %s", self.card.device, error)
            return 1, False
        if self._ending.is_set():  # While it was started.
            self._signal(signal.SIGTERM)
        ended = asyncio.create_task(process.wait())
        was_ready, silent = False, 0
        try:
            while not ended.done():
                try:
                    answer = await client.get(f"{self.url}/v2/health/ready", timeout=_POLL_TIMEOUT_S)
                    self.ready, silent = answer.status_code == 200, 0
                except httpx.HTTPError:
                    self.ready, silent = False, silent + was_ready
                if self.ready:
                    was_ready = True
                    self.first_ready.set()
                if silent >= _SILENT_POLLS and not self._ending.is_set():
                    log.error("the service of %s answers no more: it is killed", self.card.device)
                    process.kill()
                await asyncio.wait((ended,), timeout=_POLL_S)
            return await ended, was_ready
        finally:
            self.ready = False
            ended.cancel()

    @property
    def url(self) -> str:
        """Where its administration answers."""
        return f"http://{LOOPBACK}:{self.port}"

    def end(self, *, at_once: bool = False) -> None:
        """Have it drain and end, for good; `at_once`: without the draining."""
        self._ending.set()
        self._signal(signal.SIGKILL if at_once else signal.SIGTERM)

    async def restart(self, timeout_s: float) -> bool:
        """Have it drain, end and start again; whether it is ready again in time."""
        self._commanded = old = self._process
        self._signal(signal.SIGTERM)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._replaced(old), timeout_s)
        return self.ready

    async def _replaced(self, old: asyncio.subprocess.Process | None) -> None:
        while self._process is old or not self.ready:  # noqa: ASYNC110 - As often as it is asked itself.
            await asyncio.sleep(_POLL_S)

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)


class Cards:
    """All services of a host, and what is asked of all of them. `share`: of cards that must be ready."""

    def __init__(self, services: Sequence[CardService], share: float, client: httpx.AsyncClient) -> None:
        self._services, self._share, self._client = services, share, client
        self.draining = False
        answers: dict[str, Callable[[Request], Any]] = {
            "/v2/health/live": self._live,
            "/v2/health/ready": self._ready,
            "/ping": self._ready,
            "/metrics": self._metrics,
            "/v1/stats": partial(self._merged, adding=True),
            "/v1/stats/stream": self._stream,
            "/v1/devices": self._merged,
            "/v1/models": self._merged,
            "/v1/devices/{device}:release": self._release,
            "/v2/repository/models/{model}/load": self._one_after_the_other,
            "/v2/repository/models/{model}/unload": self._one_after_the_other,
            "/v2/repository/models/{model}/traffic": self._one_after_the_other,
        }
        self.app = Starlette(
            routes=[
                Route(path, answers[path], methods=["POST" if method == "POST" else "GET"])
                for path, method in (*OF_ALL_CARDS.items(), ("/v2/health/live", "GET"))
            ]
        )

    @property
    def ready(self) -> bool:
        """Whether enough cards serve."""
        return not self.draining and sum(each.ready for each in self._services) >= self._share * len(self._services)

    async def restart_all(self, timeout_s: float) -> None:
        """One card after the other, each drained first: the others serve meanwhile. Stops at one that fails."""
        for each in self._services:
            if not await each.restart(timeout_s):
                log.error("%s is not ready again: the others are not restarted", each.card.device)
                return
        log.info("all cards' services were restarted")

    async def _live(self, _: Request) -> Response:
        return JSONResponse({"live": True})

    async def _ready(self, _: Request) -> Response:
        if self.ready:
            return JSONResponse({"ready": True})
        missing = ", ".join(each.card.device for each in self._services if not each.ready)
        reason = "the service is shutting down" if self.draining else f"these cards are not ready: {missing}"
        return _error("DRAINING" if self.draining else "NOT_READY", reason)

    async def _asked(self, service: CardService, request: Request, body: bytes = b"") -> httpx.Response | None:
        """The answer of one service; None where it gives none."""
        headers = {name: request.headers[name] for name in HEADERS_FOR_CARDS if name in request.headers}
        url = f"{service.url}{request.url.path}"
        try:
            return await self._client.request(
                request.method, url, params=request.query_params, headers=headers, content=body, timeout=None
            )
        except httpx.HTTPError:
            return None

    async def _all(self, request: Request) -> tuple[dict[str, httpx.Response], Response | None]:
        """The good answers, by card; where there is none, what to answer instead."""
        asked = await asyncio.gather(*(self._asked(each, request) for each in self._services))
        given = {each.card.device: got for each, got in zip(self._services, asked, strict=True) if got is not None}
        good = {device: got for device, got in given.items() if got.status_code == 200}
        if good:
            return good, None
        refusal = next(iter(given.values()), None)
        return {}, _error("NOT_READY", "no card's service answers") if refusal is None else _relayed(refusal)

    async def _metrics(self, request: Request) -> Response:
        texts, refusal = await self._all(request)
        if refusal is not None:
            return refusal
        first = next(iter(texts.values()))
        own: dict[str, tuple[str, str, Callable[[CardService], int]]] = {
            "card_up": ("gauge", "Whether the service of a card is ready", lambda each: int(each.ready)),
            "card_restarts_total": ("counter", "Services that ended by themselves", lambda each: each.restarts),
        }
        lines = [
            line
            for name, (kind, text, value) in own.items()
            for line in (
                f"# HELP anychip_{name} {text}",
                f"# TYPE anychip_{name} {kind}",
                *(f'anychip_{name}{{card="{each.card.device}"}} {value(each)}' for each in self._services),
            )
        ]
        merged = by_card({device: each.text for device, each in texts.items()})
        end = "# EOF\n" if merged.endswith("# EOF\n") else ""
        content = merged.removesuffix(end) + "\n".join(lines) + "\n" + end
        return Response(content, headers={"content-type": first.headers["content-type"]})

    async def _merged(self, request: Request, *, adding: bool = False) -> Response:
        answers, refusal = await self._all(request)
        if refusal is not None:
            return refusal
        found: dict[str, Any] = {}
        for each in answers.values():
            found = merged(found, each.json(), adding=adding) if found else each.json()
        if adding:
            found["ready"] = self.ready
        return JSONResponse(found)

    async def _stream(self, request: Request) -> Response:
        path = request.url.path.removesuffix("/stream")
        asked = Request({**request.scope, "path": path, "raw_path": path.encode()})

        async def events() -> AsyncIterator[bytes]:
            yield b"retry: 2000\n\n"
            while not self.draining:
                answer = await self._merged(asked, adding=True)
                if answer.status_code != 200:
                    return
                yield b"event: stats\ndata: " + bytes(answer.body) + b"\n\n"
                await asyncio.sleep(_EVENTS_S)

        return StreamingResponse(events(), media_type="text/event-stream", headers={"cache-control": "no-store"})

    async def _release(self, request: Request) -> Response:
        device = request.path_params["device"]
        found = next((each for each in self._services if each.card.device == device), None)
        answer = None if found is None else await self._asked(found, request)
        if answer is None:
            there_is = ", ".join(each.card.device for each in self._services)
            return _error("NOT_FOUND", f"no service of a card {device!r} answers; there is {there_is}")
        return _relayed(answer)

    async def _one_after_the_other(self, request: Request) -> Response:
        body = await request.body()
        answer: httpx.Response | None = None
        for each in self._services:
            answer = await self._asked(each, request, body)
            if answer is None:
                return _error("NOT_READY", f"the service of {each.card.device} does not answer; try again")
            if answer.status_code != 200:
                break
        assert answer is not None
        return _relayed(answer)


def _error(code: Code, message: str) -> Response:
    return JSONResponse({"error": message, "code": code}, ERRORS[code].status)


def _relayed(answer: httpx.Response) -> Response:
    headers = {name: answer.headers[name] for name in ("content-type", "retry-after") if name in answer.headers}
    return Response(answer.content, answer.status_code, headers)


def by_card(texts: Mapping[str, str]) -> str:
    """Prometheus' text of several services as one, each sample with the label `card`; a family stays together."""
    families: dict[str, tuple[list[str], list[str]]] = {}
    end = ""
    for card, text in texts.items():
        about, samples = families.setdefault("", ([], []))
        for line in text.splitlines():
            if line == "# EOF":
                end = line + "\n"
            elif line.startswith("#"):
                about, samples = families.setdefault(line.split(" ", 3)[2], ([], []))
                if line not in about:
                    about.append(line)
            elif line:
                name, brace, rest = line.partition("{")
                if not brace or " " in name:
                    name, _, rest = line.partition(" ")
                    rest = "} " + rest
                comma = "," if brace and rest[0] != "}" else ""
                samples.append(f'{name}{{card="{card}"{comma}{rest}')
    return "".join(f"{line}\n" for about, samples in families.values() for line in (*about, *samples)) + end


def merged(one: Any, other: Any, *, adding: bool = False) -> Any:
    """Two services' documents as one: entries of lists by their name, numbers of the same thing added where wanted."""
    match one, other:
        case dict(), dict():
            found = {**other, **one}
            for key in one.keys() & other.keys():
                same = key == "uptime_s"
                found[key] = max(one[key], other[key]) if same else merged(one[key], other[key], adding=adding)
            return found
        case list(), list() if all(isinstance(each, dict) for each in (*one, *other)):
            named = {_name(each): each for each in one}
            for each in other:
                name = _name(each)
                named[name] = merged(named[name], each, adding=adding) if name in named else each
            return list(named.values())
        case bool(), bool():
            return one and other
        case ((int() | float()), (int() | float())) if adding:
            return one + other
    return one


def _name(entry: Mapping[str, Any]) -> Any:
    return next((entry[key] for key in ("model", "device", "name") if key in entry), id(entry))


def placed(devices: Sequence[tuple[str, str]], *, pinned: bool) -> list[Card]:
    """Cards with the cores and the memory that are theirs. `devices`: ids, and PCI addresses where these are known.

    Cards that are near the same cores share them out: hyperthreads of a core, which the system lists apart, stay
    together. A card without a known place, or with less than two cores, is not pinned.
    """
    near = {device: affinity.near(pci) for device, pci in devices if pinned and pci}
    cards = []
    for device, pci in devices:
        if device not in near:
            log.info("%s is not pinned: %s", device, "its PCI address is unknown" if pinned else "--affinity off")
            cards.append(Card(device))
            continue
        ranges, node = near[device]
        beside = [other for other, where in near.items() if where == near[device]]
        place = beside.index(device)
        cores = tuple(
            core
            for cores in ranges
            for core in cores[place * len(cores) // len(beside) : (place + 1) * len(cores) // len(beside)]
        )
        if len(cores) < 2:
            log.info("%s (%s) is not pinned: %d cores are near it", device, pci, len(cores))
            cards.append(Card(device))
        else:
            log.info("%s (%s) has %d cores (%s), memory node %s", device, pci, len(cores), _ranges(cores), node)
            cards.append(Card(device, cores, node))
    return cards


def _ranges(cores: Sequence[int]) -> str:
    parts: list[list[int]] = []
    for core in cores:
        if parts and core == parts[-1][-1] + 1:
            parts[-1].append(core)
        else:
            parts.append([core])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def _chosen(settings: Settings) -> list[tuple[str, str]]:
    """The devices that are meant, with their PCI addresses. Raises BackendError.

    A process of its own looks, as that imports torch.
    """
    asked = pickle.dumps((settings, (settings.log_level, settings.log_format)))
    command = python_command("-c", "from app.cards import say_chosen; say_chosen()")
    done = subprocess.run(command, input=asked, stdout=subprocess.PIPE, check=False)
    if not done.stdout:
        raise OSError(f"the process that looks for devices has ended (status {done.returncode})")
    found = pickle.loads(done.stdout)
    if isinstance(found, Exception):
        raise found
    return list(found)


def say_chosen() -> None:
    """The inside of that process: settings from its standard input, the devices or an error to its standard output."""
    from app.serving.opening import chosen

    answers = os.dup(1)
    os.dup2(2, 1)  # What drivers print goes to the log.
    settings, style = pickle.load(sys.stdin.buffer)
    logs.configure(*style)
    try:
        choice = chosen(settings)
        answer: object = [(each, choice.pci_address(each)) for each in choice.devices]
    except Exception as error:
        answer = error
    with open(answers, "wb") as output:
        pickle.dump(answer, output)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind((LOOPBACK, 0))
        port: int = one.getsockname()[1]
        return port


class _StatusServer(uvicorn.Server):
    """uvicorn without its signal handling."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve_cards(settings: Settings, announce: Callable[[str], None]) -> int:
    """Serve until SIGTERM or SIGINT; SIGHUP restarts one card after the other. Raises BackendError, OSError."""
    logs.configure(settings.log_level, settings.log_format)
    asyncio.run(_serve(settings, placed(_chosen(settings), pinned=settings.affinity == "auto"), announce))
    return 0


async def _serve(settings: Settings, cards: Sequence[Card], announce: Callable[[str], None]) -> None:
    port = settings.port or _free_port()
    status_port = settings.admin_port or (port + ADMIN_PORT_DISTANCE if settings.port else _free_port())
    command = partial(_command, settings, (port, status_port), len(cards))
    services = [CardService(card, command) for card in cards]
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with httpx.AsyncClient(trust_env=False) as client:
        host_of_cards = Cards(services, settings.per_card, client)
        config = uvicorn.Config(
            host_of_cards.app, host=LOOPBACK, port=status_port, log_config=None, access_log=False, lifespan="off"
        )
        server = _StatusServer(config)
        restarting: set[asyncio.Task[None]] = set()

        def restart() -> None:
            if not restarting:
                task = loop.create_task(host_of_cards.restart_all(settings.start_timeout_s + settings.drain_s))
                restarting.add(task)
                task.add_done_callback(restarting.discard)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        loop.add_signal_handler(signal.SIGHUP, restart)
        answering = asyncio.create_task(server.serve())
        keeping = [asyncio.create_task(services[0].keep(client))]
        announcing = asyncio.create_task(_started(services, keeping, client, host_of_cards))
        try:
            if not await ended_before(announcing, stop):
                return
            await announcing
            announce(f"{'https' if settings.tls_cert else 'http'}://{settings.host}:{port}")
            log.info("%d cards serve; their administration is at http://%s:%d", len(cards), LOOPBACK, status_port)
            await stop.wait()
        finally:
            host_of_cards.draining = True
            announcing.cancel()
            for task in restarting:
                task.cancel()
            stop.clear()
            for each in services:
                each.end()
            ending = asyncio.gather(*keeping, return_exceptions=True)
            if not await ended_before(ending, stop):
                for each in services:
                    each.end(at_once=True)
            await ending
            server.should_exit = True
            await asyncio.gather(answering, announcing, *restarting, return_exceptions=True)


async def _started(
    services: Sequence[CardService], keeping: list[asyncio.Task[None]], client: httpx.AsyncClient, cards: Cards
) -> None:
    """Until enough cards serve. The first begins alone: what it compiles, the others find in the cache."""
    await services[0].first_ready.wait()
    keeping += [asyncio.create_task(each.keep(client)) for each in services[1:]]
    while not cards.ready:  # noqa: ASYNC110
        await asyncio.sleep(_POLL_S)


def _command(settings: Settings, ports: tuple[int, int], count: int, card: Card, admin_port: int) -> list[str]:
    """How the service of a card is started: with the settings that were given, but for what is its own."""
    port, status_port = ports
    given = json.loads(settings.model_dump_json(exclude_unset=True))
    given.update(device=card.device, per_card=0, port=0, reuse_port=port, admin_port=admin_port)
    if count > 1:
        given["grace_s"] = max(_LEAST_GRACE_S, settings.grace_s)
    if not settings.decoders:
        cores = len(card.cores) or len(os.sched_getaffinity(0)) // count
        given["decoders"] = max(_LEAST_DECODERS, cores)
    options = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    hidden = f"--card-of=http://{LOOPBACK}:{status_port}"
    return python_command("-m", "app", "serve", *options, hidden)
