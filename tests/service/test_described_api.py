"""Schemathesis asks every route for what its description allows, and for what it does not: nothing is a 500, or slow.

In an environment of its own, which `make fuzz` makes: as a plugin it would slow every test down.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.null_service import is_ready, serving

ROOT = Path(__file__).parents[2]
PROGRAM = Path(os.environ.get("ANYCHIP_TEST_SCHEMATHESIS") or ROOT / ".venv-audit" / "bin" / "schemathesis")
SECONDS = int(os.environ.get("ANYCHIP_TEST_FUZZ_SECONDS", "120"))

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not PROGRAM.exists(), reason=f"schemathesis is not there: make fuzz; {PROGRAM}"),
]


def test_no_request_that_is_described_or_not_is_a_fault(tmp_path):
    with serving(tmp_path, "") as service:
        command = [PROGRAM, "run", f"{service.url}/openapi.json", "--checks", "not_a_server_error"]
        command += ["--max-response-time", "10", "--max-time", str(SECONDS), "--phases", "coverage,fuzzing"]
        # A stream has no end to wait for.
        command += ["--exclude-path", "/v1/stats/stream", "--continue-on-failure", "--suppress-health-check", "all"]
        ended = subprocess.run(
            list(map(str, command)), cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS + 300, check=False
        )
        (tmp_path / "schemathesis.txt").write_text(ended.stdout)
        failed = [line for line in ended.stdout.splitlines() if "[500]" in line]
        assert not failed, ended.stdout[-6000:]
        assert is_ready(service)
        assert "the request failed" not in service.log.read_text()
