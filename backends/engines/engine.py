"""Interface between compilers and backends: an engine, the walk over several of them, and steps of compilers.

Compilers that keep files in their own way have a folder each network, precision, device and version. Those files are
programs, so they lie below a folder that only this user may write to. Must not know vendors, models or images.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib
import importlib.util
import io
import logging
import os
import shutil
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn

from anychip_base import extras
from backends.contract.backend import (
    DEFAULTS,
    Array,
    CompileOptions,
    Executable,
    Form,
    LoadedNetwork,
    LoadReport,
    Network,
    Pixels,
    TensorNetwork,
    built,
    form_of,
)
from backends.contract.errors import (
    BackendError,
    DeviceLostError,
    EngineRefusedError,
    NotConvertedError,
    OutOfDeviceMemoryError,
    WrongAnswersError,
    first_line,
    translated_errors,
)
from backends.engines.cache import EngineCache, bound, private_folder
from backends.vendors.table import Facts

T = TypeVar("T")

log = logging.getLogger(__name__)

_MANY = 4096
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_FORMS: dict[Form, str] = {
    "pixels": "image networks",
    "onnx": "ONNX files",
    "program": "what torch.export has saved",
    "script": "TorchScript files",
    "openvino": "OpenVINO's files",
    "finished": "files that another vendor's compiler has made",
}


class Engine(ABC):
    """Engine: one compiler, for the devices of one vendor.

    `offers`: the precisions that it can compute in; `precisions`: those of them that are worth having on the vendor's
    devices. `forms`: the networks that it can compile at all. `takes`: the first time to make a network ready, all
    batch sizes together: a service may answer with an engine of seconds while one of minutes still compiles. `package`:
    without it the engine refuses in no time. `only_reads`: it leaves the network unchanged, and takes one that is
    Unbuilt. `keeps_int8`: the cache has networks that it has quantised, before it compiles; `keeps`: the cache has
    every network.
    """

    name: str
    offers: tuple[str, ...] = tuple(DTYPES)
    precisions: tuple[str, ...]
    forms: tuple[Form, ...] = ("pixels", "program")
    takes: Literal["seconds", "minutes"] = "seconds"
    package = ""
    only_reads = False
    keeps_int8 = False
    keeps = False

    def __init__(self, facts: Facts, threads: int = 1) -> None:
        """Make an engine for the vendor's row, `facts`. `threads`: cores it may use if it computes on the CPU."""
        self._facts, self._threads = facts, threads
        self.precisions = tuple(each for each in facts.precisions if each in self.offers)

    @abstractmethod
    def compile(
        self, network: Network, device: str, precision: str, batch_sizes: tuple[int, ...], options: CompileOptions
    ) -> Executable:
        """Make `network` executable for `batch_sizes` (ascending).

        The network is the engine's afterwards: it may be cast or moved in place. Raises EngineRefusedError,
        OutOfDeviceMemoryError.
        """

    def is_quick(self, network: Network, precision: str, options: CompileOptions) -> bool:
        """Return True if `compile` would take seconds, not minutes. Quantising takes minutes, unless it is in the
        cache.
        """
        if self.takes == "minutes":
            if not self.keeps or form_of(network) == "finished":
                return not _is_installed(self.package) or form_of(network) == "finished"
        elif precision != "int8" or options.calibration is None or not self.keeps_int8:
            return True
        try:
            parts, cache = self.parts(network, precision, options), _cache_of(options)
            return cache is not None and cache.get(**parts) is not None
        except EngineRefusedError:
            return True  # In refusing.

    def parts(self, network: Network, precision: str, options: CompileOptions, *more: object) -> Mapping[str, object]:
        """Return the parts that identify a network in the cache; `more`: further facts, as versions of packages."""
        return {
            "engine": self.name,
            "version": self.version(precision),
            "key": options.key,
            "shape": network.input_shape,
            "quantised": f"int8 {options.calibration_key}" if precision == "int8" else "",
            "more": more,
        }

    def version(self, precision: str) -> str:
        """Return the version of a compiler that has compiled; "" if it is part of PyTorch."""
        return ""


