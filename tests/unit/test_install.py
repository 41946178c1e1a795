"""The set-up: which torch is chosen, where it comes from, and a docs page that asks no other host."""

import re
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from app.http.api_description import mount_docs
from deploy import install
from deploy.image import hashes

ROOT = Path(__file__).resolve().parents[2]
ASCEND, GRPC, HOSTING, SAMPLES = (ROOT / "plugins" / name for name in ("ascend", "grpc", "hosting", "samples"))
PINNED = {"torch": "2.14.1", "torchvision": "0.29.2"}
OPENCV = "opencv-python-headless<4.12"


@pytest.fixture
def found(monkeypatch):
    """Let set-up find what a test says in place of what is here: the torch of the environment, the index, signals."""

    def find(torch="", build="", **seen):
        monkeypatch.setattr(install, "make_venv", lambda folder, borrow_pip: folder / "python")
        monkeypatch.setattr(install, "link_packages", lambda python: None)
        monkeypatch.setattr(install, "installed_torch", lambda python: torch)
        monkeypatch.setattr(install, "find_build", lambda *_: build)
        monkeypatch.setattr(install, "look", lambda: install.Signals(**seen))

    return find


@pytest.fixture
def commands(monkeypatch):
    told = []
    monkeypatch.setattr(install, "run_pip", lambda command: told.append(list(command)))
    return told


@pytest.mark.parametrize(
    ("seen", "kind", "build", "extras"),
    [
        ({}, "cpu", "cpu", ("cpu",)),
        ({"nvidia": True}, "cuda", "", ("cpu",)),
        ({"amd": True}, "rocm", "rocm", ("cpu", "rocm")),
        ({"ascend": True}, "ascend", "cpu", ("ascend",)),
        ({"present": {"torch": "2.9.0+das.opt1.dtk2604"}}, "keep", "", ()),
        ({"present": {"torch": "2.10.0+rocm7.2.4.git1234"}, "amd": True}, "keep", "", ()),
        ({"present": {"torch": "2.7.1+cpu", "torch-mlu": "1.29.2+torch2.7.1"}}, "keep", "", ()),
        ({"present": {"torch": "2.14.1+cu130"}, "nvidia": True}, "cuda", "", ("cpu",)),
    ],
)
def test_what_is_seen_decides(seen, kind, build, extras):
    choice = install.choose_torch(install.Signals(**seen), "auto", PINNED)
    assert (choice.kind, choice.build, choice.extras) == (kind, build, extras)
    assert choice.optional_extra == ("cuda" if kind == "cuda" else "")


@pytest.mark.parametrize(
    ("seen", "kind", "says"),
    [
        ({}, "gpu", "gpu is not known: use one of auto, cpu, cuda"),
        ({"ascend": True, "cann": "7.0"}, "auto", r"CANN 7\.0 .*ANYCHIP_TORCH=keep"),
        ({"ascend": True, "cann": "8.5"}, "auto", r"CANN 8\.5 needs numpy 1"),
    ],
)
def test_what_cannot_be_set_up_is_refused_with_the_remedy(seen, kind, says, monkeypatch):
    monkeypatch.setattr(install, "NO_NUMPY_1", (3, 0))
    with pytest.raises(install.InstallError, match=says):
        install.choose_torch(install.Signals(**seen), kind, PINNED)
    assert install.choose_torch(install.Signals(ascend=True, cann="9.1"), "auto", PINNED).constraints == ()


@pytest.mark.parametrize(
    ("cann", "torch", "plugin"),
    [
        ("", "2.12.0", "2.12.0.post3"),
        ("9.1.0", "2.12.0", "2.12.0.post3"),
        ("9.0.0", "2.10.0", "2.10.0"),
        ("8.3.RC1", "2.7.1", "2.7.1"),  # 2.8.0 is newer, and leaks.
        ("8.2.RC1", "2.6.0", "2.6.0"),
    ],
)
def test_cann_decides_about_torch_npu(cann, torch, plugin, monkeypatch):
    monkeypatch.setattr(install, "NO_NUMPY_1", (4, 0))
    choice = install.choose_torch(install.Signals(ascend=True, cann=cann), "auto", PINNED)
    assert dict(choice.pins) == {"torch": torch, "torch-npu": plugin}


@pytest.mark.parametrize(
    ("kind", "torch", "accepted"),
    [
        ("cpu", "2.14.1+cpu", True),
        ("cpu", "2.13.0+cpu", False),
        ("cuda", "2.14.1", True),
        ("cuda", "2.14.1+cpu", False),
        ("rocm", "2.14.1+rocm7.2", True),
        ("ascend", "2.12.0+cpu", True),
        ("keep", "2.9.0+das", True),
        ("keep", "2.14.1", False),
    ],
)
def test_a_torch_that_is_already_there_is_left_alone_where_it_fits(kind, torch, accepted):
    seen = install.Signals(present={"torch": "2.9.0+das"})
    assert install.choose_torch(seen, kind, PINNED).accepts(torch) is accepted


