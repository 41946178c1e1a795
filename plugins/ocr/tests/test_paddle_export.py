"""`inference.yml`, in the form in which PaddleX 3 writes it."""

from __future__ import annotations

import json
from urllib.parse import parse_qs

import numpy as np
import pytest
from anychip_ocr.cascade import Ppocr, sidecar_beside
from anychip_ocr.direction import TextDirection

from models.contract.errors import ModelError
from models.contract.resize import Whole
from models.contract.task_adapter import AdaptedFile

DETECTION = """\
Global:
  model_name: PP-OCRv5_mobile_det
Hpi:
  backend_configs:
    paddle_infer:
      trt_dynamic_shapes: &id001
        x:
        - - 1
          - 3
          - 32
          - 32
    tensorrt:
      dynamic_shapes: *id001
PreProcess:
  transform_ops:
  - DecodeImage:
      channel_first: false
      img_mode: BGR
  - DetLabelEncode: null
  - DetResizeForTest:
      resize_long: 960
  - NormalizeImage:
      mean:
      - 0.485
      - 0.456
      - 0.406
      order: hwc
      scale: 1./255.
      std:
      - 0.229
      - 0.224
      - 0.225
  - ToCHWImage: null
  - KeepKeys:
      keep_keys:
      - image
      - shape
PostProcess:
  name: DBPostProcess
  thresh: 0.3
  box_thresh: 0.6
  max_candidates: 1000
  unclip_ratio: 1.5
"""
RECOGNITION = """\
Global:
  model_name: PP-OCRv5_mobile_rec
PreProcess:
  transform_ops:
  - DecodeImage:
      channel_first: false
      img_mode: BGR
  - MultiLabelEncode:
      gtc_encode: NRTRLabelEncode
  - RecResizeImg:
      image_shape:
      - 3
      - 48
      - 320
PostProcess:
  name: CTCLabelDecode
  character_dict:
  - ''''
  - \\
  - 1
  - true
  - ~
  - \u3000
  - 疗
"""
DIRECTION = """\
Global:
  model_name: PP-LCNet_x1_0_textline_ori
PreProcess:
  transform_ops:
  - ResizeImage:
      size:
      - 160
      - 80
  - NormalizeImage:
      channel_num: 3
      mean: [0.485, 0.456, 0.406]
      order: ''
      scale: 0.00392156862745098
      std: [0.229, 0.224, 0.225]
  - ToCHWImage: null
PostProcess:
  Topk:
    topk: 1
    label_list:
    - 0_degree
    - 180_degree
"""


def exported(folder, **networks):
    """Folders as PaddleOCR has them, with files of nothing for networks."""
    for name, text in networks.items():
        (folder / name).mkdir()
        (folder / name / "inference.onnx").touch()
        (folder / name / "inference.yml").write_text(text, encoding="utf-8")
    return folder


def test_sidecars_are_what_the_exports_say(tmp_path):
    names = {"PP-OCRv5_det": DETECTION, "PP-OCRv5_rec": RECOGNITION, "textline_ori": DIRECTION}
    cascade = Ppocr("ocr", f"{exported(tmp_path, **names)}?sizes=736&widths=320|640")
    written = [parse_qs(each.partition("?")[2]) for each in cascade.written]
    found = [{name: json.loads(value) for name, [value] in each.items() if name != "task"} for each in written]
    imagenet = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
    options = {"pixel": 0.3, "box": 0.6, "unclip": 1.5, "most": 1000, "dilate": False}
    characters = {"characters": ["'", "\\", "1", "true", "~", "\u3000", "疗"]}
    half = {"mean": [0.5] * 3, "std": [0.5] * 3}
    assert found == [
        {"size": [736, 736], **imagenet, "options": options},
        {"size": [80, 160], **imagenet, "options": {"stretch": True}},
        {"size": [48, 320], **half, "options": characters},
        {"size": [48, 640], **half, "options": characters},
    ]


@pytest.mark.parametrize(
    "text",
    [
        "PreProcess: " + "[" * 300_000,
        "- " * 100_000 + "x",
        "\n".join(["a0: &a0 [x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 50)}]" for n in range(1, 5))]),
        "\n".join(["a0: &a0 [x]", *(f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 50))]),
        "PreProcess: &a [*a]",
    ],
    ids=["deep", "dashes", "many by aliases", "deep by aliases", "endless"],
)
def test_what_would_end_the_process_or_fill_its_memory_is_refused(tmp_path, text):
    (tmp_path / "inference.yml").write_text(text)
    with pytest.raises(
        ModelError, match=r"is not understood: ValueError: (it is deeper|it has more|what a stands for)"
    ):
        sidecar_beside(tmp_path / "inference.onnx")


def test_a_file_from_elsewhere_is_not_read(tmp_path):
    (tmp_path / "ocr").mkdir()
    (tmp_path / "other.yml").write_text("PostProcess: {Topk: 1}\nPreProcess: {transform_ops: []}")
    (tmp_path / "ocr" / "inference.yml").symlink_to("../other.yml")
    with pytest.raises(ModelError, match="link out of its folder"):
        sidecar_beside(tmp_path / "ocr" / "inference.onnx")


def test_classifiers_of_paddlex_see_all_of_their_input_in_rgb():
    line = np.zeros((24, 50, 3), np.uint8)
    line[..., 0] = 200
    out = np.zeros((80, 160, 3), np.uint8)
    options = json.dumps({"stretch": True})
    TextDirection(AdaptedFile(Whole((80, 160)), (), ((1, 2),), options)).place(line, out, 50, 24)
    assert (out == (200, 0, 0)).all()
