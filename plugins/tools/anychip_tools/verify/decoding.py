"""Decoding on the device: its speed for single images and lists, and the error of its answers against the host's.

Owns: the measurement. app.worker.device_decoding, which a service uses for files of requests, decodes here too.
"""

from __future__ import annotations

from collections.abc import Iterator

from anychip_tools.benchmark.device_sweep import repeated_s
from anychip_tools.subjects import sample_model
from anychip_tools.verify.report import Figure, Finding
from app.precision.probes import decoded_by_host, probe_files
from app.worker.device_decoding import DeviceDecoding
from backends import BackendError
from backends.contract.backend import Backend
from models import PixelModel

LISTS = (1, 8, 32)
"""Numbers of images decoded at once."""


def run_decoding(backend: Backend, device: str, models: tuple[str, ...], seconds: float) -> Iterator[Finding]:
    """Yield a finding for each model; it also says so if the backend decodes nothing."""
    for name in models:
        model = sample_model(name)
        yield _finding(backend, device, model, seconds)


def _finding(backend: Backend, device: str, model: PixelModel, seconds: float) -> Finding:
    """Measure a model; answers that differ are a failure: `--decode device` would be refused.

    `images_per_s_1` and so on: decoded, placed and on the host again; `images_per_s_host`: by this process.
    """
    what = f"{model.name} decoding"
    if not backend.facts.computes:
        return Finding(what, "PASS", "this device computes nothing, and decodes nothing")
    engine = backend.facts.engines[-1]
    try:
        executable, report = backend.load(model.network(), device, engine, "auto", (len(probe_files()),))
    except BackendError as error:
        return Finding(what, "SKIP", f"there is nothing to compare answers of: {error}")
    decoder = backend.image_decoder(device)
    if decoder is None:
        executable.close()
        return Finding(what, "PASS", "the device decodes no images: the host does")
    decoding = DeviceDecoding(decoder, model)
    figures: dict[str, Figure] = {}
    files = probe_files()
    try:
        figures |= {f"error_{name}": float(f"{error:.2g}") for name, error in decoding.tried(executable).items()}
        for count in LISTS:
            images = [files[number % len(files)] for number in range(count)]
            decoding.decoded(images)
            taken_s = repeated_s(lambda images=images: decoding.decoded(images), seconds)  # type: ignore[misc]
            figures[f"images_per_s_{count}"] = round(count * len(taken_s) / sum(taken_s), 1)
    except BackendError as error:
        return Finding(what, "FAIL", str(error), figures)
    finally:
        executable.close()
    taken_s = repeated_s(lambda: decoded_by_host(model), seconds)
    figures["images_per_s_host"] = round(len(files) * len(taken_s) / sum(taken_s), 1)
    return Finding(what, "PASS", f"by {decoder.name}; answers of {report.engine} in {report.precision}", figures)
