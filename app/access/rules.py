"""Rules of access: the need of each route. A route that is not in the table is not reached; a test compares them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from app.errors import ServiceError

Need = Literal["open", "metrics", "infer", "admin"]
"""Condition of a route. `open`: every client; `metrics`: every client if it is set so; `infer`: a key, if there are
keys; `admin`: one of that role, at the administration's bind.
"""
Bind = Literal["public", "admin"]

LIVE = ("/v2/health/live", "/livez", "/healthz")
"""Paths of the liveness probe: the process answers at all."""
READY = ("/v2/health/ready", "/readyz", "/health")
"""Paths of the readiness probe: every model has a worker."""
ROUTES: dict[str, dict[str, Need]] = {
    # Liveness and readiness probes: load balancers and kubelets have no key.
    **{path: {"GET": "open"} for path in (*LIVE, *READY)},
    "/ping": {"GET": "open"},
    "/metrics": {"GET": "metrics"},
    # The pages are the same for all and tell nothing of this service; their own requests need a key.
    "/": {"GET": "open"},
    "/playground/facts.json": {"GET": "infer"},
    "/playground/{name:path}": {"GET": "open"},
    "/docs": {"GET": "open"},
    "/docs/assets/{path:path}": {"GET": "open", "HEAD": "open"},
    "/openapi.json": {"GET": "open"},
    "/v1/models/{model}:predict": {"POST": "infer"},
    **{
        path: {"GET": "infer"}
        for path in (
            *("/v1/models", "/v1/models/{model}", "/v1/models/{model}/labels", "/v1/devices", "/models"),
            *("/v1/stats", "/v1/stats/stream", "/v2", "/v2/", "/v2/stats", "/v2/models/stats"),
            *(f"/v2/models/{{model}}{each}" for each in ("", "/ready", "/config", "/stats")),
            *(f"/v2/models/{{model}}/versions/{{version}}{each}" for each in ("", "/ready", "/config", "/stats")),
        )
    },
    "/v2/models/{model}/infer": {"POST": "infer"},
    "/v2/models/{model}/versions/{version}/infer": {"POST": "infer"},
    "/v2/repository/index": {"POST": "infer"},
    "/predictions/{model}": {"POST": "infer", "PUT": "infer"},
    "/predictions/{model}/{version}": {"POST": "infer", "PUT": "infer"},
    "/v1/devices/{device}:release": {"POST": "admin"},
    **{f"/v2/repository/models/{{model}}/{each}": {"POST": "admin"} for each in ("load", "unload", "traffic")},
}
"""Needs by path, as the application writes it, and method."""

_PARAMETER = re.compile(r"\\\{(\w+)(:path)?\\\}")
_FIXED = {path: needs for path, needs in ROUTES.items() if "{" not in path}
_OTHER_SPELLING = re.compile(
    # Control characters, digits, letters, and of signs % - . / \\ _ ~; also a % that encodes nothing.
    rb"%(?:[01][0-9a-f]|2[5def]|3[0-9]|[46][1-9a-f]|[57][0-9a]|5[cf]|7[ef]|(?![0-9a-f]{2}))",
    re.IGNORECASE,
)


def offer(routes: Mapping[str, dict[str, Need]]) -> None:
    """Add the routes of clients that another package answers."""
    _FIXED.update({path: needs for path, needs in routes.items() if "{" not in path})
    _PATTERNS.extend((_pattern(path), needs) for path, needs in routes.items() if "{" in path)


def _pattern(template: str) -> re.Pattern[str]:
    """Return the pattern of a path: a parameter is one part of it, with `:path` the rest, as in the application."""
    named = _PARAMETER.sub(lambda found: f"(?P<{found[1]}>{'.*' if found[2] else '[^/]+'})", re.escape(template))
    return re.compile(named)


_ADMINISTERED = [(_pattern(path), path) for path, needs in ROUTES.items() if "admin" in needs.values()]
_PATTERNS = [(_pattern(path), needs) for path, needs in ROUTES.items() if "{" in path]


def need_of(method: str, path: str) -> Need:
    """Return the need of this method at this path. Raises NOT_FOUND if the table has nothing at this path.

    A method that the table does not have needs what the others need: the application then says that it is not allowed.
    """
    needs = _FIXED.get(path)
    if needs is None:
        needs = next((needs for pattern, needs in _PATTERNS if pattern.fullmatch(path)), None)
    if needs is None:
        raise ServiceError("NOT_FOUND", f"there is nothing at {path}; /docs lists what there is")
    return needs[method] if method in needs else next(iter(needs.values()))


def administered(path: str) -> tuple[str, dict[str, str]]:
    """Return a call's action and its object: `/v2/repository/models/dogs/load` loads the model dogs.

    An RPC has its action in its name, and its object in its message.
    """
    for pattern, template in _ADMINISTERED:
        if found := pattern.fullmatch(path):
            return re.split("[/:]", template)[-1], found.groupdict()
    return path.rpartition("/")[2].removeprefix("RepositoryModel").lower(), {}


def check_spelling(raw_path: bytes) -> None:
    """Refuse a path in another spelling than its own: a proxy in front may have taken it for another path.

    Those are encoded slashes, dots, control characters, and letters that need no encoding. Raises NOT_FOUND.
    """
    if b"%" in raw_path and _OTHER_SPELLING.search(raw_path):
        raise ServiceError("NOT_FOUND", "this path is spelt with % where it needs none; nothing is found like this")
