"""MLflow's deployment target `anychip`: one file that needs mlflow-skinny and nothing of anychip.

A running service is asked: its models are the deployments, and what it serves is named where it starts. `run-local`
starts one for a model of MLflow's flavor `onnx`.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

from mlflow.deployments import BaseDeploymentClient, PredictionsResponse
from mlflow.exceptions import MlflowException

DEFAULT_URL = "http://127.0.0.1:8000"
FIXED = "anychip's models are named where it starts: anychip serve --models %s=FILE, or its rollout for a new version"


def target_help() -> str:
    """Return what `mlflow deployments help` prints."""
    return (
        f"The target is anychip:URL, as in anychip:http://gpu7:8000; anychip alone is $ANYCHIP_URL or {DEFAULT_URL}. "
        "An API key is read from $ANYCHIP_KEY. Deployments are the service's models; it is its operator who adds and "
        "removes them. Inputs are images: bytes or base64, one a row. run-local serves a model of the flavor onnx by "
        "the command anychip, with the config as its options (-C port=8000)."
    )


def run_local(name: str, model_uri: str, flavor: str | None = None, config: dict[str, Any] | None = None) -> None:
    """Serve a model until the command is stopped; the parameters are those that `mlflow deployments` gives, without
    the target that MLflow's documentation has in front. Raises MlflowException.
    """
    from mlflow.artifacts import download_artifacts

    if flavor not in (None, "onnx"):
        raise MlflowException(f"anychip reads what the flavor onnx has written, and not {flavor}")
    folder = Path(download_artifacts(artifact_uri=model_uri))
    files = sorted(folder.glob("*.onnx"))
    if len(files) != 1:
        raise MlflowException(f"{folder} has {len(files)} files .onnx: anychip serves a model of one")
    options = [word for key, value in (config or {}).items() for word in (f"--{key}", str(value))]
    try:
        subprocess.run(["anychip", "serve", "--models", f"{name}={files[0]}", *options], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise MlflowException(f"anychip ended: {error}") from error


def images(inputs: Any) -> list[str]:
    """Return the images of a data frame's one column, of a list, or of one value, in base64. Raises MlflowException."""
    if hasattr(inputs, "columns"):
        if len(inputs.columns) != 1:
            raise MlflowException(f"one column of images is wanted, and there are {len(inputs.columns)}")
        inputs = inputs.iloc[:, 0].tolist()
    found = [inputs] if isinstance(inputs, (bytes, str)) else list(inputs)
    if not all(isinstance(each, (bytes, str)) for each in found):
        raise MlflowException("an image is bytes, or a text of base64")
    return [base64.b64encode(each).decode() if isinstance(each, bytes) else each for each in found]


class AnychipClient(BaseDeploymentClient):  # type: ignore[misc]  # mypy does not know mlflow.
    """Client of a running service."""

    def __init__(self, target_uri: str) -> None:
        """Name the service; nothing is asked yet."""
        super().__init__(target_uri)
        url = target_uri.partition(":")[2] or os.environ.get("ANYCHIP_URL", DEFAULT_URL)
        if not url.startswith(("http://", "https://")):
            raise MlflowException(f"{target_uri} names no service: anychip:http://HOST:PORT")
        self._url = url.rstrip("/")

    def _ask(self, path: str, body: dict[str, Any] | None = None, timeout_s: float = 600) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("ANYCHIP_KEY"):
            headers["X-Api-Key"] = key
        try:
            with urlopen(Request(self._url + path, data, headers), timeout=timeout_s) as answer:
                return json.load(answer)
        except HTTPError as error:
            raise MlflowException(
                f"{self._url}{path}: {error.code} {error.read(500).decode(errors='replace')}"
            ) from error
        except (OSError, ValueError) as error:
            raise MlflowException(f"{self._url} does not answer: {error}") from error

    def list_deployments(self, endpoint: str | None = None) -> list[dict[str, Any]]:
        """Return the service's models."""
        found: list[dict[str, Any]] = self._ask("/v1/models")["models"]
        return found

    def get_deployment(self, name: str, endpoint: str | None = None) -> dict[str, Any]:
        """Return one of them. Raises MlflowException."""
        for each in self.list_deployments():
            if each["name"] == name:
                return each
        raise MlflowException(f"{self._url} serves no model {name}")

    def predict(
        self, deployment_name: str | None = None, inputs: Any = None, endpoint: str | None = None
    ) -> PredictionsResponse:
        """Return the service's predictions, one an image. Raises MlflowException."""
        instances = [{"b64": each} for each in images(inputs)]
        answer = self._ask(f"/v1/models/{quote(str(deployment_name), safe='')}:predict", {"instances": instances})
        return PredictionsResponse(answer)

    def create_deployment(self, name: str, *_: Any, **__: Any) -> None:
        """Refuse. Raises MlflowException."""
        raise MlflowException(FIXED % name)

    def update_deployment(self, name: str, *_: Any, **__: Any) -> None:
        """Refuse. Raises MlflowException."""
        raise MlflowException(FIXED % name)

    def delete_deployment(self, name: str, *_: Any, **__: Any) -> None:
        """Refuse. Raises MlflowException."""
        raise MlflowException(FIXED % name)
