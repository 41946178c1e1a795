"""Compose files and the chart, read and rendered like a user does, and checked against Kubernetes' schemas."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "anychip"
RULES = DEPLOY / "prometheus"
CUSTOM = {
    *("ClusterServingRuntime", "InferenceService", "RayService", "ScaledObject"),
    *("ServiceMonitor", "PodMonitor", "PrometheusRule"),
}
"""Kinds of KServe, Ray, KEDA and the Prometheus operator, of which there is no package of schemas."""
FLAVOURS = ("ascend", "cpu", "cuda", "dcu", "mlu", "rocm")
[VERSION] = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
EVERYTHING = {
    "monitoring": {
        name: {"enabled": True, "labels": {"release": "stack"}}
        for name in ("serviceMonitor", "podMonitor", "prometheusRule", "dashboard")
    }
}


def read(path):
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def checked(document):
    """Validate Kubernetes' own kinds, and of other kinds each pod."""
    import kubernetes_validate

    if document["kind"] not in CUSTOM:
        kubernetes_validate.validate(document, "1.37", strict=True)
        return
    for spec in pod_specs(document):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "of"}, "spec": spec}
        kubernetes_validate.validate(pod, "1.37", strict=True)


def pod_specs(document):
    spec = document["spec"]
    if document["kind"] == "ClusterServingRuntime":
        yield {name: spec[name] for name in ("containers", "volumes", "nodeSelector", "tolerations") if name in spec}
    elif document["kind"] == "InferenceService":
        predictor = spec["predictor"]
        context = {"securityContext": predictor["securityContext"]} if "securityContext" in predictor else {}
        yield {"containers": [{"name": "merged", "env": predictor["model"].get("env", [])}], **context}
    elif document["kind"] == "RayService":
        cluster = spec["rayClusterConfig"]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            yield group["template"]["spec"]


def rendered(chart, flavour, values=None, name="demo"):
    """Return the chart's objects by their kind, rendered with a flavour's values and these."""
    import helm_python

    given = {
        "image": {"repository": "registry.example.com/anychip"},
        "supplementalGroups": [44, 992],
        **helm_python.values_from_yaml((CHART / f"values-{flavour}.yaml").read_text()),
    }
    for key, value in (values or {}).items():
        given[key] = {**given.get(key, {}), **value} if isinstance(value, dict) else value
    texts = chart.render(given, name=name, namespace="vision")
    documents = [
        document
        for path, text in texts.items()
        if path.endswith(".yaml")
        for document in yaml.safe_load_all(text)
        if document
    ]
    return {document["kind"]: document for document in documents}


def settings_of(objects):
    """Return the service's settings in a deployment, by their names in the environment."""
    [container] = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    return {each["name"]: each["value"] for each in container["env"] if each["name"].startswith("ANYCHIP_")}


def compose():
    [document] = read(DEPLOY / "compose" / "compose.yaml")
    return document
