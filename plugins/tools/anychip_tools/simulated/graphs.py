"""Captured graphs of a simulated device: the operators of a capture, run again on the same tensors.

Owns: the graph's class and its context, under the names of torch.cuda's. An engine that forgets to copy a batch into
the tensors of the capture, or its answers out, gets those of another batch, as on a chip. Must not know engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class _Capture(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records every operator inside it, with its arguments and its result."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[tuple[Callable[..., object], tuple[Any, ...], dict[str, Any], object]] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        self.steps.append((func, args, kwargs or {}, result))
        return result


def add_graphs(made: Any, graph_class: str, before_replay: Callable[[Tensor], None]) -> None:
    """Add graphs to a device's module. Each replay calls `before_replay` with the first tensor of its capture."""

    class Graph:
        def __init__(self) -> None:
            self._capture = _Capture()

        def replay(self) -> None:
            """Run the operators again, on the same tensors. Raises what an operator raises."""
            steps = self._capture.steps
            first = next((each for _, args, _, _ in steps for each in args if isinstance(each, Tensor)), None)
            if first is not None:
                before_replay(first)
            with torch.inference_mode():
                for func, args, kwargs, result in steps:
                    again = pytree.tree_leaves(func(*args, **kwargs))
                    for old, new in zip(pytree.tree_leaves(result), again, strict=True):
                        if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                            old.copy_(new)

        def reset(self) -> None:
            self._capture.steps.clear()

        def pool(self) -> tuple[int, int]:
            return 0, 0

    @contextmanager
    def graph(captured: Graph, pool: Any = None, stream: Any = None, **_: Any) -> Iterator[None]:
        with torch.inference_mode(), captured._capture:
            yield

    Graph.__qualname__ = Graph.__name__ = graph_class
    Graph.__module__ = made.__name__
    setattr(made, graph_class, Graph)
    made.graph, made.graph_pool_handle = graph, lambda: (0, 0)
