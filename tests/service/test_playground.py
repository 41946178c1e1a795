"""The page at `/` in a real browser: what people drop, see, turn and are told."""

from __future__ import annotations

import base64
import csv
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zlib
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from app.http.schemas import PredictAnswer
from models.sample import IMAGES
from tests.support import silent
from tests.support.browser import axe_violations, chromium, drop
from tests.support.images import encoded, png
from tests.support.service_process import running
from tests.support.task_files import OF_IMAGES, written

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


def test_classes_are_bars_and_pointing_at_a_box_brings_it_out(browser, service):
    with browser.page(service.url) as (page, _):
        drop(page, DETECT)
        answered(page)
        found = expected(service, 0.25)[0]["box"]
        x, y = (found["x1"] + found["x2"]) / 2, (found["y1"] + found["y2"]) / 2
        shape = page.locator("#canvas").bounding_box()
        page.mouse.move(shape["x"] + x / 640 * shape["width"], shape["y"] + y / 480 * shape["height"])
        assert page.locator("#found button.on").count() == 1
        dimmed = pixels(page, 320, 20).sum()
        page.mouse.move(1, 1)
        assert page.locator("#found button.on").count() == 0
        assert dimmed < 0.6 * pixels(page, 320, 20).sum()
        page.check("input[value=resnet50]", force=True)
        answered(page, 2)
        assert page.locator("#found li").count() == 5
        assert page.locator("#threshold-box").is_hidden()
        assert "device" in page.inner_text("#legend")


@pytest.fixture(scope="module")
def of_tasks(tmp_path_factory):
    """Serve exported files whose answers are one instance in the middle of the image."""
    folder = tmp_path_factory.mktemp("files")
    models = ",".join(f"{task}={written(folder, task)}" for task in ("segment", "pose", "obb", *OF_IMAGES))
    options = ("--device", "cpu", "--engine", "eager", "--precision", "fp32", "--batch-sizes", "1")
    with running(tmp_path_factory.mktemp("tasks"), "--models", models, *options) as service:
        yield service


def places_of(task, found):
    """Points of the image where something is drawn of an instance, and others where nothing is."""
    if task == "segment":
        return [(320, 240), found["segments"][0][0]], [(320, 400), (100, 240)]
    if task == "pose":
        first, second, unseen = ((point["x"], point["y"]) for point in found["keypoints"])
        return [first, second], [unseen, (320, 240)]
    sides = zip(found["corners"], found["corners"][1:], strict=False)
    middles = [((x1 + x2) / 2, (y1 + y2) / 2) for (x1, y1), (x2, y2) in sides]
    return middles, [(320, 240), (found["box"]["x1"] + 2, found["box"]["y2"] - 2)]


def test_what_the_service_answers_for_each_task_is_drawn_where_it_is(browser, of_tasks):
    grey, headers = png(size=(640, 480)), {"Content-Type": "image/png"}
    with browser.page(of_tasks.url) as (page, seen), of_tasks.client() as client:
        drop(page, Path("grey.png"), grey)
        answered(page)
        shown = 1
        for task in ("segment", "pose", "obb"):
            answer = client.post(f"/v1/models/{task}:predict", content=grey, headers=headers)
            assert PredictAnswer.model_validate_json(answer.content, strict=True).model == task
            [found] = answer.json()["predictions"][0]["detections"]
            if task != "segment":  # The first model is asked already.
                page.check(f"input[value={task}]", force=True)
                shown += 1
            answered(page, shown)
            assert page.inner_text("#found .name") == "thing"
            inked, clear = places_of(task, found)
            for x, y in inked:
                assert np.abs(pixels(page, x, y) - 128).max() > 30, (task, x, y)
            for x, y in clear:
                assert np.abs(pixels(page, x, y) - 128).max() <= 4, (task, x, y)
            for language in ("Python", "tritonclient"):
                page.click(f"#tab-{language}")
                text = page.inner_text("#snippet")
                assert ("detections" if language == "Python" else "score_threshold") in text
        assert seen.failures == seen.errors == []


