"""Serves an OpenAI endpoint for each seat, so that any agent is recorded token for token.

http://127.0.0.1:PORT/<key>/v1        the seat's own address, unguessable; 410 once its episode is over
"""

import asyncio
import ipaddress
import logging
import secrets
import socket
from collections.abc import AsyncGenerator, Coroutine
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from paceline.rollout.render import RenderError
from paceline.rollout.seat import Reply, Seat, SeatLeft
from paceline.server.answers import heading
from paceline.server.app import allow_many_connections
from paceline.server.bodies import ChatBody
from paceline.server.errors import PROMPT_FIELDS, Refusal, bad, error_response, ignored_fields, install_error_handlers
from paceline.server.http import DONE, EventStream, FastJsonResponse, event, read_body, unless_gone
from paceline.server.responses import ResponseBody, ResponseWriter, as_chat
from paceline.util.connections import listen, server_config, why_foreign
from paceline.util.deadlines import together
from paceline.util.user_code import is_cancelled

MAX_BODY_BYTES = 16 << 20
START_SECONDS = 30.0
"""For the server to come up, or to go down: both are a matter of milliseconds."""
MODEL = "policy"

_RUNS = ("temperature", "top_p", "top_k", "max_tokens", "max_completion_tokens", "stop_token_ids")
"""Settings an agent may ask for that the run has settled."""

_WITHOUT_EFFECT = {
    "seed": None,
    "noise": None,
    "order": None,
    "stop": [],
    "regex": None,
    "response_format": {"type": "text"},
    "ignore_eos": False,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "min_p": 0,
    "logit_bias": {},
    "logprobs": False,
    "top_logprobs": 0,
    "prompt_logprobs": False,
    "return_token_ids": False,
    "return_versions": False,
    "parallel_tool_calls": True,
    "reasoning_effort": None,
    "verbosity": None,
    "prediction": None,
}
"""Settings an agent may ask for that are never granted, with the value that asks for nothing."""


# Somewhere outside, in blocks that are kept for documentation, and home.
_V4 = (socket.AF_INET, "192.0.2.1", "127.0.0.1")
_V6 = (socket.AF_INET6, "2001:db8::1", "::1")


class AgentBody(ChatBody):
    """A conversation as an agent sends it. It may ask for any sampling; the run decides."""

    unsupported = PROMPT_FIELDS

    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None
    logit_bias: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    prediction: dict[str, Any] | None = None


class AgentResponseBody(ResponseBody):
    """The same in the form of the Responses API."""

    unsupported = ("messages", "functions", "function_call", *PROMPT_FIELDS)

    top_logprobs: int | None = None


@dataclass(eq=False, slots=True)
class RecordingSession:
    """A seat's address, and the calls under way there."""

    seat: Seat
    key: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    calls: set[asyncio.Task[list[Reply]]] = field(default_factory=set)

    async def answer(self, work: Coroutine[Any, Any, list[Reply]]) -> list[Reply]:
        """The replies, unless the episode ends first."""
        task = asyncio.ensure_future(work)
        self.calls.add(task)
        try:
            return await task  # bounded: by the episode's timeout
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            raise SeatLeft("the episode ended while the policy was speaking") from None
        finally:
            self.calls.discard(task)


