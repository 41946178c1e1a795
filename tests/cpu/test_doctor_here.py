"""The doctor on this machine without torch; tests/acceptance has it with torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def test_the_doctor_works_where_torch_cannot_be_imported(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise ImportError('libascendcl.so: cannot open shared object file')")
    # What is on PYTHONPATH hides nothing that is installed, but Python runs this file of it first.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nfrom importlib.machinery import PathFinder\nclass Finder:\n"
        "    def find_spec(name, path=None, target=None):\n"
        f"        return PathFinder.find_spec(name, [{str(tmp_path)!r}]) if name == 'torch' else None\n"
        "sys.meta_path.insert(0, Finder)\n"
    )
    path = os.pathsep.join(map(str, (tmp_path, ROOT, ROOT / "plugins" / "tools")))
    environment = {**os.environ, "PYTHONPATH": path, "ASCEND_RT_VISIBLE_DEVICES": "2,0"}
    words = [sys.executable, "-m", "app", "doctor", "--device", "npu", "--json", "--skip", "port"]
    how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 240}
    done = subprocess.run(words, check=False, cwd=tmp_path, env=environment, **how)
    assert done.returncode == 1, done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert "set_env.sh" in checks["torch"]["remedy"]
    assert "ascending" in checks["variables"]["detail"]
    assert "libascendcl.so" in checks["libraries"]["detail"]
    assert checks["devices"]["status"] == "SKIP"
    assert all(check["remedy"] for check in checks.values() if check["status"] in ("FAIL", "WARN"))
