"""Source of the dashboard `anychip.json`: python deploy/grafana/dashboard.py

Owns: rows, panels and queries. The JSON is the classic model (schema 39), which Grafana 9 and newer import and
provision; it needs no rules, only a Prometheus that scrapes the service. `__inputs` and `__requires` are what
grafana.com wants of a shared dashboard: who imports it is asked for the data source. For a provisioned dashboard nobody
is asked, and the variable takes the first Prometheus. Must not need anything but the standard library. A test compares
the file with this script's output, and runs every query against a real Prometheus.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TARGET = Path(__file__).with_name("anychip.json")
SCHEMA = 39
_WIDTH = 24
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_INPUT = "DS_PROMETHEUS"
_OLDEST_GRAFANA = "10.4.0"
_KINDS = {
    "timeseries": "Time series",
    "stat": "Stat",
    "table": "Table",
    "heatmap": "Heatmap",
    "state-timeline": "State timeline",
}

SERVICE = 'namespace=~"$namespace",job=~"$job",instance=~"$instance"'
MODEL = f'{SERVICE},model=~"$model"'
DEVICE = f'{SERVICE},device=~"$device"'
BOTH = f'{MODEL},device=~"$device"'
DECODE, COMPUTE = f'{MODEL},stage="decode"', f'{MODEL},stage=~"queue|infer"'
ERRORS = 'code=~"INTERNAL|INFERENCE_FAILED|NOT_READY|QUEUE_FULL|DRAINING|DEADLINE_.*"'


@dataclass(frozen=True)
class Panel:
    """Panel: its queries and the form of the answer. `queries`: legend to expression.

    `alarm`: orange and red from these values on; `floor`: red below the first, green from the second on. `words`: names
    of 0 and 1 in a state-timeline.
    """

    title: str
    queries: dict[str, str]
    unit: str = "short"
    text: str = ""
    kind: str = "timeseries"
    width: int = 8
    height: int = 8
    stacked: bool = False
    alarm: tuple[float, float] | None = None
    floor: tuple[float, float] | None = None
    instant: bool = False
    words: tuple[str, str] = ("down", "up")
    limits: dict[str, float] = field(default_factory=dict)


def stat(
    title: str,
    query: str,
    unit: str,
    text: str,
    *,
    alarm: tuple[float, float] | None = None,
    floor: tuple[float, float] | None = None,
) -> Panel:
    """Make a panel of one number."""
    return Panel(title, {"": query}, unit, text, "stat", width=4, height=4, alarm=alarm, floor=floor, instant=True)


def table(title: str, query: str, text: str, width: int = 12) -> Panel:
    """Make a panel of the present state, one line a series."""
    return Panel(title, {"": query}, text=text, kind="table", width=width, instant=True)


def rate(metric: str, selector: str, by: str) -> str:
    """Return the increase a second, summed by labels."""
    return f"sum by ({by}) (rate({metric}{{{selector}}}[$__rate_interval]))"


def increase(metric: str, selector: str, by: str) -> str:
    """Return the recent increase, if there is any."""
    return f"sum by ({by}) (increase({metric}{{{selector}}}[$__rate_interval])) > 0"


def quantile(share: float, metric: str, selector: str, by: str = "model") -> str:
    """Return a quantile of a histogram."""
    return f"histogram_quantile({share}, {rate(f'{metric}_bucket', selector, f'{by}, le')})"


def gauge(metric: str, selector: str, by: str, how: str = "max") -> str:
    """Return a gauge, by labels."""
    return f"{how} by ({by}) ({metric}{{{selector}}})"


ROWS: dict[str, list[Panel]] = {
    "Overview": [
        stat(
            "Ready",
            f"(sum(anychip_ready{{{SERVICE}}}) or vector(0)) / count(up{{{SERVICE}}} and on (namespace, job) "
            "group by (namespace, job) (last_over_time(anychip_build_info[6h])))",
            "percentunit",
            "Services that are ready, of all that Prometheus expects: those that are down count as not ready.",
            floor=(0.5, 1),
        ),
        stat("Requests", f"sum(rate(anychip_requests_total{{{MODEL}}}[$__rate_interval]))", "reqps", "All outcomes."),
        stat(
            "Images",
            f'sum(rate(anychip_stage_seconds_count{{{MODEL},stage="postprocess"}}[$__rate_interval]))',
            "ops",
            "Images answered a second.",
        ),
        stat(
            "Errors",
            f"sum(rate(anychip_requests_total{{{MODEL},{ERRORS}}}[$__rate_interval])) "
            f'/ (sum(rate(anychip_requests_total{{{MODEL},code!="CANCELLED"}}[$__rate_interval])) > 0)',
            "percentunit",
            "Requests that the service owes an answer, refusals under overload included.",
            alarm=(0.001, 0.0144),
        ),
        stat(
            "p99",
            f"histogram_quantile(0.99, {rate('anychip_request_seconds_bucket', MODEL, 'le')})",
            "s",
            "Of requests that were answered: refusals are quick and would hide an overload.",
            alarm=(0.5, 1),
        ),
        stat(
            "Fullest queue",
            f"max((anychip_queue_depth{{{MODEL}}} + anychip_queue_reserved{{{MODEL}}}) "
            f"/ anychip_queue_limit{{{MODEL}}})",
            "percentunit",
            "At 100 % requests get 429.",
            alarm=(0.5, 0.8),
        ),
        Panel(
            "Requests by outcome",
            {"{{model}} {{code}}": f"{rate('anychip_requests_total', MODEL, 'model, code')} > 0"},
            "reqps",
            "OK, or the error's code as clients see it. Without a model: it named none that exists.",
            width=12,
            stacked=True,
        ),
        table(
            "Alerts",
            'ALERTS{alertname=~"Anychip.*",namespace=~"$namespace|",job=~"$job|",instance=~"$instance|"}',
            "Those that fire or are about to.",
        ),
        table(
            "Who serves",
            gauge("anychip_model_info", BOTH, "instance, model, device, engine, precision, weights"),
            "Engine, precision and weights of every model on every device.",
        ),
        table(
            "Versions",
            f"max by (instance, version, python, torch) (anychip_build_info{{{SERVICE}}})",
            "What is installed where.",
        ),
    ],
    "Latency by stage": [
        Panel(
            "Requests",
            {
                f"{{{{model}}}} p{share * 100:g}": quantile(share, "anychip_request_seconds", MODEL)
                for share in (0.5, 0.9, 0.99)
            },
            "s",
            "From the first byte of a request to its answer. Dots are traces.",
        ),
        Panel(
            "Mean by stage",
            {
                "{{model}} {{stage}}": f"{rate('anychip_stage_seconds_sum', MODEL, 'model, stage')} "
                f"/ ({rate('anychip_stage_seconds_count', MODEL, 'model, stage')} > 0)"
            },
            "s",
            "Where the time goes: upload, decode, queue (waiting for the device), infer, postprocess.",
            stacked=True,
        ),
        Panel(
            "p99 by stage",
            {"{{model}} {{stage}}": quantile(0.99, "anychip_stage_seconds", MODEL, "model, stage")},
            "s",
            "The slow stage of slow requests.",
        ),
        Panel(
            "Distribution of requests",
            {"{{le}}": rate("anychip_request_seconds_bucket", MODEL, "le")},
            "s",
            "How many took how long.",
            kind="heatmap",
            width=12,
        ),
        Panel(
            "Time left to the deadline",
            {
                f"{{{{model}}}} p{share * 100:g}": quantile(share, "anychip_deadline_slack_seconds", MODEL)
                for share in (0.01, 0.5)
            },
            "s",
            "When an image was done. One in a hundred had less than p1.",
            width=12,
        ),
    ],
    "Decoding": [
        Panel(
            "Decoding",
            {
                "{{instance}} images": f"max by (instance) (anychip_decode_depth{{{SERVICE}}})",
                "{{instance}} limit": f"max by (instance) (anychip_decode_limit{{{SERVICE}}})",
            },
            text="Images that are being decoded or wait for a decoder. Beyond the limit requests get 429.",
        ),
        Panel(
            "Decode time",
            {
                f"{{{{model}}}} p{share * 100:g}": quantile(share, "anychip_stage_seconds", f'{MODEL},stage="decode"')
                for share in (0.5, 0.99)
            },
            "s",
            "Waiting for a decoder included.",
        ),
        Panel(
            "Decoding against the device",
            {
                "{{instance}} {{model}}": f"{rate('anychip_stage_seconds_sum', DECODE, 'instance, model')} "
                f"/ ({rate('anychip_stage_seconds_sum', COMPUTE, 'instance, model')} > 0)"
            },
            text="Time in decoding by time in queue and device. Above 1 the processor is the limit.",
        ),
        Panel(
            "Held up by the processor limit",
            {
                "{{instance}}": f"sum by (instance) (rate(anychip_cpu_throttled_seconds_total{{{SERVICE}}}"
                "[$__rate_interval]))"
            },
            text="Seconds a second that the container's limit held its processes up. Above 0: raise the limit.",
            width=12,
        ),
        Panel(
            "Time to load a model",
            {"{{instance}} {{device}} {{model}}": gauge("anychip_model_load_seconds", BOTH, "instance, device, model")},
            "s",
            "Compiling and the gate included; the last load of each worker that serves.",
            width=12,
        ),
    ],
    "Batching": [
        Panel(
            "Images a batch",
            {
                "{{model}} {{device}}": f"{rate('anychip_batch_size_sum', BOTH, 'model, device')} "
                f"/ ({rate('anychip_batch_size_count', BOTH, 'model, device')} > 0)"
            },
            text="Larger under load. Small batches on a busy device mean that requests come one by one.",
        ),
        Panel(
            "Padding",
            {
                "{{model}} {{device}}": f"{rate('anychip_batch_padding_total', BOTH, 'model, device')} / "
                f"({rate('anychip_batch_padding_total', BOTH, 'model, device')} "
                f"+ {rate('anychip_batch_size_sum', BOTH, 'model, device')} > 0)"
            },
            "percentunit",
            "Share of places in batches that no image filled: work for nothing.",
        ),
        Panel(
            "Batches",
            {"{{model}} {{device}}": rate("anychip_batch_size_count", BOTH, "model, device")},
            "ops",
            "Batches a second.",
        ),
        Panel(
            "Queue",
            {
                "{{model}} waiting": gauge("anychip_queue_depth", MODEL, "model", "sum"),
                "{{model}} decoding": gauge("anychip_queue_reserved", MODEL, "model", "sum"),
                "{{model}} limit": gauge("anychip_queue_limit", MODEL, "model", "sum"),
                "{{model}} in flight": gauge("anychip_images_in_flight", MODEL, "model", "sum"),
            },
            text="Images. In flight are all that were accepted and not answered.",
        ),
        Panel(
            "Refused at the door",
            {"{{model}} {{reason}}": rate("anychip_rejected_total", MODEL, "model, reason")},
            "ops",
            "queue_full and buffer_full: more than fits; deadline: it could not have been met.",
            stacked=True,
        ),
        Panel(
            "Given up",
            {
                "{{model}} expired in {{stage}}": rate("anychip_expired_total", MODEL, "model, stage"),
                "{{model}} left in {{stage}}": rate("anychip_cancelled_total", MODEL, "model, stage"),
                "{{model}} computed for nobody": rate("anychip_wasted_total", MODEL, "model"),
            },
            "ops",
            "Deadlines that passed, clients that left, and what was computed all the same.",
        ),
    ],
    "Devices": [
        Panel(
            "Device time for an image",
            {
                "{{instance}} {{device}} {{model}}": (
                    f"{rate('anychip_batch_seconds_sum', BOTH, 'instance, device, model')}"
                    f" / ({rate('anychip_batch_size_sum', BOTH, 'instance, device, model')} > 0)"
                )
            },
            "s",
            "Devices of one kind should lie on one line; one that lies above the others is slow.",
        ),
        Panel(
            "Batch time p99",
            {
                "{{instance}} {{device}}": f"histogram_quantile(0.99, "
                f"{rate('anychip_batch_seconds_bucket', DEVICE, 'instance, device, le')})"
            },
            "s",
            "Of a batch on a device.",
        ),
        Panel(
            "Images by device",
            {"{{instance}} {{device}}": rate("anychip_batch_size_sum", DEVICE, "instance, device")},
            "ops",
            "Images computed a second.",
        ),
        table(
            "Cards",
            gauge("anychip_device_info", DEVICE, "instance, device, vendor, name, uuid, pci"),
            "Which card a device is.",
            24,
        ),
        Panel(
            "Utilisation",
            {"{{instance}} {{device}}": gauge("anychip_device_utilization_ratio", DEVICE, "instance, device")},
            "percentunit",
            "Share of the time the device is busy.",
            limits={"min": 0, "max": 1},
        ),
        Panel(
            "Memory by kind",
            {
                "{{instance}} {{device}} {{kind}}": gauge(
                    "anychip_device_memory_bytes", DEVICE, "instance, device, kind"
                )
            },
            "bytes",
            "allocated: in tensors; reserved: by the allocator; used: by everybody. A leak is a slope that no release "
            "bends.",
        ),
        Panel(
            "Power",
            {"{{instance}} {{device}}": gauge("anychip_device_power_watts", DEVICE, "instance, device")},
            "watt",
            "As the vendor's tool reports it.",
        ),
        Panel(
            "Temperature",
            {
                "{{instance}} {{device}}": gauge("anychip_device_temperature_celsius", DEVICE, "instance, device"),
                "{{instance}} {{device}} memory": gauge(
                    "anychip_device_memory_temperature_celsius", DEVICE, "instance, device"
                ),
            },
            "celsius",
            "As the vendor's tool reports it.",
        ),
        Panel(
            "Clock",
            {"{{instance}} {{device}}": gauge("anychip_device_clock_hertz", DEVICE, "instance, device")},
            "hertz",
            "Of the card's cores now.",
        ),
        Panel(
            "Slowed down",
            {
                "{{instance}} {{device}} {{reason}}": gauge(
                    "anychip_device_throttled", DEVICE, "instance, device, reason"
                )
            },
            text="1 while a card runs slower than it could. By heat: cool it. By power: that is its limit.",
            limits={"min": 0, "max": 1},
        ),
        Panel(
            "Health",
            {"{{instance}} {{device}}": gauge("anychip_device_healthy", DEVICE, "instance, device", "min")},
            text="1: the vendor's software calls the card healthy. Nothing: it does not say.",
            kind="state-timeline",
            floor=(1, 1),
            words=("bad", "good"),
        ),
        Panel(
            "Errors of cards",
            {
                "{{instance}} {{device}} memory, {{kind}}": increase(
                    "anychip_device_memory_errors_total", DEVICE, "instance, device, kind"
                ),
                "{{instance}} {{device}} driver": increase(
                    "anychip_device_driver_errors_total", DEVICE, "instance, device"
                ),
            },
            text="Memory (ECC): corrected ones are a sign, others a reason to act. Driver: of NVIDIA, XIDs.",
        ),
        Panel(
            "Images per joule",
            {
                "{{instance}} {{device}}": f"{rate('anychip_batch_size_sum', DEVICE, 'instance, device')} "
                f"/ ({rate('anychip_device_energy_joules_total', DEVICE, 'instance, device')} > 0)"
            },
            text="What a device does with its energy; compare engines, precisions, chips.",
        ),
        Panel(
            "Cache releases",
            {
                "{{instance}} {{device}} rung {{rung}} {{trigger}}": increase(
                    "anychip_cache_releases_total", DEVICE, "instance, device, rung, trigger"
                )
            },
            text="The memory guard: 1 collect, 2 caches, 3 another worker in place of this one: that is a leak.",
        ),
        Panel(
            "Bytes returned",
            {
                "{{instance}} {{device}} rung {{rung}}": rate(
                    "anychip_cache_released_bytes_total", DEVICE, "instance, device, rung"
                ),
                "{{instance}} {{device}} rung {{rung}}, host": rate(
                    "anychip_cache_released_host_bytes_total", DEVICE, "instance, device, rung"
                ),
            },
            "Bps",
            "By release levels of the memory guard.",
        ),
        Panel(
            "Host memory of workers",
            {"{{instance}} {{device}}": gauge("anychip_worker_resident_bytes", DEVICE, "instance, device")},
            "bytes",
            "A vendor's runtime that leaks on the host shows here.",
        ),
        Panel(
            "Operators on the CPU",
            {
                "{{instance}} {{device}} {{operator}}": rate(
                    "anychip_operator_fallbacks_total", DEVICE, "instance, device, operator"
                )
            },
            "ops",
            "Operators that the device lacks (docs/operators.md).",
        ),
    ],
    "Workers and faults": [
        Panel(
            "Workers",
            {"{{instance}} {{device}}": gauge("anychip_worker_up", DEVICE, "instance, device")},
            text="Whether a worker serves the device.",
            kind="state-timeline",
            floor=(1, 1),
        ),
        Panel(
            "Restarts",
            {
                "{{instance}} {{device}} {{reason}}": increase(
                    "anychip_worker_restarts_total", DEVICE, "instance, device, reason"
                )
            },
            text="died: its process ended; hung; lost: the device; leaked: out of memory for good; start: never ready.",
        ),
        Panel(
            "Hand-overs",
            {
                "{{instance}} {{device}} {{reason}}": increase(
                    "anychip_handovers_total", DEVICE, "instance, device, reason"
                )
            },
            text="Workers replaced while they served: new weights, memory, engines that took their time.",
        ),
        Panel(
            "Images tried again",
            {
                "{{model}} again": rate("anychip_retried_total", MODEL, "model"),
                "{{model}} {{device}} cut for memory": rate("anychip_out_of_memory_total", BOTH, "model, device"),
            },
            "ops",
            "After their worker failed; and batches cut because the device had no memory for them.",
        ),
        table(
            "Precision gate",
            gauge("anychip_precision_gate", BOTH, "instance, model, device, engine, precision", "min"),
            "1: passed and serves; 0: refused for wrong answers, so that something else serves.",
            8,
        ),
        table(
            "Errors against float32",
            gauge("anychip_precision_error", BOTH, "instance, model, device, measure"),
            "What the gate has measured (docs/precision.md).",
            8,
        ),
        Panel(
            "Processor time of the server",
            {
                "{{instance}}": f"sum by (instance) (rate(process_cpu_seconds_total{{{SERVICE}}}"
                "[$__rate_interval]) and on (instance, job) anychip_build_info)"
            },
            text="Cores, without the workers.",
            width=8,
        ),
        Panel(
            "Memory of the server",
            {
                "{{instance}}": f"sum by (instance) (process_resident_memory_bytes{{{SERVICE}}} "
                "and on (instance, job) anychip_build_info)"
            },
            "bytes",
            "Resident, without the workers.",
            width=8,
        ),
        Panel(
            "Free space of the cache",
            {"{{instance}}": f"min by (instance) (anychip_cache_dir_free_bytes{{{SERVICE}}})"},
            "bytes",
            "Where --cache-dir lies: weights and compiled engines.",
            floor=(1e9, 5e9),
        ),
    ],
}


def dashboard() -> dict[str, Any]:
    """Return the whole dashboard."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": y, "w": _WIDTH, "h": 1},
            }
        )
        x, y, height = 0, y + 1, 0
        for panel in row:
            if x + panel.width > _WIDTH:
                x, y, height = 0, y + height, 0
            place = {"x": x, "y": y, "w": panel.width, "h": panel.height}
            panels.append({"id": len(panels) + 1, "gridPos": place, **_panel(panel)})
            x, height = x + panel.width, max(height, panel.height)
        y += height
    return {
        **_sharing(panels),
        "uid": "anychip",
        "title": "anychip",
        "description": "Classification and detection on any accelerator. Made by deploy/grafana/dashboard.py.",
        "tags": ["anychip", "inference"],
        "schemaVersion": SCHEMA,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables()},
        "annotations": {"list": []},
        "links": [],
        "panels": panels,
    }


