"""The watchdog tells a stopped process from an event loop that stands still."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

STOPPED = """
import asyncio, sys
from app.observability.watchdog import LoopWatchdog

async def main():
    watchdog = LoopWatchdog(0.3)
    watchdog.start()
    print("running", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await asyncio.sleep(0.2)
    watchdog.close()
    print(watchdog.longest_s, flush=True)

asyncio.run(main())
"""


def test_time_in_which_the_process_was_stopped_is_no_stall():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "running\n"
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        threading.Event().wait(1.5)
        process.send_signal(signal.SIGCONT)
        answer, said = process.communicate("\n", timeout=30)
    assert float(answer) < 0.2
    assert "stood still" not in said
