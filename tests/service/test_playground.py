"""The page at `/` in a real browser: what people drop, see, turn and are told."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from models.sample import IMAGES
from tests.support import silent
from tests.support.browser import axe_violations, chromium, drop
from tests.support.images import encoded, png
from tests.support.service_process import running
from tests.support.work import until

ARTEFACTS = os.environ.get("ANYCHIP_TEST_ARTEFACTS", "")
"""A folder where screenshots of the page are kept, for people to look at."""

ROOT = Path(__file__).parents[2]
DETECT = IMAGES / "detect_1.jpg"
HTML = {"Accept": "text/html,*/*;q=0.8"}
MAX_BODY_BYTES = 1_000_000
NULL = ("--device", "null", "--engine", "auto", "--precision", "auto", "--weights", "random")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    options = ("--models", "resnet50,yolov8n", "--weights", "sample", "--max-body-bytes", str(MAX_BODY_BYTES))
    with running(tmp_path_factory.mktemp("service"), *options, "--max-image-pixels", "4000000") as service:
        yield service


@pytest.fixture(scope="module")
def null_service(tmp_path_factory):
    """Serve without computing, 20 ms a batch, for tests of timing."""
    options = ("--models", "yolov8n,resnet50", *NULL, "--null", "delay_ms=20,power_w=75")
    with running(tmp_path_factory.mktemp("null"), *options) as service:
        yield service


def test_as_many_follow_the_numbers_as_may_and_no_more(null_service):
    """The first to use this service: no page follows them yet."""
    with (
        null_service.client() as client,
        silent.client_elsewhere(null_service.url) as other,
        contextlib.ExitStack() as streams,
    ):

        def follow(by):
            stream = by.send(by.build_request("GET", "/v1/stats/stream"), stream=True)
            streams.callback(stream.close)
            return stream

        *followed, refused = [follow(client) for _ in range(13)]
        assert {each.status_code for each in followed} == {200}
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        *others, last = [follow(other) for _ in range(5)]
        assert ({each.status_code for each in others}, last.status_code) == ({200}, 429), "four are for others"
        for stream in (followed[0], others[0]):
            data = next(line for line in stream.iter_lines() if line.startswith("data: "))
            assert json.loads(data[6:])["models"][0]["model"] == "yolov8n"
        streams.close()
        until(lambda: follow(client).status_code == 200)  # The service hears of it when the connections have closed.


def pixels(page, x, y):
    """Colours of the canvas at a pixel of the image and around it, int [3, 3, 3]: a line may lie between two."""
    block = page.evaluate(
        """([x, y]) => {
          const canvas = document.getElementById("canvas");
          const scale = canvas.width / JSON.parse(canvas.dataset.size)[0];
          const [left, top] = [Math.round(x * scale) - 1, Math.round(y * scale) - 1];
          return [...canvas.getContext("2d").getImageData(left, top, 3, 3).data];
        }""",
        [x, y],
    )
    return np.array(block).reshape(3, 3, 4)[..., :3]


def answered(page, times=1):
    """Until the page has shown so many answers.

    Playwright's own wait_for_function evaluates text in the page, which the page's policy forbids.
    """
    for _ in range(6000):
        if page.evaluate("() => Number(document.getElementById('canvas').dataset.answers || 0)") >= times:
            return
        page.wait_for_timeout(20)
    raise AssertionError("no answer was shown")


def expected(service, threshold):
    answer = httpx.post(
        f"{service.url}/v1/models/yolov8n:predict?score_threshold={threshold}",
        content=DETECT.read_bytes(),
        headers={"Content-Type": "image/jpeg"},
        timeout=60,
    )
    return answer.json()["predictions"][0]["detections"]


def test_a_dropped_image_has_its_boxes_at_the_right_pixels(browser, service):
    boxes = expected(service, 0.25)
    assert len(boxes) >= 3
    with Image.open(DETECT) as image:
        original = np.asarray(image.convert("RGB")).astype(int)
    with browser.page(service.url) as (page, seen):
        drop(page, DETECT)
        answered(page)
        assert page.locator("#found li").count() == len(boxes)
        assert page.locator("#canvas").get_attribute("aria-label").startswith(f"detect_1.jpg: {len(boxes)} objects")
        swatches = (
            "() => [...document.querySelectorAll('.swatch')].map((each) => getComputedStyle(each).backgroundColor)"
        )
        colours = page.evaluate(swatches)
        places = [found["box"] for found in boxes]
        for found, css in zip(boxes, colours, strict=True):
            ink = [int(part) for part in css[4:-1].split(",")]
            box = found["box"]
            # In the middle of the left and the lower edge, where no label lies.
            for x, y in ((box["x1"], (box["y1"] + box["y2"]) / 2), ((box["x1"] + box["x2"]) / 2, box["y2"])):
                if 2 < x < original.shape[1] - 2 and 2 < y < original.shape[0] - 2:
                    assert np.abs(pixels(page, x, y) - ink).max(-1).min() <= 12, (found, css)
        # Away from every box the image is as it was.
        x, y = 320, 20
        assert not any(box["x1"] - 9 < x < box["x2"] + 9 and box["y1"] - 40 < y < box["y2"] + 9 for box in places)
        assert np.abs(pixels(page, x, y)[1, 1] - original[y, x]).max() <= 24
        assert seen.failures == seen.errors == []
        assert seen.hosts == {service.url.removeprefix("http://")}


def test_the_threshold_acts_at_once_and_without_a_request(browser, service):
    with browser.page(service.url) as (page, _):
        page.click("#samples button:first-child")
        answered(page)
        requests = []
        page.on("request", lambda request: requests.append(request.url))
        for threshold in (0.9, 0.5, 0.05):
            page.evaluate(
                """(value) => { const slider = document.getElementById("threshold");
                slider.value = value; slider.dispatchEvent(new Event("input")); }""",
                threshold,
            )
            assert page.locator("#found li").count() == len(expected(service, threshold))
            assert f"score_threshold={threshold}" in page.inner_text("#snippet")
        assert not [url for url in requests if ":predict" in url]


def test_an_error_is_said_once(browser, service):
    noise = encoded(Image.fromarray(np.random.default_rng(0).integers(0, 255, (900, 900, 3), np.uint8)))
    assert len(noise) > MAX_BODY_BYTES
    with browser.page(service.url) as (page, _):
        drop(page, Path("noise.png"), noise)
        page.wait_for_selector("#error:not([hidden])")
        assert "413 BODY_TOO_LARGE" in page.inner_text("#error")
        assert "larger than the" in page.inner_text("#error")
        drop(page, Path("wide.png"), png(size=(5000, 1000)))
        page.wait_for_selector("#error:has-text('IMAGE_TOO_LARGE')")
        assert "5000" in page.inner_text("#error")
        drop(page, Path("text.jpg"), b"no image")
        page.wait_for_selector("#error:has-text('INVALID_IMAGE')")
        assert "request id" in page.inner_text("#error").lower()
        assert page.locator("#error p").count() == 2, "the service's sentence, and the request id"
        drop(page, DETECT)
        answered(page)
        assert page.locator("#error").is_hidden()


TRITON = Path(os.environ.get("ANYCHIP_TEST_CLIENTS_PYTHON") or ROOT / ".venv-clients" / "bin" / "python")


def test_the_same_request_works_in_every_language_as_it_is_shown(browser, service, tmp_path):
    shutil.copy(DETECT, tmp_path)
    programs = {
        "curl": ["bash", "-c"],
        "Python": [sys.executable, "-c"],
        "Node": ["node", "--input-type=module", "-e"],
        "tritonclient": [str(TRITON), "-c"],
    }
    with browser.page(service.url) as (page, _):
        drop(page, DETECT)
        answered(page)
        found = [each["label"] for each in expected(service, 0.25)]
        for count, model in enumerate(("yolov8n", "resnet50"), 1):
            page.check(f"input[value={model}]", force=True)
            answered(page, count)
            for language, program in programs.items():
                page.click(f"#tab-{language}")
                text = page.inner_text("#snippet")
                if shutil.which(program[0]) is None:
                    continue  # Not every machine has node, or the environment with tritonclient.
                ended = subprocess.run(
                    [*program, text], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
                )
                assert ended.returncode == 0, (language, ended.stderr)
                if language == "tritonclient":
                    assert ended.stdout.count("[") > (len(found) if model == "yolov8n" else 0), ended.stdout
                elif model == "yolov8n":
                    assert re.findall("|".join(set(found)), ended.stdout) == found, language
                else:
                    assert len(re.findall(r"0\.\d+|1\.0|e-\d+", ended.stdout)) >= 5, (language, ended.stdout)


def test_the_page_is_chinese_where_that_is_asked_for(browser, service):
    with browser.page(f"{service.url}/?lang=zh") as (page, seen):
        page.wait_for_selector(".device")
        drop(page, DETECT)
        answered(page)
        page.wait_for_selector(".device")
        assert page.get_attribute("html", "lang") == "zh-CN"
        shown = page.inner_text("body")
        for english in ("What is", "Results", "object", "busy", "workers", "at a time", "Save image", "Auto"):
            assert english not in shown
        assert "个目标" in page.inner_text("#summary")
        drop(page, Path("text.jpg"), b"no image")
        page.wait_for_selector("#error:has-text('不是图片')")
        assert axe_violations(page) == []
        page.click("#language")
        page.wait_for_selector("html[lang=en][data-loaded]")
        assert "Results" in page.inner_text("body")
        assert seen.failures == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_and_every_width_fits(browser, service, theme):
    for width in (360, 768, 1440):
        with browser.page(service.url, width=width, theme=theme) as (page, seen):
            drop(page, DETECT)
            answered(page)
            page.wait_for_selector(".device")
            assert page.evaluate("() => document.documentElement.scrollWidth") <= width
            assert axe_violations(page) == []
            if ARTEFACTS:
                Path(ARTEFACTS).mkdir(parents=True, exist_ok=True)
                page.screenshot(path=Path(ARTEFACTS) / f"playground-{theme}-{width}.png", full_page=True)
            assert seen.failures == []


def test_a_key_is_sent_and_kept_nowhere(browser, null_service):
    with browser.page(null_service.url) as (page, _):
        page.click("#key-box summary")
        page.fill("#key", "secret-key")
        with page.expect_request(lambda request: request.url.endswith("/v1/models")) as asked:
            page.keyboard.press("Enter")
        assert asked.value.headers["authorization"] == "Bearer secret-key"
        assert "YOUR_KEY" in page.inner_text("#snippet")
        kept = page.evaluate("() => [localStorage.length, sessionStorage.length, document.cookie]")
        assert kept == [0, 0, ""]
        assert "secret-key" not in page.content()


def test_the_page_keeps_to_its_host_and_is_small(null_service):
    with null_service.client() as client:
        page = client.get("/", headers=HTML)
        policy = page.headers["content-security-policy"]
        assert "unsafe" not in policy
        assert "default-src 'none'" in policy
        assert "http" not in policy
        docs = client.get("/docs")
        for name in ("x-content-type-options", "x-frame-options", "referrer-policy"):
            assert page.headers[name] == docs.headers[name]
        names = ["", "style.css", "icon.svg", "main.js"]
        for name in names:  # Modules name each other.
            path = f"/playground/{name}" if name else "/"
            answer = client.get(path, headers=HTML)
            assert answer.status_code == 200, path
            assert answer.headers["content-security-policy"] == policy
            assert answer.headers["content-encoding"] == "gzip"
            if name.endswith(".js"):
                found = [part.split('"')[0] for part in answer.text.split('from "./')[1:]]
                names += [module for module in found if module not in names]
        assert len(names) > 8
        raw = [client.get(f"/playground/{name}" if name else "/", headers=HTML).content for name in names]
        assert sum(len(zlib.compress(content, 9)) for content in raw) <= 60 * 1024
        again = client.get("/", headers={**HTML, "If-None-Match": page.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert client.get("/playground/../app/main.py").status_code == 404
        assert client.get("/playground/none.js").json()["code"] == "NOT_FOUND"