def _sharing(panels: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the fields of an export "for sharing externally": the data source to ask for, and what must be there."""
    kinds = sorted({panel["type"] for panel in panels} - {"row"})
    prometheus = {"id": "prometheus", "name": "Prometheus"}
    return {
        "__inputs": [
            {
                "name": _INPUT,
                "label": "Prometheus",
                "description": "The Prometheus that scrapes anychip",
                "type": "datasource",
                "pluginId": prometheus["id"],
                "pluginName": prometheus["name"],
            }
        ],
        "__elements": {},
        "__requires": [
            {"type": "grafana", "id": "grafana", "name": "Grafana", "version": _OLDEST_GRAFANA},
            {"type": "datasource", **prometheus, "version": "1.0.0"},
            *({"type": "panel", "id": kind, "name": _KINDS[kind], "version": ""} for kind in kinds),
        ],
    }


def _panel(panel: Panel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.alarm:
        steps += [{"color": color, "value": value} for color, value in zip(("orange", "red"), panel.alarm, strict=True)]
    if panel.floor:
        low, good = panel.floor
        steps = [{"color": "red", "value": None}]
        steps += [{"color": "orange", "value": low}] if low < good else []
        steps += [{"color": "green", "value": good}]
    defaults: dict[str, Any] = {"unit": panel.unit, "thresholds": {"mode": "absolute", "steps": steps}, **panel.limits}
    if panel.kind in ("stat", "state-timeline"):
        defaults["color"] = {"mode": "thresholds"}  # Else Grafana colours by the series' own range, and up is red.
    if panel.kind == "state-timeline":
        named = {str(state): {"text": word, "index": state} for state, word in enumerate(panel.words)}
        defaults["mappings"] = [{"type": "value", "options": named}]
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "drawStyle": "line",
            "fillOpacity": 25 if panel.stacked else 5,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        }
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": _DATASOURCE,
        "targets": [_query(panel, number, *query) for number, query in enumerate(panel.queries.items())],
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _OPTIONS[panel.kind],
        **({"transformations": _TABLE} if panel.kind == "table" else {}),
    }


def _query(panel: Panel, number: int, legend: str, expression: str) -> dict[str, Any]:
    form = {"table": "table", "heatmap": "heatmap"}.get(panel.kind, "time_series")
    return {
        "refId": chr(ord("A") + number),
        "datasource": _DATASOURCE,
        "expr": expression,
        "legendFormat": legend or "__auto",
        "format": form,
        "instant": panel.instant,
        "range": not panel.instant,
        "exemplar": "request_seconds" in expression and panel.kind == "timeseries",
    }


_OPTIONS: dict[str, dict[str, Any]] = {
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        "colorMode": "value",
        "graphMode": "none",
        "textMode": "auto",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    },
    "table": {"showHeader": True, "cellHeight": "sm"},
    "heatmap": {
        "calculate": False,
        "yAxis": {"unit": "s"},
        "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64},
        "cellGap": 1,
        "legend": {"show": True},
        "tooltip": {"mode": "single", "yHistogram": False},
    },
    "state-timeline": {
        "mergeValues": True,
        "showValue": "auto",
        "legend": {"displayMode": "list", "placement": "bottom"},
    },
}
_TABLE = [{"id": "organize", "options": {"excludeByName": {"Time": True, "__name__": True, "job": True}}}]


def _variables() -> list[dict[str, Any]]:
    def of(name: str, metric: str) -> dict[str, Any]:
        query = f"label_values({metric}, {name})"
        return {
            "name": name,
            "label": name.capitalize(),
            "type": "query",
            "datasource": _DATASOURCE,
            "query": {"query": query, "refId": name},
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": ["All"], "value": ["$__all"]},
        }

    datasource = {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "refresh": 1,
        # An import writes the chosen one here. Where nobody chose, Grafana knows no such one and takes the first.
        "current": {"text": "Prometheus", "value": f"${{{_INPUT}}}"},
    }
    return [
        datasource,
        of("namespace", "anychip_build_info"),
        of("job", "anychip_build_info"),
        of("model", "anychip_queue_limit"),
        of("device", "anychip_worker_up"),
        of("instance", "anychip_build_info"),
    ]


if __name__ == "__main__":
    TARGET.write_text(json.dumps(dashboard(), indent=1) + "\n", encoding="utf-8")
    print(TARGET)
