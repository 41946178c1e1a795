"""Checks of what every backend promises of its devices, run on the device itself; the tests run the same checks.

Must not need a test framework: the machine with the card has no repository.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial, update_wrapper
from itertools import pairwise
from math import isnan
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anychip_tools.subjects import sample_model
from anychip_tools.verify.report import Finding
from app.precision.gate import on_cpu
from backends import Backend, BackendError, BackendUnavailableError, EngineRefusedError
from backends.contract.backend import Array, Pixels

MB = 2**20
_BATCHES = 10
_SPARE_BYTES = 60 * MB
_FLOAT32_ERROR = 3e-5
"""Most error of Products in float32, of the largest number: 3e-7 on a CPU, and 2.6e-4 or more where TF32 rounds."""


class BrokenPromiseError(Exception):
    """Break of a backend's promise; the message says what the device did."""


@dataclass(frozen=True)
class Subject:
    """Device under test. `exact`: its kernels are the CPU's, so that answers are equal bit by bit."""

    backend: Backend
    device: str
    exact: bool = False

    @property
    def is_eager(self) -> bool:
        """True if PyTorch computes on it, in memory of PyTorch's allocator; False if only compiled files run."""
        return "eager" in self.backend.facts.engines

    @property
    def how(self) -> tuple[str, str]:
        """Plainest engine and precision that the device has: eager in fp32, else the defaults."""
        return ("eager", "fp32") if self.is_eager else ("auto", "auto")

    def same(self, ours: Any, theirs: Any) -> bool:
        """Compare answers bit by bit, or up to the rounding of that precision."""
        tolerance = (0 if self.exact else 1e-5) if self.is_eager else 1e-2
        return len(ours) == len(theirs) and all(
            np.allclose(mine, other, rtol=tolerance, atol=tolerance) for mine, other in zip(ours, theirs, strict=True)
        )


class _Fixed(nn.Module):
    """Network of 8 x 6 pixels with weights from a fixed seed: every instance is the same network."""

    input_shape = (8, 6, 3)

    def __init__(self, features: nn.Conv2d, classes: nn.Linear, seed: int, most: float) -> None:
        super().__init__()
        self.features, self.classes = features, classes
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            parameter.data.copy_(torch.empty(parameter.shape).uniform_(-most, most, generator=generator))

    def cast(self, dtype: torch.dtype) -> None:
        """Cast the weights in place."""
        self.to(dtype)

    def placed(self, pixels: Tensor) -> Tensor:
        """Return the pixels as the convolution takes them."""
        return pixels.permute(0, 3, 1, 2).to(self.features.weight.dtype)


class SmallNetwork(_Fixed):
    """Convolution, matrix product, reduction, softmax, arg max: each a device kernel. Runs with `extra` bytes."""

    def __init__(self, extra: int = 0) -> None:
        super().__init__(nn.Conv2d(3, 8, 3), nn.Linear(8, 5), 0, 0.3)
        self.extra = extra
        self.features.weight.data /= 64  # Of pixels up to 255 the scores must not all be 0 or 1, whatever is computed.

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        """Compute uint8 [n, 8, 6, 3] -> scores float32 [n, 5], classes int64 [n]."""
        space = torch.empty(self.extra, dtype=torch.uint8, device=pixels.device)
        scores = self.classes(self.features(self.placed(pixels)).relu().mean((2, 3))).float().softmax(-1)
        del space
        return scores, scores.argmax(-1)


class Products(_Fixed):
    """Convolution and matrix product of numbers that need all 24 bits of float32, each an answer."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 16, 3), nn.Linear(16 * 6 * 4, 10), 1, 1)

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        """Compute uint8 [n, 8, 6, 3] -> float32 [n, 16, 6, 4], float32 [n, 10]."""
        features = self.features(self.placed(pixels) / 255)
        return features.float(), self.classes(features.flatten(1)).float()


def small_images(count: int = 2, seed: int = 0) -> Pixels:
    """Draw noise, uint8 [count, 8, 6, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (count, *SmallNetwork.input_shape), dtype=np.uint8)


def probe_and_devices(subject: Subject) -> None:
    """Check that the probe succeeds, that the device is listed, and that every device has memory."""
    backend = subject.backend
    probe, devices = backend.probe(), backend.devices()
    _hold(probe.available and not probe.reason, f"the probe says: {probe.reason}")
    names = [device.id for device in devices]
    _hold(subject.device in names, f"it is not among the devices, {names}")
    for device in devices:
        _hold(device.memory_bytes > 0, f"{device.id} has no memory")
        _hold(device.auto_precision in backend.facts.precisions, f"{device.id} prefers {device.auto_precision}")


