"""Virtual environments that the set-up makes, for real, and its command line."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deploy import install

ROOT = Path(__file__).resolve().parents[2]


def test_an_environment_is_made_once_and_sees_linked_packages(tmp_path):
    python = install.make_venv(tmp_path / "env")
    made = (tmp_path / "env" / "pyvenv.cfg").stat().st_mtime_ns
    assert install.make_venv(tmp_path / "env") == python
    assert (tmp_path / "env" / "pyvenv.cfg").stat().st_mtime_ns == made
    assert install.installed_torch(python) == ""
    install.link_packages(python)
    assert install.installed_torch(python) == install.look().present["torch"]


# setuptools' hook, which another test's import may have set off.
@pytest.mark.filterwarnings("ignore:Setuptools is replacing distutils:UserWarning")
def test_an_environment_borrows_pip_from_a_python_that_has_no_ensurepip(tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(install.importlib.util, "find_spec", lambda name: None if name == "ensurepip" else found(name))
    with pytest.raises(install.InstallError, match="python3-venv"):
        install.make_venv(tmp_path / "own")
    python = install.make_venv(tmp_path / "borrowed", borrow_pip=True)
    install.link_packages(python)
    ran = subprocess.run([python, "-m", "pip", "--version"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_the_command_line_reports_a_mistake_in_one_sentence(tmp_path):
    environ = {**os.environ, "ANYCHIP_TORCH": "gpu"}
    command = [sys.executable, str(ROOT / "deploy" / "install.py"), str(tmp_path / "env")]
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert ran.stderr.startswith("anychip: ANYCHIP_TORCH=gpu is not known")
    assert len(ran.stderr.splitlines()) == 1
    assert not (tmp_path / "env").exists()
