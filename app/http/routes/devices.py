"""Devices while the service runs: `POST /v1/devices/{device}:release` has its workers give cached memory back now."""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import BaseModel

from app.link import Link

router = APIRouter(tags=["devices"])


class WorkerReleased(BaseModel):
    """Bytes one worker gave back, by rung: 1 collected, 2 caches."""

    worker: str
    returned_bytes: dict[int, int]


class ReleaseStarted(BaseModel):
    """What a device's workers gave back."""

    device: str
    workers: list[WorkerReleased]


@router.post("/v1/devices/{device}:release")
async def release(request: Request, device: str) -> ReleaseStarted:
    """Release cached memory on every worker of the device; answers when all have."""
    link: Link = request.app.state.link
    returned = await link.administration.release(device)
    workers = [WorkerReleased(worker=worker, returned_bytes=each) for worker, each in returned.items()]
    return ReleaseStarted(device=device, workers=workers)
