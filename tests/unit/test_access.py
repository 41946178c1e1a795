"""Who may ask for what, and how much: keys, spellings of paths, names of hosts, every route, limits of a caller."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st

from anychip_compat import deepstack, labelling
from app import clock
from app.access import keys
from app.access.access import (
    Access,
    Caller,
    ClientLease,
    ClientLimits,
    Hosts,
    KeyForbiddenError,
    check_exposure,
    check_secrets,
    client_of,
)
from app.access.keys import CallerLimits
from app.access.rules import ROUTES, administered, check_spelling, need_of
from app.config import Settings
from app.errors import ServiceError
from app.link import Terms, measured
from app.main import add_routes
from app.serving.submissions import Filling
from tests.support.images import png

ADMIN_PATH = "/v2/repository/models/dogs/unload"


def routes(app: Any) -> Iterator[tuple[str, str]]:
    for route in app.routes:
        inner = getattr(route, "original_router", None) or getattr(route, "app", None)
        if getattr(inner, "routes", None):
            yield from routes(inner)
        elif getattr(route, "methods", None):
            yield from ((route.path, method) for method in route.methods)
        else:
            assert type(inner).__name__ == "StaticFiles", route
            yield from ((f"{route.path}/{{path:path}}", method) for method in ("GET", "HEAD"))


def test_every_route_has_a_rule_and_every_rule_a_route() -> None:
    app = FastAPI(docs_url=None, redoc_url=None)
    add_routes(app, playground=True, compat=("deepstack", "x-anylabeling"))
    known = (ROUTES, deepstack.NEEDS, labelling.NEEDS)
    wanted = {(path, method) for table in known for path, needs in table.items() for method in needs}
    assert set(routes(app)) == wanted


@pytest.mark.parametrize(
    "path", ["/v2/repository", "/V2/repository/index", "//v2", "/v2/models/a/../b/infer/x", "/x\n"]
)
def test_what_is_not_in_the_table_is_nowhere(path: str) -> None:
    with pytest.raises(ServiceError, match="nothing") as refused:
        need_of("GET", path)
    assert refused.value.code == "NOT_FOUND"


def test_a_method_without_a_rule_needs_what_the_others_need() -> None:
    assert need_of("DELETE", ADMIN_PATH) == "admin"
    assert need_of("GET", "/v1/models/x:predict") == "infer"
    assert administered(ADMIN_PATH) == ("unload", {"model": "dogs"})
    assert administered("/v1/devices/cpu:0:release") == ("release", {"device": "cpu:0"})


@given(st.integers(0, 255))
def test_only_what_needs_it_may_be_spelt_with_a_percent_sign(byte: int) -> None:
    unreserved = chr(byte).isascii() and (chr(byte).isalnum() or chr(byte) in "-._~/\\%")
    refused = unreserved or byte < 32 or byte == 127
    for spelling in (b"/a%%%02x" % byte, b"/a%%%02X" % byte):
        try:
            check_spelling(spelling)
        except ServiceError:
            assert refused, spelling
        else:
            assert not refused, spelling


@pytest.mark.parametrize(
    ("header", "named", "checked", "accepted"),
    [
        (b"localhost:8000", (), True, True),
        (b"[::1]:8000", (), True, True),
        (b"", (), True, True),
        (b"evil.example", (), True, False),
        (b"localhost.evil", (), True, False),
        (b"evil.example", (), False, True),
        (b"API.example:443", ("api.example",), False, True),
        (b"a.b.example", ("*.b.example",), False, True),
        (b"b.example", ("*.b.example",), False, False),
        (b"any", ("*",), True, True),
        (b"\xff\xfe", (), True, False),
        (b"localhost@evil", (), True, False),
    ],
)
def test_names_of_hosts(header: bytes, named: tuple[str, ...], checked: bool, accepted: bool) -> None:
    hosts = Hosts(named, checked=checked)
    assert hosts.accepts(header) is accepted
    assert hosts.accepts(header) is accepted, "asked again"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.txt"


EVIL = [(b"host", b"evil.example:8000")]
"""What a page sends whose name was given this service's address."""


