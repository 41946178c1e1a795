"""Double of Huawei's pyACL: cards in host memory, over models that the double of `atc` beside it has made.

Functions, parameters and answers are those whose sources anychip_ascend/acl.py states; a function that is not
called is missing here. It refuses like the real one: a foreign pointer, a batch that is no gear, memory that does not
exist. Copies and models of a stream run as late as they may on a card, when somebody waits for them: code that does not
wait sees old numbers, and what it writes into memory too early is what the card reads.
Copies on a stream are those of CANN 8.0 and 8.1 on 310P and 310B, the strictest (hiascend.com, canncommercial/800,
aclcppdevg_03_0106): where memory of the host is not pinned, or an address no multiple of 64, "an unpredictable error
may occur". Here the card always finds such memory reused: wrong bytes arrive, and of its answers none.

Environment variables control it: ACL_DOUBLE_COUNT, _SOC, _MEMORY_MB; so do `knobs`, or a file that ACL_DOUBLE_KNOBS
names with JSON of the same names, which other processes change.
"""

# mypy: ignore-errors
# pyACL's parts are namespaces of functions: classes here, of which nobody makes an object.

from __future__ import annotations

import collections
import ctypes
import functools
import itertools
import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np

INVALID_PARAM, UNINITIALIZE, REPEAT_INITIALIZE = 100000, 100001, 100002
CONTEXT_NULL, INVALID_DEVICE, MEMORY_ALLOCATION = 107002, 107001, 207001
DYNAMIC_BATCH_SIZE_INVALID, MODEL_DATA_SIZE_INVALID, MODEL_ID_INVALID = 145013, 145006, 145003
_ALIGNED = 64

knobs = {
    "fail": {},  # function's name -> code; `*` is every function that uses the card
    "leak_bytes": 0,  # of each execution
    "memory_mb": int(os.environ.get("ACL_DOUBLE_MEMORY_MB", "16384")),
    "soc": os.environ.get("ACL_DOUBLE_SOC", "Ascend310P3"),
}
counts = {"executions": 0, "leaked": 0}
_NUMPY = ("f4", "f2", "i1", "i4", "u1", "", "i2", "u2", "u4", "i8", "u8", "f8", "?")  # by aclDataType
_TYPES = {np.dtype(text): number for number, text in enumerate(_NUMPY) if text}
_numbers = itertools.count(1)
_things = {}
_device = {}  # pointer -> memory, bytes
_host = {}
_state = SimpleNamespace(initialised=False, message="", local=threading.local(), running=threading.RLock())


def _knob(name):
    if path := os.environ.get("ACL_DOUBLE_KNOBS"):
        try:
            return json.loads(Path(path).read_text()).get(name, knobs[name])
        except (OSError, ValueError):
            pass
    return knobs[name]


def _code(name):
    if not _state.initialised:
        return UNINITIALIZE
    failing = _knob("fail")
    code = failing.get(name, failing.get("*", 0))
    if code:
        _state.message = f"EE9999: Inner Error, {name} failed\n\tTraceBack"
    return code


def _keep(thing):
    number = next(_numbers) << 8
    _things[number] = thing
    return number


def _used():
    models = sum(each.size for each in _things.values() if isinstance(each, _Loaded))
    return sum(size for _, size in _device.values()) + counts["leaked"] + models


def init(*_):
    if _state.initialised:
        return REPEAT_INITIALIZE
    _state.initialised = True
    return 0


def get_soc_name():
    return _knob("soc")


def get_recent_err_msg():
    return _state.message


def create_data_buffer(pointer, size):
    return _keep((pointer, size)) if pointer in _device else 0


def destroy_data_buffer(number):
    return 0 if _things.pop(number, None) is not None else INVALID_PARAM


class _Stream:
    def __init__(self):
        self.tasks, self.failed = collections.deque(), 0

    def run(self, event):
        """Do what comes before an event, but no work behind a failure; return the failure's code."""
        with _state.running:
            while self.tasks and not event.done:
                task = self.tasks.popleft()
                if isinstance(task, _Event):
                    task.done, task.code = True, self.failed
                elif not self.failed:
                    self.failed = task() or 0
        return event.code


class _Event:
    def __init__(self):
        self.done, self.code, self.stream = False, 0, None


def _copied(target, source, size, right=True):
    if right:
        ctypes.memmove(target, source, size)
    else:
        ctypes.memset(target, 0xA5, size)
    return 0


def _owned(pointer, size):
    return any(start <= pointer and pointer + size <= start + have for start, (_, have) in _device.items())


