"""The Open Inference Protocol over REST: a real service, spoken to by hand, down to the bytes."""

from __future__ import annotations

import base64
import gzip
import json
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from models import open_model, parse_spec
from tests.support.answers import assert_error, binary, infer_images, outputs_of
from tests.support.images import JPEG, encoded
from tests.support.photographs import FILES
from tests.support.service_process import running

PHOTO, OTHER = FILES[0].read_bytes(), FILES[1].read_bytes()
RESNET, YOLO = "/v2/models/resnet18", "/v2/models/yolov8n"

pytestmark = pytest.mark.xdist_group("shared service")


# The protocol's own description, open_inference_rest.yaml of kserve/open-inference-protocol (18d5991): its paths, and
# its schemas as types. What it does not name is allowed, as there.
TENSOR = {"name": str, "datatype": str, "shape": [int]}
SERVER = {"name": str, "version": str, "extensions": [str]}
MODEL = {"name": str, "platform": str, "versions": [str], "inputs": [TENSOR], "outputs": [TENSOR]}
ANSWER = {"model_name": str, "model_version": str, "id": str, "outputs": [{**TENSOR, "data": [object]}]}


def fits(found, form):
    if isinstance(form, dict):
        for name, part in form.items():
            fits(found[name], part)
    elif isinstance(form, list):
        assert isinstance(found, list)
        for each in found:
            fits(each, form[0])
    else:
        assert isinstance(found, form)
    return found


@pytest.mark.parametrize("version", ["", "/versions/1"])
def test_answers_have_the_forms_of_the_protocol(either, version):
    assert either.get("/v2/health/live").json() == {"live": True}
    assert either.get("/v2/health/ready").json() == {"ready": True}
    for path in ("/v2", "/v2/"):
        assert {"binary_tensor_data", "classification"} <= set(fits(either.get(path).json(), SERVER)["extensions"])
    for name, task in (("resnet18", "classify"), ("yolov8n", "detect")):
        metadata = fits(either.get(f"/v2/models/{name}{version}").json(), MODEL)
        assert (metadata["name"], metadata["versions"], metadata["parameters"]["task"]) == (name, ["1"], task)
        assert {tensor["name"] for tensor in metadata["inputs"]} >= {"image", "pixels"}
        assert either.get(f"/v2/models/{name}{version}/ready").json() == {"name": name, "ready": True}
        data = {"name": "image", "shape": [1], "datatype": "BYTES", "data": [base64.b64encode(PHOTO).decode()]}
        answer = either.post(f"/v2/models/{name}{version}/infer", json={"id": "42", "inputs": [data]})
        parsed = fits(answer.json(), ANSWER)
        assert (parsed["model_name"], parsed["model_version"], parsed["id"]) == (name, "1", "42")
        for output, declared in zip(parsed["outputs"], metadata["outputs"], strict=True):
            assert (output["name"], output["datatype"]) == (declared["name"], declared["datatype"])
            pairs = zip(output["shape"], declared["shape"], strict=True)
            assert all(wanted in (-1, length) for length, wanted in pairs)
    fits(either.get("/v2/models/nobody").json(), {"error": str})
    fits(either.post(f"{RESNET}/infer", json={}).json(), {"error": str})


@pytest.mark.parametrize(("path", "name"), [(RESNET, "resnet18"), (YOLO, "yolov8n")])
def test_a_jpeg_gives_the_predictions_of_the_short_way_to_the_bit(either, path, name):
    expected = [
        either.post(f"/v1/models/{name}:predict", content=photo, headers=JPEG).json()["predictions"][0]
        for photo in (PHOTO, OTHER)
    ]
    document, found = outputs_of(infer_images(either, path, PHOTO, OTHER))
    assert [json.loads(prediction) for prediction in found["predictions"]] == expected
    assert document["parameters"]["weights"] == "random"
    raw = either.post(f"{path}/infer", content=PHOTO, headers={"Inference-Header-Content-Length": "0"})
    assert raw.headers["content-type"] == "application/octet-stream"
    assert json.loads(outputs_of(raw)[1]["predictions"][0]) == expected[0]


