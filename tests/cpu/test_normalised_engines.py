"""Normalised tensors as an input: engines take the network in this form, too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from backends.vendors.cpu import CpuBackend
from models import NormalisedModel, open_model, parse_spec


@pytest.mark.parametrize("engine", ["eager", "openvino"])
def test_engines_take_it(engine):
    form = NormalisedModel.of(open_model(parse_spec("resnet18:random"), Path("nowhere")))
    items = form.items(np.random.default_rng(0).integers(0, 256, (2, 224, 224, 3), dtype=np.uint8))
    with torch.inference_mode():
        [expected] = form.network()(torch.from_numpy(items))
    executable, report = CpuBackend(1).load(form.network(), "cpu:0", engine, "fp32", (1, 2))
    try:
        assert report.engine == engine
        [output] = executable.run(items)
        np.testing.assert_allclose(output, expected.numpy(), rtol=1e-3, atol=1e-3)
    finally:
        executable.close()
