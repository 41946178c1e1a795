"""Networks from files that carry their own graph: ONNX, torch.export's .pt2, TorchScript, OpenVINO's IR.

    uint8 [n, item_bytes] ─► one tensor an input ─► the file's graph ─► tuple of tensors [n, …]

Owns: loading and calling such graphs. Must not know where they run: engines call them, or take the file instead.

A .pt2 or .ts is a program. Pickles inside a .pt2 are read as tensors only, and objects are refused; that keeps out the
plainest attack, and is no sandbox (docs/which-file.md).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from anychip_base.extras import how_to_install
from models.contract.errors import WeightsError, reason_of
from models.contract.files import CUT_SHORT, begins_as_archive
from models.contract.tensors import Form, TensorModel

FORMS: dict[str, Form] = {
    ".onnx": "onnx",
    ".pt2": "program",
    ".ts": "script",
    ".torchscript": "script",
    ".xml": "openvino",
}
TORCH_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    **{f"UINT{bits}": getattr(torch, f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{f"INT{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
    "FP16": torch.float16,
    "FP32": torch.float32,
    "FP64": torch.float64,
}
_DATATYPES = {**{dtype: name for name, dtype in TORCH_DTYPES.items()}, torch.bfloat16: "BF16"}
_ONNX_DATATYPES = {
    "float": "FP32",
    "double": "FP64",
    "float16": "FP16",
    "bfloat16": "BF16",
    "bool": "BOOL",
    "string": "BYTES",
    **{f"{sign}int{bits}": f"{sign}int{bits}".upper() for sign in ("", "u") for bits in (8, 16, 32, 64)},
}
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_OPENVINO_LAYERS = ("Convolution", "GroupConvolution", "MatMul")
_OPENVINO_LINEAR = ("Add", "Clamp", "Gather", "Reshape", "Slice", "Split", "StridedSlice", "Transpose", "VariadicSplit")
_OPENVINO_YUV = {f"{given}to{found}" for given in ("NV12", "I420") for found in ("RGB", "BGR")}
_OBJECTS = ("custom_obj_", "opaque_obj_")  # Constants of a .pt2 that are no tensors: pickled objects of any kind.

_FOLDER_OF_WEIGHTS = "session.model_external_initializers_file_folder_path"

Length = int | str | None
"""An axis in a file's terms: its length, the name of an open one, None for an open one without a name."""


@dataclass(frozen=True)
class GraphSignature:
    """Inputs and outputs as a file states them; None for missing facts. `ranges`: least and greatest length of open
    axes, by name.
    """

    names: Sequence[str]
    datatypes: Sequence[str | None]
    shapes: Sequence[Sequence[Length] | None]
    outputs: Sequence[str] | None = None
    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)


class Graph(nn.Module):
    """A file's graph: tensors in, a tuple of tensors out, in the order of `signature`."""

    signature: GraphSignature

    def cast(self, dtype: torch.dtype) -> None:
        """Cast the graph's float32 to `dtype`, in place."""
        raise NotImplementedError


class RuntimeGraph(Graph):
    """A file that another runtime computes, and that never changes. `types`: why it is cast to float32 alone."""

    types: ClassVar[str]

    def __deepcopy__(self, _: Any) -> RuntimeGraph:
        return self

    def cast(self, dtype: torch.dtype) -> None:
        """Accept only float32, with which a file keeps its own types."""
        if dtype != torch.float32:
            raise RuntimeError(self.types)


