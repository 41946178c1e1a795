"""Processes that read what strangers wrote try to get out, on this kernel."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from anychip_base.interpreter import bare_environment, python_command
from models.confinement import what_there_is
from tests.support import escapes, library_folders
from tests.support.escapes import MARK, attempts
from tests.support.exported_files import frozen
from tests.support.images import png
from tests.support.service_process import ServiceProcess, running

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


HARMLESS = [
    *("read a file", "write a file", "list a folder", "change a file's mode", "change a file's owner"),
    *("change a file's time", "open a socket", "run a shell", "fork", "signal its parent", "inotify_init1"),
    *("read its parent's environment", "read its parent's command line", "list its parent's files"),
    *("limit its parent", "pidfd_open of its parent"),
]
PASSWORD = MARK + "hunter2"
BARE = {
    *("HOME", "TMPDIR", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TORCH_DEVICE_BACKEND_AUTOLOAD"),
    *("LANG", "LC_CTYPE", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "ONEDNN_MAX_CPU_ISA"),
    *("ATEN_CPU_CAPABILITY", "OMP_WAIT_POLICY", "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"),
    *("OPENBLAS_NUM_THREADS", "OPENBLAS_CORETYPE", "ORT_DISABLE_TELEMETRY", "HF_HUB_DISABLE_TELEMETRY"),
}
"""What a program that serves may find in its environment: what was given on, and what torch has set itself."""


def run(script: str, *arguments: str, **variables: str) -> dict[str, Any]:
    """Run a script in a process with the repository's folder as the current one; return its last line, from JSON."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", **variables}
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
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
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
    script += f"[escapes_[name]() for name in {HARMLESS}]\n"
    script += "print(json.dumps({'thread': escapes.thread(), 'marks': escapes.marks()}))"
    found = run(script, str(secret), str(secret.with_name("new")), DATABASE_PASSWORD=PASSWORD)
    assert found == {"thread": "done", "marks": [PASSWORD]}


def test_an_ingress_gets_nowhere_but_to_programs_of_its_own_that_get_nowhere_either(secret: Path) -> None:
    """It reads the folder of the keys, and starts Python, as converters do."""
    keys = secret.parents[1] / "keys"
    keys.mkdir()
    (keys / "keys.txt").write_text("keys")
    own = "ends = socket.socketpair(); ends[0].close(); ends[1].close()"
    script = f"""{_LOAD}
import os, signal, socket, subprocess, sys
from pathlib import Path
from anychip_base.interpreter import python_command
confinement.refuse_rings()
confinement.confine_server([*confinement.python_files(), Path({str(keys)!r})], network=False)
found = escapes.tried(*sys.argv[1:], {{
    "append to the keys": lambda: open({str(keys / "keys.txt")!r}, "a"),
}})
assert Path({str(keys / "keys.txt")!r}).read_text() == "keys"
{own}
asked = "import os, sys; os.open(sys.argv[1], os.O_RDONLY)"
child = subprocess.run(python_command("-c", asked, sys.argv[1]), capture_output=True, text=True)
found["read a file by a program of its own"] = "refused" if "PermissionError" in child.stderr else child.stderr
child = subprocess.Popen(python_command("-c", "import time; time.sleep(100)"), stdin=subprocess.DEVNULL)
child.kill()
assert child.wait() == -signal.SIGKILL
print(json.dumps(found))
"""
    found = run(script, str(secret), str(secret.with_name("new")))
    done = {name for name, outcome in found.items() if outcome != "refused"}
    assert done <= {"fork", "clone", "signal its group"}, found
    assert secret.read_text() == "secret"


def test_the_process_that_tries_a_file_gets_nowhere(secret: Path, tmp_path: Path) -> None:
    """As models.exports.child confines itself; what it tries is what the file would have it do."""
    file, answer = tmp_path / "model.pt2", tmp_path / "answers" / "answer.json"
    file.write_text("weights")
    labels, link = file.with_name("model.labels.txt"), file.with_name("model.link")
    link.symlink_to(secret)
    answer.parent.mkdir()
    declared = answer.with_name("declared.json")
    declared.write_text(json.dumps({"own": [str(each) for each in (file, labels, link)]}))
    script = f"""
import json, sys
from pathlib import Path
from tests.support import escapes
from models.exports import child as exported_child
def attack(file, form, declared):
    own = Path(file).read_text() + Path({str(labels)!r}).read_text()
    others = {{"follow a link": lambda: Path({str(link)!r}).read_text()}}
    return {{**escapes.tried(*sys.argv[1:], others), "thread": escapes.thread(), "own": own}}
exported_child._tried = attack
exported_child._main({str(file)!r}, "pt2", {str(declared)!r}, {str(answer)!r})
print("{{}}")
"""
    labels.write_text(" and labels")
    run(script, str(secret), str(secret.with_name("new")))
    found = json.loads(answer.read_text())
    assert (found.pop("thread"), found.pop("own")) == ("done", "weights and labels")
    assert found == dict.fromkeys([*attempts("", ""), "follow a link"], "refused")


