"""TLS and mTLS over HTTP and gRPC, with certificates that are renewed while the service runs."""

from __future__ import annotations

import shutil
import socket
import ssl

import grpc
import httpx
import pytest

from tests.support import silent
from tests.support.certificates import authority, issued
from tests.support.grpc_client import call
from tests.support.images import GREY, JPEG
from tests.support.load import WAIT_S
from tests.support.null_service import PREDICT, serving
from tests.support.service_process import free_port
from tests.support.work import until

SILENT = 5000
pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made by openssl")


def subject(port, context):
    """Of the certificate that the service shows."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=30) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secure,
    ):
        return dict(pair for part in secure.getpeercert()["subject"] for pair in part)["commonName"]


def test_clients_with_certificates_are_served_and_renewed_ones_are_shown(tmp_path):
    made = tmp_path / "made"
    made.mkdir()
    ours, strangers = authority(made, "authority"), authority(made, "strangers")
    first, second = issued(made, "first", ours), issued(made, "second", ours)
    client, stranger = issued(made, "client", ours), issued(made, "stranger", strangers)
    key, certificate = tmp_path / "server.key", tmp_path / "server.pem"
    for source, target in zip(first, (key, certificate), strict=True):
        shutil.copy(source, target)
    port = free_port()
    options = ("--tls-cert", certificate, "--tls-key", key, "--tls-client-ca", ours[1], "--grpc-port", port)
    with serving(tmp_path, "", *map(str, options), "--ingresses", "1") as service:
        assert service.url.startswith("https://")
        trusting = ssl.create_default_context(cafile=str(ours[1]))
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{service.url}/v2/health/live", verify=trusting, timeout=WAIT_S)
        pretending = ssl.create_default_context(cafile=str(ours[1]))
        pretending.load_cert_chain(stranger[1], stranger[0])
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{service.url}/v2/health/live", verify=pretending, timeout=WAIT_S)
        trusting.load_cert_chain(client[1], client[0])
        answer = httpx.post(service.url + PREDICT, content=GREY, headers=JPEG, verify=trusting, timeout=WAIT_S)
        assert answer.status_code == 200
        assert httpx.get(f"{service.admin_url}/v2/health/live", timeout=WAIT_S).status_code == 200

        def channel(with_certificate):
            pair = (client[0].read_bytes(), client[1].read_bytes()) if with_certificate else (None, None)
            return grpc.secure_channel(f"localhost:{port}", grpc.ssl_channel_credentials(ours[1].read_bytes(), *pair))

        with channel(True) as known:
            assert call(known, "ServerLive").live
        with channel(False) as unknown, pytest.raises(grpc.RpcError):
            call(unknown, "ServerLive", timeout=10)

        http_port = int(service.url.rpartition(":")[2])
        assert subject(http_port, trusting) == "first"
        shutil.copy(second[1], certificate)  # Its key is not there yet: the old pair stays in use.
        shutil.copy(second[0], key)
        until(lambda: subject(http_port, trusting) == "second")
        with channel(True) as renewed:
            assert call(renewed, "ServerLive").live


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--tls-cert", "a.pem"), "need each other"),
        (("--tls-client-ca", "a.pem"), "needs --tls-cert"),
        (("--tls-cert", "a.pem", "--tls-key", "a.key"), "TLS cannot be had"),
    ],
)
def test_half_of_a_setting_is_refused(options, reason):
    from app.access.tls import Tls
    from app.config import Settings

    given = {name.removeprefix("--").replace("-", "_"): value for name, value in zip(*[iter(options)] * 2, strict=True)}
    with pytest.raises(OSError, match=reason):
        Tls.of(Settings(**given))


def test_silent_connections_to_tls_stop_nobody_else_and_end_with_the_time_for_a_handshake(tmp_path):
    key, certificate = authority(tmp_path, "localhost")
    with serving(tmp_path, "delay_ms=1", "--tls-cert", str(certificate), "--tls-key", str(key)) as service:
        port, trusting = httpx.URL(service.url).port, ssl.create_default_context(cafile=certificate)
        trusting.check_hostname = False
        with (
            silent.connections(port, SILENT) as begun,
            silent.client_elsewhere(service.url, verify=trusting) as client,
        ):
            for _ in range(20):
                assert client.post(PREDICT, content=GREY, headers=JPEG).status_code == 200
                assert client.get("/v2/health/live").status_code == 200
            assert httpx.get(f"{service.admin_url}/v2/health/live", timeout=WAIT_S).status_code == 200
            assert not any(silent.until_ended(begun, SILENT, WAIT_S))
            assert client.get("/v2/health/live").status_code == 200