class RecordingServer:
    """The server behind all seats' addresses. It starts when the first is asked for, in the run's own event loop."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0, advertise: str | None = None) -> None:
        self._host, self._port = host, port
        self._advertised = advertise or reachable(host)
        self._by_seat: dict[Seat, RecordingSession] = {}
        self._by_key: dict[str, RecordingSession] = {}
        self._starting: asyncio.Task[int] | None = None
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def address(self, seat: Seat) -> str:
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(), name="recording server starts")
        try:
            # Others wait for it too, so it goes on even if this episode is cancelled.
            port = await asyncio.shield(self._starting)  # bounded: by START_SECONDS
        except Exception:
            self._starting = None
            raise
        if seat not in self._by_seat:
            self._by_seat[seat] = session = RecordingSession(seat)
            self._by_key[session.key] = session
        host = f"[{self._advertised}]" if ":" in self._advertised else self._advertised
        return f"http://{host}:{port}/{self._by_seat[seat].key}/v1"

    def vacate(self, seat: Seat) -> None:
        if session := self._by_seat.pop(seat, None):
            del self._by_key[session.key]
            for call in session.calls:
                call.cancel()

    async def close(self) -> None:
        """Stop serving. The next address that is asked for starts it again."""
        if self._starting is not None:
            await asyncio.wait({self._starting}, timeout=START_SECONDS)
            self._starting = None
        for seat in list(self._by_seat):
            self.vacate(seat)
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await asyncio.wait({self._serving}, timeout=START_SECONDS)
            self._server = self._serving = None

    async def _start(self) -> int:
        allow_many_connections()
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        listener = listen(self._host, self._port)
        server = _Quiet(server_config(self._app(), 1, timeout_keep_alive=60))
        serving = asyncio.create_task(server.serve(sockets=[listener]), name="recording server")
        async with asyncio.timeout(START_SECONDS):
            while not server.started:
                if serving.done():
                    serving.result()  # bounded: it is done
                await asyncio.sleep(0.001)
        self._server, self._serving = server, serving
        return listener.getsockname()[1]

    def _app(self) -> FastAPI:
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
        app.state.max_body_bytes = MAX_BODY_BYTES
        app.add_api_route("/{key}/v1/chat/completions", self._chat, methods=["POST"], response_model=None)
        app.add_api_route("/{key}/v1/responses", self._responses, methods=["POST"], response_model=None)
        app.add_api_route("/{key}/v1/models", self._models, methods=["GET"], response_model=None)
        install_error_handlers(app)
        app.add_exception_handler(SeatLeft, _refused)
        app.add_exception_handler(RenderError, _refused)
        app.add_exception_handler(HTTPException, _refused)
        return app

    def _session(self, request: Request) -> RecordingSession:
        if why := why_foreign(request.scope["headers"], has_key=True):  # the path is the key
            raise Refusal(403, why, code="foreign_caller")
        session = self._by_key.get(request.path_params["key"])
        if session is None:
            raise SeatLeft("this episode is over: its address answers no more")
        return session

    async def _models(self, request: Request) -> Response:
        self._session(request)
        return FastJsonResponse(
            {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "paceline"}]}
        )

    async def _chat(self, request: Request) -> Response:
        session = self._session(request)
        body = await read_body(request, AgentBody)
        replies = await self._replies(request, session, body)
        if body.stream:
            return await EventStream.begin(request, _events(replies, body))
        head = heading("chat.completion", "chatcmpl", body.model or MODEL)
        return FastJsonResponse(
            head | {"choices": [_choice(i, r) for i, r in enumerate(replies)], "usage": _usage(replies)}
        )

    async def _responses(self, request: Request) -> Response:
        session = self._session(request)
        body = await read_body(request, AgentResponseBody)
        chat = as_chat(body, AgentBody)
        chat.top_logprobs = body.top_logprobs
        (reply,) = replies = await self._replies(request, session, chat)
        writer = ResponseWriter(  # settings as the run has them, and not as the agent asked
            body,
            body.model or MODEL,
            temperature=session.seat.setting("temperature"),
            top_p=session.seat.setting("top_p"),
            max_output_tokens=session.seat.setting("max_tokens"),
            parallel_tool_calls=True,
            text={"format": {"type": "text"}},
            tool_choice="none" if body.tool_choice == "none" else "auto",
        )
        if body.stream:
            return await EventStream.begin(request, _response_events(writer, reply))
        return FastJsonResponse(writer.whole(reply.message, _finish(reply), _usage(replies)))

    async def _replies(self, request: Request, session: RecordingSession, body: AgentBody) -> list[Reply]:
        """The policy's replies. Settings in whose place the run's own are used are counted."""
        given = body.model_dump(exclude_none=True)
        if body.chat_template_kwargs:
            raise bad("the run decides how the chat template is filled in: leave this out", "chat_template_kwargs")
        if body.stream_options and not body.stream:
            raise bad("stream_options needs `stream: true`", "stream_options")
        seat = session.seat
        for name in (*_overridden(given, seat), *ignored_fields(request)):
            seat.overrides[name] = seat.overrides.get(name, 0) + 1
        tools = given.get("tools") if body.tool_choice != "none" else None

        async def chat() -> list[Reply]:
            return await together([seat.chat(given["messages"], tools) for _ in range(body.n or 1)])

        return await unless_gone(request.receive, session.answer(chat()))


def reachable(host: str) -> str:
    """The host to reach a listener by. One that listens on every address is nowhere to connect to: it is reached by the
    address this machine sends from, or by loopback where there is no network."""
    try:
        everywhere = not host or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        everywhere = False
    if not everywhere:
        return host
    family, outside, inside = _V6 if ":" in host else _V4
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((outside, 9))  # picks a way and sends nothing
            return probe.getsockname()[0]
    except OSError:
        return inside


class _Quiet(uvicorn.Server):
    """Leaves signal handling to the process it runs in."""

    def capture_signals(self) -> Any:
        return nullcontext()


async def _refused(request: Request, error: Exception) -> Response:
    if isinstance(error, SeatLeft):
        return error_response(410, str(error), code="episode_over")
    if isinstance(error, RenderError):
        return error_response(400, str(error), "messages")
    assert isinstance(error, HTTPException)
    message = (
        f"there is no {request.method} {request.url.path} here: only /v1/chat/completions, /v1/responses and /v1/models"
    )
    return error_response(error.status_code, message, headers=error.headers)


def _overridden(given: dict[str, Any], seat: Seat) -> list[str]:
    """Settings an agent asked for that differ from what it gets."""
    asked = given | ({"top_k": 0} if given.get("top_k") == -1 else {})
    differs = [name for name in _RUNS if name in asked and asked[name] != seat.setting(name)]
    if given.get("tool_choice", "auto") not in ("auto", "none"):  # the policy decides by itself whether it calls a tool
        differs.append("tool_choice")
    return differs + [name for name, nothing in _WITHOUT_EFFECT.items() if name in asked and asked[name] != nothing]


def _choice(index: int, reply: Reply) -> dict[str, Any]:
    message = reply.message | {"refusal": None}
    if reply.tool_calls and not message["content"]:
        message["content"] = None
    return {"index": index, "message": message, "logprobs": None, "finish_reason": _finish(reply)}


async def _events(replies: list[Reply], body: ChatBody) -> AsyncGenerator[bytes]:
    """A stream whose text comes in one piece: it is recorded when it is whole."""
    head = heading("chat.completion.chunk", "chatcmpl", body.model or MODEL)
    options = body.stream_options
    counts = bool(options and options.include_usage)
    always = bool(options and counts and options.continuous_usage_stats)
    for index, reply in enumerate(replies):
        delta = dict(reply.message)
        if reply.tool_calls:
            delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(reply.tool_calls)]
        first = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        last = {"index": index, "delta": {}, "logprobs": None, "finish_reason": _finish(reply)}
        usage = {"usage": _usage([reply]) if always else None} if counts else {}
        yield event(head | {"choices": [first], **usage})
        yield event(head | {"choices": [last], **usage})
    if counts:
        yield event(head | {"choices": [], "usage": _usage(replies)})
    yield DONE


async def _response_events(writer: ResponseWriter, reply: Reply) -> AsyncGenerator[bytes]:
    yield writer.begin() + writer.add(reply.message)
    yield writer.end(_finish(reply), _usage([reply]))


def _finish(reply: Reply) -> str:
    return "tool_calls" if reply.tool_calls else "length" if reply.truncated else "stop"


def _usage(replies: list[Reply]) -> dict[str, int]:
    prompt, said = replies[0].prompt_tokens, sum(reply.tokens for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}
