"""Exporter that writes networks with Ultralytics and predicts with it from these files: `FOLDER IMAGES TAG…`.

It runs in its own process. AGPL: only tests run it. Networks are untrained but alive: BatchNorm is measured on images,
the heads are scaled so that some anchors pass the threshold and boxes, masks, key points and angles differ.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("YOLO_OFFLINE", "true")
warnings.filterwarnings("ignore")

import numpy as np  # noqa: E402
import torch  # noqa: E402

SIZE = int(os.environ.get("ANYCHIP_TEST_SIDE", "320"))
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "v8-detect": ("yolov8n.yaml", {}),
    "v8-dynamic": ("yolov8n.yaml", {"dynamic": True}),
    "v8-nms": ("yolov8n.yaml", {"nms": True}),
    "v8-torchscript": ("yolov8n.yaml", {"format": "torchscript"}),
    "v8-openvino": ("yolov8n.yaml", {"format": "openvino"}),
    "v8-openvino-half": ("yolov8n.yaml", {"format": "openvino", "half": True}),
    "v5u-detect": ("yolov5n.yaml", {}),
    "v9-detect": ("yolov9t.yaml", {}),
    "v10-detect": ("yolov10n.yaml", {"nms": False}),
    "11-detect": ("yolo11n.yaml", {}),
    "12-detect": ("yolo12n.yaml", {}),
    "26-detect": ("yolo26n.yaml", {}),
    "26-end-to-end": ("yolo26n.yaml", {"nms": False}),
    "rtdetr": ("rtdetr-l.yaml", {}),
    "v8-segment": ("yolov8n-seg.yaml", {}),
    "v8-pose": ("yolov8n-pose.yaml", {}),
    "v8-obb": ("yolov8n-obb.yaml", {}),
    "v8-classify": ("yolov8n-cls.yaml", {}),
    "11-segment": ("yolo11n-seg.yaml", {}),
    "11-pose": ("yolo11n-pose.yaml", {}),
    "11-obb": ("yolo11n-obb.yaml", {}),
    "11-classify": ("yolo11n-cls.yaml", {}),
    "26-openvino": ("yolo26n-seg.yaml", {"format": "openvino", "nms": False}),
    "26-pose": ("yolo26n-pose.yaml", {"nms": False}),
    "26-segment": ("yolo26n-seg.yaml", {"nms": False}),
    "26-obb": ("yolo26n-obb.yaml", {"nms": False}),
}


def enliven(network: Any, images: torch.Tensor) -> None:
    torch.manual_seed(1)
    seen: dict[str, torch.Tensor] = {}
    hooks: list[Any] = []
    head = network.model[-1]
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.momentum = 1.0
        network.train()
        for branch, module in head.named_modules():
            if isinstance(module, torch.nn.Conv2d | torch.nn.Linear):
                hook = module.register_forward_hook(
                    lambda _, __, output, branch=branch: seen.__setitem__(branch, output.detach())
                )
                hooks.append(hook)
        network(images)  # Sets BatchNorm's statistics.
        network.eval()
        network(images)
        for hook in hooks:
            hook.remove()
        for name, module in head.named_modules():
            kind = name.removeprefix("one2one_").split(".")[0]
            if name not in seen:
                continue
            if type(head).__name__ == "RTDETRDecoder":
                if kind == "dec_score_head":
                    _enliven_scores(module, seen[name])
                continue
            if isinstance(module, torch.nn.Linear):
                module.weight.mul_(4 / seen[name].std())
                continue
            last = len(name.split(".")) == 3 and name.split(".")[-1] == "2"
            if not last or kind not in ("cv2", "cv3", "cv4"):
                continue
            output = seen[name]
            bias = module.bias.view(1, -1, 1, 1)
            gain = 1 / (output - bias).std()
            module.weight.mul_(gain)
            if kind == "cv3":
                # About one anchor in a hundred of the middle image passes the threshold.
                best = ((output - bias) * gain).amax(dim=1).flatten(1).quantile(0.99, dim=1).median()
                module.bias.copy_(np.log(0.25 / 0.75) - best.repeat(len(module.bias)))
            elif kind == "cv2" and len(module.bias) == 4:
                module.bias.fill_(3.0)
            else:
                module.bias.copy_(torch.randn(len(module.bias)) * 0.5)
    network.eval()


def _enliven_scores(layer: Any, output: torch.Tensor) -> None:
    """Let one query in ten pass the threshold. `output`: answer of the layer, [n, queries, classes]."""
    gain = 1 / (output - layer.bias).std()
    best = ((output - layer.bias) * gain).amax(dim=2).quantile(0.9, dim=1).median()
    layer.weight.mul_(gain)
    layer.bias.copy_(np.log(0.25 / 0.75) - best.repeat(len(layer.bias)))


def described(result: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if result.probs is not None:
        return {"probabilities": result.probs.data.tolist()}
    if result.obb is not None:
        return {
            "corners": result.obb.xyxyxyxy.tolist(),
            "turned": result.obb.xywhr.tolist(),
            "scores": result.obb.conf.tolist(),
            "classes": result.obb.cls.tolist(),
        }
    found["boxes"] = result.boxes.xyxy.tolist()
    found["scores"] = result.boxes.conf.tolist()
    found["classes"] = result.boxes.cls.tolist()
    if result.keypoints is not None:
        found["keypoints"] = result.keypoints.data.tolist()
    return found


def use_float32() -> None:
    """Let OpenVINO compute in float32, even if the processor has bfloat16."""
    core = importlib.import_module("openvino").Core
    compile_model = core.compile_model

    def compiled(self: Any, model: Any, device_name: Any = None, config: Any = None, **more: Any) -> Any:
        return compile_model(self, model, device_name, {**(config or {}), "INFERENCE_PRECISION_HINT": "f32"}, **more)

    core.compile_model = compiled


def main(folder: Path, images: Path, tags: list[str]) -> None:
    """Write the export, `TAG.expected.json` (Ultralytics' predictions) and `TAG.masks.npz` (its masks) for each tag."""
    from PIL import Image

    ultralytics: Any = importlib.import_module("ultralytics")
    files = sorted(images.glob("*.jpg"))
    batch = []
    for file in files[:8]:
        pixels = np.asarray(Image.open(file).convert("RGB").resize((SIZE, SIZE)))
        batch.append(torch.from_numpy(pixels.copy()).permute(2, 0, 1).float() / 255)
    os.chdir(folder)
    for tag in tags:
        yaml, options = NETWORKS[tag]
        made = ultralytics.RTDETR if "rtdetr" in yaml else ultralytics.YOLO
        torch.manual_seed(0)
        model = made(yaml)
        enliven(model.model, torch.stack(batch))
        model.save(f"{tag}.pt")
        model = made(f"{tag}.pt")
        if options.get("format") == "openvino":
            use_float32()
        written = model.export(**{"format": "onnx", "imgsz": SIZE, "verbose": False, **options})
        model = made(written) if made is ultralytics.RTDETR else made(written, task=model.task)
        expected: dict[str, Any] = {}
        masks: dict[str, Any] = {}
        for file in files:
            more = {"retina_masks": True} if model.task == "segment" else {}
            [result] = model.predict(str(file), imgsz=SIZE, conf=0.25, rect=False, verbose=False, **more)
            expected[file.name] = described(result)
            if result.masks is not None:
                masks[file.name] = np.packbits(result.masks.data.numpy() > 0.5, axis=-1)
        Path(f"{tag}.expected.json").write_text(json.dumps(expected))
        np.savez_compressed(f"{tag}.masks.npz", **masks)
        print(tag, sum(len(each.get("scores", [0])) for each in expected.values()), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
