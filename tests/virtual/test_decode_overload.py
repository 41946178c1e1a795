"""Decoding as the bottleneck: what is asked too much is answered in time, and what matters more goes first.

The whole service but its processes, in virtual time: two decoders with 10 ms an image do 200 a second. Requests come
whatever becomes of earlier ones. The figures are exact: a change of scheduling changes them, and says so here.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from anychip_tools.benchmark.load import poisson_arrivals
from app.observability.metrics import STAGES
from tests.support.virtual_service import serving

DECODE_S, CAPACITY_PER_S = 0.01, 200
BATCH_S = {1: 0.002, 2: 0.003, 4: 0.005, 8: 0.008}
SECONDS = 60.0
TICK_S = 0.004
"""Requests whose deadlines fall into the same tick end together, at its end (app.serving.submissions)."""


async def overloaded(service, requests, rate_per_s, seconds=SECONDS):
    """All outcomes of each of the requests, sent in turn."""
    loop = asyncio.get_running_loop()
    began_s, asked = loop.time(), [[] for _ in requests]
    for number, due_s in enumerate(poisson_arrivals(rate_per_s, seconds, seed=1)):
        await asyncio.sleep(began_s + round(due_s, 6) - loop.time())  # Logarithms differ between machines.
        which = number % len(requests)
        asked[which].append(asyncio.create_task(service.ask(**requests[which])))
    return [await asyncio.gather(*each) for each in asked]


async def test_at_three_times_the_load_answers_come_within_their_deadline(folder):
    async with serving(folder, decode_s=DECODE_S, batch_s=BATCH_S) as service:
        [outcomes] = await overloaded(service, [{"timeout_s": 0.25}], 3 * CAPACITY_PER_S)
        codes = Counter(outcome.code for outcome in outcomes)
        assert max(outcome.seconds for outcome in outcomes) <= 0.25 + TICK_S + 1e-9
        assert max(outcome.seconds for outcome in outcomes if outcome.code == "OK") < 0.25
        assert codes == {"OK": 9706, "DEADLINE_UNREACHABLE": 21688, "DEADLINE_EXCEEDED": 4469}
        # Of what the decoders can do in this time, so much was of use, and so much was done.
        assert codes["OK"] / (CAPACITY_PER_S * SECONDS) > 0.8
        assert sum(decoder.images for decoder in service.processes.decoders) == 11802
        stages = {stage: service.counted("anychip_expired_total", stage=stage) for stage in STAGES}
        assert stages == {"decode": 4364, "queue": 8, "infer": 22, "postprocess": 75}
        assert service.counted("anychip_wasted_total") == 22
        assert not service.counted("anychip_decoder_restarts_total") + service.counted("anychip_worker_restarts_total")


async def test_what_matters_more_is_answered_under_overload(folder):
    usual, urgent = {"timeout_s": 0.4}, {"timeout_s": 0.4, "priority": 50}
    async with serving(folder, decode_s=DECODE_S, batch_s=BATCH_S) as service:
        outcomes = await overloaded(service, [*[usual] * 5, urgent], 2 * CAPACITY_PER_S)
        codes = Counter(outcome.code for outcome in outcomes[-1])
        assert codes == {"OK": 4001}
        assert max(outcome.seconds for outcome in outcomes[-1]) < 0.1
        assert Counter(outcome.code for each in outcomes[:-1] for outcome in each) == {
            "OK": 6641,
            "DEADLINE_UNREACHABLE": 11177,
            "DEADLINE_EXCEEDED": 2189,
        }


async def test_a_higher_priority_overtakes_what_waits_to_be_decoded(folder):
    async with serving(folder, decode_s=DECODE_S, batch_s=BATCH_S) as service:
        usual = [asyncio.create_task(service.ask()) for _ in range(120)]
        await asyncio.sleep(10 * DECODE_S / 2 + BATCH_S[8])
        urgent = [asyncio.create_task(service.ask(priority=50)) for _ in range(10)]
        before = len(service.outcomes)
        assert 0 < before < 20
        outcomes = await asyncio.gather(*usual, *urgent)
        assert {outcome.code for outcome in outcomes} == {"OK"}
        # Of the usual ones only those come before them that a decoder had already: two each.
        last_s = max(outcome.came_s for outcome in outcomes[120:])
        assert sum(outcome.came_s <= last_s for outcome in outcomes[:120]) - before == 4
