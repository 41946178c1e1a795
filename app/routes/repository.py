"""Models while the service runs: `POST /v2/repository/models/{model}/load` reads a model's weights again."""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import BaseModel

from app.service import Service

router = APIRouter(tags=["repository"])


class LoadedModel(BaseModel):
    """A model whose new weights are being served."""

    name: str
    weights: str


@router.post("/v2/repository/models/{model}/load")
async def load(request: Request, model: str) -> LoadedModel:
    """Serve what the model's weight file holds now; answers when every worker has been replaced, loses no request."""
    service: Service = request.app.state.service
    await service.load(model)
    return LoadedModel(name=model, weights=service.find(model).model.weights)
