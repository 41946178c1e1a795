"""The service against RapidOCR with the same files, on pages of Chinese, Latin, digits, turned and dense lines."""

from __future__ import annotations

import base64
import importlib.util
import json
from concurrent.futures import ThreadPoolExecutor
from difflib import SequenceMatcher
from pathlib import Path

import httpx
import numpy as np
import onnx
import pages
import pytest
import yaml

from tests.support.browser import chromium, drop
from tests.support.images import encoded
from tests.support.service_process import running

pytestmark = [
    # On some processors a network enlarges rounding so far that each operator is compared with ONNX Runtime's, at the
    # first reading, which takes minutes.
    pytest.mark.timeout(1200),
    pytest.mark.xdist_group("ocr"),  # One process has what RapidOCR finds and the service, which take a minute.
    pytest.mark.skipif(importlib.util.find_spec("rapidocr") is None, reason="make ocr-environment installs RapidOCR"),
    pytest.mark.skipif(pages.chinese_font() is None, reason="apt-get install fonts-wqy-zenhei, or ANYCHIP_TEST_FONT"),
]
PNG = {"Content-Type": "image/png"}


def networks():
    spec = importlib.util.find_spec("rapidocr")
    return spec and Path(spec.origin).parent / "models"


def client_of(service):
    return httpx.Client(base_url=service.url, timeout=300)


def png(page):
    return encoded(page.image)


@pytest.fixture(scope="module")
def reference():
    """Each page with what RapidOCR finds on it: corners and text of each line."""
    from rapidocr import RapidOCR

    engine = RapidOCR(params={"Global.log_level": "error"})
    found = []
    for page in pages.pages():
        said = engine(np.ascontiguousarray(np.asarray(page.image)[..., ::-1]))
        found.append((page, list(zip(said.boxes, said.txts, strict=True))))
    return found


def compared(client, reference):
    """Return the share of lines with the same text, and the greatest distance of corners in pixels."""

    def asked(page):
        answer = client.post("/v1/models/ocr:predict", content=png(page), headers=PNG)
        assert answer.status_code == 200, answer.text
        return answer.json()["predictions"][0]["lines"]

    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(asked, [page for page, _ in reference]))
    same = lines = 0
    distances = [0.0]
    for (page, wanted), found in zip(reference, answers, strict=True):
        lines += len(wanted)
        assert len(found) == len(wanted), f"{page.name} has {len(found)} lines, and {len(wanted)} are there"
        for (corners, text), line in zip(wanted, found, strict=True):
            same += line["text"] == text
            distances.append(float(np.abs(np.array(line["corners"]) - corners).max()))
    assert lines >= 200
    return same / lines, max(distances)


SERVED = (
    *("--models", f"ocr=ppocr:{networks()}?widths=640|1280", "--batch-sizes", "1,4"),
    *("--engine", "auto", "--precision", "auto", "--timeout-ms", "200000"),
)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """Start the service as a user would: the default engine and precision."""
    with running(tmp_path_factory.mktemp("ocr"), *SERVED, "--compat", "paddlex") as service:
        yield service


def test_in_float32_text_and_corners_are_those_of_rapidocr(tmp_path, reference):
    with running(tmp_path, *SERVED, "--precision", "fp32") as service, client_of(service) as client:
        share, pixels = compared(client, reference)
    assert share >= 0.99
    assert pixels <= 2


def test_in_the_default_precision_nearly_all_of_them_are(service, reference):
    with client_of(service) as client:
        share, pixels = compared(client, reference)
    assert share >= 0.98
    assert pixels <= 3