def test_a_worker_that_is_confined_calibrates_and_keeps_what_it_compiles(tmp_path: Path) -> None:
    """It reads the images to calibrate on, also through links, and none beside them; it writes to its folder alone."""
    given, images = tmp_path / "given", tmp_path / "images"
    given.mkdir()
    images.mkdir()
    for name in ("1.png", "2.png", "other.png"):
        (given / name).write_bytes(png())
    (images / "1.png").symlink_to(given / "1.png")
    (images / "2.png").write_bytes(png())
    script = """
import json, sys, tempfile
from dataclasses import replace
from pathlib import Path
from app.config import Settings
from app.fleet.plans import worker_plans
from app.serving.opening import Opening
from app.worker import load
from backends import EngineCache, choose
images, other, cache = map(Path, sys.argv[1:])
settings = Settings(models="resnet18:random", precision="int8", calibrate=str(images), cache_dir=cache, device="cpu")
[(_, plan)] = worker_plans(settings, choose("cpu"), Opening().models(settings), {})
[model] = plan.plans
load._confine(replace(plan, confined=True, cache_dir=cache / "confined"))
def tried(act):
    try:
        return str(act())
    except PermissionError:
        return "refused"
kept = EngineCache(cache / "confined" / "engines")
with tempfile.TemporaryDirectory() as folder:
    (Path(folder) / "x").write_text("x")
print(json.dumps({
    "images": len(model.calibration()),
    "temporary": Path(folder).parent.name,
    "kept": kept.put(lambda entry: (entry / "x").write_text("x"), name="x") == kept.get(name="x") is not None,
    "another image": tried(lambda: other.read_bytes()),
    "elsewhere in the cache": tried(lambda: (cache / "x").write_text("x")),
}))
"""
    found = run(script, str(images), str(given / "other.png"), str(tmp_path / "cache"))
    assert found == {
        "images": 2,
        "temporary": "confined",
        "kept": True,
        "another image": "refused",
        "elsewhere in the cache": "refused",
    }


def test_what_is_imported_before_a_process_is_confined_begins_no_thread() -> None:
    """Landlock would not bind it: a handler of a signal that it is sent could read any file of the user."""
    imported = "import app.ingress_main, app.worker.loop, models.exports.child, models.exports.answers, torch\n"
    for name in ("cv2", "onnx", "onnxruntime", "openvino", "timm", "transformers"):
        imported += f"import {name}\n" if importlib.util.find_spec(name) else ""
    script = f"import json\n{imported}from models.confinement import begun_before\nprint(json.dumps(begun_before()))"
    ended = subprocess.run(
        python_command("-c", script), env=bare_environment(), capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1]) == []


def test_memory_and_seconds_follow_the_size_of_the_file(tmp_path: Path) -> None:
    """Of the process that tries it: a file of a kilobyte needs no 64 GiB."""
    script = """
import json, resource, sys
from pathlib import Path
from models.exports import child as exported_child
def limits(file, form, declared):
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    memory, seconds = (resource.getrlimit(each)[1] for each in (resource.RLIMIT_AS, resource.RLIMIT_CPU))
    return {"memory": memory - pages * resource.getpagesize(), "seconds": seconds}
exported_child._tried = limits
exported_child._main(sys.argv[1], "onnx", *sys.argv[2:])
print("{}")
"""
    found = []
    for size in (1000, 1 << 30):
        file, answer = tmp_path / f"net{size}.onnx", tmp_path / f"answer{size}" / "answer.json"
        answer.parent.mkdir()
        with file.open("wb") as content:
            content.truncate(size)
        declared = answer.with_name("declared.json")
        declared.write_text(json.dumps({"own": [str(file)]}))
        run(script, str(file), str(declared), str(answer))
        found.append(json.loads(answer.read_text()))
    small, large = found
    assert 2 << 30 < small["memory"] < (4 << 30) + (os.cpu_count() or 1) * (256 << 20) + 20_000
    assert large["memory"] - small["memory"] > 15 << 30
    assert (small["seconds"], large["seconds"]) == (300, 300 + 1024)


