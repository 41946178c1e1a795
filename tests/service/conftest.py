"""One service for the tests that only ask: a start costs ten seconds, and their questions take none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.null_service import serve
from tests.support.service_process import ServiceProcess, free_port, running

__all__ = ["client", "grpc_port", "port", "serve", "service"]


@pytest.fixture(scope="session")
def grpc_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def port() -> int:
    """For gRPC, of the service of one file's own."""
    return free_port()


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory, grpc_port: int) -> Iterator[ServiceProcess]:
    """resnet18 and yolov8n with untrained weights on the CPU, over HTTP and gRPC. Leave it as it was."""
    options = ("--models", "resnet18,yolov8n", "--weights", "random", "--batch-sizes", "1,2,4", "--max-images", "8")
    folder: Path = tmp_path_factory.mktemp("shared-service")
    variables = {"ANYCHIP_COMPAT": "triton-metrics"}
    with running(folder, *options, "--admin", "port", "--grpc-port", str(grpc_port), environment=variables) as service:
        yield service


WAYS = {"hot": {}, "fastapi": {"Upgrade": "h2c"}}
"""How a client asks so that app.http.hot answers its requests for the hot routes itself, and so that FastAPI does: the
second would rather speak HTTP/2, as clients in Java would.
"""


@pytest.fixture(scope="session")
def clients(service: ServiceProcess) -> Iterator[dict[str, httpx.Client]]:
    """Yield a client of the shared service for each of the WAYS."""
    with contextlib.ExitStack() as stack:
        found = {way: stack.enter_context(service.client()) for way in WAYS}
        for way, headers in WAYS.items():
            found[way].headers.update(headers)
        yield found


@pytest.fixture(params=WAYS)
def either(request: pytest.FixtureRequest, clients: dict[str, httpx.Client]) -> httpx.Client:
    """Return a client whose questions go to the hot routes' own protocol, and one whose questions go to FastAPI."""
    return clients[request.param]


@pytest.fixture(scope="module")
def client(service: ServiceProcess) -> Iterator[httpx.Client]:
    """Yield a client of the shared service, or of the service of one file's own."""
    with service.client() as client:
        yield client
