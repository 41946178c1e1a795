"""Hooks of a site that extend a vendor's own release of memory.

The setting `plugins` names modules that call `register_release_hook` at import; workers import them before they load.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

log = logging.getLogger(__name__)

ReleaseHook = Callable[[str], int | None]

_HOOKS: dict[str, list[ReleaseHook]] = {}


def register_release_hook(backend: str, hook: ReleaseHook) -> None:
    """Call `hook(device id)` whenever memory of a device of `backend` (its name, e.g. `npu`) is released.

    It runs after the vendor's own release, between batches, in the thread that owns the device. The hook returns the
    bytes it gave back, None if unknown. Its errors are logged and count as 0.
    """
    hooks = _HOOKS.setdefault(backend, [])
    if hook not in hooks:
        hooks.append(hook)


def run_release_hooks(backend: str, device: str) -> int:
    """Run the backend's hooks in the order of registration; return the sum of their bytes. Cannot raise."""
    returned = 0
    for hook in tuple(_HOOKS.get(backend, ())):
        try:
            returned += max(0, int(hook(device) or 0))
        except Exception:
            log.exception("a release hook for %s failed", device)
    return returned
