"""Real Chromium, Debian's, for the tests of the page, and the steps that tests take in it."""

from __future__ import annotations

import base64
import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--use-fake-device-for-media-stream",
    "--use-fake-ui-for-media-stream",
]
_DROP = """(files) => {
  const transfer = new DataTransfer();
  for (const [name, type, data] of files) {
    const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
    transfer.items.add(new File([bytes], name, { type }));
  }
  const event = { bubbles: true, cancelable: true, dataTransfer: transfer };
  document.body.dispatchEvent(new DragEvent("dragenter", event));
  document.body.dispatchEvent(new DragEvent("drop", event));
}"""


@dataclass
class Seen:
    """Record of a page: console errors, failures of scripts, hosts that were asked."""

    errors: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)


class Browser:
    def __init__(self, context: Any) -> None:
        self._context = context

    @contextlib.contextmanager
    def page(
        self, url: str, *, width: int = 1440, height: int = 900, theme: str = "light"
    ) -> Iterator[tuple[Any, Seen]]:
        """Open and load a new page at `url`; yield it with the record of what it has done so far."""
        page = self._context.new_page()
        seen = Seen()
        page.on("console", lambda message: seen.errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: seen.failures.append(str(error)))
        page.on("request", lambda request: seen.hosts.add(urlsplit(request.url).netloc))
        page.set_default_timeout(120_000)
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme=theme, reduced_motion="reduce")
        page.goto(url)
        page.wait_for_selector("html[data-loaded]")
        try:
            yield page, seen
        finally:
            page.close()


@contextlib.contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """Run Chromium with its profile in an empty folder; skip the test if there is none."""
    playwright = pytest.importorskip("playwright.sync_api")
    executable = shutil.which("chromium")
    if executable is None:
        pytest.skip("there is no chromium here: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        context = driver.chromium.launch_persistent_context(
            str(profile), executable_path=executable, headless=True, args=_FLAGS, permissions=["camera"]
        )
        try:
            yield Browser(context)
        finally:
            context.close()


def drop(page: Any, path: Path, content: bytes | None = None) -> None:
    """Drop a file on the page, like a user; `content` replaces the file's content."""
    kind = "image/png" if path.suffix == ".png" else "image/jpeg"
    data = path.read_bytes() if content is None else content
    page.evaluate(_DROP, [[path.name, kind, base64.b64encode(data).decode()]])


def axe_violations(page: Any) -> list[str]:
    package = pytest.importorskip("axe_playwright_python")
    source = next(Path(package.__file__).parent.glob("axe.min.js")).read_text(encoding="utf-8")
    page.evaluate(source)
    results = page.evaluate("() => axe.run()")
    return [
        f"{violation['id']}: {node['html'][:150]} {node['failureSummary']}"
        for violation in results["violations"]
        for node in violation["nodes"]
    ]
