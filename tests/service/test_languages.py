"""The first request of a program in Java, with its own HTTP client and what that sends unasked.

Go's is in test_other_clients.py; those of curl, Python and Node are in test_playground.py.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from models.sample import IMAGES
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.xdist_group("shared service")

IMAGE = IMAGES / "detect_1.jpg"

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


@pytest.mark.skipif(shutil.which("javac") is None, reason="apt-get install default-jdk-headless")
def test_an_image_is_answered_as_java_sends_it(service: ServiceProcess, tmp_path: Path) -> None:
    program = shutil.which("java")
    assert program is not None
    (tmp_path / "Ask.java").write_text(JAVA)
    url = f"{service.url}/v1/models/resnet18:predict"
    home = {"HOME": str(tmp_path), "PATH": "/usr/local/bin:/usr/bin:/bin"}
    ended = subprocess.run(
        [program, str(tmp_path / "Ask.java"), url, str(IMAGE)],
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
