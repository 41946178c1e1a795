"""Predictions for many images by a running service. Must not import the service: it may run on another machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import httpx

from anychip_tools.prediction.files import FileOutcome, ImageSource
from app.arguments import CommandError

_TIMEOUT_S = 60.0
_TRIES = 6
_LONGEST_PAUSE_S = 10.0
_AGAIN = (429, 503, 504)  # The service is full or not ready now; a retry may succeed.
_DECODING = 4
"""Requests in transit or being decoded, beside those that devices compute or have waiting."""


class RemotePredictor:
    """Model of a service."""

    def __init__(self, url: str, model: str, query: dict[str, Any], key: str, parallel: int) -> None:
        """Ask for the model; with `parallel` 0 as many requests are in flight as keep the devices busy."""
        self._url = url.rstrip("/")
        self._query = query
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        described = self._describe(model)
        self.model = model
        self.weights = str(described["weights"])
        if described["task"] == "infer":
            raise CommandError(f"{model} takes tensors, not images: send them to /v2/models/{model}/infer")
        # While a device computes one full batch, another one must be waiting for it.
        batches = [max(each["batch_sizes"], default=1) for each in described["served_on"]]
        self.parallel = parallel or 2 * sum(batches) + _DECODING

    def outcomes(self, sources: Iterator[ImageSource]) -> Iterator[FileOutcome]:
        """Yield one outcome a source, in the order of the answers."""
        loop = asyncio.new_event_loop()
        answers = self._outcomes(sources)
        try:
            while True:
                try:
                    outcome = loop.run_until_complete(anext(answers))
                except StopAsyncIteration:
                    return
                yield outcome
        finally:
            loop.run_until_complete(answers.aclose())
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()

    def _describe(self, model: str) -> dict[str, Any]:
        try:
            answer = httpx.get(f"{self._url}/v1/models", headers=self._headers, timeout=_TIMEOUT_S)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise CommandError(f"nothing answers at {self._url}: {error}") from None
        if answer.status_code != 200:
            raise CommandError(f"{self._url} does not list its models: {_reason(answer)}")
        models: dict[str, dict[str, Any]] = {each["name"]: each for each in answer.json()["models"]}
        if model not in models:
            raise CommandError(f"there is no model {model!r} at {self._url}; there is {', '.join(models)}")
        return models[model]

    async def _outcomes(self, sources: Iterator[ImageSource]) -> AsyncGenerator[FileOutcome, None]:
        ended: asyncio.Queue[FileOutcome | None] = asyncio.Queue(self.parallel)

        async def work(client: httpx.AsyncClient) -> None:
            for source in sources:  # Shared by all workers; each takes the next one.
                await ended.put(await self._predict(client, source))

        async def work_all(client: httpx.AsyncClient) -> None:
            try:
                await asyncio.gather(*(work(client) for _ in range(self.parallel)))
            finally:
                await ended.put(None)

        limits = httpx.Limits(max_connections=self.parallel, max_keepalive_connections=self.parallel)
        async with httpx.AsyncClient(headers=self._headers, timeout=_TIMEOUT_S, limits=limits) as client:
            working = asyncio.create_task(work_all(client))
            try:
                while (outcome := await ended.get()) is not None:
                    yield outcome
                await working
            finally:
                working.cancel()
                await asyncio.gather(working, return_exceptions=True)

    async def _predict(self, client: httpx.AsyncClient, source: ImageSource) -> FileOutcome:
        try:
            encoded = await asyncio.to_thread(Path(source.path).read_bytes)
        except OSError as error:
            return FileOutcome(source, None, error.strerror or str(error))
        reason = ""
        for number in range(_TRIES):
            pause_s = min(_LONGEST_PAUSE_S, 0.1 * 2**number)
            try:
                answer = await client.post(
                    f"{self._url}/v1/models/{self.model}:predict",
                    params=self._query,
                    content=encoded,
                    headers={"Content-Type": "application/octet-stream"},
                )
            except httpx.HTTPError as error:
                reason = f"the service does not answer: {error or type(error).__name__}"
            else:
                if answer.status_code == 200:
                    return FileOutcome(source, answer.json()["predictions"][0], "", encoded)
                reason = _reason(answer)
                if answer.status_code not in _AGAIN:
                    break
                given = answer.headers.get("retry-after", "")
                pause_s = min(_LONGEST_PAUSE_S, float(given)) if given.isdigit() else pause_s
            if number < _TRIES - 1:
                await asyncio.sleep(pause_s)
        return FileOutcome(source, None, reason, encoded)


def _reason(answer: httpx.Response) -> str:
    try:
        document = answer.json()
        return f"{document['error']} ({document['code']})"
    except (ValueError, KeyError, TypeError):
        return f"status {answer.status_code}"
