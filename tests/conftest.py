"""What every test shares: a header that says what is under test, and a running service for those that talk HTTP."""

from __future__ import annotations

import importlib.metadata
import os

# Before anything imports torch, as the command does; and nothing may reach the network or the user's own settings.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
os.environ["YOLO_OFFLINE"] = "true"
for name in [name for name in os.environ if name.startswith("ANYCHIP_") and not name.startswith("ANYCHIP_TEST_")]:
    del os.environ[name]


def pytest_report_header() -> list[str]:
    """The versions that matter, and what each backend says."""
    from backends import report

    packages = ("torch", "torchvision", "openvino", "fastapi", "pillow")
    versions = []
    for package in packages:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{package} missing")
    rows = [f"{row.device}: {'PASS' if row.ok else 'FAIL'} {row.detail}" for row in report()]
    return [", ".join(versions), *rows]
