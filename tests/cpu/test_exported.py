"""Networks from files that carry their graph: read, refused, and answering as PyTorch does, on every engine."""

from __future__ import annotations

import pickle
import zipfile
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from app.precision.described import weights_key
from app.precision.gate import compile_options
from app.worker.load import unbuilt
from backends import EngineRefusedError
from backends.vendors.cpu import CpuBackend
from models import (
    DATATYPES,
    ExportedModel,
    InputError,
    TensorOptions,
    TensorSpec,
    WeightsError,
    WeightsNotFoundError,
    open_model,
    parse_spec,
)
from models.contract.tensors import item_bytes
from models.exports.networks import load_graph
from models.exports.trial import tried
from tests.support.exported_files import INPUTS, LONGEST, OUTPUTS, WORDS, example, exported, frozen, question_answering

SUFFIXES = (".onnx", ".pt2", ".ts")
FORMS = {".onnx": "onnx", ".pt2": "program", ".ts": "script"}
NOTHING: dict[str, Any] = {"inputs": {}, "outputs": [], "dimensions": {}, "batched": None}
LADDER = (1, 2, 4)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Open the network from each kind of file, as `--models qa=…` does."""
    opened = {}
    for suffix in SUFFIXES:
        file = exported(tmp_path_factory.mktemp("files"), suffix)
        opened[suffix] = open_model(parse_spec(f"qa{suffix[1:]}={file}"), file.parent)
    return opened


def arrays(count=3, length=LONGEST, seed=0):
    return {name: tensor.numpy() for name, tensor in zip(INPUTS, example(count, length, seed), strict=True)}


def packed(model, inputs, size):
    items = np.zeros((size, *model.input_shape), np.uint8)
    for row in range(len(next(iter(inputs.values())))):
        model.pack(inputs, row, items[row])
    return items


def described(file, **declared):
    return tried(str(file), FORMS[file.suffix], {**NOTHING, **declared})


# What a file says


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_names_types_and_shapes_are_those_of_the_file(models, suffix):
    model = models[suffix]
    assert isinstance(model, ExportedModel)
    assert [(each.name, each.datatype, each.wire_shape(True)) for each in model.inputs] == [
        (name, "INT64", (-1, -1)) for name in INPUTS
    ]
    assert [(each.name, each.datatype, each.wire_shape(True)) for each in model.results] == [
        (name, "FP32", (-1, -1)) for name in OUTPUTS
    ]
    assert model.batched
    assert model.batch_sizes((1, 8, 128)) == ((1, 8) if suffix == ".pt2" else (1, 8, 128))
    assert model.architecture == suffix[1:]
    assert model.weights == f"qa{suffix}"
    assert pickle.loads(pickle.dumps(model)) == model  # It travels to workers.


def test_a_length_that_is_left_open_is_asked_for(tmp_path):
    with pytest.raises(WeightsError, match=r"axis of input_ids open: state it in qa\.tensors\.json, .*sequence"):
        described(exported(tmp_path, ".onnx", beside=False))


def test_what_contradicts_the_file_is_refused(tmp_path):
    file = exported(tmp_path, ".onnx", beside=False)
    for declared, sentence in (
        ({"inputs": {"words": {"datatype": "INT64"}}}, "declares words, but qa.onnx takes input_ids, attention_mask"),
        ({"inputs": {"input_ids": {"datatype": "FP32"}}, "dimensions": {"sequence": 7}}, "is INT64, not FP32"),
        ({"inputs": {"input_ids": {"shape": [-1, 7, 2]}}}, "has the shape"),
        ({"outputs": ["start"], "dimensions": {"sequence": 7}}, "has 2 outputs, and 1 names"),
        ({"outputs": ["start", "e" * 513], "dimensions": {"sequence": 7}}, "names over 512 long"),
    ):
        with pytest.raises(WeightsError, match=sentence):
            described(file, **declared)


class Whole(nn.Module):
    def forward(self, images, times):
        return {"sum": images.sum() * times, "images": images * 2}


def test_without_a_batch_dimension_a_request_is_one_item(tmp_path):
    file = frozen(Whole(), (torch.rand(2, 3), torch.rand(())), tmp_path / "whole.pt2", batch=False)
    model = open_model(parse_spec(f"whole={file}"), tmp_path)
    assert [(each.name, each.wire_shape(model.batched)) for each in model.inputs] == [("images", (2, 3)), ("times", ())]
    assert [(each.name, each.wire_shape(model.batched)) for each in model.results] == [("sum", ()), ("images", (2, 3))]
    assert model.batch_sizes((2, 4)) == (1,)
    inputs = {"images": np.ones((2, 3), np.float32), "times": np.array(2, np.float32)}
    count, options = model.asked(inputs)
    assert count == 1
    for engine in ("eager", "openvino"):
        executable, _ = loaded(model, engine)
        items = np.zeros((1, *model.input_shape), np.uint8)
        model.pack(inputs, 0, items[0])
        answer = model.collect([model.reduce(executable.run(items), 0, options)], options)
        assert answer["sum"].shape == ()
        assert answer["sum"] == 12
        np.testing.assert_array_equal(answer["images"], np.full((2, 3), 2, np.float32))
        executable.close()


class Mean(nn.Module):
    def forward(self, x):
        return x - x.mean(0, keepdim=True)


def test_an_open_first_axis_that_is_no_batch_is_refused(tmp_path):
    file = frozen(Mean(), (torch.rand(3, 4),), tmp_path / "mean.pt2")
    with pytest.raises(WeightsError, match="affect each other"):
        described(file)


class Average(nn.Module):
    def forward(own, x):  # Some name it so; it is no input.
        return x.mean(1)


def test_a_network_to_which_zeros_matter_is_not_filled_up(tmp_path):
    file = tmp_path / "average.ts"
    with pytest.warns():
        torch.jit.save(torch.jit.script(Average()), str(file))
    inputs = {"x": {"datatype": "FP32", "shape": [-1, "length"]}}
    with pytest.raises(WeightsError, match="cannot be filled up in length"):
        described(file, inputs=inputs, dimensions={"length": {"at_most": 8}})
    assert described(file, inputs=inputs, dimensions={"length": 8}).batched


# What is no such file


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("content", [b"", b"nothing of the kind", b"PK\x03\x04 and no more"])
def test_what_is_not_what_it_says_is_refused_in_one_sentence(tmp_path, suffix, content):
    file = tmp_path / f"broken{suffix}"
    file.write_bytes(content)
    with pytest.raises(
        WeightsError,
        match=f"^broken{suffix} (cannot be read as|is (damaged, )?cut short)[^\n]*\\.$",
    ):
        load_graph(str(file), FORMS[suffix])


@pytest.mark.cold
def test_the_server_hears_of_it_from_the_process_that_tried(tmp_path):
    (tmp_path / "broken.ts").write_bytes(b"nothing of the kind")
    with pytest.raises(WeightsError, match=r"^broken.ts is damaged, cut short, or not TorchScript"):
        open_model(parse_spec(f"qa={tmp_path}/broken.ts"), tmp_path)
    (tmp_path / "broken.onnx").write_bytes(b"nothing of the kind")
    with pytest.raises(WeightsError, match=r"^broken.onnx is damaged, cut short, or not an ONNX file"):
        open_model(parse_spec(f"qa={tmp_path}/broken.onnx"), tmp_path)
    (tmp_path / "broken.onnx").write_bytes(b"")
    with pytest.raises(WeightsNotFoundError, match="There is no file"):
        open_model(parse_spec(f"qa={tmp_path}/missing.onnx"), tmp_path)
    (tmp_path / "broken.tensors.json").write_text('{"dimension": {"sequence": 8}}', encoding="utf-8")
    with pytest.raises(WeightsError, match=r"^broken.tensors.json: dimension: Extra inputs are not permitted"):
        open_model(parse_spec(f"qa={tmp_path}/broken.onnx"), tmp_path)


class Writes:
    """Unpickled, it writes a file: what any command could do."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return (open, (str(self.file), "w"))


