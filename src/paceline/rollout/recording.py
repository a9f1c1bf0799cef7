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
from paceline.rollout.seat import Reply, Seat, SeatClosed
from paceline.server.answers import response_head
from paceline.server.app import allow_many_connections
from paceline.server.bodies import ChatBody
from paceline.server.errors import (
    PROMPT_FIELDS,
    Refusal,
    bad_request,
    error_response,
    ignored_fields,
    install_error_handlers,
)
from paceline.server.http import SSE_DONE, EventStream, FastJsonResponse, cancel_on_disconnect, read_body, sse_event
from paceline.server.responses import ResponseBody, ResponseWriter, to_chat_body
from paceline.util.connections import listen, refusal_reason, server_config
from paceline.util.deadlines import gather_or_cancel
from paceline.util.user_code import is_cancelled

MAX_BODY_BYTES = 16 << 20
START_SECONDS = 30.0
"""Limit for the server to start or to stop; both take milliseconds."""
MODEL = "policy"

_RUN_SETTINGS = ("temperature", "top_p", "top_k", "max_tokens", "max_completion_tokens", "stop_token_ids")

_UNSUPPORTED_SETTINGS = {
    **dict.fromkeys(("seed", "noise", "order", "regex", "reasoning_effort", "verbosity", "prediction")),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "min_p", "top_logprobs"), 0),
    **dict.fromkeys(("ignore_eos", "prompt_logprobs"), False),
    **{"stop": [], "response_format": {"type": "text"}, "repetition_penalty": 1, "logit_bias": {}},
    "parallel_tool_calls": True,
}
"""Settings in agents' requests that have no effect, with their neutral value."""


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
    seat: Seat
    key: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    calls: set[asyncio.Task[list[Reply]]] = field(default_factory=set)

    async def answer(self, work: Coroutine[Any, Any, list[Reply]]) -> list[Reply]:
        task = asyncio.ensure_future(work)
        self.calls.add(task)
        try:
            return await task  # bounded: by the episode's timeout
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            raise SeatClosed("the episode ended while the policy was speaking") from None
        finally:
            self.calls.discard(task)


