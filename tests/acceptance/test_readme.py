"""Every block of README, run as it is printed, where its reader is: in a clone, with files of the reader's own.

`best.onnx` is compared with `ultralytics.YOLO.predict`, `faces.pt` (Ultralytics' `best.pt`) too, `dogs.safetensors`
with torchvision's resnet50, `bert.onnx` with PyTorch's own module.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
LINES = [
    re.sub(r"\s+#.*", "", line)
    for language, block in BLOCKS
    if language in ("", "bash", "sh", "console")
    for line in block.splitlines()
]
SPOKEN = [language for language, _ in BLOCKS if language not in ("", "bash", "sh", "console")]

DEMO = "make demo"
CARS = ".venv/bin/anychip serve --models cars=best.onnx"
ASK_CARS = "curl -F file=@street.jpg http://127.0.0.1:8000/v1/models/cars:predict"
ASK_HEART = (
    "curl -F file=@models/sample/images/classify_heart.jpg 'http://127.0.0.1:8000/v1/models/resnet50:predict?top_k=2'"
)
TUNED = ".venv/bin/anychip serve --models dogs=resnet50:dogs.safetensors,faces=yolov8n:faces.pt"
GRAPH = ".venv/bin/anychip serve --models qa=bert.onnx"

ENDING = {
    "make install": r"^make: '\.venv/\.installed' is up to date\.$|^make: Nothing to be done for 'install'\.$",
    ".venv/bin/anychip predict yolov8n street.jpg --save drawn/": r"^ +0\.9\d+ +star ",
    ".venv/bin/anychip devices": r"^PASS +cpu:0 (.|\n)*^not here +npu +Huawei Ascend ",
    ".venv/bin/anychip doctor": r"^PASS +packages (.|\n)*^PASS +devices +cpu:0 ",
    ".venv/bin/anychip ops yolov8n=yolov8n:sample --against npu": r"^[1-9]\d* of \d+ operators are supported ",
    ".venv/bin/anychip bench resnet50 --sizes 1,4,16": r"^\w+ +\w+ +1 (.|\n)*^\w+ +\w+ +16( +[\d.]+){4}",
}
"""What ends by itself, and what it says. `--weights sample` is what the variable means: no network is asked here."""

TUNE = ".venv/bin/anychip tune resnet50 --budget 10m --p99-ms 50"
NO_MODELS = r"^anychip: 2 of 2 models cannot be read\.(.|\n)*^yolov8\w: https://github.* could not be downloaded "
REFUSED = {
    ".venv/bin/anychip serve": NO_MODELS,
    ".venv/bin/anychip serve --models mobilenet_v3_small,yolov8s": NO_MODELS,
    ".venv/bin/anychip serve --models dogs=hf://timm/resnet18.a1_in1k": r"^anychip: hf://timm/.* could not be asked",
    ".venv/bin/anychip weights fetch resnet50 yolov8n": r"^anychip: https://download\.pytorch.* could not be",
    ".venv/bin/anychip validate best.onnx --device npu": r"^anychip: torch_npu is not installed: ANYCHIP_TORCH=",
}
"""What needs a network or an NPU, and what it says without one."""

ELSEWHERE = {
    "PIP_INDEX_URL=https://pypi.tuna.tsinghua.edu.cn/simple "
    "ANYCHIP_TORCH_INDEX=https://mirrors.nju.edu.cn/pytorch/whl make demo": "a network; tests/unit/test_install.py",
    "make test": "runs this file",
    "make image-cuda": "needs docker; tests/deploy",
    "docker run --rm --gpus all --read-only --volume anychip:/cache --publish 127.0.0.1:8000:8000 anychip:0.1.0-cuda": (
        "needs docker and a card; tests/deploy"
    ),
}
"""What is not run here, and why, and where it is."""


def test_every_line_is_run_or_says_why_not():
    run = {DEMO, CARS, ASK_CARS, ASK_HEART, TUNED, GRAPH, TUNE, *ENDING, *REFUSED}
    assert run.isdisjoint(ELSEWHERE)
    assert {line for line in LINES if line} == run | ELSEWHERE.keys()
    assert sorted(SPOKEN) == ["json", "python"]


@functools.cache
def _has_network_of_its_own() -> bool:
    return os.geteuid() == 0 and subprocess.run(["unshare", "--net", "true"], check=False).returncode == 0


LOOPBACK_UP = """
import fcntl, os, signal, socket, struct, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)  # A job in the background ignores it.
with socket.socket() as one:
    fcntl.ioctl(one, 0x8914, struct.pack("16sh14x", b"lo", 0x41))  # SIOCSIFFLAGS: IFF_UP | IFF_RUNNING
os.execvp(sys.argv[1], sys.argv[1:])
"""


@pytest.fixture
def reader(anychip):
    """README's lines name port 8000: a network of their own has it free, and reaches nothing else."""
    if not _has_network_of_its_own():
        with socket.socket() as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                one.bind(("127.0.0.1", 8000))
            except OSError:
                pytest.skip("port 8000 is another's, and only root can make a network for the test")
        return anychip
    return replace(anychip, prefix=("unshare", "--net", sys.executable, "-I", "-c", LOOPBACK_UP))


@pytest.fixture
def offline(reader):
    if not reader.prefix:
        pytest.skip("only root can make a network that reaches nothing")
    return reader