def test_every_client_is_answered_alike(service, reference):
    page = reference[0][0]
    with client_of(service) as client:
        [entry] = client.post("/v1/models/ocr:predict", content=png(page), headers=PNG).json()["predictions"]
        lines = entry["lines"]
        raw = {"Inference-Header-Content-Length": "0"}
        tensors = client.post("/v2/models/ocr/infer", content=png(page), headers=raw).content
        assert json.dumps(lines[0]["text"])[1:-1].encode() in tensors
        status = {model["name"]: model for model in client.get("/v1/models").json()["models"]}
        assert (status["ocr"]["task"], status["ocr"]["ready"]) == ("read", True)
        asked = {"file": base64.b64encode(png(page)).decode(), "fileType": 1}
        answer = client.post("/ocr", json=asked).json()
        assert (answer["errorCode"], answer["errorMsg"]) == (0, "Success")
        [result] = answer["result"]["ocrResults"]
        assert result["prunedResult"]["rec_texts"] == [line["text"] for line in lines]
        assert answer["result"]["dataInfo"] == {"width": 1280, "height": 960, "type": "image"}
        for document, status_code in (({**asked, "fileType": 0}, 400), ({"file": "?"}, 400), ({"file": "aGk="}, 422)):
            refused = client.post("/ocr", json=document)
            assert refused.status_code == refused.json()["errorCode"] == status_code
        weak = client.post("/v1/models/ocr:predict?score_threshold=1", content=png(page), headers=PNG).json()
        assert [entry["lines"] for entry in weak["predictions"]] == [[]]


def test_several_pages_of_one_request_are_answered_in_order(service, reference):
    chosen = [reference[number][0] for number in (0, 3, 0)]
    files = [("file", (f"{number}.png", png(page))) for number, page in enumerate(chosen)]
    with client_of(service) as client:
        first, second, third = client.post("/v1/models/ocr:predict", files=files).json()["predictions"]
    assert first == third
    assert [len(entry["lines"]) for entry in (first, second)] == [len(page.lines) for page in chosen[:2]]


def test_the_page_draws_lines(service, reference, tmp_path):
    page, wanted = reference[0]
    (tmp_path / "page.png").write_bytes(png(page))
    with chromium(tmp_path / "profile") as browser, browser.page(f"{service.url}/") as (shown, seen):
        shown.locator("input[name=model][value=ocr]").check()
        drop(shown, tmp_path / "page.png")
        shown.locator("#canvas[data-answers='1']").wait_for()
        assert shown.locator("#found .name").all_inner_texts() == [text for _, text in wanted]
        assert not seen.failures


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Write the networks as PaddleOCR exports them: `inference.yml` alone describes each."""
    folder = tmp_path_factory.mktemp("exported")
    half = {"NormalizeImage": {"mean": [0.5] * 3, "std": [0.5] * 3, "scale": "1./255.", "order": "hwc"}}
    boxes = {"name": "DBPostProcess", "thresh": 0.3, "box_thresh": 0.5, "unclip_ratio": 1.6, "max_candidates": 1000}
    for kind, step, after in (
        ("det", half, {**boxes, "use_dilation": True}),
        ("rec", {"RecResizeImg": {"image_shape": [3, 48, 320]}}, {"name": "CTCLabelDecode"}),
    ):
        network = onnx.load(networks() / f"PP-OCRv6_{kind}_small.onnx")
        if kind == "rec":
            [character] = [each.value for each in network.metadata_props if each.key == "character"]
            after["character_dict"] = character.splitlines()
        del network.metadata_props[:]
        (folder / f"PP-OCRv6_small_{kind}").mkdir()
        onnx.save(network, folder / f"PP-OCRv6_small_{kind}" / "inference.onnx")
        stated = {"PreProcess": {"transform_ops": [{"DecodeImage": {"img_mode": "BGR"}}, step]}, "PostProcess": after}
        text = yaml.safe_dump(stated, allow_unicode=True, sort_keys=False)
        (folder / f"PP-OCRv6_small_{kind}" / "inference.yml").write_text(text, encoding="utf-8")
    return folder


def test_a_simulated_device_reads_the_same_from_exports_of_paddleocr(tmp_path, reference, exported):
    served = ("--models", f"ocr=ppocr:{exported}?sizes=736x1184&widths=1280", "--batch-sizes", "2")
    page, wanted = reference[4]  # The smallest: this device computes operator by operator.
    simulated = ("--simulate", "npu:1", "--device", "npu", "--timeout-ms", "200000")
    with running(tmp_path, *served, *simulated) as service, client_of(service) as client:
        found = client.post("/v1/models/ocr:predict", content=png(page), headers=PNG).json()
        assert found["simulated"] is True
        lines = [line["text"] for line in found["predictions"][0]["lines"]]
        assert len(lines) == len(wanted)
        # A space whose probability is that of none falls either way, from processor to processor.
        likeness = SequenceMatcher(None, "\n".join(lines), "\n".join(text for _, text in wanted), autojunk=False)
        assert likeness.ratio() > 0.99
