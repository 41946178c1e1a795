"""Writes files as the libraries of other people write them, and what these libraries answer: `PART FOLDER`.

A process of its own, as it imports those libraries. `FOLDER/answers.json` has the answers by the file's name. All
networks are small; those of Ultralytics and torchvision carry the sample weights, so that what they find is clear.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ["YOLO_OFFLINE"] = "true"
warnings.filterwarnings("ignore")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from PIL import Image  # noqa: E402
from torch import nn  # noqa: E402

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "models" / "sample"
WEIGHTS = ROOT / "plugins" / "samples" / "anychip_samples"
SIZE = 320
"""The side of Ultralytics' inputs."""
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CLEAR = 0.2
"""By how much the first class of a classifier leads at least: engines compute in other precisions."""


def write_ultralytics(folder: Path) -> dict[str, Any]:
    """`best.pt` and `best.onnx`: YOLOv8n as Ultralytics saves and exports it (`ultralytics.YOLO`)."""
    ultralytics: Any = importlib.import_module("ultralytics")
    safetensors: Any = importlib.import_module("safetensors")
    with safetensors.safe_open(WEIGHTS / "yolov8n.safetensors", "pt") as file:
        state = {key: file.get_tensor(key).float() for key in file.keys()}  # noqa: SIM118
        labels = json.loads(file.metadata()["labels"])
    tasks: Any = importlib.import_module("ultralytics.nn.tasks")
    made = ultralytics.YOLO("yolov8n.yaml", verbose=False)
    made.model = tasks.DetectionModel("yolov8n.yaml", nc=len(labels), verbose=False)
    made.model.load_state_dict(state)
    # A word of our own: labels that no file of ours has.
    made.model.names = {number: f"a {label}" for number, label in enumerate(labels)}
    made.model.args = made.overrides = {**made.overrides, "imgsz": SIZE}
    made.ckpt = {"train_args": {"imgsz": SIZE}}
    os.chdir(folder)
    made.save("best.pt")
    # Three objects of it, in the size that the network was trained on.
    Image.open(SAMPLE / "images" / "detect_1.jpg").crop((0, 160, SIZE, 160 + SIZE)).save("street.jpg", quality=95)
    answers: dict[str, Any] = {}
    written = ultralytics.YOLO("best.pt").export(format="onnx", imgsz=SIZE, verbose=False)
    for name in ("best.pt", written):
        [found] = ultralytics.YOLO(name, task="detect").predict(
            "street.jpg", imgsz=SIZE, conf=0.25, rect=False, verbose=False
        )
        boxes = sorted(found.boxes, key=lambda box: -float(box.conf))
        answers[Path(name).name] = [
            {"label": found.names[int(box.cls)], "score": float(box.conf), "box": box.xyxy[0].tolist()} for box in boxes
        ]
    return answers


def write_libraries(folder: Path) -> dict[str, Any]:
    """Folders of timm and Hugging Face, a torchvision state dict, and networks of one's own as PyTorch saves them."""
    answers: dict[str, Any] = {}
    blocks = np.random.default_rng(0).integers(0, 256, (8, 8, 3)).astype(np.uint8)
    picture = Image.fromarray(blocks).resize((64, 64), Image.Resampling.BICUBIC)
    picture.save(folder / "small.png")
    picture.resize((4000, 3000)).save(folder / "large.jpg")
    _write_own(folder, picture, answers)
    _write_questions(folder, answers)
    _write_torchvision(folder, answers)
    _write_timm(folder, answers)
    _write_transformers(folder, answers)
    return answers


def _scores(logits: torch.Tensor, labels: list[str]) -> list[dict[str, Any]]:
    scores, order = logits.detach()[0].float().softmax(0).sort(descending=True)
    assert scores[0] - scores[1] > CLEAR, scores
    return [
        {"label": labels[number], "score": score} for score, number in zip(scores.tolist(), order.tolist(), strict=True)
    ]


