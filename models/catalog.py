"""Catalogue: from a name that a person writes (`resnet50`, `dogs=resnet50:dogs.safetensors`) to a servable model.

Owns: the grammar of model names, which family an architecture belongs to, where labels come from. Must not know how
families work. Reads no weights, only their names and shapes, so that a wrong file stops the start at once.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from models import addresses, classifiers, fetch
from models import publishers as weights
from models.contract.errors import ModelError, UnknownModelError, WeightsError, WeightsNotFoundError
from models.contract.files import OpenedFiles
from models.contract.model import PROGRAMS, Model
from models.exports import exported
from models.exports.files import names_beside, names_within
from models.exports.library_files import CONFIG, class_of, config_of, export_of, is_timm, library_of
from models.vision import torchvision
from models.weights.checkpoint import SUFFIXES, Checkpoint, labels_beside, read
from models.weights.opened import copied, looked_at
from models.weights.state import Fitted, SeveralNetworksError, check_modules
from models.yolo import model as yolo

log = logging.getLogger(__name__)

ARCHITECTURES: tuple[str, ...] = (*classifiers.ARCHITECTURES, *yolo.ARCHITECTURES)

_PINNED = re.compile(r"(.+)@sha256:([0-9A-Fa-f]{64})")
# A part of URLs and a metric label. The version follows @ where it is not the first.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}(@[A-Za-z0-9._-]{1,16})?")
_MAX_LABELS, _MAX_LABEL = 250_000, 1000
"""Most labels of a model, and most characters of one: answers and lists hold them, for any client that asks."""


_FOLDERS = {"_openvino_model": "xml", "_ascend_model": "om"}
"""Suffixes of Ultralytics' export folders with one network each, and the type of that network's file."""
_PICKLED = "pytorch_model.bin"
"""Weights in a folder of timm or transformers without safetensors: `save_for_hf` of timm writes them by default."""
_UNREAD = (
    *(".engine", ".tflite", ".mlpackage", ".keras", ".h5"),
    *("_ncnn_model", "_mnn_model", "_paddle_model", "_saved_model"),
)
"""Suffixes of other runtimes' files, which anychip does not read."""


_EXPORTED_FIRST = {"detection": "([image],)", "segmentation": "(image[None],)"}
"""Modules of torchvision whose networks are not built here, and what their exporter is given."""


@dataclass(frozen=True)
class ModelSpec:
    """A model to serve: `weights` is `official`, `sample`, `random` or a path.

    For a file with its own graph, `architecture` is its suffix without the dot, and `sidecar` is the text after "?"
    that replaces a sidecar file. For weights that name their own architecture, `architecture` is "". `sha256`: the
    required digest; "" accepts any.
    """

    name: str
    architecture: str
    weights: str
    sha256: str = ""
    sidecar: str = ""


@dataclass(frozen=True)
class _Family:
    fitted: Callable[[str, Checkpoint], Fitted]
    default_labels: Callable[[str], tuple[str, ...]]
    model: Callable[[str, str, Sequence[str], str, str | None], Model]


_CLASSIFIERS = _Family(classifiers.fitted, classifiers.default_labels, classifiers.Classifier.of)
_YOLO = _Family(yolo.fitted, yolo.default_labels, yolo.YOLO.of)


