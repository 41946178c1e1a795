"""Plugin for workers (`--plugins`): SIGUSR2 makes one hang, as in a driver call that never returns."""

from __future__ import annotations

import signal
import threading

signal.signal(signal.SIGUSR2, lambda *_: threading.Event().wait())
