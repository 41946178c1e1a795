"""What every test shares: no network and no settings of the user's, a header that says what is under test, groups."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from pathlib import Path

import pytest

from anychip_base.extras import version_of
from tests.support import warm

# Before anything imports torch, as the command does; and nothing may reach the network or the user's own settings.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
os.environ["YOLO_OFFLINE"] = "true"
for name in [name for name in os.environ if name.startswith("ANYCHIP_") and not name.startswith("ANYCHIP_TEST_")]:
    del os.environ[name]
if "PYTEST_XDIST_WORKER" in os.environ:
    # Others compute beside this process: a thread that waits for its turn must not keep a core busy meanwhile.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
warm.STARTED_WITH.update(os.environ)

# An example takes as long as the machine is busy: that is no failure, and no environment but ours has hypothesis.
with contextlib.suppress(ImportError):
    from hypothesis import HealthCheck, settings

    settings.register_profile("anychip", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("anychip")


def pytest_report_header() -> str:
    """Name the versions that matter, without importing any of these: a few pure tests take no time then."""
    packages = ("torch", "torchvision", "openvino", "fastapi", "pillow")
    return ", ".join(f"{package} {version_of(package) or 'missing'}" for package in packages)


@functools.cache
def _shares_fixtures(path: Path) -> bool:
    return re.search(r'scope="(module|session)"', path.read_text(encoding="utf-8")) is not None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One of pytest-xdist's processes has all tests of a file that starts a service or a compiler once for all of them.

    Every other test goes where there is room. A file may name a group of its own. What takes long begins first, as
    tests/suites/table.py names it first: at the end all but one of the processes would wait for it.
    """
    for item in items:
        if item.get_closest_marker("xdist_group") is None and _shares_fixtures(item.path):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
