"""gRPC client of the Open Inference Protocol for the tests, made of the service's own descriptions."""

from __future__ import annotations

import numpy as np
from google.protobuf.message_factory import GetMessageClass

from anychip_grpc.messages import METHODS, SERVICE, message
from tests.support.answers import element, elements
from tests.support.load import WAIT_S


def method(channel, name):
    descriptor = METHODS[name]
    kind = channel.stream_stream if descriptor.client_streaming else channel.unary_unary
    return kind(
        f"/{SERVICE}/{name}",
        request_serializer=GetMessageClass(descriptor.input_type).SerializeToString,
        response_deserializer=GetMessageClass(descriptor.output_type).FromString,
    )


def call(channel, method_name, timeout=WAIT_S, **fields):
    return method(channel, method_name)(GetMessageClass(METHODS[method_name].input_type)(**fields), timeout=timeout)


def image_request(*images, model="resnet18", **fields):
    request = message("ModelInferRequest")(model_name=model, **fields)
    request.inputs.add(name="image", datatype="BYTES", shape=[len(images)])
    request.raw_input_contents.append(b"".join(map(element, images)))
    return request


def infer(channel, request, timeout=WAIT_S, metadata=()):
    return method(channel, "ModelInfer")(request, timeout=timeout, metadata=metadata)


def arrays_of(response):
    types = {"FP32": "<f4", "INT32": "<i4"}
    return {
        output.name: np.frombuffer(content, types[output.datatype]).reshape(output.shape)
        for output, content in zip(response.outputs, response.raw_output_contents, strict=True)
        if output.datatype != "BYTES"
    }


def texts_of(response, name):
    [content] = [
        content
        for output, content in zip(response.outputs, response.raw_output_contents, strict=True)
        if output.name == name
    ]
    return elements(content)