def unknown_device_is_refused(subject: Subject) -> None:
    """Check that a device that does not exist is refused by name."""
    name = f"{subject.backend.name}:99"
    try:
        subject.backend.load(SmallNetwork(), name, "auto", "fp32", (1,))
    except BackendUnavailableError as error:
        _hold(f"There is no device '{name}'" in str(error), f"the refusal does not name it: {error}")
    else:
        raise BrokenPromiseError(f"a network was loaded on {name}, which is not there")


def small_network_answers(subject: Subject) -> None:
    """Check that convolution, matrix product, softmax and arg max answer as on the CPU."""
    executable, _ = subject.backend.load(SmallNetwork(), subject.device, *subject.how, (1, 2))
    answers = executable.run(small_images())
    expected = on_cpu(SmallNetwork(), small_images())
    _hold(subject.same(answers, expected), "its answers are not those of the CPU")
    executable.close()


def products_are_float32(subject: Subject) -> None:
    """Check that fp32 is float32 in every engine: a device may round products to 11 or 12 bits (TF32, HF32) unasked."""
    pixels = small_images(4)
    expected = on_cpu(Products(), pixels)
    backend = subject.backend
    for engine in (*backend.facts.engines, *backend.facts.by_name):
        try:
            executable, _ = backend.load(Products(), subject.device, engine, "fp32", (len(pixels),))
        except EngineRefusedError:  # The part `engines` tells why.
            continue
        pairs = zip(("convolution", "matrix product"), executable.run(pixels), expected, strict=True)
        errors = {what: float(np.abs(mine - theirs).max() / np.abs(theirs).max()) for what, mine, theirs in pairs}
        executable.close()
        for what, error in errors.items():
            bits = f"{engine} rounds more than float32 does: a {what} is off by {error:.1e} of the largest number"
            _hold(error <= _FLOAT32_ERROR, bits)


def batches_under_way(subject: Subject) -> None:
    """Check batches in flight: copying the next batch must not change the answers of the one before."""
    executable, _ = subject.backend.load(SmallNetwork(), subject.device, *subject.how, (1, 2, 4))
    buffers = [executable.buffer(4) for _ in range(executable.depth)]
    under_way: list[Any] = []
    answers: list[list[Array]] = []
    expected: list[tuple[Array, ...]] = []
    for number in range(_BATCHES):
        size = (4, 2, 1)[number % 3]
        pixels = buffers[number % len(buffers)]
        pixels[:size] = small_images(size, number)
        expected.append(on_cpu(SmallNetwork(), small_images(size, number)))
        under_way.append(executable.start(pixels[:size]))
        if len(under_way) == executable.depth:
            answers.append([output.copy() for output in under_way.pop(0).outputs()])
    answers += [[output.copy() for output in started.outputs()] for started in under_way]
    for number, (ours, theirs) in enumerate(zip(answers, expected, strict=True)):
        _hold(subject.same(ours, theirs), f"batch {number} got an answer that is not its own")
    _hold(not any(np.array_equal(one[0][0], other[0][0]) for one, other in pairwise(answers)), "answers are repeated")
    executable.close()


def memory_adds_up(subject: Subject) -> None:
    """Check that allocated, reserved, used and total fit each other, and that a release returns what it reports."""
    backend, device = subject.backend, subject.device
    backend.release_cache(device)
    executable, _ = backend.load(SmallNetwork(_SPARE_BYTES), device, *subject.how, (2,))
    before = backend.memory(device)
    _hold(0 <= before.allocated <= before.reserved <= before.total, f"memory does not add up: {before}")
    _hold(before.used <= before.total, f"more is used than there is: {before}")
    released = backend.release_cache(device)
    after = backend.memory(device)
    if backend.facts.device_type != "cpu" and subject.is_eager:
        cached = before.reserved - before.allocated
        if cached:  # An allocator may keep nothing, as that of PyTorch's own example of a vendor.
            _hold(cached >= _SPARE_BYTES, f"{cached} bytes are cached after a network that took {_SPARE_BYTES} at once")
            _hold(released >= _SPARE_BYTES, f"a release returned {released} bytes of {cached}")
        _hold(before.reserved - after.reserved == released, f"a release said {released} bytes: {before}, then {after}")
        _hold(after.allocated == before.allocated, "a release took memory that is in use")
    if subject.exact and backend.facts.device_type != "cpu":  # On a real device others take and free memory, too.
        _hold(before.used - after.used == released, "what was released is still used")
    executable.close()