def test_vectors_maps_and_values_are_shown(browser, of_tasks):
    summaries = {
        "embed": "a vector of 2 numbers",
        "segment_semantic": "nothing 50 %, thing 50 %",
        "depth": "depth from 1 to 5",
        "regress": "nothing 31.5, thing 1.75",
    }
    with browser.page(of_tasks.url) as (page, seen):
        drop(page, Path("grey.png"), png(size=(640, 480)))
        answered(page)
        for shown, task in enumerate(OF_IMAGES, 2):
            page.check(f"input[value={task}]", force=True)
            answered(page, shown)
            assert page.inner_text("#summary strong") == summaries[task]
            left, right = (pixels(page, x, 240)[1, 1] for x in (40, 600))
            if task == "segment_semantic":
                assert np.abs(left - right).max() > 30
                assert min(np.abs(each - 128).max() for each in (left, right)) > 20
                assert page.locator("#found li").count() == 2
            elif task == "depth":
                assert right.min() - left.max() > 80
            else:
                assert np.abs(np.stack((left, right)) - 128).max() <= 4
            if task == "regress":
                assert page.locator("#found .score").all_inner_texts() == ["31.5", "1.75"]
        assert seen.failures == seen.errors == []


@pytest.mark.nightly  # It wants the whole machine, and rather long.
def test_the_first_answer_is_there_within_a_second_of_the_drop(browser, tmp_path):
    # The quick engine, so that no compiler runs beside the first answer.
    options = ("--models", "yolov8n", "--weights", "sample", "--engine", "eager")
    with running(tmp_path, *options) as service, browser.page(service.url) as (page, _):
        page.evaluate(
            """() => {
              addEventListener("drop", () => { window.dropped = performance.now(); }, { capture: true });
              const canvas = document.getElementById("canvas");
              new MutationObserver(() => { window.answered ??= performance.now(); })
                .observe(canvas, { attributes: true, attributeFilter: ["data-answers"] });
            }"""
        )
        drop(page, DETECT)
        answered(page)
        took_ms = page.evaluate("() => window.answered - window.dropped")
        print(f"first answer {took_ms:.0f} ms after the drop: {' '.join(page.inner_text('#timing').split())}")
        assert took_ms <= 1000


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


def test_what_is_saved_is_what_is_shown(browser, service):
    with browser.page(service.url) as (page, _):
        drop(page, DETECT)
        answered(page)
        with page.expect_download() as json_file:
            page.click("#save-json")
        saved = json.loads(Path(json_file.value.path()).read_text())
        assert json_file.value.suggested_filename == "detect_1.anychip.json"
        assert saved["predictions"][0]["detections"] == expected(service, 0.25)
        with page.expect_download() as image_file:
            page.click("#save-image")
        with Image.open(image_file.value.path()) as image:
            assert (image.format, image.size) == ("PNG", (640, 480))


def test_a_load_fills_batches_and_says_so(browser, null_service):
    with browser.page(null_service.url) as (page, seen):
        page.evaluate("() => { document.getElementById('load-seconds').value = 3; }")
        page.evaluate("() => document.getElementById('load-seconds').dispatchEvent(new Event('input'))")
        page.click("#load-start")
        page.wait_for_selector("#load-summary:not(:empty)")
        summary = page.inner_text("#load-summary")
        batch = float(summary.partition("batches of up to ")[2].split()[0])
        assert batch > 1, summary
        assert int(summary.split()[0]) > 20
        tiles = {name: page.inner_text(f"#figure-{name}") for name in ("rate", "p50", "p99", "batch")}
        assert tiles["rate"] == re.findall(r", ([\d.]+) a second", summary)[0]
        assert float(tiles["batch"]) == batch
        for name, value, unit in zip(
            ("p50", "p99"), *zip(*re.findall(r"within ([\d.]+) (ms|s)", summary), strict=True), strict=True
        ):
            told_ms = float(value) * (1000 if unit == "s" else 1)
            assert abs(float(tiles[name]) - told_ms) <= (5 if unit == "s" else 0.5), (tiles, summary)
        assert page.evaluate("() => document.getElementById('chart-rate').width") > 100
        assert seen.failures == seen.errors == []
    stats = httpx.get(f"{null_service.url}/v1/stats").json()["models"][0]
    assert stats["images_computed"] > 1.5 * stats["batches"]