@pytest.fixture
def clone(tmp_path: Path, command: Path) -> Path:
    """Link the repository and its environment into a folder, as a clone."""
    folder = tmp_path / "anychip"
    folder.mkdir()
    files = ("git", "-c", "safe.directory=*", "ls-files", "-z")
    kept = subprocess.run(files, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")[:-1]
    for name in {Path(each).parts[0] for each in kept}:  # No file of the user's own: best.onnx would be written over.
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").symlink_to(command.parent.parent)
    made = subprocess.run(["make", "--question", ".venv/.installed"], cwd=folder, capture_output=True, check=False)
    assert made.returncode == 0, "the environment is older than pyproject.toml: make install first"
    return folder


@contextlib.contextmanager
def started(reader, line, folder, *, ends_with=signal.SIGTERM, status=0):
    """Start the service of a line of README; the yielded reader runs its commands in the service's network."""
    with reader.started(["sh", "-c", f"exec {line}"], cwd=folder, ends_with=ends_with, status=status) as service:
        assert service.address == "http://127.0.0.1:8000"
        inside = ("nsenter", f"--net=/proc/{service.process.pid}/ns/net") if reader.prefix else ()
        yield service, replace(reader, prefix=inside)


def ask(beside, line, folder):
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed, which README asks with")
    return json.loads(beside.done(["sh", "-c", line], folder).stdout)


def test_make_demo_and_what_is_asked_of_it(reader, clone, same_classes):
    # Ctrl-C ends it; make says that it was interrupted.
    with started(reader, DEMO, clone, ends_with=signal.SIGINT, status=None) as (_, beside):
        answer = ask(beside, ASK_HEART, clone)
        [printed] = [json.loads(block) for language, block in BLOCKS if language == "json"]
        assert answer.keys() == printed.keys()
        assert (answer["model"], answer["weights"], answer["device"]) == ("resnet50", "sample", "cpu:0")
        [mine], [theirs] = answer["predictions"], printed["predictions"]
        assert mine.keys() == theirs.keys()
        assert [each["label"] for each in mine["classes"]] == [each["label"] for each in theirs["classes"]]
        same_classes(mine["classes"], theirs["classes"])
        [script] = [block for language, block in BLOCKS if language == "python"]
        said = beside.completed([sys.executable, "-I", "-c", script], cwd=clone)
        assert re.search(r"^star 0\.9\d+ \{'x1': ", said, re.MULTILINE), said
        said = beside.run("top", "--once", cwd=clone)
        assert "resnet50" in said
        assert "yolov8n" in said


def test_a_model_of_your_own(reader, clone, ultralytics_files, same_boxes):
    for name in ("best.onnx", "street.jpg"):
        shutil.copy(ultralytics_files.folder / name, clone)
    with started(reader, CARS, clone) as (service, beside):
        [found] = ask(beside, ASK_CARS, clone)["predictions"]
        assert '"engine": "openvino"' in json.dumps(ask(beside, f"curl -fsS {service.address}/v1/models", clone))
    same_boxes(found["detections"], ultralytics_files.answers["best.onnx"])


def test_files_of_your_training(reader, clone, ultralytics_files, library_files, same_boxes, same_classes):
    for name in ("dogs.safetensors", "dogs.labels.txt", "heart.jpg"):
        shutil.copy(library_files.folder / name, clone)
    shutil.copy(ultralytics_files.folder / "best.pt", clone / "faces.pt")
    shutil.copy(ultralytics_files.folder / "street.jpg", clone)
    with started(reader, TUNED, clone) as (_, beside):
        [found] = ask(beside, ASK_CARS.replace("cars", "faces"), clone)["predictions"]
        same_boxes(found["detections"], ultralytics_files.answers["best.pt"])
        asked = ASK_CARS.replace("cars", "dogs").replace("street", "heart")
        [found] = ask(beside, asked, clone)["predictions"]
        same_classes(found["classes"], library_files.answers["dogs.safetensors"])


def test_a_network_that_carries_its_own_graph(reader, clone, library_files):
    for name in ("bert.onnx", "bert.tensors.json"):
        shutil.copy(library_files.folder / name, clone)
    expected = library_files.answers["bert.onnx"]
    words = expected["input_ids"]
    tensor = {"name": "input_ids", "datatype": "INT64", "shape": [len(words), len(words[0])], "data": words}
    body = shlex.quote(json.dumps({"inputs": [tensor]}))
    with started(reader, GRAPH, clone) as (service, beside):
        asked = f"curl -fsS --json {body} {service.address}/v2/models/qa/infer"
        [output] = ask(beside, asked, clone)["outputs"]
    assert output["name"] == "scores"
    assert output["data"] == pytest.approx(expected["scores"], abs=0.02)


@pytest.mark.parametrize("line", ENDING)
def test_a_line_that_ends_by_itself(reader, clone, line):
    shutil.copy(ROOT / "models" / "sample" / "images" / "detect_1.jpg", clone / "street.jpg")
    reader = replace(reader, environment={"ANYCHIP_WEIGHTS": "sample"})
    said = reader.completed(["sh", "-c", line], cwd=clone)
    assert re.search(ENDING[line], said, re.MULTILINE), said
    assert "--save" not in line or list((clone / "drawn").iterdir())


def test_a_long_line_can_be_interrupted(offline, clone):
    bare = replace(offline, environment={"ANYCHIP_WEIGHTS": "sample"})._bare()
    with subprocess.Popen(
        [*offline.prefix, *TUNE.split()], cwd=clone, env=bare, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        said = next((line for line in process.stderr if " of 600 done" in line), "it ended")
        os.killpg(process.pid, signal.SIGINT)
        said += process.stderr.read()
    assert (process.returncode, "Traceback" in said) == (130, False), said


def test_a_line_that_needs_what_is_not_here_says_so(offline, clone, ultralytics_files):
    shutil.copy(ultralytics_files.folder / "best.onnx", clone)
    for line, expected in REFUSED.items():
        said = offline.completed(["sh", "-c", line], cwd=clone, status=1)
        assert re.search(expected, said, re.MULTILINE), said
        assert "Traceback" not in said
