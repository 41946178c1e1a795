"""Devices while the service runs: `POST /v1/devices/{device}:release` has its workers release cached memory now."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import APIRouter, Request
from pydantic import BaseModel

from app.link import Link

router = APIRouter(tags=["devices"])


class WorkerReleased(BaseModel):
    """Bytes that one worker released, by level: 1 collected, 2 caches. `returned_bytes`: of the device;
    `returned_host_bytes`: by which the worker's host memory fell meanwhile.
    """

    worker: str
    returned_bytes: Mapping[int, int]
    returned_host_bytes: Mapping[int, int]


class ReleaseStarted(BaseModel):
    """Memory that a device's workers released."""

    device: str
    workers: list[WorkerReleased]


@router.post("/v1/devices/{device}:release")
async def release_memory(request: Request, device: str) -> ReleaseStarted:
    """Release cached memory on every worker of the device; answer when all have."""
    link: Link = request.app.state.link
    returned = await link.administration.release(device)
    workers = [
        WorkerReleased(worker=worker, returned_bytes=each.device, returned_host_bytes=each.host)
        for worker, each in returned.items()
    ]
    return ReleaseStarted(device=device, workers=workers)
