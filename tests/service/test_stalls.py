"""The server never stands still: faults on a null device that is as real ones are, watched from another process."""

from __future__ import annotations

import os
import signal

import grpc
import httpx
import pytest

from tests.support.answers import infer_images
from tests.support.constants import HEARTBEAT_TIMEOUT_S
from tests.support.grpc_client import image_request, infer, method
from tests.support.images import GREY
from tests.support.load import WAIT_S, Load, until
from tests.support.null_service import MODEL, PREDICT, assert_nothing_left, is_ready, metric
from tests.support.service_process import free_port

SLOW_TO_IMPORT = "delay_ms=20,import_ms=3000"


async def test_a_frozen_worker_holds_nobody_up(serve):
    with serve(SLOW_TO_IMPORT, "--batch-sizes", "1,4", constants={HEARTBEAT_TIMEOUT_S: 2}) as service:
        async with Load(service.url, PREDICT, GREY, 8) as load:
            await load.answers(20)
            os.kill(service.worker().pid, signal.SIGSTOP)
            await until(lambda: metric(service, "anychip_worker_restarts_total", reason="hung") == 1)
            await until(lambda: is_ready(service))
            await load.answers(20)
        assert set(load.outcomes) == {(200, "OK")}
        assert_nothing_left(service)


def test_answers_of_96_mb_hold_nobody_up(serve):
    """48 images with outputs of 2 MB: copied, written and serialised outside the event loop; half of them over gRPC,
    whose library copies each answer in the loop, and refuses the whole.
    """
    size, images = 48 * 2 << 20, [GREY] * 48
    port = free_port()
    request, larger = image_request(*images[::2], model=MODEL), image_request(*images, model=MODEL)
    for each in (request, larger):
        each.outputs.add(name="logits")
    unlimited = [("grpc.max_receive_message_length", -1)]
    with (
        serve("delay_ms=5,output_mb=2", "--batch-sizes", "1,8", "--grpc-port", str(port)) as service,
        grpc.insecure_channel(f"127.0.0.1:{port}", options=unlimited) as channel,
        httpx.Client(base_url=service.url, timeout=WAIT_S) as client,
    ):
        for in_binary in (True, False):
            output = {"name": "logits", "parameters": {"binary_data": in_binary}}
            response = infer_images(client, f"/v2/models/{MODEL}", *images, outputs=[output])
            assert response.status_code == 200, response.text
            assert len(response.content) > size
        assert [len(content) for content in infer(channel, request).raw_output_contents] == [size // 2]
        streamed, refused = method(channel, "ModelStreamInfer")(iter([request, larger]), timeout=WAIT_S)
        assert [len(content) for content in streamed.infer_response.raw_output_contents] == [size // 2]
        assert "100663296 bytes are more than the 67108864 that gRPC sends at once" in refused.error_message
        with pytest.raises(grpc.RpcError) as caught:
            infer(channel, larger)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
