"""What a Python child of ours finds on PYTHONPATH."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from anychip_base import interpreter


def test_a_child_keeps_what_vendors_put_on_pythonpath(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As CANN's set_env.sh does; and the variable, for Pythons that vendors' compilers start."""
    (tmp_path / "acl_of_a_vendor.py").write_text("name = 'acl'\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    code = "import acl_of_a_vendor, os; print(acl_of_a_vendor.name, os.environ['PYTHONPATH'])"
    done = subprocess.run(
        interpreter.python_command("-c", code), capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout == f"acl {tmp_path}\n"
