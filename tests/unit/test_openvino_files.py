"""Files of OpenVINO: what is read, what is refused, and that a damaged one costs one sentence."""

from __future__ import annotations

import contextlib
import re
from importlib.metadata import EntryPoints
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anychip_base.extras import NOT_INSTALLED
from models.contract.errors import WeightsError
from models.exports.metadata import description, yaml_metadata
from models.onnx import graph as graphs
from models.onnx.graph import load_onnx
from tests.support.openvino_files import NETWORK, WEIGHTS, written


def test_a_network_is_read_and_computed(tmp_path: Path) -> None:
    graph, file = load_onnx(written(tmp_path, NETWORK))
    assert file.inputs[0].shape == (None, 3, 8, 8)
    x = torch.randn(2, 3, 8, 8)
    [found] = graph(x)
    torch.testing.assert_close(found, torch.nn.functional.silu(x * torch.from_numpy(WEIGHTS).reshape(3, 1, 1)))


ADAPTIVE = """<layer id="3" name="act" type="AdaptiveAvgPool" version="opset8">
 <input><port id="0"><dim>-1</dim><dim>3</dim><dim>8</dim><dim>8</dim></port><port id="1"><dim>2</dim></port></input>
 <output><port id="2"><dim>-1</dim></port></output></layer>
<layer id="5" name="sides" type="Const" version="opset1"><data element_type="i64" shape="2" offset="16" size="16"/>
 <output><port id="0" precision="I64"><dim>2</dim></port></output></layer>
<layer id="4" """


def pooled(sides: tuple[int, int]) -> tuple[str, bytes]:
    """Put AdaptiveAvgPool into Swish's place in the network; return it and its weights."""
    before, _, after = NETWORK.partition('<layer id="3"')
    text = before + ADAPTIVE + after.partition('<layer id="4" ')[2]
    edge = '<edge from-layer="5" from-port="0" to-layer="3" to-port="1"/>\n</edges>'
    text = text.replace("</edges>", edge).replace('from-layer="3" from-port="1"', 'from-layer="3" from-port="2"')
    return text, WEIGHTS.tobytes() + bytes(4) + np.array(sides, np.int64).tobytes()


@pytest.mark.parametrize("sides", [(1, 1), (2, 4), (8, 8)])
def test_an_adaptive_pool_is_computed_where_its_windows_are_alike(tmp_path: Path, sides: tuple[int, int]) -> None:
    graph, _ = load_onnx(written(tmp_path, *pooled(sides)))
    x = torch.randn(2, 3, 8, 8)
    [found] = graph(x)
    scaled = x * torch.from_numpy(WEIGHTS).reshape(3, 1, 1)
    torch.testing.assert_close(found, torch.nn.functional.adaptive_avg_pool2d(scaled, sides))


def test_an_adaptive_pool_of_other_windows_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"AdaptiveAvgPool.*3"):
        load_onnx(written(tmp_path, *pooled((3, 2))))


def test_without_the_package_that_reads_it_the_error_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs.reader_of.cache_clear()
    monkeypatch.setattr(graphs, "entry_points", lambda **_: EntryPoints())
    with pytest.raises(WeightsError, match=re.escape(NOT_INSTALLED)):
        load_onnx(written(tmp_path, NETWORK))


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('type="Swish"', 'type="Dance"', "uses operators that are not known here: Dance"),
        ('offset="0"', 'offset="4"', "weights that are not in best.bin"),
        ('size="12"', 'size="8"', "weights that are not in best.bin"),
        ('offset="0"', 'offset="-4"', "weights that are not in best.bin"),
        ('shape="3, 1, 1"', 'shape="3, 1, 1000000000000"', "weights that are not in best.bin"),
        ('element_type="f32" shape="3', 'element_type="nf4" shape="3', "weights of type nf4"),
        ('version="11"', 'version="7"', "version 7"),
        ("<net ", '<!DOCTYPE net [<!ENTITY a "b">]><net ', "declares"),
        ("</layers>", "", "damaged"),
        ('to-layer="3" to-port="0"', 'to-layer="3" to-port="5"', "damaged"),
        ('from-layer="2" from-port="2"', 'from-layer="3" from-port="1"', "never computed"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, old: str, new: str, sentence: str) -> None:
    assert old in NETWORK
    with pytest.raises(WeightsError, match=sentence):
        load_onnx(written(tmp_path, NETWORK.replace(old, new, 1)))


def test_declarations_are_refused_in_every_encoding(tmp_path: Path) -> None:
    file = tmp_path / "best.xml"
    file.write_bytes('<?xml version="1.0" encoding="utf-16"?><!DOCTYPE net [<!ENTITY a "b">]><net/>'.encode("utf-16"))
    with pytest.raises(WeightsError, match="declares what belongs in no network"):
        load_onnx(file)


def test_without_its_weights_it_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path, NETWORK)
    (tmp_path / "best.bin").unlink()
    with pytest.raises(WeightsError, match=r"not in best\.bin"):
        load_onnx(file)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_damaged_file_is_refused_in_a_sentence_or_read(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    text = bytearray(NETWORK.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(text) - 1))
        text[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=2))
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "best.bin").write_bytes(WEIGHTS.tobytes())
    (folder / "best.xml").write_bytes(text)
    with contextlib.suppress(WeightsError):
        load_onnx(folder / "best.xml")


def test_metadata_is_read_as_yaml(tmp_path: Path) -> None:
    (tmp_path / "metadata.yaml").write_text(
        "description: 'Ultralytics YOLO26n '\nversion: 8.4.190\nstride: 32\ntask: pose\nimgsz:\n- 64\n- 96\n"
        "names:\n  0: person\n  1: 'n: o'\nkpt_shape:\n- 17\n- 3\nargs:\n  nms: false\nend2end: true\n"
    )
    about = description(yaml_metadata(tmp_path / "best.xml"), None, None)
    assert about is not None
    assert (about.task, about.size, about.labels, about.keypoints) == ("pose", (64, 96), ("person", "n: o"), (17, 3))
    assert about.end_to_end
    (tmp_path / "metadata.yaml").write_text("names: [")
    with pytest.raises(ValueError, match=r"metadata\.yaml beside it cannot be read"):
        yaml_metadata(tmp_path / "best.xml")
    (tmp_path / "metadata.yaml").unlink()
    (tmp_path / "best.yaml").write_text("stride: 32\nnames: [a, b]\n")
    yolov5 = description(yaml_metadata(tmp_path / "best.xml"), None, None)
    assert yolov5 is not None
    assert (yolov5.layout, yolov5.labels) == ("yolov5", ("a", "b"))
