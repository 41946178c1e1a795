"""deploy/three-machines: nginx itself, in front of three services that stand for the machines."""

from __future__ import annotations

import contextlib
import re
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import httpx
import pytest

from app.access import keys
from app.config import Settings
from tests.support.certificates import authority, issued
from tests.support.images import GREY, JPEG
from tests.support.null_service import MODEL, serving
from tests.support.service_process import ServiceProcess, free_port
from tests.support.work import until

yaml = pytest.importorskip("yaml")
pytestmark = pytest.mark.xdist_group("three machines")
FILES = Path(__file__).resolve().parents[2] / "deploy" / "three-machines"
MACHINES = ("nvidia", "ascend", "cpu")
NONE: Mapping[str, str] = MappingProxyType({})
NAME = "vision.example.com"
NGINX = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
needs_nginx = pytest.mark.skipif(
    NGINX is None or shutil.which("openssl") is None, reason="apt-get install nginx-light openssl"
)


def configuration(folder: Path, ports: dict[str, int], public: int) -> Path:
    """Write the file as it is in the repository, with this machine's folders, ports and certificates."""
    text = (FILES / "nginx.conf").read_text()
    changes = {
        "listen 443 ": f"listen 127.0.0.1:{public} ",
        "/run/nginx.pid": f"{folder}/nginx.pid",
        "/var/log/nginx/": f"{folder}/",
        "/etc/nginx/": f"{folder}/",
        "http {\n": f"http {{\n    client_body_temp_path {folder}/body;\n    proxy_temp_path {folder}/proxy;\n",
        **{f"{name}.example.com:8000": f"127.0.0.1:{port}" for name, port in ports.items()},
    }
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    path = folder / "nginx.conf"
    path.write_text(text)
    return path


def command(path: Path, *options: str) -> list[str]:
    assert NGINX is not None
    return [NGINX, "-c", str(path), "-p", str(path.parent), "-g", f"user {path.owner()};", *options]


def certificates(folder: Path) -> Path:
    """Make what nginx reads, and what the machines show; return the authority's certificate."""
    ours = authority(folder, "machines-ca")
    issued(folder, "vision", ours, names=(NAME,))
    issued(folder, "server", ours, names=("anychip.internal",))
    return folder / "machines-ca.pem"


def test_the_machines_settings_are_known_and_fit_the_proxy() -> None:
    given = dict(re.findall(r"^(\w+)=(.*)$", (FILES / "anychip.env").read_text(), re.MULTILINE))
    ours = {name.removeprefix("ANYCHIP_").lower() for name in given if name.startswith("ANYCHIP_")}
    assert ours
    assert ours <= set(Settings.model_fields)
    names = {NAME, *(f"{name}.example.com" for name in MACHINES)}
    assert set(given["ANYCHIP_ALLOWED_HOSTS"].split(",")) == names
    nginx = (FILES / "nginx.conf").read_text()
    [size_mib] = re.findall(r"client_max_body_size (\d+)m;", nginx)
    assert int(size_mib) << 20 == Settings.model_fields["max_body_bytes"].default
    [read_s] = re.findall(r"proxy_read_timeout (\d+)s;", nginx)
    assert int(read_s) * 1000 > Settings.model_fields["timeout_ms"].default


