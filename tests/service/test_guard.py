"""What the fixture `serve` asserts can fail: what holds the loop up in the path of a request is found and named."""

from __future__ import annotations

import httpx
import pytest

from tests.support.liveness import answering
from tests.support.loop_guard import BLOCKED_IS_SEEN, BLOCKED_S, COMPUTED_TURNS, written
from tests.support.null_service import post, serving
from tests.support.service_process import ServiceProcess

PLANTED = "tests.support.planted_stalls"
STALLS = ["computes", pytest.param("blocks", marks=pytest.mark.skipif(not BLOCKED_IS_SEEN, reason="no schedstat"))]


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("guard"), "delay_ms=1", guarded=True, planted=PLANTED) as found:
        yield found


@pytest.mark.parametrize("stall", STALLS)
def test_what_holds_the_loop_up_in_a_request_fails_the_test_and_is_named(service, stall):
    with pytest.raises(AssertionError, match=r"held up:\n.*_stalling"), answering(service):  # noqa: PT012
        assert post(service) == (200, "OK")
        (service.log.parent / "stall").write_text(stall)
        assert post(service) == (200, "OK")
    [held] = [each for each in written(service.guard) if "_stalling" in each.name][-1:]
    assert (held.turns > COMPUTED_TURNS, held.blocked_s > BLOCKED_S) == (stall == "computes", stall == "blocks")


def test_a_service_that_does_not_answer_fails_the_test(service):
    gone = httpx.URL(service.url).copy_with(port=1)
    elsewhere = ServiceProcess(service.process, str(gone), service.log, service.guard)
    with pytest.raises(AssertionError, match="got no answer"), answering(elsewhere):
        pass


def test_without_a_guard_nothing_is_asserted_in_silence(service, tmp_path):
    unguarded = ServiceProcess(service.process, service.url, service.log)
    with pytest.raises(AssertionError, match="without a guard"), answering(unguarded):
        pass
    with pytest.raises(FileNotFoundError):
        written(tmp_path / "held.jsonl")
