"""Prometheus's own checker on the rules that are shipped and on what the service shows."""

from __future__ import annotations

import subprocess

import pytest

from tests.support.filled_metrics import filled
from tests.support.prometheus import MISSING, RULES

promtool = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


def check(*arguments, **options):
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@promtool
def test_the_configuration_and_its_rules_are_valid():
    assert "alerts.yml" in check("check", "config", RULES / "prometheus.yml")


@promtool
@pytest.mark.parametrize("rules", ["recording.yml", "alerts.yml"])
def test_rules_are_valid(rules):
    assert "SUCCESS" in check("check", "rules", RULES / rules)


@promtool
def test_every_alert_passes_its_unit_tests():
    assert "SUCCESS" in check("test", "rules", *RULES.glob("*_test.yml"))


@promtool
def test_names_help_and_types_are_as_prometheus_wants_them():
    content, kind = filled().render("text/plain")
    assert "version=0.0.4" in kind or "version=1.0.0" in kind
    assert check("check", "metrics", input=content.decode()) == ""
