"""Ask a card, one question after the other, each within its time: JSON and text in a folder.

    python -m benchmarks.gpu --device cuda --out results            all of them, in order
    python -m benchmarks.gpu profile head --device cuda             some
    python -m benchmarks.gpu --list                                 what each asks, and what its answer decides
    python -m benchmarks.gpu --device cpu --dry-run                 whether all of it runs, without a card

Each question is a child process, so that a driver that ends one ends nothing else.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

LIMIT_S = 300


class Question(NamedTuple):
    """Question to a card. `module`: and, behind a colon, its function, else `ask`."""

    module: str
    asks: str
    decides: str


QUESTIONS: dict[str, Question] = {
    "tensorrt": Question(
        "commands:tensorrt",
        "engines of TensorRT for both sample models, their answers and their rates",
        "whether `tensorrt` stays the first engine that `auto` tries on NVIDIA",
    ),
    "link": Question(
        "link",
        "GB a second each way, of pageable, pinned and locked memory; gathering; topology",
        "whether locking the arena pays, and how fast a batch of 64 can be there at best",
    ),
    "profile": Question(
        "profile",
        "replay alone, copies each way, the engine, items that lie apart, at 1, 8, 64 and 128",
        "what to mend first: what is missing to 0.9 of the replay is copies, launches or the host",
    ),
    "head": Question(
        "head",
        "YOLOv8n with the best anchors chosen on the card, and with all in float32",
        "whether the head stays as it is",
    ),
    "verify": Question(
        "commands:verify",
        "what serves by default, through the gate",
        "whether the figures of this day are of right answers",
    ),
    "load": Question(
        "commands:load", "JPEGs over HTTP by 1, 2 and 4 services on the card", "how many loops a card wants"
    ),
    "load-ingresses": Question(
        "commands:load_by_ingresses",
        "the same by one service with 0, 2, 4 and 8 ingresses",
        "how many ingresses a card and its cores want, and whether they replace several services",
    ),
    "load-decoded": Question(
        "commands:load_decoded_by_card",
        "the same of one service whose files the card decodes",
        "whether 8,000 a second are to be had from one service",
    ),
    "load-decoded-ingresses": Question(
        "commands:load_decoded_by_ingresses",
        "the same with 0, 2 and 4 ingresses",
        "whether `--ingresses` is 0 by default beside a card",
    ),
    "decoders": Question(
        "decoders",
        "nvJPEG and nvImageCodec: files a second, pixels against libjpeg's",
        "which of them --decode device takes",
    ),
    "int8": Question(
        "int8",
        "each convolution in int8 by cuDNN beside fp16",
        "whether an engine for them is worth writing, and for which shapes",
    ),
    "autotune": Question(
        "autotune", "max-autotune in our capture", "whether Inductor's kernels replace cuDNN's in the graph"
    ),
    "contract": Question(
        "commands:contract", "the suite of what every backend promises", "what must be mended before anything else"
    ),
}
"""Questions in the order in which half an hour answers most."""


def main() -> int:
    """Ask the questions; return 0 if every question was answered, else 1."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("questions", nargs="*", choices=[*QUESTIONS, []], metavar="question", help=", ".join(QUESTIONS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu-answers"), help="the folder for what is found")
    parser.add_argument("--sizes", default="1,8,64,128")
    parser.add_argument("--seconds", type=float, default=1.0, help="of one measurement")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="of one question")
    parser.add_argument("--dry-run", action="store_true", help="small networks, to see that it runs")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.list:
        for name, question in QUESTIONS.items():
            print(f"{name}: {question.asks}\n    decides {question.decides}")
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    if given.child:
        _answer(given)
        return 0
    failed = [name for name in given.questions or QUESTIONS if not _asked(name, given)]
    print(f"without an answer: {', '.join(failed)}" if failed else "every question has its answer", flush=True)
    return int(bool(failed))


def _asked(name: str, given: argparse.Namespace) -> bool:
    """Ask in a child process; return True if there is an answer."""
    words = [name, "--child", "--device", given.device, "--out", str(given.out), "--sizes", given.sizes]
    words += ["--seconds", str(given.seconds), *(["--dry-run"] if given.dry_run else [])]
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PIP_NO_INDEX": "1"}
    began_s = time.monotonic()
    status: int | str
    with (given.out / f"{name}.txt").open("w") as text:
        try:
            command = [sys.executable, "-X", "faulthandler", "-m", "benchmarks.gpu", *words]
            status = subprocess.run(
                command, stdout=text, stderr=subprocess.STDOUT, timeout=given.limit_s, env=environment, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            status = f"not done within {given.limit_s:g} s"
    answered = status == 0
    print(f"{name}: {'answered' if answered else status} after {time.monotonic() - began_s:.0f} s", flush=True)
    return answered


def _answer(given: argparse.Namespace) -> None:
    import torch

    from benchmarks.gpu.asked import Asked

    [name] = given.questions
    sizes = (1, 2) if given.dry_run else tuple(int(size) for size in given.sizes.split(","))
    asked = Asked(given.device, sizes, 0.01 if given.dry_run else given.seconds, given.dry_run, given.out)
    module, _, function = QUESTIONS[name].module.partition(":")
    began_s = time.monotonic()
    ask = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function or "ask")
    found: dict[str, Any] = ask(asked)
    answer = {
        "question": name,
        **QUESTIONS[name]._asdict(),
        "date": time.strftime("%Y-%m-%d"),
        "device": _title(asked.module, given.device),
        "software": {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda},
        "dry_run": given.dry_run,
        "took_s": round(time.monotonic() - began_s, 1),
        **found,
    }
    (given.out / f"{name}.json").write_text(json.dumps(answer, indent=1, default=str) + "\n")
    for key, value in answer.items():
        for each in value if isinstance(value, list) else [value]:
            print(f"{key}: {each}")
    if found.get("status", 0) != 0:
        sys.exit(1)


def _title(module: Any, device: str) -> str:
    try:
        return str(module.get_device_properties(device).name)
    except (AttributeError, RuntimeError, ValueError):  # The CPU has none.
        return platform.machine()


if __name__ == "__main__":
    sys.exit(main())
