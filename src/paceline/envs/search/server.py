"""The search service.

POST /search {"query": "...", "top_k": 3}  ->  {"results": [{"id", "title", "text", "score"}, ...]}, best first
GET /health                                ->  {"status": "ok", "documents": 200, "retrieval": "bm25"}

With an API key, /search wants it as `Authorization: Bearer KEY`.
"""

import asyncio
import sys
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, Field, model_validator

from paceline.config.base import Section
from paceline.config.env import SEARCH_KEY_VARIABLE
from paceline.config.secret import address_secret
from paceline.envs.base import EnvError
from paceline.envs.search.index import DEFAULT_TOP_K, MAX_QUERY_CHARS, Dense, Embedder, Index, open_index
from paceline.server.app import event_loop_factory, serve
from paceline.server.bodies import RequestBody
from paceline.server.errors import ErrorAnswer, Refusal, bad_request, install_error_handlers
from paceline.server.guard import Meter, ServerGuard
from paceline.server.http import FastJsonResponse, read_body
from paceline.util.connections import is_loopback, listen

MAX_RESULTS = 100


class SearchOptions(Section):
    """A search service over one corpus."""

    corpus: str | None = None
    """Documents, one JSON object with `id`, `text` and perhaps `title` per line; those of the package when left out."""
    index: str | None = None
    """Folder to keep the index in. What is in it is used if it was made from the same documents."""
    top_k: int = Field(default=DEFAULT_TOP_K, ge=1, le=MAX_RESULTS)
    """Results for a query that does not say how many it wants."""
    host: str = "127.0.0.1"
    """Address to listen on; anything but loopback needs an API key."""
    port: int = Field(default=8100, ge=0, le=65535)
    """0 picks a free port."""
    api_key: str | None = Field(default=None, min_length=1, repr=False)
    """Clients must send it as `Authorization: Bearer KEY`."""
    embeddings_url: str | None = None
    """Base URL of an OpenAI-compatible endpoint: search by meaning instead of BM25."""
    embeddings_model: str | None = None
    """Its model."""
    embeddings_api_key: str | None = Field(default=None, repr=False)
    """Its API key, sent as `Authorization: Bearer KEY`."""

    @model_validator(mode="after")
    def _check_exposure(self) -> "SearchOptions":
        if not self.api_key and not is_loopback(self.host):
            raise ValueError(
                f"{self.host} can be reached from other machines: give an API key (--api-key or "
                f"{SEARCH_KEY_VARIABLE}), or listen on 127.0.0.1"
            )
        if (self.embeddings_url is None) != (self.embeddings_model is None):
            raise ValueError("search by meaning needs both --embeddings-endpoint and --embeddings-model")
        if secret := address_secret(self.embeddings_url or ""):
            raise ValueError(
                f"--embeddings-endpoint has {secret}, where others may read it: give --embeddings-api-key instead"
            )
        return self


MAX_BODY_BYTES = 1 << 20
GRACE_SECONDS = 5.0


class SearchBody(RequestBody):
    """A search request."""

    query: Annotated[str, Field(max_length=MAX_QUERY_CHARS)]
    top_k: Annotated[int, Field(ge=1, le=MAX_RESULTS)] | None = None
    """How many results at most; the server's --top-k when left out."""


class SearchResult(BaseModel):
    """A document that was found."""

    id: str
    title: str
    text: str
    score: float


class SearchAnswer(BaseModel):
    """The best documents, best first."""

    results: list[SearchResult]


class Health(BaseModel):
    """The service answers, and over how much."""

    status: Literal["ok"]
    documents: int
    retrieval: Literal["bm25", "dense"]


def serve_search(options: SearchOptions) -> None:
    """Serve until a signal comes."""
    listener = listen(options.host, options.port)
    host = f"[{options.host}]" if ":" in options.host else options.host
    with listener:
        embedder = None
        if options.embeddings_url is not None and options.embeddings_model is not None:
            embedder = Embedder(options.embeddings_url, options.embeddings_model, options.embeddings_api_key)
        index = open_index(options.corpus, options.index, embedder)
        address = f"http://{host}:{listener.getsockname()[1]}"
        ready = f"paceline: searching {len(index.documents)} documents at {address}/search"
        app = build_app(index, options.top_k, options.api_key)
        with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
            runner.run(serve(app, listener, GRACE_SECONDS, lambda: print(ready, flush=True)))
    print("paceline: stopped", file=sys.stderr)


def build_app(index: Index, top_k: int = DEFAULT_TOP_K, api_key: str | None = None) -> FastAPI:
    """The service's application around an index."""
    app = FastAPI(title="Paceline search", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.max_body_bytes = MAX_BODY_BYTES
    install_error_handlers(app)
    app.add_middleware(ServerGuard, meter=Meter(), routes=["/search", "/health"], api_key=api_key)
    answers: dict[int | str, dict[str, Any]] = {status: {"model": ErrorAnswer} for status in (400, 401, 413, 415, 502)}
    answers[200] = {"model": SearchAnswer}
    takes = {"required": True, "content": {"application/json": {"schema": SearchBody.model_json_schema()}}}

    @app.post("/search", response_model=None, responses=answers, openapi_extra={"requestBody": takes})
    async def search(request: Request) -> Response:
        """The documents that fit a query."""
        body = await read_body(request, SearchBody)
        if not body.query.strip():
            raise bad_request("`query`: there is nothing to look for", "query", "invalid_value")
        try:
            hits = await asyncio.to_thread(index.search, body.query, body.top_k or top_k)
        except EnvError as error:  # the service that embeds the query
            raise Refusal(502, str(error), code="embeddings_unavailable") from error
        return FastJsonResponse({"results": [hit.as_dict() for hit in hits]})

    @app.get("/health", response_model=None, responses={200: {"model": Health}})
    async def health(request: Request) -> Response:
        """Whether the service answers."""
        retrieval = "dense" if isinstance(index, Dense) else "bm25"
        return FastJsonResponse({"status": "ok", "documents": len(index.documents), "retrieval": retrieval})

    return app