def parse_spec(text: str, default_weights: str = "official") -> ModelSpec:
    """Parse `[name=]architecture[:weights]`, `[name=]file.onnx` (.pt2, .ts, .xml, a folder of OpenVINO) or
    `[name=]best.pt`. Weights and files may be elsewhere (models.addresses).

    A sidecar's content may follow a file: `file.onnx?task=detect&size=640`. `@sha256:` and the digest that the file
    must have may end either form. Raises UnknownModelError, ModelError.
    """
    text = text.strip()
    sha256 = ""
    if pinned := _PINNED.fullmatch(text):
        text, sha256 = pinned[1], pinned[2].lower()
    head, _, chosen = text.partition(":")  # a path may hold both signs
    name, equals, architecture = head.rpartition("=")
    path = Path(text.rpartition("=")[2]).expanduser()
    elsewhere = addresses.split(text, sha256)
    ending = next((each for each in _FOLDERS if text.rstrip("/").endswith(each)), None)
    if elsewhere is not None:
        given, architecture, address = elsewhere
        if architecture and not library_of(architecture):
            _family(architecture)
        name = address.model_name if given is None else given
        spec = ModelSpec(name, architecture, address.text, sha256 or address.sha256, address.sidecar)
    elif ending is not None and architecture not in ARCHITECTURES:
        name, equals, folder = text.partition("=")
        path = Path(folder if equals else name)
        spec = ModelSpec(name if equals else path.name.removesuffix(ending), _FOLDERS[ending], str(path), sha256)
    elif (written := text.partition("?"))[0].endswith(exported.SUFFIXES) and architecture not in ARCHITECTURES:
        name, equals, file = written[0].partition("=")
        path = Path(file if equals else name)
        spec = ModelSpec(name if equals else path.stem, path.suffix[1:], str(path), sha256, written[2])
    elif library_of(architecture):
        if not chosen:
            raise UnknownModelError(f"{architecture} is built by timm from weights of yours: {text}:FILE, or a folder.")
        spec = ModelSpec(name if equals else architecture.partition("/")[2], architecture, chosen, sha256)
    elif text[-1:] not in ("", "=") and architecture not in ARCHITECTURES and path.is_dir():
        spec = ModelSpec(name if equals else path.resolve().name, "", str(path), sha256)
    elif head.endswith(SUFFIXES) and not chosen:
        name, equals, file = text.partition("=")
        path = Path(file if equals else name)
        spec = ModelSpec(name if equals else path.stem, "", str(path), sha256)
    else:
        _family(architecture)
        spec = ModelSpec(name if equals else architecture, architecture, chosen or default_weights, sha256)
    if sha256 and spec.weights == "random":
        raise ModelError(f"{spec.name} has random weights: there is no file whose SHA-256 could be checked.")
    if not _NAME.fullmatch(spec.name):
        raise ModelError(f"{spec.name!r} cannot name a model: use up to 64 letters, digits, dots, dashes, underscores.")
    return spec


def fetched(spec: ModelSpec, cache_directory: Path, allow_download: bool = True, *, again: bool = False) -> ModelSpec:
    """Return a model with weights on this machine, downloading them if they are elsewhere and not here yet.

    `again`: ask the Hub which commit a revision is now. Raises ModelError, WeightsNotFoundError, WeightsError.
    """
    if not addresses.is_elsewhere(spec.weights):
        return spec
    address = addresses.parse(spec.weights, spec.sha256)
    path = fetch.fetched(address, cache_directory, allow_download=allow_download, again=again)
    suffix = path.suffix if path.is_file() else ""
    architecture = spec.architecture or (suffix[1:] if suffix in exported.SUFFIXES else "")
    return replace(spec, architecture=architecture, weights=str(path))


