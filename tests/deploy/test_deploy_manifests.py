"""Compose, Helm, KServe and Ray: rendered as users would, valid for their schemas, in agreement with the service."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from app.config import Settings
from app.observability.metrics import Metrics
from tests.support.custom_resources import SCHEMAS

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "anychip"
FLAVOURS = ("ascend", "cpu", "cuda", "dcu", "mlu", "rocm")
EVERYTHING = {
    "monitoring": {
        name: {"enabled": True, "labels": {"release": "stack"}}
        for name in ("serviceMonitor", "podMonitor", "prometheusRule", "dashboard")
    }
}
yaml = pytest.importorskip("yaml")


def needs(module):
    return pytest.mark.skipif(
        find_spec(module) is None, reason=f"{module} is not installed: make test-deploy installs it"
    )


def read(path):
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def checked(document):
    """Validate one object: Kubernetes' own kinds and everything that is a pod by their schemas, others by ours."""
    import jsonschema
    import kubernetes_validate

    if document["kind"] not in SCHEMAS:
        kubernetes_validate.validate(document, "1.37", strict=True)
        return
    jsonschema.validate(document, SCHEMAS[document["kind"]])
    for spec in pod_specs(document):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "of"}, "spec": spec}
        kubernetes_validate.validate(pod, "1.37", strict=True)


def pod_specs(document):
    spec = document["spec"]
    if document["kind"] == "ClusterServingRuntime":
        yield {name: spec[name] for name in ("containers", "volumes", "nodeSelector", "tolerations") if name in spec}
    elif document["kind"] == "InferenceService":
        yield {"containers": [{"name": "merged", "env": spec["predictor"]["model"].get("env", [])}]}
    elif document["kind"] == "RayService":
        cluster = spec["rayClusterConfig"]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            yield group["template"]["spec"]


def metric_names():
    registry = Metrics().registry
    names = {sample.name for family in registry.collect() for sample in family.samples}
    families = {family.name for family in registry.collect()}
    return names | families | {f"{name}{end}" for name in families for end in ("_total", "_bucket", "_sum", "_count")}


def test_metrics_that_autoscalers_rules_and_pages_name_exist():
    files = [*DEPLOY.rglob("*.y*ml"), *DEPLOY.rglob("*.tpl"), ROOT / "docs" / "deploy.md"]
    named = {
        name
        for path in files
        for name in re.findall(r"(?<![\w:/-])anychip_[a-z_]*[a-z]\b(?![-:(/.])", path.read_text())
    }
    assert "anychip_queue_depth" in named
    assert named - metric_names() - {"anychip_serve"} == set()


# The chart


@pytest.fixture(scope="module")
def chart():
    helm = pytest.importorskip("helm_python", reason="helm_python is not installed: make test-deploy installs it")
    return helm.Chart.load(str(CHART))


def rendered(chart, flavour, values=None, name="demo"):
    import helm_python

    given = helm_python.values_from_yaml((CHART / f"values-{flavour}.yaml").read_text())
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


