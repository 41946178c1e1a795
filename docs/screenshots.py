"""Photographs the page at `/` as it runs, light and dark: the pictures at the top of README.

    python docs/screenshots.py            # writes docs/images/playground-light.png and playground-dark.png

Owns: what is on the pictures. It starts the service on its sample weights, drives the system's `chromium` by
Playwright, asks for a sample image and runs a short load, so that every number on a picture is one the page has shown.
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

from PIL import Image
from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
WIDTH, HEIGHT = 1280, 1180
MAX_BYTES = 300_000


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
    """Both themes."""
    executable = shutil.which("chromium")
    if executable is None:
        sys.exit("there is no chromium here: apt-get install chromium")
    with sync_playwright() as driver, tempfile.TemporaryDirectory() as profile:
        context = driver.chromium.launch_persistent_context(
            profile, executable_path=executable, headless=True, args=["--no-sandbox", "--disable-gpu"]
        )
        for theme in ("light", "dark"):
            page = context.new_page()
            page.set_default_timeout(120_000)
            page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
            page.emulate_media(color_scheme=theme, reduced_motion="reduce")
            page.goto(url)
            arrange(page)
            save(page.screenshot(), IMAGES / f"playground-{theme}.png")
            page.close()
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


if __name__ == "__main__":
    main()
