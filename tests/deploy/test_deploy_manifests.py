"""Compose, Helm, KServe and Ray: rendered as users would, valid for their schemas, in agreement with the service."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from app.access.access import Hosts
from app.config import Settings
from app.config.values import split
from app.observability.metrics import Metrics

yaml = pytest.importorskip("yaml")

from tests.support.manifests import (  # noqa: E402
    CHART,
    DEPLOY,
    EVERYTHING,
    FLAVOURS,
    ROOT,
    RULES,
    checked,
    compose,
    read,
    rendered,
    settings_of,
)

DEPLOY_PAGE = (ROOT / "docs" / "kubernetes.md").read_text()


def needs(module):
    return pytest.mark.skipif(
        find_spec(module) is None, reason=f"{module} is not installed: make deploy-environment installs it"
    )


def test_metrics_that_autoscalers_rules_and_pages_name_exist():
    files = [
        *DEPLOY.rglob("*.y*ml"),
        *DEPLOY.rglob("*.tpl"),
        *(ROOT / "docs" / name for name in ("deploy.md", "kubernetes.md")),
    ]
    named = {
        name
        for path in files
        for name in re.findall(r"(?<![\w:/-])anychip_[a-z_]*[a-z]\b(?![-:(/.])", path.read_text())
    }
    assert "anychip_queue_depth" in named
    registry = Metrics().registry
    names = {sample.name for family in registry.collect() for sample in family.samples}
    families = {family.name for family in registry.collect()}
    names |= families | {f"{name}{end}" for name in families for end in ("_total", "_bucket", "_sum", "_count")}
    assert named - names - {"anychip_serve", "anychip_images_waiting"} == set()


# The chart


def test_the_charts_schema_knows_every_setting():
    command = [sys.executable, str(DEPLOY / "helm" / "sync.py"), "--check"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_what_helm_packs_is_what_the_links_lead_to(tmp_path):
    helm = pytest.importorskip(
        "helm_python", reason="helm_python is not installed: make deploy-environment installs it"
    )
    archive = Path(helm.package(str(CHART), destination=str(tmp_path)))
    with tarfile.open(archive) as packed:
        assert all(member.isfile() for member in packed.getmembers())
    objects = rendered(helm.Chart.load_archive(archive.read_bytes()), "cpu", EVERYTHING)
    groups = [group for path in ("alerts", "recording") for group in read(RULES / f"{path}.yml")[0]["groups"]]
    assert objects["PrometheusRule"]["spec"]["groups"] == groups
    [(name, text)] = objects["ConfigMap"]["data"].items()
    assert text == (DEPLOY / "grafana" / name).read_text().removesuffix("\n")


@pytest.mark.parametrize("certificates", [False, True])
def test_keys_and_tls_come_from_secrets_and_probes_and_prometheus_get_in(chart, certificates):
    access = {"keysSecret": "keys", "tlsSecret": "tls", "clientCertificates": certificates}
    shown = {"secret": {"name": "scraper", "key": "tls.crt"}}
    monitoring = {
        **EVERYTHING["monitoring"],
        "keySecret": {"name": "scraper", "key": "key"},
        "tlsConfig": {"cert": shown, "keySecret": {"name": "scraper", "key": "tls.key"}} if certificates else {},
    }
    objects = rendered(chart, "cpu", {"access": access, "monitoring": monitoring})
    for document in objects.values():
        checked(document)
    [container] = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    settings = {name.removeprefix("ANYCHIP_").lower(): value for name, value in settings_of(objects).items()}
    assert settings.keys() <= Settings.model_fields.keys()
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    for name in ("api_keys_file", "tls_cert", "tls_key", *(["tls_client_ca"] if certificates else [])):
        assert settings[name].rpartition("/")[0] in mounts
    probes = [container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")]
    if certificates:  # The kubelet has none.
        assert [each["exec"]["command"][1] for each in probes] == ["ready", "ready", "live"]
    else:
        assert {each["httpGet"]["scheme"] for each in probes} == {"HTTPS"}
    for kind, field in (("PodMonitor", "podMetricsEndpoints"), ("ServiceMonitor", "endpoints")):
        [endpoint] = objects[kind]["spec"][field]
        assert endpoint["scheme"] == "https"
        assert endpoint["authorization"]["credentials"] == {"name": "scraper", "key": "key"}
    assert objects["Service"]["spec"]["ports"][0]["appProtocol"] == "https"


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


def update_of(chart, flavour, values=None):
    return rendered(chart, flavour, values)["Deployment"]["spec"]["strategy"]["rollingUpdate"]


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_an_update_never_takes_the_only_pod_before_there_is_another(chart, flavour):
    one_more, one_less = {"maxSurge": 1, "maxUnavailable": 0}, {"maxSurge": 0, "maxUnavailable": 1}
    assert update_of(chart, flavour) == one_more
    scaled = {"autoscaling": {"mode": "hpa", "minReplicas": 1}, "replicas": 4}
    assert update_of(chart, flavour, scaled) == one_more
    # Several pods on cards: one after the other, since there may be no spare card.
    assert update_of(chart, flavour, {"replicas": 2}) == (one_more if flavour == "cpu" else one_less)
    assert update_of(chart, flavour, {"rollingUpdate": one_less}) == one_less
    assert rendered(chart, flavour)["PodDisruptionBudget"]["spec"]["maxUnavailable"] == 1


def test_grpc_gets_its_port_where_it_is_on(chart):
    objects = rendered(chart, "cuda", {"settings": {"grpc_port": 8001}})
    for document in objects.values():
        checked(document)
    assert [port["name"] for port in objects["Service"]["spec"]["ports"]] == ["http", "grpc"]
    container = objects["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    assert [port["containerPort"] for port in container["ports"]] == [8000, 8001]
    assert [port["port"] for port in objects["NetworkPolicy"]["spec"]["ingress"][0]["ports"]] == ["http", "grpc"]
    assert [port["name"] for port in rendered(chart, "cuda")["Service"]["spec"]["ports"]] == ["http"]


def test_the_scalers_ask_for_the_pods_of_this_release_alone(chart):
    query = rendered(chart, "cuda", {"autoscaling": {"mode": "keda"}})["ScaledObject"]["spec"]["triggers"][0][
        "metadata"
    ]
    pods = 'namespace="vision",pod=~"demo-anychip-[a-z0-9]+-[a-z0-9]+"'
    assert query["query"] == f'sum({{__name__=~"anychip_queue_depth|anychip_queue_reserved",{pods}}})'
    [metric] = rendered(chart, "cuda", {"autoscaling": {"mode": "hpa"}})["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == "anychip_images_waiting"
    [adapter] = yaml.safe_load(re.search(r"^```yaml\n(rules:.*?)^```", DEPLOY_PAGE, re.MULTILINE | re.DOTALL)[1])[
        "rules"
    ]
    assert adapter["name"]["as"] == "anychip_images_waiting"
    assert "anychip_queue_depth|anychip_queue_reserved" in adapter["metricsQuery"]


TLS = {"tlsSecret": "tls"}
CANNOT_WORK = [
    ({"setings": {}}, "."),
    ({"settings": {"prot": 1}}, "."),
    ({"settings": {"port": 9000}}, "."),
    ({"accelerator": {"resource": "gpu"}}, "."),
    ({"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 0}}, "."),
    ({"autoscaling": {"mode": "hpa", "minReplicas": 0}}, "."),
    ({"shutdown": {"slackSeconds": 0}}, "."),
    ({"cache": {"persistent": True}, "replicas": 2}, "."),
    ({"access": {"keysSecret": "keys"}}, "keys would cross the network in the clear"),
    ({"access": {"clientCertificates": True}}, "needs access.tlsSecret"),
    ({"access": {**TLS, "clientCertificates": True}, "settings": {"admin": "off"}}, "needs settings.admin=loopback"),
    ({"access": {**TLS, "keysSecret": "keys"}, **EVERYTHING}, "Prometheus needs a key, too"),
    ({"access": {**TLS, "clientCertificates": True}, **EVERYTHING}, "Prometheus needs a certificate"),
    ({"flavour": "rocm", "deviceFiles": "/dev/kfd", "supplementalGroups": []}, "stat -c %g /dev/kfd"),
    # What helm upgrade leaves of a release's values without --reset-then-reuse-values.
    ({"flavour": "", "image": {}}, "flavour is empty"),
    ({"flavour": "", "settings": {"models": "yolov8n"}}, "reset-then-reuse-values"),
    ({"flavour": "cuda", "image": {"repository": ""}}, "image.repository is empty"),
]


@pytest.mark.parametrize(("values", "sentence"), CANNOT_WORK, ids=str)
def test_values_that_cannot_work_are_refused(chart, values, sentence):
    import helm_python

    with pytest.raises(helm_python.errors.HelmError, match=sentence):
        rendered(chart, "cpu", values)


def test_a_claim_outlives_the_release_and_several_replicas_may_share_one(chart):
    persistent = {"cache": {"persistent": True, "storageClassName": "fast"}}
    objects = rendered(chart, "cuda", persistent)
    checked(objects["PersistentVolumeClaim"])
    assert objects["PersistentVolumeClaim"]["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    shared = {"cache": {"existingClaim": "weights", "persistent": True}, "replicas": 3}
    volumes = rendered(chart, "cuda", shared)["Deployment"]["spec"]["template"]["spec"]["volumes"]
    assert volumes[0]["persistentVolumeClaim"] == {"claimName": "weights"}


# KServe


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
    # KServe leaves the pod its default grace of 30 s.
    drain = next(float(each["value"]) for each in container["env"] if each["name"] == "ANYCHIP_DRAIN_S")
    assert float(container["lifecycle"]["preStop"]["exec"]["command"][1]) + drain < 30
    # KServe fills in the service's name and namespace, Kubernetes the variable, which is empty by default.
    filled = [each.replace("{{.Name}}", "dogs").replace("{{.Namespace}}", "vision") for each in container["args"]]
    [names] = [each.partition("=")[2] for each in filled if each.startswith("--allowed-hosts=")]
    hosts = Hosts(split(Settings(allowed_hosts=names.replace("$(ALLOWED_HOSTS)", "")).allowed_hosts), checked=True)
    assert [each["value"] for each in container["env"] if each["name"] == "ALLOWED_HOSTS"] == [""]
    for host in ("dogs-predictor", "dogs-predictor.vision.svc.cluster.local:8080", "dogs.vision.svc", "10.1.2.3:8080"):
        assert hosts.accepts(host.encode()), host
    assert not hosts.accepts(b"evil.example")
    [monitor] = read(DEPLOY / "kserve" / "podmonitor.yaml")
    checked(monitor)
    assert monitor["spec"]["selector"]["matchLabels"].items() <= runtime["spec"]["labels"].items()
    assert monitor["spec"]["podMetricsEndpoints"][0]["port"] == container["ports"][0]["name"]


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
    # Their device files belong to groups, for which a runtime has no place.
    groups = service["spec"]["predictor"].get("securityContext", {}).get("supplementalGroups")
    assert bool(groups) == model["runtime"].endswith(("-ascend", "-rocm", "-dcu"))


# Ray


@needs("kubernetes_validate")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own, while it is imported.
def test_the_ray_service_is_valid_and_its_config_is_rays():
    [service] = read(DEPLOY / "ray" / "rayservice.yaml")
    checked(service)
    schema = pytest.importorskip("ray.serve.schema", reason="Ray is not installed: make deploy-environment installs it")
    for config in (yaml.safe_load(service["spec"]["serveConfigV2"]), *read(DEPLOY / "ray" / "serve.yaml")):
        [application] = schema.ServeDeploySchema.model_validate(config).applications
        assert application.import_path == "anychip_hosting.ray_serve:build"
        assert set(application.args["settings"]) <= set(Settings.model_fields)
        assert all(" " not in value for value in application.args["settings"].values()), "one line each"


# Compose


def test_compose_files_are_valid_for_their_schema():
    tool = shutil.which("check-jsonschema", path=str(Path(sys.executable).parent)) or shutil.which("check-jsonschema")
    if tool is None:
        pytest.skip("check-jsonschema is not installed: make deploy-environment installs it")
    command = [tool, "--builtin-schema", "vendor.compose-spec", *(DEPLOY / "compose").glob("compose*.yaml")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout


def test_compose_has_a_file_for_every_flavour_and_mounts_what_is_there():
    services = compose()["services"]
    assert set(services) == {"anychip", "prometheus", "grafana"}
    service = services["anychip"]
    assert service["volumes"] == ["cache:/cache", "keys:/keys:ro", "${ANYCHIP_MODEL_DIR:-./models}:/models:ro"]
    drain = float(service["environment"]["ANYCHIP_DRAIN_S"])
    assert float(service["stop_grace_period"].removesuffix("s")) >= drain + 10
    settings = {name.removeprefix("ANYCHIP_").lower() for name in service["environment"]}
    assert settings <= set(Settings.model_fields)
    overrides = {path.suffixes[0][1:]: read(path) for path in (DEPLOY / "compose").glob("compose.*.yaml")}
    assert set(overrides) == set(FLAVOURS)
    for flavour, [document] in overrides.items():
        assert document["services"]["anychip"]["build"]["dockerfile"] == f"Dockerfile.{flavour}"
    for name in ("prometheus", "grafana"):
        for volume in services[name]["volumes"]:
            source = volume.partition(":")[0]
            if source.startswith("."):
                assert (DEPLOY / "compose" / source).exists(), source
