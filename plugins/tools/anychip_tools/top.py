"""`anychip top`: a running service in the terminal, live.

Owns: the figures worked out from two answers of `GET /v1/stats`, and their look. Must not import the service: it may
run on another machine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import httpx
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from anychip_tools.report import in_json
from app.arguments import CommandError
from app.logs import printable

TEXT = "Devices, queues and rates of a running service, live."
EXAMPLE = "anychip top --url http://gpu7:8000"
Stats = Mapping[str, Any]
"""Part of the JSON of `GET /v1/stats`, as it came from the network."""
_TIMEOUT_S = 5.0
_NO_ERRORS = ("OK", "CANCELLED")
_CLIENTS = 3
_FEWEST_MODELS = 3


def fetch_stats(client: httpx.Client) -> Stats:
    """Ask the service for its statistics. Raises CommandError."""
    try:
        answer = client.get("/v1/stats")
    except httpx.HTTPError as error:
        raise CommandError(f"nothing answers at {client.base_url}: {error}") from None
    if answer.status_code != 200:
        said = printable(answer.text[:200])
        raise CommandError(f"{client.base_url} has no /v1/stats for us (status {answer.status_code}): {said}")
    stats: Stats = _without_controls(answer.json())
    return stats


def _without_controls(value: Any) -> Any:
    """Escape characters that move the terminal's cursor: the names come from the service, which may be hostile."""
    if isinstance(value, dict):
        return {printable(name): _without_controls(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_without_controls(each) for each in value]
    return printable(value) if isinstance(value, str) else value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the service (default: %(default)s)")
    key = os.environ.get("ANYCHIP_KEY", "")
    parser.add_argument("--key", default=key, help="API key for it (default: $ANYCHIP_KEY)")
    parser.add_argument(
        "--interval-s", type=float, default=1.0, help="seconds between two looks (default: %(default)g)"
    )
    parser.add_argument("--once", action="store_true", help="print what one interval shows, and end")
    parser.add_argument("--json", action="store_true", help="print what the service says now as JSON, and end")


def run(parsed: argparse.Namespace) -> None:
    """Show the service until q is pressed, or once after one interval. Raises CommandError if nothing answers."""
    if not parsed.interval_s > 0:
        raise CommandError("--interval-s must be more than 0")
    headers = {"Authorization": f"Bearer {parsed.key}"} if parsed.key else {}
    with httpx.Client(base_url=parsed.url, timeout=_TIMEOUT_S, headers=headers) as client:
        before = fetch_stats(client)
        if parsed.json:
            print(in_json(before))
            return
        console = Console(markup=False, emoji=False)
        if parsed.once:
            time.sleep(parsed.interval_s)
            console.print(screen(before, fetch_stats(client)))
            return
        with (
            _keys() as ended,
            Live(screen(before, before, console.height), console=console, screen=True, auto_refresh=False) as live,
        ):
            while not ended(parsed.interval_s):
                try:
                    now = fetch_stats(client)
                except CommandError as error:  # It may come back.
                    live.update(Text(str(error), "red"), refresh=True)
                    continue
                live.update(screen(before, now, console.height), refresh=True)
                before = now


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Yield a wait of so many seconds that returns True as soon as q is pressed. Without a terminal it only waits."""
    if not sys.stdin.isatty():
        yield lambda seconds: _pressed([], seconds)
        return
    keys = sys.stdin.fileno()
    before = termios.tcgetattr(keys)
    tty.setcbreak(keys)  # A key is read without Enter, and not shown.
    try:
        yield lambda seconds: _pressed([keys], seconds)
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, before)


def _pressed(keys: Sequence[int], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while select.select(keys, [], [], max(0.0, until - time.monotonic()))[0]:
        if os.read(keys[0], 1).lower() in (b"q", b""):  # Nothing: the terminal is gone.
            return True
    return False


def screen(before: Stats, now: Stats, height: int = 0) -> RenderableType:
    """Draw the whole screen in 80 columns, with the rates between the two answers. If `height` is set, keep to so
    many lines: leave out the tables that matter least, then the idle ones of many models.
    """
    decoders = now["decoders"]
    state = Text("ready", "green") if now["ready"] else Text("not ready", "bold red")
    simulated = ", simulated devices" if now["simulated"] else ""
    keys = "; q ends" if height else ""
    head = Text.assemble(f"anychip {now['version']}, up {_duration(now['uptime_s'])}{simulated}, ", state, keys)
    elapsed_s = now["uptime_s"] - before["uptime_s"]
    models = _pairs("model", before["models"], now["models"])
    devices = _pairs("device", before["devices"], now["devices"])
    traffic, clients = (
        _traffic(models, elapsed_s),
        _clients(before.get("clients", []), now.get("clients", []), elapsed_s),
    )
    tables = [traffic, clients, _devices(devices, elapsed_s), _stages(models), _workers(devices)]
    if any(_says_how_it_is(device) for _, device in devices):
        tables.append(_health(devices))
    tables = [table for table in tables if table.row_count]
    lines = 2 + sum(2 + table.row_count for table in tables)
    while 0 < height < lines and len(tables) > 3:
        lines -= 2 + tables.pop().row_count
    if 0 < height < lines:
        kept = max(_FEWEST_MODELS, traffic.row_count - (lines - height) - 1)
        busiest = sorted(models, key=_requests, reverse=True)[:kept]
        tables[0] = _traffic([pair for pair in models if pair in busiest], elapsed_s)
        tables[0].add_row(Text(f"{len(models) - kept} more", "dim"))
    restarts = sum(decoders["restarts"].values())
    decoding = Text(f"{decoders['up']} decoders, {decoders['waiting']} images wait for them, {restarts} restarts")
    return Group(head, decoding, *(part for table in tables for part in (Text(), table)))


def _requests(pair: tuple[Stats, Stats]) -> int:
    past, now = (sum(each["requests"].values()) for each in pair)
    return int(now - past)


def _clients(before: list[Stats], now: list[Stats], elapsed_s: float) -> Table:
    """Tabulate the busiest clients; one that has just joined them shows no rate yet."""
    table = _table("busiest clients", "req/s", "refused/s")
    for past, client in _pairs("client", before, now)[:_CLIENTS]:
        rates = (_rate(client[name] - past[name], elapsed_s) for name in ("requests", "refused"))
        table.add_row(Text(client["client"]), *rates)
    return table


def _pairs(name: str, before: list[Stats], now: list[Stats]) -> list[tuple[Stats, Stats]]:
    """Pair each entry of before and now; a new entry is paired with itself."""
    then = {each[name]: each for each in before}
    return [(then.get(each[name], each), each) for each in now]


def _traffic(models: list[tuple[Stats, Stats]], elapsed_s: float) -> Table:
    table = _table("model", "req/s", "errors/s", "images/s", "p50 ms", "p99 ms", "queue", "batch", "padding")
    for past, model in models:
        requests = {code: count - past["requests"].get(code, 0) for code, count in model["requests"].items()}
        errors = sum(count for code, count in requests.items() if code not in _NO_ERRORS)
        computed, padding = (model[name] - past[name] for name in ("images_computed", "padding"))
        then = past["request_seconds"]["buckets"]
        taken = {le: count - then.get(le, 0) for le, count in model["request_seconds"]["buckets"].items()}
        waiting, limit = model["queue_depth"] + model["queue_reserved"], model["queue_limit"]
        table.add_row(
            Text(model["model"], "" if model["ready"] else "red"),
            _rate(sum(requests.values()), elapsed_s),
            Text(_rate(errors, elapsed_s), "red" if errors else ""),
            _rate(model["images"] - past["images"], elapsed_s),
            *(_ms(quantile(share, taken)) for share in (0.5, 0.99)),
            Text(f"{waiting}/{limit}", "red" if waiting > 0.8 * limit else ""),
            _ratio(computed, model["batches"] - past["batches"], "{:.1f}"),
            _ratio(padding, padding + computed, "{:.0%}"),
        )
    return table


def _stages(models: list[tuple[Stats, Stats]]) -> Table:
    stages = ("decode", "queue", "infer", "postprocess")
    table = _table("model", "memory GiB", "in flight", *(f"{stage} ms" for stage in stages))
    for past, model in models:
        means = (_ms(_mean(past["stage_seconds"][stage], model["stage_seconds"][stage])) for stage in stages)
        table.add_row(model["model"], _gib(model["memory_bytes"]), str(model["images_in_flight"]), *means)
    return table


def _devices(devices: list[tuple[Stats, Stats]], elapsed_s: float) -> Table:
    table = _table("device", "busy", "used GiB", "reserved", "power", "temp.", "images/s", "images/J")
    for past, device in devices:
        memory, images = device["memory_bytes"], device["images"] - past["images"]
        known = None not in (device["energy_joules"], past["energy_joules"])
        joules = device["energy_joules"] - past["energy_joules"] if known else None
        table.add_row(
            device["device"],
            _known(device["utilization_ratio"], "{:.0%}"),
            f"{_gib(memory['used'])}/{_gib(memory['total'])}",
            _gib(memory["reserved"]),
            _known(device["power_watts"], "{:.0f} W"),
            _known(device["temperature_celsius"], "{:.0f} °C"),
            _rate(images, elapsed_s),
            _ratio(images, joules, "{:.2f}"),
        )
    return table


def _workers(devices: list[tuple[Stats, Stats]]) -> Table:
    table = _table("device", "vendor", "workers", "host GiB", "restarts", "hand-overs", "releases")
    for _, device in devices:
        restarts = sum(device["restarts"].values())
        table.add_row(
            device["device"],
            device["vendor"],
            Text(str(device["workers"]), "" if device["up"] else "bold red"),
            _gib(device["worker_resident_bytes"]),
            Text(str(restarts), "red" if restarts else ""),
            str(sum(device["handovers"].values())),
            str(sum(device["cache_releases"].values())),
        )
    return table


_HEALTH = ("healthy", "memory_temperature_celsius", "clock_hertz", "driver_errors")


def _says_how_it_is(device: Stats) -> bool:
    known = [device[name] for name in _HEALTH] + [*device["throttled"].values(), *device["memory_errors"].values()]
    return any(value is not None for value in known)


def _health(devices: list[tuple[Stats, Stats]]) -> Table:
    """Tabulate health. Errors count from the start of the service's watch; driver's: XIDs on NVIDIA."""
    table = _table("device", "health", "memory", "clock", "held back by", "memory errors", "driver's")
    for _, device in devices:
        healthy, throttled, errors = device["healthy"], device["throttled"], device["memory_errors"]
        reasons = [reason for reason, active in throttled.items() if active]
        known = any(active is not None for active in throttled.values())
        clock_hertz, driver_errors = device["clock_hertz"], device["driver_errors"]
        table.add_row(
            device["device"],
            Text("-" if healthy is None else "good" if healthy else "bad", "bold red" if healthy == 0 else ""),
            _known(device["memory_temperature_celsius"], "{:.0f} °C"),
            _known(None if clock_hertz is None else clock_hertz / 1e6, "{:.0f} MHz"),
            Text(", ".join(reasons) or ("nothing" if known else "-"), "red" if "heat" in reasons else ""),
            Text(_known(errors["uncorrected"], "{:.0f}"), "bold red" if errors["uncorrected"] else ""),
            Text(_known(driver_errors, "{:.0f}"), "bold red" if driver_errors else ""),
        )
    return table


def quantile(share: float, buckets: Mapping[str, int]) -> float | None:
    """Estimate the seconds under which such a share stayed, within its bucket, as Prometheus does.

    `buckets`: cumulative counts by upper bound in seconds, the bound as text. Return None if there are none, the last
    finite bound beyond it.
    """
    bounds = sorted((float(bound), count) for bound, count in buckets.items())
    total = bounds[-1][1] if bounds else 0
    if total <= 0:
        return None
    rank = share * total
    below_s, below = 0.0, 0
    for bound_s, count in bounds:
        if count >= rank and count > below:
            if bound_s == float("inf"):
                return below_s
            return below_s + (bound_s - below_s) * max(0.0, rank - below) / (count - below)
        below_s, below = bound_s, count
    return below_s


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", no_wrap=True)
    return table


def _mean(before: Stats, now: Stats) -> float | None:
    count = now["count"] - before["count"]
    return (now["seconds"] - before["seconds"]) / count if count > 0 else None


def _rate(count: float, elapsed_s: float) -> str:
    return f"{count / elapsed_s:.1f}" if elapsed_s > 0 else "-"


def _ratio(part: float, whole: float | None, form: str) -> str:
    return form.format(part / whole) if whole else "-"


def _known(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _ms(seconds: float | None) -> str:
    return _known(None if seconds is None else seconds * 1e3, "{:.1f}")


def _gib(size_bytes: float | None) -> str:
    return _known(None if size_bytes is None else size_bytes / 2**30, "{:.1f}")


def _duration(seconds: float) -> str:
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    return f"{days} d {hours % 24} h" if days else f"{hours} h {minutes % 60} min" if hours else f"{minutes} min"
