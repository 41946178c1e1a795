"""Measure how many JPEGs a second one card answers over HTTP, for one service and several that share card and port.

One service has one event loop. With a fast card and many cores this loop is the bottleneck. Several
services (`--reuse-port`) have one loop each, and a worker each on the same card. Measured are the cost and gain of
this, and the work of each kind of process for an answer. The load comes from processes of the same machine, which are
counted too: they take its cores.

    python -m benchmarks.card_load --device cuda --engine graph --precision fp16 --services 1,2,4

Owns: the services, the load processes, rounds and figures. Must not know what the engines do.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from anychip_tools.benchmark.load import ClosedLoad, drive, percentile
from backends.host import core_count
from benchmarks import servers


def main() -> None:
    """Run the measurements and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--weights", default="sample")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--batch-sizes", default="1,8,32,64")
    parser.add_argument("--services", default="1,2", help="how many share the card, one after the other")
    parser.add_argument("--ingresses", default="", help="as --ingresses of `anychip serve`, one after the other")
    parser.add_argument("--decoders", type=int, default=0, help="of all services together; 0: one a core")
    parser.add_argument("--connections", type=int, default=256, help="of all load processes together")
    parser.add_argument("--load-processes", type=int, default=0, help="0: one for every four cores")
    parser.add_argument("--image", type=Path, help="a JPEG (default: a sample image)")
    parser.add_argument("--seconds", type=float, default=5, help="length of one measurement")
    parser.add_argument("--rounds", type=int, default=2, help="how often each is measured; the median counts")
    parser.add_argument("--options", default="", help="more options of `anychip serve`, separated by spaces")
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for count, ingresses in itertools.product(given.services.split(","), given.ingresses.split(",")):
        row = _measured(given, int(count), ingresses)
        cpu = ", ".join(f"{role} {milliseconds}" for role, milliseconds in row["cpu_ms_per_answer"].items())
        print(
            f"{row['services']} services, ingresses {row['ingresses']}: {row['answers_per_s']} answers/s, "
            f"p50 {row['p50_ms']} ms, p99 {row['p99_ms']} ms, errors {row['errors']}; CPU ms an answer: {cpu}",
            flush=True,
        )
        rows.append(row)
        if given.json:  # After each row: a lent machine may be taken back before the last row.
            given.json.write_text(json.dumps({"date": time.strftime("%Y-%m-%d"), "rows": rows}, indent=2) + "\n")


def _measured(given: argparse.Namespace, count: int, ingresses: str) -> dict[str, Any]:
    image = given.image.read_bytes() if given.image else servers.sample_image()
    port = servers.free_port()
    decoders = max(1, (given.decoders or core_count()) // count)
    options = ("--weights", given.weights, "--device", given.device, "--engine", given.engine)
    options += ("--precision", given.precision, "--batch-sizes", given.batch_sizes, "--decoders", str(decoders))
    options += ("--reuse-port", str(port), *(("--ingresses", ingresses) if ingresses else ()), *given.options.split())
    processes = given.load_processes or max(1, core_count() // 4)
    connections = max(1, given.connections // processes)
    request = servers.service_request(given.model, image)
    with contextlib.ExitStack() as stack:
        # All at once: a start is mostly waiting.
        with ThreadPoolExecutor(count) as starters:
            starting = [servers.service(given.model, *options) for _ in range(count)]
            running = list(starters.map(stack.enter_context, starting))
        pool = stack.enter_context(ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")))

        def loaded(seconds: float) -> list[ClosedLoad]:
            return [
                each.result()
                for each in [pool.submit(drive, port, request, connections, seconds) for _ in range(processes)]
            ]

        loaded(1)  # Connections, first pages of the arena, the load processes themselves.
        rounds = []
        for _ in range(given.rounds):
            before = _cpu_by_role(running)
            loads = loaded(given.seconds)
            rounds.append((loads, {role: used - before.get(role, 0.0) for role, used in _cpu_by_role(running).items()}))
    answered = [sum(len(load.latencies_s) for load in loads) for loads, _ in rounds]
    latencies = [latency for loads, _ in rounds for load in loads for latency in load.latencies_s]
    total = max(1, sum(answered))
    roles = sorted({role for _, used in rounds for role in used})
    return {
        "services": count,
        "ingresses": ingresses or "as by default",
        "decoders": decoders * count,
        "load_processes": processes,
        "connections": connections * processes,
        "cores": core_count(),
        "answers_per_s": round(statistics.median(sum(load.answers_per_s for load in loads) for loads, _ in rounds), 1),
        "p50_ms": round(1e3 * percentile(latencies, 50), 1) if latencies else None,
        "p99_ms": round(1e3 * percentile(latencies, 99), 1) if latencies else None,
        "errors": sum(sum(load.errors.values()) for loads, _ in rounds for load in loads),
        "cpu_ms_per_answer": {
            role: round(1e3 * sum(used.get(role, 0.0) for _, used in rounds) / total, 3) for role in roles
        },
    }


def _cpu_by_role(running: list[servers.Server]) -> dict[str, float]:
    """Return the seconds used so far, of all services together, and of the processes that load them."""
    used: dict[str, float] = {}
    for server in running:
        for role, seconds in server.cpu_by_role().items():
            used[role] = used.get(role, 0.0) + seconds
    ours = {server.process.pid for server in running}
    used["load"] = sum(servers.cpu_s(child) for child in psutil.Process().children() if child.pid not in ours)
    return used


if __name__ == "__main__":
    main()