@pytest.mark.parametrize("given", [{"host": "0.0.0.0"}, {"host": "::"}, {"host": "127.0.0.1"}, {"host": "10.0.0.7"}])
@pytest.mark.parametrize("hosted", [False, True])
def test_without_keys_a_foreign_name_is_refused_wherever_the_service_listens(
    given: dict[str, str], hosted: bool
) -> None:
    access = Access(settings(**given), hosted=hosted)
    for host in (b"localhost:8000", b"127.0.0.1", b"10.0.0.7:8000", b"[::1]:8000"):
        assert access.admit("infer", "public", [(b"host", host)], "10.0.0.1").name == "10.0.0.1"
    for need, bind in (("infer", "public"), ("open", "public"), ("metrics", "public"), ("open", "admin")):
        with pytest.raises(ServiceError, match="ANYCHIP_ALLOWED_HOSTS") as refused:
            access.admit(need, bind, EVIL, "10.0.0.1")  # type: ignore[arg-type]
        assert refused.value.code == "FORBIDDEN"
    named = Access(settings(**given, allowed_hosts="anychip,*.svc"), hosted=hosted)
    for host in (b"anychip:8000", b"anychip.vision.svc", b"localhost"):
        named.admit("metrics", "public", [(b"host", host)], "10.0.0.1")
    with pytest.raises(ServiceError, match="names another service"):
        named.admit("infer", "public", EVIL, "10.0.0.1")


def test_with_keys_a_foreign_name_needs_one_and_on_loopback_is_refused(file: Path) -> None:
    key = keys.add(file, "cam", "infer").encode()
    given = {"api_keys_file": str(file), "insecure_keys": True}
    listening = Access(settings(**given, host="0.0.0.0"))
    with pytest.raises(ServiceError, match="wants an API key"):
        listening.admit("infer", "public", EVIL, "10.0.0.1")
    assert listening.admit("infer", "public", [*EVIL, (b"x-api-key", key)], "10.0.0.1").key == "cam"
    loopback = Access(settings(**given, host="127.0.0.1"))
    for access, bind in ((listening, "admin"), (loopback, "public")):
        with pytest.raises(ServiceError, match="names another service"):
            access.admit("infer", bind, [*EVIL, (b"x-api-key", key)], "10.0.0.1")  # type: ignore[arg-type]


def test_a_new_key_opens_and_its_file_does_not_hold_it(file: Path) -> None:
    key = keys.add(file, "camera-7", "infer")
    file.write_bytes(file.read_bytes().rstrip() + b" priority=5 images_per_s=2.5")  # No line end: the next begins one.
    other = keys.add(file, "ops", "admin")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert key not in file.read_text()
    known = keys.Keys(file)
    found = known.find(key.encode())
    assert found is not None
    assert (found.name, found.role) == ("camera-7", "infer")
    assert found.limited(keys.CallerLimits(requests=3, priority=0)) == keys.CallerLimits(
        requests=3, priority=5, images_per_s=2.5
    )
    ops = known.find(other.encode())
    assert ops is not None
    assert ops.role == "admin"
    for wrong in (b"", key.encode()[:-1], key.encode() + b"x", b"x" * 10_000, keys.digest_of(key)):
        assert known.find(wrong) is None
    with pytest.raises(keys.KeysError, match="camera-7"):
        keys.add(file, "camera-7", "infer")


