"""On what terms a request is answered: until when, before whom, for whom, and who records it.

Owns: what is the same for images and tensors. Must not know a transport.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from app.access.limits import ClientLease
from app.scheduling.queue import Checked
from app.serving.recorder import Recorder


@dataclass(slots=True)
class Terms:
    """`deadline_s` is in `time.monotonic()`; of priorities 0 is normal, and higher ones go first. Clients share;
    `client_lease`: what the request holds of its client's limits, None where none are counted. `checked`: what was
    found before the body was read.
    """

    deadline_s: float
    priority: int = 0
    recorder: Recorder = field(default_factory=Recorder)
    client: str = ""
    client_lease: ClientLease | None = None
    checked: Checked | None = None
