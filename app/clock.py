"""The clock of what runs in a server's event loop: deadlines, ranks, what things took.

Owns: which clock that is. A call costs as much as `time.monotonic()`, which it is in every process but a test in
virtual time: that puts its loop's own clock here, so that what is measured and what a timer waits for are one time.
Not `loop.time()`: uvloop counts that in whole milliseconds. What processes of workers and decoders measure, and time
stamps, are real time always.
"""

from __future__ import annotations

import time

monotonic = time.monotonic
