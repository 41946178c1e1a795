"""Closed JSON schemas of the fields of custom resources that ours use, written after the sources named at each.

kubernetes-validate checks Kubernetes' own kinds, with their schemas; their parts in these schemas (containers,
volumes, pod templates) are left open here (`POD`), and the test checks them as a Pod.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
TRUTH: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
STRINGS: Schema = {"type": "object", "additionalProperties": TEXT}
POD: Schema = {}
DURATION: Schema = {"type": "string", "pattern": r"^([0-9]+(ms|s|m|h|d))+$"}


def closed(properties: dict[str, Schema], required: Sequence[str] = ()) -> Schema:
    """Make the schema of an object with these properties and no others."""
    return {"type": "object", "additionalProperties": False, "properties": properties, "required": list(required)}


def several(items: Schema) -> Schema:
    """Make the schema of a list of at least one."""
    return {"type": "array", "items": items, "minItems": 1}


def resource(version: str, kind: str, spec: Schema) -> Schema:
    """Make the schema of a whole object of the API server."""
    metadata = closed({"name": TEXT, "namespace": TEXT, "labels": STRINGS, "annotations": STRINGS}, ("name",))
    return closed(
        {"apiVersion": {"const": version}, "kind": {"const": kind}, "metadata": metadata, "spec": spec},
        ("apiVersion", "kind", "metadata", "spec"),
    )


# kserve/kserve pkg/apis/serving/v1alpha1/servingruntime_types.go, 0217bda. It has neither securityContext nor
# supplementalGroups for the pod.
_RUNTIME = closed(
    {
        "supportedModelFormats": several(
            closed({"name": TEXT, "version": TEXT, "autoSelect": TRUTH, "priority": COUNT}, ("name",))
        ),
        "protocolVersions": several({"enum": ["v1", "v2", "grpc-v1", "grpc-v2"]}),
        "multiModel": TRUTH,
        "disabled": TRUTH,
        "annotations": STRINGS,
        "labels": STRINGS,
        "containers": POD,
        "volumes": POD,
        "nodeSelector": POD,
        "tolerations": POD,
    },
    ("containers",),
)
# kserve/kserve pkg/apis/serving/v1beta1: predictor.go, predictor_model.go, component.go; the shape of autoScaling as in
# KServe's page on KEDA.
_PREDICTOR = closed(
    {
        # PredictorSpec holds a PodSpec inline.
        "securityContext": POD,
        "minReplicas": COUNT,
        "maxReplicas": COUNT,
        "model": closed(
            {
                "modelFormat": closed({"name": TEXT, "version": TEXT}, ("name",)),
                "protocolVersion": {"enum": ["v1", "v2"]},
                "runtime": TEXT,
                "storageUri": {"type": "string", "pattern": "^(pvc|s3|gs|https?|hf|oci)://"},
                "env": POD,
                "resources": POD,
            },
            ("modelFormat",),
        ),
        "autoScaling": closed(
            {
                "metrics": several(
                    closed(
                        {
                            "type": {"const": "External"},
                            "external": closed(
                                {
                                    "metric": closed(
                                        {"backend": {"const": "prometheus"}, "serverAddress": TEXT, "query": TEXT},
                                        ("backend", "serverAddress", "query"),
                                    ),
                                    "target": closed({"type": {"enum": ["Value", "AverageValue"]}, "value": TEXT}),
                                },
                                ("metric", "target"),
                            ),
                        }
                    )
                )
            },
            ("metrics",),
        ),
    }
)
# kedacore/keda apis/keda/v1alpha1/scaledobject_types.go; the trigger as in keda.sh/docs/scalers/prometheus.
_SCALED = closed(
    {
        "scaleTargetRef": closed({"apiVersion": TEXT, "kind": TEXT, "name": TEXT}, ("name",)),
        "minReplicaCount": COUNT,
        "maxReplicaCount": COUNT,
        "pollingInterval": COUNT,
        "cooldownPeriod": COUNT,
        "advanced": closed({"horizontalPodAutoscalerConfig": closed({"behavior": POD})}),
        "triggers": several(
            closed(
                {
                    "type": {"const": "prometheus"},
                    "metricType": {"enum": ["AverageValue", "Value"]},
                    "metadata": closed(
                        {"serverAddress": TEXT, "query": TEXT, "threshold": TEXT, "activationThreshold": TEXT},
                        ("serverAddress", "query", "threshold"),
                    ),
                },
                ("type", "metadata"),
            )
        ),
    },
    ("scaleTargetRef", "triggers"),
)
# prometheus-operator/prometheus-operator pkg/apis/monitoring/v1.
_SELECTOR = closed({"matchLabels": STRINGS}, ("matchLabels",))
_SECRET_KEY = closed({"name": TEXT, "key": TEXT}, ("key",))
_IN_SECRET = closed({"secret": _SECRET_KEY})
_TLS = closed(
    {
        "insecureSkipVerify": {"type": "boolean"},
        "serverName": TEXT,
        "ca": _IN_SECRET,
        "cert": _IN_SECRET,
        "keySecret": _SECRET_KEY,
    }
)
_ENDPOINTS = several(
    closed(
        {
            "port": TEXT,
            "path": TEXT,
            "interval": DURATION,
            "scheme": {"enum": ["http", "https"]},
            "tlsConfig": _TLS,
            "authorization": closed({"type": TEXT, "credentials": _SECRET_KEY}),
        },
        ("port",),
    )
)
_RULE = closed(
    {
        "alert": TEXT,
        "record": TEXT,
        "expr": TEXT,
        "for": DURATION,
        "keep_firing_for": DURATION,
        "labels": STRINGS,
        "annotations": STRINGS,
    },
    ("expr",),
)
_RULES = closed(
    {"groups": several(closed({"name": TEXT, "interval": DURATION, "rules": several(_RULE)}, ("name", "rules")))},
    ("groups",),
)
# ray-project/kuberay ray-operator/apis/ray/v1: rayservice_types.go, raycluster_types.go. serveConfigV2 is a text.
_TEMPLATE = closed({"metadata": POD, "spec": POD}, ("spec",))
_RAY = closed(
    {
        "serveConfigV2": TEXT,
        "rayClusterConfig": closed(
            {
                "rayVersion": TEXT,
                "authOptions": closed({"mode": {"enum": ["token", "disabled"]}}, ("mode",)),  # KubeRay 1.5.1
                "enableInTreeAutoscaling": TRUTH,
                "headGroupSpec": closed({"rayStartParams": STRINGS, "template": _TEMPLATE}, ("template",)),
                "workerGroupSpecs": several(
                    closed(
                        {
                            "groupName": TEXT,
                            "replicas": COUNT,
                            "minReplicas": COUNT,
                            "maxReplicas": COUNT,
                            "rayStartParams": STRINGS,
                            "template": _TEMPLATE,
                        },
                        ("groupName", "template"),
                    )
                ),
            },
            ("headGroupSpec",),
        ),
    },
    ("serveConfigV2", "rayClusterConfig"),
)

SCHEMAS: dict[str, Schema] = {
    "ClusterServingRuntime": resource("serving.kserve.io/v1alpha1", "ClusterServingRuntime", _RUNTIME),
    "InferenceService": resource(
        "serving.kserve.io/v1beta1", "InferenceService", closed({"predictor": _PREDICTOR}, ("predictor",))
    ),
    "ScaledObject": resource("keda.sh/v1alpha1", "ScaledObject", _SCALED),
    "ServiceMonitor": resource(
        "monitoring.coreos.com/v1", "ServiceMonitor", closed({"selector": _SELECTOR, "endpoints": _ENDPOINTS})
    ),
    "PodMonitor": resource(
        "monitoring.coreos.com/v1", "PodMonitor", closed({"selector": _SELECTOR, "podMetricsEndpoints": _ENDPOINTS})
    ),
    "PrometheusRule": resource("monitoring.coreos.com/v1", "PrometheusRule", _RULES),
    "RayService": resource("ray.io/v1", "RayService", _RAY),
}
