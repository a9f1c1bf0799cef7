"""Reads request bodies with a size limit, and cancels work when the client disconnects."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable
from typing import Any, TypeVar

import orjson
from fastapi import Request, Response
from pydantic import BaseModel, ValidationError
from starlette.types import Receive, Scope, Send

from paceline.server.errors import ClientGone, Refusal, invalid_body, pop_unknown_fields

T = TypeVar("T")
B = TypeVar("B", bound=BaseModel)
BODY_SECONDS = 60.0
"""Longest that a JSON body may take to arrive."""
BYTES_PER_COST = 64
"""A body may cost its longest size divided by this: 4 MiB allow 65,536, which take under a tenth of a second."""
CONTROL_BYTES = 64 << 20
"""Longest body of a control call, which may carry an adapter as text."""


def encode_json(value: Any) -> bytes:
    """A value as JSON. Fields that are echoed may hold what the fast writer refuses: integers of more than 64 bits and
    text that is no Unicode."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, separators=(",", ":")).encode()


class FastJsonResponse(Response):
    """A value as JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode_json(content)


async def read_body(request: Request, kind: type[B], limit: int | None = None) -> B:
    """The body, if it is JSON of this kind and neither too long nor of too many values. It is never read further than
    allowed: the server's limit, unless another is given."""
    media = media_type(request)
    # A web page may post other types, or none, to a server on loopback without the browser asking us first.
    if media != "application/json" and not media.endswith("+json"):
        raise Refusal(415, f"send JSON with `Content-Type: application/json`, not `{media or 'no type'}`")
    limit = limit or request.app.state.max_body_bytes
    if content_length(request) > limit:
        raise body_too_large(limit)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise body_too_large(limit)
    except TimeoutError:
        raise Refusal(408, f"the body did not arrive within {BODY_SECONDS:g} s") from None
    if json_cost(body) > limit // BYTES_PER_COST:
        raise Refusal(413, "the body holds too many values: send fewer prompts at a time, or raise --max-body-bytes")
    try:
        value = kind.model_validate_json(bytes(body))
    except ValidationError as error:
        raise invalid_body(error) from None
    request.state.ignored = pop_unknown_fields(value)
    return value


def media_type(request: Request) -> str:
    """The media type of the Content-Type header, without its parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def content_length(request: Request) -> int:
    length = request.headers.get("content-length", "0")
    return int(length) if length.isdecimal() else 0


def json_cost(body: bytes | bytearray) -> int:
    """About the microseconds that parsing takes, during which the server answers nothing else: one for each object,
    list and string, a fifth for a number. Counting takes a hundredth of that.

    >>> json_cost(b'{"prompt": [1, 2, 3, 4, 5, 6]}')
    4
    """
    return body.count(b",") // 5 + body.count(b"{") + body.count(b"[") + body.count(b'"') // 2


def body_too_large(limit: int) -> Refusal:
    return Refusal(413, f"the body is larger than {limit} bytes, the server's limit (--max-body-bytes)")


async def cancel_on_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """Do the work while the client waits for it; if it leaves, cancel the work and raise `ClientGone`."""
    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_listen_for_disconnect(receive))
    try:
        await asyncio.wait((task, disconnect), return_when=asyncio.FIRST_COMPLETED)  # bounded: by the client's patience
        if not task.done():
            raise ClientGone
        return task.result()  # bounded: it is done
    finally:
        disconnect.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))  # bounded: it is cancelled


async def _listen_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events from a generator, closed at once when the client leaves."""

    def __init__(self, events: AsyncGenerator[bytes], first: bytes) -> None:
        self._events = events
        self._first = first
        self.status_code = 200
        self.background = None
        self.init_headers({"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"})

    @classmethod
    async def begin(cls, request: Request, events: AsyncGenerator[bytes]) -> "EventStream":
        """Wait for the first event before promising a 200: what is refused at once gets its own status."""
        try:
            first = await cancel_on_disconnect(request.receive, anext(events))
        except BaseException:
            await events.aclose()
            raise
        return cls(events, first)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await cancel_on_disconnect(receive, self._write(send))
        except ClientGone:
            pass
        finally:
            await self._events.aclose()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def sse_event(value: Any) -> bytes:
    return b"data: " + encode_json(value) + b"\n\n"


SSE_DONE = b"data: [DONE]\n\n"