def test_tensors_agree_with_the_predictions(either):
    _, found = outputs_of(infer_images(either, RESNET, PHOTO, OTHER))
    assert found["logits"].shape == found["probabilities"].shape == (2, 1000)
    np.testing.assert_allclose(found["probabilities"].sum(1), 1, rtol=1e-5)
    assert (found["logits"].argmax(1) == found["probabilities"].argmax(1)).all()
    for row, prediction in enumerate(found["predictions"]):
        best = json.loads(prediction)["classes"][0]
        assert best["class_id"] == found["logits"][row].argmax()
        assert best["score"] == pytest.approx(found["probabilities"][row].max(), abs=1e-5)

    _, found = outputs_of(infer_images(either, YOLO, PHOTO, OTHER, parameters={"score_threshold": 0.3}))
    counts = found["num_detections"]
    assert counts.max() == found["boxes"].shape[1] > 0
    for row, prediction in enumerate(found["predictions"]):
        detections = json.loads(prediction)["detections"]
        assert len(detections) == counts[row]
        boxes = [list(each["box"].values()) for each in detections]
        np.testing.assert_allclose(found["boxes"][row, : counts[row]], np.reshape(boxes, (-1, 4)), atol=0.006)
        assert found["classes"][row, : counts[row]].tolist() == [each["class_id"] for each in detections]
        assert not found["scores"][row, counts[row] :].any()
        assert (found["scores"][row, : counts[row]] > 0.3).all()


def pixels_of(*shape):
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def send_pixels(either, path, pixels, *, as_json=False, **parameters):
    tensor = {"name": "pixels", "shape": list(pixels.shape), "datatype": "UINT8", "parameters": parameters}
    if as_json:
        return either.post(f"{path}/infer", json={"inputs": [{**tensor, "data": pixels.tolist()}]})
    tensor["parameters"] = {**parameters, "binary_data_size": pixels.nbytes}
    return binary(path, {"inputs": [tensor]}, pixels.tobytes(), post=either.post)


def test_pixels_reach_the_network_as_they_are(either):
    pixels = pixels_of(2, 224, 224, 3)
    with torch.inference_mode():
        network = open_model(parse_spec("resnet18:random"), FILES[0].parent).network()
        expected = network(torch.from_numpy(pixels))[0].numpy()
    _, found = outputs_of(send_pixels(either, RESNET, pixels))
    np.testing.assert_allclose(found["logits"], expected, rtol=1e-4, atol=1e-4)
    _, json_found = outputs_of(send_pixels(either, RESNET, pixels, as_json=True))
    np.testing.assert_array_equal(json_found["logits"], found["logits"])


def test_pixels_of_any_size_are_resized_where_that_is_asked_for(either):
    with Image.open(FILES[0]) as image:
        pixels = np.asarray(image.convert("RGB"))
    _, whole = outputs_of(infer_images(either, YOLO, encoded(Image.fromarray(pixels))))
    _, found = outputs_of(send_pixels(either, YOLO, pixels[None], resize=True))
    assert found["predictions"] == whole["predictions"]


def test_requested_outputs_only_in_their_order_each_in_its_form(either):
    wanted = [{"name": "predictions"}, {"name": "logits", "parameters": {"binary_data": True}}]
    document, found = outputs_of(infer_images(either, RESNET, PHOTO, outputs=wanted))
    assert list(found) == ["predictions", "logits"]
    assert "data" in document["outputs"][0]
    assert document["outputs"][1]["parameters"] == {"binary_data_size": 4000}
    everything = infer_images(either, RESNET, PHOTO, parameters={"binary_data_output": True})
    assert all("data" not in output for output in outputs_of(everything)[0]["outputs"])


def test_the_classification_extension(either):
    wanted = [
        {"name": "probabilities", "parameters": {"classification": 3}},
        {"name": "logits", "parameters": {"classification": 2, "binary_data": True}},
    ]
    document, found = outputs_of(infer_images(either, RESNET, PHOTO, OTHER, outputs=wanted))
    assert [output["shape"] for output in document["outputs"]] == [[2, 3], [2, 2]]
    expected = either.post("/v1/models/resnet18:predict?top_k=3", content=PHOTO, headers=JPEG).json()["predictions"][0]
    for text, wanted_class in zip(found["probabilities"][:3], expected["classes"], strict=True):
        value, index, label = text.decode().split(":")
        assert float(value) == pytest.approx(wanted_class["score"], abs=2e-5)
        assert (int(index), label) == (wanted_class["class_id"], wanted_class["label"])
    bad = [{"name": "boxes", "parameters": {"classification": 1}}]
    assert_error(infer_images(either, YOLO, PHOTO, outputs=bad), 400, "INVALID_REQUEST")


@pytest.mark.parametrize("kind", ["gzip", "deflate"])
def test_compressed_both_ways(either, kind):
    pixels = pixels_of(2, 224, 224, 3)
    tensor = {"name": "pixels", "shape": [2, 224, 224, 3], "datatype": "UINT8"}
    tensor["parameters"] = {"binary_data_size": pixels.nbytes}
    head = json.dumps({"inputs": [tensor]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head)), "Accept-Encoding": kind}
    plain = either.post(f"{RESNET}/infer", content=head + pixels.tobytes(), headers=headers)
    assert plain.headers["content-encoding"] == kind
    packed = {"gzip": gzip.compress, "deflate": zlib.compress}[kind](head + pixels.tobytes())
    again = either.post(f"{RESNET}/infer", content=packed, headers={**headers, "Content-Encoding": kind})
    assert outputs_of(again)[1]["logits"].tolist() == outputs_of(plain)[1]["logits"].tolist()


