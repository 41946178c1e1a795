"""Real faults against a running service under load: nothing is lost, nobody innocent is hurt, nothing is left behind.

The device is null (docs/null.md): it fails, hangs, crashes or runs out of memory where a test tells it to; the service
around it is all real, and `serve` asserts after each test that it answered throughout.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import json
import os
import signal
import subprocess
import sys

import grpc
import httpx
import psutil
import pytest
from safetensors.torch import save_file
from torchvision.models import resnet18

from tests.support.answers import infer_images
from tests.support.constants import HEARTBEAT_TIMEOUT_S, MAX_TIMEOUT_S
from tests.support.grpc_client import image_request, infer, method
from tests.support.images import GREEN, GREY, JPEG, RED, png
from tests.support.load import WAIT_S, Load, until
from tests.support.null_service import (
    AS_REAL_ONES,
    MODEL,
    PREDICT,
    assert_nothing_left,
    gathered,
    is_ready,
    metric,
    post,
    ready,
)
from tests.support.service_process import free_port

KILLS = 4
"""Of workers in a row; tests/service/test_chaos.py kills for ten minutes."""


async def test_killed_workers_under_load_cost_nobody_an_answer(serve):
    with serve("delay_ms=2") as service:
        async with Load(service.url, PREDICT, GREY, 16) as load:
            for _ in range(KILLS):
                await until(lambda: is_ready(service))
                # Past the images that the last crash made suspects: a second one would be theirs.
                await load.answers(100)
                service.worker().kill()
        assert set(load.outcomes) == {(200, "OK")}
        assert metric(service, "anychip_worker_restarts_total", reason="died") == KILLS
        assert metric(service, "anychip_retried_total") >= 1
        assert_nothing_left(service)


async def test_no_thread_is_begun_while_it_serves(serve):
    """The event loop would stand still until the thread runs, and on a busy machine that is long."""
    with serve("delay_ms=2") as service:
        server = psutil.Process(service.process.pid)
        threads = server.num_threads()
        body, headers = gzip.compress(bytes(4 << 20)), {**JPEG, "Content-Encoding": "gzip"}
        async with httpx.AsyncClient(base_url=service.url, timeout=WAIT_S) as client:
            for _ in range(KILLS):
                worker = service.worker()
                worker.kill()
                answers = await asyncio.gather(
                    *(client.post(PREDICT, content=body, headers=headers) for _ in range(8)),
                    *(client.get("/v1/stats") for _ in range(8)),
                )
                assert {answer.status_code for answer in answers} == {200, 422}
                await until(lambda before=worker: is_ready(service) and service.worker() != before)
        assert server.num_threads() == threads


@pytest.mark.parametrize(
    ("serve", "fault", "reason", "options", "constants"),
    [
        (AS_REAL_ONES, "crash", "died", (), {}),
        (AS_REAL_ONES, "hang", "hung", ("--batch-timeout-s", "2"), {}),
        (AS_REAL_ONES, "freeze", "hung", (), {HEARTBEAT_TIMEOUT_S: 2}),
    ],
    indirect=["serve"],
)
async def test_a_poisonous_image_fails_alone(serve, fault, reason, options, constants):
    with serve(f"delay_ms=20,{fault}=#00ff00", "--batch-sizes", "1,8", *options, constants=constants) as service:
        outcomes = await gathered(service, [GREY] * 4 + [GREEN] + [GREY] * 11)
        assert outcomes.pop(4) == (500, "INFERENCE_FAILED")
        assert set(outcomes) == {(200, "OK")}
        # Once in company, once alone.
        assert metric(service, "anychip_worker_restarts_total", reason=reason) == 2
        await until(lambda: is_ready(service))
        assert post(service) == (200, "OK")
        assert_nothing_left(service)


async def test_out_of_memory_halves_the_batches_and_costs_nobody_an_answer(serve):
    with serve("delay_ms=20,oom=>2", "--batch-sizes", "1,2,4,8") as service:
        assert set(await gathered(service, [GREY] * 32)) == {(200, "OK")}
        cut = metric(service, "anychip_out_of_memory_total")
        assert 1 <= cut <= 3  # At most the batch that waited in front of the first one, too.
        assert set(await gathered(service, [GREY] * 32)) == {(200, "OK")}
        assert metric(service, "anychip_out_of_memory_total") == cut, "batches that do not fit are still sent"
        assert_nothing_left(service)


async def test_a_device_that_kills_every_worker_is_given_up_for_a_while(serve):
    with serve("crash=*1") as service:
        outcomes = await gathered(service, [GREY] * 6)
        assert set(outcomes) <= {(500, "INFERENCE_FAILED"), (503, "NOT_READY")}
        while is_ready(service) or "broken" not in ready(service).json()["error"]:
            assert post(service)[0] in (500, 503)
        answer = ready(service)
        assert answer.json()["code"] == "NOT_READY"
        assert "died in a row" in answer.json()["error"]
        assert httpx.get(f"{service.url}/v2/health/live").status_code == 200
        assert post(service) == (503, "NOT_READY")
        assert_nothing_left(service)


async def test_clients_that_leave_the_queue_leave_no_work_behind(serve):
    clients = 500
    options = ("--batch-sizes", "1,2", "--queue-size", str(clients), "--timeout-ms", "10000000")
    with serve("delay_ms=1", *options, constants={MAX_TIMEOUT_S: 10_000}) as service:
        url, worker = httpx.URL(service.url), service.worker()
        request = (
            f"POST {PREDICT} HTTP/1.1\r\nHost: [::1]\r\nContent-Type: image/png\r\nContent-Length: {len(GREY)}\r\n\r\n"
        ).encode() + GREY
        for storm in (1, 2):
            before = metric(service, "anychip_batch_size_sum")
            worker.suspend()  # Until all have left nobody is answered, however slow the machine is.
            writers = []
            for _ in range(clients):
                _, writer = await asyncio.open_connection(url.host, url.port)
                writer.write(request)
                writers.append(writer)
            await until(lambda: metric(service, "anychip_images_in_flight") == clients)
            for writer in writers:
                writer.transport.abort()
            await until(lambda storm=storm: metric(service, "anychip_cancelled_total") == storm * clients)
            worker.resume()
            await until(lambda: metric(service, "anychip_images_in_flight") == 0)
            assert metric(service, "anychip_queue_depth") == 0
            reached_a_device = metric(service, "anychip_batch_size_sum") - before
            assert reached_a_device < clients / 100
        assert post(service) == (200, "OK")


async def test_hand_over_under_load_loses_nothing(tmp_path, serve):
    weights = tmp_path / "dogs.safetensors"

    def write(classes):
        save_file(resnet18(num_classes=classes).state_dict(), weights)
        (tmp_path / "dogs.labels.txt").write_text("".join(f"dog {number} of {classes}\n" for number in range(classes)))

    write(3)
    # The outputs are the model's, so that each class has its label.
    with serve("delay_ms=2,output_mb=0", "--models", f"{MODEL}={MODEL}:{weights}") as service:
        first = service.worker()
        async with Load(service.url, PREDICT, GREY, 16) as load:
            await load.answers(50)
            write(4)
            url = f"{service.admin_url}/v2/repository/models/{MODEL}/load"
            loaded = await asyncio.to_thread(httpx.post, url, timeout=WAIT_S)
            assert loaded.status_code == 200, loaded.text
            await load.answers(50)
        assert set(load.outcomes) == {(200, "OK")}
        assert service.worker().pid != first.pid
        assert not first.is_running()
        answer = httpx.post(service.url + PREDICT, content=GREY, headers=JPEG, timeout=WAIT_S).json()
        assert all(found["label"].endswith("of 4") for found in answer["predictions"][0]["classes"])
        assert metric(service, "anychip_handovers_total", reason="load") == 1

        weights.write_bytes(b"no weights")
        worker = service.worker()
        refused = httpx.post(url, timeout=WAIT_S)
        assert (refused.status_code, refused.json()["code"]) == (400, "INVALID_REQUEST")
        assert service.worker().pid == worker.pid
        assert post(service) == (200, "OK")


async def test_sigterm_under_load_loses_no_accepted_request(serve):
    with serve("delay_ms=20", ends=True) as service:
        children = service.children()
        async with Load(service.url, PREDICT, GREY, 32) as load:
            await load.answers(100)
            service.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(service.process.wait, WAIT_S) == 0
        # What came too late is told so, or finds nobody: in the end the socket itself goes, with what nobody has read.
        too_late = {(503, "DRAINING"), (0, "REFUSED"), (0, "RemoteProtocolError"), (0, "ReadError")}
        assert set(load.outcomes) <= {(200, "OK"), *too_late}
        assert load.outcomes[200, "OK"] >= 100
        assert "cut off" not in service.log.read_text()
        assert not psutil.wait_procs(children, timeout=WAIT_S)[1]


async def test_overload_is_refused_and_memory_stays_flat(serve):
    body = png(size=(600, 600)) + bytes(300_000)  # What follows the end of a PNG is no part of it.
    with serve("delay_ms=5", "--queue-size", "16", "--batch-sizes", "1,2") as service:
        server = psutil.Process(service.process.pid)
        sizes = []
        for _ in range(3):
            async with Load(service.url, PREDICT, body, 100) as load:
                await load.answers(200)
            assert set(load.outcomes) == {(200, "OK"), (429, "QUEUE_FULL")}
            sizes.append(server.memory_info().rss)
            assert_nothing_left(service)
        # After the first round every buffer has its size.
        assert sizes[2] - sizes[0] < 30_000_000
        # So many at once never fit, whenever they are sent.
        many = httpx.post(service.url + PREDICT, files=[("file", ("a.png", GREY))] * 17, timeout=WAIT_S)
        assert (many.status_code, "retry-after" in many.headers) == (400, False)


async def test_deadlines_end_to_end(serve):
    with serve("delay_ms=400,hang=#00ff00", "--batch-timeout-s", "3", "--batch-sizes", "1") as service:
        # At the door: one image takes longer than that.
        answer = httpx.post(
            service.url + PREDICT, content=GREY, headers={**JPEG, "X-Timeout-Ms": "200"}, timeout=WAIT_S
        )
        assert (answer.status_code, answer.json()["code"]) == (503, "DEADLINE_UNREACHABLE")
        assert int(answer.headers["retry-after"]) >= 1
        # In time when alone, refused behind others.
        assert post(service, GREY, **{"X-Timeout-Ms": "20000"}) == (200, "OK")
        waiting = asyncio.create_task(gathered(service, [GREY] * 6))
        await until(lambda: metric(service, "anychip_images_in_flight") > 3)  # One ends each 0.4 s.
        assert post(service, GREY, **{"X-Timeout-Ms": "800"}) == (503, "DEADLINE_UNREACHABLE")
        assert set(await waiting) == {(200, "OK")}
        # Accepted, but the device hangs.
        hung = asyncio.create_task(gathered(service, [GREEN]))
        await until(lambda: metric(service, "anychip_images_in_flight") == 1)
        assert post(service, GREY, **{"X-Timeout-Ms": "2000"}) == (504, "DEADLINE_EXCEEDED")
        assert await hung == [(500, "INFERENCE_FAILED")]
        # On its way: half a body, then silence.
        url = httpx.URL(service.url)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(
            f"POST {PREDICT}&timeout_ms=1500 HTTP/1.1\r\nHost: [::1]\r\nContent-Length: 100\r\n\r\nhalf".encode()
        )
        assert b"504" in await asyncio.wait_for(reader.readline(), WAIT_S)
        writer.close()
        assert_nothing_left(service)


FOUR = ("devices=4,delay_ms=5,fail=*1000000", "--decoders", "2")
"""Devices. With a fault that does not come the null device looks at images, so there are decoders."""
FORK_SERVERS = ("fork-workers", "fork-decoders")


def zombies(service):
    return [child for child in service.children() if child.status() == psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_fork_servers_end_alone_and_others_take_their_place(serve, number):
    with serve(*FOUR) as service:
        workers, decoders = service.named("anychip-worker"), service.named("anychip-decoder")
        assert (len(workers), len(decoders)) == (4, 2)
        async with Load(service.url, PREDICT, GREY, 8) as load:
            first = {pid for name in FORK_SERVERS for pid in service.named(name)}
            for pid in first:
                os.kill(pid, number)

            def replaced():
                assert is_ready(service)
                assert set(service.named("anychip-worker")) == set(workers)
                assert metric(service, "anychip_decoder_restarts_total") == 0
                now = {pid for name in FORK_SERVERS for pid in service.named(name)}
                return len(now) == 2 and not now & first and not zombies(service)

            await until(replaced)
            await load.answers(50)
            # Decoders of a fork server that is gone are replaced one by one: none of them has died.
            await until(lambda: len(set(service.named("anychip-decoder")).difference(decoders)) == 2)
            assert metric(service, "anychip_decoder_restarts_total") == 0
            # The new ones fork as the old ones did.
            decoders = service.named("anychip-decoder")
            next(iter(workers.values())).kill()
            next(iter(decoders.values())).kill()
            await until(lambda: set(service.named("anychip-worker")).difference(workers))
            await until(lambda: set(service.named("anychip-decoder")).difference(decoders))
            await load.answers(50)
        assert set(load.outcomes) == {(200, "OK")}
        # Those that were killed here, and no other.
        assert metric(service, "anychip_worker_restarts_total") == 1
        assert metric(service, "anychip_decoder_restarts_total") == 1
        await until(lambda: not zombies(service))
        children = service.children()
        assert {child.ppid() for child in children} == {service.process.pid}
        assert_nothing_left(service)


async def test_nothing_is_left_of_a_killed_server_whose_fork_servers_were_replaced(serve):
    with serve(*FOUR, ends=True) as service:
        first = {pid for name in FORK_SERVERS for pid in service.named(name)}
        for pid in first:
            os.kill(pid, signal.SIGKILL)
        await until(lambda: len({pid for name in FORK_SERVERS for pid in service.named(name)} - first) == 2)
        worker = service.workers()[0]
        worker.kill()
        await until(lambda: len(set(service.named("anychip-worker")) - {worker.pid}) == 4 and is_ready(service))
        await until(lambda: not first & {child.pid for child in service.children()})
        children = service.children()
        service.process.kill()
        service.process.wait(WAIT_S)
        assert not psutil.wait_procs(children, timeout=WAIT_S)[1]


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


ROGUE = ("--plugins", "tests.support.rogue_worker")


def order(service, text):
    """Written whole: the worker may look at any moment."""
    folder = service.log.parent
    (folder / "order").write_text(text)
    (folder / "order").rename(folder / "rogue")


@pytest.mark.parametrize("what", ["beats", "crowds"])
async def test_a_worker_that_floods_the_server_is_replaced_and_the_loop_goes_on(serve, what):
    with serve("", *ROGUE) as service:
        server, flooding = psutil.Process(service.process.pid), service.worker()
        before = server.memory_info().rss
        order(service, what)
        await until(lambda: not flooding.is_running() and is_ready(service))
        assert metric(service, "anychip_worker_restarts_total", reason="died") == 1
        assert post(service, GREY) == (200, "OK")
        assert "invented" not in httpx.get(f"{service.url}/metrics", timeout=WAIT_S).text
        assert server.memory_info().rss - before < 50_000_000


async def test_a_worker_cannot_invent_names_of_metrics(serve):
    with serve("", *ROGUE) as service:
        worker = service.worker()
        order(service, "names")
        await until(lambda: "anychip_operator_fallbacks_total{" in httpx.get(f"{service.url}/metrics").text)
        await until(lambda: metric(service, "anychip_operator_fallbacks_total", operator="other") == 20_000)
        assert "invented" not in httpx.get(f"{service.url}/metrics", timeout=WAIT_S).text
        assert service.worker() == worker
        assert post(service, GREY) == (200, "OK")


JSON = {"Content-Type": "application/json"}


def held_bytes(service):
    """By the service and everything that it has started; what they share counts once."""
    total = 0
    for process in (psutil.Process(service.process.pid), *service.children()):
        with contextlib.suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total


async def test_what_large_json_has_taken_is_given_back(serve):
    """Two processes read it, and kept a hundred megabytes each."""
    image = base64.b64encode(GREY + bytes(14_000_000)).decode()
    body = json.dumps({"instances": [{"b64": image}]})
    with serve("") as service:
        before = held_bytes(service)
        async with httpx.AsyncClient(base_url=service.url, timeout=WAIT_S) as client:
            for _ in range(4):
                asked = [client.post(PREDICT, content=body, headers=JSON) for _ in range(2)]
                assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
        await until(lambda: held_bytes(service) - before < 150 << 20)
        assert_nothing_left(service)


THREADS = """
import asyncio, threading
import psutil
from app.ingress.budget import Budget
from app.ingress.budget import Trim
from backends.host import release_free_memory

