"""Client runner: what Frigate's `zmq` detector sends, and what it takes back, printed as JSON.

Runs without anything of anychip: python frigate_client.py ENDPOINT PIXELS HEIGHT WIDTH [CHECKOUT]. With a checkout of
Frigate its own class asks (frigate/detectors/plugins/zmq_ipc.py); what that imports of Frigate's configuration, which
wants the whole of Frigate, is put in its place.
"""

import importlib.util
import json
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import zmq


def theirs(checkout, endpoint, height, width):
    from pydantic import BaseModel

    folder = Path(checkout) / "frigate" / "detectors"
    for name in ("frigate", "frigate.detectors", "frigate.detectors.plugins", "frigate.detectors.detector_config"):
        sys.modules[name] = types.ModuleType(name)
    config = sys.modules["frigate.detectors.detector_config"]
    config.BaseDetectorConfig, config.ModelTypeEnum = BaseModel, object
    for name, file in (("detection_api", "detection_api.py"), ("plugins.zmq_ipc", "plugins/zmq_ipc.py")):
        spec = importlib.util.spec_from_file_location(f"frigate.detectors.{name}", folder / file)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    model = SimpleNamespace(path="/config/any.onnx", height=height, width=width, model_type=SimpleNamespace(name="ssd"))
    detector = module.ZmqIpcDetector(
        SimpleNamespace(endpoint=endpoint, request_timeout_ms=60_000, linger_ms=0, model=model)
    )
    return detector.detect_raw


def ours(endpoint, _, __):
    socket = zmq.Context().socket(zmq.REQ)
    socket.setsockopt(zmq.RCVTIMEO, 60_000)
    socket.connect(endpoint)
    socket.send_multipart([json.dumps({"model_request": True, "model_name": "any.onnx"}).encode()])
    said = json.loads(socket.recv())
    assert said["model_available"]
    assert said["model_loaded"]

    def ask(tensor):
        header = {"shape": list(tensor.shape), "dtype": tensor.dtype.name, "model_type": "ssd"}
        socket.send_multipart([json.dumps(header).encode(), tensor.tobytes()])
        [answer] = socket.recv_multipart()
        return np.frombuffer(answer, np.float32).reshape(20, 6)

    return ask


def main():
    endpoint, pixels, height, width, *checkout = sys.argv[1:]
    size = int(height), int(width)
    ask = theirs(*checkout, endpoint, *size) if checkout else ours(endpoint, *size)
    frame = np.fromfile(pixels, np.uint8).reshape(1, *size, 3)
    refused = ask(frame.astype(np.float32))
    print("REPORT", json.dumps({"rows": ask(frame).tolist(), "refused": refused.tolist()}))


if __name__ == "__main__":
    main()