@pytest.mark.parametrize(
    ("encoding", "content", "status", "code"),
    [
        pytest.param("gzip", gzip.compress(bytes(30 * 2**20)), 413, "BODY_TOO_LARGE", id="a bomb"),
        pytest.param("gzip", gzip.compress(b'{"inputs": []}')[:-9], 400, "INVALID_REQUEST", id="one that ends early"),
        pytest.param("br", b"whatever", 415, "UNSUPPORTED_MEDIA_TYPE", id="another kind"),
    ],
)
def test_a_compressed_body_that_is_no_good(either, encoding, content, status, code):
    answer = either.post(f"{RESNET}/infer", content=content, headers={"Content-Encoding": encoding})
    assert_error(answer, status, code)


def test_deadline_and_priority_of_the_request(either):
    late = infer_images(either, RESNET, PHOTO, parameters={"timeout": 1})
    assert late.status_code in (503, 504)
    assert late.json()["code"] in ("DEADLINE_UNREACHABLE", "DEADLINE_EXCEEDED")
    assert infer_images(either, RESNET, PHOTO, parameters={"priority": 102}).status_code == 200
    for wrong in ({"priority": 103}, {"timeout": "soon"}):
        assert_error(infer_images(either, RESNET, PHOTO, parameters=wrong), 400, "INVALID_REQUEST")


GOOD = {"name": "pixels", "shape": [1, 224, 224, 3], "datatype": "UINT8"}
IMAGE: dict[str, Any] = {"name": "image", "shape": [1], "datatype": "BYTES", "data": [base64.b64encode(PHOTO).decode()]}


@pytest.mark.parametrize(
    "document",
    [
        [],
        {},
        {"inputs": [1]},
        {"inputs": [{name: value for name, value in IMAGE.items() if name != "data"}]},
        {"inputs": [{**IMAGE, "data": ["!!!"]}]},
        {"inputs": [{**IMAGE, "shape": [0], "data": []}]},
        {"inputs": [{**IMAGE, "datatype": "UINT8"}]},
        {"inputs": [{**IMAGE, "shape": [9], "data": IMAGE["data"] * 9}]},
        {"inputs": [{**IMAGE, "name": "photograph"}]},
        {"inputs": [IMAGE, IMAGE]},
        {"inputs": [{**IMAGE, "shape": [True]}]},
        {"inputs": [{**GOOD, "data": [1, 2, 3]}]},
        {"inputs": [{**GOOD, "data": [256] * 224 * 224 * 3}]},
        {"inputs": [{**GOOD, "shape": [2**31, 2**31, 2**31, 3], "data": [1]}]},
        {"inputs": [{**GOOD, "parameters": {"binary_data_size": 2**63}}]},
        {"inputs": [{**GOOD, "parameters": {"shared_memory_region": "x"}}]},
        {"id": "a\nb", "inputs": [IMAGE]},
        {"inputs": [IMAGE], "outputs": [{"name": "x"}]},
        {"inputs": [IMAGE], "parameters": {"score_threshold": 2}},
        {"inputs": [{**IMAGE, "parameters": {"score_threshold": 0.5}}]},
        {"inputs": [IMAGE], "outputs": [{"name": "logits", "parameters": {"top_k": 1}}]},
    ],
)
def test_requests_that_make_no_sense(either, document):
    assert_error(either.post(f"{RESNET}/infer", json=document), 400, "INVALID_REQUEST")


@pytest.mark.parametrize(("query", "statuses"), [("top_k=2", (200, 400)), ("any=1", (200, 200)), ("n=2", (400, 400))])
def test_options_in_the_query_are_of_a_raw_image_alone(either, query, statuses):
    raw = either.post(f"{RESNET}/infer?{query}", content=PHOTO, headers={"Inference-Header-Content-Length": "0"})
    in_json = either.post(f"{RESNET}/infer?{query}", json={"inputs": [IMAGE]})
    assert (raw.status_code, in_json.status_code) == statuses
    if query == "top_k=2":
        assert len(json.loads(outputs_of(raw)[1]["predictions"][0])["classes"]) == 2


@pytest.mark.parametrize("length", ["-1", "9999999", "", "9" * 40])
def test_a_header_length_that_lies(either, length):
    answer = binary(RESNET, {"inputs": []}, b"rest", post=either.post, header=length)
    assert_error(answer, 400, "INVALID_REQUEST")


