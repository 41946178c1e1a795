"""Traces of requests, as OpenTelemetry spans. Optional (the extra `traces`).

    request ─┬─ decode ─ queue ─ infer ─ post        one of each an image
             └────────────────────┴─link─► batch     one a batch, a trace of its own: it serves many requests

Spans of stages are made afterwards, from times that are measured anyway, and only for requests that are recorded.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from anychip_base.extras import how_to_install, version
from app.config import Settings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, SpanContext, Tracer
    from starlette.types import Scope

_UNTRACED = (  # Requests that machines send every few seconds.
    "/v2/health/",
    "/health",
    "/livez",
    "/readyz",
    "/metrics",
    "/ping",
    "/v1/stats",
    "/grpc.",
    "/inference.GRPCInferenceService/Server",
    "/inference.GRPCInferenceService/ModelStreamInfer",  # Each of its messages is traced as a ModelInfer.
)
_EXPORT_TIMEOUT_S = 5
_USUAL_RATIO = "0.01"
TRACEPARENT = re.compile(rb"00-((?!0{32})[0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-([0-9a-f]{2})")
"""W3C Trace Context, https://www.w3.org/TR/trace-context/: trace id and flags, of which bit 0 means recorded."""
_EPOCH_NS = time.time_ns() - time.monotonic_ns()


class TracingError(Exception):
    """Tracing is configured and unavailable; the message is one plain sentence."""


def from_settings(settings: Settings) -> Tracing | None:
    """Return tracing by the settings; None if they name no endpoint. Raises TracingError."""
    if not settings.trace_endpoint:
        return None
    ratio = _ratio()
    return Tracing(_exporting(settings.trace_endpoint), ratio)


def _ratio() -> float:
    """Return the share of requests to trace, by OpenTelemetry's own variable. Raises TracingError."""
    text = os.environ.get("OTEL_TRACES_SAMPLER_ARG") or _USUAL_RATIO
    with contextlib.suppress(ValueError):
        if 0 <= (ratio := float(text)) <= 1:
            return ratio
    raise TracingError(f"OTEL_TRACES_SAMPLER_ARG must be a share from 0 to 1, not {text!r}")


def _exporting(endpoint: str) -> TracerProvider:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON
    except ImportError:
        raise TracingError(f"traces need OpenTelemetry: {how_to_install('traces')}") from None
    ours = Resource({"service.name": "anychip", "service.version": version()})
    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES come last and win.
    resource = Resource.create().merge(ours).merge(OTELResourceDetector().detect())
    provider = TracerProvider(sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint, timeout=_EXPORT_TIMEOUT_S)))
    return provider


class Tracing:
    """Spans through a tracer provider of OpenTelemetry's API."""

    def __init__(self, provider: TracerProvider, ratio: float) -> None:
        """Trace through `provider`, which records every span that is made. `ratio`: the share of requests to trace. It
        is drawn here, before anything is made, as even a dropped span costs more than all metrics.
        """
        from opentelemetry import context, trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.ratio = ratio
        self._provider = provider
        self._nothing = context.Context()
        self.trace = trace
        self.tracer: Tracer = provider.get_tracer("anychip", version())
        self._propagator = TraceContextTextMapPropagator()

    def request(self, scope: Scope, started_s: float) -> RequestTrace | None:
        """Return the trace of an HTTP request begun at `started_s` (`time.monotonic()`), None if it is not kept."""
        if str(scope["path"]).startswith(_UNTRACED):
            return None
        carrier = {name: value for name, value in scope["headers"] if name in (b"traceparent", b"tracestate")}
        if not self._wanted(carrier.get(b"traceparent", b"")):
            return None
        text = {name.decode(): value.decode("latin-1") for name, value in carrier.items()}
        span = self.tracer.start_span(
            str(scope["method"]),
            self._propagator.extract(text, self._nothing),
            kind=self.trace.SpanKind.SERVER,
            attributes=_known(scope),
            start_time=_epoch_ns(started_s),
        )
        return RequestTrace(self, span) if span.is_recording() else None

    def batch(
        self, traces: Iterable[RequestTrace], dispatched_s: float, done_s: float, attributes: Mapping[str, Any]
    ) -> SpanContext:
        """Record the span of a finished batch, linked to its requests; return the context to which `infer` links."""
        links = [self.trace.Link(trace.context) for trace in traces]
        span = self.tracer.start_span(
            "batch", self._nothing, links=links, attributes=attributes, start_time=_epoch_ns(dispatched_s)
        )
        span.end(_epoch_ns(done_s))
        return span.get_span_context()

    def _wanted(self, traceparent: bytes) -> bool:
        found = TRACEPARENT.fullmatch(traceparent)
        return bool(int(found[2], 16) & 1) if found else random.random() < self.ratio

    def close(self) -> None:
        """Send the remaining spans. May block for seconds if the endpoint does not take them."""
        self._provider.shutdown()


class RequestTrace:
    """Trace of one recorded request."""

    def __init__(self, tracing: Tracing, span: Span) -> None:
        self._tracing, self._span = tracing, span
        self.context = span.get_span_context()
        self.trace_id = f"{self.context.trace_id:032x}"

    @property
    def traceparent(self) -> str:
        """Return the traceparent for services that this one asks, and for its client (W3C Trace Context)."""
        return f"00-{self.trace_id}-{self.context.span_id:016x}-{int(self.context.trace_flags):02x}"

    def stages(self, begun: Sequence[tuple[str, float]], end_s: float, image: int, batch: SpanContext | None) -> None:
        """Record the spans of one image: names and begins (`time.monotonic()`) in order, each up to the next one and
        the last up to `end_s`. `infer` links to `batch`.
        """
        trace = self._tracing.trace
        parent = trace.set_span_in_context(self._span)
        ends_s = [*(begin_s for _, begin_s in begun[1:]), end_s]
        for (name, begin_s), stage_end_s in zip(begun, ends_s, strict=True):
            links = [trace.Link(batch)] if batch is not None and name == "infer" else []
            span = self._tracing.tracer.start_span(
                name, parent, links=links, attributes={"anychip.image": image}, start_time=_epoch_ns(begin_s)
            )
            span.end(_epoch_ns(stage_end_s))

    def end(self, name: str, status: int, code: str, attributes: Mapping[str, str]) -> None:
        """End the span of a request, named by method and route, with its HTTP status, 0 if its client had left.

        `code`: "OK" or an error's.
        """
        self._span.set_attributes(attributes)
        self._span.update_name(name)
        if status:
            self._span.set_attribute("http.response.status_code", status)
        if status >= 500:
            self._span.set_attribute("error.type", code)
            self._span.set_status(self._tracing.trace.StatusCode.ERROR)
        self._span.end()


def _known(scope: Scope) -> dict[str, str]:
    """Return what OpenTelemetry's conventions for HTTP servers want at a span's begin, where samplers read it."""
    known = {"http.request.method": scope["method"], "url.path": scope["path"]}
    return known | ({"url.scheme": scope["scheme"]} if "scheme" in scope else {})  # gRPC has none.


def _epoch_ns(monotonic_s: float) -> int:
    return _EPOCH_NS + int(monotonic_s * 1e9)