def test_a_file_is_read_again(file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    monkeypatch.setattr(clock, "monotonic", lambda: now_s)
    first = keys.add(file, "first", "infer")
    known = keys.Keys(file)
    second = keys.add(file, "second", "infer")
    assert known.find(second.encode()) is None, "it looks once a second"
    now_s = 2.0
    assert known.find(second.encode()) is not None
    assert known.find(second.encode()) is known.find(second.encode()), "it is remembered"
    file.write_text("what is this")
    now_s = 4.0
    assert known.find(first.encode()) is not None, "a broken file changes nothing"
    assert "line 1" in caplog.text
    assert "what is this" not in caplog.text
    replaced = file.with_name("new")
    third = keys.add(replaced, "third", "infer")
    replaced.replace(file)
    now_s = 6.0
    assert known.find(third.encode()) is not None
    assert known.find(first.encode()) is None, "it was taken out"


DIGEST = "sha256:" + "ab" * 32


@pytest.mark.parametrize(
    "text",
    [
        "x",
        f"{DIGEST} name",
        f"{DIGEST} na/me infer",
        f"{DIGEST} a infer requests=x",
        f"{DIGEST} a infer requests=1 requests=1",
        f"{DIGEST} a infer\n{DIGEST} b infer",
        f"{DIGEST} a infer\nsha256:{'cd' * 32} a infer",
    ],
)
def test_lines_that_make_no_sense_are_named_and_not_repeated(text: str) -> None:
    with pytest.raises(keys.KeysError, match=r"line [12]") as refused:
        keys.parse(text)
    assert "ab" * 8 not in str(refused.value)


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=300))
def test_any_text_is_keys_or_refused(text: str) -> None:
    try:
        keys.parse(text)
    except keys.KeysError:
        return


def test_a_file_that_everybody_may_write_is_refused(file: Path) -> None:
    keys.add(file, "a", "infer")
    file.chmod(0o666)
    with pytest.raises(keys.KeysError, match="everybody"):
        keys.read(file)
    with pytest.raises(keys.KeysError, match="cannot be read"):
        keys.read(file.with_name("nowhere"))
    assert not os.path.exists(file.with_name("nowhere"))


def settings(**given: Any) -> Settings:
    return Settings(**given)


def test_keys_do_not_cross_a_network_in_the_clear(file: Path) -> None:
    keys.add(file, "a", "infer")
    given = {"api_keys_file": str(file), "host": "0.0.0.0"}
    with pytest.raises(keys.KeysError, match="insecure-keys"):
        check_exposure(settings(**given))
    check_exposure(settings(**given, insecure_keys=True))
    check_exposure(settings(**{**given, "host": "127.0.0.1"}))
    check_exposure(settings(host="0.0.0.0"))


@pytest.mark.parametrize("option", ["api_keys_file", "tls_key"])
def test_keys_in_the_cache_are_named_and_no_program_is_served_beside_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, option: str
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "cache")
    inside = {"cache_dir": tmp_path / "link", option: str(tmp_path / "cache" / "secret.txt"), "tls_cert": "a.pem"}
    check_secrets(settings(**inside), programs=False)
    assert "lies in --cache-dir" in caplog.text
    with pytest.raises(keys.KeysError, match=r"no \.pt2"):
        check_secrets(settings(**inside), programs=True)
    caplog.clear()
    check_secrets(settings(**{**inside, option: str(tmp_path / "secret.txt")}), programs=True)
    assert not caplog.text


def test_who_asks_and_how_it_is_counted(file: Path) -> None:
    infer_key, admin_key = keys.add(file, "cam", "infer"), keys.add(file, "ops", "admin")
    access = Access(settings(api_keys_file=str(file)))
    bearer = [(b"host", b"localhost"), (b"authorization", b"bearer " + infer_key.encode())]
    asked = access.admit("infer", "public", bearer, "10.0.0.1")
    assert (asked.name, asked.key) == ("key:cam", "cam")
    by_header = [(b"x-api-key", admin_key.encode())]
    assert access.admit("admin", "admin", by_header, "").key == "ops"
    assert access.admit("open", "public", [], "10.0.0.1").name == "10.0.0.1"
    with pytest.raises(KeyForbiddenError) as forbidden:
        access.admit("admin", "admin", bearer, "")
    assert forbidden.value.key == "cam"
    for need in ("infer", "metrics"):
        with pytest.raises(ServiceError) as refused:
            access.admit(need, "public", [], "")
        assert (refused.value.code, *refused.value.headers) == ("UNAUTHORIZED", (b"www-authenticate", b"Bearer"))
    open_metrics = Access(settings(api_keys_file=str(file), metrics_without_key=True))
    assert open_metrics.admit("metrics", "public", [], "1.2.3.4").name == "1.2.3.4"


