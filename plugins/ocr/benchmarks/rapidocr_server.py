"""RapidOCR behind a common handler: FastAPI, a thread pool, one image at a time. PORT is the argument."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from rapidocr import RapidOCR
from starlette.concurrency import run_in_threadpool

app = FastAPI()
engine = RapidOCR()


@app.post("/ocr")
async def read(request: Request) -> dict[str, Any]:
    """Read the lines of one encoded image."""
    found = await run_in_threadpool(engine, await request.body())
    lines = zip(found.boxes.tolist(), found.txts, found.scores, strict=True) if found.txts else ()
    return {"lines": [{"corners": box, "text": text, "score": float(score)} for box, text, score in lines]}


if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
