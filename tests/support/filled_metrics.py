"""Metrics of one model on one device, all of them with values."""

from __future__ import annotations

from dataclasses import fields

from app.fleet.device_metrics import DeviceMetrics
from app.observability.metrics import Metrics, ModelMetrics
from app.worker.messages import Stats
from backends import Telemetry


def filled():
    metrics = Metrics()
    model = ModelMetrics(metrics, "m")
    model.answered("OK", 0.1, None)
    model.batch("npu:0")[0].observe(3)
    model.batch("npu:0")[2].observe(0.01)
    metrics.model_load_seconds.labels("m", "npu:0").set(12)
    metrics.device_info.labels("npu:0", "ascend", "Ascend 910B3", "", "").set(1)
    for stage in model.stage_seconds.values():
        stage.observe(0.01)
    said = {field.name: 1.0 for field in fields(Telemetry)}
    DeviceMetrics(metrics, "npu:0", "ascend").report("w", Stats(1, 2, 3, 4, 5, said, {"aten::roll": 1}))
    metrics.model_info.labels("m", "npu:0", "eager", "fp32", "official").set(1)
    metrics.precision_error.labels("m", "npu:0", "top1").set(0)
    metrics.precision_gate.labels("m", "npu:0", "eager", "fp32").set(1)
    return metrics
