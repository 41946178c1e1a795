"""Scale and order of an exported network's input, by what the network does to it before its first layer with weights.

    pictures of one grey ─► what the first layer gets: factor * grey + shift ─► levels, shares, or nobody knows
    red and blue pictures ─► which channels of that they change, and by which mean ─► blue may be first

Owns: these measurements. Must not know files, nor what their owners state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Scale = Literal["levels", "shares", ""]
"""Numbers that a network wants. `levels`: 0 to 255; `shares`: 0 to 1; "": those that its owner normalises."""

_LAYERS: Mapping[str, int] = {
    **dict.fromkeys(("convolution", "_convolution", "conv1d", "conv2d", "conv3d", "linear", "matmul", "mm", "bmm"), 0),
    "addmm": 1,
}
"""Operators with weights, and the position of their input."""
_LEVELS, _SHARES = 0.1, 1.5
"""Factors of networks that divide levels, and of those that divide shares by a deviation, lie below and above these."""
_MEAN_LEVEL, _MEAN_SHARE = 20.0, 0.05
_BLUE_AND_RED, _NEAR = (0.406, 0.485), 3e-3  # ImageNet's means, and how far from them those of other programs are.
_SAME = 1e-3
_OF_LINEAR = 5e-3  # Half a step of 8 bits is less.
_LEAST = 1e-6


class _SeenError(Exception):
    """The first layer was reached."""


class OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that sees each operator, and does not import TorchDynamo for it: that takes longer than all of a trial."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _ToFirstLayer(OperatorMode):  # type: ignore[no-untyped-call]
    seen: Tensor | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        place = _LAYERS.get(func.overloadpacket.__name__)
        if place is not None:
            self.seen = args[place].detach().clone().float()
            raise _SeenError
        return func(*args, **(kwargs or {}))


def at_first_layer(run: Callable[[Tensor], object], pixels: Tensor) -> Tensor | None:
    """Return what the first layer with weights gets; None if there is none."""
    mode = _ToFirstLayer()  # type: ignore[no-untyped-call]
    try:
        with torch.inference_mode(), mode:
            run(pixels)
    except Exception:  # Runtimes wrap what ended the run; a run that fails for another reason has kept nothing.
        pass
    return mode.seen


def may_take_blue_first(
    at_layer: Callable[[Tensor], Tensor | None], pixels: Tensor, axis: int, *, is_exchanged: bool = False
) -> bool:
    """Return True if the network subtracts ImageNet's means with blue first; or if its first layer gets the last
    channel of `pixels` before the first, or has exchanged weights, and those means do not say that red is first.
    """
    black, changed, means = at_layer(torch.zeros_like(pixels)), list[Tensor](), list[float]()
    for channel in (0, 2):
        given = torch.zeros_like(pixels)
        given.select(axis, channel).fill_(255)
        seen = at_layer(given)
        if black is None or seen is None or seen.shape != black.shape:
            return is_exchanged
        of_channel = seen - black
        changed.append(of_channel.movedim(1 if seen.ndim == 4 else -1, 0).flatten(1).abs().amax(1) > _LEAST)
        mean = float((-255 * black / of_channel)[of_channel.abs() > _LEAST].median())
        means.append(mean / 255 if mean > 1 else mean)
    if all(abs(one - other) < _NEAR for one, other in zip(sorted(means), _BLUE_AND_RED, strict=True)):
        return means[0] < means[1]
    red, blue = (each.nonzero().double() for each in changed)
    return is_exchanged or (not bool((changed[0] & changed[1]).any()) and bool(red.mean() > blue.mean()))


def scale_of(at_layer: Callable[[Tensor], Tensor | None], pixels: Tensor) -> Scale:
    """Return the scale of a network's input. `at_layer`: what the first layer gets for images like `pixels`."""
    # A network in 8 bits may round its input to whole levels.
    return _scale_up_to(1.0, at_layer, pixels) or _scale_up_to(255.0, at_layer, pixels)


def _scale_up_to(top: float, at_layer: Callable[[Tensor], Tensor | None], pixels: Tensor) -> Scale:
    black, grey, white = (at_layer(torch.full_like(pixels, top * share)) for share in (0.0, 0.5, 1.0))
    if black is None or grey is None or white is None or not black.shape == grey.shape == white.shape:
        return ""
    factor, grey = (white - black) / top, (grey - black) / top
    of_image = factor.abs() > _LEAST  # The rest is padding.
    factor, shift, grey = factor[of_image], black[of_image], grey[of_image]
    if not len(factor) or not bool((grey - factor / 2).abs().max() <= _OF_LINEAR * factor.abs().max()):
        return ""
    least, most, mean = float(factor.min()), float(factor.max()), -shift / factor
    # A BatchNorm of normalised pixels may have small factors, too; its means are no levels.
    of_levels = bool(((mean.abs() < _SAME) | (mean > _MEAN_LEVEL)).all())
    if (0 < least <= most < _LEVELS and of_levels) or (
        abs(least - 1) + abs(most - 1) < _SAME and float(shift.max()) < -_MEAN_LEVEL
    ):
        return "levels"
    if least > _SHARES:
        return "shares" if bool(((mean >= 0) & (mean < 1)).all()) else ""
    # Who subtracts a mean and divides by nothing. A BatchNorm's factor is not exactly 1.
    is_mean = abs(least - 1) + abs(most - 1) < _SAME and bool(((mean > _MEAN_SHARE) & (mean < 1)).all())
    return "shares" if is_mean else ""
