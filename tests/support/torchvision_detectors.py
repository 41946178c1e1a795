"""torchvision's detectors, untrained but alive, as ONNX files."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models import detection

CLASSES = 6
HEADS = ("class_logits", "cls_score", "cls_logits", "classification_head.module_list")


def alive(name: str, images: list[Tensor]) -> Any:
    """Make the network; its BatchNorm has seen the images, and its last layers tell boxes and classes apart."""
    torch.manual_seed(0)
    network = getattr(detection, name)(weights=None, weights_backbone=None, num_classes=CLASSES)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    target = {"boxes": torch.tensor([[8.0, 8, 90, 90]]), "labels": torch.tensor([1])}
    target |= {"masks": torch.ones((1, *images[0].shape[1:]), dtype=torch.uint8), "keypoints": torch.ones((1, 17, 3))}
    targets = [target for _ in images]
    with torch.no_grad():
        network.train()(images, targets)
        network.eval()
        layers = {
            key: module
            for key, module in network.named_modules()
            if isinstance(module, nn.Conv2d | nn.Linear) and any(head in key for head in HEADS)
        }
        # The last of several in a row.
        last = {re.sub(r"(module_list\.\d+).*", r"\1", key): module for key, module in layers.items()}
        spread: dict[nn.Module, float] = {}
        hooks = [
            module.register_forward_hook(
                lambda module, _, found: spread.__setitem__(module, max(spread.get(module, 0.0), float(found.std())))
            )
            for module in last.values()
        ]
        network(images)
        for hook in hooks:
            hook.remove()
        for module, std in spread.items():
            module.weight.mul_(1.5 / max(std, 1e-6))  # type: ignore[operator]
    return network


def export(file: Path, name: str, images: list[Tensor]) -> Any:
    """Write the file; return the network that was written."""
    network = alive(name, images)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(network, ([images[0]],), str(file), dynamo=False, opset_version=17)
    return network