class RecordingServer:
    """The server behind all seats' addresses. It starts when the first is asked for, in the run's own event loop."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0, advertise: str | None = None) -> None:
        self._host, self._port = host, port
        self._advertised = advertise or reachable_host(host)
        self._by_seat: dict[Seat, RecordingSession] = {}
        self._by_key: dict[str, RecordingSession] = {}
        self._starting: asyncio.Task[int] | None = None
        self._running: tuple[uvicorn.Server, asyncio.Task[None]] | None = None

    async def address(self, seat: Seat) -> str:
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(), name="recording server starts")
        try:  # others wait for it too, so it goes on even if this episode is cancelled
            port = await asyncio.shield(self._starting)  # bounded: by START_SECONDS
        except Exception:
            self._starting = None
            raise
        if seat not in self._by_seat:
            self._by_seat[seat] = session = RecordingSession(seat)
            self._by_key[session.key] = session
        host = f"[{self._advertised}]" if ":" in self._advertised else self._advertised
        return f"http://{host}:{port}/{self._by_seat[seat].key}/v1"

    def release(self, seat: Seat) -> None:
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
            self.release(seat)
        if self._running is not None:
            server, serving = self._running
            server.should_exit = True
            await asyncio.wait({serving}, timeout=START_SECONDS)
            self._running = None

    async def _start(self) -> int:
        allow_many_connections()
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        listener = listen(self._host, self._port)
        server = _NoSignalServer(server_config(self._app(), 1, timeout_keep_alive=60))
        serving = asyncio.create_task(server.serve(sockets=[listener]), name="recording server")
        async with asyncio.timeout(START_SECONDS):
            while not server.started:
                if serving.done():
                    serving.result()  # bounded: it is done
                await asyncio.sleep(0.001)
        self._running = server, serving
        return listener.getsockname()[1]

    def _app(self) -> FastAPI:
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
        app.state.max_body_bytes = MAX_BODY_BYTES
        app.add_api_route("/{key}/v1/chat/completions", self._chat, methods=["POST"], response_model=None)
        app.add_api_route("/{key}/v1/responses", self._responses, methods=["POST"], response_model=None)
        app.add_api_route("/{key}/v1/models", self._models, methods=["GET"], response_model=None)
        install_error_handlers(app)
        for kind in (SeatClosed, RenderError, HTTPException):
            app.add_exception_handler(kind, _handle_error)
        return app

    def _session(self, request: Request) -> RecordingSession:
        if why := refusal_reason(request.scope["headers"], has_key=True):  # the path is the key
            raise Refusal(403, why, code="foreign_caller")
        session = self._by_key.get(request.path_params["key"])
        if session is None:
            raise SeatClosed("this episode is over: its address answers no more")
        return session

    async def _models(self, request: Request) -> Response:
        self._session(request)
        entry = {"id": MODEL, "object": "model", "created": 0, "owned_by": "paceline"}
        return FastJsonResponse({"object": "list", "data": [entry]})

    async def _chat(self, request: Request) -> Response:
        session = self._session(request)
        body = await read_body(request, AgentBody)
        replies = await self._replies(request, session, body)
        if body.stream:
            return await EventStream.begin(request, _chat_events(replies, body, session.seat))
        head = response_head("chat.completion", "chatcmpl", body.model or MODEL)
        choices = [_choice(i, reply) | _token_fields(reply, body, session.seat) for i, reply in enumerate(replies)]
        return FastJsonResponse(head | {"choices": choices, "usage": _usage(replies)})

    async def _responses(self, request: Request) -> Response:
        session = self._session(request)
        body = await read_body(request, AgentResponseBody)
        chat = to_chat_body(body, AgentBody)
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
        return FastJsonResponse(writer.full_response(reply.message, _finish_reason(reply), _usage(replies)))

    async def _replies(self, request: Request, session: RecordingSession, body: AgentBody) -> list[Reply]:
        """The policy's replies. Settings in whose place the run's own are used are counted."""
        given = body.model_dump(exclude_none=True)
        if body.chat_template_kwargs:
            text = "the run decides how the chat template is filled in: leave this out"
            raise bad_request(text, "chat_template_kwargs")
        if body.stream_options and not body.stream:
            raise bad_request("stream_options needs `stream: true`", "stream_options")
        seat = session.seat
        for name in (*_overridden_settings(given, seat), *ignored_fields(request)):
            seat.overrides[name] = seat.overrides.get(name, 0) + 1
        tools = given.get("tools") if body.tool_choice != "none" else None

        async def chat() -> list[Reply]:
            return await gather_or_cancel([seat.chat(given["messages"], tools) for _ in range(body.n or 1)])

        return await cancel_on_disconnect(request.receive, session.answer(chat()))


def reachable_host(host: str) -> str:
    """The host to reach a listener by. One that listens on every address is nowhere to connect to: it is reached by the
    address this machine sends from, or by loopback where there is no network."""
    try:
        is_unspecified = not host or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        is_unspecified = False
    if not is_unspecified:
        return host
    is_v6 = ":" in host
    try:
        with socket.socket(socket.AF_INET6 if is_v6 else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # An address from a block reserved for documentation: this picks a way and sends nothing.
            probe.connect(("2001:db8::1" if is_v6 else "192.0.2.1", 9))
            return probe.getsockname()[0]
    except OSError:
        return "::1" if is_v6 else "127.0.0.1"


class _NoSignalServer(uvicorn.Server):
    def capture_signals(self) -> Any:
        return nullcontext()


async def _handle_error(request: Request, error: Exception) -> Response:
    if isinstance(error, SeatClosed):
        return error_response(410, str(error), code="episode_over")
    if isinstance(error, RenderError):
        return error_response(400, str(error), "messages")
    assert isinstance(error, HTTPException)
    message = (
        f"there is no {request.method} {request.url.path} here: only /v1/chat/completions, /v1/responses and /v1/models"
    )
    return error_response(error.status_code, message, headers=error.headers)


def _overridden_settings(given: dict[str, Any], seat: Seat) -> list[str]:
    requested = given | ({"top_k": 0} if given.get("top_k") == -1 else {})
    differs = [name for name in _RUN_SETTINGS if name in requested and requested[name] != seat.setting(name)]
    if given.get("tool_choice", "auto") not in ("auto", "none"):  # the policy decides by itself whether it calls a tool
        differs.append("tool_choice")
    return differs + [
        name for name, default in _UNSUPPORTED_SETTINGS.items() if name in requested and requested[name] != default
    ]


def _choice(index: int, reply: Reply) -> dict[str, Any]:
    message = reply.message | {"refusal": None}
    if reply.tool_calls and not message["content"]:
        message["content"] = None
    return {"index": index, "message": message, "logprobs": None, "finish_reason": _finish_reason(reply)}


def _token_fields(reply: Reply, body: ChatBody, seat: Seat) -> dict[str, Any]:
    """Token ids, log probabilities and versions of a reply, as `paceline serve` spells them, where they were asked for
    and recorded."""
    fields: dict[str, Any] = {}
    if (turn := reply.turn) is None:
        return fields
    if body.return_token_ids:
        fields |= {"prompt_token_ids": turn.prompt_ids, "token_ids": turn.completion_ids}
    if body.return_versions:
        fields["versions"] = turn.versions
    if body.logprobs:
        content = [
            {"token": seat.decode([token]), "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in zip(turn.completion_ids, turn.logprobs, strict=True)
        ]
        fields["logprobs"] = {"content": content, "refusal": None}
    return fields


async def _chat_events(replies: list[Reply], body: ChatBody, seat: Seat) -> AsyncGenerator[bytes]:
    """A stream with each reply in one piece, since a reply is recorded when it is complete."""
    head = response_head("chat.completion.chunk", "chatcmpl", body.model or MODEL)
    options = body.stream_options
    include_usage = bool(options and options.include_usage)
    continuous_usage = bool(options and include_usage and options.continuous_usage_stats)
    for index, reply in enumerate(replies):
        delta = dict(reply.message)
        if reply.tool_calls:
            delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(reply.tool_calls)]
        first = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        first |= _token_fields(reply, body, seat)
        last = {"index": index, "delta": {}, "logprobs": None, "finish_reason": _finish_reason(reply)}
        usage = {"usage": _usage([reply]) if continuous_usage else None} if include_usage else {}
        yield sse_event(head | {"choices": [first], **usage})
        yield sse_event(head | {"choices": [last], **usage})
    if include_usage:
        yield sse_event(head | {"choices": [], "usage": _usage(replies)})
    yield SSE_DONE


async def _response_events(writer: ResponseWriter, reply: Reply) -> AsyncGenerator[bytes]:
    yield writer.add(reply.message)
    yield writer.end(_finish_reason(reply), _usage([reply]))


def _finish_reason(reply: Reply) -> str:
    return "tool_calls" if reply.tool_calls else "length" if reply.truncated else "stop"


def _usage(replies: list[Reply]) -> dict[str, int]:
    prompt, completion = replies[0].prompt_tokens, sum(reply.tokens for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
