"""Files of a network, its own and those beside it, and facts on finished ones.

Owns: finding them; asking a vendor's runtime about what its compiler made, such as `.om`, in a process of its own (a
package's entry point of the group `anychip.finished` names the module). Must not read weights, nor know what a network
computes, nor import a vendor's package. An ONNX file is untrusted, as in models.onnx.file; unlike there, subgraphs and
functions are followed, as ONNX Runtime runs them.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from anychip_base.extras import entry_points, how_to_install
from anychip_base.interpreter import python_command
from models.contract.errors import WeightsError
from models.onnx.file import fields
from models.weights.checkpoint import LABELS

_CHILDREN = {f".{entry.name}": entry.value for entry in entry_points("anychip.finished")}
_EXTRAS = {".om": "ascend"}
FINISHED = tuple(dict.fromkeys((*_EXTRAS, *_CHILDREN)))
_TIME_LIMIT_S = 120.0
# Fields of each message of onnx.proto3 that may hold tensors, and the message of each of them.
_GRAPH, _FUNCTION, _NODE, _ATTRIBUTE, _SPARSE, _TENSOR, _PLACE = range(7)
_MODEL_PARTS = {7: _GRAPH, 25: _FUNCTION}
_PARTS: dict[int, dict[int, int]] = {
    _GRAPH: {1: _NODE, 5: _TENSOR, 15: _SPARSE},
    _FUNCTION: {7: _NODE, 11: _ATTRIBUTE},
    _NODE: {5: _ATTRIBUTE},
    _ATTRIBUTE: {5: _TENSOR, 6: _GRAPH, 10: _TENSOR, 11: _GRAPH, 22: _SPARSE, 23: _SPARSE},
    _SPARSE: {1: _TENSOR, 2: _TENSOR},
    _TENSOR: {13: _PLACE},
}
_OF_GRAPHS = ("{}.tensors.json", *(f"{of}config.json" for of in ("", "preprocessor_", "processor_", "open_clip_")))
_OF_METADATA = ("metadata.yaml", "{}.yaml")
MAX_OUTSIDE = 1000


def read_finished(file: Path) -> dict[str, Any]:
    """Ask a runtime about its file: `size` of the images, `shapes` of the outputs for one image, and `batch_sizes` that
    it takes. Raises WeightsError.
    """
    if file.suffix not in _CHILDREN:
        raise WeightsError(f"What reads {file.name} is not installed: {how_to_install(_EXTRAS[file.suffix])}.")
    try:
        done = subprocess.run(
            python_command("-m", _CHILDREN[file.suffix], str(file)),
            env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIME_LIMIT_S,
            check=False,
        )
        reply = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        raise WeightsError(f"{file.name} was not loaded within {_TIME_LIMIT_S:g} s.") from None
    except (ValueError, LookupError):
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1][:200]
        raise WeightsError(f"{file.name} ended the process that loaded it ({done.returncode}): {last}.") from None
    if "error" in reply:
        raise WeightsError(f"{file.name} cannot be loaded: {reply['error'].rstrip('.')}.")
    inputs = [tuple(shape) for shape in reply["inputs"]]
    if len(inputs) != 1 or len(inputs[0]) != 4 or 3 not in (inputs[0][1], inputs[0][3]):
        raise WeightsError(f"a finished network takes one input [n, 3, height, width], not {inputs}")
    _, *sides = inputs[0]
    size = sides[1:] if sides[0] == 3 else sides[:2]
    return {"size": size, "shapes": [(1, *one[1:]) for one in reply["outputs"]], "batch_sizes": reply["batch_sizes"]}


def names_beside(file: Path, *, is_graph: bool) -> list[str]:
    """Return the names of optional files beside a file: labels, task, preprocessing, OpenVINO's weights.

    `is_graph`: the file carries its own graph, or a library builds its network; it is not of a network of ours.
    """
    names = [*LABELS, *(_OF_GRAPHS if is_graph else ())]
    if file.suffix in (".xml", *FINISHED):
        names += _OF_METADATA
    if file.suffix == ".xml":
        names.append("{}.bin")
    return [name.format(stem) for name in names for stem in (file.stem, file.stem.removesuffix(".pth"))]


def names_within(file: Path) -> list[str]:
    """Return the names of the files in which an ONNX file keeps weights, as it states them, each once. Raises
    WeightsError.
    """
    if file.suffix != ".onnx":
        return []
    names: set[str] = set()
    try:
        data = memoryview(file.read_bytes())
        waiting = [(_MODEL_PARTS, data)]  # No recursion: a file may nest to any depth.
        while waiting:
            parts, message = waiting.pop()
            for number, value in fields(message):
                kind = parts.get(number)
                if kind is None or isinstance(value, int):
                    continue
                if kind != _PLACE:
                    waiting.append((_PARTS[kind], value))
                    continue
                pair = {key: bytes(text).decode() for key, text in fields(value) if not isinstance(text, int)}
                if pair.get(1) == "location":
                    names.add(pair.get(2, ""))
                    if len(names) > MAX_OUTSIDE:
                        raise WeightsError(f"{file.name} keeps its weights in more than {MAX_OUTSIDE} files.")
    except OSError as error:
        raise WeightsError(f"{file.name} cannot be read: {error.strerror or error}.") from error
    except (ValueError, LookupError) as error:
        raise WeightsError(f"{file.name} is damaged, cut short, or not an ONNX file.") from error
    return sorted(names)
