"""Errors of models: each message is one plain sentence that says what to do. Must not know what raises them."""

from __future__ import annotations

_MOST_REASON, _MOST_SENTENCE = 200, 4000


class ModelError(Exception):
    """Error of a model; the message is one plain sentence for the person who starts the service."""


class UnknownModelError(ModelError):
    """Name that is no known architecture's."""


class WeightsNotFoundError(ModelError):
    """Missing weights; the message says how to get them."""


class WeightsError(ModelError):
    """Weights that cannot be used: malicious, corrupt, of another network. A file may call its parts anything, so the
    message is cut, and has unprintable characters escaped, on one line.
    """

    def __init__(self, sentence: str) -> None:
        cut = sentence[:_MOST_SENTENCE]
        super().__init__("".join(each if each.isprintable() else repr(each)[1:-1] for each in cut))


def reason_of(error: BaseException) -> str:
    """Return a library's message for mid-sentence: the first line, and the next if it ends in a colon."""
    lines = [each.strip() for each in str(error).splitlines() if each.strip()] or [type(error).__name__]
    if "TorchScript interpreter" in lines[0]:  # The reason is below the lines of the script.
        lines = lines[-1:]
    reason = f"{lines[0]} {lines[1]}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]
    return reason[:_MOST_REASON].rstrip(".: ")
