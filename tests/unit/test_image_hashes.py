"""Files that images take from a registry are held to the hashes that deploy/image/hashes.py has written down."""

from __future__ import annotations

import re

from deploy import install
from deploy.image import hashes


def test_files_are_held_to_their_hashes_before_torch_and_only_over_plain_python(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(install, "make_venv", lambda folder, borrow_pip: folder / "python")
    monkeypatch.setattr(install, "link_packages", lambda python: None)
    monkeypatch.setattr(install, "installed_torch", lambda python: "")
    monkeypatch.setattr(install, "find_build", lambda *_: "cpu")
    monkeypatch.setattr(install, "run_pip", lambda command: commands.append(list(command)))
    monkeypatch.setattr(install, "look", lambda: install.Signals(present={"torch": "2.10.0+cpu"}))
    environ = {"ANYCHIP_TORCH": "cpu", "ANYCHIP_HASHES": "hashes.txt", "ANYCHIP_EXTRAS": "grpc"}
    install.install(tmp_path, False, environ, copy=True, dependencies=True)
    hashed, torch, _ = commands
    assert hashed[-4:] == ["--require-hashes", "--no-deps", "--requirement", "hashes.txt"]
    assert "--constraint" not in hashed
    assert "torch" in torch
    commands.clear()
    monkeypatch.setattr(install, "installed_torch", lambda python: "2.10.0+cpu")
    install.install(tmp_path, False, {**environ, "ANYCHIP_TORCH": "keep"}, copy=True, dependencies=True)
    assert not [command for command in commands if "--require-hashes" in command]


def test_the_lists_of_hashes_are_those_of_constraints_and_name_no_host():
    assert hashes.hashed() == ["cuda-slim", "cpu"]
    for flavour in hashes.hashed():
        text = hashes.path_of(flavour).read_text()
        assert not hashes.stale(flavour), "run python3 deploy/image/hashes.py"
        assert "://" not in text
        assert not re.search(r"^(torch|nvidia-cu|triton|anychip)", text, re.MULTILINE)
        without = re.sub(
            r"^#.*\n|^[\w.-]+==\S+( ;.*)?( \\\n    --hash=sha256:[0-9a-f]{64})+\n", "", text, flags=re.MULTILINE
        )
        assert without == "", "every package has a hash"