async def main():
    heap = Trim(Budget(1 << 30, "bytes"))
    made, seen = threading.Barrier(5), threading.Barrier(5)
    def answers():
        for _ in range(4):
            bytes(bytearray(16 << 20))
        made.wait()
        seen.wait()
    threads = [threading.Thread(target=answers) for _ in range(4)]
    before = psutil.Process().memory_info().rss
    for each in threads:
        each.start()
    made.wait()
    release_free_memory()
    print(psutil.Process().memory_info().rss - before)
    seen.wait()
    for each in threads:
        each.join()
    await heap.close()

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc can be told so")
def test_large_answers_that_threads_made_leave_nothing_behind():
    made = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, check=True)
    assert int(made.stdout) < 4 << 20


def test_requests_are_in_the_log_where_asked_for_failures_always_and_secrets_never(serve):
    """An image that makes its batch fail: the server's and the worker's lines name the request."""
    secret = "hunter2"
    headers = {**JPEG, "Authorization": f"Bearer {secret}", "X-Api-Key": secret, "Cookie": secret}
    with serve("fail=#ff0000", "--log-level", "debug", "--log-requests", "true") as service:
        for name, body in (("good", GREY), ("bad", RED)):
            asked = {**headers, "X-Request-Id": name}
            httpx.post(f"{service.url}{PREDICT}", content=body, headers=asked, timeout=WAIT_S)
        httpx.get(f"{service.url}/nothing?token={secret}", timeout=WAIT_S)
        # A name that no parameter has is refused; neither it nor its value is in a line.
        refused = httpx.post(f"{service.url}{PREDICT}&token={secret}", content=GREY, headers=headers, timeout=WAIT_S)
        assert refused.status_code == 400
    text = service.log.read_text()
    assert secret not in text
    found = [json.loads(line) for line in text.splitlines()]
    about = [line for line in found if "request_id" in line]
    failed = [line for line in about if line["level"] == "error"]
    assert {line["request_id"] for line in failed} == {"bad"}
    assert any("failed twice" in line["message"] for line in failed)
    assert any(line.get("worker", "").startswith("null:0#") for line in found if line["logger"] == "anychip.worker")
    requests = [
        (line["request_id"], line["status"], line["code"])
        for line in about
        if line["message"] == "request" and "health" not in line["path"]
    ]
    assert requests[:2] == [("good", 200, "OK"), ("bad", 500, "INFERENCE_FAILED")]
    assert requests[2][1:] == (404, "NOT_FOUND")
    assert all("?" not in line.get("path", "") for line in about)
