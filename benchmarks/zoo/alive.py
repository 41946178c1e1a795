"""Makes untrained networks answer as trained ones do: layers keep the spread of what comes in, heads tell apart."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import Any

import torch
from torch import nn

SPREAD = 2.5
"""Standard deviation of what a head of classes answers."""


def draw(network: nn.Module, gain: float = 1.4, seed: int = 0) -> None:
    """Draw weights of all layers again; norms and biases are apart from 1 and 0."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(tensor: torch.Tensor, std: float, mean: float = 0.0) -> None:
        tensor.copy_(torch.empty(tensor.shape).normal_(mean, std, generator=generator))

    with torch.no_grad():
        for module in network.modules():
            weight, bias = (getattr(module, key, None) for key in ("weight", "bias"))
            if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.ConvTranspose2d):
                drawn(module.weight, gain / sqrt(max(1, module.weight[0].numel())))
            elif isinstance(module, nn.Embedding):
                drawn(module.weight, 1.0)
            elif isinstance(weight, torch.Tensor) and weight.ndim == 1:
                drawn(weight, 0.1, 1.0)
            if isinstance(bias, torch.Tensor):
                drawn(bias, 0.02)
            for key in ("detection_tokens", "query_embed"):
                tokens = getattr(module, key, None)
                if isinstance(tokens, torch.Tensor):
                    drawn(tokens, 2.0)


def measure(network: nn.Module, run: Callable[[], Any]) -> None:
    """Set what BatchNorm has seen to what `run` shows it."""
    norms = [each for each in network.modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
        norm.train()
    if norms:
        with torch.no_grad():
            run()
    network.eval()


def spread(head: nn.Module, run: Callable[[], Any], std: float = SPREAD, level: float = 0.0) -> None:
    """Scale a last layer, so that what it answers to the pictures differs by class and by picture."""
    seen: list[torch.Tensor] = []
    hook = head.register_forward_hook(lambda _, __, output: seen.append(output.detach()))
    with torch.no_grad():
        run()
    hook.remove()
    if not seen:
        return  # A head of training alone.
    assert isinstance(head, nn.Linear | nn.Conv2d)
    axis = 1 if isinstance(head, nn.Conv2d) else -1
    output = seen[-1].movedim(axis, -1).flatten(0, -2)
    if head.bias is not None:
        output = output - head.bias.detach()
    mean = output.mean(0) if len(output) > 1 else output.mean()
    gain = std / float((output - mean).std())
    with torch.no_grad():
        head.weight.mul_(gain)
        if head.bias is not None:
            head.bias.copy_((level - gain * mean).expand_as(head.bias))


def head_of(network: nn.Module, classes: int) -> nn.Module:
    """Return the last layer that answers with so many numbers."""
    found = [
        each
        for each in network.modules()
        if (isinstance(each, nn.Linear) and each.out_features == classes)
        or (isinstance(each, nn.Conv2d) and each.out_channels == classes)
    ]
    return found[-1]


def enliven(network: nn.Module, run: Callable[[], Any], classes: int = 0, *, gain: float = 1.4, seed: int = 0) -> Any:
    """Draw, measure, and spread the head of so many classes, if any."""
    draw(network, gain, seed)
    network.eval()
    measure(network, run)
    if classes:
        spread(head_of(network, classes), run)
    for each in network.parameters():
        each.requires_grad_(False)
    return network.eval()


def spread_queries(network: nn.Module, seed: int = 0) -> None:
    """Draw the heads of an RF-DETR so that scores are as far apart as trained ones, and make its queries not depend on
    their number, which nearly equal scores of places decide.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if name.startswith(("query_feat", "refpoint_embed")):
                weight.zero_()
            elif "class_embed" in name and weight.ndim == 2:
                weight.normal_(0, 0.25, generator=generator)
            elif "bbox_embed" in name and name.endswith("layers.2.weight"):
                weight.normal_(0, 0.03, generator=generator)