def changed(source, target, replaced, content):
    with zipfile.ZipFile(source) as before, zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as after:
        for name in before.namelist():
            if not name.endswith(replaced):
                after.writestr(name, before.read(name))
        root = before.namelist()[0].split("/")[0]
        after.writestr(f"{root}/{replaced}", content)


def test_what_is_pickled_in_a_program_is_not_run(tmp_path):
    source, target, written = exported(tmp_path, ".pt2"), tmp_path / "evil.pt2", tmp_path / "written"
    torch.save(((Writes(written),), {}), tmp_path / "inputs.pt")
    changed(source, target, "data/sample_inputs/model.pt", (tmp_path / "inputs.pt").read_bytes())
    with pytest.raises(WeightsError, match=r"evil.pt2 cannot be read"):
        load_graph(str(target), "program")
    changed(source, target, "data/constants/opaque_obj_0", pickle.dumps(Writes(written)))
    with pytest.raises(WeightsError, match="holds objects besides tensors"):
        load_graph(str(target), "program")
    assert not written.exists()
    open(tmp_path / "control", "w").close()
    pickle.loads(pickle.dumps(Writes(written))).close()
    assert written.exists()  # So it would have been.


# Items


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_what_is_packed_is_there(data):
    dtypes = st.sampled_from(sorted(DATATYPES))
    shapes = st.lists(st.integers(1, 5), max_size=3).map(tuple)
    specs = tuple(
        TensorSpec(f"x{index}", data.draw(dtypes), data.draw(shapes)) for index in range(data.draw(st.integers(1, 4)))
    )
    model = ExportedModel("m", "pt2", (), "m.pt2", None, (item_bytes(specs),), specs, (), True, (1, 64))
    count = data.draw(st.integers(1, 3))
    generator = np.random.default_rng(data.draw(st.integers(0, 1000)))
    given_arrays = {spec.name: generator.integers(0, 2, (count, *spec.shape)).astype(spec.dtype) for spec in specs}
    assert model.asked(given_arrays)[0] == count
    items = np.full((count, *model.input_shape), 255, np.uint8)
    for row, item in enumerate(items):
        model.pack(given_arrays, row, item)
    for spec, (start, stop) in zip(specs, model.layout, strict=True):
        np.testing.assert_array_equal(items[:, start:stop].view(spec.dtype).ravel(), given_arrays[spec.name].ravel())
    assert all(start % 64 == 0 for start, _ in model.layout)


