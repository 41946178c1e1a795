"""NVIDIA's wheels that no card has shown yet, as far as they run without one: the calls that we make of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.vendor_sources import unpacked

ROOT = Path(__file__).parents[2]
DECODES = """
import sys
import torch
from app.images.decoding import decode
from app.images.header import read_header
from backends import BackendError
from benchmarks.gpu.nvimgcodec import NvimgcodecDecoder
from models.sample import IMAGES

files = [path.read_bytes() for path in sorted(IMAGES.glob("*.jpg"))[:4]]
tensors = [torch.frombuffer(bytearray(file), dtype=torch.uint8) for file in files]
decoder = NvimgcodecDecoder("cpu")
for file, image in zip(files, decoder.decode(tensors), strict=True):
    assert torch.equal(image, decode(file, read_header(file)).permute(2, 0, 1)), "libjpeg's pixels, chroma interpolated"
try:
    decoder.decode([tensors[0], tensors[1][:3000]])
except BackendError as error:
    assert "cannot decode 1 files" in str(error), error
    print("all as it should be")
"""


def said(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_cudnns_python_takes_our_graph_of_a_convolution(tmp_path: Path) -> None:
    environment = unpacked("nvidia-cudnn-frontend", tmp_path)
    test = "tests/unit/test_cudnn.py"
    assert "2 passed" in said(["-m", "pytest", "-q", "-p", "no:cacheprovider", test, "-k", "wheels"], environment)


def test_nvimagecodec_decodes_by_our_calls_on_the_cpu(tmp_path: Path) -> None:
    assert "all as it should be" in said(["-c", DECODES], unpacked("nvidia-nvimgcodec-cu13", tmp_path))