def unoptimised(source: str | bytes, *, folder: str = "", threads: int = 0) -> Any:
    """Open a session of a file or its content. `folder`: of external weights, for a content; `threads`: 0 leaves their
    number to the runtime. Raises ImportError without ONNX Runtime, else its own errors.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    if threads:
        options.intra_op_num_threads = threads
    if folder:
        options.add_session_config_entry(_FOLDER_OF_WEIGHTS, folder)
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


class OnnxSessionGraph(RuntimeGraph):
    """An ONNX file, run by ONNX Runtime on the CPU without optimisations, as it may be the reference."""

    types = "an ONNX file keeps its own types"

    def __init__(self, file: str) -> None:
        super().__init__()
        try:
            # Threads are stated, as ONNX Runtime otherwise ties each to a processor, which a confined process may not.
            self._session = unoptimised(file, threads=torch.get_num_threads())
        except ImportError as error:
            raise WeightsError(f"ONNX files need ONNX Runtime: {how_to_install('onnx')}.") from error
        inputs = self._session.get_inputs()
        self.signature = GraphSignature(
            [each.name for each in inputs],
            [_ONNX_DATATYPES.get(each.type.removeprefix("tensor(").removesuffix(")"), each.type) for each in inputs],
            [each.shape for each in inputs],
            [each.name for each in self._session.get_outputs()],
        )

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        arrays = (tensor.numpy() for tensor in tensors)
        outputs = self._session.run(None, dict(zip(self.signature.names, arrays, strict=True)))
        return tuple(torch.from_numpy(np.ascontiguousarray(output)) for output in outputs)


class OpenVinoGraph(RuntimeGraph):
    """A network of OpenVINO, run by OpenVINO on the CPU in float32, as it is the reference.

    `openvino_file`: the file, for OpenVINO's engine, which compiles it with the computation before and after it.
    """

    types = "the reference of OpenVINO's files computes in float32"

    def __init__(self, file: str) -> None:
        super().__init__()
        try:
            import openvino
        except ImportError as error:
            raise WeightsError(f"OpenVINO's files need OpenVINO: {how_to_install('cpu')}.") from error
        self.openvino_file = file
        self._core = openvino.Core()
        try:
            self._model = self._core.read_model(file)
        except Exception as error:  # The lines before the last one name places in OpenVINO's sources.
            reason = reason_of(Exception(str(error).strip().rpartition("\n")[2]))
            raise WeightsError(f"{Path(file).name} cannot be read as a network of OpenVINO: {reason}.") from error
        if kinds := _OPENVINO_YUV.intersection(each.get_type_name() for each in self._model.get_ordered_ops()):
            line = "tensor().set_color_format(ColorFormat.RGB) of its PrePostProcessor makes it take RGB"
            raise WeightsError(f"{Path(file).name} takes pixels in YUV ({min(kinds)}): {line}.")
        self._types = [port.get_element_type().to_dtype() for port in self._model.inputs]
        self.signature = GraphSignature(
            [f"input {number}" for number in range(len(self._types))],
            [_DATATYPES.get(getattr(torch, dtype.name, torch.float32)) for dtype in self._types],
            [
                [length.get_length() if length.is_static else None for length in port.get_partial_shape()]
                if port.get_partial_shape().rank.is_static
                else None
                for port in self._model.inputs
            ],
        )

    @property
    def described(self) -> dict[str, str]:
        """Facts on images and scores that Model API has written into the file, by ONNX's keys for the same."""
        found = self._model.get_rt_info("model_info").value if self._model.has_rt_info("model_info") else {}
        return {f"model_info {key}": str(value) for key, value in found.items()} if isinstance(found, dict) else {}

    def at_first_layer(self, tensor: Tensor) -> Tensor | None:
        """Return what the first layer with weights gets; None if there is none, or OpenVINO cannot compile it alone."""
        before = self._before_first_layer
        given = tensor.numpy().astype(self._types[0])
        return None if before is None else torch.from_numpy(np.array(before([given])[0], np.float32))

    @property
    def is_exchanged(self) -> bool:
        """True if OpenVINO has put an exchange of red and blue into the first weights, as their name says."""
        layer = next((each for each in self._model.get_ordered_ops() if each.get_type_name() in _OPENVINO_LAYERS), None)
        return layer is not None and layer.input_value(1).get_node().get_friendly_name().startswith("Gather_")

    @cached_property
    def _before_first_layer(self) -> Any:
        import openvino

        model = self._model.clone()
        first = next((each for each in model.get_ordered_ops() if each.get_type_name() in _OPENVINO_LAYERS), None)
        if first is None:
            return None
        before = openvino.Model([first.input_value(0)], model.get_parameters(), "before the first layer")
        with contextlib.suppress(RuntimeError):
            return self._compile(before)
        return None

    def divides_by_products(self) -> bool:
        """Return True if it divides by a product of matrices, or by a part or a sum of one."""
        products: set[str] = set()
        for each in self._model.get_ordered_ops():
            given = [port.get_source_output().get_node().get_friendly_name() in products for port in each.inputs()]
            kind = each.get_type_name()
            if kind == "Divide" and given[1]:
                return True
            if kind == "MatMul" or (kind in _OPENVINO_LINEAR and any(given)):
                products.add(each.get_friendly_name())
        return False

    @cached_property
    def _compiled(self) -> Any:
        return self._compile(self._model)

    def _compile(self, model: Any) -> Any:
        # Not tied to processors, which a confined process may not do.
        options = {
            "INFERENCE_PRECISION_HINT": "f32",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,  # Else activations before weights of 4 or 8 bits get 8 bits.
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "ENABLE_CPU_PINNING": False,
        }
        return self._core.compile_model(model, "CPU", options)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        pairs = zip(tensors, self._types, strict=True)
        found = self._compiled([np.ascontiguousarray(tensor.numpy(), dtype) for tensor, dtype in pairs])
        return tuple(torch.from_numpy(np.array(each)) for each in found.values())


