"""Traces: one span a request, its stages, its batch; on the hot route and through FastAPI; W3C context in and out."""

from __future__ import annotations

import asyncio
import os

import httpx
import pytest
import pytest_asyncio
from fastapi import FastAPI

from app.config import Settings
from app.http.hot import protocol
from app.main import create_app
from app.observability.tracing import Tracing
from app.serving.service import Service
from models import open_model, parse_spec
from tests.support.images import GREY, JPEG, RED
from tests.support.load import WAIT_S
from tests.support.uvicorn_server import listening

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="needs anychip[traces]")
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: E402

hot = pytest.mark.asyncio(loop_scope="module")

PREDICT = "/v1/models/resnet18:predict"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Recorded:
    """A service whose spans stay in memory; `through_fastapi` asks for the hot routes in a way that is not ordinary."""

    def __init__(self, app: FastAPI, port: int, exporter: InMemorySpanExporter) -> None:
        self.app, self.exporter, self.tracing = app, exporter, app.state.link.tracing
        self.client, self.through_fastapi = (
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=WAIT_S, headers=headers)
            for headers in ({}, {"Upgrade": "h2c"})
        )

    def spans(self, name):
        return [span for span in self.exporter.get_finished_spans() if span.name == name]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service():
    """One for all tests: a worker takes seconds to start."""
    exporter = InMemorySpanExporter()
    provider = sdk.TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    null = "delay_ms=20,fail=#ff0000"
    settings = Settings(models="resnet18", weights="random", device="null", null=null, batch_sizes="1,2,4")
    models = [open_model(parse_spec(spec, settings.weights), settings.weights_dir) for spec in settings.model_specs]
    service = Service(settings, models, Tracing(provider, ratio=1.0))
    try:
        await service.start()
        app = create_app(service)
        async with listening(app, protocol(app.state.ingress)) as (port, _):
            found = Recorded(app, port, exporter)
            async with found.client, found.through_fastapi:
                yield found
    finally:
        await service.stop()
        provider.shutdown()
        os.environ.pop("ANYCHIP_NULL", None)


@pytest.fixture
def found(service):
    """Nothing recorded yet, all to be recorded."""
    service.exporter.clear()
    service.tracing.ratio = 1.0
    return service


def children(found, request):
    stages = ("decode", "queue", "infer", "post")
    spans = [span for stage in stages for span in found.spans(stage)]
    return [span for span in spans if span.parent and span.parent.span_id == request.context.span_id]


@hot
async def test_a_request_is_a_span_with_its_stages_and_its_batch(found):
    answer = await found.client.post(PREDICT, content=GREY, headers={**JPEG, "X-Request-Id": "mine-1"})
    assert answer.status_code == 200
    [request] = found.spans("POST /v1/models/{model}:predict")
    assert request.parent is None
    about = dict(request.attributes)
    # What OpenTelemetry's conventions for HTTP servers require.
    assert (about["http.request.method"], about["url.scheme"], about["url.path"]) == ("POST", "http", PREDICT)
    assert about["http.response.status_code"] == 200
    assert about["http.route"] == "/v1/models/{model}:predict"
    assert about["anychip.model"] == "resnet18"
    assert about["anychip.request_id"] == "mine-1"
    assert about["anychip.code"] == "OK"
    assert request.status.is_unset
    stages = children(found, request)
    assert [span.name for span in stages] == ["decode", "queue", "infer", "post"]
    moments = [request.start_time, *(moment for span in stages for moment in (span.start_time, span.end_time))]
    assert moments == sorted(moments)
    assert moments[-1] <= request.end_time
    [batch] = found.spans("batch")
    assert batch.context.trace_id != request.context.trace_id
    assert [link.context.span_id for link in stages[2].links] == [batch.context.span_id]
    assert [link.context.span_id for link in batch.links] == [request.context.span_id]
    assert batch.attributes["anychip.device"] == "null:0"
    assert batch.attributes["anychip.images"] == 1
    given = answer.headers["traceparent"].split("-")
    assert given[:3] == ["00", f"{request.context.trace_id:032x}", f"{request.context.span_id:016x}"]
    assert int(given[3], 16) & 1  # Recorded.