def test_the_camera_is_answered_continuously_and_its_last_frame_stays(browser, null_service):
    with browser.page(null_service.url) as (page, seen):
        page.click("#camera")
        answered(page, 10)
        assert "images/s" in page.inner_text("#camera-facts")
        assert page.inner_text("#camera") == "Stop"
        page.click("#camera")
        page.wait_for_selector("#samples button")
        page.wait_for_selector("#busy", state="hidden")
        assert page.locator("#camera-facts").is_hidden()
        assert page.locator("#canvas").is_visible()
        assert "frame.jpg" in page.inner_text("#snippet")
        assert seen.failures == []


def test_the_live_panel_shows_the_numbers_of_the_service(browser, null_service):
    with browser.page(null_service.url) as (page, _):
        page.wait_for_selector(".device")
        text = page.inner_text("#devices")
        assert "null:0" in text
        assert "75 W" in text
        assert "restarts 0" in text
        assert page.locator("#live-models tbody tr").count() == 2


_PASTE = """([name, data]) => {
  const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
  const transfer = new DataTransfer();
  transfer.items.add(new File([bytes], name, { type: "image/jpeg" }));
  document.body.dispatchEvent(new ClipboardEvent("paste", { bubbles: true, clipboardData: transfer }));
}"""


def test_an_image_may_be_pasted_or_chosen_as_well(browser, null_service):
    with browser.page(null_service.url) as (page, seen):
        page.evaluate(_PASTE, ["pasted.jpg", base64.b64encode(DETECT.read_bytes()).decode()])
        answered(page)
        assert page.locator("#canvas").get_attribute("aria-label").startswith("pasted.jpg")
        with page.expect_file_chooser() as chooser:
            page.click("#choose")
        chooser.value.set_files(DETECT)
        answered(page, 2)
        assert page.locator("#canvas").get_attribute("aria-label").startswith("detect_1.jpg")
        assert seen.failures == seen.errors == []


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


def test_the_browser_s_snippet_works_on_a_page_of_the_service(browser, service):
    with browser.page(service.url) as (page, _):
        drop(page, DETECT)
        answered(page)
        page.click("#tab-Browser")
        text = page.inner_text("#snippet")
        # The page's own field gives its file away at once: the snippet finds one that does not.
        page.evaluate(
            """() => {
              const own = Object.assign(document.createElement("input"), {type: "file", id: "own"});
              document.getElementById("file").replaceWith(own);
            }"""
        )
        page.set_input_files("#own", DETECT)
        with page.expect_console_message() as said:
            page.evaluate(f"async () => {{{text}}}")
        found = said.value.args[0].json_value()["detections"]
        assert [each["label"] for each in found] == [each["label"] for each in expected(service, 0.25)]


def test_the_page_says_what_the_demo_knows_and_folds_what_the_gate_found(browser, service):
    with browser.page(service.url) as (page, _):
        page.wait_for_selector(".device summary")
        text = page.inner_text("#known")
        assert "a photograph for one of them" in text
        for label in {each["label"] for each in expected(service, 0.25)}:
            assert label in text
        assert "largest errors" not in page.inner_text("#devices")
        page.focus(".device summary")
        page.keyboard.press("Enter")
        page.wait_for_timeout(1100)  # The panel was drawn anew at least once.
        assert "largest errors against float32" in page.inner_text("#devices")
        assert page.evaluate("() => document.activeElement.tagName") == "SUMMARY"


