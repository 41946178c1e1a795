"""Settings of devices, batches and memory."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from app.config.values import BatchSizes, CommaSeparated, DeviceMemory, GuardPolicy, sizes_of


class DeviceSettings(BaseModel):
    """Devices, engines, precisions"""

    device: str = Field("auto", description="Device to run on, e.g. auto, cpu, cpu:0")
    workers_per_device: int = Field(1, ge=1, le=64, description="Worker processes that share a device")
    engine: str = Field("auto", description="Engine that runs the networks, e.g. auto, openvino, eager")
    precision: str = Field("auto", description="Precision of the networks: auto, fp32, fp16, bf16, int8")
    calibrate: str = Field("", description="Folder of images like those to come, which int8 is calibrated on")
    plugins: CommaSeparated = Field(
        "",
        description="Modules that workers import before they load, e.g. to register release hooks (docs/memory.md), "
        "and shared libraries (.so) that bring operators to a device (docs/operators.md)",
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

    @property
    def ladder(self) -> tuple[int, ...]:
        """Return the entries of `batch_sizes`; for `auto` the first ones."""
        return sizes_of(self.batch_sizes)


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
