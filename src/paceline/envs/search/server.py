"""The search service.

POST /search {"query": "...", "top_k": 3}  ->  {"results": [{"id", "title", "text", "score"}, ...]}, best first
GET /health                                ->  {"status": "ok", "documents": 200, "retrieval": "bm25"}

With an API key, /search wants it as `Authorization: Bearer KEY`.
"""

import asyncio
import sys
from typing import Annotated, Literal

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, Field

from paceline.envs.base import EnvError
from paceline.envs.search.client import MOST_QUERY
from paceline.envs.search.dense import Dense, Embedder
from paceline.envs.search.index import DEFAULT_TOP_K, Index
from paceline.envs.search.options import MOST_RESULTS, SearchOptions
from paceline.envs.search.store import open_index
from paceline.inference.server.bodies import Body
from paceline.inference.server.errors import ErrorAnswer, Refusal, bad, install_error_handlers
from paceline.inference.server.guard import Guard
from paceline.inference.server.http import Json, read_body
from paceline.inference.server.metrics import Meter
from paceline.inference.server.run import listen, quick_loop, serve

MAX_BODY_BYTES = 1 << 20
GRACE_SECONDS = 5.0


class SearchBody(Body):
    """What is looked for."""

    query: Annotated[str, Field(max_length=MOST_QUERY)]
    top_k: Annotated[int, Field(ge=1, le=MOST_RESULTS)] | None = None
    """How many results at most; the server's --top-k when left out."""


class Result(BaseModel):
    """A document that was found."""

    id: str
    title: str
    text: str
    score: float


class SearchAnswer(BaseModel):
    """The best documents, best first."""

    results: list[Result]


class Health(BaseModel):
    """The service answers, and over how much."""

    status: Literal["ok"]
    documents: int
    retrieval: Literal["bm25", "dense"]


def serve_search(options: SearchOptions) -> None:
    """Serve until a signal comes."""
    door = listen(options.host, options.port)
    host = f"[{options.host}]" if ":" in options.host else options.host
    with door:
        embedder = None
        if options.embeddings_url is not None and options.embeddings_model is not None:
            embedder = Embedder(options.embeddings_url, options.embeddings_model, options.embeddings_api_key)
        index = open_index(options.corpus, options.index, embedder)
        address = f"http://{host}:{door.getsockname()[1]}"
        ready = f"paceline: searching {len(index.documents)} documents at {address}/search"
        app = build_app(index, options.top_k, options.api_key)
        with asyncio.Runner(loop_factory=quick_loop()) as runner:
            runner.run(serve(app, door, GRACE_SECONDS, lambda: print(ready, flush=True)))
    print("paceline: stopped", file=sys.stderr)


def build_app(index: Index, top_k: int = DEFAULT_TOP_K, api_key: str | None = None) -> FastAPI:
    """The service's application around an index."""
    told = Health(
        status="ok", documents=len(index.documents), retrieval="dense" if isinstance(index, Dense) else "bm25"
    )

    async def search(request: Request) -> Response:
        """The documents that fit a query."""
        body = await read_body(request, SearchBody)
        if not body.query.strip():
            raise bad("`query`: there is nothing to look for", "query", "invalid_value")
        try:
            hits = await asyncio.to_thread(index.search, body.query, body.top_k or top_k)
        except EnvError as error:  # the service that embeds the query
            raise Refusal(502, str(error), code="embeddings_unavailable") from error
        return Json({"results": [hit.as_dict() for hit in hits]})

    async def health(request: Request) -> Response:
        """Whether the service answers."""
        return Json(told.model_dump())

    app = FastAPI(title="Paceline search", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.max_body_bytes = MAX_BODY_BYTES
    refusals = {status: {"model": ErrorAnswer} for status in (400, 401, 413, 415, 502)}
    takes = {"required": True, "content": {"application/json": {"schema": SearchBody.model_json_schema()}}}
    app.add_api_route(
        "/search",
        search,
        methods=["POST"],
        response_model=None,
        responses={200: {"model": SearchAnswer}, **refusals},
        openapi_extra={"requestBody": takes},
    )
    app.add_api_route("/health", health, methods=["GET"], response_model=None, responses={200: {"model": Health}})
    install_error_handlers(app)
    app.add_middleware(Guard, meter=Meter(), routes=["/search", "/health"], api_key=api_key)
    return app