def calibration_of(options: CompileOptions) -> Callable[[], Pixels]:
    """Return the source of images to calibrate int8 on. Raises EngineRefusedError if the options have none."""
    if options.calibration is None:
        raise EngineRefusedError("int8 needs images to calibrate on: --calibrate DIR")
    return options.calibration


def kept_or_made(
    options: CompileOptions,
    parts: Mapping[str, object],
    make: Callable[[], T],
    save: Callable[[T, Path], object],
    load: Callable[[Path], T],
) -> T:
    """Return the object of these parts: loaded from the cache, else made now, and kept if possible."""
    cache = _cache_of(options)
    entry = cache.get(**parts) if cache else None
    if entry is not None:
        return load(entry)
    made = make()
    if cache is not None:
        cache.put(lambda folder: save(made, folder), **parts)
    return made


def _cache_of(options: CompileOptions) -> EngineCache | None:
    return EngineCache(options.cache_dir / "engines") if options.cache_dir and options.key else None


def compile_first(
    engines: Sequence[Engine],
    network: Network,
    device: str,
    precisions: Sequence[str],
    batch_sizes: Sequence[int],
    *,
    options: CompileOptions = DEFAULTS,
    completed: Callable[[Callable[[], LoadedNetwork]], LoadedNetwork] = lambda attempt: attempt(),
) -> LoadedNetwork:
    """Load the network on the first engine that takes it and passes the gate, which runs every batch size.

    `precisions`: the wanted one, and finer ones for engines that have it and fail or answer wrongly in it. `completed`
    calls its argument, and may call it again once it has removed the reason of its failure. Raises EngineRefusedError
    with every refusal, OutOfDeviceMemoryError, DeviceLostError, ValueError.
    """
    sizes = tuple(sorted(set(batch_sizes)))
    options = replace(options, batch_sizes=sizes)
    if not sizes or sizes[0] < 1:
        raise ValueError(f"Batch sizes must be positive and at least one, not {tuple(batch_sizes)}.")
    if form_of(network) == "openvino" and not any("openvino" in engine.forms for engine in engines):
        raise EngineRefusedError(
            "OpenVINO alone runs its files, on a CPU (--device cpu, --engine auto): export an .onnx for other devices "
            "and engines."
        )
    refusals: dict[str, str] = {}
    rejected: list[tuple[str, str]] = []
    staged, known, form = False, False, form_of(network)
    for precision in precisions:
        # A file's network may not compute in a precision that the file does not have: then a finer one is tried. The
        # same holds for an engine that stands in meanwhile.
        wrong = staged or options.automatic or (form != "pixels" and any(form in engine.forms for engine in engines))
        able = [engine for engine in engines if precision in engine.precisions and form in engine.forms]
        for engine in engines:
            name = engine.name if precision == precisions[0] else f"{engine.name} {precision}"
            if form not in engine.forms:
                refusals[engine.name] = f"it does not run {_FORMS[form]}"
                continue
            if engine not in able:
                refusals[name] = f"it offers {' and '.join(engine.precisions)} here, not {precision}"
                continue
            if refusal := options.refused(engine.name, precision, sizes):
                wrong = known = True
                if refusal.wrong:
                    rejected.append((engine.name, precision))
                refusals[name] = refusal.reason
                log.info("%s is not used on %s in %s: %s", engine.name, device, precision, refusal.reason)
                continue
            if options.quick and not engine.is_quick(network, precision, options):
                refusals[name] = f"{precision} takes long to make ready: it is made meanwhile, and takes over"
                staged = wrong = True
                continue
            # An engine may cast and move what it is given, and the next one wants it as it was.
            last = engine is able[-1] and precision == precisions[-1]
            given = network if engine.only_reads else built(network) if last else _copied(built(network))
            try:
                executable, report = completed(
                    partial(_ready, engine, given, device, precision, sizes, options=options)
                )
                report = replace(report, refusals=refusals, rejected=tuple(rejected), staged=staged)
                return LoadedNetwork(executable, report)
            except (OutOfDeviceMemoryError, DeviceLostError):
                raise
            except BackendError as error:
                wrong = True  # Or it cannot compute in a precision with mixed types of weights.
                if isinstance(error, WrongAnswersError):
                    rejected.append((engine.name, precision))
                elif isinstance(error, NotConvertedError):
                    options.unfit(engine.name, precision, sizes, str(error))
                refusals[name] = str(error)
                log.info("%s is not used on %s in %s: %s", engine.name, device, precision, error)
        if not wrong:
            break
        if not staged and precision != precisions[-1]:
            log.warning("no engine serves the network in %s on %s: %s", precision, device, refusals)
    if staged or known:  # Nothing can stand in meanwhile; no earlier verdict alone keeps a network from being served.
        options = replace(options, quick=False) if staged else replace(options, refused=DEFAULTS.refused)
        return compile_first(engines, network, device, precisions, sizes, options=options, completed=completed)
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
    raise EngineRefusedError(f"No engine runs this network on {device} in {precisions[0]} ({reasons}).")