def test_the_chart_repeats_rules_dashboard_and_settings_as_they_are():
    command = [sys.executable, str(DEPLOY / "helm" / "sync.py"), "--check"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.deploy
def test_helm_has_nothing_to_say(chart):
    import helm_python

    found = helm_python.lint(str(CHART))
    assert "ERROR" not in str(found), found


@pytest.mark.deploy
@pytest.mark.parametrize("mode", ["none", "hpa", "keda"])
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_every_flavour_renders_valid_objects(chart, flavour, mode):
    objects = rendered(chart, flavour, {**EVERYTHING, "autoscaling": {"mode": mode}})
    for document in objects.values():
        checked(document)
    expected = {
        *("Deployment", "Service", "ServiceAccount", "PodDisruptionBudget", "NetworkPolicy"),
        *("ServiceMonitor", "PodMonitor", "PrometheusRule", "ConfigMap"),
    }
    scaler = {"none": set(), "hpa": {"HorizontalPodAutoscaler"}, "keda": {"ScaledObject"}}[mode]
    assert set(objects) == expected | scaler
    assert ("replicas" in objects["Deployment"]["spec"]) == (mode == "none")


@pytest.mark.deploy
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_pod_is_locked_down_and_ends_after_its_drain(chart, flavour):
    deployment = rendered(chart, flavour)["Deployment"]["spec"]
    pod = deployment["template"]["spec"]
    [container] = pod["containers"]
    assert pod["securityContext"]["runAsUser"] == 10001
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    # A service called anychip would otherwise put ANYCHIP_PORT=tcp://… into the environment.
    assert pod["enableServiceLinks"] is False
    assert pod["automountServiceAccountToken"] is False
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    pause = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    drain = float(environment["ANYCHIP_GRACE_S"]) + float(environment["ANYCHIP_DRAIN_S"])
    assert pod["terminationGracePeriodSeconds"] >= pause + drain + 10
    settings = {name.removeprefix("ANYCHIP_").lower() for name in environment}
    assert settings <= set(Settings.model_fields)
    # A start may take as long as the service itself gives it; the update does not give up before.
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= Settings.model_fields["start_timeout_s"].default
    assert deployment["progressDeadlineSeconds"] > probe["periodSeconds"] * probe["failureThreshold"]


@pytest.mark.deploy
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_an_update_takes_no_card_more_than_there_are(chart, flavour):
    objects = rendered(chart, flavour, {"accelerator": {"count": 2}})
    limits = objects["Deployment"]["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    cards = {name: count for name, count in limits.items() if "/" in name}
    update = objects["Deployment"]["spec"]["strategy"]["rollingUpdate"]
    if flavour == "cpu":
        assert (cards, update) == ({}, {"maxSurge": 1, "maxUnavailable": 0})
    else:
        assert list(cards.values()) == ["2"]
        assert update == {"maxSurge": 0, "maxUnavailable": 1}
    assert objects["PodDisruptionBudget"]["spec"]["maxUnavailable"] == 1


@pytest.mark.deploy
def test_grpc_gets_its_port_where_it_is_on(chart):
    objects = rendered(chart, "cuda", {"settings": {"grpc_port": 8001}})
    for document in objects.values():
        checked(document)
    assert [port["name"] for port in objects["Service"]["spec"]["ports"]] == ["http", "grpc"]
    container = objects["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    assert [port["containerPort"] for port in container["ports"]] == [8000, 8001]
    assert [port["port"] for port in objects["NetworkPolicy"]["spec"]["ingress"][0]["ports"]] == ["http", "grpc"]
    assert [port["name"] for port in rendered(chart, "cuda")["Service"]["spec"]["ports"]] == ["http"]


@pytest.mark.deploy
def test_the_scalers_ask_for_the_pods_of_this_release_alone(chart):
    query = rendered(chart, "cuda", {"autoscaling": {"mode": "keda"}})["ScaledObject"]["spec"]["triggers"][0][
        "metadata"
    ]
    assert query["query"] == 'sum(anychip_queue_depth{namespace="vision",pod=~"demo-anychip-[a-z0-9]+-[a-z0-9]+"})'
    [metric] = rendered(chart, "cuda", {"autoscaling": {"mode": "hpa"}})["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == "anychip_queue_depth"


@pytest.mark.deploy
@pytest.mark.parametrize(
    "values",
    [
        {"setings": {}},
        {"settings": {"prot": 1}},
        {"settings": {"port": 9000}},
        {"accelerator": {"resource": "gpu"}},
        {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 0}},
        {"autoscaling": {"mode": "hpa", "minReplicas": 0}},
        {"shutdown": {"slackSeconds": 0}},
        {"cache": {"persistent": True}, "replicas": 2},
    ],
    ids=str,
)
def test_values_that_cannot_work_are_refused(chart, values):
    import helm_python

    with pytest.raises(helm_python.errors.HelmError):
        rendered(chart, "cpu", values)


@pytest.mark.deploy
def test_a_claim_outlives_the_release_and_several_replicas_may_share_one(chart):
    persistent = {"cache": {"persistent": True, "storageClassName": "fast"}}
    objects = rendered(chart, "cuda", persistent)
    checked(objects["PersistentVolumeClaim"])
    assert objects["PersistentVolumeClaim"]["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    shared = {"cache": {"existingClaim": "weights", "persistent": True}, "replicas": 3}
    volumes = rendered(chart, "cuda", shared)["Deployment"]["spec"]["template"]["spec"]["volumes"]
    assert volumes[0]["persistentVolumeClaim"] == {"claimName": "weights"}


# KServe


@pytest.mark.deploy
@needs("kubernetes_validate")
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_every_serving_runtime_is_valid(flavour):
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl, which has kustomize, is not installed")
    command = [kubectl, "kustomize", str(DEPLOY / "kserve" / flavour)]
    [runtime] = yaml.safe_load_all(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    checked(runtime)
    assert runtime["metadata"]["name"] == f"anychip-{flavour}"
    [container] = runtime["spec"]["containers"]
    assert container["name"] == "kserve-container", "the name that KServe looks for"
    assert container["image"].endswith(f"-{flavour}")
    cards = [name for name in container["resources"]["limits"] if "/" in name]
    assert len(cards) == (0 if flavour == "cpu" else 1)


@pytest.mark.deploy
@needs("kubernetes_validate")
@pytest.mark.parametrize("path", sorted((DEPLOY / "kserve" / "examples").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_inference_service_is_valid_and_names_a_runtime_and_a_model(path):
    from models import ARCHITECTURES

    [service] = read(path)
    checked(service)
    model = service["spec"]["predictor"]["model"]
    assert model["runtime"] in {f"anychip-{flavour}" for flavour in FLAVOURS}
    environment = {entry["name"]: entry["value"] for entry in model["env"]}
    assert environment.get("ARCHITECTURE", "resnet50") in ARCHITECTURES
    assert ("storageUri" in model) != ("WEIGHTS" in environment)


# Ray


@pytest.mark.deploy
@needs("kubernetes_validate")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own, while it is imported.
def test_the_ray_service_is_valid_and_its_config_is_rays():
    [service] = read(DEPLOY / "ray" / "rayservice.yaml")
    checked(service)
    schema = pytest.importorskip("ray.serve.schema", reason="Ray is not installed: make test-deploy installs it")
    for config in (yaml.safe_load(service["spec"]["serveConfigV2"]), *read(DEPLOY / "ray" / "serve.yaml")):
        [application] = schema.ServeDeploySchema.model_validate(config).applications
        assert application.import_path == "app.ray_serve:build"
        assert set(application.args["settings"]) <= set(Settings.model_fields)


# Compose


def compose():
    [document] = read(DEPLOY / "compose" / "compose.yaml")
    return document


@pytest.mark.deploy
def test_compose_is_valid_for_its_schema():
    tool = shutil.which("check-jsonschema", path=str(Path(sys.executable).parent)) or shutil.which("check-jsonschema")
    if tool is None:
        pytest.skip("check-jsonschema is not installed: make test-deploy installs it")
    command = [tool, "--builtin-schema", "vendor.compose-spec", str(DEPLOY / "compose" / "compose.yaml")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout


def test_compose_has_a_profile_for_every_flavour_and_mounts_what_is_there():
    services = compose()["services"]
    profiles = {profile: service for service in services.values() for profile in service.get("profiles", ())}
    assert set(profiles) == set(FLAVOURS)
    for flavour, service in profiles.items():
        assert service["build"]["dockerfile"] == f"Dockerfile.{flavour}"
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert "anychip" in service["networks"]["default"]["aliases"]
        assert [volume for volume in service["volumes"] if volume.startswith("cache:")] == ["cache:/cache"]
        drain = float(service["environment"]["ANYCHIP_DRAIN_S"])
        assert float(service["stop_grace_period"].removesuffix("s")) >= drain + 10
        settings = {name.removeprefix("ANYCHIP_").lower() for name in service["environment"]}
        assert settings <= set(Settings.model_fields)
    # Prometheus and Grafana belong to every profile.
    assert {name for name, service in services.items() if "profiles" not in service} == {"prometheus", "grafana"}
    for name in ("prometheus", "grafana"):
        for volume in services[name]["volumes"]:
            source = volume.partition(":")[0]
            if source.startswith("."):
                assert (DEPLOY / "compose" / source).exists(), source


def test_grafana_finds_its_dashboard_where_it_is_mounted():
    [providers] = read(DEPLOY / "grafana" / "provisioning" / "dashboards" / "anychip.yml")
    folder = providers["providers"][0]["options"]["path"]
    assert any(f"{folder}/anychip.json" in volume for volume in compose()["services"]["grafana"]["volumes"])
    [sources] = read(DEPLOY / "grafana" / "provisioning" / "datasources" / "anychip.yml")
    assert sources["datasources"][0]["url"] == "${PROMETHEUS_URL}"
    assert compose()["services"]["grafana"]["environment"]["PROMETHEUS_URL"] == "http://prometheus:9090"


def test_prometheus_among_the_containers_uses_the_same_rules(tmp_path):
    [ours] = read(DEPLOY / "compose" / "prometheus.yml")
    [plain] = read(DEPLOY / "prometheus" / "prometheus.yml")
    assert ours["rule_files"] == plain["rule_files"]
    assert ours["scrape_configs"][0]["static_configs"] == [{"targets": ["anychip:8000"]}]
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    for path in (DEPLOY / "compose" / "prometheus.yml", *(DEPLOY / "prometheus" / name for name in ours["rule_files"])):
        shutil.copy(path, tmp_path)
    command = [promtool, "check", "config", str(tmp_path / "prometheus.yml")]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
