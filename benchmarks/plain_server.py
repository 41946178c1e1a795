"""The least a FastAPI handler can do with an image: read the raw body, answer with a small JSON document.

python -m benchmarks.plain_server PORT

Any service on FastAPI and uvicorn pays this cost before its own work.
"""

from __future__ import annotations

import sys

import uvicorn
from fastapi import FastAPI, Request


def create_app() -> FastAPI:
    """Make an app with one route that only reads."""
    app = FastAPI()

    @app.post("/predict")
    async def predict(request: Request) -> dict[str, int]:
        return {"bytes": len(await request.body())}

    return app


if __name__ == "__main__":
    uvicorn.run(
        create_app(), port=int(sys.argv[1]), loop="uvloop", http="httptools", log_level="warning", access_log=False
    )
