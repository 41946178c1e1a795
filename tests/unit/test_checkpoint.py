"""models.weights.checkpoint and unpickle: every form of weight file, and every way one is wrong or hostile."""

from __future__ import annotations

import collections
import io
import os
import pickle
import struct
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from models.contract.errors import WeightsError
from models.weights.checkpoint import labels_beside, read
from models.weights.unpickle import MAX_PICKLE_BYTES
from tests.support.work import calls


class Network(torch.nn.Module):
    """Of a library that is not known here."""


def small_state() -> dict[str, Tensor]:
    return {"fc.weight": torch.arange(6.0).view(2, 3), "fc.bias": torch.tensor([1.0, -1.0]).half()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype for name in one
    )


# Forms


def test_a_torch_whose_unpickler_can_be_made_to_run_code_reads_no_file_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tmp_path / "old.pth", tmp_path / "new.pth"
    torch.save(small_state(), old, _use_new_zipfile_serialization=False)
    torch.save(small_state(), new)
    monkeypatch.setattr(torch, "__version__", "2.9.0a0+git1234")
    monkeypatch.setattr(torch, "load", None)
    with pytest.raises(WeightsError, match=r"torch before 2\.10 cannot read"):
        read(old)
    assert same(read(new).state, small_state()), "by the unpickler of our own"


@pytest.mark.parametrize("legacy", [False, True], ids=["zip format", "format before torch 1.6"])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"model": state, "ema": None},
        lambda state: {"model": state, "ema": {"decay": 0.9, "updates": torch.ones(1)}},
        lambda state: {"model": {"depth": 3}, "checkpoint": {"model": {"state_dict": state}, "ema": {}}},
        lambda state: {name: torch.nn.Parameter(value) for name, value in state.items()},
        lambda state: {"net": state, "criterion": {"weight": torch.ones(3)}},
    ],
    ids=["dict", "model entry", "average not begun", "within entries", "parameters", "beside a loss"],
)
def test_a_state_dict_is_found_however_it_was_saved(tmp_path: Path, wrap: Any, legacy: bool) -> None:
    path = tmp_path / "a.pth"
    torch.save(wrap(small_state()), path, _use_new_zipfile_serialization=not legacy)
    assert same(read(path).state, small_state())


@pytest.mark.parametrize("legacy", [False, True], ids=["zip format", "format before torch 1.6"])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda state, average: average,
        lambda state, average: {"model": state, "ema": average},
        lambda state, average: {"state_dict": state, "averaged": average},
        lambda state, average: {"state_dict": state, "callbacks": {"EMA": average}},
    ],
    ids=["alone", "under ema", "under another key", "of a callback"],
)
def test_averages_without_names_are_refused_with_what_names_them(tmp_path: Path, wrap: Any, legacy: bool) -> None:
    shadow = [value.clone() for value in small_state().values()]
    average = {"decay": 0.999, "num_updates": 3, "shadow_params": shadow, "collected_params": None}
    path = tmp_path / "a.pth"
    torch.save(wrap(small_state(), average), path, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(WeightsError, match=r"shadow_params.*copy_to\(network\.parameters\(\)\), torch\.save"):
        read(path)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_weight_that_is_no_number_is_named(tmp_path: Path, suffix: str) -> None:
    state = {**small_state(), "bn.running_var": torch.tensor([1.0, torch.nan])}
    (save_file if suffix == ".safetensors" else torch.save)(state, tmp_path / f"a{suffix}")
    with pytest.raises(WeightsError, match=r"its bn\.running_var holds NaN"):
        read(tmp_path / f"a{suffix}")


@pytest.mark.parametrize(
    ("legacy", "entry", "said"),
    [
        (True, Network, r"names '.*Network'.*save its state_dict\(\)"),
        (False, Network, r"names '.*Network'.*save its state_dict\(\)"),
        (True, lambda: np.ones(3), "of NumPy's arrays tensors"),
        (False, lambda: np.ones(3), "of NumPy's arrays tensors"),
    ],
)
def test_what_is_no_tensor_is_named(tmp_path: Path, legacy: bool, entry: Any, said: str) -> None:
    torch.save({"fc.weight": entry()}, tmp_path / "a.pth", _use_new_zipfile_serialization=not legacy)
    with pytest.raises(WeightsError, match=said):
        read(tmp_path / "a.pth")


def test_a_layer_beside_the_state_dict_is_a_network_of_its_own(tmp_path: Path) -> None:
    head = {"weight": torch.ones(3, 4), "bias": torch.ones(3)}
    torch.save({"backbone": small_state(), "head": head}, tmp_path / "a.pth")
    with pytest.raises(WeightsError, match="several networks, under 'backbone', 'head': save one of them"):
        read(tmp_path / "a.pth")


def test_views_share_a_storage_and_keep_their_values(tmp_path: Path) -> None:
    base = torch.arange(24.0).view(4, 6)
    state = {"whole": base, "part": base[1:3, 2:4], "turned": base.t(), "scalar": base[0, 5], "none": base[:0]}
    torch.save(state, tmp_path / "a.pt")
    assert same(read(tmp_path / "a.pt").state, state)


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    ],
    ids=str,
)
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_every_type_of_element_is_read_and_the_header_agrees(tmp_path: Path, dtype: torch.dtype, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    state = {"x": torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)}
    (save_file if suffix == ".safetensors" else torch.save)(state, path)
    assert same(read(path).state, state)
    header = read(path, with_data=False).state["x"]
    assert (header.shape, header.dtype, header.device.type) == (state["x"].shape, dtype, "meta")


