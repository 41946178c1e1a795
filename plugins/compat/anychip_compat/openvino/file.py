"""Reader of OpenVINO's files, `best.xml` with `best.bin` beside it, without OpenVINO: layers, weights, connections.

Owns: the form of these files (IR version 10 and 11). Must not know what layers compute: layers.py says it in
ONNX's operators, so that all else is the same for both. The files are untrusted: XML with declarations of its own is
refused, and every constant must lie within the file of weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

from models.contract.errors import WeightsError
from models.contract.model import Array
from models.contract.regular import read_regular

MAX_XML_BYTES = 256 << 20
MAX_BIN_BYTES = 4 << 30
MAX_LAYERS = 200_000
DTYPES: dict[str, np.dtype[Any]] = {
    "f16": np.dtype("<f2"),
    "f32": np.dtype("<f4"),
    "f64": np.dtype("<f8"),
    "i8": np.dtype("i1"),
    "i16": np.dtype("<i2"),
    "i32": np.dtype("<i4"),
    "i64": np.dtype("<i8"),
    "u8": np.dtype("u1"),
    "u16": np.dtype("<u2"),
    "u32": np.dtype("<u4"),
    "u64": np.dtype("<u8"),
    "boolean": np.dtype("?"),
}


class InvalidError(ValueError):
    """File that cannot be read; the message continues a sentence that begins with the file's name."""


@dataclass(frozen=True)
class OpenVinoLayer:
    """Layer of a file. `inputs`, `outputs`: names of values, by port; `shapes`: of the inputs, -1: unknown length."""

    name: str
    kind: str
    version: str
    data: dict[str, str]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    def numbers(self, key: str, default: str = "") -> list[int]:
        """Return the integers of an attribute. Raises InvalidError."""
        text = self.data.get(key, default)
        try:
            return [int(each) for each in text.split(",") if each.strip()]
        except ValueError:
            raise InvalidError(f"has a {self.kind} with {key} {text[:50]!r}") from None

    def flag(self, key: str) -> bool:
        """Return True if an attribute is true."""
        return self.data.get(key, "").lower() in ("true", "1")


class _WithoutDeclarations(ElementTree.TreeBuilder):
    """Builder that refuses declarations when the parser meets them, in any encoding."""

    def doctype(self, name: str, public: str | None, system: str | None) -> None:
        raise InvalidError("declares what belongs in no network")


def read_layers(path: Path) -> tuple[list[OpenVinoLayer], dict[str, Array]]:
    """Read all layers but the constants, and the constants by name. Raises WeightsError."""
    beside = path.with_suffix(".bin")
    try:
        text = read_regular(path, MAX_XML_BYTES)
        if text is None:
            raise InvalidError("is not there")
        weights = np.frombuffer(read_regular(beside, MAX_BIN_BYTES) or b"", np.uint8)
        layers, constants = [], {}
        for layer in _layers(ElementTree.fromstring(text, ElementTree.XMLParser(target=_WithoutDeclarations()))):
            if layer.kind == "Const":
                constants[layer.outputs[0]] = _constant(layer, weights, beside.name)
            else:
                layers.append(layer)
        return layers, constants
    except InvalidError as error:
        raise WeightsError(f"{path.name} {error}.") from error
    except OSError as error:
        raise WeightsError(f"{path.name} cannot be read: {error.strerror or error}.") from error
    except (ElementTree.ParseError, ValueError, TypeError, LookupError, OverflowError, MemoryError) as error:
        raise WeightsError(f"{path.name} is damaged, cut short, or not a network of OpenVINO.") from error


def _layers(root: ElementTree.Element) -> Iterator[OpenVinoLayer]:
    found = root.findall("layers/layer")
    if root.tag != "net" or not found:
        raise InvalidError("is not a network of OpenVINO")
    if root.get("version") not in ("10", "11"):
        raise InvalidError(f"is of version {root.get('version')} of OpenVINO's format; 10 and 11 are read")
    if len(found) > MAX_LAYERS:
        raise InvalidError(f"has more than {MAX_LAYERS} layers")
    names: dict[str, str] = {}
    taken: set[str] = set()
    for layer in found:
        name = layer.get("name", "") or layer.attrib["id"]
        names[layer.attrib["id"]] = name if name not in taken else f"{name}:{layer.attrib['id']}"
        taken.add(names[layer.attrib["id"]])
    values: dict[tuple[str, str], str] = {}
    for layer in found:
        number = layer.attrib["id"]
        for place, port in enumerate(layer.findall("output/port")):
            values[number, port.attrib["id"]] = names[number] + (f".{place}" if place else "")
    sources = {
        (edge.attrib["to-layer"], edge.attrib["to-port"]): values[edge.attrib["from-layer"], edge.attrib["from-port"]]
        for edge in root.findall("edges/edge")
    }
    for layer in found:
        number = layer.attrib["id"]
        ports = layer.findall("input/port")
        data = layer.find("data")
        yield OpenVinoLayer(
            names[number],
            layer.attrib["type"],
            layer.get("version", ""),
            {} if data is None else dict(data.attrib),
            tuple(sources[number, port.attrib["id"]] for port in ports),
            tuple(values[number, port.attrib["id"]] for port in layer.findall("output/port")),
            tuple(tuple(int(each.text or "-1") for each in port.findall("dim")) for port in ports),
        )


def _constant(layer: OpenVinoLayer, weights: Array, file_name: str) -> Array:
    kind = layer.data.get("element_type", "")
    shape = layer.numbers("shape")
    [offset], [size] = layer.numbers("offset"), layer.numbers("size")
    if kind != "bf16" and kind not in DTYPES:
        raise InvalidError(f"has weights of type {kind}, which are not read")
    dtype = np.dtype("<u2") if kind == "bf16" else DTYPES[kind]
    count = int(np.prod([max(0, length) for length in shape], dtype=object))
    if size != count * dtype.itemsize or offset < 0 or offset + size > len(weights):
        raise InvalidError(f"has weights that are not in {file_name}: {layer.name[:80]}")
    array: Array = np.frombuffer(weights[offset : offset + size].tobytes(), dtype)
    if kind == "bf16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.reshape(shape)