def unpacking(network: Network) -> tuple[tuple[str, Callable[[Pixels], Array]], ...]:
    """Return each input's name, and a function that takes it from a batch; for images no name, and the whole batch.

    For a TensorNetwork it returns a view [n, *shape] of items [n, item_bytes]; without n if the graph has no batch
    axis.
    """
    if not is_packed(network):
        return (("", lambda images: images),)
    packed = cast(TensorNetwork, network)

    def taking(tensor: Any, start: int, stop: int) -> Callable[[Pixels], Array]:
        dtype, shape = tensor.dtype, tensor.shape
        return lambda items: items[:, start:stop].view(dtype).reshape((len(items), *shape) if packed.batched else shape)

    pairs = zip(packed.inputs, packed.places, strict=True)
    return tuple((tensor.name, taking(tensor, *place)) for tensor, place in pairs)


def is_batched(network: Network) -> bool:
    """Return True if the network's graph has a batch axis in its inputs and outputs."""
    return not is_packed(network) or cast(TensorNetwork, network).batched


def is_packed(network: Network) -> bool:
    """Return True if the network is a TensorNetwork, whose items hold several tensors."""
    return hasattr(network, "places")


def _copied(network: Network) -> Network:
    with warnings.catch_warnings():
        # torch_npu 2.13 copies tensors through what PyTorch deprecates, and warns of it.
        warnings.simplefilter("ignore")
        return copy.deepcopy(network)


def _ready(
    engine: Engine, network: Network, device: str, precision: str, sizes: tuple[int, ...], *, options: CompileOptions
) -> LoadedNetwork:
    executable = engine.compile(network, device, precision, sizes, options)
    try:
        report = LoadReport(engine.name, precision, engine.version(precision))
        return LoadedNetwork(executable, replace(report, measures=options.gate(executable, report)))
    except BaseException:
        executable.close()
        raise


# --- Steps of compilers


def imported(package: str, remedy: str) -> Any:
    """Import a compiler's package. Raises EngineRefusedError; `remedy` ends its sentence if it is not installed."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # They print; the command's output is not theirs.
            return importlib.import_module(package)
    except Exception as error:  # Vendors raise every kind.
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            raise EngineRefusedError(f"{package} is not installed: {remedy}") from error
        raise EngineRefusedError(f"{package} is installed and cannot be used: {first_line(error)}") from error


def version_of(package: str, remedy: str) -> str:
    """Return the version of a package, by its name on the index. Raises EngineRefusedError."""
    version = extras.version_of(package)
    if not version:
        raise EngineRefusedError(f"int8 needs {package}: {remedy}")
    return version


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except Exception:  # torch_npu's stand-in for torchair is loaded by the question, and may fail.
        return True


@contextlib.contextmanager
def without_prints() -> Iterator[None]:
    """Drop what PyTorch's exporter prints: of a network that it cannot export, each operator."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


