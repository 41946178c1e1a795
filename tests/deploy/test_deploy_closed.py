"""What is deployed is closed by default: who may ask, by which names, with what limits, from which images."""

from __future__ import annotations

import re
import subprocess

import pytest

from app.access.access import Hosts

pytest.importorskip("yaml")

from tests.support.manifests import DEPLOY, EVERYTHING, ROOT, checked, compose, read, rendered, settings_of

# The chart

INGRESS = {"ingress": {"enabled": True, "host": "vision.example", "className": "nginx", "tlsSecret": "public"}}
CONTROLLER = {
    "networkPolicy": {
        "from": [
            {"podSelector": {}},
            {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "proxies"}}},
        ]
    }
}
MONITORING = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}


@pytest.mark.parametrize("grpc_port", [0, 8001])
def test_only_pods_of_the_namespace_may_ask_unless_others_are_named(chart, grpc_port):
    def ingress(**policy):
        settings = {"grpc_port": grpc_port}
        found = rendered(chart, "cpu", {"networkPolicy": policy, "settings": settings})["NetworkPolicy"]
        checked(found)
        assert found["spec"]["policyTypes"] == ["Ingress", "Egress"]
        assert {"port": 5353, "protocol": "UDP"} in found["spec"]["egress"][0]["ports"]
        return [(rule["from"], [port["port"] for port in rule["ports"]]) for rule in found["spec"]["ingress"]]

    ports = ["http", "grpc"] if grpc_port else ["http"]
    scrape = ([MONITORING], ["http"])
    shop = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "shop"}}}
    assert ingress() == [([{"podSelector": {}}], ports), scrape]
    assert ingress(**{"from": [shop]}) == [([shop], ports), scrape]
    # An empty `from` in a rule would let everybody in: there is no such rule.
    assert ingress(**{"from": []}) == [scrape]
    assert ingress(**{"from": [], "scrapers": []}) == []


def test_the_service_answers_to_its_names_in_the_cluster_and_to_no_foreign_one(chart):
    objects = rendered(chart, "cpu", {"settings": {"allowed_hosts": "vision.example"}})
    for given, extra in ((settings_of(rendered(chart, "cpu")), ()), (settings_of(objects), ("vision.example",))):
        names = given["ANYCHIP_ALLOWED_HOSTS"].split(",")
        service = objects["Service"]["metadata"]["name"]
        own = ("", ".vision", ".vision.svc", ".vision.svc.cluster.local")
        assert names == [*(f"{service}{end}" for end in own), *extra]
        hosts = Hosts(tuple(names), checked=True)
        assert all(hosts.accepts(f"{name}:8000".encode()) for name in names)
        assert hosts.accepts(b"10.1.2.3:8000"), "how the kubelet and Prometheus ask"
        assert not hosts.accepts(b"evil.example")
    [container] = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    named = [each["name"] for each in container["env"]]
    assert len(named) == len(set(named))
    keys = {"access": {"keysSecret": "keys", "tlsSecret": "tls"}}
    assert "ANYCHIP_ALLOWED_HOSTS" not in settings_of(rendered(chart, "cpu", keys)), "who has a key may ask by any name"


def test_prometheus_checks_the_certificate_with_the_authority_of_its_secret(chart):
    access = {"keysSecret": "keys", "tlsSecret": "tls"}
    monitoring = {**EVERYTHING["monitoring"], "keySecret": {"name": "scraper", "key": "key"}}
    for given, expected in (
        ({}, {}),
        ({"serverName": "vision.example"}, {"serverName": "vision.example"}),
        ({"cert": {"secret": {"name": "prometheus", "key": "tls.crt"}}},) * 2,
    ):
        objects = rendered(chart, "cpu", {"access": access, "monitoring": {**monitoring, "tlsConfig": given}})
        for kind, field in (("PodMonitor", "podMetricsEndpoints"), ("ServiceMonitor", "endpoints")):
            assert objects[kind]["spec"][field][0]["tlsConfig"] == {
                "ca": {"secret": {"name": "tls", "key": "ca.crt"}},
                "serverName": "demo-anychip.vision.svc",
                **expected,
            }


def test_without_keys_the_service_opens_to_strangers_only_where_that_is_said(chart):
    everybody = (
        {"networkPolicy": {"enabled": False}},
        {"service": {"type": "LoadBalancer"}},
        {**INGRESS, **CONTROLLER},
    )
    for values in everybody:
        with pytest.raises(Exception, match=r"access\.open=true"):
            rendered(chart, "cpu", values)
        rendered(chart, "cpu", {**values, "access": {"open": True}})
        rendered(chart, "cpu", {**values, "access": {"keysSecret": "keys", "tlsSecret": "tls"}})
        rendered(chart, "cpu", {**values, "access": {"tlsSecret": "tls", "clientCertificates": True}})


def test_an_ingress_leads_to_the_service_under_a_name_that_it_answers_to(chart):
    access = {"access": {"open": True}}
    with pytest.raises(Exception, match=r"networkPolicy\.from"):
        rendered(chart, "cpu", {**INGRESS, **access})
    objects = rendered(chart, "cpu", {**INGRESS, **CONTROLLER, **access})
    checked(objects["Ingress"])
    [rule] = objects["Ingress"]["spec"]["rules"]
    service = rule["http"]["paths"][0]["backend"]["service"]
    ports = {each["name"] for each in objects["Service"]["spec"]["ports"]}
    assert service["name"] == objects["Service"]["metadata"]["name"]
    assert service["port"]["name"] in ports
    assert "vision.example" in settings_of(objects)["ANYCHIP_ALLOWED_HOSTS"].split(",")
    assert "Ingress" not in rendered(chart, "cpu", access)