def open_model(
    spec: ModelSpec, cache_directory: Path, allow_download: bool = True, mirror: str = "", *, trusted: bool = True
) -> Model:
    """Find the weights, downloading published ones and those at an address if needed, and return the model.

    The weights give the number of classes. Labels come from a file beside the weights or from their metadata. Otherwise
    they are those of the published weights if the number fits, else "class 0", "class 1", …. `trusted`: whether
    files that are programs (.pt2, .ts) may be read without a SHA-256 in the spec. Raises UnknownModelError,
    WeightsNotFoundError, WeightsError.
    """
    store = cache_directory / "opened"
    spec = fetched(spec, cache_directory, allow_download)
    folder = Path(spec.weights).expanduser()
    named = spec.architecture
    if not named and folder.is_dir() and (found := _of_library(folder)):
        spec = replace(spec, architecture=found[0], weights=str(found[1]))
    if f".{spec.architecture}" in exported.SUFFIXES:
        return _exported(spec, store, trusted)
    if library_of(spec.architecture):
        files = _looked_at(_weights_file(spec, cache_directory, allow_download, mirror), spec, is_graph=True)
        files = copied(files, store)
        if not named and (of_copy := _of_library(files.file.parent)) is not None:
            spec = replace(spec, architecture=of_copy[0])
        return _with(exported.open_exported(spec.name, files, "", spec.architecture), files)
    if spec.weights == "random":
        family = _family(spec.architecture)
        return family.model(spec.name, spec.architecture, family.default_labels(spec.architecture), "random", None)
    if spec.architecture:
        _family(spec.architecture)
    files = _looked_at(_weights_file(spec, cache_directory, allow_download, mirror), spec)
    if spec.weights not in ("official", "sample"):  # Nobody exchanges these files in their folders.
        files = copied(files, store)
    file = files.file
    if not spec.architecture:
        spec = replace(spec, architecture=_stated_by(file, spec))
    family = _family(spec.architecture)
    default_labels = family.default_labels(spec.architecture)
    header = read(file, with_data=False)
    try:
        fitted = family.fitted(spec.architecture, header)
        within = fitted.found
        check_modules(spec.architecture, within.modules, fitted.network, within.beside)
    except WeightsError as error:
        export = (
            f'torch.onnx.export(network.eval(), torch.rand(1, 3, 224, 224), "{file.stem}.onnx")'
            if family is _CLASSIFIERS
            else f"yolo export model={file.name} format=onnx"
        )
        own = f" A head or a network of your own is served from an export, of its own images' size: {export}."
        if isinstance(error, SeveralNetworksError) or (family is not _CLASSIFIERS and not header.modules):
            own = ""
        raise WeightsError(f"{file.name} cannot be used for {spec.name}: {error}{own}") from error
    if fitted.assumed and dict(files.digests)[files.main][:8] not in file.name:  # As published files are named.
        log.warning("%s: %s", files.source, fitted.assumed)
    if header.chosen:
        every = ", ".join(header.chosen)
        hint = "%s has several state dicts (%s): %s is served; for another one, torch.save(checkpoint[…], …) it alone"
        log.warning(hint, files.source, every, header.chosen[0])
    if (beside := file.with_suffix(".json")).is_file() and labels_beside(file) is None:
        log.warning("%s is not read beside %s: it is for exported networks", beside.name, file.name)
    labels, count = header.labels, fitted.class_count
    if labels is not None and len(labels) != count:
        raise WeightsError(f"{file.name} has {count} classes, but {len(labels)} labels were found for it.")
    if labels is None and len(default_labels) == count:
        labels = default_labels
    if labels is None:
        labels = tuple(f"class {number}" for number in range(count))
        log.warning(
            "%s has no labels for its %d classes; put them into %s.labels.txt beside it, one a line.",
            *(files.source, count, file.stem),
        )
    kind = spec.weights if spec.weights in ("official", "sample") else file.name
    return _with(family.model(spec.name, spec.architecture, labels, kind, str(file)), files)


def _exported(spec: ModelSpec, store: Path, trusted: bool) -> Model:
    file = Path(spec.weights).expanduser()
    if spec.architecture in _FOLDERS.values() and file.is_dir():
        networks = sorted(file.glob(f"*.{spec.architecture}"))
        if len(networks) != 1:
            raise WeightsNotFoundError(f"{file} holds {len(networks)} networks (.{spec.architecture}): name one.")
        [file] = networks
    if not file.is_file():
        raise WeightsNotFoundError(f"There is no file {str(file)!r} for {spec.name}.")
    beside, above = file.absolute().parent, file.absolute().parent.parent
    alone = not (beside / CONFIG).exists() and not file.with_suffix(".json").exists()
    if alone and beside.name == "onnx" and config_of(above):  # As the libraries' folders have it.
        raise WeightsError(
            f"the {CONFIG} of {file.name} lies in the folder above it: copy {CONFIG} and preprocessor_config.json "
            f"beside the file (cp {above}/*.json {beside})."
        )
    files = _looked_at(file, spec, is_graph=True)
    if file.suffix in PROGRAMS and not (trusted or spec.sha256):
        raise WeightsError(
            f"{file.name} is a program that would run here with the service's rights: name the file you trust as "
            f"{spec.name}={spec.weights}@sha256:{files.sha256}, or trust all of them with --trust-exported true."
        )
    files = copied(files, store)
    return _with(exported.open_exported(spec.name, files, spec.sidecar), files)


def _stated_by(file: Path, spec: ModelSpec) -> str:
    header = read(file, with_data=False)
    found = yolo.architecture_of(header.state)
    network, described = (header.metadata.get(key, "") for key in ("network", "yaml_file"))
    if not network.startswith("ultralytics."):
        if found:
            return found
        raise WeightsError(
            f"{file.name} does not say which network its {len(header.state)} tensors are of: name it, for example "
            f"{spec.name}=resnet50:{spec.weights} or {spec.name}=timm/convnext_tiny:{spec.weights}."
        )
    try:
        yolo.fitted(found or "yolov8n", header)
    except WeightsError:
        first = next((tensor for name, tensor in header.state.items() if name.endswith("model.0.conv.weight")), None)
        channels = "" if first is None or first.shape[1] == 3 else f" for images of {first.shape[1]} channels"
        raise WeightsError(
            f"{file.name} is a {described or network.rpartition('.')[2]} of Ultralytics{channels}, which is not built "
            f"here: yolo export model={file.name} format=onnx."
        ) from None
    return found