@pytest.mark.parametrize(
    ("signals", "kind", "wanted", "absent"),
    [
        ({"present": {"torch": "2.9.0+das", "numpy": "1.26.4"}}, "keep", {"numpy==1.26.4", OPENCV}, {"numpy<2"}),
        ({"present": {"torch": "2.9.0+das", "numpy": "2.2.6"}}, "keep", {"numpy==2.2.6"}, {OPENCV}),
        ({"ascend": True, "cann": "8.5"}, "auto", {"numpy<2", OPENCV}, set()),
        ({}, "cpu", set(), {"numpy<2", OPENCV}),
    ],
    ids=["vendor-with-numpy-1", "vendor-with-numpy-2", "ascend", "cpu"],
)
def test_numpy_and_opencv_fit_what_the_vendor_needs(signals, kind, wanted, absent, monkeypatch):
    monkeypatch.setattr(install, "NO_NUMPY_1", (9, 9))
    choice = install.choose_torch(install.Signals(**signals), kind, PINNED)
    ours = (ROOT / "constraints.txt").read_text()
    lines = set(install.with_pins(ours, choice.pins, choice.constraints).splitlines())
    assert lines >= wanted
    assert not lines & absent
    about = [line for line in lines if re.match(r"(numpy|opencv-python-headless)\b", line)]
    assert len(about) == len({line.partition(";")[2] + re.split("[<=]", line)[0] for line in about})
    if wanted:
        assert len([line for line in lines if line.startswith("numpy")]) == 1


def test_ascend_never_gets_a_torch_for_cuda(tmp_path, commands, found, monkeypatch):
    """torch_npu ends the process beside it. The index is slow, and the registry's build is one for CUDA."""
    cuda = {"built": "13.0"}
    monkeypatch.setattr(install, "NO_NUMPY_1", (9, 9))
    monkeypatch.setattr(install, "cuda_of", lambda python: cuda["built"])
    found(ascend=True, cann="9.1")
    with pytest.raises(
        install.InstallError, match=r"needs a CPU build of torch 2\.12\.0: .* the registry's is for CUDA 13"
    ):
        install.install(tmp_path, False, {})
    assert [("--no-deps" in each, "uninstall" in each) for each in commands] == [(True, False), (False, True)]
    commands.clear()
    cuda["built"] = ""  # As on arm64.
    install.install(tmp_path, False, {})
    assert commands[0][-1] == "torch==2.12.0"
    assert not any("uninstall" in each for each in commands)


@pytest.mark.parametrize(
    ("machine", "build", "present", "torch", "installs"),
    [
        ("aarch64", "", "", "2.10.0", True),
        ("aarch64", "", "2.10.0", "2.10.0", True),
        ("aarch64", "cpu", "", "2.14.1+cpu", True),
        ("aarch64", "", "2.14.1+cpu", "2.14.1+cpu", False),
        ("x86_64", "", "", "2.14.1", True),
    ],
)
def test_arm_without_pytorchs_index_gets_a_torch_without_cuda(
    machine, build, present, torch, installs, tmp_path, commands, found, monkeypatch
):
    """The registry's for AArch64 is one for CUDA since 2.11, as it always was on x86-64."""
    monkeypatch.setattr(install.platform, "machine", lambda: machine)
    found(torch=present, build=build)
    monkeypatch.setattr(install, "read_pins", lambda _: {"torch": "2.14.1", "torchvision": "0.29.2"})
    install.install(tmp_path, False, {"ANYCHIP_TORCH": "cpu"})
    lines = (tmp_path / "constraints.txt").read_text().splitlines()
    assert f"torch=={torch}" in lines
    assert f"torchvision=={'0.25.0' if torch == '2.10.0' else '0.29.2'}" in lines
    assert any(command[-2:] == ["torch", "torchvision"] for command in commands) is installs
    assert not any("uninstall" in command for command in commands)


def test_a_folder_that_is_no_environment_is_not_cleared(tmp_path, monkeypatch):
    monkeypatch.setattr(install.venv, "create", lambda folder, **options: options["clear"])
    (tmp_path / "thesis.txt").touch()
    install.make_venv(tmp_path)
    assert (tmp_path / "thesis.txt").exists()


@pytest.mark.parametrize(
    ("copy", "extras", "expected"),
    [
        (False, "", [part for each in (ROOT, ASCEND, HOSTING, SAMPLES) for part in ("--editable", str(each))]),
        (True, "", [str(ROOT), str(ASCEND), str(HOSTING), str(SAMPLES)]),
        (True, "cuda, onnx", [f"{ROOT}[cuda,onnx]", str(ASCEND), str(HOSTING), str(SAMPLES)]),
        (True, "grpc", [f"{ROOT}[grpc]", str(ASCEND), str(GRPC), str(HOSTING), str(SAMPLES)]),
    ],
)
def test_it_is_linked_or_copied_with_the_extras_that_are_named(tmp_path, commands, found, copy, extras, expected):
    found(torch="2.9.0+das", present={"torch": "2.9.0+das", "torchvision": "0.24.0+das", "numpy": "1.26.4"})
    install.install(tmp_path, False, {"ANYCHIP_TORCH": "keep", "ANYCHIP_EXTRAS": extras}, copy=copy)
    [command] = commands
    assert command[command.index("--constraint") + 2 :] == expected
    assert "torch==2.9.0+das" in (tmp_path / "constraints.txt").read_text()


