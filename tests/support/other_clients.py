"""Client runner: it asks a running service with one of other people's clients, and prints the results as JSON.

Has nothing of anychip; one client a process, since several describe the same messages to protobuf.
test_other_clients.py starts it: python other_clients.py CLIENT http://HOST:PORT GRPC_ADDRESS IMAGE [EXAMPLE]
"""

import asyncio
import base64
import json
import math
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace


def kserve(url, address, image, _):
    """Ask with KServe's SDK: its clients of v1 and v2 over REST, and of v2 over gRPC."""
    import numpy as np
    from kserve import InferInput, InferRequest
    from kserve.inference_client import InferenceGRPCClient, InferenceRESTClient, RESTConfig

    encoded = np.array([image], dtype=np.object_)

    async def ask():
        ran, found = [], {}
        first = InferenceRESTClient(RESTConfig(protocol="v1"))
        second = InferenceRESTClient(RESTConfig(protocol="v2"))
        assert await first.is_server_live(url)
        assert await second.is_server_live(url)
        assert await second.is_server_ready(url)
        for client in (first, second):
            assert await client.is_model_ready(url, "yolov8n")
        ran.append("liveness, readiness")
        instances = {"instances": [{"b64": base64.b64encode(image).decode()}]}
        answer = await first.infer(url, data=instances, model_name="yolov8n")
        found["v1"] = answer["predictions"][0]
        ran.append("`:predict` (v1)")
        for name, client in (("v2", second), ("grpc", InferenceGRPCClient(address))):
            tensor = InferInput("image", [1], "BYTES")
            tensor.set_data_from_numpy(encoded)
            request = InferRequest("yolov8n", [tensor])
            answer = await (client.infer(url, request, model_name="yolov8n") if name == "v2" else client.infer(request))
            [text] = next(output for output in answer.outputs if output.name == "predictions").as_numpy().reshape(-1)
            found[name] = json.loads(text)
            await client.close()
        await first.close()
        return [*ran, "infer (v2, gRPC)"], found

    return version("kserve"), *asyncio.run(ask())


def open_inference_rest(url, _, image, __):
    """Ask with the client of the protocol's working group, made of its OpenAPI description."""
    from open_inference.openapi.client import OpenInferenceClient
    from open_inference.openapi.types.inference_request import InferenceRequest
    from open_inference.openapi.types.request_input import RequestInput

    client = OpenInferenceClient(base_url=url)
    client.check_server_liveness()
    client.check_server_readiness()
    client.check_model_readiness("yolov8n")
    metadata = client.read_model_metadata("resnet18")
    assert client.read_server_metadata().name == "anychip"

    def infer(model, name, datatype, shape, data):
        tensor = RequestInput(name=name, datatype=datatype, shape=shape, data=data)
        return client.model_infer(model, request=InferenceRequest(inputs=[tensor])).outputs

    outputs = infer("yolov8n", "image", "BYTES", [1], [base64.b64encode(image).decode()])
    [text] = next(output for output in outputs if output.name == "predictions").data.__root__
    shape = [1, *next(each.shape for each in metadata.inputs if each.name == "pixels")[1:]]
    pixels = infer("resnet18", "pixels", "UINT8", shape, [114] * math.prod(shape))
    found = {"predictions": json.loads(text), "pixels": {each.name: each.shape for each in pixels}}
    return version("open-inference-openapi"), ["health, metadata", "infer of images and of pixels as JSON"], found


def open_inference_grpc(_, address, image, __):
    import grpc
    from open_inference.grpc import protocol, service

    with grpc.insecure_channel(address) as channel:
        stub = service.GRPCInferenceServiceStub(channel)
        assert stub.ServerLive(protocol.ServerLiveRequest()).live
        assert stub.ServerReady(protocol.ServerReadyRequest()).ready
        assert stub.ModelReady(protocol.ModelReadyRequest(name="yolov8n")).ready
        assert stub.ModelMetadata(protocol.ModelMetadataRequest(name="yolov8n")).inputs
        request = protocol.ModelInferRequest(model_name="yolov8n")
        tensor = request.inputs.add(name="image", datatype="BYTES", shape=[1])
        tensor.contents.bytes_contents.append(image)
        request.outputs.add(name="predictions")
        [content] = stub.ModelInfer(request).raw_output_contents
    found = {"predictions": json.loads(content[4:])}
    return version("open-inference-grpc"), ["health, metadata", "infer"], found


def deepstack_python(url, _, image, __):
    """Ask with the client of Home Assistant's integration."""
    from deepstack.core import DeepstackObject, DeepstackScene

    host, _, port = url.removeprefix("http://").partition(":")
    found = {
        "detection": DeepstackObject(host, int(port)).detect(image),
        "custom": DeepstackObject(host, int(port), custom_model="yolov8n").detect(image),
        "scene": DeepstackScene(host, int(port)).recognize(image),
    }
    return version("deepstack-python"), ["detection, custom model, scene"], found


