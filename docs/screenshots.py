"""Photograph and film the page at `/` as it runs: the moving picture of README and the picture of docs/playground.md.

    python docs/screenshots.py            # writes docs/images/playground.png and playground.gif

Owns: what is on the pictures. It starts the service on its sample weights, drives the system's `chromium` by
Playwright, asks for sample images and runs a short load, so that every number on a picture is one the page has shown.
The film's waits are cut, and it has no times: it shows what happens, and not how long it takes.
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageDraw
from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
WIDTH, HEIGHT = 1280, 1100
SHOWN_WIDTH = 900
COLOURS = 96
NO_TIMES = """() => {
  const style = new CSSStyleSheet();
  style.replaceSync("#timing { display: none !important } #summary { font-size: 0 } #summary * { font-size: 1rem }");
  document.adoptedStyleSheets = [style];
}"""
MAX_BYTES, MAX_FILM_BYTES = 300_000, 1_500_000


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Photograph the page at / for README.")
    parser.add_argument("--url", default="", help="a service that runs already, on the sample weights")
    url = parser.parse_args().url
    if url:
        photograph(url)
        return
    command = [sys.executable, "-m", "app", "demo", "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        try:
            found = re.search(r"http://\S+", service.stdout.readline())
            if found is None:
                sys.exit("the service did not start")
            photograph(found.group())
        finally:
            service.terminate()


def photograph(url: str) -> None:
    """Write the picture and the film."""
    executable = shutil.which("chromium")
    if executable is None:
        sys.exit("there is no chromium here: apt-get install chromium")
    with sync_playwright() as driver, tempfile.TemporaryDirectory() as profile:
        context = driver.chromium.launch_persistent_context(
            profile, executable_path=executable, headless=True, args=["--no-sandbox", "--disable-gpu"]
        )
        page = context.new_page()
        page.set_default_timeout(120_000)
        page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
        page.emulate_media(color_scheme="light", reduced_motion="reduce")
        page.goto(url)
        arrange(page)
        save(page.screenshot(), IMAGES / "playground.png")
        page.goto(url)
        save_film(film(page), IMAGES / "playground.gif")
        context.close()


def arrange(page: Page) -> None:
    """Make the page show what it can: boxes, times, a load and its charts."""
    page.wait_for_selector("html[data-loaded]")
    page.click("#samples button:first-child")
    page.wait_for_selector("#canvas[data-answers]")
    page.click("#load-start")
    page.wait_for_selector("#load-summary:not(:empty)")
    # The device is idle again: the image is asked for once more, so that its times are those of a request alone.
    page.click("#samples button:first-child")
    page.wait_for_selector("#canvas[data-answers='2']")
    page.wait_for_timeout(1500)  # The live numbers come twice a second.
    page.evaluate("() => { document.activeElement.blur(); scrollTo(0, 0); }")


def save(png: bytes, path: Path) -> None:
    """Write a screenshot with as many colours as fit into MAX_BYTES."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for colours in (256, 128, 64):
        with Image.open(io.BytesIO(png)) as image:
            image.convert("RGB").quantize(colours, dither=Image.Dither.FLOYDSTEINBERG).save(path, optimize=True)
        if path.stat().st_size <= MAX_BYTES:
            print(f"{path}: {path.stat().st_size} bytes")
            return
    sys.exit(f"{path} has more than {MAX_BYTES} bytes")


def film(page: Page) -> list[tuple[Image.Image, int]]:
    """Use the page as a visitor does; return what it shows, each with the milliseconds for which it is shown."""
    frames: list[tuple[Image.Image, int]] = []
    at = WIDTH / 2, HEIGHT / 2

    def take(shown_ms: int) -> None:
        with Image.open(io.BytesIO(page.screenshot())) as png:
            image = png.convert("RGB")
        x, y = at
        arrow = [(0, 0), (0, 26), (6, 20), (11, 31), (16, 29), (11, 18), (19, 18)]  # Screenshots have no pointer.
        ImageDraw.Draw(image).polygon([(x + right, y + down) for right, down in arrow], "black", "white", 2)
        height = round(HEIGHT * SHOWN_WIDTH / WIDTH)
        frames.append((image.resize((SHOWN_WIDTH, height), Image.Resampling.LANCZOS), shown_ms))

    def point(selector: str) -> None:
        nonlocal at
        box = page.locator(selector).first.bounding_box()
        assert box is not None, selector
        start, end = at, (box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        for step in (0.4, 0.8, 1):
            at = start[0] + step * (end[0] - start[0]), start[1] + step * (end[1] - start[1])
            take(80)
        frames[-1] = frames[-1][0], 500

    page.wait_for_selector("html[data-loaded]")
    page.evaluate(NO_TIMES)
    take(1200)
    point("#samples button:first-child")
    page.click("#samples button:first-child")
    page.wait_for_selector("#canvas[data-answers]")
    take(2200)
    point("#choose")
    page.set_input_files("#file", sorted((ROOT / "models" / "sample" / "images").glob("detect_*.jpg")))
    page.wait_for_selector("#all:not([hidden])")
    page.wait_for_selector("#save-csv:not([disabled])")
    take(2000)
    for number in (2, 3):
        point(f"#files li:nth-child({number})")
        page.click(f"#files li:nth-child({number}) button")
        page.wait_for_timeout(300)
        take(1500)
    point("#filter")
    page.select_option("#filter", "star")
    page.wait_for_timeout(300)
    take(2500)
    return frames


def save_film(frames: list[tuple[Image.Image, int]], path: Path) -> None:
    """Write frames as a GIF in one palette, so that only what changes is stored."""
    palette = frames[len(frames) // 2][0].quantize(COLOURS)
    first, *others = (image.quantize(palette=palette, dither=Image.Dither.NONE) for image, _ in frames)
    durations = [shown_ms for _, shown_ms in frames]
    first.save(path, save_all=True, append_images=others, duration=durations, loop=0, optimize=True)
    if path.stat().st_size > MAX_FILM_BYTES:
        sys.exit(f"{path} has more than {MAX_FILM_BYTES} bytes")
    print(f"{path}: {path.stat().st_size} bytes, {len(frames)} frames")


if __name__ == "__main__":
    main()
