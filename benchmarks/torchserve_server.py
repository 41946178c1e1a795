"""The same work in TorchServe, for benchmarks.race.

PYTHON -m benchmarks.torchserve_server FOLDER PLACE --port PORT

Its worker decodes and computes, in one process, batch after batch. PLACE is a folder for its files. It needs Java; it
is no dependency of ours.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from benchmarks.race_network import BATCH, WAIT_S, Decoder, Network

_QUIET = """<Configuration>
    <Appenders><Console name="console"/></Appenders>
    <Loggers><Root level="error"><AppenderRef ref="console"/></Root></Loggers>
</Configuration>
"""
"""No line for each request, as with the others."""
_FOLDER = "RACE_FOLDER"
"""Variable for TorchServe's worker, which loads this file as its handler."""


class Classify:
    """Handler of JPEGs as bodies."""

    def initialize(self, context: object) -> None:
        """Load the network in the worker's process."""
        self._decoder, self._network = Decoder(), Network(os.environ[_FOLDER])

    def handle(self, data: list[dict[str, Any]], context: object) -> list[dict[str, Any]]:
        """Return each image's classes."""
        return self._network.answers([self._decoder.decode(bytes(each["body"])) for each in data])


def _write(place: Path, port: int) -> Path:
    """Write the model and the settings of a server that listens on `port`; return the settings' file."""
    from benchmarks.servers import free_port

    shutil.rmtree(place, ignore_errors=True)
    model = place / "models" / "race"
    (model / "MAR-INF").mkdir(parents=True)
    shutil.copy(__file__, model / "handler.py")
    about = {"modelName": "race", "handler": "handler.py", "modelVersion": "1.0"}
    manifest = {"runtime": "python", "model": about, "archiverVersion": "0.12.0", "createdOn": ""}
    (model / "MAR-INF" / "MANIFEST.json").write_text(json.dumps(manifest))
    settings = {"defaultVersion": True, "marName": "race", "minWorkers": 1, "maxWorkers": 1, "responseTimeout": 300}
    settings |= {"batchSize": BATCH, "maxBatchDelay": round(WAIT_S * 1e3)}
    lines = {
        "inference_address": f"http://127.0.0.1:{port}",
        "management_address": f"http://127.0.0.1:{free_port()}",
        "metrics_address": f"http://127.0.0.1:{free_port()}",
        "grpc_inference_port": free_port(),
        "grpc_management_port": free_port(),
        "disable_system_metrics": "true",
        "models": json.dumps({"race": {"1.0": settings}}),
    }
    (place / "log4j2.xml").write_text(_QUIET)
    file = place / "config.properties"
    file.write_text("".join(f"{name}={value}\n" for name, value in lines.items()))
    return file


if __name__ == "__main__":
    place = Path(sys.argv[2])
    settings = _write(place, int(sys.argv[4]))
    programs = Path(sys.executable).parent
    # It starts "python", and writes where it stands and into two temporary folders.
    os.environ |= {_FOLDER: sys.argv[1], "PATH": f"{programs}:{os.environ['PATH']}", "TMPDIR": str(place)}
    os.environ["TEMP"] = str(place)
    os.chdir(place)
    options = [
        "--foreground",
        "--ncs",
        "--disable-token-auth",
        "--model-store",
        str(place / "models"),
        "--models",
        "race=race",
    ]
    options += ["--log-config", str(place / "log4j2.xml"), "--ts-config", str(settings)]
    os.execv(programs / "torchserve", ["torchserve", *options])
