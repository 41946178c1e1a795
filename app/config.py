"""Settings: command line > ANYCHIP_* environment > anychip.toml > default.

Owns: every setting with its default, limits and help text; the only place that reads the environment. The command line
is generated from this table and `docs/settings.md` is compared with it by a test.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from app.worker.guard import LeakLimits

CONFIG_FILE = "anychip.toml"
CLIENTS = ("deepstack", "ultralytics", "x-anylabeling")
"""Clients of other servers that are answered where `compat` names them."""
STAGES = ">"
"""Between a detector and the classifier of what it finds."""
_FIRST_SIZES = "1,2,4,8"


def _joined(value: Any) -> Any:
    # A TOML file reads better with a list than with commas in a string.
    return ",".join(str(part) for part in value) if isinstance(value, list | tuple) else value


def _a_list(value: str) -> str:
    if not split(value):
        raise ValueError("name at least one")
    return value


def _a_ladder(value: str) -> str:
    if value == "auto":
        return value
    sizes = [int(part) for part in split(value)]
    if not sizes or sizes != sorted(set(sizes)) or sizes[0] < 1:
        raise ValueError("must be auto, or ascending whole numbers from 1 up, such as 1,2,4,8")
    return value


def split(value: str) -> tuple[str, ...]:
    """The parts of a comma-separated setting, without blanks."""
    return tuple(part.strip() for part in value.split(",") if part.strip())


def sizes_of(batch_sizes: str) -> tuple[int, ...]:
    """The entries of the setting `batch_sizes`; of `auto` those to begin with."""
    return tuple(int(size) for size in split(_FIRST_SIZES if batch_sizes == "auto" else batch_sizes))


def _clients(value: str) -> str:
    unknown = [name for name in split(value) if name not in CLIENTS]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is none of {', '.join(CLIENTS)}")
    return value


CommaSeparated = Annotated[str, BeforeValidator(_joined), AfterValidator(_a_list)]
Ladder = Annotated[str, BeforeValidator(_joined), AfterValidator(_a_ladder)]


class Settings(BaseSettings):
    """What the service can be told. Frozen: read once, at the start."""

    model_config = SettingsConfigDict(
        env_prefix="ANYCHIP_", frozen=True, extra="forbid", protected_namespaces=(), toml_file=CONFIG_FILE
    )

    models: CommaSeparated = Field(
        "resnet50,yolov8n",
        description="Models to serve: names, or name=architecture:weights (official, sample, random or a path), "
        "or name=file.onnx, .pt2, .ts, or 'name=detector > classifier'; @sha256:… behind a file: that one and no other",
    )
    weights: str = Field("official", description="Weights of models that name none: official, sample, random, a path")
    weights_mirror: str = Field(
        "", description="Address that official weights are fetched from, in place of their publishers'; checksums stay"
    )
    trust_exported: bool = Field(
        False,
        description="Whether .pt2 and .ts files, which are programs, are read though --models does not name their "
        "SHA-256 (name=file.pt2@sha256:…)",
    )
    device: str = Field("auto", description="Device to run on, e.g. auto, cpu, cpu:0")
    workers_per_device: int = Field(1, ge=1, le=64, description="Worker processes that share a device")
    engine: str = Field("auto", description="Engine that runs the networks, e.g. auto, openvino, eager")
    precision: str = Field("auto", description="Precision of the networks: auto, fp32, fp16, bf16, int8")
    calibrate: str = Field("", description="Folder of images like those to come, which int8 is calibrated on")
    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 for every interface")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one")
    grpc_port: int = Field(
        0, ge=0, le=65535, description="Port of the gRPC service, usually 8001 (needs anychip[grpc]); 0: there is none"
    )
    reuse_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="Port that several services of this machine share, beside their own --port (SO_REUSEPORT); 0: none",
    )
    admin: Literal["off", "loopback", "port"] = Field(
        "loopback",
        description="Where models are loaded and unloaded and memory is released: off; loopback, on a port of its own "
        "that this machine alone reaches; port, on the public one as well (docs/security.md)",
    )
    admin_port: int = Field(
        0, ge=0, le=65535, description="Port of --admin loopback; 0: two above --port, a free one where that is 0"
    )
    admin_grpc_port: int = Field(
        0, ge=0, le=65535, description="Its gRPC port, where there is gRPC; 0: two above --grpc-port"
    )
    api_keys_file: str = Field(
        "", description="File of API keys, written by anychip keys add; with it all but health wants a key"
    )
    insecure_keys: bool = Field(
        False, description="Whether keys may be sent over plain HTTP from other machines, e.g. behind a proxy with TLS"
    )
    tls_cert: str = Field("", description="Certificate (PEM, with what leads to its authority) for HTTPS and gRPC")
    tls_key: str = Field("", description="Its private key (PEM); both files are read again when they change")
    tls_client_ca: str = Field("", description="Authority (PEM) whose certificates clients need to have: mTLS")
    metrics_without_key: bool = Field(False, description="Whether /metrics is answered without a key")
    allowed_hosts: str = Field(
        "",
        description="Names in the Host header that are answered beside localhost and addresses, e.g. "
        "api.example.com,*.example.org, or * for all; where none is given and there are keys, all but on loopback",
    )
    client_requests: int = Field(
        0, ge=0, description="Requests at a time of one client (a key, else an address), before 429; 0: no such limit"
    )
    client_bytes: int = Field(0, ge=0, description="Bytes of requests held at once of one client; 0: no such limit")
    client_pixels: int = Field(
        0, ge=0, description="Pixels of images under way of one client, read from their headers; 0: no such limit"
    )
    client_images_per_s: float = Field(
        0, ge=0, description="Images a second of one client, a second's worth at once; 0: no such limit"
    )
    cors_origins: str = Field(
        "", description="Web pages that may ask from a browser, by origin, e.g. https://app.example.com; none if empty"
    )
    changes_per_minute: int = Field(
        12, ge=1, le=10_000, description="Loads and unloads of models that are begun in a minute, before 429"
    )
    batch_sizes: Ladder = Field(
        "auto",
        description="Batch sizes the engines are compiled for, ascending; auto: 1,2,4,8 and, as measured at the first "
        "start, larger ones where they pay and fit into the memory (docs/tools.md)",
    )
    max_wait_ms: float = Field(
        0, ge=0, le=60_000, description="How long an idle device waits for a batch to fill, in milliseconds"
    )
    queue_size: int = Field(
        256, ge=1, le=100_000, description="Images a model may have waiting (decoding included) before 429 is answered"
    )
    max_images: int = Field(64, ge=1, description="Images in one request")
    timeout_ms: float = Field(
        30_000, gt=0, description="Deadline of a request that names none, in milliseconds from its first byte"
    )
    max_timeout_ms: float = Field(
        600_000, gt=0, description="Longest deadline a client can ask for, in milliseconds; longer ones are cut to it"
    )
    max_body_bytes: int = Field(20 * 2**20, ge=1, description="Size of a request's body, in bytes")
    max_image_pixels: int = Field(50_000_000, ge=1, description="Pixels of one image, counted before it is decoded")
    decoders: int = Field(
        0, ge=0, le=1024, description="Processes that decode images, two at least; 0 means one a core"
    )
    decode: Literal["host", "device", "auto"] = Field(
        "host",
        description="Where JPEG files are decoded: host; device, which then needs a decoder (NVIDIA); auto: the device "
        "where it has one and answers agree (docs/performance.md)",
    )
    decode_timeout_s: float = Field(
        10,
        gt=0,
        description="Time an image may take to decode before it is refused, in seconds",
    )
    decode_queue_size: int = Field(
        256, ge=1, description="Images that may be decoded or wait for it, an eighth of them large, before 429"
    )
    max_buffered_bytes: int = Field(
        512 * 2**20, ge=1, description="Bytes of bodies held at once, of all requests, before 429 is answered"
    )
    max_connections: int = Field(
        2048, ge=4, description="Connections, and calls of gRPC, at once; three quarters of them for one client"
    )
    max_header_bytes: int = Field(64 * 2**10, ge=1024, description="Size of a request's headers, in bytes")
    header_timeout_s: float = Field(10, gt=0, description="Time a request's headers may take to arrive, in seconds")
    keep_alive_s: int = Field(
        75, ge=1, description="Time an idle connection stays open; longer than a load balancer's own, in seconds"
    )
    min_upload_bytes_per_s: int = Field(
        4096, ge=0, description="Least rate of an upload after its first 5 seconds, in bytes a second; 0: none"
    )
    start_timeout_s: float = Field(600, gt=0, description="Time a worker may take to load its models, in seconds")
    compile_timeout_s: float = Field(
        3600, gt=0, description="Time a worker may take to compile faster engines while another serves, in seconds"
    )
    batch_timeout_s: float = Field(
        30, gt=0, description="Time a batch may take before its worker counts as hung and is replaced, in seconds"
    )
    heartbeat_timeout_s: float = Field(
        10, ge=1, description="Time a worker may be silent before it counts as hung and is replaced, in seconds"
    )
    grace_s: float = Field(
        0, ge=0, description="Time the service goes on accepting work after SIGTERM with readiness off, in seconds"
    )
    drain_s: float = Field(25, ge=0, description="Time accepted work may take to finish after that, in seconds")
    guard_policy: Literal["off", "auto", "every_n_batches"] = Field(
        "auto",
        description="Memory guard: off, auto, or every_n_batches, which also releases every so many (docs/memory.md)",
    )
    guard_every_batches: int = Field(1000, ge=1, description="Batches between two releases with every_n_batches")
    guard_cache_ratio: float = Field(
        0.25, gt=0, le=1, description="Share of the device that may be reserved and not allocated before a release"
    )
    guard_device_ratio: float = Field(
        0.85, gt=0, le=1, description="Share of the device that may be in use before a release"
    )
    guard_resident_mb: int = Field(
        2048, ge=1, description="Host memory a worker may gain since its start before a release, in MiB"
    )
    guard_leak_kb_per_batch: float = Field(
        1, ge=0, description="Growth a batch, after a release, from which a worker counts as leaking, in KiB"
    )
    guard_budget_ms: float = Field(
        100,
        ge=0,
        description="Time between two batches after which no further rung of a release begins, in milliseconds",
    )
    guard_cooldown_s: float = Field(5, ge=0, description="Least time between two releases, in seconds")
    guard_handover_interval_s: float = Field(
        10, ge=0, description="Least time between two hand-overs of a device for its memory, in seconds"
    )
    plugins: str = Field(
        "", description="Modules that workers import before they load, e.g. to register release hooks (docs/memory.md)"
    )
    operator_libraries: str = Field(
        "",
        description="Shared libraries that bring operators to a device, loaded before its models (docs/operators.md)",
    )
    cache_dir: Path = Field(
        Path("~/.cache/anychip"),
        description="Folder for downloaded weights, compiled engines and what the gate and the vendors' compilers keep",
        validate_default=True,
    )
    profiles: bool = Field(
        True,
        description="Take up what anychip tune, or the first start, has found best here; what is set otherwise stays "
        "(docs/tools.md)",
    )
    null: str = Field("", description="What the device called null does, e.g. delay_ms=5,crash=*100 (docs/null.md)")
    simulate: str = Field(
        "", description="Accelerators to simulate, e.g. npu:2 (docs/simulation.md); their answers come from the CPU"
    )
    tiles: Annotated[str, BeforeValidator(_joined)] = Field(
        "",
        description="Detectors that look at large images in tiles where a request says nothing of it: name=640, or "
        "name=640:0.2 with the overlap (docs/your-network.md)",
    )
    float_input: bool = Field(
        False, description="Whether image models also take normalised float tensors; loads each a second time"
    )
    metrics: bool = Field(True, description="Count and time what happens, for /metrics, /v1/stats and anychip top")
    compat: Annotated[str, BeforeValidator(_joined), AfterValidator(_clients)] = Field(
        "",
        description="Clients of other servers to answer: deepstack, ultralytics, x-anylabeling (docs/your-network.md)",
    )
    playground: bool = Field(True, description="Offer the page at /, to try the models in a browser")
    triton_metrics: bool = Field(False, description="Offer Triton's metric names as well, for dashboards made for it")
    trace_endpoint: str = Field(
        "", description="Where traces go by OTLP over HTTP, e.g. http://localhost:4318/v1/traces; needs anychip[traces]"
    )
    trace_ratio: float = Field(
        0.01, ge=0, le=1, description="Share of requests to trace; those whose client traces them are traced anyway"
    )
    log_format: Literal["auto", "json", "text"] = Field(
        "auto", description="Form of log lines: json, text, or auto, which is text on a terminal and json elsewhere"
    )
    log_requests: bool = Field(False, description="One log line a request")
    log_level: str = Field("info", description="Least severe log line: debug, info, warning, error")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Command line, environment, file: the first that says something wins."""
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)

    @property
    def model_specs(self) -> tuple[str, ...]:
        """The entries of `models`; of two stages, each that is not named elsewhere."""
        found = [entry for entry in split(self.models) if STAGES not in entry]
        for entry in self.stage_specs:
            for stage in entry.partition("=")[2].split(STAGES):
                text = stage.partition("?")[0].strip()
                if text not in found and not any(each.partition("=")[0].strip() == text for each in found):
                    found.append(text)
        return tuple(found)

    @property
    def stage_specs(self) -> tuple[str, ...]:
        """The entries of `models` that are two stages: `name=detector?options > classifier`."""
        return tuple(entry for entry in split(self.models) if STAGES in entry)

    @property
    def takes_floats(self) -> bool:
        """Whether image models take normalised tensors, asked for by itself or for a client that sends them."""
        return self.float_input or "ultralytics" in split(self.compat)

    @property
    def host_names(self) -> tuple[str, ...]:
        """The entries of `allowed_hosts`."""
        return split(self.allowed_hosts)

    @property
    def origins(self) -> tuple[str, ...]:
        """The entries of `cors_origins`."""
        return split(self.cors_origins)

    @property
    def guard_limits(self) -> LeakLimits:
        """The settings `guard_*` of a worker."""
        return LeakLimits(
            policy=self.guard_policy,
            every_batches=self.guard_every_batches,
            cache_ratio=self.guard_cache_ratio,
            device_ratio=self.guard_device_ratio,
            resident_bytes=self.guard_resident_mb << 20,
            leak_bytes_per_batch=int(self.guard_leak_kb_per_batch * 1024),
            budget_s=self.guard_budget_ms / 1e3,
            cooldown_s=self.guard_cooldown_s,
        )

    @property
    def ladder(self) -> tuple[int, ...]:
        """The entries of `batch_sizes`; of `auto` those to begin with."""
        return sizes_of(self.batch_sizes)

    @property
    def weights_dir(self) -> Path:
        """Where downloaded weights are kept."""
        return self.cache_dir.expanduser() / "weights"
