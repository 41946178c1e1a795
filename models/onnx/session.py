"""ONNX Runtime without optimisations, on the CPU: a file as it stands, to be the reference and the witness.

Owns: its sessions, and how a file's inner values are asked for. Must not know our reading of a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from anychip_base.extras import how_to_install
from models.contract.errors import reason_of
from models.contract.model import Array
from models.onnx.file import OnnxFile, read_onnx

_GRAPH, _VALUE, _NAME = 7, 12, 1  # onnx.proto3: ModelProto.graph, GraphProto.output, ValueInfoProto.name
_FOLDER_OF_WEIGHTS = "session.model_external_initializers_file_folder_path"
_MOST_BYTES = 1 << 31  # Limit of a protobuf.
_FLOAT16 = 10  # onnx.proto3: TensorProto.DataType


class UnavailableError(Exception):
    """Lack of a result from the witness; the message says why."""


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


class Witness:
    """An .onnx in ONNX Runtime. `inputs`: their names; `in_halves`: whether it computes in float16, as the file states,
    so that its numbers are coarser than ours. Raises UnavailableError.
    """

    def __init__(self, file: Path, onnx: OnnxFile) -> None:
        self.in_halves, self._file = _computes_halves(onnx), file
        try:
            import onnxruntime
        except ImportError as error:
            raise UnavailableError(f"ONNX Runtime is not installed ({how_to_install('onnx')})") from error
        self.name = f"ONNX Runtime {onnxruntime.__version__} without optimisations"
        self._session = self._opened(str(file))
        self.inputs = [each.name for each in self._session.get_inputs()]
        self._outputs = {each.name for each in self._session.get_outputs()}

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of all values of the file's own nodes; subgraphs keep theirs."""
        return frozenset(name for node in read_onnx(self._file).nodes for name in node.outputs if name)

    def values(self, given: Mapping[str, Array], names: Sequence[str]) -> dict[str, Array]:
        """Compute outputs, or other values, by name, from inputs by name."""
        session = self._session
        if not self._outputs.issuperset(names):
            session = self._with(names)
        try:
            return dict(zip(names, session.run(list(names), dict(given)), strict=True))
        except Exception as error:
            raise UnavailableError(f"ONNX Runtime cannot run it: {reason_of(error)}") from error

    def _with(self, names: Sequence[str]) -> Any:
        """Open a session of the same file with these values as outputs: appended bytes extend a protobuf message.

        Only these are added: memory of an output is not reused while the graph is computed.
        """
        added = b"".join(_field(_VALUE, _field(_NAME, each.encode())) for each in names if each not in self._outputs)
        if self._file.stat().st_size + len(added) >= _MOST_BYTES:
            raise UnavailableError("the file is too large")
        return self._opened(self._file.read_bytes() + _field(_GRAPH, added), str(self._file.parent))

    def _opened(self, source: str | bytes, folder: str = "") -> Any:
        try:
            return unoptimised(source, folder=folder)
        except Exception as error:
            raise UnavailableError(f"ONNX Runtime cannot load it: {reason_of(error)}") from error


def _computes_halves(file: OnnxFile) -> bool:
    """Return True if a file computes in float16, and does not only keep its weights so."""
    constants = {node.outputs[0]: node.attributes.get("value") for node in file.nodes if node.operator == "Constant"}
    halves = {name for name, each in {**file.constants, **constants}.items() if getattr(each, "dtype", None) == "<f2"}
    return any(
        node.attributes.get("to") == _FLOAT16 if node.operator == "Cast" else not halves.isdisjoint(node.inputs)
        for node in file.nodes
    )


def _field(number: int, content: bytes) -> bytes:
    """Encode a field of a protobuf that holds bytes."""
    size, length = len(content), bytearray()
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([number << 3 | 2, *length, size]) + content
