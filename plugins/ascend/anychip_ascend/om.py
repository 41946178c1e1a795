"""Huawei's offline models (.om): networks compiled by CANN's `atc`, or finished files, run through pyACL.

It serves 310P and 310B, which torch_npu supports in part; other cards use it by its name. The options are those of
Huawei's page on atc and of the commands in Ascend/samples. Ultralytics' export to .om
(ultralytics/utils/export/ascend.py) says that convolutions of these cards need float16. Unverified on hardware.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from anychip_ascend.acl import DEVICE_TO_HOST, HOST_TO_DEVICE, AclCard, card, released
from backends.contract.backend import (
    Array,
    CompileOptions,
    Executable,
    FinishedNetwork,
    Network,
    Pixels,
    TensorNetwork,
    built,
    form_of,
)
from backends.contract.errors import EngineRefusedError, translated_errors
from backends.engines.engine import DTYPES, Engine, kept_or_made
from backends.engines.onnxruntime import exported_by_tracing
from backends.engines.programs import Port, Program, ProgramExecutable
from backends.vendors.drivers import toolkit_version

_NAME = "pixels"
_BATCH_INPUT = "ascend_mbatch_shape_data"  # atc's name of the input that sets a batch's size.
# aclDataType
_DTYPES = dict(enumerate(("f4", "f2", "i1", "i4", "u1", "", "i2", "u2", "u4", "i8", "u8", "f8", "?")))
# RGB bytes [n, height, width, 3] become numbers unchanged: the network itself normalises them.
_AIPP = """aipp_op {{
    aipp_mode: static
    input_format: RGB888_U8
    src_image_size_w: {width}
    src_image_size_h: {height}
    csc_switch: false
    rbuv_swap_switch: false
}}
"""
_TROUBLE = re.compile(r"^E[0-9A-Z]\d{4}\b")  # Error lines of atc, such as E10010.


class OmEngine(Engine):
    """One model for all of its batch sizes (`--dynamic_batch_size`); minutes at the first load, then from the cache."""

    name = "om"
    takes = "minutes"
    package = "acl"
    keeps = True
    offers = ("fp16", "fp32")
    forms = ("pixels", "onnx", "finished")

    def compile(
        self, network: Network, device: str, precision: str, batch_sizes: tuple[int, ...], options: CompileOptions
    ) -> Executable:
        own, form = card(), form_of(network)
        with translated_errors(device):
            own.set_device(device)
        if form == "finished":
            if precision != self.precisions[0]:
                raise EngineRefusedError("a finished file keeps its own types")
            model = Path(cast(FinishedNetwork, network).file).read_bytes()
        else:
            model = kept_or_made(
                options,
                self.parts(network, precision, options),
                lambda: _compiled(built(network), precision, batch_sizes, own.soc),
                lambda made, folder: (folder / "network.om").write_bytes(made),
                lambda folder: (folder / "network.om").read_bytes(),
            )
        with translated_errors(device):
            program = OmProgram(own, model)
        lacking = [size for size in batch_sizes if size not in program.batch_sizes]
        if form == "finished" and lacking:
            program.close()
            raise EngineRefusedError(f"the model takes batches of {list(program.batch_sizes)}, and not of {lacking}")
        return ProgramExecutable(device, batch_sizes, network, program)

    def version(self, precision: str) -> str:
        return toolkit_version(self._facts.machine)

    def parts(self, network: Network, precision: str, options: CompileOptions, *more: object) -> Mapping[str, object]:
        return super().parts(network, precision, options, precision, options.batch_sizes, card().soc, *more)


def _compiled(network: Network, precision: str, sizes: tuple[int, ...], soc: str) -> bytes:
    """Compile a network by CANN's `atc`, and return the bytes of the `.om` file.

    `sizes`: its batch sizes; `soc`: the chip's name, such as Ascend310P3. Raises EngineRefusedError with atc's reason.
    """
    atc = shutil.which("atc")
    if atc is None:
        raise EngineRefusedError("atc is not here: install the CANN toolkit, and source its set_env.sh")
    with tempfile.TemporaryDirectory(prefix="anychip-om-") as name:
        folder = Path(name)
        form = _of_images if form_of(network) == "pixels" else _of_tensors
        options, has_batch_sizes = form(network, precision, sizes, folder)
        if has_batch_sizes:
            options.append(f"--dynamic_batch_size={','.join(map(str, sizes))}")
        command = [atc, "--framework=5", f"--output={folder / 'network'}", f"--soc_version={soc}", *options]
        # atc leaves files in its working directory.
        done = subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
        )
        made = folder / "network.om"
        if done.returncode or not made.is_file():
            lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
            trouble = next(filter(_TROUBLE.search, lines), lines[-1] if lines else f"it ended with {done.returncode}")
            raise EngineRefusedError(f"atc cannot compile this network for {soc}: {trouble[:200]}")
        return made.read_bytes()


def _of_images(network: Network, precision: str, sizes: tuple[int, ...], folder: Path) -> tuple[list[str], bool]:
    """Return atc's options for a network of ours, and True if the batch size stays open."""
    height, width, _ = network.input_shape
    has_batch_sizes = len(sizes) > 1
    network.cast(DTYPES[precision])
    example = torch.zeros((2 if has_batch_sizes else sizes[0], 3, height, width))
    try:
        exported = exported_by_tracing(
            _Planes(network), (example,), _NAME, axes={0: "batch"} if has_batch_sizes else {}
        )
    except Exception as error:  # A network's Python may fail in the tracer in any way.
        raise EngineRefusedError(f"PyTorch cannot export the network to ONNX: {error}") from error
    (folder / "network.onnx").write_bytes(exported)
    (folder / "aipp.cfg").write_text(_AIPP.format(height=height, width=width), encoding="ascii")
    return [
        f"--model={folder / 'network.onnx'}",
        "--input_format=NCHW",
        f"--input_shape={_NAME}:{-1 if has_batch_sizes else sizes[0]},3,{height},{width}",
        f"--insert_op_conf={folder / 'aipp.cfg'}",
        "--precision_mode=must_keep_origin_dtype",
    ], has_batch_sizes