def _of_library(folder: Path) -> tuple[str, Path] | None:
    config, files = config_of(folder), sorted(folder.glob("*.safetensors")) or sorted(folder.glob(_PICKLED))
    graphs = sorted(folder.glob("*.onnx"))
    if not config and not graphs and (sentence := export_of(folder)):
        raise WeightsError(sentence)
    if not config or (graphs and not files):
        return ("onnx", graphs[0]) if len(graphs) == 1 else None
    if len(files) != 1:
        way = " Save it again in one: save_pretrained(folder, max_shard_size='1TB')." if files else ""
        if not files and (folder / "onnx").is_dir():
            way = f" Name a file of {folder}/onnx, with a copy of {folder}/*.json beside it."
        if not files and (networks := sorted(folder.glob("*.xml"))):
            way += f" OpenVINO's network is served by its own name: {networks[0]}."
        raise WeightsError(f"{folder} has a {CONFIG} and {len(files)} files of weights, of which one is read.{way}")
    if is_timm(config):
        return f"timm/{config['architecture']}", files[0]
    return f"transformers/{class_of(config) or config['model_type']}", files[0]


def _looked_at(file: Path, spec: ModelSpec, *, is_graph: bool = False) -> OpenedFiles:
    """Return all files of a model in their original place. Raises WeightsError for another digest than the spec's."""
    files = looked_at(file, names_beside(file, is_graph=is_graph), names_within)
    if spec.sha256 and files.sha256 != spec.sha256:
        what, others = f"{file.name} has", [name for name, _ in files.digests if name != files.main]
        if others:
            what = f"{file.name} and what is read beside it ({', '.join(others[:20])}) have together"
        raise WeightsError(f"{what} SHA-256 {files.sha256}, not {spec.sha256} as --models says.")
    return files


def _with(model: Model, files: OpenedFiles) -> Model:
    if len(model.labels) > _MAX_LABELS or any(len(label) > _MAX_LABEL for label in model.labels):
        raise WeightsError(f"{model.name} has more than {_MAX_LABELS} labels, or one of over {_MAX_LABEL} characters.")
    if not files.is_copy:
        files.check()
    return replace(model, weights_sha256=files.sha256, files=files)


def _family(architecture: str) -> _Family:
    if architecture.rstrip("/").endswith(_UNREAD):
        by_keras = f': keras.models.load_model("{architecture}").export("mine.onnx", format="onnx")'
        raise UnknownModelError(
            f"{architecture} is not read: export the network that it was made of as .onnx instead"
            f"{by_keras if architecture.endswith(('.keras', '.h5')) else ''}."
        )
    if architecture in classifiers.ARCHITECTURES:
        return _CLASSIFIERS
    if architecture in yolo.ARCHITECTURES:
        return _YOLO
    for module, given in _EXPORTED_FIRST.items():
        if architecture in torchvision.models.list_models(module=getattr(torchvision.models, module)):
            raise UnknownModelError(
                f"{architecture} of torchvision is served from an export (docs/which-file.md): torch.onnx.export("
                f'network.eval(), {given}, "best.onnx", dynamo=False), with an image [3, height, width] in 0 to 1.'
            )
    if architecture.startswith(("/", ".", "~")):
        raise UnknownModelError(f"There is no folder {architecture!r}, and no file of a kind that is read.")
    near = difflib.get_close_matches(architecture.lower(), ARCHITECTURES, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else "`anychip weights list` names those that are known."
    raise UnknownModelError(f"No model {architecture!r} is known; {hint}")


def _weights_file(spec: ModelSpec, cache_directory: Path, allow_download: bool, mirror: str) -> Path:
    if spec.weights == "official":
        return weights.official_file(spec.architecture, cache_directory, allow_download, mirror)
    if spec.weights == "sample":
        return weights.sample_file(spec.architecture)
    path = Path(spec.weights).expanduser()
    if path.is_dir():  # E.g. /mnt/models filled by KServe's storage initialiser.
        files = sorted(each for each in path.iterdir() if each.suffix in SUFFIXES and each.is_file())
        if len(files) != 1:
            raise WeightsNotFoundError(f"{path} holds {len(files)} weights files ({', '.join(SUFFIXES)}): name it.")
        [path] = files
    if not path.is_file():
        raise WeightsNotFoundError(f"There is no weights file {spec.weights!r} for {spec.name}.")
    return path
