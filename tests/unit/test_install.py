"""The set-up: which torch is chosen, where it comes from, and a docs page that asks no other host."""

import re
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from app.http.docs_page import mount_docs
from deploy import install

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
    """Note what pip is told instead of running it."""
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


def test_an_unknown_override_names_the_known_ones():
    with pytest.raises(install.InstallError, match="gpu is not known: use one of auto, cpu, cuda"):
        install.choose_torch(install.Signals(), "gpu", PINNED)


def test_keeping_takes_every_version_that_torch_was_built_with():
    present = {"torch": "2.9.0+das", "torchvision": "0.24.0+das", "numpy": "1.26.4", "rich": "13.0.0"}
    choice = install.choose_torch(install.Signals(present=present), "keep", PINNED)
    assert dict(choice.pins) == {"torch": "2.9.0+das", "torchvision": "0.24.0+das", "numpy": "1.26.4"}


@pytest.mark.parametrize(
    ("cann", "torch", "plugin"),
    [
        ("", "2.12.0", "2.12.0.post2"),
        ("9.1.0", "2.12.0", "2.12.0.post2"),
        ("9.0.0", "2.10.0", "2.10.0"),
        ("8.3.RC1", "2.7.1", "2.7.1"),  # 2.8.0 is newer, and leaks.
        ("8.2.RC1", "2.6.0", "2.6.0"),
    ],
)
def test_cann_decides_about_torch_npu(cann, torch, plugin):
    choice = install.choose_torch(install.Signals(ascend=True, cann=cann), "auto", PINNED)
    assert dict(choice.pins) == {"torch": torch, "torch-npu": plugin}


def test_cann_that_fits_no_torch_npu_is_an_error_with_the_remedy():
    with pytest.raises(install.InstallError, match=r"CANN 7\.0 .*ANYCHIP_TORCH=keep"):
        install.choose_torch(install.Signals(ascend=True, cann="7.0"), "auto", PINNED)


def test_looking_reads_device_nodes_and_the_cann_version(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    bare = install.look(tmp_path)
    assert (bare.nvidia, bare.amd, bare.ascend, bare.cann) == (False, False, False, "")
    assert "pytest" in bare.present

    info = tmp_path / "usr/local/Ascend/ascend-toolkit/latest/aarch64-linux/ascend_toolkit_install.info"
    for file in ("proc/driver/nvidia/version", "dev/kfd", "sys/module/amdgpu/version", "dev/davinci0"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    info.parent.mkdir(parents=True)
    info.write_text("package_name=Ascend-cann-toolkit\nversion=8.2.RC1\n")
    full = install.look(tmp_path)
    assert (full.nvidia, full.amd, full.ascend, full.cann) == (True, True, True, "8.2.RC1")


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


def test_cann_8_and_a_python_without_numpy_1_do_not_go_together(monkeypatch):
    monkeypatch.setattr(install, "NO_NUMPY_1", (3, 0))
    with pytest.raises(install.InstallError, match=r"CANN 8\.5 needs numpy 1"):
        install.choose_torch(install.Signals(ascend=True, cann="8.5"), "auto", PINNED)
    assert install.choose_torch(install.Signals(ascend=True, cann="9.1"), "auto", PINNED).constraints == ()


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


@pytest.mark.parametrize(
    ("kind", "torch", "here", "machine", "says"),
    [
        (
            "cpu",
            "2.14.1",
            False,
            "x86_64",
            r"up to 3\.3 GB, most of it CUDA's .* name a mirror of .* ANYCHIP_TORCH_INDEX\.$",
        ),
        ("cuda", "2.14.1", False, "x86_64", r"up to 3\.3 GB, most of it CUDA's libraries, and beside it TensorRT\.$"),
        ("cpu", "2.14.1+cpu", False, "x86_64", r"up to 0\.3 GB, and beside it torch 2\.14\.1\+cpu\.$"),
        ("cpu", "2.14.1", True, "x86_64", r"up to 0\.3 GB\.$"),
        ("keep", "2.9.0", False, "x86_64", r"up to 0\.3 GB\.$"),
    ],
)
def test_it_says_how_much_it_loads_before_pip_begins(kind, torch, here, machine, says, monkeypatch):
    monkeypatch.setattr(install.platform, "machine", lambda: machine)
    monkeypatch.setattr(install.sys, "platform", "linux")
    said = install.what_it_loads(kind, torch, here)
    assert re.search(says, said)
    assert "development" not in said
    assert "what development and extras need" in install.what_it_loads(kind, torch, here, more=True)


def test_the_readme_says_the_same_of_what_is_loaded(tmp_path, found, monkeypatch, capsys):
    said = []
    found()
    monkeypatch.setattr(install, "run_pip", lambda command: said.append(capsys.readouterr().out))
    install.install(tmp_path, False, {"ANYCHIP_TORCH": "cpu"})
    assert "anychip: It loads up to " in said[0]  # Before anything else of pip.
    for page in ("README.md", "README.zh-CN.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert f" {install.BESIDE_TORCH_GB} GB" in text
        assert f" {install.WITH_CUDA_GB} GB" in text


def test_pins_replace_the_lines_of_the_constraints():
    text = "# why\nnumpy==2.2.6; python_version < '3.11'\nnumpy==2.4.6; python_version >= '3.11'\nTorch==2.14.1\n"
    text += "torch-tensorrt==2.14.0\ntorchvision==0.29.2\nrich==15.0.0\n"
    assert install.read_pins(text)["torch"] == "2.14.1"
    assert "numpy" not in install.read_pins(text)
    assert install.with_pins(text, {"torch": "2.9.0+das", "numpy": "1.26.4"}).splitlines() == [
        "# why",
        "torch-tensorrt==2.14.0",
        "rich==15.0.0",
        "numpy==1.26.4",
        "torch==2.9.0+das",
    ]


def test_the_constraints_name_no_host_and_pin_what_the_set_up_needs():
    text = (ROOT / "constraints.txt").read_text()
    assert "://" not in text
    assert {"torch", "torchvision"} <= install.read_pins(text).keys()
    versions = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==(\d+!)?[\w.]+(; python_version (<|>=) \"3\.11\")?", line) for line in versions)


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


def test_a_wheelhouse_holds_what_is_needed_and_leaves_torch_to_the_base():
    from deploy.wheelhouse import closure, wanted

    names = {line.partition("==")[0] for line in wanted("", without_torch=False)}
    assert {"torch", "torchvision", "fastapi", "starlette", "opencv-python-headless", "numpy"} <= names
    assert not {"anychip", "pytest", "mypy"} & names
    without = {line.partition("==")[0] for line in wanted("", without_torch=True)}
    assert without == names - closure(["torch", "torchvision"]).keys()
    assert not [name for name in without if name.startswith(("torch", "nvidia-", "triton"))]


def client(title="anychip", root_path=""):
    app = FastAPI(title=title, docs_url=None, redoc_url=None)
    mount_docs(app)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, root_path=root_path), base_url="http://anychip")


