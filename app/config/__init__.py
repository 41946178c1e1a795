"""Settings: command line > ANYCHIP_* environment > anychip.toml > default.

Owns: every setting with its default, limits and help text, in sections; the only place that reads the environment. The
command line is generated from these tables and `docs/settings.md` is compared with them by a test.
Must not know what a setting changes.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationInfo, field_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from app.config.values import (
    Addresses,
    BatchSizes,
    Clients,
    CommaSeparated,
    DeviceMemory,
    GuardPolicy,
    IngressCount,
    LogLevel,
    ModelList,
    is_cascade,
    split,
    written_in,
)

CONFIG_FILE = "anychip.toml"
LOOPBACK = "127.0.0.1"
ADMIN_PORT_DISTANCE = 2
"""Distance from a public port to the administration's default one: 8002 for 8000, 8003 for 8001."""
_PREFIX = "ANYCHIP_"
_OF_OTHERS = re.compile(
    "KEY|URL|TORCH|TORCH_INDEX|EXTRAS|HASHES|IMAGE|MODEL_DIR|ADDRESS|PUBLISHED_PORT|MEMORY|ENVIRONMENTS_CACHE"
    "|TIMELINE_FILE|TEST_.*|SERVICE_.*|PORT_.*"
)
"""Variables that are no settings: of clients, the set-up, Compose, tests and measurements, and those that Kubernetes
gives every pod of a service called anychip."""
_FILES = (".onnx", ".pt2", ".ts", ".torchscript", ".xml", ".om", ".pt", ".pth", ".safetensors")
"""Endings of models' files (models.exports.exported, models.weights.checkpoint, which load PyTorch)."""
_BEHIND = re.compile(r"(\?.*)?(@sha256:[0-9A-Fa-f]{64})?$", re.DOTALL)


def absent(entry: str) -> str:
    """Return the sentence for an entry of `models` whose file is missing; "" if it exists, or if it names no file.

    This only reads text: models.catalog interprets entries, and takes seconds to load. Raises ModelError for an address
    from which nothing is fetched.
    """
    from models import addresses  # Here, as `--help` has to answer at once.

    if addresses.split(entry) is not None:
        return ""
    name, equals, text = _BEHIND.sub("", entry.strip(), count=1).partition("=")
    name, text = (name, text) if equals else ("", name)
    head, colon, chosen = text.partition(":")
    path = Path(chosen if colon and not head.endswith(_FILES) else text).expanduser()
    is_path = path.name.endswith(_FILES) or str(path).startswith(("/", "./", "../"))
    if not is_path or path.exists():
        return ""
    others = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, others, 1)
    hint = f"; did you mean {str(path.parent / near[0])!r}?" if near else "."
    return f"There is no file {str(path)!r} for {name or path.stem}{hint}"


class ModelSettings(BaseModel):
    """Models and their files"""

    models: ModelList = Field(
        "resnet50,yolov8n",
        description="Models to serve: names, or name=architecture:weights (official, sample, random or a path), "
        "or name=file.onnx, .pt2, .ts, or 'name=detector > classifier'; @sha256:… behind a file: that one alone; or "
        "name=hf://ORG/NAME, s3://… or https://…#sha256=…, downloaded before the service starts (docs/model-files.md)",
    )
    weights: str = Field("official", description="Weights of models that name none: official, sample, random, a path")
    weights_mirror: str = Field(
        "",
        description="Address that official weights are fetched from, in place of their publishers'; checksums stay",
    )
    trust_exported: bool = Field(
        False,
        description="Whether .pt2 and .ts files, which are programs, are read though --models does not name their "
        "SHA-256 (name=file.pt2@sha256:…)",
    )
    cache_dir: Path = Field(
        Path("~/.cache/anychip"),
        description="Folder for downloaded weights, compiled engines and what the gate and the vendors' compilers "
        "keep; where XDG_CACHE_HOME is set, anychip in there",
        validate_default=True,
    )
    models_on_demand: CommaSeparated = Field(
        "",
        description="Models that are loaded when they are asked for, and make room for others: names, or all, or all "
        "but some, as in all,-dogs; the others stay loaded (docs/many-models.md)",
    )
    traffic: CommaSeparated = Field(
        "",
        description="Shares of the requests for a model that each of its versions answers: dogs=1:95,2:5; all are "
        "version 1's where nothing is said (docs/rollout.md)",
    )
    profiles: bool = Field(
        True,
        description="Take up what anychip tune, or the first start, has found best here; what is set otherwise stays "
        "(docs/tools.md)",
    )

    @field_validator("cache_dir")
    @classmethod
    def _where_the_user_has_caches(cls, path: Path) -> Path:
        """Follow the XDG Base Directory Specification 0.8: a path there that is not absolute is ignored."""
        caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
        return caches / "anychip" if path == Path("~/.cache/anychip") and caches.is_absolute() else path

    @property
    def model_specs(self) -> tuple[str, ...]:
        """Return the entries of `models`, and each model of a cascade that has no entry of its own."""
        found = [entry for entry in split(self.models) if not is_cascade(entry)]
        for entry in self.stage_specs:
            for text in written_in(entry):
                if text not in found and not any(each.partition("=")[0].strip() == text for each in found):
                    found.append(text)
        return tuple(found)

    @property
    def shown_models(self) -> str:
        """Return `models` for people and logs, its addresses without user, password, query and digest."""
        from models.addresses import without_secrets

        return ",".join(map(without_secrets, split(self.models)))

    @property
    def stage_specs(self) -> tuple[str, ...]:
        """Return the cascades of `models`: `name=detector?options > classifier`, `name=KIND:REST`."""
        return tuple(entry for entry in split(self.models) if is_cascade(entry))

    def is_on_demand(self, model: str) -> bool:
        """Return True if a model of this name is loaded on demand."""
        named = split(self.models_on_demand)
        return model in named or ("all" in named and f"-{model}" not in named)

    @property
    def weights_dir(self) -> Path:
        """Return the folder of downloaded weights."""
        return self.cache_dir.expanduser() / "weights"