def _write_own(folder: Path, picture: Image.Image, answers: dict[str, Any]) -> None:
    torch.manual_seed(3)
    labels = ["cat", "dog", "fox"]
    network: nn.Module = nn.Sequential(
        nn.Conv2d(3, 8, 5, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 3)
    ).eval()
    with torch.no_grad():
        network.get_parameter("4.weight").mul_(20)
    pixels = (torch.from_numpy(np.array(picture)).permute(2, 0, 1) / 255 - torch.tensor(MEAN)[:, None, None]) / (
        torch.tensor(STD)[:, None, None]
    )
    answer = _scores(network(pixels[None]), labels)
    example = torch.rand(2, 3, 64, 64)
    torch.onnx.export(network, (example[:1],), str(folder / "mine.onnx"), dynamo=False)
    batch = {0: torch.export.Dim("batch", min=1, max=64)}
    torch.export.save(torch.export.export(network, (example,), dynamic_shapes=(batch,)), folder / "graph.pt2")
    torch.jit.save(torch.jit.trace(network, example), str(folder / "script.ts"))
    for name in ("mine.onnx", "graph.pt2", "script.ts"):
        about: dict[str, Any] = {"task": "classify", "labels": labels}
        if not name.endswith(".onnx"):
            about["size"] = 64
        (folder / name).with_suffix(".json").write_text(json.dumps(about))
        answers[name] = answer


def _write_questions(folder: Path, answers: dict[str, Any]) -> None:
    """Write a network of tensors: words in, one score of each word out."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 1), nn.Flatten()).eval()
    words = torch.randint(0, 50, (2, 12))
    torch.onnx.export(
        network, (words,), str(folder / "bert.onnx"), dynamo=False, input_names=["input_ids"], output_names=["scores"],
        dynamic_axes={"input_ids": {0: "batch"}, "scores": {0: "batch"}},
    )  # fmt: skip
    (folder / "bert.tensors.json").write_text(json.dumps({"inputs": {"input_ids": {"range": [0, 49]}}}))
    answers["bert.onnx"] = {"input_ids": words.tolist(), "scores": network(words).detach().flatten().tolist()}


def _write_torchvision(folder: Path, answers: dict[str, Any]) -> None:
    """`dogs.safetensors`: the state dict of `torchvision.models.resnet50`, with the labels in a file beside it."""
    from safetensors import torch as safetensors
    from torchvision.models import resnet50
    from torchvision.transforms import v2

    state = {key: tensor.float() for key, tensor in safetensors.load_file(WEIGHTS / "resnet50.safetensors").items()}
    network = resnet50(num_classes=len(state["fc.bias"])).eval()
    network.load_state_dict(state)
    safetensors.save_file(network.half().state_dict(), folder / "dogs.safetensors")
    labels = [f"dog {number}" for number in range(len(state["fc.bias"]))]
    (folder / "dogs.labels.txt").write_text("\n".join(labels) + "\n")
    shutil.copy(SAMPLE / "images" / "classify_heart.jpg", folder / "heart.jpg")
    seen = v2.Compose(
        [v2.Resize(232), v2.CenterCrop(224), v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True),
         v2.Normalize(MEAN, STD)]
    )  # fmt: skip
    with torch.inference_mode():
        answers["dogs.safetensors"] = _scores(network.float()(seen(Image.open(folder / "heart.jpg"))[None]), labels)


def _write_timm(folder: Path, answers: dict[str, Any]) -> None:
    """`convnext`: a folder of `timm.models.save_for_hf`, answered by `timm.data.create_transform`."""
    import timm

    from tests.support.library_folders import LABELS, timm_folder

    network = timm_folder("test_convnext", folder / "convnext")
    transform: Any = timm.data.create_transform(**timm.data.resolve_data_config({}, model=network))
    with torch.inference_mode():
        seen = transform(Image.open(folder / "small.png").convert("RGB"))[None]
        answers["convnext"] = _scores(network(seen), [*LABELS.values()])


def _write_transformers(folder: Path, answers: dict[str, Any]) -> None:
    """`vit`: what `save_pretrained` of transformers writes, answered by its own processor and network."""
    from tests.support.library_folders import LABELS, vit_folder

    network, processor = vit_folder(folder / "vit")
    with torch.inference_mode():
        given = processor(Image.open(folder / "small.png").convert("RGB"), return_tensors="pt")
        answers["vit"] = _scores(network(**given).logits, [*LABELS.values()])


if __name__ == "__main__":
    target = Path(sys.argv[2])
    written = {"ultralytics": write_ultralytics, "libraries": write_libraries}[sys.argv[1]](target)
    (target / "answers.json").write_text(json.dumps(written, indent=1))
