"""Where bodies too large for the memory wait: a private folder of this server."""

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import BinaryIO

from fastapi import Request

from paceline.inference.server.errors import Refusal
from paceline.private_folder import PrivateFolder, sweep

WRITTEN_AT_ONCE = 4 << 20
MOST_AT_ONCE = 2
"""Bodies that may lie here at the same time: a second one for a client that hung up and asks again."""
SILENT_SECONDS = 120.0
"""A client that stops sending in the middle is not waited for longer."""


class Spool:
    """Made when the first body comes. What a killed server left is removed when the next one starts."""

    def __init__(self) -> None:
        sweep()
        self._folder: PrivateFolder | None = None
        self._numbers = 0
        self._here = 0

    @asynccontextmanager
    async def body(self, request: Request, limit: int, ending: str) -> AsyncGenerator[Path]:
        """The request's raw body as a file, for as long as it is used. It is never read further than allowed."""
        media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        # Of all types, a web page may post only a few without the browser asking us first; this is none of them.
        if media != "application/octet-stream":
            raise Refusal(415, f"send raw bytes with `Content-Type: application/octet-stream`, not `{media}`")
        announced = request.headers.get("content-length", "0")
        if announced.isdecimal() and int(announced) > limit:
            raise _too_large(limit)
        if self._here >= MOST_AT_ONCE:
            raise Refusal(429, f"{self._here} updates are arriving already", code="overloaded")
        self._here += 1
        file = self._name(ending)
        try:
            await _write(request, file, limit)
            yield file
        finally:
            self._here -= 1
            file.unlink(missing_ok=True)

    def close(self) -> None:
        if self._folder is not None:
            self._folder.close()

    def _name(self, ending: str) -> Path:
        if self._folder is None:
            self._folder = PrivateFolder()
        self._numbers += 1
        return self._folder.path / f"{self._numbers}.{ending}"


async def _write(request: Request, file: Path, limit: int) -> None:
    written, pile, piled = 0, [], 0
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb", buffering=0) as opened:
            stream = aiter(request.stream())
            while True:
                async with asyncio.timeout(SILENT_SECONDS):
                    piece = await anext(stream, None)
                if piece is not None:
                    piled += len(piece)
                    pile.append(piece)
                    if written + piled > limit:
                        raise _too_large(limit)
                if piled >= WRITTEN_AT_ONCE or (piece is None and pile):
                    await asyncio.to_thread(write_all, opened, b"".join(pile))
                    written, pile, piled = written + piled, [], 0
                if piece is None:
                    return
    except TimeoutError:
        raise Refusal(400, f"the body stopped after {written + piled} bytes") from None
    except OSError as error:
        raise Refusal(503, f"the body cannot be kept: {error.strerror}", code="no_room") from error


def write_all(file: BinaryIO, data: bytes) -> None:
    """An unbuffered file may take less than it is given: on a disk that fills up, or when a signal comes."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def _too_large(limit: int) -> Refusal:
    return Refusal(413, f"the body is larger than {limit} bytes, and this model's weights are not")