class DeviceSettings(BaseModel):
    """Devices, engines, precisions"""

    device: str = Field("auto", description="Device to run on, e.g. auto, cpu, cpu:0")
    workers_per_device: int = Field(1, ge=1, le=64, description="Worker processes that share a device")
    engine: str = Field("auto", description="Engine that runs the networks, e.g. auto, openvino, eager")
    precision: str = Field("auto", description="Precision of the networks: auto, fp32, fp16, bf16, int8")
    calibrate: str = Field("", description="Folder of images like those to come, which int8 is calibrated on")
    plugins: CommaSeparated = Field(
        "",
        description="Modules that workers import before they load, e.g. to register release hooks (docs/memory.md) "
        "or operators (docs/operators.md)",
    )
    null: str = Field("", description="What the device called null does, e.g. delay_ms=5,crash=*100 (docs/null.md)")
    simulate: str = Field(
        "", description="Accelerators to simulate, e.g. npu:2 (docs/simulation.md); their answers come from the CPU"
    )


class BatchSettings(BaseModel):
    """Batches and decoding"""

    batch_sizes: BatchSizes = Field(
        "auto",
        description="Batch sizes the engines are compiled for, ascending; auto: 1,2,4,8 and, as measured at the first "
        "start, larger ones where they pay and fit into the memory (docs/tools.md)",
    )
    max_wait_ms: float = Field(
        0, ge=0, le=60_000, description="How long an idle device waits for a batch to fill, in milliseconds"
    )
    decoders: int = Field(
        0, ge=0, le=1024, description="Processes that decode images, two at least; 0 means one a core"
    )
    decode: Literal["host", "device", "auto"] = Field(
        "host",
        description="Where JPEG files are decoded: host; device, which then needs a decoder (NVIDIA); auto: the device "
        "where it has one and answers agree (docs/decoding.md)",
    )


class MemorySettings(BaseModel):
    """Memory"""

    device_memory: DeviceMemory = Field(
        "auto",
        description="Memory of a device that models may take together where some are loaded on demand: a share such as "
        "0.5, or a size such as 12GB; auto: what is free below the guard's mark",
    )
    guard_policy: GuardPolicy = Field(
        "auto",
        description="Memory guard: off; auto; the share of the device that may be in use before a release, in place of "
        "0.85; or a number of batches after which memory is released as well (docs/memory.md)",
    )


class NetworkSettings(BaseModel):
    """Addresses and protocols"""

    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 for every interface")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one")
    grpc_port: int = Field(
        0, ge=0, le=65535, description="Port of the gRPC service, usually 8001 (needs the extra grpc); 0: there is none"
    )
    reuse_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="Port that several services of this machine share, beside their own --port (SO_REUSEPORT); 0: none",
    )
    ingresses: IngressCount = Field(
        "auto",
        description="Processes that read requests and write answers beside the one that orders them; 0: that one does "
        "it all; auto: 0 up to 4 cores, then one for 5 cores, at most 4 (docs/ingresses.md)",
    )
    compat: Clients = Field(
        "",
        description="Clients of other servers to answer: deepstack, image-client (models show one input), triton "
        "(normalised float tensors of images, for which each model is loaded a second time), triton-metrics (its names "
        "in /metrics, for dashboards made for them), x-anylabeling (docs/protocols.md)",
    )
    playground: bool = Field(True, description="Offer the page at /, to try the models in a browser")


