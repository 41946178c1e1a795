"""Every error a client can see, and the tables of HTTP's and gRPC's statuses.

    decode, admission, scheduling, workers ──raise──► ServiceError(code, sentence) ──► http, grpc ──► docs/api.md

Owns: codes, statuses and the body's shape. Must not know frameworks: routes and handlers turn these into responses.
Client mistakes say what was wrong; our own faults get a fixed text, their detail goes to the log under the request id.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

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
    "DRAINING",
    "DEADLINE_UNREACHABLE",
    "DEADLINE_EXCEEDED",
]

STATUS: dict[Code, int] = {
    "INVALID_REQUEST": 400,
    "UNAUTHORIZED": 401,
    "FORBIDDEN": 403,
    "MODEL_NOT_FOUND": 404,
    "NOT_FOUND": 404,
    "METHOD_NOT_ALLOWED": 405,
    "REQUEST_TIMEOUT": 408,
    "BODY_TOO_LARGE": 413,
    "IMAGE_TOO_LARGE": 413,
    "UNSUPPORTED_MEDIA_TYPE": 415,
    "INVALID_IMAGE": 422,
    "QUEUE_FULL": 429,
    "HEADERS_TOO_LARGE": 431,
    "INFERENCE_FAILED": 500,
    "INTERNAL": 500,
    "NOT_READY": 503,
    "DRAINING": 503,
    "DEADLINE_UNREACHABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}

MEANINGS: dict[Code, str] = {
    "INVALID_REQUEST": "The JSON, tensor, parameter or form cannot be read as it is.",
    "UNAUTHORIZED": "API keys are on, and none that fits was sent.",
    "FORBIDDEN": "This may not be asked here, with this key, or by a web page.",
    "MODEL_NOT_FOUND": "No model of this name is served.",
    "NOT_FOUND": "There is nothing at this address.",
    "METHOD_NOT_ALLOWED": "This address takes another method.",
    "BODY_TOO_LARGE": "The request has more bytes than the service reads.",
    "IMAGE_TOO_LARGE": "The image has more pixels than the service decodes.",
    "REQUEST_TIMEOUT": "The headers or the body come too slowly.",
    "UNSUPPORTED_MEDIA_TYPE": "The Content-Type or Content-Encoding is none that is read.",
    "INVALID_IMAGE": "The file is no image, is truncated, or is of a kind that is not read.",
    "HEADERS_TOO_LARGE": "The headers have more bytes than the service reads.",
    "QUEUE_FULL": "As much is waiting as may wait. Try again after Retry-After.",
    "INFERENCE_FAILED": "The model could not answer. The log has the reason under the request id.",
    "INTERNAL": "Something went wrong in the service. The log has the reason under the request id.",
    "NOT_READY": "No worker is ready for this model. Try again after Retry-After.",
    "DRAINING": "The service is shutting down. Another replica may answer.",
    "DEADLINE_UNREACHABLE": "The answer could not be ready before the deadline, so nothing was begun.",
    "DEADLINE_EXCEEDED": "The request was accepted, and its deadline passed before the answer was ready.",
}
"""When each code is answered, in a sentence for people; the playground and the API description show it."""

GRPC_STATUS: dict[Code, str] = {
    "INVALID_REQUEST": "INVALID_ARGUMENT",
    "UNAUTHORIZED": "UNAUTHENTICATED",
    "FORBIDDEN": "PERMISSION_DENIED",
    "MODEL_NOT_FOUND": "NOT_FOUND",
    "NOT_FOUND": "NOT_FOUND",
    "METHOD_NOT_ALLOWED": "UNIMPLEMENTED",
    "REQUEST_TIMEOUT": "DEADLINE_EXCEEDED",
    "HEADERS_TOO_LARGE": "RESOURCE_EXHAUSTED",
    "BODY_TOO_LARGE": "RESOURCE_EXHAUSTED",
    "IMAGE_TOO_LARGE": "INVALID_ARGUMENT",
    "UNSUPPORTED_MEDIA_TYPE": "INVALID_ARGUMENT",
    "INVALID_IMAGE": "INVALID_ARGUMENT",
    "QUEUE_FULL": "RESOURCE_EXHAUSTED",
    "INFERENCE_FAILED": "INTERNAL",
    "INTERNAL": "INTERNAL",
    "NOT_READY": "UNAVAILABLE",
    "DRAINING": "UNAVAILABLE",
    "DEADLINE_UNREACHABLE": "UNAVAILABLE",
    "DEADLINE_EXCEEDED": "DEADLINE_EXCEEDED",
}
"""What gRPC calls them: those that a client should try again elsewhere or later are UNAVAILABLE."""


class ServiceError(Exception):
    """A request that cannot be answered. `message` is one plain sentence the client may read."""

    def __init__(
        self,
        code: Code,
        message: str,
        *,
        retry_after_s: int | None = None,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        """`retry_after_s` becomes the Retry-After header; `headers` are sent as they are."""
        super().__init__(message)
        self.code: Code = code
        self.message = message
        self.retry_after_s = retry_after_s
        self.headers = tuple(headers)

    @property
    def status(self) -> int:
        """The HTTP status of `code`."""
        return STATUS[self.code]


class ClientLeftError(Exception):
    """The client has left; there is nobody to answer."""


def invalid_request(message: str) -> ServiceError:
    """INVALID_REQUEST with this sentence: the client's mistake."""
    return ServiceError("INVALID_REQUEST", message)


def internal_error() -> ServiceError:
    """INTERNAL: our fault, whose detail is in the log under the request id."""
    return ServiceError("INTERNAL", "internal error; quote the request id")


def without_frames(error: ServiceError) -> ServiceError:
    """The error without the calls that it came through, for who keeps it after `except`.

    Their local variables would live as long as it does, and with an error in one of them for ever: among them a body.
    """
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return error


def error_body(code: Code, message: str, request_id: str) -> dict[str, str]:
    """The body of every error answer."""
    return {"error": message, "code": code, "request_id": request_id}
