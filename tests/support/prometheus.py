"""Real Prometheus for the tests, with the shipped rules: `apt-get install prometheus` on Debian."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.support.service_process import free_port
from tests.support.work import until

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus"
MISSING = None if shutil.which("prometheus") and shutil.which("promtool") else "needs prometheus and promtool (apt)"
INTERVAL_S = 2


def alerts() -> dict[str, str]:
    groups = yaml.safe_load((RULES / "alerts.yml").read_text())["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


class Prometheus:
    """Running Prometheus; `targets` are services by job."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.started_s = time.time()
        self._folder = folder
        self._targets: dict[str, list[str]] = {}
        self._client = httpx.Client(base_url=url, timeout=60, trust_env=False)

    def is_ready(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return self._client.get("/-/ready").status_code == 200
        return False

    def watch(self, job: str, url: str) -> None:
        """Scrape a service, its series labelled with `job`; a job may have several."""
        self._targets.setdefault(job, []).append(url.removeprefix("http://"))
        self._write()

    def forget(self, job: str) -> None:
        self._targets.pop(job, None)
        self._write()

    def _write(self) -> None:
        found = [{"targets": targets, "labels": {"job": job}} for job, targets in self._targets.items()]
        written = self._folder / "targets.new"
        written.write_text(json.dumps(found))
        written.replace(self._folder / "targets.json")

    def get(self, path: str, **parameters: Any) -> Any:
        answer = self._client.get(f"/api/v1/{path}", params=parameters).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def now(self, expression: str) -> list[dict[str, str]]:
        return [each["metric"] for each in self.get("query", query=expression)["result"]]

    def values(self, expression: str) -> list[float]:
        """Return all values of an expression since the start, without NaN."""
        span = {"start": self.started_s, "end": time.time(), "step": INTERVAL_S}
        series = self.get("query_range", query=expression, **span)["result"]
        return [float(value) for each in series for _, value in each["values"] if value != "NaN"]

    def firing(self, job: str) -> set[str]:
        """Return the alerts whose expressions hold for a job now."""
        return {name for name, expr in alerts().items() if any(each.get("job") == job for each in self.now(expr))}

    def close(self) -> None:
        self._client.close()


@contextlib.contextmanager
def prometheus(folder: Path) -> Iterator[Prometheus]:
    address = f"127.0.0.1:{free_port()}"
    (folder / "targets.json").write_text("[]")
    every = f"{INTERVAL_S}s"
    config = {
        "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
        "rule_files": [str(RULES / "recording.yml"), str(RULES / "alerts.yml")],
        "scrape_configs": [
            {
                "job_name": "tests",
                "file_sd_configs": [{"files": [str(folder / "targets.json")], "refresh_interval": "1s"}],
            }
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
        "--enable-feature=exemplar-storage",
        "--log.level=warn",
    ]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    server = Prometheus(f"http://{address}", folder)
    try:
        until(lambda: process.poll() is not None or server.is_ready())
        assert process.poll() is None, (folder / "prometheus.log").read_text()
        yield server
    finally:
        server.close()
        process.terminate()
        process.wait(30)
