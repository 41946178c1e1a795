"""Session of tritonclient for test_tritonclient.py, in that client's own environment: no part of anychip here.

python tritonclient_session.py (http|grpc) HOST:PORT FILE.npz   # arrays in, a JSON report on stdout
"""

import json
import sys
from importlib.metadata import version

import numpy as np


def main() -> None:
    transport, url, file = sys.argv[1:4]
    if transport == "http":
        import tritonclient.http as triton
    else:
        import tritonclient.grpc as triton
    from tritonclient.utils import InferenceServerException

    given = np.load(file)
    encoded = [given["first"].tobytes(), given["second"].tobytes()]
    # Loading and unloading answer only when every worker has been replaced.
    patient = {"connection_timeout": 240, "network_timeout": 240} if transport == "http" else {}
    client = triton.InferenceServerClient(url, **patient)
    report = {"version": version("tritonclient"), "live": client.is_server_live(), "ready": client.is_server_ready()}
    report["model_ready"] = client.is_model_ready("resnet18"), client.is_model_ready("resnet18", "1")

    def as_dict(message):
        if isinstance(message, dict | list):
            return message
        from google.protobuf import json_format

        return json_format.MessageToDict(message, preserving_proto_field_name=True)

    report["server"] = as_dict(client.get_server_metadata())
    report["metadata"] = as_dict(client.get_model_metadata("resnet18"))
    config = as_dict(client.get_model_config("resnet18"))
    report["config"] = config.get("config", config)

    def infer(name, array, datatype, outputs=(), model="resnet18", binary=True, **options):
        tensor = triton.InferInput(name, list(array.shape), datatype)
        if transport == "http":
            tensor.set_data_from_numpy(array, binary_data=binary)
            wanted = [triton.InferRequestedOutput(each, binary_data=binary) for each in outputs] or None
        else:
            tensor.set_data_from_numpy(array)
            wanted = [triton.InferRequestedOutput(each) for each in outputs] or None
        return client.infer(model, [tensor], outputs=wanted, **options)

    def texts(result, name):
        return [each.decode() if isinstance(each, bytes) else str(each) for each in result.as_numpy(name).reshape(-1)]

    images = np.array(encoded, dtype=np.object_)
    result = infer("image", images, "BYTES", request_id="mine")
    response = result.get_response()
    report["id"] = response["id"] if isinstance(response, dict) else response.id
    report["image"] = {"predictions": texts(result, "predictions"), "logits": result.as_numpy("logits").tolist()}
    result = infer("image", images, "BYTES", model="yolov8n")
    report["detections"] = {"predictions": texts(result, "predictions"), "boxes": result.as_numpy("boxes").tolist()}

    for binary in (True, False) if transport == "http" else (True,):
        result = infer("pixels", given["pixels"], "UINT8", ["logits", "predictions"], binary=binary)
        report[f"pixels_{'binary' if binary else 'json'}"] = result.as_numpy("logits").tolist()
        result = infer("input", given["input"], "FP32", ["logits"], binary=binary)
        report[f"input_{'binary' if binary else 'json'}"] = result.as_numpy("logits").tolist()
    report["input_half"] = (
        infer("input", given["input"].astype(np.float16), "FP16", ["logits"]).as_numpy("logits").tolist()
    )

    tensor = triton.InferInput("image", [1], "BYTES")
    tensor.set_data_from_numpy(images[:1])
    best = client.infer("resnet18", [tensor], outputs=[triton.InferRequestedOutput("probabilities", class_count=3)])
    report["classification"] = texts(best, "probabilities")
    report["priority"] = infer("image", images[:1], "BYTES", priority=1, timeout=60_000_000).as_numpy("logits").shape
    if transport == "http":
        packed = infer(
            "pixels",
            given["pixels"],
            "UINT8",
            ["logits"],
            request_compression_algorithm="gzip",
            response_compression_algorithm="deflate",
        )
        report["compressed"] = packed.as_numpy("logits").tolist()

    report["statistics"] = as_dict(client.get_inference_statistics("resnet18"))
    index = as_dict(client.get_model_repository_index())
    report["index"] = index.get("models", []) if isinstance(index, dict) else index
    client.unload_model("yolov8n")
    report["unloaded"] = client.is_model_ready("yolov8n")
    client.load_model("yolov8n")
    report["loaded"] = client.is_model_ready("yolov8n")

    errors: dict[str, list[str] | None] = {}
    for what, run in {
        "model": lambda: infer("image", images, "BYTES", model="nobody"),
        "input": lambda: infer("photo", images, "BYTES"),
        "datatype": lambda: infer("pixels", given["input"], "FP32"),
        "shape": lambda: infer("pixels", given["pixels"][:, :5], "UINT8"),
        "output": lambda: infer("image", images, "BYTES", ["nothing"]),
        "content": lambda: infer("image", np.array([b"<html>"], dtype=np.object_), "BYTES"),
        "timeout": lambda: infer("image", images, "BYTES", timeout=1),
        "config": lambda: client.load_model("resnet18", config="{}"),
    }.items():
        try:
            run()
            errors[what] = None
        except InferenceServerException as error:
            errors[what] = [error.status(), error.message()]
    report["errors"] = errors
    client.close()
    json.dump(report, sys.stdout)


main()