def test_the_environment_of_the_process_that_tries_a_file_holds_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from models import WeightsError
    from models.exports import exported
    from models.weights.opened import looked_at

    child = tmp_path / "child.py"
    child.write_text("import os, sys; sys.exit(repr(sorted(os.environ)))")
    file = tmp_path / "a.pt2"
    file.write_text("")
    monkeypatch.setattr(exported, "_CHILD", child)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    with pytest.raises(WeightsError) as refused:
        exported.open_exported("a", looked_at(file))
    assert "TORCHINDUCTOR_CACHE_DIR" in str(refused.value)
    assert "AWS" not in str(refused.value)


class Doubled(torch.nn.Module):
    """Four numbers, and the first one twice."""

    def forward(self, x):
        return torch.cat([x, x[:, :1] * 2], 1)


@pytest.fixture(scope="module")
def escaping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServiceProcess, Path]]:
    """Start a service with a .pt2 that tries to get out, and a model of ours; yield it and its folder."""
    folder = tmp_path_factory.mktemp("escaping")
    for name in ("models", "cache", "elsewhere"):
        (folder / name).mkdir()
    secret, new = folder / "elsewhere" / "secret.txt", folder / "elsewhere" / "new.txt"
    files = {
        "read the keys": folder / "elsewhere" / "keys.txt",
        "read the key of TLS": folder / "elsewhere" / "server.key",
        "read the engines' key": folder / "cache" / "engines" / ".key",
        "read another model's weights": folder / "models" / "other.pt2",
        "read what another program keeps": folder / "cache" / "programs" / "other" / ".key",
        "read a file of the same beginning": folder / "models" / "evilkeys.txt",
        "read the users": Path("/etc/passwd"),
    }
    for file in (secret, *files.values()):
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("secret")
    (folder / "cache" / "engines" / ".key").chmod(0o600)
    plain = frozen(Doubled(), (torch.randn(3, 4),), folder / "plain.pt2")
    evil = folder / "models" / "evil.pt2"
    escapes.program(plain, evil, secret, new, {name: str(file) for name, file in files.items()})
    models = f"resnet18:random,evil={evil}"
    options = ("--models", models, "--trust-exported", "true", "--cache-dir", str(folder / "cache"))
    environment = {"DATABASE_PASSWORD": PASSWORD, "ANYCHIP_API_KEYS_FILE": ""}
    with running(folder, *options, environment=environment, fresh=True) as service:
        yield service, folder


def infer(service: ServiceProcess, model: str, numbers: list[float]) -> Any:
    tensor = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": numbers}
    with service.client() as client:
        return client.post(
            f"/v2/models/{model}/infer",
            json={"inputs": [tensor]},
            headers={"X-Timeout-Ms": "240000"},  # A worker that was killed is replaced meanwhile.
            timeout=260,
        )


def test_a_program_that_serves_gets_nowhere(escaping: tuple[ServiceProcess, Path]) -> None:
    """Through a real .pt2, in the worker that serves it."""
    service, folder = escaping
    assert infer(service, "evil", [1, 2, 3, 4]).json()["outputs"][0]["data"] == [1, 2, 3, 4, 2]
    [line] = [line for line in service.log.read_text().splitlines() if line.startswith("ESCAPED ")]
    found = json.loads(line.removeprefix("ESCAPED "))
    assert {name: how for name, how in found["tried"].items() if how != "refused"} == {}
    assert len(found["tried"]) == len(attempts("", "")) + 7
    assert "began before" not in service.log.read_text()
    assert found["marks"] == []
    assert set(found["environment"]) <= BARE
    # Of the arena it has its own model's images: four numbers each.
    [slots] = found["memories"]
    assert slots % 4096 == 0
    [copy] = (folder / "cache" / "weights" / "opened").glob("*/evil.pt2")
    files = {str(copy), str(service.log)}  # Which it reads, and where its own log goes.
    left = [each for each in found["descriptors"] if not each.startswith(("socket:", "pipe:", "/memfd:anychip-"))]
    # Open, so that the system does not make these entries anew, which no rule would be for.
    kept = {f"/proc/{name}" for name in (found["process"], "cpuinfo", "meminfo", "stat")}
    assert kept <= set(left) <= {"/dev/null", *kept, *files}
    assert (folder / "elsewhere" / "secret.txt").read_text() == "secret"
    assert not (folder / "elsewhere" / "new.txt").exists()
    # It keeps what was compiled in a folder of its own, named by its digest.
    assert len([*(folder / "cache" / "programs").glob("?" * 64)]) == 1


def test_a_program_has_a_worker_of_its_own(escaping: tuple[ServiceProcess, Path]) -> None:
    """The others serve on while it is gone."""
    service, _ = escaping
    bare = [each for each in service.workers() if "bare_fork_server" in " ".join(each.cmdline())]
    assert bare
    for each in bare:
        each.kill()
    headers = {"Content-Type": "image/png", "X-Timeout-Ms": "240000"}
    with service.client() as client:
        answer = client.post("/v1/models/resnet18:predict", content=png(), headers=headers, timeout=260)
        assert answer.status_code == 200, answer.text
    assert infer(service, "evil", [1, 2, 3, 4]).status_code == 200  # It waits for the next worker.