class ProgramGraph(Graph):
    """A program saved by torch.export."""

    def __init__(self, file: str) -> None:
        super().__init__()
        program = _loaded_program(file)
        self.signature = _program_signature(program)
        self._arguments = program.call_spec.in_spec
        module = unchecked_module(program)
        for node in module.graph.nodes:
            if node.target is torch.ops.aten.sym_size.int:
                node.target = _length
        module.recompile()
        self._module = module.requires_grad_(False)

    def cast(self, dtype: torch.dtype) -> None:
        """Cast weights and the types that the graph itself names, also those of a program in other floats."""
        for tensor in (*self._module.parameters(), *self._module.buffers()):
            if tensor.dtype in _FLOATS:
                tensor.data = tensor.data.to(dtype)
        self._replaced(lambda value: dtype if isinstance(value, torch.dtype) and value in _FLOATS else value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move the graph; tensors that it creates on the device of its export are then created on the new one."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        placed = fn(torch.zeros(()))
        if placed.dtype != torch.float32:
            self.cast(placed.dtype)
        # Tensors are never on "cpu:0".
        device = torch.device("cpu") if placed.device.type == "cpu" else placed.device
        self._replaced(lambda value: device if isinstance(value, torch.device) else value)
        return self

    def train(self, mode: bool = True) -> ProgramGraph:
        """Change nothing: exported networks do not change their mode."""
        return self

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = pytree.tree_unflatten(list(tensors), self._arguments)
        return _flat(self._module(*args, **kwargs))

    def _replaced(self, replacement: Any) -> None:
        for node in self._module.graph.nodes:
            if node.op == "call_function":
                node.args = pytree.tree_map(replacement, node.args)
                node.kwargs = pytree.tree_map(replacement, node.kwargs)
        self._module.recompile()


class ScriptGraph(Graph):
    """A script saved by torch.jit. It knows the names of its inputs and nothing else of them."""

    def __init__(self, file: str) -> None:
        super().__init__()
        if getattr(torch.jit, "load", None) is None:
            raise WeightsError(f"PyTorch {torch.__version__} has no TorchScript any more: export a .pt2 instead.")
        self._file = file
        self._dtype: torch.dtype | None = None  # None: that of the file.
        self.module = self._loaded("cpu")
        arguments = self.module.forward.schema.arguments[1:]  # After the module, whatever its name there.
        wanted = [each for each in arguments if not each.has_default_value()]
        strange = [each.name for each in wanted if str(each.type) != "Tensor"]
        if strange:
            raise WeightsError(
                f"{Path(file).name} takes {', '.join(strange)}, no tensor: export one that takes tensors alone; "
                'torchvision\'s detectors by torch.onnx.export(network.eval(), ([image],), "best.onnx", dynamo=False).'
            )
        names = [each.name for each in wanted]
        self.signature = GraphSignature(names, [None] * len(names), [None] * len(names))

    def cast(self, dtype: torch.dtype) -> None:
        """Cast weights; tensors that the graph creates itself keep their type."""
        self.module.to(dtype)
        self._dtype = dtype

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Load the graph again for a device, since only loading moves the tensors that the graph creates itself."""
        placed = fn(torch.zeros(()))
        if placed.device.type != "cpu":
            self.module = self._loaded(str(placed.device))
            if self._dtype is not None:
                self.module.to(self._dtype)
        if placed.dtype != torch.float32:
            self._dtype = placed.dtype
        self.module._apply(fn)
        return self

    def _loaded(self, device: str) -> Any:
        load: Any = torch.jit.load
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return load(self._file, map_location=device).eval()

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return _flat(self.module(*tensors))


def as_saved(file: str) -> Callable[..., tuple[Tensor, ...]]:
    """Load a program of torch.export in PyTorch's own form, with its checks and its types. It takes floats of any type.
    Raises WeightsError.
    """
    program = _loaded_program(file)
    module, names = program.module(), program.graph_signature.user_inputs
    types = [node.meta["val"].dtype for node in program.graph.nodes if node.name in names]
    return lambda *tensors: _flat(module(*map(Tensor.to, tensors, types)))


def _loaded_program(file: str) -> Any:
    with zipfile.ZipFile(file) as archive:
        if any(Path(name).name.startswith(_OBJECTS) for name in archive.namelist()):
            raise WeightsError(f"{Path(file).name} holds objects besides tensors, which are not read.")
    with _tensors_only(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.load(file)
    for node in program.graph.nodes:
        is_plain = getattr(node.target, "__module__", "") in ("_operator", "math", "builtins")
        if node.op == "call_function" and not (is_plain or isinstance(node.target, torch._ops.OperatorBase)):
            raise WeightsError(f"{Path(file).name} calls {node.target}, which is no operator of tensors.")
    return program


def load_graph(file: str, form: Form) -> Graph:
    """Load the graph in a file, on the CPU. Raises WeightsError."""
    kinds: dict[Form, tuple[Callable[[str], Graph], str]] = {
        "onnx": (OnnxSessionGraph, "an ONNX file"),
        "program": (ProgramGraph, f"what torch.export of torch {torch.__version__} saves"),
        "script": (ScriptGraph, "TorchScript"),
        "openvino": (OpenVinoGraph, "a network of OpenVINO"),
    }
    kind, what = kinds[form]
    if form in ("program", "script"):
        if not zipfile.is_zipfile(file):
            why = CUT_SHORT if begins_as_archive(Path(file)) else f"is damaged, cut short, or not {what}"
            raise WeightsError(f"{Path(file).name} {why}.")
        importlib.import_module("models.vision")  # It registers torchvision's operators, which files may name: nms.
    try:
        return kind(file)
    except WeightsError:
        raise
    except Exception as error:  # A broken file can make the three libraries raise anything.
        raise WeightsError(f"{Path(file).name} cannot be read as {what}: {reason_of(error)}.") from error


class GraphNetwork(nn.Module):
    """A graph in the form for backends (backends.TensorNetwork): items in bytes in, the declared outputs out."""

    def __init__(self, model: TensorModel, graph: Graph, form: Form, file: str) -> None:
        super().__init__()
        self.core = graph
        self.form, self.file, self.batched = form, file, model.batched
        self.input_shape = model.input_shape
        self.inputs, self.places = model.inputs, model.layout
        self._types = [TORCH_DTYPES[spec.datatype] for spec in model.inputs]
        self._results = [TORCH_DTYPES[spec.datatype] for spec in model.results]
        self._core_dtype = torch.float32

    def cast(self, dtype: torch.dtype) -> GraphNetwork:
        """Cast the float32 parts of the graph; inputs follow, outputs keep their types."""
        if dtype != self._core_dtype:
            self.core.cast(dtype)
            self._core_dtype = dtype
        return self

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Move the graph in its own way; there is nothing else to move."""
        self.core.to(*args, **kwargs)
        return self

    def tensors(self, items: Tensor) -> tuple[Tensor, ...]:
        """Convert uint8 [n, item_bytes] to the graph's inputs: views if its types are those of the file."""
        tensors = []
        for spec, (start, stop), dtype in zip(self.inputs, self.places, self._types, strict=True):
            tensor = items[:, start:stop].view(dtype).reshape(-1, *spec.shape)
            wide = dtype is torch.float32 and self._core_dtype is not torch.float32
            tensor = tensor.to(self._core_dtype) if wide else tensor
            tensors.append(tensor if self.batched else tensor[0])
        return tuple(tensors)

    def forward(self, items: Tensor) -> tuple[Tensor, ...]:
        """Compute tensors [n, …] from uint8 [n, item_bytes], with n 1 if there is no batch dimension."""
        outputs = self.core(*self.tensors(items))
        return tuple(
            (output if self.batched else output[None]).to(dtype)
            for output, dtype in zip(outputs, self._results, strict=True)
        )


def datatype_of_tensor(tensor: Tensor) -> str:
    """Return the Open Inference Protocol's name of a tensor's type; bfloat16 is sent as float32."""
    name = _DATATYPES.get(tensor.dtype, str(tensor.dtype))
    return "FP32" if name == "BF16" else name


def output_names(structure: Any) -> list[str]:
    """Name a network's outputs by the answer's structure, whose leaves are all different.

    Names are keys of a mapping or fields of a named tuple, in the order of the leaves, else output, or output_0, ….
    """
    flat = _flat(structure)
    if isinstance(structure, Mapping) and set(structure.values()) == set(flat):
        return [str(key) for key in sorted(structure, key=lambda key: flat.index(structure[key]))]
    if hasattr(structure, "_fields") and len(structure._fields) == len(flat):
        return list(structure._fields)
    return ["output"] if len(flat) == 1 else [f"output_{index}" for index in range(len(flat))]


def _flat(answer: Any) -> tuple[Any, ...]:
    return tuple(leaf for leaf in pytree.tree_leaves(answer) if leaf is not None)


def unchecked_module(program: Any) -> Any:
    """Return the graph of an exported program as a module, without the checks of its arguments.

    The graph insists on the device and the types of the export, and checks of arguments cannot be traced.
    """
    try:
        module = program.module(check_guards=False)
    except TypeError:  # Older PyTorch has no such guards.
        module = program.module()
    checks = getattr(getattr(torch.ops.aten, "_assert_tensor_metadata", None), "default", None)
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.target is checks:
            module.graph.erase_node(node)
    module.recompile()
    module._forward_pre_hooks.clear()
    module._forward_pre_hooks_with_kwargs.clear()
    return module


def _program_signature(program: Any) -> GraphSignature:
    inputs = program.graph_signature.user_inputs
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    if not all(isinstance(name, str) and isinstance(values[name], Tensor) for name in inputs):
        raise WeightsError("it was exported with arguments that are no tensors")
    tensors = [values[name] for name in inputs]
    spec = program.call_spec.out_spec
    structure = pytree.tree_unflatten([f"{index}" for index in range(spec.num_leaves)], spec)
    greatest = 2**31 - 1
    ranges = {
        str(symbol): (int(limits.lower), greatest if limits.upper > greatest else int(limits.upper))
        for symbol, limits in program.range_constraints.items()
    }
    return GraphSignature(
        inputs,
        [_DATATYPES.get(tensor.dtype, str(tensor.dtype)) for tensor in tensors],
        [[length if isinstance(length, int) else str(length) for length in tensor.shape] for tensor in tensors],
        output_names(structure),
        ranges,
    )


def _length(tensor: Tensor, axis: int) -> int:
    # A plain number, not a tracer's symbol: tracing is for one shape.
    return int(tensor.shape[axis])


@contextlib.contextmanager
def _tensors_only() -> Iterator[None]:
    """Make torch.load unpickle nothing but tensors, even if torch.export.load asks it for more."""
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
