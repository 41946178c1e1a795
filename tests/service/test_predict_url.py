"""`anychip predict --url`: many images against a running service."""

from __future__ import annotations

import json

from PIL import Image

from app.cli import main
from tests.support.service_process import running

NULL = ("--device", "null", "--engine", "auto", "--precision", "auto", "--weights", "random")


def test_a_service_is_kept_busy_and_what_it_refuses_is_tried_again(tmp_path, capsys):
    for number in range(80):
        path = tmp_path / "in" / f"{number:02}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (8, 8), (number, 0, 1)).save(path)
    (tmp_path / "in" / "99.jpg").write_text("no image")
    # More requests than may wait: some are refused with 429, and none is lost.
    null = ("--models", "resnet18", *NULL, "--null", "delay_ms=20", "--queue-size", "4")
    output = tmp_path / "out.jsonl"
    with running(tmp_path, *null) as service, service.client() as client:
        arguments = ["predict", "resnet18", str(tmp_path / "in"), "--url", service.url, "--output", str(output)]
        assert main([*arguments, "--parallel", "16"]) == 1
        stats = client.get("/v1/stats").json()["models"][0]
        assert main(["predict", "resnet19", str(tmp_path / "in"), "--url", service.url]) == 1
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    failed = [line for line in lines if "error" in line]
    assert len(lines) == 81
    assert len({line["file"] for line in lines}) == 81
    assert len(failed) == 1
    assert "INVALID_IMAGE" in failed[0]["error"]
    assert stats["requests"]["QUEUE_FULL"] > 0
    assert stats["images_computed"] > stats["batches"]
    said = capsys.readouterr().err
    assert "81 images, 1 failed" in said
    assert "there is no model 'resnet19'" in said
