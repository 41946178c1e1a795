"""Rules of the methods that the server offers; without its packages the service says in a sentence what is missing."""

from __future__ import annotations

import re
from typing import Any

import pytest

from anychip_base.extras import how_to_install
from anychip_grpc import server
from anychip_grpc.answering import NEEDS
from app import main
from app.access.rules import administered
from app.config import Settings


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
