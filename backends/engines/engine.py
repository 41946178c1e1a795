"""What an engine is: a compiler that makes a network ready for fixed batch sizes.

Owns: the contract between a backend and its engines. A device says where, an engine says how; they are chosen apart.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from backends.backend import Executable, Network


class Engine(ABC):
    """One compiler or runtime."""

    name: str

    @abstractmethod
    def compile(self, network: Network, precision: str, batch_sizes: Sequence[int], threads: int) -> Executable:
        """Make `network` ready; it may be changed or emptied on the way. `precision` is not `auto` any more.

        `threads`: how many of the host's threads it may use. Raises EngineRefusedError with the reason.
        """
