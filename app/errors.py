"""Every error a client can see, and the tables of HTTP's and gRPC's statuses.

    decode, admission, scheduling, workers ──raise──► ServiceError(code, sentence) ──► http, grpc ──► docs/api.md

Owns: codes, statuses and the body's shape. Must not know frameworks: routes and handlers turn these into responses.
Client mistakes say what was wrong; our own faults get a fixed text, their detail goes to the log under the request id.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

Code = Literal[
    "INVALID_REQUEST",
    "UNAUTHORIZED",
    "FORBIDDEN",
    "MODEL_NOT_FOUND",
    "NOT_FOUND",
    "METHOD_NOT_ALLOWED",
    "REQUEST_TIMEOUT",
    "UNSUPPORTED_MEDIA_TYPE",
    "BODY_TOO_LARGE",
    "IMAGE_TOO_LARGE",
    "INVALID_IMAGE",
    "QUEUE_FULL",
    "HEADERS_TOO_LARGE",
    "INFERENCE_FAILED",
    "INTERNAL",
    "NOT_READY",
    "MODEL_LOADING",
    "DRAINING",
    "DEADLINE_UNREACHABLE",
    "DEADLINE_EXCEEDED",
]


class ErrorKind(NamedTuple):
    """Statuses of a code; `meaning`: when it is answered, for the API description."""

    status: int
    grpc: str
    meaning: str


ERRORS: dict[Code, ErrorKind] = {
    "INVALID_REQUEST": ErrorKind(
        400, "INVALID_ARGUMENT", "The JSON, tensor, parameter or form cannot be read as it is."
    ),
    "UNAUTHORIZED": ErrorKind(401, "UNAUTHENTICATED", "API keys are on, and none that fits was sent."),
    "FORBIDDEN": ErrorKind(403, "PERMISSION_DENIED", "This may not be asked here, with this key, or by a web page."),
    "MODEL_NOT_FOUND": ErrorKind(404, "NOT_FOUND", "No model of this name is served."),
    "NOT_FOUND": ErrorKind(404, "NOT_FOUND", "There is nothing at this address."),
    "METHOD_NOT_ALLOWED": ErrorKind(405, "UNIMPLEMENTED", "This address takes another method."),
    "REQUEST_TIMEOUT": ErrorKind(408, "DEADLINE_EXCEEDED", "The headers or the body come too slowly."),
    "BODY_TOO_LARGE": ErrorKind(413, "RESOURCE_EXHAUSTED", "The request has more bytes than the service reads."),
    "IMAGE_TOO_LARGE": ErrorKind(413, "INVALID_ARGUMENT", "The image has more pixels than the service decodes."),
    "UNSUPPORTED_MEDIA_TYPE": ErrorKind(
        415, "INVALID_ARGUMENT", "The Content-Type or Content-Encoding is none that is read."
    ),
    "INVALID_IMAGE": ErrorKind(
        422,
        "INVALID_ARGUMENT",
        "The service reads JPEG, PNG, WebP, BMP and GIF, each whole; the message says what this file is.",
    ),
    "QUEUE_FULL": ErrorKind(429, "RESOURCE_EXHAUSTED", "As much is waiting as may wait. Try again after Retry-After."),
    "HEADERS_TOO_LARGE": ErrorKind(431, "RESOURCE_EXHAUSTED", "The headers have more bytes than the service reads."),
    "INFERENCE_FAILED": ErrorKind(
        500, "INTERNAL", "The model could not answer. The log has the reason under the request id."
    ),
    "INTERNAL": ErrorKind(
        500, "INTERNAL", "Something went wrong in the service. The log has the reason under the request id."
    ),
    "NOT_READY": ErrorKind(503, "UNAVAILABLE", "No worker is ready for this model. Try again after Retry-After."),
    "MODEL_LOADING": ErrorKind(
        503, "UNAVAILABLE", "The model is loaded on demand, and not before the deadline. Try again after Retry-After."
    ),
    "DRAINING": ErrorKind(503, "UNAVAILABLE", "The service is shutting down. Another replica may answer."),
    "DEADLINE_UNREACHABLE": ErrorKind(
        503, "UNAVAILABLE", "The answer could not be ready before the deadline, so nothing was begun."
    ),
    "DEADLINE_EXCEEDED": ErrorKind(
        504, "DEADLINE_EXCEEDED", "The request was accepted, and its deadline passed before the answer was ready."
    ),
}
"""HTTP's and gRPC's status of each code: an error to be tried again elsewhere or later is UNAVAILABLE in gRPC."""


class ServiceError(Exception):
    """Error of a request that cannot be answered. `message` is one plain sentence the client may read."""

    def __init__(
        self,
        code: Code,
        message: str,
        *,
        retry_after_s: int | None = None,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        """Make the error. `retry_after_s` becomes the Retry-After header; `headers` are sent as they are."""
        super().__init__(message)
        self.code: Code = code
        self.message = message
        self.retry_after_s = retry_after_s
        self.headers = tuple(headers)

    @property
    def status(self) -> int:
        """The HTTP status of `code`."""
        return ERRORS[self.code].status


class ClientLeftError(Exception):
    """Sign that the client has left: no answer is written."""


def invalid_request(message: str) -> ServiceError:
    """Make an INVALID_REQUEST with this sentence: the client's mistake."""
    return ServiceError("INVALID_REQUEST", message)


def of_image(number: int, error: ServiceError) -> ServiceError:
    """Name the image, counted from 0, in an error of one of a request's several images."""
    if error.code not in ("INVALID_IMAGE", "IMAGE_TOO_LARGE", "INFERENCE_FAILED"):
        return error
    return ServiceError(error.code, f"image {number}: {error.message}")


def internal_error() -> ServiceError:
    """Make an INTERNAL: our fault, whose detail is in the log under the request id."""
    return ServiceError("INTERNAL", "internal error; quote the request id")


def shutting_down() -> ServiceError:
    """Make a DRAINING: the service takes no requests any more."""
    return ServiceError("DRAINING", "the service is shutting down", retry_after_s=5)


def without_frames(error: ServiceError) -> ServiceError:
    """Remove from the error the calls that it came through, for code that keeps it after `except`.

    Their local variables, among them a body, would live as long as the error, for ever with an error in one of them.
    """
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return error


def error_body(code: Code, message: str, request_id: str) -> dict[str, str]:
    """Make the body of every error answer."""
    return {"error": message, "code": code, "request_id": request_id}
