"""Search by meaning: texts as vectors of any `/v1/embeddings` endpoint, compared by their cosine."""

from collections.abc import Sequence

import httpx
import numpy as np
from numpy.typing import NDArray

from paceline.config.secret import hidden
from paceline.envs.base import EnvError
from paceline.envs.search.corpus import Document
from paceline.envs.search.index import DEFAULT_TOP_K, Hit, best

BATCH = 64
"""Texts embedded by one request."""
SECONDS = 60.0


class Embedder:
    """An embeddings endpoint, in OpenAI's form."""

    def __init__(self, url: str, model: str, api_key: str | None = None) -> None:
        self.url, self.model = f"{url.rstrip('/').removesuffix('/embeddings')}/embeddings", model
        self._key = api_key
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.Client(headers=headers, timeout=SECONDS)

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """One row of length 1 per text."""
        vectors = np.concatenate([self._some(texts[i : i + BATCH]) for i in range(0, len(texts), BATCH)])
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        return (vectors / np.maximum(lengths, 1e-12)).astype(np.float32)

    def close(self) -> None:
        self._client.close()

    def _some(self, texts: Sequence[str]) -> NDArray[np.float64]:
        body = {"model": self.model, "input": list(texts), "encoding_format": "float"}
        try:
            response = self._client.post(self.url, json=body)
        except httpx.HTTPError as error:
            cause = str(error) or type(error).__name__
            raise EnvError(f"the embeddings service at {self.url} does not answer: {cause}") from error
        if response.status_code != 200:
            told = " ".join(hidden(response.text, self._key)[:200].split())
            raise EnvError(f"the embeddings service at {self.url} answered {response.status_code}: {told}")
        try:
            rows = sorted(response.json()["data"], key=lambda row: row["index"])
            vectors = np.array([row["embedding"] for row in rows], np.float64)
        except (ValueError, KeyError, TypeError) as error:
            raise EnvError(f"the embeddings service at {self.url} answered, but with no embeddings") from error
        if vectors.ndim != 2 or len(vectors) != len(texts) or not np.isfinite(vectors).all():
            raise EnvError(f"the embeddings service at {self.url} gave no vector for each of {len(texts)} texts")
        return vectors


class Dense:
    """The whole corpus as vectors, and the endpoint that embeds queries."""

    def __init__(self, documents: Sequence[Document], vectors: NDArray[np.float32], embedder: Embedder) -> None:
        self.documents, self.vectors = documents, vectors
        self._embedder = embedder

    @classmethod
    def build(cls, documents: Sequence[Document], embedder: Embedder) -> "Dense":
        return cls(documents, embedder.embed([document.words for document in documents]), embedder)

    def search(self, query: str, top_k: int = DEFAULT_TOP_K) -> list[Hit]:
        (vector,) = self._embedder.embed([query])
        if len(vector) != self.vectors.shape[1]:
            raise EnvError(
                f"{self._embedder.url} gives vectors of {len(vector)} numbers, the index holds such of "
                f"{self.vectors.shape[1]}: it was made by another model, delete it"
            )
        return best(self.documents, self.vectors @ vector, top_k)