def test_a_whole_pickled_module_is_read_as_its_state_dict(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.BatchNorm2d(4), torch.nn.Linear(4, 2))
    module.register_buffer("hidden", torch.ones(3), persistent=False)
    torch.save(module, tmp_path / "a.pt")
    assert same(read(tmp_path / "a.pt").state, dict(module.state_dict()))


# Hostile files


class Calls:
    """Pickles as a call of `function` with `arguments`, then perhaps `state`."""

    def __init__(self, function: Any, arguments: tuple[Any, ...], state: Any = None) -> None:
        self.reduced = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> Any:
        return self.reduced


def archive_of(path: Path, pickled: bytes, storages: dict[str, bytes] | None = None, compressed: bool = False) -> Path:
    kind = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", kind) as file:
        file.writestr("a/data.pkl", pickled)
        file.writestr("a/byteorder", b"little")
        for key, content in (storages or {}).items():
            file.writestr(f"a/data/{key}", content)
    return path


def marker_calls(marker: Path) -> dict[str, Any]:
    """Ways to create the file `marker` that a plain unpickler would all take."""
    code = f"open({str(marker)!r}, 'w').close()"
    return {
        "os.system": Calls(os.system, (f"touch {marker}",)),
        "eval": Calls(eval, (code,)),
        "open": Calls(open, (str(marker), "w")),
        "getattr chain": Calls(getattr, (Calls(getattr, (collections.OrderedDict, "__init__")), "__globals__")),
        "import": Calls(getattr, (Calls(__import__, ("os",)), "system")),
        "torch.save": Calls(torch.serialization.save, ({"a": 1}, str(marker))),
        "torch.load": Calls(torch.load, (str(marker),)),
        "setstate": Calls(collections.OrderedDict, (), Calls(os.system, (f"touch {marker}",))),
    }


@pytest.mark.parametrize("name", marker_calls(Path("x")))
@pytest.mark.parametrize("place", ["beside the weights", "within a module", "before the format with zip"])
def test_a_hostile_pickle_is_refused_and_nothing_of_it_runs(tmp_path: Path, name: str, place: str) -> None:
    marker = tmp_path / "it ran"
    call = marker_calls(marker)[name]
    path = tmp_path / "evil.pt"
    if place == "beside the weights":
        torch.save({"state_dict": small_state(), "extra": call}, path)
    elif place == "within a module":
        module = torch.nn.Linear(2, 2)
        module.extra = call
        torch.save({"model": module}, path)
    else:
        torch.save({"state_dict": small_state(), "extra": call}, path, _use_new_zipfile_serialization=False)
    for reader in (read, partial(read, with_data=False)):
        with pytest.raises(WeightsError, match=r"^evil\.pt .*\.$"):
            reader(path)
    assert not marker.exists()


def opcodes(*parts: bytes) -> bytes:
    return b"\x80\x02" + b"".join(parts) + b"."


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


TENSOR = named("torch._utils", "_rebuild_tensor_v2")
LINEAR = named("torch.nn.modules.linear", "Linear")
HOSTILE_OPCODES = {
    "state for our tensor builder": opcodes(TENSOR, b"N}X\x0c\x00\x00\x00__defaults__)s\x86b"),
    "a call of an object": opcodes(LINEAR, b")\x81)R"),
    "a getattr of a dunder": opcodes(named("builtins", "getattr"), LINEAR, b")\x81X\x09\x00\x00\x00__class__\x86R"),
    "a dotted name": b"\x80\x04\x8c\x11torch.nn.modules_\x8c\x0fModule.__init__\x93.",
    "the instruction INST": opcodes(b"(ios\nsystem\n"),
    "the instruction OBJ": opcodes(b"(", named("os", "system"), b"o"),
    "the extension registry": opcodes(b"\x82\x01"),
    "an endless memo index": opcodes(b"}r\xff\xff\xff\x7f", b"j\xfe\xff\xff\x7f"),
    "a gigantic text": opcodes(b"X\xff\xff\xff\x7fa"),
    "a gigantic bytearray": b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\x00.",
    "no pickle at all": b"hello",
    "a foreign persistent id": opcodes(b"X\x01\x00\x00\x00aQ"),
}


