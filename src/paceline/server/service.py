"""Holds the state that endpoints share: engine and its tokens, tokenizer, model names, and uploaded weights."""

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from fastapi import Request

from paceline.clients.rpc import ThreadToLoopQueue
from paceline.engine.base import Engine, EngineLimits
from paceline.errors import UnknownModel
from paceline.server.errors import Refusal
from paceline.server.guard import Meter
from paceline.server.http import content_length, media_type
from paceline.server.tokenizer import ServerTokenizer
from paceline.util.private_folder import PrivateFolder, sweep
from paceline.weights.update import BASE_MODEL

if TYPE_CHECKING:
    from paceline.weights.broadcast import Receiver


def deliver(messages: Iterable[tuple[asyncio.Queue[Any], Any]]) -> None:
    """Put what the engine's thread reports into the inboxes of those who wait for it."""
    for inbox, message in messages:
        inbox.put_nowait(message)


WRITE_BYTES = 4 << 20
MOST_UPLOADS = 2
"""Bodies that may lie here at the same time: a second one for a client that hung up and asks again."""
IDLE_SECONDS = 120.0
"""A client that stops sending in the middle is not waited for longer."""


class Spool:
    """Made when the first body comes. What a killed server left is removed when the next one starts."""

    def __init__(self) -> None:
        sweep()
        self._folder: PrivateFolder | None = None
        self._num_bodies = 0
        self._active = 0

    @asynccontextmanager
    async def body(self, request: Request, limit: int, ending: str) -> AsyncGenerator[Path]:
        """The request's raw body as a file, for as long as it is used. It is never read further than allowed."""
        media = media_type(request)
        # Of all types, a web page may post only a few without the browser asking us first; this is none of them.
        if media != "application/octet-stream":
            raise Refusal(415, f"send raw bytes with `Content-Type: application/octet-stream`, not `{media}`")
        if content_length(request) > limit:
            raise _update_too_large(limit)
        if self._active >= MOST_UPLOADS:
            raise Refusal(429, f"{self._active} updates are arriving already", code="overloaded")
        self._active += 1
        if self._folder is None:
            self._folder = PrivateFolder()
        self._num_bodies += 1
        file = self._folder.path / f"{self._num_bodies}.{ending}"
        try:
            await _write_body(request, file, limit)
            yield file
        finally:
            self._active -= 1
            file.unlink(missing_ok=True)

    def close(self) -> None:
        if self._folder is not None:
            self._folder.close()


async def _write_body(request: Request, file: Path, limit: int) -> None:
    written, pieces, buffered = 0, [], 0
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb", buffering=0) as opened:
            stream = aiter(request.stream())
            while True:
                async with asyncio.timeout(IDLE_SECONDS):
                    piece = await anext(stream, None)
                if piece is not None:
                    buffered += len(piece)
                    pieces.append(piece)
                    if written + buffered > limit:
                        raise _update_too_large(limit)
                if buffered >= WRITE_BYTES or (piece is None and pieces):
                    await asyncio.to_thread(write_all, opened, b"".join(pieces))
                    written, pieces, buffered = written + buffered, [], 0
                if piece is None:
                    return
    except TimeoutError:
        raise Refusal(400, f"the body stopped after {written + buffered} bytes") from None
    except OSError as error:
        raise Refusal(503, f"the body cannot be kept: {error.strerror}", code="no_room") from error


def write_all(file: BinaryIO, data: bytes) -> None:
    """An unbuffered file may take less than it is given: on a disk that fills up, or when a signal comes."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def _update_too_large(limit: int) -> Refusal:
    return Refusal(413, f"the body is larger than {limit} bytes, and this model's weights are not")


@dataclass(slots=True)
class Service:
    """One engine and what the server knows around it. Lives as long as the server's event loop."""

    engine: Engine
    tokenizer: ServerTokenizer
    name: str
    """The model's name for clients."""
    limits: EngineLimits
    """As the engine said last: it is not asked for every request, but again when a name is unknown."""
    has_key: bool
    queue: ThreadToLoopQueue
    meter: Meter
    allowed_folders: tuple[Path, ...] = ()
    """Folders weights may be loaded from, resolved."""
    peers: frozenset[str] = frozenset()
    """Addresses that groups may meet at."""
    spool: Spool = field(default_factory=Spool)
    """Where weights that come as a body lie until they are applied."""
    receiver: "Receiver | None" = None
    """Our part of a group that broadcasts weights."""
    is_joining: bool = False
    """Whether we are about to join one."""
    started_at: int = field(default_factory=lambda: int(time.time()))

    async def refresh_limits(self) -> EngineLimits:
        self.limits = await self.engine.limits()
        return self.limits

    async def resolve_model(self, requested: str | None) -> str:
        """The engine's name for what a request calls its model."""
        if not requested or requested == self.name:
            return ""
        if requested != BASE_MODEL and requested not in self.limits.adapters:
            await self.refresh_limits()
            if requested not in self.limits.adapters:
                served = ", ".join(f"`{name}`" for name in self.model_names())
                raise UnknownModel(f"there is no model `{requested}` here: the server has {served}")
        return requested

    def model_names(self) -> list[str]:
        return [self.name, *(name for name in self.limits.adapters if name)]
