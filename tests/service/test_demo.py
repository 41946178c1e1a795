"""`anychip demo`: quiet about what is not here, and it answers what README says."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from backends import host
from backends.vendors import table as vendors

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_demo_answers_what_readme_says_and_is_silent_about_vendors(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "app", "demo", "--port", "0", "--cache-dir", str(tmp_path)]
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True) as demo,
    ):
        try:
            said = _until_ready(demo)
            [address] = set(re.findall(r"http://127\.0\.0\.1:\d+", said))
            [[asked]] = [
                re.findall(r"^(curl .*classify_heart.*)$", block, re.MULTILINE)
                for block in re.findall(r"^```\n(curl .*?)^```", README, re.MULTILINE | re.DOTALL)
                if "classify_heart" in block
            ]
            words = [word.replace("http://127.0.0.1:8000", address) for word in shlex.split(asked)]
            answered = subprocess.run([*words, "--silent"], cwd=ROOT, capture_output=True, text=True, check=True)
        finally:
            demo.send_signal(signal.SIGTERM)
            demo.communicate(timeout=60)
    [shown] = re.findall(r"^```json\n(.*?)\n```", README, re.MULTILINE | re.DOTALL)
    assert shown in (ROOT / "README.zh-CN.md").read_text(encoding="utf-8")
    expected, got = json.loads(shown), json.loads(answered.stdout)
    assert list(got) == list(expected)
    alike = all(got[name] == expected[name] for name in ("engine", "precision"))
    for ours, theirs in zip(got["predictions"][0]["classes"], expected["predictions"][0]["classes"], strict=True):
        assert (ours["label"], ours["class_id"]) == (theirs["label"], theirs["class_id"])
        assert ours["score"] == pytest.approx(theirs["score"], abs=0.002 if alike else 0.05)
    # A processor may be called by its maker's name.
    written = (said + (tmp_path / "log").read_text()).replace(host.cpu_name(), "")
    for vendor in vendors.ACCELERATORS:
        assert vendor.title not in written
        assert not any(package in written for package in vendor.packages)


def _until_ready(demo: subprocess.Popen[str]) -> str:
    """Return what the demo prints until it can be asked."""
    assert demo.stdout is not None
    lines = []
    for line in demo.stdout:
        lines.append(line)
        if "Ctrl-C" in line:
            return "".join(lines)
    raise AssertionError("it ended")
