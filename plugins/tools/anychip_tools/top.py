"""`anychip top`: a service in the terminal, live. Must not import the service: it may run on another machine."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping
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


def fetch_stats(client: httpx.Client) -> Stats:
    """Ask the service for its statistics. Raises CommandError."""
    try:
        answer = client.get("/v1/stats")
    except httpx.HTTPError as error:
        raise CommandError(f"nothing answers at {client.base_url}: {error}") from None
    if answer.status_code != 200:
        text = printable(answer.text[:200])
        raise CommandError(f"{client.base_url} has no /v1/stats for us (status {answer.status_code}): {text}")
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
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="the service (default: %(default)s)")
    key = os.environ.get("ANYCHIP_KEY", "")
    add("--key", default=key, help="API key for it (default: $ANYCHIP_KEY)")
    add("--interval-s", type=float, default=1.0, help="seconds between two looks (default: %(default)g)")
    add("--once", action="store_true", help="print what one interval shows, and end")
    add("--json", action="store_true", help="print what the service says now as JSON, and end")


def run(parsed: argparse.Namespace) -> None:
    """Show the service until Ctrl-C, or once after one interval. Raises CommandError if nothing answers."""
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
        with Live(screen(before, before), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(parsed.interval_s)
                try:
                    now = fetch_stats(client)
                except CommandError as error:  # It may come back.
                    live.update(Text(str(error), "red"), refresh=True)
                    continue
                live.update(screen(before, now), refresh=True)
                before = now


def screen(before: Stats, now: Stats) -> RenderableType:
    """Draw the whole screen in 80 columns, with the rates between the two answers; models with most requests first."""
    decoders, elapsed_s = now["decoders"], now["uptime_s"] - before["uptime_s"]
    state = Text("ready", "green") if now["ready"] else Text("not ready", "bold red")
    simulated = ", simulated devices" if now["simulated"] else ""
    head = Text.assemble(f"anychip {now['version']}, up {_duration(now['uptime_s'])}{simulated}, ", state)
    restarts = sum(decoders["restarts"].values())
    decoding = Text(f"{decoders['up']} decoders, {decoders['waiting']} images wait for them, {restarts} restarts")
    models = _pairs("model", before["models"], now["models"])
    models.sort(key=lambda pair: -sum(pair[1]["requests"].values()))
    tables = [
        _devices(_pairs("device", before["devices"], now["devices"]), elapsed_s),
        _clients(before.get("clients", []), now.get("clients", []), elapsed_s),
        _traffic(models, elapsed_s),
    ]
    return Group(head, decoding, *(part for table in tables if table.row_count for part in (Text(), table)))


def _clients(before: list[Stats], now: list[Stats], elapsed_s: float) -> Table:
    table = _table("busiest clients", "req/s", "refused/s")
    for past, client in _pairs("client", before, now)[:_CLIENTS]:
        rates = (_rate(client[name] - past[name], elapsed_s) for name in ("requests", "refused"))
        table.add_row(Text(client["client"]), *rates)
    return table


def _pairs(name: str, before: list[Stats], now: list[Stats]) -> list[tuple[Stats, Stats]]:
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


def _devices(devices: list[tuple[Stats, Stats]], elapsed_s: float) -> Table:
    table = _table("device", "busy", "used GiB", "power", "temp.", "images/s", "workers", "restarts")
    for past, device in devices:
        memory = device["memory_bytes"]
        table.add_row(
            Text(device["device"], "bold red" if device["healthy"] == 0 else ""),
            _known(device["utilization_ratio"], "{:.0%}"),
            f"{_gib(memory['used'])}/{_gib(memory['total'])}",
            _known(device["power_watts"], "{:.0f} W"),
            _known(device["temperature_celsius"], "{:.0f} °C"),
            _rate(device["images"] - past["images"], elapsed_s),
            Text(str(device["workers"]), "" if device["up"] else "bold red"),
            str(sum(device["restarts"].values())),
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
