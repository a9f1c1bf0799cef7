"""Runs the server process: listens, reports that it is ready, and shuts down gracefully."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from paceline.errors import PacelineError
from paceline.inference.base import EngineError
from paceline.util.connections import BoundedProtocol

BACKLOG = 4096
"""Connections the system may hold for us: a thousand clients arrive at once."""

ACCEPTED_AT_ONCE = 16
"""Connections taken in one turn of the event loop. uvloop takes one from each socket that it listens on, so it is given
ours so often: else the last of hundreds waits until all before it have begun their requests."""
MOST_FILES = 10_240
"""The most that macOS allows; plenty elsewhere."""


class Gentle(uvicorn.Server):
    """Uvicorn, but a signal ends it with our own exit code, and any second one ends it at once."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 picks a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    door = socket.socket(family)
    door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        door.bind((host, port))
    except OSError as error:
        door.close()
        raise PacelineError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
    door.listen(BACKLOG)
    return door


def quick_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
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
    wanted = min(hard, MOST_FILES) if hard != resource.RLIM_INFINITY else MOST_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def serve(
    app: FastAPI,
    door: socket.socket,
    grace: float,
    ready: Callable[[], None],
    lost: Callable[[], Awaitable[EngineError]] | None = None,
) -> None:
    """Serve until a signal comes. Requests under way get `grace` seconds to finish, then they are cancelled.

    `lost` waits for the end of an engine that may end by itself; its cause then ends the server too.
    """
    allow_many_connections()
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    config = uvicorn.Config(
        app,
        http=BoundedProtocol,
        log_config=None,
        access_log=False,
        lifespan="off",  # ours, below: uvicorn abandons it with a complaint when a second signal comes
        timeout_graceful_shutdown=max(0, round(grace)),
        timeout_keep_alive=60,
        backlog=BACKLOG,
    )
    server = Gentle(config, ready)
    watching = asyncio.ensure_future(_watch(server, lost)) if lost else None
    async with app.router.lifespan_context(app):
        doors = [door, *(door.dup() for _ in range(ACCEPTED_AT_ONCE - 1))]
        await server.serve(sockets=doors)  # unbounded: serving is its job
    if watching is not None:
        if watching.done():
            raise watching.result()  # bounded: it is done
        watching.cancel()


async def _watch(server: uvicorn.Server, lost: Callable[[], Awaitable[EngineError]]) -> EngineError:
    cause = await lost()
    server.should_exit = True
    return cause
