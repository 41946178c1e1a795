"""Inputs of exported networks that are not [n, 3, height, width] of normalised floats: answers are the file's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from app.precision.gate import Gate
from app.precision.probes import probes
from models import open_model, parse_spec
from tests.support.exports_of_networks import written
from tests.support.small_classifier import digest_of

pytest.importorskip("onnx")
pytestmark = pytest.mark.filterwarnings("ignore")  # Exporters and PyTorch are not of one version's mind.

SIDE = 32
SIDECAR = {"task": "classify", "resize": "stretch", "scores": "logits"}
PIXELS = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, SIDE, SIDE, 3), dtype=np.uint8))
PLANES = PIXELS.permute(0, 3, 1, 2)
GREY = torch.stack([torch.from_numpy(np.array(Image.fromarray(each).convert("L")))[None] for each in PIXELS.numpy()])


class Network(nn.Module):
    """Of whatever channels, wherever they are; `scale`: what its numbers are divided by first."""

    def __init__(self, channels: int = 3, *, last: bool = False, scale: float = 0.0, batch: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layer, self.head = nn.Conv2d(channels, 8, 5, 2), nn.Linear(8, 4)
        self.last, self.scale, self.batch = last, scale, batch

    def forward(self, x: Tensor) -> Tensor:
        """Logits [n, 4]."""
        x = x.float() / self.scale if self.scale else x
        x = self.layer(x.permute(0, 3, 1, 2) if self.last else x).relu().amax((2, 3))
        logits: Tensor = self.head(x.reshape(self.batch, 8) if self.batch else x)
        return logits * 3


def opened(folder: Path, network: nn.Module, example: Tensor, suffix: str, sidecar: dict[str, Any], axes: Any) -> Any:
    """Export a network to a file and open the file as a model."""
    file = folder / f"m{suffix}"
    network = network.eval().requires_grad_(False)
    if suffix == ".onnx":
        written(file, network, example, input_names=["x"], dynamic_axes=axes)
    else:
        dynamic = ({0: torch.export.Dim("n", min=1, max=8)},)
        torch.export.save(torch.export.export(network, (example,), dynamic_shapes=dynamic), file)
    file.with_suffix(".json").write_text(json.dumps({**SIDECAR, **sidecar}))
    return open_model(parse_spec(f"m={file}@sha256:{digest_of(file)}"), folder)


def check(model: Any, right: Tensor) -> None:
    """Check the logits of PIXELS, alone and together; the gate's reference must be finite."""
    network = model.network()
    with torch.inference_mode():
        together = network(PIXELS)[0]
        alone = torch.cat([network(each[None])[0] for each in PIXELS])
    torch.testing.assert_close(together, right, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(alone, right, rtol=1e-4, atol=1e-4)
    assert np.isfinite(Gate(model, probes(model))._expected[0]).all()


OPEN = {"x": {0: "n"}}


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("suffix", [".onnx", ".pt2"])
def test_an_input_of_bytes_is_normalised_by_the_network_alone(tmp_path: Path, suffix: str, last: bool) -> None:
    network, given = Network(last=last, scale=255.0), PIXELS if last else PLANES.contiguous()
    sidecar = {"size": SIDE, "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
    model = opened(tmp_path, network, given[:2], suffix, sidecar, OPEN)
    check(model, network(given))
    if suffix == ".onnx":  # Its floats follow the precision that is asked for, as of every file.
        [half] = model.network().cast(torch.bfloat16)(PIXELS)
        torch.testing.assert_close(half, network(given), rtol=0.05, atol=0.3)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_an_input_of_whole_numbers_is_of_levels(tmp_path: Path, dtype: torch.dtype) -> None:
    network = Network(scale=255.0)
    check(opened(tmp_path, network, PLANES[:2].to(dtype), ".onnx", {}, OPEN), network(PLANES))


def test_channels_may_come_last(tmp_path: Path) -> None:
    network = Network(last=True)
    model = opened(tmp_path, network, torch.rand(1, SIDE, SIDE, 3), ".onnx", {"mean": 0, "std": 1 / 255}, OPEN)
    assert model.input_shape == (SIDE, SIDE, 3)
    check(model, network(PIXELS.float()))


@pytest.mark.parametrize("suffix", [".onnx", ".pt2"])
@pytest.mark.parametrize("last", [False, True])
def test_one_channel_sees_grey(tmp_path: Path, suffix: str, last: bool) -> None:
    network, given = Network(1, last=last), GREY.permute(0, 2, 3, 1) if last else GREY
    model = opened(
        tmp_path, network, torch.rand_like(given.float()), suffix, {"size": SIDE, "mean": 0.5, "std": 0.25}, OPEN
    )
    check(model, network((given.float() / 255 - 0.5) / 0.25))


@pytest.mark.parametrize("batch", [2, 4])
def test_a_file_of_one_size_of_batch_answers_any_number_of_images(tmp_path: Path, batch: int) -> None:
    network = Network(batch=batch)
    model = opened(tmp_path, network, torch.rand(batch, 3, SIDE, SIDE), ".onnx", {"mean": 0, "std": 1}, None)
    assert model.batch_sizes((1, 2, 8)) == ((2,) if batch == 2 else (4,))
    network.batch = 0
    check(model, network(PLANES.float() / 255))


@pytest.mark.parametrize("suffix", [".onnx", ".pt2"])
def test_an_input_of_halves_is_one_of_floats(tmp_path: Path, suffix: str) -> None:
    network = Network()
    right = network(PLANES.float() / 255)
    sidecar = {"mean": 0, "std": 1, "size": SIDE}
    model = opened(tmp_path, network.half(), torch.rand(2, 3, SIDE, SIDE).half(), suffix, sidecar, OPEN)
    with torch.inference_mode():
        torch.testing.assert_close(model.network()(PIXELS)[0], right, rtol=5e-3, atol=1e-2)


def test_an_input_of_signed_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="its input is of int8, whose zero it does not say"):
        opened(tmp_path, Network(scale=255.0), PLANES[:2].to(torch.int8), ".onnx", {}, OPEN)


def test_six_channels_are_refused_with_what_is_taken(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"of three channels or one; this one takes x \['n', 6, 32, 32\]"):
        opened(tmp_path, Network(6), torch.rand(1, 6, SIDE, SIDE), ".onnx", {}, OPEN)