def test_what_is_refused_with_another_code(either):
    assert "version 1" in assert_error(either.get(f"{RESNET}/versions/2"), 404, "MODEL_NOT_FOUND")
    assert_error(infer_images(either, RESNET, PHOTO[:1000]), 422, "INVALID_IMAGE")
    refused = assert_error(infer_images(either, RESNET, PHOTO, b"<html>"), 422, "INVALID_IMAGE")
    assert refused.startswith("image 1: ")
    alone = {**GOOD, "shape": GOOD["shape"][1:], "parameters": {"binary_data_size": 150528}}
    alone = binary(RESNET, {"inputs": [alone]}, bytes(150528), post=either.post)
    assert "must have the shape [n, 224, 224, 3], not [224, 224, 3]" in assert_error(alone, 400, "INVALID_REQUEST")
    assert_error(either.post("/v2/models/nobody/infer", json={}), 404, "MODEL_NOT_FOUND")
    assert_error(either.post(f"{RESNET}/infer", content=bytes(21 * 2**20)), 413, "BODY_TOO_LARGE")


def test_nothing_is_left_of_requests_that_were_refused(either):
    metrics = either.get("/metrics").text
    assert 'anychip_images_in_flight{model="resnet18"} 0.0' in metrics
    assert 'anychip_queue_depth{model="resnet18"} 0.0' in metrics
    assert 'anychip_requests_total{code="INTERNAL",model="resnet18"} 0.0' in metrics
    # All slots and all of the budget for bodies are still there: more than either holds at once goes through.
    for _ in range(3):
        assert infer_images(either, RESNET, *[PHOTO] * 8).status_code == 200


@pytest.mark.parametrize("path", [RESNET, YOLO])
def test_metadata_and_configuration_agree(either, path):
    metadata, config = either.get(path).json(), either.get(f"{path}/config").json()
    for listed, configured in (("inputs", "input"), ("outputs", "output")):
        assert {each["name"]: each["shape"] for each in metadata[listed]} == {
            each["name"]: [-1, *each["dims"]] for each in config[configured]
        }
    shape = next(each["shape"] for each in metadata["inputs"] if each["name"] == "image")
    assert shape == [-1, 1]
    assert infer_images(either, path, PHOTO, OTHER, shape=[2, 1]).status_code == 200


def test_statistics_count_what_was_asked(either):
    def stats(path=f"{RESNET}/stats"):
        return {each["name"]: each for each in either.get(path).json()["model_stats"]}["resnet18"]

    before = stats()
    assert infer_images(either, RESNET, PHOTO, OTHER).status_code == 200
    assert_error(infer_images(either, RESNET, b"<html>"), 422, "INVALID_IMAGE")
    after = stats()
    assert stats("/v2/stats") == after
    assert after["inference_count"] - before["inference_count"] == 2
    assert 1 <= after["execution_count"] - before["execution_count"] <= 2
    assert after["last_inference"] > 1.6e12

    def gained(key):
        return {
            part: after["inference_stats"][key][part] - before["inference_stats"][key][part] for part in ("count", "ns")
        }

    assert gained("success")["count"] == gained("fail")["count"] == 1
    for stage in ("queue", "compute_input", "compute_infer", "compute_output"):
        assert gained(stage)["count"] == 1  # A request's, as Triton's InferenceStatsAggregator has it.
        assert gained(stage)["ns"] >= 0
    assert gained("compute_infer")["ns"] > 0
    sizes = {each["batch_size"]: each["compute_infer"]["count"] for each in after["batch_stats"]}
    assert sum(sizes.values()) == after["execution_count"]


def test_clients_that_want_one_input_and_one_output_see_no_more(tmp_path):
    null = ("--device", "null", "--engine", "auto", "--precision", "auto", "--weights", "random")
    compat = ("--compat", "image-client")
    with running(tmp_path, "--models", "resnet18,yolov8n", *null, *compat) as service, service.client() as client:
        metadata, config = client.get(RESNET).json(), client.get(f"{RESNET}/config").json()
        [given], [answered] = metadata["inputs"], metadata["outputs"]
        [taken], [made] = config["input"], config["output"]
        assert (given["name"], given["shape"], taken["format"]) == ("pixels", [-1, 224, 224, 3], "FORMAT_NHWC")
        assert (answered["name"], answered["shape"]) == ("probabilities", [-1, 1000])
        assert (taken["name"], [-1, *taken["dims"]]) == (given["name"], given["shape"])
        assert (made["name"], [-1, *made["dims"]]) == (answered["name"], answered["shape"])
        assert "optional" not in taken
        names = {each["name"] for each in infer_images(client, RESNET, PHOTO).json()["outputs"]}
        assert names > {"predictions"}, "requests may name what is not listed"
