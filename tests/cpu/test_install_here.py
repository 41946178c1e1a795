"""Set-up for real: the virtual environments that it makes, and the Python and the index of wheels that it asks."""

import importlib.util
import os
import platform
import socket
import subprocess
import sys

import pytest

from deploy import install
from tests.support.hub import say, serving


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


def test_which_cuda_a_torch_is_for_is_read_and_not_asked(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.12.0'\ncuda: str | None = '13.0'\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    assert install.cuda_of(python) == "13.0"
    (tmp_path / "torch" / "version.py").write_text("cuda = None\n")
    assert install.cuda_of(python) == ""


class Index:
    """A package index with one page at every address."""

    url = ""
    versions = ("9.0+cpu", "9.0+rocm7.2", "9.0+rocm7.10", "9.0+cu130", "8.0+cpu", "9.0.post1+cpu")

    def answer(self, request):
        links = "".join(f'<a href="torch-{each}-py3-none-any.whl">wheel</a>' for each in self.versions)
        say(request, f"<!DOCTYPE html><html><body>{links}</body></html>", "text/html")


@pytest.fixture
def loopback(monkeypatch):
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)


@pytest.fixture
def index(loopback):
    with serving(Index()) as index:
        yield f"{index.url}/whl"


@pytest.mark.parametrize(
    ("build", "version", "found"), [("cpu", "9.0", "cpu"), ("rocm", "9.0", "rocm7.10"), ("cpu", "7.0", "")]
)
def test_the_index_is_asked_for_the_exact_version_and_build(index, build, version, found):
    assert install.find_build(sys.executable, index, build, version, timeout_s=20) == found


def test_an_index_that_says_nothing_is_given_up_in_time(loopback):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/whl"
        assert install.find_build(sys.executable, address, "cpu", "9.0", timeout_s=1) == ""


def test_make_leaves_the_pins_of_a_base_out():
    """NVIDIA's image names its own pins: with them, pip finds no versions that anychip takes."""
    words = ("make", "--silent", "--eval", "shown: ; @env", "shown")
    named = {**os.environ, "PIP_CONSTRAINT": "/etc/pip/constraint.txt"}
    shown = subprocess.run(words, cwd=install.ROOT, env=named, capture_output=True, text=True, check=True).stdout
    assert "PATH=" in shown
    assert "PIP_CONSTRAINT" not in shown


def resolution(python):
    named = install.requirements(install.read_project(), ("cpu", "parquet", "dev"))
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--python-platform", "linux"]
    command += ["--python-version", python, "--constraint", "constraints.txt", "-"]
    wanted = "\n".join(line for line in named if not line.startswith("anychip"))
    return subprocess.run(command, input=wanted, cwd=install.ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("python", ["3.10", "3.14"])
def test_each_python_that_is_promised_finds_what_is_pinned(python):
    done = resolution(python)
    if done.returncode and resolution(platform.python_version()).returncode:
        pytest.skip(f"the registry lacks what is here, too: {done.stderr}")
    assert done.returncode == 0, done.stderr
