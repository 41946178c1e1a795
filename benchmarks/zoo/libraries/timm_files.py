"""timm: folders as `save_for_hf` writes them, state dicts, and exports."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.zoo.alive import enliven
from benchmarks.zoo.networks import LABELS, Floats, Made, Network, as_arrays
from benchmarks.zoo.pixels import Images

_CLASSES = len(LABELS)


def _network(name: str, images: Images, classes: int = _CLASSES, **more: Any) -> Any:
    import timm

    network = timm.create_model(name, pretrained=False, num_classes=classes, **more)
    known = timm.data.resolve_data_config(more, model=network)
    grey = more.get("in_chans") == 1
    if grey:
        known |= {"input_size": (1, *known["input_size"][1:]), "mean": (0.5,), "std": (0.5,)}
    transform: Any = timm.data.create_transform(**known)
    pixels = torch.stack([transform(each.convert("L" if grey else "RGB")) for each in images])
    return enliven(network, lambda: network(pixels), classes)


def _answers(network: Any, images: Images, config: dict[str, Any] | None = None) -> list[Floats]:
    import timm

    settings = config or timm.data.resolve_data_config({}, model=network)
    transform: Any = timm.data.create_transform(**settings)
    mode = "L" if settings["input_size"][0] == 1 else "RGB"
    with torch.inference_mode():
        found = [network(transform(each.convert(mode))[None])[0] for each in images]
    classes = getattr(network, "num_classes", 0)
    return as_arrays([each.softmax(0) for each in found] if classes else found)


def _folder(
    name: str, folder: Path, images: Images, *, classes: int = _CLASSES, cfg: dict[str, Any] | None = None, **more: Any
) -> Made:
    import timm

    network = _network(name, images, classes, **more)
    network.pretrained_cfg = {**network.pretrained_cfg, **(cfg or {})}
    labels = {"label_names": LABELS} if classes else {}
    about = {"num_classes": classes, **labels, **({"model_args": more} if more else {})}
    timm.models.save_for_hf(network, folder / "saved", model_config=about, safe_serialization=True)
    again = timm.create_model(f"local-dir:{folder / 'saved'}", pretrained=True).eval()
    return Made("{}/saved", "scores" if classes else "vector", _answers(again, images))


def _flat(folder: Path, images: Images) -> Made:
    """Write the folder in its form before 2023: no pretrained_cfg, all keys at the top."""
    import timm

    made = _folder("test_resnet", folder, images)
    file = folder / "saved" / "config.json"
    config = json.loads(file.read_text())
    flat = {**config.pop("pretrained_cfg"), "architecture": config["architecture"], "num_classes": _CLASSES}
    flat |= {"mean": [0.5] * 3, "std": [0.5] * 3, "input_size": [3, 96, 96], "crop_pct": 1.0, "labels": LABELS}
    flat.pop("label_names", None)
    file.write_text(json.dumps(flat))
    again = timm.create_model(f"local-dir:{folder / 'saved'}", pretrained=True).eval()
    return Made(made.model, "scores", _answers(again, images))


def _weights(name: str, ending: str, folder: Path, images: Images, wrap: str = "") -> Made:
    network = _network(name, images)
    state: Any = network.state_dict()
    file = folder / f"weights{ending}"
    if ending == ".safetensors":
        from safetensors.torch import save_file

        save_file(state, file)
    else:
        if wrap == "ema":
            state = {
                "state_dict": {key: torch.zeros_like(each) for key, each in state.items()},
                "state_dict_ema": state,
            }
        elif wrap == "train":
            state = {"epoch": 3, "arch": name, "state_dict": {f"module.{key}": each for key, each in state.items()}}
        torch.save(state, file)
    (folder / "weights.labels.txt").write_text("\n".join(LABELS) + "\n")
    return Made(f"timm/{name}:{{}}/weights{ending}", "scores", _answers(network, images))


def _graph(name: str, ending: str, folder: Path, images: Images, dynamo: bool = False) -> Made:
    import timm

    network = _network(name, images)
    settings = timm.data.resolve_data_config({}, model=network)
    example = torch.rand(2, *settings["input_size"])
    file = folder / f"graph{ending}"
    network.pretrained_cfg = {**network.pretrained_cfg, "label_names": LABELS}
    if ending == ".onnx":
        torch.onnx.export(network, (example[:1],), str(file), dynamo=dynamo)
    elif ending == ".ts":
        jit: Any = torch.jit
        jit.save(jit.trace(network, example), str(file))
    else:
        rows = {0: torch.export.Dim("batch", min=1, max=64)}
        torch.export.save(torch.export.export(network, (example,), dynamic_shapes=(rows,)), file)
    timm.models.save_for_hf(network, folder / "about", model_config={"num_classes": _CLASSES, "label_names": LABELS})
    if ending == ".onnx":
        (folder / "config.json").write_text((folder / "about" / "config.json").read_text())
    else:
        kept = {key: list(settings[key]) for key in ("mean", "std")}
        about = {"task": "classify", "labels": LABELS, "size": settings["input_size"][1], **kept}
        about |= {"crop": settings["crop_pct"], "interpolation": settings["interpolation"], "resize_by": "pillow"}
        (folder / "graph.json").write_text(json.dumps(about))
    return Made(f"{{}}/graph{ending}", "scores", _answers(network, images))


def _module(folder: Path, images: Images) -> Made:
    """`torch.save(model)`: refused; its state dict is the way."""
    network = _network("mambaout_femto", images)
    torch.save(network, folder / "model.pth")
    torch.save(network.state_dict(), folder / "state.pth")
    (folder / "state.labels.txt").write_text("\n".join(LABELS) + "\n")
    answers = _answers(network, images)
    return Made(
        "timm/mambaout_femto:{}/state.pth", "scores", answers,
        refused="timm/mambaout_femto:{}/model.pth", line="state_dict()",
    )  # fmt: skip


def _row(name: str, file: str, build: Callable[[Path, Images], Made]) -> Network:
    return Network(name, "timm", file, build, "timm", "network and create_transform")


def _folder_row(name: str, note: str = "", **more: Any) -> Network:
    row = "timm-" + name.replace(".", "-")
    return _row(row, "folder of save_for_hf" + (f", {note}" if note else ""), partial(_folder, name, **more))


ROWS = [
    _folder_row("mobilenetv4_conv_medium"),
    _folder_row("efficientvit_b0"),
    _folder_row("fastvit_t8"),
    _folder_row("cait_xxs24_224"),
    _folder_row("tf_efficientnet_b0"),
    _folder_row("resmlp_12_224"),
    _folder_row("efficientformerv2_s0"),
    _folder_row("poolformerv2_s12"),
    _folder_row("hiera_tiny_224"),
    _folder_row("maxvit_rmlp_pico_rw_256"),
    _folder_row("inception_v3"),
    _folder_row("vit_tiny_patch16_224", "num_classes=0", classes=0),
    _folder_row("vit_small_patch14_dinov2", "img_size=70", img_size=70, cfg={"input_size": (3, 70, 70)}),
    _folder_row(
        "resnet10t", "in_chans=1", in_chans=1, cfg={"input_size": (1, 176, 176), "mean": (0.5,), "std": (0.5,)}
    ),
    _row("timm-flat", "folder with a flat config.json, test_resnet", _flat),
    _row("timm-eva02_tiny", ".safetensors", partial(_weights, "eva02_tiny_patch14_224", ".safetensors")),
    _row("timm-pvt_v2_b0", ".pth", partial(_weights, "pvt_v2_b0", ".pth")),
    _row("timm-crossvit_9", ".pth", partial(_weights, "crossvit_9_240", ".pth")),
    _row("timm-rexnet", "pytorch_model.bin", partial(_weights, "rexnet_100", ".bin")),
    _row("timm-densenet", "model_best.pth.tar, module.", partial(_weights, "densenet121", ".pth.tar", wrap="train")),
    _row("timm-ema", ".pth with state_dict_ema, test_vit", partial(_weights, "test_vit", ".pth", wrap="ema")),
    _row("timm-regnety", "dynamo .onnx, config.json", partial(_graph, "regnety_002", ".onnx", dynamo=True)),
    _row("timm-ghostnetv2", "legacy .onnx, config.json", partial(_graph, "ghostnetv2_100", ".onnx")),
    _row("timm-xcit", "legacy .onnx, config.json", partial(_graph, "xcit_nano_12_p16_224", ".onnx")),
    _row("timm-tiny_vit", ".ts", partial(_graph, "tiny_vit_5m_224", ".ts")),
    _row("timm-hrnet", ".pt2", partial(_graph, "hrnet_w18_small", ".pt2")),
    _row("timm-mambaout", "torch.save(model)", _module),
]
