"""Answer Frigate's `zmq` detector from a running anychip: a program of one file that needs pyzmq and nothing else.

Frigate sends a frame of any size as raw pixels, and takes 20 rows of six float32: class, score, top, left, bottom,
right, the last four as shares of the frame. One frame at a time: start one of these for each detector of Frigate.
Example: python anychip_zmq.py --bind tcp://0.0.0.0:5555 --url http://127.0.0.1:8000 --model yolov8n
"""

from __future__ import annotations

import argparse
import http.client
import json
import logging
import os
import struct
import time
from urllib.parse import urlsplit

import zmq

ROWS, COLUMNS = 20, 6
NOTHING = bytes(4 * ROWS * COLUMNS)
"""No detection: what Frigate's own detector answers with after an error."""
READY_S = 25.0
"""Frigate waits for 30 s for the first answer, and then never asks again."""
OUTPUTS = ("num_detections", "boxes", "scores", "classes")

log = logging.getLogger("anychip-zmq")


class Anychip:
    """One connection to the service, which is opened again after it broke."""

    def __init__(self, url: str, model: str, key: str, timeout_ms: int) -> None:
        """Name the service; nothing is asked yet."""
        self._url, self._model, self._timeout_ms = urlsplit(url), model, timeout_ms
        self._headers = {"X-Api-Key": key} if key else {}
        self._connection: http.client.HTTPConnection | None = None

    def _ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
        """Return status and body. Raises OSError, HTTPException."""
        for attempt in (1, 2):  # An idle connection may have been closed by the service.
            if self._connection is None:
                secure = self._url.scheme == "https"
                make = http.client.HTTPSConnection if secure else http.client.HTTPConnection
                self._connection = make(self._url.netloc, timeout=self._timeout_ms / 1000 + 1)
            try:
                self._connection.request(method, path, body, {**self._headers, **headers})
                answer = self._connection.getresponse()
                return answer.status, answer.read()
            except (OSError, http.client.HTTPException):
                self._connection.close()
                self._connection = None
                if attempt == 2:
                    raise
        raise AssertionError("unreachable")

    def ready(self) -> bool:
        """Wait until the model is ready, for as long as Frigate waits."""
        until = time.monotonic() + READY_S
        while True:
            try:
                if self._ask("GET", f"/v2/models/{self._model}/ready")[0] == 200:
                    return True
            except (OSError, http.client.HTTPException) as error:
                log.warning("%s does not answer: %s", self._url.netloc, error)
            if time.monotonic() > until:
                return False
            time.sleep(0.5)

    def rows(self, pixels: bytes, height: int, width: int) -> bytes:
        """Return what is in the frame, as Frigate's tensor. Raises OSError, HTTPException, ValueError."""
        parameters = {"resize": True, "binary_data_size": len(pixels)}
        tensor = {"name": "pixels", "datatype": "UINT8", "shape": [1, height, width, 3], "parameters": parameters}
        request = {
            "inputs": [tensor],
            "outputs": [{"name": name} for name in OUTPUTS],
            "parameters": {"max_detections": ROWS},
        }
        head = json.dumps(request).encode()
        headers = {"Inference-Header-Content-Length": str(len(head)), "X-Timeout-Ms": str(self._timeout_ms)}
        status, body = self._ask("POST", f"/v2/models/{self._model}/infer", head + pixels, **headers)
        if status != 200:
            raise ValueError(f"{status}: {body[:300]!r}")
        found = {each["name"]: each["data"] for each in json.loads(body)["outputs"]}
        numbers: list[float] = []
        for row in range(min(int(found["num_detections"][0]), ROWS)):
            left, top, right, bottom = found["boxes"][4 * row : 4 * row + 4]
            box = (top / height, left / width, bottom / height, right / width)
            numbers += [found["classes"][row], found["scores"][row], *box]
        return struct.pack(f"<{len(numbers)}f", *numbers).ljust(len(NOTHING), b"\0")


def answer(frames: list[bytes], anychip: Anychip) -> bytes:
    """Return the one frame that answers a message of Frigate's. Raises nothing for what a message holds."""
    try:
        header = json.loads(frames[0])
        if header.get("model_request") or header.get("model_data"):  # anychip has its own model: none is sent.
            loaded = anychip.ready()
            return json.dumps({"model_available": True, "model_saved": True, "model_loaded": loaded}).encode()
        shape = header["shape"]
        if len(shape) != 4 or shape[0] != 1 or shape[3] != 3 or header["dtype"] != "uint8":
            raise ValueError(f"{shape} of {header['dtype']}: say input_tensor nhwc, input_dtype int, rgb in Frigate")
        return anychip.rows(frames[1], shape[1], shape[2])
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, AttributeError) as error:
        log.warning("nothing for this frame: %s", error)
        return NOTHING


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description="Answer Frigate's zmq detector from a running anychip.")
    parser.add_argument("--bind", default="tcp://127.0.0.1:5555", help="default: %(default)s; Frigate's `endpoint`")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="anychip (default: %(default)s)")
    parser.add_argument("--model", default="yolov8n", help="a detector of anychip's (default: %(default)s)")
    parser.add_argument("--key", default=os.environ.get("ANYCHIP_KEY", ""), help="API key (default: $ANYCHIP_KEY)")
    parser.add_argument("--timeout-ms", type=int, default=180, help="deadline of a frame; less than Frigate's 200")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    anychip = Anychip(options.url, options.model, options.key, options.timeout_ms)
    with zmq.Context() as context, context.socket(zmq.REP) as socket:
        socket.bind(options.bind)
        log.info("answers at %s", options.bind)
        while True:
            socket.send(answer(socket.recv_multipart(), anychip))


if __name__ == "__main__":
    main()