# As somebody would try it who has found a way in through what reads a file or builds its network: each way begins with
# the first call that the library gets.
_WAYS_IN = """
import onnxruntime, openvino, timm, transformers
from tests.support import escapes
def entered(owner, name, way):
    original = getattr(owner, name)
    def enter(*given, **options):
        escapes.serve_escape({secret!r}, {target!r}, {files!r}, way)
        return original(*given, **options)
    setattr(owner, name, enter)
entered(onnxruntime.InferenceSession, "__init__", "ONNX Runtime")
entered(openvino.Core, "read_model", "OpenVINO reads")
entered(openvino.Core, "compile_model", "OpenVINO compiles")
entered(timm, "create_model", "timm")
entered(transformers.PreTrainedModel, "__init__", "transformers")
"""
WAYS_IN = ["ONNX Runtime", "OpenVINO compiles", "OpenVINO reads", "timm", "transformers"]


@pytest.fixture(scope="module")
def entered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServiceProcess, Path]]:
    """Start a service with an .onnx, folders of timm and transformers, and a model of ours; yield it and its folder."""
    for name in ("onnxruntime", "openvino", "timm", "transformers"):
        pytest.importorskip(name)
    onnx = pytest.importorskip("onnx")
    folder = tmp_path_factory.mktemp("entered")
    kept = folder / "cache" / "engines"
    for name in ("elsewhere", "plugins", "service"):
        (folder / name).mkdir()
    kept.mkdir(parents=True)
    secret, new, keys = (folder / "elsewhere" / name for name in ("secret.txt", "new.txt", "keys.txt"))
    for file in (secret, keys, kept / ".key"):
        file.write_text("secret")
    (kept / ".key").chmod(0o600)
    files = {"read the keys": keys, "read the engines' key": kept / ".key", "read the users": Path("/etc/passwd")}
    text = _WAYS_IN.format(secret=str(secret), target=str(new), files={name: str(file) for name, file in files.items()})
    (folder / "plugins" / "ways_in.py").write_text(text)
    kind, make = onnx.TensorProto.FLOAT, onnx.helper
    x, y = (make.make_tensor_value_info(name, kind, ["n", 4]) for name in ("x", "y"))
    graph = make.make_graph([make.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    relu = folder / "relu.onnx"
    onnx.save(make.make_model(graph, opset_imports=[make.make_opsetid("", 17)], ir_version=9), relu)
    library_folders.timm_folder("mobilenetv3_small_050", folder / "timm")
    library_folders.vit_folder(folder / "vit")
    models = f"relu={relu},timm={folder / 'timm'},vit={folder / 'vit'},resnet18:random"
    options = ("--models", models, "--plugins", "ways_in", "--engine", "openvino")
    path = os.pathsep.join((str(folder / "plugins"), str(ROOT)))
    environment = {"DATABASE_PASSWORD": PASSWORD, "PYTHONPATH": path, "ANYCHIP_API_KEYS_FILE": ""}
    more = ("--cache-dir", str(folder / "cache"))
    with running(folder / "service", *options, *more, environment=environment, fresh=True) as service:
        yield service, folder


def test_what_libraries_of_others_read_gets_nowhere(entered: tuple[ServiceProcess, Path]) -> None:
    """In the worker that serves them, from the first call to each of the libraries on."""
    service, folder = entered
    assert infer(service, "relu", [-1, 2, -3, 4]).json()["outputs"][0]["data"] == [0, 2, 0, 4]
    lines = [line for line in service.log.read_text().splitlines() if line.startswith("ESCAPED ")]
    found = {each["way"]: each for each in (json.loads(line.removeprefix("ESCAPED ")) for line in lines)}
    assert sorted(found) == WAYS_IN
    assert "began before" not in service.log.read_text()
    for way, each in found.items():
        assert {name: how for name, how in each["tried"].items() if how != "refused"} == {}, way
        assert len(each["tried"]) == len(attempts("", "")) + 3
        assert each["marks"] == []
        assert each["process"] == service.worker().pid
    assert (folder / "elsewhere" / "secret.txt").read_text() == "secret"
    assert not (folder / "elsewhere" / "new.txt").exists()


def test_what_is_compiled_is_kept_where_confined_workers_alone_look(entered: tuple[ServiceProcess, Path]) -> None:
    _, folder = entered
    kept = folder / "cache" / "confined"
    assert list(kept.glob("engines/*/manifest.json"))
    assert [each.name for each in (folder / "cache" / "engines").iterdir()] == [".key"]