class rt:
    def get_device_count():
        return int(os.environ.get("ACL_DOUBLE_COUNT", "2")), _code("rt.get_device_count")

    def set_device(index):
        if not 0 <= index < int(os.environ.get("ACL_DOUBLE_COUNT", "2")):
            return INVALID_DEVICE
        _state.local.context = index + 1
        return _code("rt.set_device")

    def reset_device(index):
        return _code("rt.reset_device")

    def get_context():
        context = getattr(_state.local, "context", 0)
        return context, 0 if context else CONTEXT_NULL

    def set_context(context):
        _state.local.context = context
        return 0 if context else CONTEXT_NULL

    def get_mem_info(attribute):
        total = _knob("memory_mb") << 20
        return max(total - _used(), 0), total, _code("rt.get_mem_info") or (0 if attribute in (0, 1) else INVALID_PARAM)

    def malloc(size, policy):
        if code := _code("rt.malloc"):
            return 0, code
        if size <= 0 or policy not in (0, 1, 2):
            return 0, INVALID_PARAM
        if _used() + size > _knob("memory_mb") << 20:
            _state.message = "EL0004: Failed to allocate memory"
            return 0, MEMORY_ALLOCATION
        memory = (ctypes.c_uint8 * (size + _ALIGNED))()
        pointer = -(-ctypes.addressof(memory) // _ALIGNED) * _ALIGNED
        _device[pointer] = memory, size
        return pointer, 0

    def free(pointer):
        return 0 if _device.pop(pointer, None) else INVALID_PARAM

    def malloc_host(size):
        memory = (ctypes.c_uint8 * (size + _ALIGNED))()
        pointer = -(-ctypes.addressof(memory) // _ALIGNED) * _ALIGNED
        _host[pointer] = memory, size
        return pointer, _code("rt.malloc_host")

    def free_host(pointer):
        return 0 if _host.pop(pointer, None) is not None else INVALID_PARAM

    def memcpy(target, most, source, size, kind):
        on_device = target if kind == 1 else source
        if size > most or kind not in (1, 2) or not _owned(on_device, size):
            return INVALID_PARAM
        return _code("rt.memcpy") or _copied(target, source, size)

    def memcpy_async(target, most, source, size, kind, stream):
        on_device, on_host = (target, source) if kind == 1 else (source, target)
        if size > most or kind not in (1, 2) or not _owned(on_device, size):
            return INVALID_PARAM
        if code := _code("rt.memcpy_async"):
            return code
        pinned = any(start <= on_host and on_host + size <= start + have for start, (_, have) in _host.items())
        right = pinned and on_host % _ALIGNED == on_device % _ALIGNED == 0
        moved = size if right or kind == 1 else 0
        _things[stream].tasks.append(functools.partial(_copied, target, source, moved, right))
        return 0

    def create_stream():
        return _keep(_Stream()), _code("rt.create_stream")

    def destroy_stream(stream):
        return 0 if _things.pop(stream, None) else INVALID_PARAM

    def synchronize_stream(stream):
        event, code = rt.create_event()
        code = code or rt.record_event(event, stream) or rt.synchronize_event(event)
        rt.destroy_event(event)
        return code

    def synchronize_device():
        for number, thing in list(_things.items()):
            if isinstance(thing, _Stream):
                rt.synchronize_stream(number)
        return _code("rt.synchronize_device")

    def create_event():
        return _keep(_Event()), _code("rt.create_event")

    def destroy_event(event):
        return 0 if isinstance(_things.pop(event, None), _Event) else INVALID_PARAM

    def record_event(event, stream):
        recorded = _things[event]
        if recorded.stream is not None:
            return INVALID_PARAM  # It must be reset first.
        recorded.stream = _things[stream]
        recorded.stream.tasks.append(recorded)
        return _code("rt.record_event")

    def stream_wait_event(stream, event):
        waited = _things[event]
        _things[stream].tasks.append(lambda: waited.stream.run(waited))
        return _code("rt.stream_wait_event")

    def synchronize_event(event):
        waited = _things[event]
        if code := waited.stream.run(waited):
            waited.stream.failed = waited.code = 0
            _state.message = "EZ9999: Inner Error, the task on the stream failed"
            return code
        return _code("rt.synchronize_event")


class _Loaded:
    """Model of the double's atc: JSON, a line feed, and the ONNX file."""

    def __init__(self, data):
        head, _, onnx = data.partition(b"\n")
        self.about = json.loads(head)
        self.size = self.about.get("extra_bytes", 0) + len(onnx)
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        self.session = onnxruntime.InferenceSession(onnx, options, providers=["CPUExecutionProvider"])
        self.gears = self.about["gears"]

    def run(self, inputs, outputs, size):
        feed = {}
        for (pointer, _), given in zip(inputs, self.about["inputs"], strict=False):
            dims = [size if length == -1 else length for length in given["dims"]]
            dtype = np.dtype(given["dtype"])
            count = int(np.prod(dims))
            raw = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(pointer)
            array = np.frombuffer(raw, dtype).reshape(dims)
            if self.about["aipp"]:
                array = np.ascontiguousarray(array.transpose(0, 3, 1, 2).astype(np.float32))
            feed[given["name"]] = array
        for (pointer, have), answer in zip(outputs, self.session.run(None, feed), strict=True):
            array = np.ascontiguousarray(answer)
            assert array.nbytes <= have
            ctypes.memmove(pointer, array.ctypes.data, array.nbytes)


def _bytes_at(pointer, size):
    return bytes((ctypes.c_uint8 * size).from_address(pointer))


class mdl:
    def query_size_from_mem(pointer, size):
        try:
            about = json.loads(_bytes_at(pointer, size).partition(b"\n")[0])
        except ValueError:
            return 0, 0, MODEL_DATA_SIZE_INVALID
        return about.get("extra_bytes", 0), size, _code("mdl.query_size_from_mem")

    def load_from_mem(pointer, size):
        if code := _code("mdl.load_from_mem"):
            return 0, code
        loaded = _Loaded(_bytes_at(pointer, size))
        if loaded.about["soc"] != get_soc_name():
            _state.message = f"E10055: the model is for {loaded.about['soc']}"
            return 0, 500002
        return _keep(loaded), 0

    def unload(model):
        return 0 if isinstance(_things.pop(model, None), _Loaded) else MODEL_ID_INVALID

    def create_desc():
        return _keep([])

    def get_desc(desc, model):
        _things[desc].append(_things[model])
        return _code("mdl.get_desc")

    def destroy_desc(desc):
        return 0 if _things.pop(desc, None) is not None else INVALID_PARAM

    def _ports(desc, kind):
        about = _things[desc][0].about
        gear = {"name": "ascend_mbatch_shape_data", "dims": [1], "dtype": "int32", "bytes": 4}
        return [*about[kind], *([gear] if about["gears"] and kind == "inputs" else [])]

    def get_num_inputs(desc):
        return len(mdl._ports(desc, "inputs"))

    def get_num_outputs(desc):
        return len(mdl._ports(desc, "outputs"))

    def _dims(desc, index, kind):
        port = mdl._ports(desc, kind)[index]
        dims = list(port["dims"])
        if kind == "outputs" and dims[:1] == [-1]:  # The largest gear's.
            dims[0] = max(_things[desc][0].gears)
        return {"name": port["name"], "dimCount": len(dims), "dims": dims}, 0

    def get_input_dims(desc, index):
        return mdl._dims(desc, index, "inputs")

    def get_output_dims(desc, index):
        return mdl._dims(desc, index, "outputs")

    def _size(desc, index, kind):
        port = mdl._ports(desc, kind)[index]
        most = max(_things[desc][0].gears or [1])
        dims = [most if length == -1 else length for length in port["dims"]]
        return max(int(np.prod(dims)), 1) * np.dtype(port["dtype"]).itemsize

    def get_input_size_by_index(desc, index):
        return mdl._size(desc, index, "inputs")

    def get_output_size_by_index(desc, index):
        return mdl._size(desc, index, "outputs")

    def get_input_data_type(desc, index):
        return _TYPES[np.dtype(mdl._ports(desc, "inputs")[index]["dtype"])]

    def get_output_data_type(desc, index):
        return _TYPES[np.dtype(mdl._ports(desc, "outputs")[index]["dtype"])]

    def get_dynamic_batch(desc):
        gears = _things[desc][0].gears
        return {"batchCount": len(gears), "batch": list(gears)}, 0

    def create_dataset():
        return _keep({"buffers": [], "size": None})

    def add_dataset_buffer(dataset, buffer):
        _things[dataset]["buffers"].append(_things[buffer])
        return dataset, 0

    def destroy_dataset(dataset):
        return 0 if _things.pop(dataset, None) is not None else INVALID_PARAM

    def set_dynamic_batch_size(model, dataset, index, size):
        loaded = _things[model]
        if size not in loaded.gears or index != len(loaded.about["inputs"]):
            return DYNAMIC_BATCH_SIZE_INVALID
        _things[dataset]["size"] = size
        return _code("mdl.set_dynamic_batch_size")

    def execute_async(model, given, outputs, stream):
        loaded = _things.get(model)
        if not isinstance(loaded, _Loaded):
            return MODEL_ID_INVALID
        size = _things[given]["size"]
        if loaded.gears and size is None:
            return DYNAMIC_BATCH_SIZE_INVALID
        if code := _code("mdl.execute_async"):
            return code
        size = size or 1
        buffers, targets = list(_things[given]["buffers"]), list(_things[outputs]["buffers"])

        def execute():
            if code := _code("stream"):
                return code
            loaded.run(buffers, targets, size)
            counts["executions"] += 1
            counts["leaked"] += _knob("leak_bytes")
            return 0

        _things[stream].tasks.append(execute)
        return 0


def forget():
    """Drop things that last as long as the process: decoders' streams and descriptions of channels."""
    _things.clear()


def leftovers():
    """Return counts of the things still held, for a test."""
    kinds = [type(thing).__name__ for thing in _things.values()]
    return {"device": len(_device), "host": len(_host), **{kind: kinds.count(kind) for kind in set(kinds)}}