@dataclass
class Address:
    machines: dict[str, ServiceProcess]
    folder: Path
    port: int
    key: str
    admin: str
    trust: ssl.SSLContext

    def client(self) -> httpx.Client:
        headers = {"authorization": f"Bearer {self.key}"}
        return httpx.Client(verify=self.trust, timeout=60, headers=headers)

    def post(self, client: httpx.Client, **headers: str) -> httpx.Response:
        return self.ask(client, "POST", f"/v1/models/{MODEL}:predict", content=GREY, headers={**JPEG, **headers})

    def ask(
        self,
        client: httpx.Client,
        method: str,
        path: str,
        headers: Mapping[str, str] = NONE,
        content: bytes | None = None,
    ) -> httpx.Response:
        url = f"https://127.0.0.1:{self.port}{path}"
        named = {"host": NAME, **headers}
        return client.request(method, url, headers=named, content=content, extensions={"sni_hostname": NAME})

    def lines(self) -> list[str]:
        return (self.folder / "access.log").read_text().splitlines()

    def answered(self, lines: list[str]) -> set[str]:
        ports = {str(httpx.URL(service.url).port): name for name, service in self.machines.items()}
        found = [re.findall(r'"([^"]*)" "[^"]*" \S+(?: \S+)*$', line)[0] for line in lines]
        return {ports[each.rpartition(":")[2]] for each in found if each != "-"}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    """Start three services with keys and TLS, and nginx in front of them; the last test ends two of the services."""
    tmp_path = tmp_path_factory.mktemp("address")
    trusted = certificates(tmp_path)
    key, admin = (keys.add(tmp_path / "keys.txt", name, name) for name in ("infer", "admin"))
    with contextlib.ExitStack() as ended:
        machines = {}
        for name in MACHINES:
            (tmp_path / name).mkdir()
            options = ("--tls-cert", str(tmp_path / "server.pem"), "--tls-key", str(tmp_path / "server.key"))
            hosts = ("--allowed-hosts", NAME, "--api-keys-file", str(tmp_path / "keys.txt"))
            machines[name] = ended.enter_context(serving(tmp_path / name, "delay_ms=20", *options, *hosts))
        public = free_port()
        ports = {name: httpx.URL(service.url).port or 0 for name, service in machines.items()}
        path = configuration(tmp_path, ports, public)
        nginx = subprocess.Popen(command(path, "-g", f"user {path.owner()}; daemon off;"))
        ended.callback(nginx.wait, 60)
        ended.callback(nginx.terminate)
        there = Address(machines, tmp_path, public, key, admin, ssl.create_default_context(cafile=trusted))
        with there.client() as client:

            def ready() -> bool:
                with contextlib.suppress(httpx.ConnectError):
                    return there.ask(client, "GET", "/v2/health/ready").status_code == 200
                return False

            until(ready)
        yield there


@needs_nginx
def test_a_machine_that_is_not_ready_is_passed_over_and_refusals_take_none_out(address: Address) -> None:
    with address.client() as client:
        # More refusals than `max_fails` of all three together.
        for _ in range(15):
            refused = address.post(client, **{"x-timeout-ms": "1"})
            assert (refused.status_code, refused.json()["code"]) == (503, "DEADLINE_UNREACHABLE")
            assert "retry-after" in refused.headers
        begun = len(address.lines())
        assert {address.post(client).status_code for _ in range(30)} == {200}
        assert address.answered(address.lines()[begun:]) >= {"nvidia", "ascend"}

        # A machine without the model: not ready, and 503 for it.
        with address.machines["nvidia"].admin_client() as admin:
            admin.headers["x-api-key"] = address.admin
            admin.post(f"/v2/repository/models/{MODEL}/unload").raise_for_status()
        begun = len(address.lines())
        assert {address.post(client).status_code for _ in range(10)} == {200}
        assert address.ask(client, "GET", "/v2/health/ready").status_code == 200
        until(lambda: len(address.lines()) >= begun + 11)
        assert any('"503 : 200"' in line for line in address.lines()[begun:]), address.lines()[begun:]
        with address.machines["nvidia"].admin_client() as admin:
            admin.headers["x-api-key"] = address.admin
            admin.post(f"/v2/repository/models/{MODEL}/load").raise_for_status()


@needs_nginx
def test_the_address_wants_keys_and_its_name_and_hides_what_is_one_machines(address: Address) -> None:
    with address.client() as client:
        assert address.ask(client, "GET", "/v1/models").status_code == 200
        assert address.ask(client, "GET", "/metrics").status_code == 404
        named = address.ask(client, "GET", "/v1/models", headers={"x-request-id": "mine"})
        assert named.headers["x-request-id"] == "mine"
        client.headers.pop("authorization")
        assert address.post(client).status_code == 401
    with address.client() as client, pytest.raises(httpx.ConnectError):
        client.get(f"https://127.0.0.1:{address.port}/v1/models")


@needs_nginx
def test_a_machine_that_stops_and_one_that_is_killed_cost_nobody_an_answer(address: Address) -> None:
    answers: list[int] = []
    over = threading.Event()

    def stream(client: httpx.Client) -> None:
        while not over.is_set():
            answers.append(address.post(client).status_code)

    def more(count: int) -> None:
        wanted = len(answers) + count
        until(lambda: len(answers) >= wanted or any(done.done() for done in streams))

    with address.client() as client, ThreadPoolExecutor(6) as threads:
        streams = [threads.submit(stream, client) for _ in range(6)]
        try:
            more(60)
            assert address.answered(address.lines()) == set(MACHINES)
            assert address.machines["nvidia"].terminate() == 0
            more(60)
            address.machines["ascend"].process.kill()
            address.machines["ascend"].process.wait(60)
            begun = len(address.lines())
            more(60)
            assert address.answered(address.lines()[begun + 6 :]) == {"cpu"}
        finally:
            over.set()
    assert [done.result() for done in streams] == [None] * 6
    assert set(answers) == {200}