@hot
async def test_images_of_a_request_and_requests_of_a_batch_are_told_apart(found):
    files = [("file", (f"{number}.png", GREY, "image/png")) for number in range(3)]
    answers = await asyncio.gather(*(found.client.post(PREDICT, files=files) for _ in range(2)))
    assert [answer.status_code for answer in answers] == [200, 200]
    requests = found.spans("POST /v1/models/{model}:predict")
    for request in requests:
        assert sorted(span.attributes["anychip.image"] for span in children(found, request)) == sorted([0, 1, 2] * 4)
    batches = {span.context.span_id: span for span in found.spans("batch")}
    assert sum(batch.attributes["anychip.images"] for batch in batches.values()) == 6
    for span in found.spans("infer"):
        [link] = span.links
        assert span.parent.span_id in {each.context.span_id for each in batches[link.context.span_id].links}


@hot
async def test_a_clients_trace_goes_on(found):
    found.tracing.ratio = 0.0
    headers = {**JPEG, "traceparent": f"00-{TRACE}-{PARENT}-01"}
    answer = await found.client.post(PREDICT, content=GREY, headers=headers)
    [request] = found.spans("POST /v1/models/{model}:predict")
    assert f"{request.context.trace_id:032x}" == TRACE
    assert f"{request.parent.span_id:016x}" == PARENT
    assert answer.headers["traceparent"].split("-")[1] == TRACE
    assert answer.headers["traceparent"].split("-")[2] != PARENT


@hot
@pytest.mark.parametrize("given", [f"00-{TRACE}-{PARENT}-00", "", "no trace at all", f"00-{'0' * 32}-{PARENT}-01"])
async def test_what_is_not_recorded_costs_no_span_and_comes_back_as_it_was(found, given):
    found.tracing.ratio = 0.0
    headers = {**JPEG, **({"traceparent": given} if given else {})}
    answer = await found.client.post(PREDICT, content=GREY, headers=headers)
    assert answer.status_code == 200
    assert answer.headers.get("traceparent", "") in ("", given)
    assert not found.spans("batch")
    assert not found.spans("POST /v1/models/{model}:predict")


@hot
async def test_a_failure_is_recorded_with_the_stage_it_came_to(found):
    answer = await found.client.post(PREDICT, content=RED, headers=JPEG)
    assert answer.status_code == 500
    [request] = found.spans("POST /v1/models/{model}:predict")
    assert not request.status.is_ok
    assert request.attributes["error.type"] == "INFERENCE_FAILED"
    assert [span.name for span in children(found, request)][:2] == ["decode", "queue"]
    answer = await found.client.post(PREDICT, content=b"no image", headers=JPEG)
    assert answer.status_code == 422
    *_, request = found.spans("POST /v1/models/{model}:predict")
    assert request.status.is_unset  # The client's mistake, not the service's.
    assert request.attributes["anychip.code"] == "INVALID_IMAGE"
    assert [span.name for span in children(found, request)] == ["decode"]


@hot
async def test_through_fastapi_there_is_one_request_span_with_the_same_stages(found):
    recorded = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    answer = await found.through_fastapi.post(PREDICT, content=GREY, headers={**JPEG, **recorded})
    assert answer.status_code == 200
    [request] = [span for span in found.exporter.get_finished_spans() if span.kind.name == "SERVER"]
    assert [span.name for span in children(found, request)] == ["decode", "queue", "infer", "post"]
    assert request.attributes["anychip.code"] == "OK"
    assert (await found.through_fastapi.get("/v1/models", headers=recorded)).status_code == 200
    spans = [span for span in found.exporter.get_finished_spans() if span.kind.name == "SERVER"]
    assert [span.attributes["http.route"] for span in spans] == ["/v1/models/{model}:predict", "/v1/models"]
    assert {span.attributes["url.scheme"] for span in spans} == {"http"}