@pytest.mark.parametrize(
    ("address", "client"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:3:ffff::", "2001:db8:1:3::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
        ("unix:/run/socket", "unix:/run/socket"),
    ],
)
def test_a_client_has_one_name(address: str, client: str) -> None:
    assert client_of(address) == client


WIDE = png(size=(20, 5))


def caller(name: str = "a", **limits: float) -> Caller:
    return Caller(name, CallerLimits(**limits))  # type: ignore[arg-type]


def refused(attempt: object, *arguments: object) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        attempt(*arguments)  # type: ignore[operator]
    return caught.value


def test_so_many_requests_at_a_time_of_each_caller() -> None:
    limits = ClientLimits()
    busy = caller(requests=2)
    with ClientLease(limits, busy), ClientLease(limits, busy):
        assert refused(ClientLease(limits, busy).__enter__).code == "QUEUE_FULL"
        with ClientLease(limits, caller("b", requests=2)):
            pass
    with ClientLease(limits, busy):
        pass
    assert len(limits._usages) == 0, "who asks nothing is forgotten"


def test_bytes_and_pixels_are_held_until_the_request_ends() -> None:
    limits = ClientLimits()
    limited = caller(bytes=100, pixels=1000)
    with ClientLease(limits, limited) as first:
        first.hold_bytes(60)
        first.hold_pixels(900)
        with ClientLease(limits, limited) as second:
            assert "100 bytes" in refused(second.hold_bytes, 41).message
            second.hold_bytes(40)
            assert "1000 pixels" in refused(second.hold_pixels, 101).message
    with ClientLease(limits, limited) as third:
        third.hold_bytes(100)
        third.hold_pixels(1000)
        assert third.counts_pixels
    assert not caller().limits.pixels


def test_images_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("app.clock.monotonic", lambda: now_s)
    limits = ClientLimits()
    limited = caller(images_per_s=4)
    with ClientLease(limits, limited) as client_lease:
        client_lease.admit_images(4)
        error = refused(client_lease.admit_images, 2)
        assert (error.code, error.retry_after_s) == ("QUEUE_FULL", 1)
    assert len(limits._usages) == 1, "its rate is remembered"
    now_s += 0.5
    with ClientLease(limits, limited) as client_lease:
        client_lease.admit_images(2)
        assert refused(client_lease.admit_images, 1).code == "QUEUE_FULL"
    now_s += 10
    with ClientLease(limits, limited) as client_lease:
        client_lease.admit_images(1)
    now_s += 10
    with ClientLease(limits, limited):
        pass
    assert len(limits._usages) == 0


@pytest.mark.parametrize("limited", [True, False])
def test_pixels_of_an_image_are_counted_by_its_header_also_where_it_is_looked_at_in_tiles(limited: bool) -> None:
    filled: list[Any] = []
    filling = Filling(
        cast(Any, None), 10**9, None, lambda item, error: filled.append(error or item.placement), reads_pixels=False
    )
    with ClientLease(ClientLimits(), caller(pixels=150 if limited else 0)) as client_lease:
        item: Any = SimpleNamespace(terms=Terms(0.0, client_lease=client_lease))
        assert measured(WIDE, client_lease, 10**9) == (20, 5)
        filling.fill([item], WIDE)
        if limited:
            assert "150 pixels" in refused(measured, WIDE, client_lease, 10**9).message
            assert [error.code for error in filled] == ["QUEUE_FULL"]
        else:
            assert [(placement.width, placement.height) for placement in filled] == [(20, 5)]


def test_priorities_are_for_those_who_may() -> None:
    asking = caller(priority=5)
    asking.check_priority(5)
    asking.check_priority(-100)
    assert refused(asking.check_priority, 6).code == "FORBIDDEN"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 50), st.integers(0, 50)), max_size=40))
def test_whatever_is_held_comes_back(asked: list[tuple[str, int, int]]) -> None:
    limits = ClientLimits()
    for name, size, pixels in asked:
        try:
            with ClientLease(limits, caller(name, bytes=40, pixels=40, requests=1)) as client_lease:
                client_lease.hold_bytes(size)
                client_lease.hold_pixels(pixels)
        except ServiceError:
            pass
    assert len(limits._usages) == 0
