"""Processes that read what strangers wrote try to get out, on this kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from models.confinement import what_there_is
from tests.support.escapes import attempts

ROOT = Path(__file__).parents[2]
there = what_there_is()
pytestmark = pytest.mark.skipif(
    not (there.seccomp and there.landlock), reason="this kernel has no seccomp or no Landlock"
)

# Without the package `models`, which imports torch.
_LOAD = """
import importlib.util, json, sys
from tests.support import escapes
spec = importlib.util.spec_from_file_location("confinement", "models/confinement.py")
confinement = importlib.util.module_from_spec(spec)
sys.modules["confinement"] = confinement
spec.loader.exec_module(confinement)
from pathlib import Path
"""


def run(script: str, *arguments: str) -> dict[str, str]:
    """What a process found that runs it from the repository's folder."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    ended = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    found: dict[str, str] = json.loads(ended.stdout.splitlines()[-1])
    return found


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    (tmp_path / "elsewhere").mkdir()
    file = tmp_path / "elsewhere" / "secret.txt"
    file.write_text("secret")
    return file


def test_without_bounds_every_attempt_succeeds_or_fails_for_another_reason(secret: Path) -> None:
    """Else the tests below would show nothing."""
    script = _LOAD + "escapes_ = escapes.attempts(*sys.argv[1:])\n"
    script += "[escapes_[name]() for name in ('read a file', 'write a file', 'open a socket', 'run a shell', 'fork')]\n"
    script += "print(json.dumps({'thread': escapes.thread()}))"
    assert run(script, str(secret), str(secret.with_name("new"))) == {"thread": "done"}


def test_a_decoder_gets_nowhere(secret: Path) -> None:
    script = f"{_LOAD}\nconfinement.confine_decoder(1 << 30)\n"
    script += "found = escapes.tried(*sys.argv[1:]) | {'thread': escapes.thread()}\n"
    script += "try: bytearray(2 << 30)\nexcept MemoryError: found['memory'] = 'refused'\n"
    script += "print(json.dumps(found))"
    found = run(script, str(secret), str(secret.with_name("new")))
    assert found == dict.fromkeys([*attempts("", ""), "thread", "memory"], "refused")
    assert secret.read_text() == "secret"


def test_the_process_that_tries_a_file_gets_nowhere(secret: Path, tmp_path: Path) -> None:
    """As models.exported_child confines itself; what it tries is what the file would have it do."""
    file, answer = tmp_path / "model.pt2", tmp_path / "answers" / "answer.json"
    file.write_text("weights")
    answer.parent.mkdir()
    script = f"""
import json, sys
from pathlib import Path
from tests.support import escapes
from models import exported_child
def attack(file, form, declared):
    own = Path(file).read_text() + Path({str(file.with_name("model.labels.txt"))!r}).read_text()
    return {{**escapes.tried(*sys.argv[1:]), "thread": escapes.thread(), "own": own}}
exported_child._tried = attack
exported_child._main({str(file)!r}, "pt2", "{{}}", {str(answer)!r})
print("{{}}")
"""
    file.with_name("model.labels.txt").write_text(" and labels")
    run(script, str(secret), str(secret.with_name("new")))
    found = json.loads(answer.read_text())
    assert (found.pop("thread"), found.pop("own")) == ("done", "weights and labels")
    assert found == dict.fromkeys(attempts("", ""), "refused")


def test_the_environment_of_the_process_that_tries_a_file_holds_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from models import WeightsError, exported

    child = tmp_path / "child.py"
    child.write_text("import os, sys; sys.exit(repr(sorted(os.environ)))")
    file = tmp_path / "a.pt2"
    file.write_text("")
    monkeypatch.setattr(exported, "_CHILD", child)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    with pytest.raises(WeightsError) as refused:
        exported.open_exported("a", file)
    assert "PYTHONPATH" in str(refused.value)
    assert "AWS" not in str(refused.value)
