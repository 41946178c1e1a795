"""Tracing by torch.fx while other threads compute: a worker loads a model while it answers for others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.fx import Proxy, Tracer


class ThreadTracer(Tracer):
    """Tracer of the networks that its own thread calls.

    While it traces, torch.fx replaces `__call__` and `__getattr__` of all modules in the process: other threads'
    networks would be taken for parts of this one, and fail. Here they compute as ever.
    """

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def call_module(  # noqa: D102
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Proxy]) -> Any:  # noqa: D102
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)