class SecuritySettings(BaseModel):
    """Security"""

    admin: Literal["off", "loopback", "port"] = Field(
        "loopback",
        description="Where models are loaded and unloaded and memory is released: off; loopback, on a port of its own "
        "that this machine alone reaches; port, on the public one as well (docs/security.md)",
    )
    admin_port: int = Field(
        0, ge=0, le=65535, description="Port of --admin loopback; 0: two above --port, a free one where that is 0"
    )
    api_keys_file: str = Field(
        "", description="File of API keys, written by anychip keys add; with it all but health wants a key"
    )
    insecure_keys: bool = Field(
        False, description="Whether keys may be sent over plain HTTP from other machines, e.g. behind a proxy with TLS"
    )
    metrics_without_key: bool = Field(False, description="Whether /metrics is answered without a key")
    tls_cert: str = Field("", description="Certificate (PEM, with what leads to its authority) for HTTPS and gRPC")
    tls_key: str = Field("", description="Its private key (PEM); both files are read again when they change")
    tls_client_ca: str = Field("", description="Authority (PEM) whose certificates clients need to have: mTLS")
    allowed_hosts: CommaSeparated = Field(
        "",
        description="Names in the Host header that are answered beside localhost and addresses, e.g. "
        "api.example.com,*.example.org, or * for all; where none is given and there are keys, all but on loopback",
    )
    cors_origins: Addresses = Field(
        "", description="Web pages that may ask from a browser, by origin, e.g. https://app.example.com; none if empty"
    )
    client_limits: CommaSeparated = Field(
        "",
        description="What one client (a key, else an address) may have before 429, e.g. "
        "requests=8,bytes=100000000,pixels=200000000,images_per_s=50; no such limit where it is not named",
    )

    @property
    def origins(self) -> tuple[str, ...]:
        """Return the entries of `cors_origins`."""
        return split(self.cors_origins)


class LimitSettings(BaseModel):
    """Limits of requests"""

    queue_size: int = Field(
        256, ge=1, le=100_000, description="Images a model may have waiting (decoding included) before 429 is answered"
    )
    max_images: int = Field(64, ge=1, description="Images in one request")
    timeout_ms: float = Field(
        30_000, gt=0, description="Deadline of a request that names none, in milliseconds from its first byte"
    )
    max_body_bytes: int = Field(20 * 2**20, ge=1, description="Size of a request's body, in bytes")
    max_image_pixels: int = Field(50_000_000, ge=1, description="Pixels of one image, counted before it is decoded")
    max_buffered_bytes: int = Field(
        512 * 2**20, ge=1, description="Bytes of bodies held at once, of all requests, before 429 is answered"
    )
    max_connections: int = Field(
        2048, ge=4, description="Connections, and calls of gRPC, at once; three quarters of them for one client"
    )
    keep_alive_s: int = Field(
        75, ge=1, description="Time an idle connection stays open; longer than a load balancer's own, in seconds"
    )


class LifetimeSettings(BaseModel):
    """Time limits of workers and the service"""

    start_timeout_s: float = Field(600, gt=0, description="Time a worker may take to load its models, in seconds")
    batch_timeout_s: float = Field(
        30, gt=0, description="Time a batch may take before its worker counts as hung and is replaced, in seconds"
    )
    grace_s: float = Field(
        0, ge=0, description="Time the service goes on accepting work after SIGTERM with readiness off, in seconds"
    )
    drain_s: float = Field(25, ge=0, description="Time accepted work may take to finish after that, in seconds")


class ObservabilitySettings(BaseModel):
    """Metrics, traces and the log"""

    trace_endpoint: Addresses = Field(
        "", description="Where traces go by OTLP over HTTP, e.g. http://localhost:4318/v1/traces; needs OpenTelemetry"
    )
    log_format: Literal["auto", "json", "text"] = Field(
        "auto", description="Form of log lines: json, text, or auto, which is text on a terminal and json elsewhere"
    )
    log_requests: bool = Field(False, description="One log line a request")
    log_level: LogLevel = Field("info", description="Least severe log line: debug, info, warning, error")


# The last base's fields come first.
class Settings(
    ObservabilitySettings,
    LifetimeSettings,
    LimitSettings,
    SecuritySettings,
    NetworkSettings,
    MemorySettings,
    BatchSettings,
    DeviceSettings,
    ModelSettings,
    BaseSettings,
):
    """Settings of the service. Frozen: read once, at the start."""

    model_config = SettingsConfigDict(
        env_prefix=_PREFIX, frozen=True, extra="forbid", protected_namespaces=(), toml_file=CONFIG_FILE
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch(cls, given: Any, about: ValidationInfo) -> Any:
        if isinstance(given, bool) and cls.model_fields[about.field_name or ""].annotation is not bool:
            raise ValueError("it is neither on nor off: give its number or text")
        return given

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        *_: Any,
        **__: Any,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources in order: command line, environment, file. The first that has a value wins."""
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)


SECTIONS: tuple[type[BaseModel], ...] = Settings.__bases__[-2::-1]


def unknown_variables(names: Iterable[str]) -> list[str]:
    """Return the environment's variables that look like settings and are none: misspelt, or removed."""
    written = {name: name.upper().removeprefix(_PREFIX) for name in names if name.upper().startswith(_PREFIX)}
    return sorted(
        name
        for name, setting in written.items()
        if setting.lower() not in Settings.model_fields and not _OF_OTHERS.fullmatch(setting)
    )