def test_several_files_are_answered_in_turn_and_saved_together(browser, service):
    files = [(DETECT.name, DETECT.read_bytes()), ("text.jpg", b"no image"), ("again.jpg", DETECT.read_bytes())]
    boxes = expected(service, 0.25)
    with browser.page(service.url) as (page, seen):
        page.set_input_files(
            "#file", [{"name": name, "mimeType": "image/jpeg", "buffer": data} for name, data in files]
        )
        page.wait_for_selector("#save-csv:not([disabled])")
        assert page.inner_text("#files-note") == "2 of 3 files answered, 1 failed"
        said = page.locator("#files .said").all_inner_texts()
        assert said[0] == said[2] == page.inner_text("#summary strong")
        assert "image" in said[1]
        assert (
            page.evaluate("() => [...document.querySelectorAll('#files canvas')].map((each) => each.width)")[0] == 120
        )
        page.click("#files li:nth-child(2) button")
        page.wait_for_selector("#error:has-text('INVALID_IMAGE')")
        page.click("#files li:nth-child(3) button")
        page.wait_for_selector("#error", state="hidden")
        assert "again.jpg" in page.inner_text("#snippet")
        with page.expect_download() as table:
            page.click("#save-csv")
        rows = list(csv.DictReader(Path(table.value.path()).read_text(encoding="utf-8").splitlines()))
        assert [row["file"] for row in rows] == [DETECT.name] * len(boxes) + ["text.jpg"] + ["again.jpg"] * len(boxes)
        assert [row["label"] for row in rows[: len(boxes)]] == [each["label"] for each in boxes]
        assert rows[len(boxes)]["error"]
        label = boxes[0]["label"]
        page.select_option("#filter", label)
        of_class = sum(each["label"] == label for each in boxes)
        assert 0 < page.locator("#found li").count() == of_class < len(boxes)
        with page.expect_download() as saved:
            page.click("#save-coco")
        coco = json.loads(Path(saved.value.path()).read_text())
        assert [each["file_name"] for each in coco["images"]] == [DETECT.name, "again.jpg"]
        assert len(coco["annotations"]) == 2 * of_class
        assert [each["name"] for each in coco["categories"]] == [label]
        assert axe_violations(page) == []
        # Another model is asked about each file; it has classes, which COCO JSON does not hold.
        page.check("input[value=resnet50]", force=True)
        page.wait_for_selector("#save-csv:not([disabled])")
        assert page.locator("#save-coco").is_disabled()
        assert seen.failures == []


def test_all_dropped_files_are_shown(browser, null_service):
    with browser.page(null_service.url) as (page, _):
        drop(page, DETECT, more=[IMAGES / "detect_2.jpg"])
        page.wait_for_selector("#save-csv:not([disabled])")
        assert page.locator("#files li").count() == 2
        drop(page, DETECT)
        page.wait_for_selector("#all", state="hidden")


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


def test_everything_works_from_the_keyboard(browser, service):
    with browser.page(service.url) as (page, _):
        for _ in range(30):
            page.keyboard.press("Tab")
            if page.evaluate("() => document.activeElement.closest('#samples') !== null"):
                break
        else:
            raise AssertionError("the samples cannot be reached")
        page.keyboard.press("Enter")
        answered(page)
        page.focus("#threshold")
        before = page.inner_text("#threshold-value")
        page.keyboard.press("ArrowRight")
        assert page.inner_text("#threshold-value") != before
        page.focus("#tab-curl")
        page.keyboard.press("ArrowRight")
        assert "import urllib.request" in page.inner_text("#snippet")
        page.focus("#found li:first-child button")
        assert page.locator("#found button.on").count() == 1


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
        for name, value in (("x-content-type-options", "nosniff"), ("x-frame-options", "DENY")):
            assert page.headers[name] == client.get("/docs").headers[name] == value
        assert page.headers["referrer-policy"] == client.get("/docs").headers["referrer-policy"] == "no-referrer"
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


def test_as_many_follow_the_numbers_as_may_and_no_more(null_service):
    streams = []
    with null_service.client() as client, silent.client_elsewhere(null_service.url) as other:
        try:
            ends_s = time.monotonic() + 30
            while len(streams) <= 12:
                request = client.build_request("GET", "/v1/stats/stream")
                streams.append(client.send(request, stream=True))
                if streams[-1].status_code == 200:
                    continue
                if len(streams) > 12 or time.monotonic() > ends_s:
                    break
                streams.pop().close()  # The page of another test follows still: it has just been left.
            refused = streams.pop()
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            refused.close()
            assert len(streams) == 12, "and four for others"
            for status in (200, 200, 200, 200, 429):
                streams.append(other.send(other.build_request("GET", "/v1/stats/stream"), stream=True))
                assert streams[-1].status_code == status
            streams.pop().close()
            for stream in (streams[0], streams[-1]):
                lines = stream.iter_lines()
                data = next(line for line in lines if line.startswith("data: "))
                assert json.loads(data[6:])["models"][0]["model"] == "yolov8n"
        finally:
            for stream in streams:
                stream.close()
        for _ in range(200):  # The service hears of it when the connections have closed.
            with client.stream("GET", "/v1/stats/stream") as stream:
                if stream.status_code == 200:
                    break
        assert stream.status_code == 200
