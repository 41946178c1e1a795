"""Methods that the server offers; the service finds it, or says in a sentence what is missing."""

from __future__ import annotations

import re
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from anychip_base.extras import how_to_install
from anychip_grpc import server
from anychip_grpc.answering import NEEDS
from app import main
from app.access.rules import administered
from app.config import Settings
from app.errors import ServiceError
from app.ingress.budget import Budget


def test_every_rpc_has_a_rule_and_every_rule_an_rpc() -> None:
    services = server.health_pb2.DESCRIPTOR.services_by_name.values()
    reflected = server.reflection_pb2.DESCRIPTOR.services_by_name.values()
    names = {
        f"/{each.full_name}/{method.name}" for one in (services, reflected) for each in one for method in each.methods
    }
    names |= {f"/{server.SERVICE}/{name}" for name in server.METHODS}
    assert set(NEEDS) == names


def test_the_audit_calls_what_an_rpc_administers_as_a_route_does() -> None:
    assert [administered(path) for path, need in NEEDS.items() if need == "admin"] == [("load", {}), ("unload", {})]


def most(watches: Budget, client: str) -> int:
    """Take streams for a client until they are refused."""
    for count in range(watches.limit + 1):
        try:
            watches.take(client, 1)
        except ServiceError:
            return count
    return -1


@pytest.mark.parametrize("language", ["", ".zh-CN"])
def test_the_page_of_limits_has_how_many_streams_a_client_may_hold(language: str) -> None:
    """Alone, and beside others."""
    page = Path(__file__).parents[3] / "docs" / f"troubleshooting{language}.md"
    [row] = re.findall(r"^\| `Health/Watch` .*$", page.read_text(encoding="utf-8"), re.MULTILINE)
    watches = server.watches()
    held = watches.limit, most(watches, "first"), most(watches, "second")
    assert tuple(int(number) for number in re.findall(r"\d+", row)[:3]) == held


def test_the_service_finds_it() -> None:
    [entry] = entry_points(group=main.TRANSPORT_GROUP, name="grpc")
    assert entry.load() is server.listening


class Broken:
    def load(self) -> Any:
        raise ModuleNotFoundError("No module named 'grpc_health'")


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([], rf"gRPC \(--grpc-port\) is a package of its own: {re.escape(how_to_install('grpc'))}"),
        ([Broken()], r"--grpc-port needs more packages \(No module named 'grpc_health'\): "),
    ],
)
async def test_what_is_missing_is_said_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, found: list[Any], said: str
) -> None:
    monkeypatch.setattr(main, "entry_points", lambda group, name: found)
    ports: Any = main._Ports.__new__(main._Ports)
    with pytest.raises(OSError, match=said):
        await ports.listen_for_rpc(Settings(models="resnet18", grpc_port=8001))