def _of_tensors(network: Network, precision: str, sizes: tuple[int, ...], folder: Path) -> tuple[list[str], bool]:
    """Return the same for an unchanged ONNX file; in fp16, float32 is kept only if the card computes it."""
    packed = cast(TensorNetwork, network)
    has_batch_sizes = packed.batched and len(sizes) > 1
    first = [] if not packed.batched else [-1 if has_batch_sizes else sizes[0]]
    shapes = [f"{each.name}:{','.join(map(str, (*first, *each.shape)))}" for each in packed.inputs]
    images = all(len(each.shape) + len(first) == 4 for each in packed.inputs)
    return [
        f"--model={Path(packed.file).absolute()}",
        f"--input_format={'NCHW' if images else 'ND'}",
        f"--input_shape={';'.join(shapes)}",
        f"--precision_mode={'allow_fp32_to_fp16' if precision == 'fp16' else 'must_keep_origin_dtype'}",
    ], has_batch_sizes


class _Planes(nn.Module):
    """Network over float32 [n, 3, height, width], the form into which AIPP turns bytes."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(self, planes: Tensor) -> tuple[Tensor, ...]:
        return self.network(planes.permute(0, 2, 3, 1))


@dataclass
class _Slot:
    """Memory of one batch on the card: a data set of inputs and one of outputs, with a buffer each."""

    given: int
    outputs: int
    memory: list[tuple[int, int]] = field(default_factory=list)  # pointer and bytes
    buffers: list[int] = field(default_factory=list)
    staging: dict[int, Pixels] = field(default_factory=dict)  # By the input's memory on the card: pinned.
    hosts: list[Pixels] = field(default_factory=list)
    events: list[int] = field(default_factory=list)


class OmProgram(Program):
    """Model on a card."""

    def __init__(self, own: AclCard, model: bytes) -> None:
        self._card, self._slots, self._streams = own, list[_Slot](), list[int]()
        data = np.frombuffer(model, np.uint8)
        place = data.ctypes.data, data.nbytes
        wanted, free = sum(own.call("mdl.query_size_from_mem", *place)), own.mem_get_info("")[0]
        if wanted > free:
            raise RuntimeError(f"out of memory: the model takes {wanted >> 20} MiB, and {free >> 20} MiB are free")
        self._model, self._desc, self._size_bytes = own.call("mdl.load_from_mem", *place), 0, wanted
        own.count(wanted)
        try:
            self._desc = own.acl.mdl.create_desc()
            own.call("mdl.get_desc", self._desc, self._model)
            self._describe()
            for _ in range(2):
                self._add_slot()
            self._streams = [own.call("rt.create_stream") for _ in range(2)]
        except BaseException:
            self.close()
            raise

    def _describe(self) -> None:
        mdl, call = self._card.acl.mdl, self._card.call
        named = [call("mdl.get_input_dims", self._desc, index) for index in range(mdl.get_num_inputs(self._desc))]
        ports = [
            Port(str(dims["name"]), np.dtype(_DTYPES[mdl.get_input_data_type(self._desc, index)]), tuple(dims["dims"]))
            for index, dims in enumerate(named)
        ]
        self._gear = next((index for index, port in enumerate(ports) if port.name == _BATCH_INPUT), None)
        self.inputs = tuple(port for index, port in enumerate(ports) if index != self._gear)
        self.batch_sizes = (self.inputs[0].shape[0] if self.inputs[0].shape else 1,)
        if self._gear is not None:
            self.batch_sizes = tuple(sorted(call("mdl.get_dynamic_batch", self._desc)["batch"]))
        outputs = []
        for index in range(mdl.get_num_outputs(self._desc)):
            dims = call("mdl.get_output_dims", self._desc, index)
            dtype = np.dtype(_DTYPES[mdl.get_output_data_type(self._desc, index)])
            shape = tuple(dims["dims"])
            # ACL may state the largest gear.
            outputs.append(Port(str(dims["name"]), dtype, (-1, *shape[1:]) if self._gear is not None else shape))
        self.outputs = tuple(outputs)

    def _add_slot(self) -> None:
        mdl = self._card.acl.mdl
        slot = _Slot(mdl.create_dataset(), mdl.create_dataset())
        self._slots.append(slot)  # If a later step fails, `close` frees what there is.
        for count, size_of, dataset in (
            (mdl.get_num_inputs, mdl.get_input_size_by_index, slot.given),
            (mdl.get_num_outputs, mdl.get_output_size_by_index, slot.outputs),
        ):
            for index in range(count(self._desc)):
                size_bytes = size_of(self._desc, index)
                slot.memory.append((self._card.take(size_bytes), size_bytes))
                slot.buffers.append(self._card.acl.create_data_buffer(*slot.memory[-1]))
                self._card.call("mdl.add_dataset_buffer", dataset, slot.buffers[-1])
                if dataset == slot.outputs:
                    slot.hosts.append(self._card.pinned(size_bytes))

    def host_memory(self, size_bytes: int) -> Pixels:
        return self._card.pinned(size_bytes)

    def start(self, size: int, arrays: Sequence[Array]) -> Callable[[], tuple[Array, ...]]:
        own, (copies, compute) = self._card, self._streams
        self._slots.append(self._slots.pop(0))
        slot = self._slots[-1]  # The slot of the batch before the last, which is done.
        self._forget_events(slot)
        places = [place for index, place in enumerate(slot.memory) if index != self._gear]
        for array, (pointer, size_bytes) in zip(arrays, places, strict=False):
            given = array if own.is_pinned(array) else self._staged(slot, array, pointer, size_bytes)
            own.copy(pointer, given.ctypes.data, array.nbytes, HOST_TO_DEVICE, copies)
        own.call("rt.stream_wait_event", compute, self._marked(slot, copies))
        if self._gear is not None:
            own.call("mdl.set_dynamic_batch_size", self._model, slot.given, self._gear, size)
        own.call("mdl.execute_async", self._model, slot.given, slot.outputs, compute)
        outputs: list[Array] = []
        for port, host, (pointer, _) in zip(self.outputs, slot.hosts, places[len(self.inputs) :], strict=True):
            shape = tuple(size if length == -1 else length for length in port.shape)
            size_bytes = int(np.prod(shape)) * port.dtype.itemsize
            own.copy(host.ctypes.data, pointer, size_bytes, DEVICE_TO_HOST, compute)
            outputs.append(host[:size_bytes].view(port.dtype).reshape(shape))
        done = self._marked(slot, compute)

        def wait() -> tuple[Array, ...]:
            own.call("rt.synchronize_event", done)
            return tuple(outputs)

        return wait

    def _staged(self, slot: _Slot, array: Array, pointer: int, size_bytes: int) -> Pixels:
        """Return the array in pinned memory of its slot; `pointer`: the input's memory on the card, of `size_bytes`."""
        if pointer not in slot.staging:
            slot.staging[pointer] = self._card.pinned(size_bytes)
        staged = slot.staging[pointer][: array.nbytes]
        np.copyto(staged.view(array.dtype).reshape(array.shape), array)
        return staged

    def _marked(self, slot: _Slot, stream: int) -> int:
        """Record an event behind the stream's work. A new event each time: ACL wants a used one reset first."""
        slot.events.append(self._card.call("rt.create_event"))
        self._card.call("rt.record_event", slot.events[-1], stream)
        return slot.events[-1]

    def _forget_events(self, slot: _Slot) -> None:
        while slot.events:
            self._card.call("rt.destroy_event", slot.events.pop())

    def silence(self) -> str:
        return self._card.silence()

    def close(self) -> None:
        own, mdl = self._card, self._card.acl.mdl
        steps: list[Callable[[], object]] = [partial(own.call, "rt.synchronize_device")]
        for slot in self._slots:
            steps.append(partial(self._forget_events, slot))
            steps += [partial(own.acl.destroy_data_buffer, buffer) for buffer in slot.buffers]
            steps += [partial(mdl.destroy_dataset, dataset) for dataset in (slot.given, slot.outputs)]
            steps += [partial(own.give_back, *place) for place in slot.memory]
        steps += [partial(own.call, "rt.destroy_stream", stream) for stream in self._streams]
        steps += [partial(own.count, -self._size_bytes), partial(own.call, "mdl.unload", self._model)]
        released(*steps, partial(mdl.destroy_desc, self._desc))
        self._slots, self._streams = [], []