@pytest.mark.parametrize(
    ("present", "build"),
    [
        ({"torch": "2.10.0+cpu", "torch-npu": "2.10.0"}, "cpu"),  # Huawei's image: torch, torch_npu, no torchvision.
        ({"torch": "2.10.0+cu130"}, "cu130"),
        ({"torch": "2.10.0"}, ""),
        ({"torch": "2.10.0+cpu", "torchvision": "0.25.0+cpu"}, ""),
        ({"torch": "2.9.0+das.opt1.dtk2604", "torchvision": "0.24.0+das"}, ""),
    ],
)
def test_a_torch_that_is_kept_gets_the_torchvision_of_its_own_build(present, build):
    assert install.torchvision_build(present) == build


@pytest.mark.parametrize("torch", ["2.9.0+das.opt1.dtk2604", "2.10.0+rocm7.2.4.git1234", "2.8.0a0+5228986c39.nv25.06"])
def test_a_vendors_torch_without_its_torchvision_is_refused(torch):
    with pytest.raises(install.InstallError, match="the vendor's torchvision"):
        install.torchvision_build({"torch": torch})


def test_huaweis_image_gets_torchvision_from_pytorchs_index_and_not_from_the_registry(tmp_path, commands, found):
    found(torch="2.10.0+cpu", present={"torch": "2.10.0+cpu", "torch-npu": "2.10.0", "numpy": "1.26.4"})
    environ = {"ANYCHIP_TORCH": "keep", "ANYCHIP_TORCH_INDEX": "https://mirror.example/whl"}
    install.install(tmp_path, False, environ, copy=True)
    torchvision, anychip = commands
    assert torchvision[-4:] == ["--index-url", "https://mirror.example/whl/cpu", "--no-deps", "torchvision==0.25.*"]
    assert anychip[-4:] == [str(ROOT), str(ASCEND), str(HOSTING), str(SAMPLES)]


@pytest.mark.parametrize("root_path", ["", "/vision"])
async def test_the_docs_page_and_its_files_come_from_this_host_alone_also_below_a_proxys_path(root_path):
    app = FastAPI(title="a <b>", docs_url=None, redoc_url=None)
    mount_docs(app)
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app, root_path=root_path), base_url="http://anychip")
    docs = await client.get("/docs")
    assert docs.status_code == 200
    assert docs.headers["content-type"].startswith("text/html")
    assert "//" not in docs.text
    assert "<title>a &lt;b&gt;: API</title>" in docs.text
    assert f'url: "{root_path}/openapi.json"' in docs.text
    addresses = re.findall(r'(?:src|href)="(/[^"]+)"', docs.text)
    names = ["docs/assets/swagger-ui.css", "openapi.json", "docs/assets/swagger-ui-bundle.js"]
    assert addresses == [f"{root_path}/{name}" for name in names]
    for address in addresses:
        answer = await client.get(address)
        assert answer.status_code == 200, address
        if address.endswith(".css"):
            assert not re.search(r"@import|url\(\s*['\"]?(?:https?:)?//", answer.text)
    policy = dict(part.strip().partition(" ")[::2] for part in docs.headers["content-security-policy"].split(";"))
    assert (policy["default-src"], policy["connect-src"]) == ("'none'", "'self'")
    sources = {source for value in policy.values() for source in value.split()}
    assert {source for source in sources if not source.startswith("'")} == {"data:", "blob:"}
    assert not {"'unsafe-inline'", "'unsafe-eval'"} & {*policy["script-src"].split()}


def test_the_packages_of_this_repository_are_of_one_version_and_want_no_other():
    """What is a package of its own imports the insides of anychip, which change."""
    version = install.read_project()["version"]
    folders = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))
    assert folders
    for project in (install.read_project(), *map(install.read_project, folders)):
        assert project["version"] == version
        lines = [
            *project["dependencies"],
            *(line for each in project.get("optional-dependencies", {}).values() for line in each),
        ]
        ours = [line for line in lines if re.match(r"anychip(?!\[)", line)]
        assert [line for line in ours if line.partition("==")[2] != version] == [], project["name"]
        assert ours


def test_files_are_held_to_their_hashes_before_torch_and_only_over_plain_python(tmp_path, commands, found):
    found(build="cpu", present={"torch": "2.10.0+cpu"})
    environ = {"ANYCHIP_TORCH": "cpu", "ANYCHIP_HASHES": "hashes.txt", "ANYCHIP_EXTRAS": "grpc"}
    install.install(tmp_path, False, environ, copy=True, dependencies=True)
    hashed, torch, _ = commands
    assert hashed[-4:] == ["--require-hashes", "--no-deps", "--requirement", "hashes.txt"]
    assert "--constraint" not in hashed
    assert "torch" in torch
    commands.clear()
    found(torch="2.10.0+cpu", present={"torch": "2.10.0+cpu"})
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