@contextlib.contextmanager
def compiling(title: str, device: str) -> Iterator[None]:
    """Turn a compiler's errors into refusals, except too little memory and a lost device; its prints go to the log."""
    try:
        with contextlib.redirect_stdout(sys.stderr), translated_errors(device):
            yield
    except BackendError as error:
        if type(error) is BackendError:
            raise EngineRefusedError(f"{title} cannot compile this network: {error}") from error
        raise
    except Exception as error:
        raise EngineRefusedError(f"{title} cannot compile this network: {first_line(error)}") from error


Call = Callable[[Tensor], Sequence[Tensor]]
"""Network for one batch size: uint8 on the device -> its outputs there."""


def by_torch_compile(
    network: Network, device: str, batch_sizes: tuple[int, ...], backend: str | Callable[..., Any]
) -> dict[int, Call]:
    """Compile the network, on its device, by `backend` for every batch size now: no request has to wait for it.

    It compiles in one piece (`fullgraph`): code that PyTorch cannot trace, and a size too many, is an error, and not a
    silent way back to eager.
    """
    module: Call = torch.compile(cast(nn.Module, network), backend=backend, dynamic=False, fullgraph=True)
    # By default eight shapes of the same code, whichever network it belongs to.
    limits = {"cache_size_limit": _MANY, "accumulated_cache_size_limit": _MANY}
    patched: Any = torch._dynamo.config.patch(limits)
    with patched, torch.inference_mode():
        for size in reversed(batch_sizes):
            module(torch.zeros((size, *network.input_shape), dtype=torch.uint8, device=device))
    return dict.fromkeys(batch_sizes, module)


def with_own_folder(
    build: Callable[[Path | None], T],
    title: str,
    options: CompileOptions,
    *,
    network: Network,
    precision: str,
    machine: str,
) -> T:
    """Run `build` with the folder of a network and its target (`machine`); None: nothing may be kept.

    If the folder's contents cannot be used, run it again with the folder empty. The least recently used folders of
    others are removed until all are within the limit.
    """
    folder = private_folder(options.cache_dir / title.lower()) if options.cache_dir else None
    if folder is None:
        return build(None)
    weights = {} if options.key else cast(nn.Module, network).state_dict()
    own = folder / digest_of(weights, options.key, network.input_shape, precision, machine)
    own.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.utime(own)  # It was used: others go first.
    bound(folder, own)
    kept = any(own.iterdir())
    try:
        return build(own)
    except (torch.OutOfMemoryError, OutOfDeviceMemoryError, DeviceLostError):
        raise
    except Exception as error:  # Vendors raise every kind.
        if not kept:
            raise
        log.warning("what %s has kept cannot be used and is built anew: %s", title, first_line(error))
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir(mode=0o700, parents=True, exist_ok=True)
    return build(own)


def digest_of(tensors: Mapping[str, Any], *facts: object) -> str:
    """Return a name for the combination of these tensors and facts."""
    found = hashlib.sha256(repr([str(fact) for fact in facts]).encode())
    for name, tensor in sorted(tensors.items()):
        found.update(name.encode())
        if isinstance(tensor, Tensor):
            found.update(f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}".encode())
            found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()[:32]


def device_kind(device: str) -> str:
    """Return the device's name and compute capability: a program compiled for it serves no other."""
    module = torch.get_device_module(torch.device(device).type)
    asked = getattr(module, "get_device_name", None), getattr(module, "get_device_capability", None)
    return " ".join(str(ask(device)) for ask in asked if ask is not None)
