"""Builds the application, its routes and OpenAPI document, and runs it until a signal comes."""

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from transformers import PreTrainedTokenizerBase

from paceline.clients.rpc import ThreadToLoopQueue
from paceline.engine.base import Engine
from paceline.errors import EngineError
from paceline.server import answers, bodies, control, responses
from paceline.server.completions import create_chat_completion, create_completion
from paceline.server.errors import ErrorAnswer, install_error_handlers, report_ignored_fields
from paceline.server.guard import Meter, ServerGuard
from paceline.server.http import CONTROL_BYTES, FastJsonResponse, read_body
from paceline.server.responses import create_response
from paceline.server.service import Service, deliver
from paceline.server.tokenizer import ServerTokenizer
from paceline.util.connections import GracefulServer, server_config
from paceline.weights.transports import UPDATE_HEADER

Endpoint = Callable[[Service, Any, Request], Awaitable[Response | dict[str, Any]]]
"""Gets the body that was read, None for a route without one, and answers with JSON data or a response of its own."""
SCHEMA_REFS = "#/components/schemas/"
EVENT_SCHEMA = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
"""One event of a stream: JSON text, or [DONE]."""


@dataclass(frozen=True, slots=True)
class Route:
    """A path, what it takes, what it answers, and how it may refuse."""

    path: str
    endpoint: Endpoint
    answer: type[BaseModel] | str
    """A model for JSON, or the media type of anything else."""
    body: type[BaseModel] | None = None
    method: str = "GET"
    refusals: tuple[int, ...] = (401, 403, 503)
    streams: bool = False
    limit: int | None = None
    """Longest body; the server's own limit when left out."""
    raw: bool = False
    """Bytes are the body; what `body` describes is in the header `Paceline-Update`."""
    control: bool = False
    """Changes what is served: for the holder of the key, also on loopback."""


POST_REFUSALS = (400, 401, 403, 404, 408, 413, 415, 429, 503)


_post_route = partial(Route, method="POST", refusals=POST_REFUSALS)
_control_route = partial(_post_route, control=True)
_command_route = partial(Route, answer=answers.StatusAnswer, method="POST", control=True)
_update_route = partial(_control_route, answer=answers.UpdateAnswer)
_upload_route = partial(_update_route, body=bodies.UpdateHead, refusals=(*POST_REFUSALS, 409), raw=True)


ROUTES = (
    _post_route("/v1/chat/completions", create_chat_completion, answers.ChatAnswer, bodies.ChatBody, streams=True),
    _post_route("/v1/completions", create_completion, answers.CompletionAnswer, bodies.CompletionBody, streams=True),
    _post_route("/v1/responses", create_response, answers.ResponseAnswer, responses.ResponseBody, streams=True),
    _post_route("/v1/score", control.score, answers.ScoreAnswer, bodies.ScoreBody),
    _post_route("/tokenize", control.tokenize, answers.TokenizeAnswer, bodies.TokenizeBody),
    Route("/v1/models", control.models, answers.ModelList),
    Route("/health", control.health, answers.StatusAnswer, refusals=(403, 503)),
    Route("/metrics", control.metrics, "text/plain"),
    Route("/policy", control.policy, answers.PolicyAnswer),
    Route("/limits", control.limits, answers.LimitsAnswer),
    Route("/stats", control.stats, answers.StatsAnswer),
    Route("/adapters/version", control.adapter_versions, answers.AdapterVersions),
    _update_route("/adapters/load", control.load_adapter, body=bodies.AdapterBody, limit=CONTROL_BYTES),
    _update_route("/weights/load", control.load_weights, body=bodies.WeightsBody),
    _upload_route("/weights/upload", control.upload_weights),
    _upload_route("/weights/delta", control.upload_delta),
    _control_route("/weights/group", control.join_group, answers.StatusAnswer, bodies.GroupBody),
    _update_route("/weights/receive", control.receive_weights, body=bodies.ReceiveBody),
    _command_route("/pause", control.engine_call("pause", "Stop between two steps; requests wait.")),
    _command_route("/resume", control.engine_call("resume", "Go on after a pause.")),
    _command_route("/sleep", control.engine_call("sleep", "Pause and give memory back.")),
    _command_route("/wake", control.engine_call("wake", "Go on after sleep.")),
)
STATUS_DESCRIPTIONS = {
    400: "The request is wrong.",
    401: "The API key is missing or wrong.",
    403: "Not for this caller, or not from this folder.",
    404: "There is no such model.",
    408: "The body did not arrive in time.",
    409: "The engine holds other weights than the delta builds on.",
    413: "The body is too large.",
    415: "The body is not of the right type.",
    429: "Too many requests are waiting; try again later.",
    503: "The engine does not answer.",
}


