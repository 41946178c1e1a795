"""The clock of a server's event loop: deadlines, ranks, durations.

Owns: which clock that is. It is `time.monotonic()`, and costs as much, except in a test in virtual time. Such a test
puts its loop's own clock here, so that measured times and timers agree. It is not `loop.time()`: uvloop counts that in
whole milliseconds. Times that processes of workers and decoders measure, and time stamps, are always real time.
"""

from __future__ import annotations

import time

monotonic = time.monotonic
