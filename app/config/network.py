"""Settings of the network, of access, and of the service's end."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from app.config.values import Clients, CommaSeparated, IngressCount, split

LOOPBACK = "127.0.0.1"
ADMIN_PORT_DISTANCE = 2
"""Distance from a public port to the administration's default one: 8002 for 8000, 8003 for 8001."""


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
        "in /metrics, for dashboards made for them), ultralytics, x-anylabeling (docs/protocols.md)",
    )
    playground: bool = Field(True, description="Offer the page at /, to try the models in a browser")

    @property
    def takes_floats(self) -> bool:
        """Return True if image models take normalised tensors, as the clients in `compat` send them."""
        return not {"triton", "ultralytics"}.isdisjoint(split(self.compat))


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
    cors_origins: CommaSeparated = Field(
        "", description="Web pages that may ask from a browser, by origin, e.g. https://app.example.com; none if empty"
    )
    client_limits: CommaSeparated = Field(
        "",
        description="What one client (a key, else an address) may have before 429, e.g. "
        "requests=8,bytes=100000000,pixels=200000000,images_per_s=50; no such limit where it is not named",
    )

    @property
    def host_names(self) -> tuple[str, ...]:
        """Return the entries of `allowed_hosts`."""
        return split(self.allowed_hosts)

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