DOUBLED = b")" + b"q\x000h\x00h\x00\x86" * 80  # A tuple of two of a tuple of two of …, 2^80 brackets as text.
MANY = b"](" + b"K\x01" * 60_000 + b"eq\x010"  # A list of 60,000 entries, remembered as number 1.
MANY_NAMES = b"}(" + b"".join(b"X\x05\x00\x00\x00%05dN" % number for number in range(60_000)) + b"uq\x010"
ENDLESS = {
    "a doubled tuple as name": b"\x80\x04" + DOUBLED + b"\x8c\x01a\x93.",
    "a doubled tuple as shape": opcodes(TENSOR, b"(K\x00K\x00", DOUBLED, b"h\x00tR"),
    "a list made a set again and again": opcodes(
        b"](", named("builtins", "set"), b"q\x020", MANY, b"h\x02h\x01\x85R" * 100_000, b"e"
    ),
    "the state of many objects": opcodes(b"](", LINEAR, b"q\x020", MANY_NAMES, b"h\x02)\x81h\x01b" * 100_000, b"e"),
    "a number of many digits": opcodes(b"L" + b"9" * 1_000_000 + b"L\n"),
}


def text(name: str) -> bytes:
    return b"X" + struct.pack("<I", len(name)) + name.encode()


def shared_by_children(attribute: str, shared: bytes) -> bytes:
    """10,000 children that share what `shared` puts into memo 1, as an attribute."""
    child = LINEAR + b")\x81}" + text(attribute) + b"h\x01sb"
    children = b"".join(text(str(number)) + child for number in range(10_000))
    kept = text("kept") + shared.removesuffix(b"0")
    return opcodes(LINEAR, b")\x81}(", kept, text("_modules"), b"}(", children, b"uub")