def test_what_does_not_fit_is_refused_in_one_sentence(models):
    model = models[".onnx"]
    good = arrays(2)
    for wrong, sentence in (
        ({**good, "more": good["input_ids"]}, "has no input 'more'; it takes input_ids, attention_mask"),
        ({"input_ids": good["input_ids"]}, "'attention_mask' is missing"),
        ({**good, "input_ids": good["input_ids"].astype(np.int32)}, "must be INT64, not INT32"),
        ({**good, "input_ids": good["input_ids"][0]}, r"must have the shape \[n, sequence <= 12\], not \[12\]"),
        ({**good, "input_ids": np.zeros((2, 13), np.int64)}, "must have the shape"),
        ({**good, "input_ids": good["input_ids"][:, :5]}, "sequence is 12 in the input 'attention_mask' and 5"),
        ({**good, "input_ids": good["input_ids"][:1]}, "different batch sizes"),
        ({name: array[:0] for name, array in good.items()}, "at least one"),
        ({name: array[:, :0] for name, array in good.items()}, "must have the shape"),
        ({**good, "input_ids": np.full((2, 12), WORDS)}, f"holds {WORDS}; from 0 to {WORDS - 1}"),
    ):
        with pytest.raises(InputError, match=sentence):
            model.asked(wrong)
    with pytest.raises(InputError, match="has no output 'logits'; it has start_logits, end_logits"):
        model.asked(good, ["logits"])


