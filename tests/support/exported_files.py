"""Small question-answering transformer, exported as people export theirs: to ONNX, .pt2 and TorchScript."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import torch
from torch import nn

from tests.support.exports_of_networks import written

WORDS, LONGEST = 50, 12
INPUTS = ("input_ids", "attention_mask")
OUTPUTS = ("start_logits", "end_logits")


class QuestionAnswering(nn.Module):
    """BERT with a head for the start and end of an answer: one layer, hardly any width."""

    def __init__(self, width=16, heads=2):
        super().__init__()
        self.heads = heads
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LONGEST, width)
        self.attend, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 2)

    def forward(self, input_ids, attention_mask):
        x = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
        parts = self.attend(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        hidden = (1 - attention_mask[:, None, None, :].float()) * -1e4
        seen = nn.functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], attn_mask=hidden)
        logits = self.head(self.norm(x + self.mix(seen.transpose(1, 2).flatten(2))))
        return logits[..., 0], logits[..., 1]


def question_answering():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return QuestionAnswering().eval().requires_grad_(False)


def example(count=3, length=LONGEST, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, WORDS, (count, length), generator=generator)
    mask = torch.ones((count, length), dtype=torch.int64)
    mask[:, length - length // 3 :] = 0
    return ids, mask


def exported(folder: Path, suffix: str, *, beside: bool = True) -> Path:
    """Write `folder`/qa`suffix`, and a sidecar with the facts that the file lacks."""
    network, inputs, file = question_answering(), example(), folder / f"qa{suffix}"
    shape: dict[str, object] = {}
    if suffix == ".pt2":
        batch = torch.export.Dim("batch", min=1, max=64)
        sequence = torch.export.Dim("sequence", min=2, max=LONGEST)
        dimensions = ({0: batch, 1: sequence}, {0: batch, 1: sequence})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Exporters and PyTorch differ in version.
            torch.export.save(torch.export.export(network, inputs, dynamic_shapes=dimensions), file)
        # torch.export keeps no names of dimensions, so that the length of .pt2's is stated with the shape.
        shape = {"shape": [-1, "sequence"]}
    elif suffix == ".onnx":
        axes = {name: {0: "batch", 1: "sequence"} for name in (*INPUTS, *OUTPUTS)}
        written(file, network, inputs, input_names=[*INPUTS], output_names=[*OUTPUTS], dynamic_axes=axes)
    else:
        written(file, network, inputs)
        shape = {"datatype": "INT64", "shape": [-1, "sequence"]}
    if beside:
        declared = {
            "inputs": {"input_ids": {**shape, "range": [0, WORDS - 1]}, "attention_mask": {**shape, "range": [0, 1]}},
            "dimensions": {"sequence": {"at_most": LONGEST}},
            **({} if suffix == ".onnx" else {"outputs": list(OUTPUTS)}),
        }
        file.with_name("qa.tensors.json").write_text(json.dumps(declared), encoding="utf-8")
    return file


def frozen(network: nn.Module, inputs: tuple[torch.Tensor, ...], file: Path, batch: bool = True) -> Path:
    """Export any network as a .pt2, whose first axes are the batch, or fixed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shapes = tuple({0: torch.export.Dim("batch", min=1, max=64)} for _ in inputs) if batch else None
        torch.export.save(torch.export.export(network.eval(), inputs, dynamic_shapes=shapes), file)
    return file
