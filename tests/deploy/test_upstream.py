"""deploy/upstream: contributions to other projects, as far as files and our own code say whether they are right."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from app.access.addresses import Hosts
from app.config import Settings

yaml = pytest.importorskip("yaml")
from tests.support.manifests import DEPLOY, VERSION, checked, read  # noqa: E402

UPSTREAM = DEPLOY / "upstream"
# What GPUStack 2.3.0 reads: routes/inference_backend.py (allowed_keys), schemas/inference_backend.py, the template.
FIELDS = {
    *("backend_name", "version_configs", "default_version", "default_backend_param", "default_run_command"),
    *("default_entrypoint", "health_check_path", "description", "default_env", "parameter_format", "common_parameters"),
}
VERSION_FIELDS = {"image_name", "run_command", "entrypoint", "custom_framework", "env"}
FRAMEWORKS = {"cuda": "cuda", "ascend": "cann", "rocm": "rocm", "dcu": "dtk", "mlu": "neuware", "cpu": "cpu"}


def option(words, name):
    """Return the value of an option, after a space or an equals sign."""
    [value] = [
        word.partition("=")[2] if "=" in word and word.startswith(f"{name}=") else words[number + 1]
        for number, word in enumerate(words)
        if word == name or word.startswith(f"{name}=")
    ]
    return value


def fields_of(words):
    """Return the settings that options name."""
    return {word.partition("=")[0][2:].replace("-", "_") for word in words if word.startswith("--")}


def test_kserves_runtime_is_valid():
    pytest.importorskip("kubernetes_validate", reason="make deploy-environment installs it")
    [runtime] = read(UPSTREAM / "kserve" / "kserve-anychip.yaml")
    checked(runtime)


def test_kserves_runtime_asks_for_what_the_command_takes():
    [runtime] = read(UPSTREAM / "kserve" / "kserve-anychip.yaml")
    formats = {each["name"]: each["autoSelect"] for each in runtime["spec"]["supportedModelFormats"]}
    assert formats == {"pytorch": False, "onnx": False, "torchscript": False}
    [container] = runtime["spec"]["containers"]
    assert container["image"] == "kserve-anychip:replace"
    words = container["args"]
    assert words[0] == "serve"
    assert fields_of(words) == {"models", "allowed_hosts"} <= set(Settings.model_fields)
    variables = {each["name"]: each["value"] for each in container["env"]}
    ours = {name.removeprefix("ANYCHIP_").lower() for name in variables if name.startswith("ANYCHIP_")}
    assert ours == {"port", "trust_exported", "drain_s"} <= set(Settings.model_fields)
    named = option(words, "--allowed-hosts").replace("{{.Name}}", "dogs").replace("{{.Namespace}}", "vision")
    hosts = Hosts(Settings(allowed_hosts=named.replace("$(ALLOWED_HOSTS)", "")).host_names, checked=True)
    assert hosts.accepts(b"dogs-predictor.vision.svc.cluster.local:8080")
    assert not hosts.accepts(b"evil.example")


@pytest.mark.parametrize(("file", "kind"), [("", ""), ("/model.ts", "ts")], ids=["folder", "torchscript"])
def test_kserves_models_are_read_as_what_storage_brings(tmp_path, file, kind):
    from models.catalog import parse_spec

    [runtime] = read(UPSTREAM / "kserve" / "kserve-anychip.yaml")
    [container] = runtime["spec"]["containers"]
    written = option(container["args"], "--models").replace("{{.Name}}", "dogs").replace("$(FILE)", file)
    spec = parse_spec(written.replace("/mnt/models", str(tmp_path)))
    assert (spec.name, spec.architecture, Path(spec.weights)) == ("dogs", kind, Path(f"{tmp_path}{file}"))


def test_gpustacks_backend_has_its_fields_our_images_and_our_options():
    [spec] = read(UPSTREAM / "gpustack" / "anychip" / "spec.yaml")
    assert spec.keys() <= FIELDS
    assert {name: each["image_name"] for name, each in spec["version_configs"].items()} == {
        f"{VERSION}-{flavour}": f"anychip:{VERSION}-{flavour}" for flavour in FRAMEWORKS
    }
    for name, each in spec["version_configs"].items():
        assert each.keys() <= VERSION_FIELDS
        assert each["custom_framework"] == FRAMEWORKS[name.rpartition("-")[2]]
    assert spec["default_version"] in spec["version_configs"]
    command = spec["default_run_command"]
    assert set(re.findall(r"\{\{(\w+)\}\}", command)) == {"model_name", "model_path", "port"}
    words = shlex.split(command)
    assert words[0] == "serve"
    assert fields_of([*words, *spec["common_parameters"]]) <= set(Settings.model_fields)
    assert option(words, "--models") == "{{model_name}}={{model_path}}"
