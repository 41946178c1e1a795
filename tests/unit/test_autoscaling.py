"""The chart's rule for scaling against a load that grows: a calculation with the chart's own numbers, no cluster.

A pod decodes so many images a second and computes so many; what it cannot do waits, up to `--queue-size`; beyond that
requests are refused. Every `pollingInterval` the scaler sees what waits and asks for pods, as a HorizontalPodAutoscaler
does with an average value; a pod that is asked for serves after `START_S`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.config import Settings

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "anychip"
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))["autoscaling"]
QUEUE: int = Settings.model_fields["queue_size"].default
START_S = 60
"""From the scaler's word to the first answer of a new pod."""


@dataclass
class Run:
    """What came of a load: images refused, and the most pods there were."""

    refused: float = 0
    pods: int = 1


def replay(growth_a_minute: float, decode_a_s: float, compute_a_s: float, seen: set[str], minutes: int = 40) -> Run:
    """Replay a load of half a pod's capacity at first, which grows by a share of that a minute, up to 3.5 pods'.

    `seen`: the waiting images that the scaler's query sums: "decoding", "queue" or both.
    """
    capacity = min(decode_a_s, compute_a_s)
    [policy] = VALUES["behavior"]["scaleUp"]["policies"]
    run, ready_at, decoding, queue = Run(), [0.0], 0.0, 0.0
    asked: list[tuple[int, int]] = []
    for second in range(minutes * 60):
        arriving = min(capacity * (0.5 + growth_a_minute * second / 60), 3.5 * capacity)
        pods = sum(at <= second for at in ready_at)
        decoded = min(decoding + arriving, decode_a_s * pods)
        decoding += arriving - decoded
        queue = max(0.0, queue + decoded - compute_a_s * pods)
        too_many = max(0.0, decoding + queue - QUEUE * pods)
        run.refused += too_many
        decoding -= min(decoding, too_many)
        queue = min(queue, QUEUE * pods)
        if second % VALUES["keda"]["pollingInterval"] == 0:
            waiting = decoding * ("decoding" in seen) + queue * ("queue" in seen)
            wanted = min(math.ceil(waiting / VALUES["waitingImages"]), VALUES["maxReplicas"])
            lately = sum(count for at, count in asked if at > second - policy["periodSeconds"])
            more = min(wanted - len(ready_at), policy["value"] - lately)
            if more > 0:
                asked.append((second, more))
                ready_at += [second + START_S] * more
    run.pods = len(ready_at)
    return run


EVERYTHING = {"decoding", "queue"}


@pytest.mark.parametrize(("decode_a_s", "compute_a_s"), [(1000, 100), (100, 1000)], ids=["device", "decoder"])
def test_pods_are_added_before_anybody_is_refused(decode_a_s: float, compute_a_s: float) -> None:
    """Whichever is the limit, for a load that grows by up to a twentieth of a pod's capacity a minute."""
    run = replay(0.05, decode_a_s, compute_a_s, EVERYTHING)
    assert run.refused == 0
    assert run.pods == VALUES["maxReplicas"]


def test_the_query_of_the_chart_sees_everything() -> None:
    query = (CHART / "templates" / "scaledobject.yaml").read_text(encoding="utf-8")
    assert 'sum({__name__=~"anychip_queue_depth|anychip_queue_reserved"' in query