async def test_the_docs_page_and_its_files_come_from_this_host_alone():
    docs = await client(title="a <b>").get("/docs")
    assert docs.status_code == 200
    assert docs.headers["content-type"].startswith("text/html")
    assert "//" not in docs.text
    assert "<title>a &lt;b&gt;: API</title>" in docs.text
    addresses = re.findall(r'(?:src|href)="(/[^"]+)"', docs.text)
    assert [address.rpartition("/")[2] for address in addresses] == [
        "swagger-ui.css",
        "openapi.json",
        "swagger-ui-bundle.js",
    ]
    for address in addresses:
        answer = await client().get(address)
        assert answer.status_code == 200, address
        if address.endswith(".css"):
            assert not re.search(r"@import|url\(\s*['\"]?(?:https?:)?//", answer.text)


async def test_the_docs_page_is_forbidden_to_ask_other_hosts():
    docs = await client().get("/docs")
    policy = dict(part.strip().partition(" ")[::2] for part in docs.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    sources = {source for value in policy.values() for source in value.split()}
    assert {source for source in sources if not source.startswith("'")} == {"data:", "blob:"}
    assert "'unsafe-inline'" not in policy["script-src"]
    assert "'unsafe-eval'" not in policy["script-src"]


async def test_the_docs_page_works_below_a_proxy_path():
    docs = await client(root_path="/vision").get("/docs")
    assert 'src="/vision/docs/assets/swagger-ui-bundle.js"' in docs.text
    assert 'url: "/vision/openapi.json"' in docs.text


def test_the_dependencies_are_those_of_the_extras_and_of_the_extras_they_name():
    project = {
        "name": "anychip",
        "dependencies": ["torch>=2.5"],
        "optional-dependencies": {"grpc": ["grpcio"], "dev": ["anychip[grpc, cpu]", "pytest"], "cpu": ["openvino"]},
    }
    assert install.requirements(project, [""]) == ["torch>=2.5"]
    assert "anychip-ascend" not in install.requirements(install.read_project(), ["ascend"]), "it comes with the sources"
    assert install.requirements(project, ["dev"]) == ["torch>=2.5", "pytest", "grpcio", "openvino"]
    with pytest.raises(install.InstallError, match="no extra 'gpu'"):
        install.requirements(project, ["gpu"])
    of_grpc = install.requirements(install.read_project(), ["cpu", "grpc"])
    assert {"torch>=2.5", "grpcio>=1.60", "openvino>=2025.0"} < set(of_grpc)
    assert not [line for line in of_grpc if line.startswith("anychip")]
    named = {line.partition("==")[0] for line in install.named_by(install.read_project(), ["dev"])}
    assert "anychip-grpc" in named, "tests have gRPC"


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