def deepstack_sdk(url, _, image, __):
    from deepstack_sdk import Detection, SceneRecognition, ServerConfig

    config = ServerConfig(url)
    found = {
        "detection": [each.label for each in Detection(config).detectObject(image, min_confidence=0.45)],
        "custom": [each.label for each in Detection(config, name="yolov8n").detectObject(image, min_confidence=0.45)],
        "scene": SceneRecognition(config).recognizeScene(image).label,
    }
    return version("deepstack-sdk"), ["detection, custom model, scene"], found


def cvat(_, __, image, example):
    """Call the function that docs/protocols.md prints, like CVAT's driver, and check its answer with it."""
    import io
    import logging

    from cvat_sdk.auto_annotation import driver
    from PIL import Image

    function = SimpleNamespace(**_defined(example))
    labels = [
        SimpleNamespace(id=1000 + index, name=each.name, type="rectangle", attributes=[], sublabels=[])
        for index, each in enumerate(function.spec.labels)
    ]
    mapper = driver._AnnotationMapper(
        logging.getLogger(), function.spec.labels, labels, allow_unmatched_labels=False, conv_mask_to_poly=False
    )
    context = driver._DetectionFunctionContextImpl(frame_name="image.jpg", conf_threshold=0.4)
    found = function.detect(context, Image.open(io.BytesIO(image)))
    _, shapes = mapper.validate_and_remap(found, 7)
    boxes = [{"label": labels[each.label_id - 1000].name, "points": list(each.points)} for each in shapes]
    return version("cvat-sdk"), ["the function below, through its driver"], {"boxes": boxes}


def label_studio(url, _, __, example):
    """Ask the backend that docs/protocols.md prints over HTTP, like Label Studio."""
    import tempfile

    from label_studio_ml.api import init_app

    config = (
        '<View><Image name="image" value="$image"/><RectangleLabels name="label" toName="image">'
        '<Label value="cross"/></RectangleLabels></View>'
    )
    task = {"id": 1, "data": {"image": f"{url}/playground/samples/detect_1.jpg"}}
    with tempfile.TemporaryDirectory() as folder:
        client = init_app(_defined(example)["Detector"], model_dir=folder).test_client()
        assert client.post("/setup", json={"project": "1.1", "schema": config}).status_code == 200
        answer = client.post("/predict", json={"tasks": [task], "label_config": config, "project": "1.1"})
    assert answer.status_code == 200, answer.text
    return version("label-studio-ml"), ["the backend below, through its server"], answer.json["results"][0]


def x_anylabeling(url, _, image, __):
    """Call X-AnyLabeling's class for remote servers, like its window: choose a model and classes."""
    import os
    import tempfile

    os.environ["QT_QPA_PLATFORM"] = "offscreen"
    from anylabeling import config
    from anylabeling.services.auto_labeling.remote_server import RemoteServer
    from PyQt6.QtGui import QImage

    found, said = {}, []
    with tempfile.TemporaryDirectory() as folder:
        config.set_work_directory(folder)
        settings = Path(folder, ".xanylabelingrc")
        settings.write_text(f"remote_server_settings: {{server_url: '{url}', api_key: ''}}\n")
        config.current_config_file = str(settings)  # Like its program.
        file = Path(folder, "image.jpg")
        file.write_bytes(image)
        server = RemoteServer({"type": "remote_server", "display_name": "anychip"}, said.append)
        found["models"] = sorted(server.get_available_models())
        server.set_model_id("yolov8n")
        found["classes"] = server.classes
        for name in ("all", "some", "again"):
            chosen = [found["all"][-1][0]] if name == "some" else server.classes
            server.set_auto_labeling_filter_classes(chosen)
            drawn = server.predict_shapes(QImage(str(file)), str(file)).shapes
            found[name] = [(each.label, each.shape_type, [(at.x(), at.y()) for at in each.points]) for each in drawn]
    assert not said, said
    return (
        version("x-anylabeling-cvhub"),
        ["list of models, boxes, chosen classes (its class for remote servers)"],
        found,
    )


def _defined(example):
    names = {"__name__": "example"}
    exec(Path(example).read_text(), names)
    return names


CLIENTS = {
    each.__name__: each
    for each in (
        *(kserve, open_inference_rest, open_inference_grpc, deepstack_python, deepstack_sdk),
        *(cvat, label_studio, x_anylabeling),
    )
}


def main():
    name, url, address, image, *example = sys.argv[1:]
    version_, ran, found = CLIENTS[name](url, address, Path(image).read_bytes(), "".join(example))
    print("REPORT" + json.dumps({"version": version_, "ran": ran, "found": found}, default=str))


if __name__ == "__main__":
    main()
