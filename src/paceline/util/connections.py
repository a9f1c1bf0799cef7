"""Listens and serves HTTP with uvicorn, limits the headers of requests, and refuses calls from foreign web pages.

A browser lets any page send requests to a server on loopback.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from paceline.errors import PacelineError

BACKLOG = 4096
"""Connections the system may hold for us: a thousand clients arrive at once."""

HEADER_SECONDS = 20.0
"""From the opening of a connection, or the first byte of a further request, to the last line of its headers."""
MOST_HEADER_BYTES = 1 << 16
_TOO_LATE = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
_TOO_LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class LenientTransport:
    """A transport that ignores what is written after its end, as asyncio's does. uvloop's raises, and a client that
    resets its connection ends it before uvicorn hears of it: each such answer would be logged as a bug."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class BoundedProtocol(HttpToolsProtocol):
    """Uvicorn's protocol, which by itself waits for a request's headers for ever and takes any number of them."""

    _deadline: asyncio.TimerHandle | None = None
    _header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.transport = LenientTransport(transport)  # ty: ignore[invalid-assignment]
        self._begin()

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._end()
        elif before is None or before.response_complete:
            if self._deadline is None:
                self._begin()
            self._header_bytes += len(data)
            if self._header_bytes > MOST_HEADER_BYTES:
                self._refuse(_TOO_LONG)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        super().connection_lost(exc)

    def _begin(self) -> None:
        self._deadline = self.loop.call_later(HEADER_SECONDS, self._refuse, _TOO_LATE)

    def _end(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline, self._header_bytes = None, 0

    def _refuse(self, answer: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(answer)
            self.transport.close()


class GracefulServer(uvicorn.Server):
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


def server_config(app: Any, grace: int, **more: Any) -> uvicorn.Config:
    """Uvicorn's settings for an ASGI app whose open requests get `grace` seconds at a shutdown. It runs no lifespan,
    which it abandons with a complaint when a second signal comes."""
    return uvicorn.Config(
        app,
        http=BoundedProtocol,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=grace,
        backlog=BACKLOG,
        **more,
    )


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 picks a free one."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise PacelineError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
    listener.listen(BACKLOG)
    return listener


def refusal_reason(headers: Iterable[tuple[bytes, bytes]], has_key: bool) -> str | None:
    """The reason to refuse a call with these headers, as a sentence, or None.

    A page's own address stands in `Origin`; it must be the one the server was called by, or the one that a proxy was
    called by and named in `X-Forwarded-Host`, which no foreign page can send. And a page may point a name of
    its own at 127.0.0.1: where no key is asked for, only loopback names are answered to.

    >>> refusal_reason([(b"host", b"127.0.0.1:8000")], has_key=False)
    >>> refusal_reason([(b"host", b"rebound.example:8000")], has_key=False)
    '`Host` is `rebound.example`: without a key only 127.0.0.1 and localhost are answered to; use those, or set a key'
    >>> refusal_reason([(b"host", b"gpu1:8000"), (b"origin", b"https://page.example")], has_key=True)
    'a web page of https://page.example may not call this server'
    """
    wanted = (b"host", b"origin", b"x-forwarded-host")
    given = {name.lower(): value.decode("latin-1") for name, value in headers if name.lower() in wanted}
    host = given.get(b"host", "")
    name = host_name(host)
    if not has_key and not is_loopback(name):
        return (
            f"`Host` is `{name}`: without a key only 127.0.0.1 and localhost are answered to; use those, or set a key"
        )
    origin = given.get(b"origin")
    own = (host.lower(), given.get(b"x-forwarded-host", host).lower())
    if origin is not None and urlsplit(origin).netloc.lower() not in own:
        return f"a web page of {origin} may not call this server"
    return None


def host_name(host: str) -> str:
    """The name or address in a `Host` header, without its port."""
    return host[1 : host.find("]")] if host.startswith("[") else host.partition(":")[0]


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