def build_app(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    end_tokens: Sequence[int],
    *,
    name: str,
    api_key: str | None = None,
    allowed: Sequence[Path] = (),
    peers: Collection[str] = (),
    max_body_bytes: int,
) -> FastAPI:
    """The server's application around an engine that has been started."""
    meter = Meter()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        limits = await engine.limits()
        service = app.state.service = Service(
            engine,
            ServerTokenizer(tokenizer, end_tokens, limits.max_context),
            name,
            limits,
            bool(api_key),
            ThreadToLoopQueue(deliver),
            meter,
            tuple(folder.resolve() for folder in allowed),
            frozenset(peers),
        )
        # A tenth of a second on the event loop, if the first request for it had to make it there.
        document = asyncio.ensure_future(asyncio.to_thread(app.openapi))
        yield
        await document  # bounded: by its work
        service.spool.close()
        if service.receiver is not None:
            service.receiver.close()

    app = FastAPI(title="Paceline", lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.max_body_bytes = max_body_bytes
    for route in ROUTES:
        _add_route(app, route)
    install_error_handlers(app)
    app.add_middleware(
        ServerGuard,
        meter=meter,
        routes=[route.path for route in ROUTES],
        control=[route.path for route in ROUTES if route.control],
        api_key=api_key,
    )
    app.openapi = lambda: _openapi_document(app)
    return app


def _add_route(app: FastAPI, route: Route) -> None:
    text = route.answer if isinstance(route.answer, str) else None
    responses: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorAnswer, "description": STATUS_DESCRIPTIONS[status]} for status in route.refusals
    }
    responses[200] = {"content": {text: {"schema": {"type": "string"}}}} if text else {"model": route.answer}
    if route.streams:
        responses[200]["content"] = {"text/event-stream": {"schema": EVENT_SCHEMA}}
    app.add_api_route(
        route.path,
        _handler(route),
        methods=[route.method],
        responses=responses,
        response_class=Response,
        response_model=None,
        summary=(route.endpoint.__doc__ or "").strip(),
        openapi_extra=_request_schema(route.body, route.raw) if route.body else None,
    )


def _handler(route: Route) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        body = None
        if route.raw:
            body = control.update_head(request)
        elif route.body is not None:
            body = await read_body(request, route.body, route.limit)
        result = await route.endpoint(request.app.state.service, body, request)
        return report_ignored_fields(request, result if isinstance(result, Response) else FastJsonResponse(result))

    return answer


def _request_schema(body: type[BaseModel], raw: bool) -> dict[str, Any]:
    if raw:
        about = f"JSON of the form {body.__name__}"
        head = {"name": UPDATE_HEADER, "in": "header", "required": True, "schema": {"type": "string"}}
        content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
        return {"parameters": [head | {"description": about}], "requestBody": {"required": True, "content": content}}
    content = {"application/json": {"schema": {"$ref": f"{SCHEMA_REFS}{body.__name__}"}}}
    return {"requestBody": {"required": True, "content": content}}


def _openapi_document(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document plus the bodies, which the endpoints read themselves."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version="1", routes=app.routes)
        schemas = document["components"]["schemas"]
        for body in {route.body for route in ROUTES if route.body}:
            schema = body.model_json_schema(ref_template=SCHEMA_REFS + "{model}")
            schemas |= schema.pop("$defs", {})
            schemas[body.__name__] = schema
        app.openapi_schema = document
    return app.openapi_schema


ACCEPTS_PER_TURN = 16
"""Connections taken in one turn of the event loop. uvloop takes one from each socket that it listens on, so it is given
ours so often: else the last of hundreds waits until all before it have begun their requests."""
MOST_FILES = 10_240
"""The most that macOS allows; plenty elsewhere."""


def event_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Event loop factory: uvloop's where it is installed, else None for asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def allow_many_connections() -> None:
    """Take as many file descriptors as the system lets us: the usual first limit is 1024, or 256 on a Mac."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = min(hard, MOST_FILES) if hard != resource.RLIM_INFINITY else MOST_FILES
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


async def serve(
    app: FastAPI,
    listener: socket.socket,
    grace: float,
    ready: Callable[[], None],
    engine_exit: Callable[[], Awaitable[EngineError]] | None = None,
) -> None:
    """Serve until a signal comes. Requests under way get `grace` seconds to finish, then they are cancelled.

    `engine_exit` waits for the end of an engine that may end by itself; its cause then ends the server too.
    """
    allow_many_connections()
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    server = GracefulServer(server_config(app, max(0, round(grace)), timeout_keep_alive=60), ready)

    async def watch(engine_exit: Callable[[], Awaitable[EngineError]]) -> EngineError:
        cause = await engine_exit()
        server.should_exit = True
        return cause

    watching = asyncio.ensure_future(watch(engine_exit)) if engine_exit else None
    async with app.router.lifespan_context(app):
        listeners = [listener, *(listener.dup() for _ in range(ACCEPTS_PER_TURN - 1))]
        await server.serve(sockets=listeners)  # unbounded: serving is its job
    if watching is not None:
        if watching.done():
            raise watching.result()  # bounded: it is done
        watching.cancel()
