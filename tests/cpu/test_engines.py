"""OpenVINO on a full disk and the memory that it leaves behind; what ONNX Runtime refuses."""

from __future__ import annotations

import ctypes
import gc
import importlib
import resource
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from anychip_tools.verify.contract import SmallNetwork, small_images
from app.precision.gate import on_cpu
from backends import CompileOptions, EngineRefusedError
from backends.engines import onnxruntime as onnxruntime_file
from backends.engines.onnxruntime import OnnxRuntimeEngine
from backends.engines.openvino import OpenVINOEngine
from backends.vendors.table import ASCEND, NVIDIA
from models import open_model, parse_spec
from tests.support.rows import row


def test_openvino_serves_where_the_disk_takes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It raises RuntimeError then. A file that may not grow is a full disk to who writes it."""
    options, pixels = CompileOptions(cache_dir=tmp_path, key="small"), small_images(3)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        executable = OpenVINOEngine(row("fp32")).compile(SmallNetwork().eval(), "cpu:0", "fp32", (1, 3), options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    for ours, expected in zip(executable.run(pixels), on_cpu(SmallNetwork(), pixels), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4)
    executable.close()
    assert list((tmp_path / "engines").iterdir()) == []
    assert len([line for line in caplog.messages if "cannot be kept" in line]) == 1


class Sorts(SmallNetwork):
    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (pixels.float().sort(stable=True)[0],)


class TestOnnxRuntime:
    def test_a_provider_that_does_not_start_is_not_replaced_by_the_cpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        session = Mock(**{"return_value.get_providers.return_value": ["CPUExecutionProvider"]})
        monkeypatch.setattr("onnxruntime.InferenceSession", session)
        exact = {"use_tf32": "0"}, {"precision_mode": "must_keep_origin_dtype"}
        for facts, name, options in zip((NVIDIA, ASCEND), ("CUDA", "CANN"), exact, strict=True):
            monkeypatch.setattr("onnxruntime.get_available_providers", lambda: [f"{name}ExecutionProvider"])  # noqa: B023
            with pytest.raises(EngineRefusedError, match=f"{name}ExecutionProvider does not start here"):
                OnnxRuntimeEngine(facts).compile(SmallNetwork(), "cuda:1", "fp32", (1,), CompileOptions())
            given = {"device_id": "1", **options}
            assert session.call_args.kwargs["providers"] == [(f"{name}ExecutionProvider", given)]

    def test_what_a_provider_leaves_to_the_cpu_is_seen_and_refused(self) -> None:
        """The CPU's own provider stands for an accelerator's that takes nothing."""
        runtime = importlib.import_module("onnxruntime")
        exported = onnxruntime_file._exported(SmallNetwork().eval(), 2)
        settings = runtime.SessionOptions()
        choice: tuple[str, dict[str, str]] = ("CPUExecutionProvider", {})
        with pytest.raises(EngineRefusedError, match=r"leaves (Fused)?Conv.* to the CPU \(\d+ of \d+ operators\)"):
            onnxruntime_file._refuse_work_of_the_cpu(runtime, exported, settings, choice, 2)
        assert not settings.enable_profiling

    def test_what_cannot_be_exported_is_refused_without_a_print(self, capfd: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(EngineRefusedError, match="Sort"):
            onnxruntime_file._exported(Sorts(), 2)
        if torch.__version__ < "2.15":  # It prints from C++, whatever its log's switch says.
            assert capfd.readouterr() == ("", "")


@pytest.mark.nightly
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc")
def test_converting_a_network_for_openvino_again_leaves_little_memory_behind():
    """As where models come and go and cannot be kept. What PyTorch has traced it keeps once, and not three times."""

    def left_bytes():
        executable = OpenVINOEngine(row("fp32"), 2).compile(
            open_model(parse_spec("googlenet:random"), Path("nowhere")).network(),
            *("cpu:0", "fp32", (1,)),
            CompileOptions(),
        )
        executable.close()
        del executable
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    first = [left_bytes() for _ in range(2)][-1]  # What is made once stays.
    assert [left_bytes() for _ in range(3)][-1] - first < 3 * (24 << 20)
