"""The last step of an image's build, `anychip doctor`, over a base that holds the vendor's package and no driver.

Such are Huawei's and Hygon's: libascend_hal.so "lives in the DRIVER layer", which is mounted when the image runs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from anychip_tools import doctor_vendor, outside_rows
from deploy.image.dockerfiles import FLAVOURS


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_drivers_library_does_not_end_the_build(
    flavour: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("torch_npu-2.10.0", "torch_mlu-1.33.1"):
        folder = tmp_path / f"{name}.dist-info"
        folder.mkdir()
        package, version = name.split("-")
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(outside_rows, "_outside_rows", dict)
    monkeypatch.setattr(doctor_vendor, "_load_error", lambda name: f"{name}: cannot open shared object file")
    doctor_vendor.versions.cache_clear()
    check = doctor_vendor.libraries("auto")
    doctor_vendor.versions.cache_clear()
    assert check.status == "FAIL"
    assert "libascend_hal.so" in check.detail
    assert check.name in FLAVOURS[flavour].skip.split(",")
