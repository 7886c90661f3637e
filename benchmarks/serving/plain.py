"""The simplest service to write: FastAPI around SentenceTransformer.encode, one call a request.

python -m benchmarks.serving.plain DIR PORT THREADS
"""

import sys

import torch
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from sentence_transformers import SentenceTransformer


class Body(BaseModel):
    input: str | list[str]
    model: str | None = None


def create_app(model: SentenceTransformer) -> FastAPI:
    app = FastAPI()

    @app.post("/v1/embeddings")
    def embed(body: Body) -> dict:
        texts = [body.input] if isinstance(body.input, str) else body.input
        vectors = model.encode(texts, show_progress_bar=False).tolist()
        return {"data": [{"index": i, "embedding": vector} for i, vector in enumerate(vectors)]}

    @app.get("/health")
    def health() -> dict:
        return {}

    return app


if __name__ == "__main__":
    directory, port, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    uvicorn.run(create_app(SentenceTransformer(directory, device="cpu")), port=int(port), log_level="warning")
