"""The first request of programs in other languages, with each one's own HTTP client and what that sends unasked.

Go's is in test_other_clients.py.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from models.sample import IMAGES
from tests.support.node import node
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.xdist_group("shared service")

IMAGE = IMAGES / "detect_1.jpg"

NODE = """
import { readFileSync } from "node:fs";
const [url, file] = process.argv.slice(2);
const answer = await fetch(url, { method: "POST", body: readFileSync(file) });
if (!answer.ok) throw new Error(await answer.text());
console.log(await answer.text());
"""

JAVA = """
import java.net.URI;
import java.net.http.*;
import java.nio.file.Path;

public class Ask {
    public static void main(String[] given) throws Exception {
        HttpRequest request = HttpRequest.newBuilder(URI.create(given[0]))
            .POST(HttpRequest.BodyPublishers.ofFile(Path.of(given[1]))).build();
        HttpResponse<String> answer = HttpClient.newHttpClient().send(request, HttpResponse.BodyHandlers.ofString());
        if (answer.statusCode() != 200) throw new Exception(answer.body());
        System.out.println(answer.body());
    }
}
"""


PROGRAMS: dict[str, tuple[str, str, Callable[[], str | None]]] = {
    "Node": ("ask.mjs", NODE, node),
    "Java": ("Ask.java", JAVA, lambda: shutil.which("java") if shutil.which("javac") else None),
    "curl": (
        "ask.sh",
        'exec curl -fsS --data-binary "@$2" "$1"\n',
        lambda: shutil.which("bash") if shutil.which("curl") else None,
    ),
}


@pytest.mark.parametrize("language", PROGRAMS)
def test_an_image_is_answered_as_each_language_sends_it(service: ServiceProcess, tmp_path: Path, language: str) -> None:
    file, text, found = PROGRAMS[language]
    program = found()
    if program is None:
        pytest.skip(f"{language} is not on this machine")
    (tmp_path / file).write_text(text)
    url = f"{service.url}/v1/models/resnet18:predict"
    home = {"HOME": str(tmp_path), "PATH": "/usr/local/bin:/usr/bin:/bin"}
    ended = subprocess.run(
        [program, str(tmp_path / file), url, str(IMAGE)],
        env=home,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    with service.client() as client:
        expected = client.post("/v1/models/resnet18:predict", content=IMAGE.read_bytes()).json()
    assert json.loads(ended.stdout)["predictions"] == expected["predictions"]
