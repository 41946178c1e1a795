"""fp32 means float32: what vendors' software is told, whose defaults round more.

Defaults as in the vendors' files: PyTorch's cudnn.allow_tf32 (True; a ROCm torch hands it to MIOpen), ONNX Runtime's
cuda_execution_provider_info.h (`use_tf32{true}`), torch_tensorrt 2.8's dynamo/_defaults.py
(`USE_EXPLICIT_TYPING = False`, `ENABLED_PRECISIONS = {f32}`).
"""

from __future__ import annotations

import pytest

from backends.engines.onnxruntime import _provider_options
from backends.engines.tensorrt import _typing
from backends.vendors.table import ACCELERATORS, Facts


@pytest.mark.parametrize("row", [row for row in ACCELERATORS if row.device_type == "cuda"], ids=lambda row: row.name)
def test_every_vendor_that_answers_to_torch_cuda_rounds_to_float32(row: Facts) -> None:
    for switch in ("torch.backends.cudnn.allow_tf32", "torch.backends.cuda.matmul.allow_tf32"):
        assert row.switches[switch] is False


def test_onnx_runtime_is_told_on_nvidia_and_others_are_given_no_option_that_they_lack() -> None:
    assert _provider_options("CUDAExecutionProvider", 1) == {"device_id": "1", "use_tf32": "0"}
    assert _provider_options("MIGraphXExecutionProvider", 0) == {"device_id": "0"}


def test_tensorrt_keeps_the_types_of_the_network_where_it_can_be_told() -> None:
    def of_2_8(exported: object, *, disable_tf32: bool = False, use_explicit_typing: bool = False) -> None: ...

    def without(exported: object, *, disable_tf32: bool = False) -> None: ...

    assert _typing(of_2_8) == {"use_explicit_typing": True}
    assert _typing(without) == {}
