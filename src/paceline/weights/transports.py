"""Sends full weights to an engine behind HTTP. Adapters are small and always travel in the request.

    disk        as a file, in a folder both sides see: the request names it
    http        as the body of a request, raw safetensors bytes: nothing is shared
    delta       the elements that changed since the version the engine holds, as a body; an engine that holds another
                one says so and is sent all, by one of the first two
    broadcast   by a collective, from this process to the engine's (see `broadcast.py`)

Whichever it is, the server applies the update between two tokens and checks its fingerprint and canary.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from paceline.errors import DeltaBaseMismatch, EngineError
from paceline.util.private_folder import PrivateFolder
from paceline.weights.update import WeightUpdate
from paceline.weights.weight_store import StoredTensors, WeightStore

if TYPE_CHECKING:
    from paceline.weights.broadcast import Sender

WeightPath = Literal["auto", "disk", "http", "delta", "broadcast"]
PIECE_BYTES = 4 << 20
UPDATE_HEADER = "Paceline-Update"
"""Version, fingerprint and canary of weights that travel as a body, as JSON."""


class WeightChannel(Protocol):
    """The connection to a server, as a transport uses it."""

    async def post(self, path: str, body: dict[str, Any]) -> Any: ...

    async def stream(self, path: str, head: dict[str, Any], size: int, pieces: AsyncIterator[bytes]) -> Any:
        """Send raw bytes, with the head beside them."""
        ...


class WeightTransport(ABC):
    """One way for full weights to travel. They are stored in a file meanwhile: in `folder`, or in a private folder of
    this process. With `deltas`, an engine that holds the version before is sent what changed since."""

    def __init__(self, folder: Path | None = None, deltas: bool = False) -> None:
        if folder is None:
            self._private = PrivateFolder()  # which goes with this object
            folder = self._private.path
        self._deltas = deltas
        self._store = WeightStore(folder, deltas=deltas)

    async def store_update(self, update: WeightUpdate) -> WeightUpdate:
        """A copy that can be sent again later, whatever the trainer has done to its tensors by then."""
        return await self._store.store_update(update)

    async def send(self, channel: WeightChannel, head: dict[str, Any], update: WeightUpdate) -> Any:
        """Give a stored update to the server; returns its answer."""
        if self._deltas and update.delta is not None:
            data = update.delta.data
            try:
                return await channel.stream("/weights/delta", head, len(data), _split_bytes(data))
            except DeltaBaseMismatch:
                pass  # it was restarted, or has missed or refused one: it gets everything
        return await self._send_full(channel, head, update)

    @abstractmethod
    async def _send_full(self, channel: WeightChannel, head: dict[str, Any], update: WeightUpdate) -> Any: ...

    def close(self) -> None:
        self._store.clear()


class DiskTransport(WeightTransport):
    """A file in a folder both sides see under the same path, and that the server was started to `--allow`."""

    async def _send_full(self, channel: WeightChannel, head: dict[str, Any], update: WeightUpdate) -> Any:
        path = await self._store.full_path(update)
        return await channel.post("/weights/load", head | {"path": str(path.resolve())})


class HttpTransport(WeightTransport):
    """A request's body."""

    async def _send_full(self, channel: WeightChannel, head: dict[str, Any], update: WeightUpdate) -> Any:
        file = await self._store.full_path(update)
        try:
            size = file.stat().st_size
        except OSError as error:
            raise EngineError(f"the weights cannot be read any more: {error}") from error
        return await channel.stream("/weights/upload", head, size, _read_pieces(file))


class BroadcastTransport(WeightTransport):
    """A group of two for each engine, made when first needed and made anew after any failure."""

    _sender: "Sender | None" = None

    async def _send_full(self, channel: WeightChannel, head: dict[str, Any], update: WeightUpdate) -> Any:
        from paceline.weights.broadcast import layout_of

        try:
            sender = self._sender = self._sender or await self._connect(channel)
            layout = layout_of(update.tensors)
            reply = asyncio.ensure_future(channel.post("/weights/receive", head | {"tensors": layout}))
            sending = asyncio.ensure_future(asyncio.to_thread(sender.send, update.tensors))
            return await _await_both(reply, sending, sender.seconds)
        except BaseException:
            self._disconnect()
            raise
        finally:
            if isinstance(update.tensors, StoredTensors):
                update.tensors.unload()

    async def _connect(self, channel: WeightChannel) -> "Sender":
        from paceline.weights.broadcast import Sender

        sender = Sender(members=1)
        try:
            reply = asyncio.ensure_future(channel.post("/weights/group", sender.invitation(1)))
            joining = asyncio.ensure_future(asyncio.to_thread(sender.form))
            await _await_both(reply, joining, sender.seconds)
        except BaseException:
            sender.close()
            raise
        return sender

    def _disconnect(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def close(self) -> None:
        self._disconnect()
        super().close()


async def _await_both(reply: "asyncio.Future[Any]", sending: "asyncio.Future[Any]", seconds: float) -> Any:
    """The server's answer, once our part is done too. A refusal counts for more than our own failure that follows."""
    try:
        await asyncio.wait({reply, sending}, return_when=asyncio.FIRST_EXCEPTION, timeout=seconds)
        if reply.done() or not sending.done() or sending.exception() is None:
            async with asyncio.timeout(seconds):
                return (await reply, await sending)[0]
        await asyncio.wait({reply}, timeout=seconds)  # ours failed: its answer will say why
        if reply.done():
            reply.result()  # bounded: it is done
        return sending.result()  # bounded: it is done
    except TimeoutError:
        raise EngineError(f"the weights were not broadcast within {seconds:g} s") from None
    finally:
        for part in (reply, sending):
            part.cancel()
            part.add_done_callback(lambda done: done.cancelled() or done.exception())  # else asyncio logs it


def transport_for(path: WeightPath, folder: Path | None) -> WeightTransport:
    """`auto`: files where there is a folder both sides see, bodies where there is none, and deltas in front of either
    (the store makes none where they cannot pay: see `MOST_DELTA_ITEMSIZE`). An explicit path has nothing in front of
    it, and `delta` needs no folder."""
    if path == "disk" and folder is None:
        raise EngineError("weights.path = `disk` needs a folder that both sides see: give HttpEngine a `folder`")
    if path == "broadcast":
        return BroadcastTransport(folder)
    on_disk = path == "disk" or (path == "auto" and folder is not None)
    return (DiskTransport if on_disk else HttpTransport)(folder, deltas=path in ("auto", "delta"))


async def _read_pieces(file: Path) -> AsyncIterator[bytes]:
    with file.open("rb") as opened:
        while piece := await asyncio.to_thread(opened.read, PIECE_BYTES):
            yield piece


async def _split_bytes(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), PIECE_BYTES):
        yield data[start : start + PIECE_BYTES]
