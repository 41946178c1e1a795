"""Metrics, traces and the log."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class ObservabilitySettings(BaseModel):
    """Metrics, traces and the log"""

    trace_endpoint: str = Field(
        "", description="Where traces go by OTLP over HTTP, e.g. http://localhost:4318/v1/traces; needs OpenTelemetry"
    )
    log_format: Literal["auto", "json", "text"] = Field(
        "auto", description="Form of log lines: json, text, or auto, which is text on a terminal and json elsewhere"
    )
    log_requests: bool = Field(False, description="One log line a request")
    log_level: str = Field("info", description="Least severe log line: debug, info, warning, error")