# Compose


@pytest.mark.parametrize("name", ["anychip", "prometheus", "grafana"])
def test_a_service_of_compose_is_locked_down_and_has_limits(name):
    service = compose()["services"][name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["pids_limit"] > 0
    assert re.fullmatch(r"\$\{\w+:-\d+g\}", service["mem_limit"])
    assert all(re.match(r"(\$\{ANYCHIP_ADDRESS:-)?127\.0\.0\.1", port) for port in service["ports"])


def test_compose_answers_to_the_name_by_which_prometheus_asks_and_to_no_foreign_one():
    names = compose()["services"]["anychip"]["environment"]["ANYCHIP_ALLOWED_HOSTS"]
    assert names.endswith(",${ANYCHIP_ALLOWED_HOSTS:-localhost}")
    hosts = Hosts(tuple(re.sub(r"\$\{\w+:-(\w+)\}", r"\1", names).split(",")), checked=True)
    [scraped] = read(DEPLOY / "compose" / "prometheus.yml")[0]["scrape_configs"][0]["static_configs"][0]["targets"]
    assert hosts.accepts(scraped.encode())
    assert hosts.accepts(b"127.0.0.1:8000")
    assert not hosts.accepts(b"evil.example:8000")


def test_compose_asks_for_a_password_and_for_groups_where_device_files_have_them():
    """Compose fills in variables of every file it is given, so what needs a number stands in a file of its own."""
    groups = {"rocm": {"KFD_GID", "RENDER_GID"}, "dcu": {"KFD_GID", "RENDER_GID"}, "ascend": {"ASCEND_GID"}}
    for path in (DEPLOY / "compose").glob("compose*.yaml"):
        required = dict(re.findall(r"\$\{(\w+):\?([^}]+)", path.read_text()))
        flavour = path.suffixes[0][1:]
        assert set(required) == ({"GRAFANA_PASSWORD"} if flavour == "yaml" else groups.get(flavour, set())), path.name
        assert all("deploy/compose/.env" in sentence for sentence in required.values())
    page = (ROOT / "docs" / "deploy.md").read_text()
    for line in re.findall(r"^.*docker compose .*up.*$", page[: page.index("## Without containers")], re.MULTILINE):
        before = page[: page.index(line)]
        assert 'echo "GRAFANA_PASSWORD=$(' in before, "the password is made before the first start"
    ignored = subprocess.run(["git", "check-ignore", "-q", "deploy/compose/.env"], cwd=ROOT, check=False)
    assert ignored.returncode == 0, "it holds the password"
    assert "**/.env" in (ROOT / ".dockerignore").read_text().splitlines()


# Versions


IMAGE = re.compile(r"^(?P<name>[\w.:/-]+?):(?P<tag>[\w.-]+)(@sha256:[0-9a-f]{64})?$")


def images_that_are_named():
    for path in [*ROOT.glob("Dockerfile.*"), *DEPLOY.rglob("*.y*ml"), *(ROOT / "docs").rglob("*.md")]:
        text = path.read_text()
        if path.name.startswith("Dockerfile."):
            found = re.findall(r"^ARG BASE_IMAGE=(\S+)", text, re.MULTILINE)
            found += re.findall(r"^FROM (?!\$\{BASE_IMAGE\}|dependencies AS code$)(\S+)", text, re.MULTILINE)
        else:
            found = re.findall(r"^\s*(?:- )?image: ([^{\s]\S*)$", text, re.MULTILINE)
            found += re.findall(r"--build-arg BASE_IMAGE=([\w.:/@-]+/[\w.:/@-]+)", text)
        for image in found:
            yield path, re.sub(r"\$\{\w+:-(.+)\}", r"\1", image)


def test_every_image_is_named_by_an_exact_version():
    named = list(images_that_are_named())
    assert {path.name for path, _ in named} >= {"Dockerfile.cpu", "compose.yaml", "compose.cuda.yaml", "ascend.md"}
    for path, image in named:
        if path.parent.name == "base" and image == "anychip":
            continue  # The overlays of KServe say which.
        if path.parent.name == "kserve" and image == "kserve-anychip:replace":
            continue  # KServe's own kustomization puts the published image in place of such names.
        match = IMAGE.match(image)
        assert match, f"{path.name}: {image} has no version"
        # A plain Python is named by three numbers: two are whichever patch the registry has today.
        wanted = r"\d+\.\d+\.\d+" if match["name"] == "python" else r"\d+\.\d+"
        assert re.search(wanted, match["tag"]), f"{path.name}: {image}"
    for path in (DEPLOY / "kserve").glob("*/kustomization.yaml"):
        for document in read(path):
            assert all(re.match(r"\d+\.\d+\.\d+-", each["newTag"]) for each in document.get("images", ())), path
    assert not re.search(r"^ARG BASE_IMAGE=", (ROOT / "Dockerfile.mlu").read_text(), re.MULTILINE), "nobody knows it"