def telemetry_is_numbers_or_silence(subject: Subject) -> None:
    """Check that each telemetry value of the device is possible, or unknown."""
    seen = subject.backend.telemetry(subject.device)
    _hold(all(isinstance(value, float) for value in vars(seen).values()), f"not all are numbers: {seen}")
    _hold(isnan(seen.utilization_ratio) or 0 <= seen.utilization_ratio <= 1, f"utilization {seen.utilization_ratio}")
    _hold(isnan(seen.temperature_celsius) or -40 < seen.temperature_celsius < 150, f"{seen.temperature_celsius} °C")
    _hold(isnan(seen.power_watts) or seen.power_watts >= 0, f"{seen.power_watts} W")


def error_of_a_batch(subject: Subject) -> None:
    """Check that an error of one batch is a BackendError, and not a lost device."""
    network = SmallNetwork()
    executable, _ = subject.backend.load(network, subject.device, *subject.how, (2,))
    where = next(network.parameters()).device
    network.classes = nn.Linear(7, 5).to(where)
    try:
        executable.run(small_images())
    except BackendError as error:
        _hold(type(error) is BackendError, f"it was taken for {type(error).__name__}: {error}")
    else:
        raise BrokenPromiseError("a matrix product of shapes that do not fit was computed")
    executable.close()


CHECKS: dict[str, Callable[[Subject], None]] = {
    "probe and devices": probe_and_devices,
    "a device that is not there": unknown_device_is_refused,
    "small network": small_network_answers,
    "products in float32": products_are_float32,
    "batches under way": batches_under_way,
    "memory": memory_adds_up,
    "telemetry": telemetry_is_numbers_or_silence,
    "error of a batch": error_of_a_batch,
}
NEEDS_COMPUTATION = {"small network", "products in float32", "batches under way", "memory", "error of a batch"}
"""Checks that a device which computes nothing cannot pass."""
NEEDS_EAGER = {
    "error of a batch": "a network that is compiled stays as it is",
    "products in float32": "only files compiled in another precision run here",
}
"""Checks for PyTorch's own kernels, and why compiled files alone cannot have them."""


def sample_weights_answer(architecture: str, subject: Subject) -> None:
    """Check that the sample images get the CPU's answers, up to the rounding of float32."""
    from app.precision.probes import probes

    model = sample_model(architecture)
    pixels = probes(model)
    executable, _ = subject.backend.load(model.network(), subject.device, *subject.how, (len(pixels),))
    ours = [output.copy() for output in executable.run(pixels)]
    executable.close()
    for mine, theirs in zip(ours, on_cpu(model.network(), pixels), strict=True):
        if np.issubdtype(theirs.dtype, np.floating):
            error = float(np.abs(mine - theirs).max() / np.abs(theirs).max())
            _hold(error <= (1e-3 if subject.is_eager else 1e-2), f"answers differ by {error:.2g} of the largest number")
        else:
            equal = float((mine == theirs).mean())
            _hold(equal > (0.999 if subject.is_eager else 0.99), f"only {equal:.2%} of whole numbers are equal")


def run_checks(subject: Subject, architectures: tuple[str, ...]) -> Iterator[Finding]:
    """Run every check in turn; a check that raises is a finding, and the next one runs all the same."""
    checks = dict(CHECKS)
    for architecture in architectures:
        answered = partial(sample_weights_answer, architecture)
        checks[f"{architecture}, sample weights"] = update_wrapper(answered, sample_weights_answer)
    for name, check in checks.items():
        computes = name in NEEDS_COMPUTATION or name.endswith("weights")
        if computes and not subject.backend.facts.computes:
            yield Finding(name, "SKIP", "this device computes nothing")
            continue
        if name in NEEDS_EAGER and not subject.is_eager:
            yield Finding(name, "SKIP", NEEDS_EAGER[name])
            continue
        try:
            check(subject)
        except Exception as error:
            yield Finding(name, "FAIL", f"{type(error).__name__}: {error}"[:500])
        else:
            yield Finding(name, "PASS", (check.__doc__ or "").partition("\n")[0])


def _hold(promise: bool, broken: str) -> None:
    if not promise:
        raise BrokenPromiseError(broken)
