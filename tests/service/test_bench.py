"""`anychip bench` against a running service: closed and open loop, over HTTP, Open Inference and gRPC; and wrk."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from anychip_tools.benchmark.endpoints import address_of, predict_request
from anychip_tools.benchmark.service import LoadedService
from app.cli import main
from models.sample import IMAGES
from tests.support.null_service import serving

pytestmark = pytest.mark.xdist_group("shared service")

IMAGE = min(IMAGES.glob("*.jpg")).read_bytes()


def bench(capsys, *arguments):
    code = main(["bench", *arguments, "--seconds", "0.5", "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("protocol", ["predict", "v2", "grpc"])
def test_every_protocol_is_answered_in_closed_and_open_loop(service, grpc_port, capsys, protocol):
    if protocol == "grpc":
        pytest.importorskip("grpc")
    url = f"grpc://127.0.0.1:{grpc_port}" if protocol == "grpc" else service.url
    options = ("--url", url, "--protocol", protocol, "--connections", "2", "--rates", "5", "--timeout-ms", "20000")
    code, found = bench(capsys, "resnet18", *options)
    closed, opened = found["results"]
    assert code == 0
    assert (closed["mode"], opened["mode"]) == ("closed", "open")
    assert closed["images_per_s"] > 0
    assert 0 < closed["p50_ms"] <= closed["p99_ms"]
    assert closed["errors"] == opened["errors"] == 0


def test_refused_requests_are_an_error(service, capsys):
    code = main(["bench", "no-such-model", "--url", service.url, "--connections", "1", "--seconds", "0.2"])
    assert code == 1
    assert "404" in capsys.readouterr().err


def test_what_does_not_answer_is_said_in_a_sentence(capsys):
    assert main(["bench", "resnet18", "--url", "http://127.0.0.1:9", "--seconds", "0.1"]) == 1
    assert "nothing answers" in capsys.readouterr().err


@pytest.mark.nightly  # It wants the whole machine, and rather long.
@pytest.mark.skipif(shutil.which("wrk") is None, reason="wrk is not installed")
def test_the_rate_agrees_with_wrk(tmp_path):
    """On a device that takes its time, so that the machine's other work hardly counts."""
    script = tmp_path / "post.lua"
    (tmp_path / "image.jpg").write_bytes(IMAGE)
    script.write_text(
        f'local file = io.open("{tmp_path / "image.jpg"}", "rb"); wrk.method = "POST"; wrk.body = file:read("*a")\n'
        'wrk.headers["Content-Type"] = "image/jpeg"\n'
    )
    with serving(tmp_path, "delay_ms=40", "--batch-sizes", "4") as service:
        ours = LoadedService(service.url, "resnet18", "predict", IMAGE)
        ours.warm_up()
        address = f"{service.url}/v1/models/resnet18:predict"
        rates = []
        for _ in range(2):
            mine = ours.closed(16, 4)["answers_per_s"]
            command = ["wrk", "-t1", "-c16", "-d4s", "-s", str(script), address]
            said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
            found = re.search(r"Requests/sec:\s+([\d.]+)", said)
            assert found, said
            rates.append((mine, float(found[1])))
    mine, theirs = (sum(each) for each in zip(*rates, strict=True))
    assert mine == pytest.approx(theirs, rel=0.05), rates


def test_an_address_may_be_https_or_have_no_scheme():
    assert address_of("gpu7:8000")[:2] == ("gpu7", 8000)
    assert address_of("https://example.org").tls is not None
    assert address_of("https://example.org").port == 443
    assert b"Bearer secret" in predict_request("m", b"x", "h:1", "secret")
