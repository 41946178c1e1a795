"""What identifies an exported network for caches: all its files, and what is stated beside them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.precision.described import described, weights_key
from models.contract.errors import WeightsError
from models.contract.resize import Whole
from models.contract.task_adapter import AdaptedFile
from models.exports.answers import Export
from models.exports.files import names_beside, names_within
from models.exports.images import ExportedImages
from models.exports.layouts import Interpretation
from models.weights.opened import looked_at

onnx = pytest.importorskip("onnx")

F, B = onnx.TensorProto.FLOAT, onnx.TensorProto.BOOL
EXPORT = Export(Interpretation("boxes", "yolov8", 2, 0), (1, 8))


def written_openvino(folder: Path, text: str, weights: tuple[float, ...] = (1, -2, 0.5)) -> Path:
    (folder / "best.bin").write_bytes(np.array(weights, np.float32).tobytes())
    (folder / "best.xml").write_text(text)
    return folder / "best.xml"


def exported(file: Path) -> ExportedImages:
    known = AdaptedFile(Whole((64, 64)), ("a", "b"))
    about = ("x", file.suffix[1:], known.labels, file.name, str(file), (64, 64, 3), "detect", known)
    files = looked_at(file, names_beside(file, is_graph=True), names_within)
    return ExportedImages(*about, export=EXPORT, files=files)


def key(file: Path) -> str:
    return weights_key(exported(file))


def saved(path: Path, nodes: list[Any], tensors: list[Any]) -> Path:
    values = [onnx.helper.make_tensor_value_info(name, F, [4]) for name in ("x", "y")]
    graph = onnx.helper.make_graph(nodes, "g", values[:1], values[1:], tensors)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)])
    path.write_bytes(model.SerializeToString())
    return path


def outside(location: str) -> Any:
    tensor = onnx.TensorProto(name="w", dims=[4], data_type=F, data_location=onnx.TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    tensor.external_data.add(key="offset", value="0")
    return tensor


def branches(tensor: Any) -> list[Any]:
    result = onnx.helper.make_tensor_value_info("z", F, [4])
    branch = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["w"], ["z"])], "b", [], [result], [tensor])
    truth = onnx.helper.make_node("Constant", [], ["c"], value=onnx.helper.make_tensor("t", B, [], [True]))
    return [truth, onnx.helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)]


def test_the_figures_of_the_comparison_are_no_part_of_what_a_model_is(tmp_path: Path) -> None:
    """They are others after each training: a load was refused, as if the file wanted other inputs."""
    model = exported(written_openvino(tmp_path, "<net/>"))
    trained = replace(model, witness="compared")
    assert trained == model
    assert described(trained) == described(model)


def test_networks_of_the_same_weights_are_two(tmp_path: Path) -> None:
    """They met in the folders of compilers that keep what they make by the weights where there is no key."""
    weights = [onnx.numpy_helper.from_array(np.ones(4, np.float32), "w")]
    files = [
        saved(tmp_path / f"{operator}.onnx", [onnx.helper.make_node(operator, ["x", "w"], ["y"])], weights)
        for operator in ("Add", "Mul")
    ]
    keys = [key(file) for file in files]
    assert all(keys)
    assert keys[0] != keys[1]
    again = saved(tmp_path / "again.onnx", [onnx.helper.make_node("Add", ["x", "w"], ["y"])], weights)
    assert key(again) == keys[0], "its name is nothing of it"


@pytest.mark.parametrize("place", ["graph", "attribute", "subgraph"])
def test_weights_in_another_file_are_part_of_it(tmp_path: Path, place: str) -> None:
    weights = tmp_path / "w.data"
    weights.write_bytes(np.ones(4, np.float32).tobytes())
    add = onnx.helper.make_node("Add", ["x", "w"], ["y"])
    tensor = outside("w.data")
    if place == "graph":
        file = saved(tmp_path / "best.onnx", [add], [tensor])
    elif place == "attribute":
        file = saved(tmp_path / "best.onnx", [onnx.helper.make_node("Constant", [], ["w"], value=tensor), add], [])
    else:
        file = saved(tmp_path / "best.onnx", branches(tensor), [])
    assert names_within(file) == ["w.data"]
    before = key(file)
    weights.write_bytes(np.zeros(8, np.float32).tobytes())
    assert key(file) != before
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(WeightsError, match="damaged, cut short, or not an ONNX file"):
        names_within(file)


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS"), (b"<!DOCTYPE html><p>", "a page of a")],
)
def test_what_was_saved_in_place_of_a_file_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "best.onnx").write_bytes(content)
    with pytest.raises(WeightsError, match=f"^best.onnx is {said}"):
        looked_at(tmp_path / "best.onnx")


def test_a_network_of_openvino_has_its_weights_beside_it(tmp_path: Path) -> None:
    file = written_openvino(tmp_path, "<net/>")
    before = key(file)
    written_openvino(tmp_path, "<net/>", (2, -2, 0.5))
    assert key(file) != before
    changed = key(file)
    written_openvino(tmp_path, "<net></net>", (2, -2, 0.5))
    assert key(file) != changed


@pytest.mark.parametrize("suffix", [".onnx", ".xml", ".torchscript"])
def test_what_is_stated_beside_a_file_is_part_of_its_network(tmp_path: Path, suffix: str) -> None:
    """Mean, deviation and layout are compiled with it: what was kept for others is not what is served now."""
    file = tmp_path / f"best{suffix}"
    if suffix == ".onnx":
        saved(file, [onnx.helper.make_node("Identity", ["x"], ["y"])], [])
    elif suffix == ".xml":
        written_openvino(tmp_path, "<net/>")
    else:
        file.write_bytes(b"a program")
    model = exported(file)
    models = [model, replace(model, mean=(0.5, 0.5, 0.5)), replace(model, export=replace(EXPORT, freed=True))]
    models.append(replace(model, export=replace(EXPORT, how=replace(EXPORT.how, layout="yolov5"))))
    assert len({weights_key(each) for each in models}) == len(models)
    assert weights_key(model) == weights_key(exported(file))
