"""Small network of OpenVINO, as text. Owns: that text and its weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np

# x [?, 3, 8, 8] times a constant [3, 1, 1], then Swish.
NETWORK = """<?xml version="1.0"?>
<net name="small" version="11"><layers>
<layer id="0" name="x" type="Parameter" version="opset1"><data shape="?,3,8,8" element_type="f32"/>
 <output><port id="0" precision="FP32"><dim>-1</dim><dim>3</dim><dim>8</dim><dim>8</dim></port></output></layer>
<layer id="1" name="w" type="Const" version="opset1"><data element_type="f32" shape="3, 1, 1" offset="0" size="12"/>
 <output><port id="0" precision="FP32"><dim>3</dim><dim>1</dim><dim>1</dim></port></output></layer>
<layer id="2" name="w" type="Multiply" version="opset1"><data auto_broadcast="numpy"/>
 <input><port id="0" precision="FP32"><dim>-1</dim><dim>3</dim><dim>8</dim><dim>8</dim></port>
  <port id="1" precision="FP32"><dim>3</dim><dim>1</dim><dim>1</dim></port></input>
 <output><port id="2" precision="FP32"><dim>-1</dim><dim>3</dim><dim>8</dim><dim>8</dim></port></output></layer>
<layer id="3" name="act" type="Swish" version="opset4">
 <input><port id="0" precision="FP32"><dim>-1</dim><dim>3</dim><dim>8</dim><dim>8</dim></port></input>
 <output><port id="1" precision="FP32"><dim>-1</dim><dim>3</dim><dim>8</dim><dim>8</dim></port></output></layer>
<layer id="4" name="out" type="Result" version="opset1">
 <input><port id="0" precision="FP32"><dim>-1</dim><dim>3</dim><dim>8</dim><dim>8</dim></port></input></layer>
</layers><edges>
<edge from-layer="0" from-port="0" to-layer="2" to-port="0"/>
<edge from-layer="1" from-port="0" to-layer="2" to-port="1"/>
<edge from-layer="2" from-port="2" to-layer="3" to-port="0"/>
<edge from-layer="3" from-port="1" to-layer="4" to-port="0"/>
</edges></net>"""
WEIGHTS = np.array([1, -2, 0.5], np.float32)


def written(folder: Path, text: str, weights: bytes = WEIGHTS.tobytes()) -> Path:
    (folder / "best.bin").write_bytes(weights)
    (folder / "best.xml").write_text(text)
    return folder / "best.xml"
