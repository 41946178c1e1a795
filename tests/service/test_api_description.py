"""`/openapi.json`: clients made of it ask, and no request by it is a fault."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from app.access import keys
from models.sample import IMAGES
from tests.support.node import node
from tests.support.null_service import MODEL, is_ready, serving

ROOT = Path(__file__).parents[2]
PROGRAM = Path(os.environ.get("ANYCHIP_TEST_SCHEMATHESIS") or ROOT / ".venv-audit" / "bin" / "schemathesis")
SECONDS = int(os.environ.get("ANYCHIP_TEST_FUZZ_SECONDS", "120"))


@pytest.mark.nightly
@pytest.mark.skipif(not PROGRAM.exists(), reason=f"schemathesis is not there: make fuzz; {PROGRAM}")
def test_no_request_that_is_described_or_not_is_a_fault(tmp_path):
    """Schemathesis asks every route for what its description allows, and for what it does not."""
    with serving(tmp_path, "") as service:
        command = [PROGRAM, "run", f"{service.url}/openapi.json", "--checks", "not_a_server_error"]
        command += ["--max-response-time", "10", "--max-time", str(SECONDS), "--phases", "coverage,fuzzing"]
        # A stream has no end to wait for.
        command += ["--exclude-path", "/v1/stats/stream", "--continue-on-failure", "--suppress-health-check", "all"]
        ended = subprocess.run(
            list(map(str, command)), cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS + 300, check=False
        )
        (tmp_path / "schemathesis.txt").write_text(ended.stdout)
        failed = [line for line in ended.stdout.splitlines() if "[500]" in line]
        assert not failed, ended.stdout[-6000:]
        assert is_ready(service)
        assert "the request failed" not in service.log.read_text()


PYTHON = Path(os.environ.get("ANYCHIP_TEST_CLIENTS_PYTHON") or ROOT / ".venv-clients" / "bin" / "python")
GENERATOR = PYTHON.with_name("openapi-python-client")
MODULES = PYTHON.parents[1] / "npm" / "node_modules"
IMAGE = IMAGES / "detect_1.jpg"

IN_PYTHON = """
import json, sys
from generated import AuthenticatedClient
from generated.api.predict import predict
from generated.api.status import list_models
from generated.models import PredictFilesBody
from generated.types import File

url, key, model, file = sys.argv[1:]
client, stranger = (AuthenticatedClient(url, token=token, timeout=120) for token in (key, "ak_wrong"))
[listed] = list_models.sync(client=client).models
with open(file, "rb") as image:
    answers = [predict.sync(model, client=client, body=File(image), top_k=2)]
    for body in (PredictFilesBody(file=[File(image, "a.jpg")]), File(image)):
        image.seek(0)
        answers.append(predict.sync(model, client=client, body=body, top_k=2))
    image.seek(0)
    refused = predict.sync(model, client=stranger, body=File(image))
print(json.dumps({"listed": listed.name, "answers": [each.to_dict() for each in answers], "refused": refused.code}))
"""

IN_TYPESCRIPT = """
import { readFileSync } from "node:fs";
import createClient from "openapi-fetch";
import type { paths } from "./schema";

const [url, key, model, file] = process.argv.slice(2);
const [client, stranger] = [key, "ak_wrong"].map((token) =>
  createClient<paths>({ baseUrl: url, headers: { Authorization: `Bearer ${token}` } }));
const image = new Blob([readFileSync(file)]);
const given = {
  params: { path: { model }, query: { top_k: 2 } },
  headers: { "Content-Type": "application/octet-stream" },
  body: image as unknown as string, // How openapi-typescript writes binary content.
  bodySerializer: () => image,
};
const listed = (await client.GET("/v1/models")).data!.models[0].name;
const answers = [(await client.POST("/v1/models/{model}:predict", given)).data!];
const refused = (await stranger.POST("/v1/models/{model}:predict", given)).error!.code;
console.log(JSON.stringify({ listed, answers, refused }));
"""


def ran(*command, cwd, **environment):
    path = f"{PYTHON.parent}{os.pathsep}/usr/local/bin:/usr/bin:/bin"
    ended = subprocess.run(
        list(map(str, command)), cwd=cwd, capture_output=True, text=True, timeout=600, check=False,
        env={"PATH": path, "HOME": str(cwd), **environment},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """Serve a model to who has a key; yield what a client is told, its description, and the answer it must get."""
    folder = tmp_path_factory.mktemp("guarded")
    key = keys.add(folder / "keys.txt", "camera", "infer")
    with serving(folder, "", "--api-keys-file", str(folder / "keys.txt")) as service:
        described = httpx.get(f"{service.url}/openapi.json", headers={"Authorization": f"Bearer {key}"})
        answer = httpx.post(
            f"{service.url}/v1/models/{MODEL}:predict?top_k=2",
            content=IMAGE.read_bytes(),
            headers={"X-Api-Key": key},
            timeout=120,
        )
        expected = {"listed": MODEL, "answer": answer.json()["predictions"], "refused": "UNAUTHORIZED"}
        yield SimpleNamespace(given=(service.url, key, MODEL, IMAGE), description=described.text, expected=expected)


def assert_as_expected(said, guarded, answers):
    report = json.loads(said)
    assert [each["predictions"] for each in report["answers"]] == answers * [guarded.expected["answer"]]
    assert (report["listed"], report["refused"]) == (guarded.expected["listed"], guarded.expected["refused"])


@pytest.mark.nightly
@pytest.mark.skipif(not GENERATOR.exists(), reason=f"make clients-environment makes what is missing here: {GENERATOR}")
def test_in_python(guarded, tmp_path):
    (tmp_path / "openapi.json").write_text(guarded.description)
    (tmp_path / "ask.py").write_text(IN_PYTHON)
    generate = (GENERATOR, "generate", "--path", "openapi.json", "--meta", "none", "--output-path", "generated")
    said = ran(*generate, cwd=tmp_path)
    # It knows no images, and takes the form, JSON and application/octet-stream.
    left_out = {line for line in said.splitlines() if line.startswith("Unsupported")}
    assert left_out <= {f"Unsupported content type image/{kind}" for kind in ("jpeg", "png", "webp")}
    assert_as_expected(ran(PYTHON, "ask.py", *guarded.given, cwd=tmp_path), guarded, answers=3)


@pytest.mark.nightly
@pytest.mark.skipif(not MODULES.exists(), reason=f"make clients-environment makes what is missing here: {MODULES}")
def test_in_typescript(guarded, tmp_path):
    (tmp_path / "openapi.json").write_text(guarded.description)
    (tmp_path / "ask.ts").write_text(IN_TYPESCRIPT)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "node_modules").symlink_to(MODULES)
    program = node()
    ran(program, MODULES / "openapi-typescript/bin/cli.js", "openapi.json", "--output", "schema.d.ts", cwd=tmp_path)
    assert "unknown" not in "".join(
        line for line in (tmp_path / "schema.d.ts").read_text().splitlines() if "tile?" in line
    )
    options = ("--strict", "--skipLibCheck", "--target", "es2022", "--module", "esnext")
    options += ("--moduleResolution", "bundler", "--types", "node")
    ran(program, MODULES / "typescript/bin/tsc", *options, "ask.ts", cwd=tmp_path)
    assert_as_expected(ran(program, "ask.js", *guarded.given, cwd=tmp_path), guarded, answers=1)
