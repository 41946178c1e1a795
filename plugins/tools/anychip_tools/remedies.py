"""Remedies for operators that a device lacks: tables for `anychip ops` and docs/troubleshooting.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

Step = Literal["switch", "rewrite", "custom"]


class Remedy(NamedTuple):
    """Remedy for an operator. `step`: which of the three kinds, in the order in which they are tried."""

    step: Step
    text: str


STEPS: Mapping[Step, str] = {
    "switch": "a switch of the vendor's software",
    "rewrite": "another way to write the model",
    "custom": "an operator of your own",
}

# Device type -> the switch for operators without a kernel. Sources: docs/operators.md.
SWITCHES: Mapping[str, str] = {
    "npu": "leave TORCH_NPU_FALLBACK_CPU_DISABLE unset: torch_npu then runs it on the CPU itself; a newer torch_npu "
    "and CANN may have the kernel",
    "mlu": "ENABLE_FALLBACK_TO_CPU=1: torch_mlu then runs it on the CPU itself",
    "xpu": "PYTORCH_ENABLE_XPU_FALLBACK=1: PyTorch then runs it on the CPU itself",
    "tensorrt": "nothing must be done: PyTorch computes it on the same GPU; each such cut costs time",
    "torchair": "nothing must be done: --engine eager computes it on the same NPU, operator by operator",
    "mps": "PYTORCH_ENABLE_MPS_FALLBACK=1: PyTorch then runs it on the CPU itself",
}
# The operator's name without overload -> how to write a model without it.
REWRITES: Mapping[str, str] = {
    "aten::silu": "x * torch.sigmoid(x)",
    "aten::hardswish": "x * torch.clamp(x + 3, 0, 6) / 6",
    "aten::hardsigmoid": "torch.clamp(x + 3, 0, 6) / 6",
    "aten::gelu": "0.5 * x * (1 + torch.erf(x * 0.5 ** 0.5)), or nn.GELU('tanh')",
    "aten::mish": "x * torch.tanh(torch.log(1 + torch.exp(x)))",
    "aten::elu": "torch.where(x > 0, x, torch.exp(x) - 1)",
    "aten::leaky_relu": "torch.maximum(x, slope * x)",
    "aten::prelu": "torch.clamp(x, min=0) + weight * torch.clamp(x, max=0)",
    "aten::softplus": "torch.log(1 + torch.exp(x))",
    "aten::_adaptive_avg_pool2d": "nn.AvgPool2d of a fixed window",
    "aten::adaptive_max_pool2d": "nn.MaxPool2d of a fixed window",
    "aten::grid_sampler_2d": "interpolation at fixed places: precompute the indices and use index_select",
    "aten::upsample_bicubic2d": "bilinear or nearest interpolation, if the model was trained so",
    "aten::upsample_nearest2d": "repeat_interleave, or expand and reshape, for whole factors",
    "aten::roll": "torch.cat of two slices",
    "aten::nonzero": "masks and torch.where instead: shapes that depend on values cannot be compiled either",
    "aten::unique_consecutive": "counting on the host, after the network",
    "aten::sort": "torch.topk of as many as are needed",
    "aten::cumsum": "a product with a triangular matrix of ones, for short axes",
    "aten::einsum": "permute and matmul",
    "aten::linalg_vector_norm": "(x * x).sum(dim).sqrt()",
    "torchvision::nms": "suppression on the host: anychip does it there for its own detectors",
    "torchvision::roi_align": "a detector without regions of interest, such as YOLOv8",
    "torchvision::deform_conv2d": "an ordinary convolution, and training again",
}
CUSTOM = (
    "a kernel of the vendor's SDK in a library of your own, which a module of --plugins loads (docs/operators.md, "
    "Own operators)"
)
TYPE_REFUSED = "--precision fp32, or another that the device computes in: anychip devices shows which"


def of_operator(operator: str, device_type: str, how: str) -> tuple[Remedy, ...]:
    """Return the remedies for an operator that is not native, the first to try first; `how`: as a record has it."""
    base = operator.partition(".")[0]
    found: list[Remedy] = []
    if how == "refused":
        found.append(Remedy("switch", TYPE_REFUSED))
    elif device_type in SWITCHES:
        found.append(Remedy("switch", SWITCHES[device_type]))
    rewrite = REWRITES.get(base) or REWRITES.get(base.removesuffix("_"))
    if rewrite:
        found.append(Remedy("rewrite", f"write it as {rewrite}"))
    found.append(Remedy("custom", CUSTOM))
    return tuple(found)
