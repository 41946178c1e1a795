"""What is shipped for Prometheus and Grafana, by their own tools: rules, alerts, names, the dashboard's structure."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from app.observability.metrics import TABLE
from deploy.grafana import dashboard, schema
from tests.support.filled_metrics import filled
from tests.support.prometheus import DEPLOY, RULES, alerts

ROOT = Path(__file__).parents[2]
DASHBOARD = DEPLOY / "grafana" / "anychip.json"


def test_every_alert_has_a_unit_test_and_says_what_to_do():
    tests = (RULES / "alerts_test.yml").read_text()
    groups = yaml.safe_load((RULES / "alerts.yml").read_text())["groups"]
    for rule in (rule for group in groups for rule in group["rules"]):
        assert rule["alert"] in tests
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    documentation = (ROOT / "docs" / "observability.md").read_text()
    assert set(re.findall(r"^\| `(Anychip\w+)` \|", documentation, re.MULTILINE)) == set(alerts())


def test_rules_say_the_same_in_prometheus_2_and_3():
    """Version 3 writes `le="1"` as `le="1.0"`, and a selector that names one of them finds nothing in the other."""
    for file in RULES.glob("*.yml"):
        if not file.name.endswith("_test.yml"):
            assert not re.search(r'\b(le|quantile)\s*!?="', file.read_text()), file
    assert not re.search(r'\b(le|quantile)\s*!?=\\?"', DASHBOARD.read_text())


def names():
    """Every series that the service can have, `_bucket` and the like included."""
    return {sample.name for family in filled().registry.collect() for sample in family.samples} | {
        "ALERTS",
        "process_cpu_seconds_total",
        "process_resident_memory_bytes",
        "up",
    }


def asked(expression):
    outside = re.sub(r'"[^"]*"|\{[^}]*\}|\[[^\]]*\]|(by|on|without) \([^)]*\)', " ", expression)
    return {word for word in re.findall(r"[a-zA-Z_:][\w:]*", outside) if ":" in word or "_" in word or word == "up"} - {
        "histogram_quantile",
        "avg_over_time",
        "max_over_time",
        "last_over_time",
        "group_left",
    }


def test_no_rule_and_no_panel_asks_for_a_series_that_nobody_has():
    recorded = {
        rule["record"]: rule["expr"]
        for group in yaml.safe_load((RULES / "recording.yml").read_text())["groups"]
        for rule in group["rules"]
    }
    panels = [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]
    expressions = [*recorded.values(), *alerts().values()]
    expressions += [target["expr"] for panel in panels for target in panel["targets"]]
    unknown = set().union(*map(asked, expressions)) - names() - recorded.keys()
    assert unknown == set()


def test_the_dashboard_is_what_its_script_makes():
    assert json.loads(DASHBOARD.read_text()) == json.loads(json.dumps(dashboard.dashboard())), "run dashboard.py"


def test_the_table_of_metrics_is_the_documents():
    documentation = (ROOT / "docs" / "observability.md").read_text()
    documented = re.findall(r"^\| `(anychip_\w+)(?:\{(.*)\})?` \| (\w+) \|", documentation, re.MULTILINE)
    rows = {row.name: (",".join(row.labels), row.kind.__name__.lower()) for row in TABLE.values()}
    rows["anychip_cpu_throttled_seconds_total"] = ("", "counter")
    rows["anychip_client_requests_total"] = ("client,outcome", "counter")
    assert {name: (labels, kind) for name, labels, kind in documented} == rows


@pytest.mark.skipif(find_spec("grafana_foundation_sdk") is None, reason="grafana-foundation-sdk is not installed")
def test_grafana_knows_every_field_of_the_dashboard() -> None:
    assert schema.unknown(json.loads(DASHBOARD.read_text(encoding="utf-8"))) == []