ENDLESS |= {
    "a mapping under many names": opcodes(
        b"}(", text("a"), MANY_NAMES.removesuffix(b"0"), *(text(str(each)) + b"h\x01" for each in range(20_000)), b"u"
    ),
    "mappings of one mapping": opcodes(b"}q\x000", b"}(X\x01\0\0\0ah\0X\x01\0\0\0bh\0uq\x000" * 80, b"h\0"),
    "buffers that many modules share": shared_by_children("_buffers", MANY_NAMES),
    "hidden names that many modules share": shared_by_children("_non_persistent_buffers_set", MANY),
    "names without end": shared_by_children("_buffers", b"}" + text("x" * 1_000_000) + b"Nsq\x010"),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_small_file_costs_little(tmp_path: Path, name: str) -> None:
    path = archive_of(tmp_path / "evil.pt", ENDLESS[name])

    def refused() -> None:
        for reader in (read, partial(read, with_data=False)):
            with pytest.raises(WeightsError, match=r"^evil\.pt .*\.$"):
                reader(path)

    assert calls(refused) < 50_000_000  # At most a sixth; without bounds it takes minutes, hours or for ever.


@pytest.mark.parametrize("name", HOSTILE_OPCODES)
def test_hostile_instructions_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(WeightsError, match=r"^evil\.pt .*\.$"):
        read(archive_of(tmp_path / "evil.pt", HOSTILE_OPCODES[name]))


def tensor_pickle(length: int, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> bytes:
    """Pickle a state dict with one tensor that claims these numbers, as torch.save writes it."""

    class Claim:
        def __reduce__(self) -> Any:
            return torch._utils._rebuild_tensor_v2, (Stored(), offset, shape, stride, False, {})

    class Stored:
        pass

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return ("storage", torch.FloatStorage, "0", "cpu", length) if isinstance(obj, Stored) else None

    target = io.BytesIO()
    Pickler(target, 2).dump({"x": Claim()})
    return target.getvalue()


@pytest.mark.parametrize(
    ("length", "offset", "shape", "stride"),
    [
        (10**12, 0, (4,), (1,)),
        (4, 0, (10**10,), (0,)),
        (4, 0, (2**40, 2**40), (0, 0)),
        (4, 2, (3,), (1,)),
        (4, 0, (2,), (10**15,)),
        (4, 0, (-1,), (1,)),
        (4, 0, (1,) * 1000, (1,) * 1000),
    ],
)
def test_a_tensor_that_claims_more_than_the_file_holds_is_refused(
    tmp_path: Path, length: int, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> None:
    path = archive_of(tmp_path / "a.pt", tensor_pickle(length, offset, shape, stride), {"0": bytes(16)})
    for reader in (read, partial(read, with_data=False)):
        with pytest.raises(WeightsError):
            reader(path)


def test_a_compressed_archive_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    path = archive_of(tmp_path / "a.pt", tensor_pickle(1 << 20, 0, (1 << 20,), (1,)), {"0": bytes(4 << 20)}, True)
    with pytest.raises(WeightsError, match="never does"):
        read(path)


def test_entries_that_overlap_are_refused(tmp_path: Path) -> None:
    path = archive_of(tmp_path / "a.pt", tensor_pickle(4, 0, (4,), (1,)), {"0": bytes(16), "1": bytes(1 << 16)})
    content = bytearray(path.read_bytes())
    entry = content.index(b"PK\x01\x02", content.index(b"PK\x01\x02") + 1)
    entry = content.index(b"PK\x01\x02", entry + 1)  # data/0: now as long as the rest of the file and more
    content[entry + 20 : entry + 28] = struct.pack("<II", 1 << 20, 1 << 20)
    path.write_bytes(content)
    with pytest.raises(WeightsError):
        read(path)


def test_a_pickle_that_is_far_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="MiB"):
        read(archive_of(tmp_path / "a.pt", b"\x80\x02" + b"]" * MAX_PICKLE_BYTES + b"."))


def module_opcodes(depth: int) -> bytes:
    """Build nested modules, `depth` deep, each under two names: 2 ** depth paths in a small file."""
    nested = LINEAR + b")\x81"
    for level in range(depth):
        again = b"r" + struct.pack("<I", level)
        children = b"}X\x01\x00\x00\x00a" + nested + again + b"sX\x01\x00\x00\x00bj" + struct.pack("<I", level) + b"s"
        nested = LINEAR + b")\x81}X\x08\x00\x00\x00_modules" + children + b"sb"
    return opcodes(b"}X\x05\x00\x00\x00model", nested, b"s")


@pytest.mark.parametrize("depth", [20, 60])
def test_a_module_that_multiplies_is_refused(tmp_path: Path, depth: int) -> None:
    with pytest.raises(WeightsError, match="without end"):
        read(archive_of(tmp_path / "a.pt", module_opcodes(depth)))


# Files that are merely broken


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("share", [0.02, 0.5, 0.99])
def test_a_file_without_its_end_is_said_to_be_one(tmp_path: Path, suffix: str, share: float) -> None:
    file, state = tmp_path / f"w{suffix}", {"fc.weight": torch.zeros(100, 100)}
    save_file(state, file) if suffix == ".safetensors" else torch.save(state, file)
    file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])
    with pytest.raises(WeightsError, match=rf"^w{suffix} is cut short: copy it again\.$"):
        read(file)


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".safetensors"])
@pytest.mark.parametrize("content", [b"", b"<html>404</html>", b"\xff" * 4096, b"PK\x05\x06" + bytes(18)])
def test_a_file_that_is_something_else_is_refused(tmp_path: Path, suffix: str, content: bytes) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(content)
    with pytest.raises(WeightsError):
        read(path)


# Labels


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("dogs.labels.txt", "cat\nHündin\n"),
        ("dogs.txt", "\ufeffcat\r\nHündin"),
        ("labels.txt", "cat\nHündin"),
        ("dogs.json", '["cat", "Hündin"]'),
        ("labels.json", '{"1": "Hündin", "0": "cat"}'),
        ("labels.json", '{"Hündin": 1, "cat": 0}'),
    ],
)
def test_labels_beside_the_weights_win_over_those_within(tmp_path: Path, name: str, content: str) -> None:
    path = tmp_path / "dogs.safetensors"
    save_file(small_state(), path, {"labels": '["x", "y"]'})
    assert read(path).labels == ("x", "y")
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert read(path).labels == ("cat", "Hündin")
    assert read(path, with_data=False).labels == ("cat", "Hündin")
    assert labels_beside(tmp_path / "dogs.pth.tar") == ("cat", "Hündin")


@pytest.mark.parametrize(
    ("numbers", "labels"),
    [({"zebra": 0, "cat": 2, "ant": 1}, ("zebra", "ant", "cat")), ({"a": 0, "b": 0}, None), ({"a": 1, "b": 2}, None)],
)
def test_numbers_of_names_give_the_labels(
    tmp_path: Path, numbers: dict[str, int], labels: tuple[str, ...] | None
) -> None:
    torch.save({"state_dict": small_state(), "class_to_idx": numbers}, tmp_path / "a.pth")
    assert read(tmp_path / "a.pth").labels == labels


@pytest.mark.parametrize("content", ["{", '{"0": "a", "2": "b"}', "[1, 2]", "[" * 100_000])
def test_a_labels_file_that_makes_no_sense_is_an_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "labels.json").write_text(content)
    with pytest.raises(WeightsError, match=r"labels\.json"):
        labels_beside(tmp_path / "dogs.safetensors")
