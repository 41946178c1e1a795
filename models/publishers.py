"""Sources of weights: publishers' files, their cache, sample weights; conversion.

Owns: addresses, sizes and checksums of published files; the cache directory's layout. Must not know what a
network looks like, and reads no environment: directories and mirrors are parameters.

ImageNet weights are torchvision's (address and the beginning of the SHA-256 from its own registry). YOLOv8 weights are
the assets of the publisher's release v8.3.0; their sizes and SHA-256 are those several public projects record for it
(the publisher's release lists them, too).
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from models import classifiers
from models.contract.errors import UnknownModelError, WeightsError, WeightsNotFoundError
from models.download import RemoteFile, downloaded
from models.vision import torchvision
from models.weights.checkpoint import read

YOLOV8_RELEASE = "https://github.com/ultralytics/assets/releases/download/v8.3.0"
SAMPLES_IN_SOURCES = Path(__file__).parents[1] / "plugins" / "samples" / "anychip_samples"

_YOLOV8_FILES = {  # bytes, SHA-256
    "yolov8n": (6_549_796, "f59b3d833e2ff32e194b5bb8e08d211dc7c5bdf144b90d2c8412c47ccfc83b36"),
    "yolov8s": (22_588_772, "1f47a78bf100391c2a140b7ac73a1caae18c32779be7d310658112f7ac9aa78a"),
    "yolov8m": (52_136_884, "5d4a90cdc7a21786cc59cd19778e9eafff836df9e2da32524737c7ee6efe4fe5"),
    "yolov8l": (87_792_836, "64c9115303f6a25575f82200d1b22ec409fa6bd7d08d0313884fc20d919478cd"),
    "yolov8x": (136_890_692, "3df4ada6b4dad6d657868f2fdf7faecfb34dcfccf3a25c4b82079064718524c8"),
}
PUBLISHED = (*classifiers.ARCHITECTURES, *_YOLOV8_FILES)


def official_source(architecture: str, mirror: str = "") -> RemoteFile:
    """Return an architecture's published file, whose name the cache keeps; `mirror` is a URL that serves the same file
    names.

    Raises UnknownModelError.
    """
    size_bytes = None
    if architecture in _YOLOV8_FILES:
        size_bytes, sha256 = _YOLOV8_FILES[architecture]
        url = f"{YOLOV8_RELEASE}/{architecture}.pt"
    elif architecture in classifiers.ARCHITECTURES:
        url = torchvision.models.get_model_weights(architecture).DEFAULT.url
        # torchvision ends every file name with the first digits of its checksum, as torch.hub checks them.
        sha256 = Path(url).stem.rpartition("-")[2]
    else:
        raise UnknownModelError(f"No published weights of {architecture} are known: give a file of yours.")
    name = url.rpartition("/")[2]
    if mirror:
        url = f"{mirror.rstrip('/')}/{name}"
    return RemoteFile(name, url, sha256, size_bytes=size_bytes)


def sample_file(architecture: str) -> Path:
    """Return the sample weights, of the sources or of their package. Raises WeightsNotFoundError."""
    directory = SAMPLES_IN_SOURCES
    if not directory.is_dir():
        package = importlib.util.find_spec("anychip_samples")
        if package is None or package.origin is None:
            raise WeightsNotFoundError("pip install ./plugins/samples, in anychip's sources, brings sample weights.")
        directory = Path(package.origin).parent
    path = directory / f"{architecture}.safetensors"
    if not path.is_file():
        there = " and ".join(sorted(file.stem for file in directory.glob("*.safetensors"))) or "none"
        raise WeightsNotFoundError(f"There are no sample weights of {architecture}; there are {there}.")
    return path


def official_file(architecture: str, cache_directory: Path, allow_download: bool, mirror: str = "") -> Path:
    """Return the published weights in the cache, downloading missing ones.

    Raises UnknownModelError, WeightsNotFoundError, WeightsError.
    """
    source = official_source(architecture, mirror)
    path = cache_directory / source.name
    if path.is_file():
        source.check(path)  # Other users who may write to the cache may have changed it since.
        return path
    remedy = (
        f"run `anychip weights fetch {architecture}` where there is a network and copy {source.name} to "
        f"{cache_directory}, or use `--weights sample` or a path."
    )
    if not allow_download:
        raise WeightsNotFoundError(f"{path} is not there and downloads are off; {remedy}")
    return downloaded(replace(source, remedy=remedy), cache_directory)


def convert(source: Path, target: Path, dtype: torch.dtype = torch.float16) -> None:
    """Write the content of `source` as safetensors, floating-point tensors in `dtype`, labels in the metadata.

    Raises WeightsNotFoundError, WeightsError.
    """
    checkpoint = read(source)
    state = {}
    for name, tensor in checkpoint.state.items():
        if tensor.is_floating_point():
            converted = tensor.to(dtype)
            if not torch.equal(converted.isfinite(), tensor.isfinite()):
                raise WeightsError(f"{name} of {source.name} has values too large for {dtype}; convert to float32.")
            tensor = converted  # noqa: PLW2901
        state[name] = tensor.contiguous().clone()
    metadata = dict(checkpoint.metadata)
    if checkpoint.labels is not None:
        metadata["labels"] = json.dumps(checkpoint.labels, ensure_ascii=False)
    partial = target.with_name(target.name + ".part")
    try:
        save_file(state, partial, metadata)
        partial.replace(target)
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{target} cannot be written: {error}.") from error