# Engines


def loaded(model, engine, precision="fp32", sizes=LADDER):
    options = compile_options(model, model.probes(), None, None)
    return CpuBackend(threads=1).load(
        model.network(), "cpu:0", engine, precision, model.batch_sizes(sizes), options=options
    )


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_network_whose_compiled_copy_is_kept_is_not_read_again(models, suffix, tmp_path):
    pytest.importorskip("openvino")
    model, answers = models[suffix], []
    options = compile_options(model, None, None, tmp_path)

    def never():
        raise AssertionError("it was read")

    for build in (model.network, never):
        network = unbuilt(model, build if suffix != ".onnx" else never)
        executable, _ = CpuBackend(threads=1).load(network, "cpu:0", "openvino", "fp32", (1,), options=options)
        answers.append([output.copy() for output in executable.run(model.probes()[:1])])
    for first, second in zip(*answers, strict=True):
        assert (first == second).all()


@pytest.mark.parametrize(
    ("suffix", "engine"),
    [
        (".onnx", "openvino"),
        (".onnx", "onnxruntime"),
        (".pt2", "openvino"),
        (".pt2", "eager"),
        (".ts", "openvino"),
        (".ts", "eager"),
    ],
)
def test_every_engine_answers_as_pytorch_at_every_batch_size(models, suffix, engine):
    model, (executable, report) = models[suffix], loaded(models[suffix], engine)
    assert report.engine == engine
    for size in LADDER:
        inputs = arrays(size, seed=size)
        with torch.inference_mode():
            expected = question_answering()(*(torch.from_numpy(inputs[name]) for name in INPUTS))
        for output, wanted in zip(executable.run(packed(model, inputs, size)), expected, strict=True):
            np.testing.assert_allclose(output, wanted, atol=1e-5)
    executable.close()


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_64_bits_are_not_computed_in_32_where_the_gate_does_not_know_the_numbers(tmp_path, dtype):
    file = frozen(Squared(), (torch.ones(2, 3, dtype=dtype),), tmp_path / "squared.pt2")
    model = open_model(parse_spec(f"squared={file}"), tmp_path)
    with pytest.raises(EngineRefusedError, match="state the range of 'tensor'"):
        loaded(model, "openvino", sizes=(1,))
    many = {"tensor": np.array([[2**31 + 1, -(2**20), 3]], DATATYPES[model.inputs[0].datatype])}
    [answer] = loaded(model, "eager", sizes=(1,))[0].run(packed(model, many, 1))
    np.testing.assert_array_equal(answer, many["tensor"] ** 2)


class Squared(nn.Module):
    def forward(self, tensor):
        return tensor * tensor


# Beside the file


def test_what_is_declared_beside_a_file_identifies_it_as_well(models):
    """Other shapes, or outputs by other names, are another network to those who keep what they compiled."""
    assert len({weights_key(models[suffix]) for suffix in SUFFIXES} - {""}) == len(SUFFIXES)
    for suffix in SUFFIXES:
        shorter = replace(models[suffix], inputs=models[suffix].inputs[:1])
        assert weights_key(shorter) != weights_key(models[suffix])


def test_outputs_are_cut_to_the_lengths_of_their_request(models):
    model = models[".pt2"]
    whole = tuple(np.arange(2 * LONGEST, dtype=np.float32).reshape(2, LONGEST) for _ in range(2))
    count, options = model.asked(arrays(2, length=5), ["end_logits"])
    assert (count, options) == (2, TensorOptions((1,), (("sequence", 5),)))
    answer = model.collect([model.reduce(whole, row, options) for row in range(2)], options)
    np.testing.assert_array_equal(answer["end_logits"], whole[1][:, :5])
