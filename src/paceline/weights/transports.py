"""Sends full weights to an engine behind HTTP. Adapters are small and always travel in the request.

    disk        as a file, in a folder both sides see: the request names it
    http        as the body of a request, raw safetensors bytes: nothing is shared
    delta       the elements that changed since the version the engine holds, as a body; an engine that holds another
                one says so and is sent all, by one of the first two
    broadcast   by a collective, from this process to the engine's (see `broadcast.py`)

Whichever it is, the server applies the update between two tokens and checks its fingerprint and canary.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from paceline.errors import EngineError, OtherBase
from paceline.util.private_folder import PrivateFolder
from paceline.weights.update import WeightUpdate
from paceline.weights.weight_store import StoredTensors, WeightStore

if TYPE_CHECKING:
    from paceline.weights.broadcast import Sender

WeightPath = Literal["auto", "disk", "http", "delta", "broadcast"]
PIECE = 4 << 20
UPDATE_HEADER = "Paceline-Update"
"""Version, fingerprint and canary of weights that travel as a body, as JSON."""


class WeightChannel(Protocol):
    """The connection to a server, as a carrier uses it."""

    async def post(self, path: str, body: dict[str, Any]) -> Any: ...

    async def stream(self, path: str, head: dict[str, Any], size: int, pieces: AsyncIterator[bytes]) -> Any:
        """Send raw bytes, with the head beside them."""
        ...


class Carrier(Protocol):
    """One way for full weights to travel."""

    async def keep(self, update: WeightUpdate) -> WeightUpdate:
        """A copy that can be sent again later, whatever the trainer has done to its tensors by then."""
        ...

    async def send(self, wire: WeightChannel, head: dict[str, Any], update: WeightUpdate) -> Any:
        """Give an update that was kept to the server; what it answers."""
        ...

    def close(self) -> None: ...


class Disk:
    """A file in a folder both sides see under the same path, and that the server was started to `--allow`."""

    def __init__(self, folder: Path, deltas: bool = False) -> None:
        self.shelf = WeightStore(folder, deltas=deltas)

    async def keep(self, update: WeightUpdate) -> WeightUpdate:
        return await self.shelf.keep(update)

    async def send(self, wire: WeightChannel, head: dict[str, Any], update: WeightUpdate) -> Any:
        return await wire.post("/weights/load", head | {"path": str((await self.shelf.whole(update)).resolve())})

    def close(self) -> None:
        self.shelf.clear()


class Upload:
    """A request's body. Kept in a file here meanwhile: in `folder`, or in a private one of this process."""

    def __init__(self, folder: Path | None = None, deltas: bool = False) -> None:
        self._private = None
        if folder is None:
            self._private = PrivateFolder()
            folder = self._private.path
        self.shelf = WeightStore(folder, deltas=deltas)

    async def keep(self, update: WeightUpdate) -> WeightUpdate:
        return await self.shelf.keep(update)

    async def send(self, wire: WeightChannel, head: dict[str, Any], update: WeightUpdate) -> Any:
        file = await self.shelf.whole(update)
        try:
            size = file.stat().st_size
        except OSError as error:
            raise EngineError(f"the weights cannot be read any more: {error}") from error
        return await wire.stream("/weights/upload", head, size, _pieces(file))

    def close(self) -> None:
        self.shelf.clear()


class Deltas:
    """Sends a delta to an engine that holds the version before, and all weights to others."""

    def __init__(self, full: Disk | Upload) -> None:
        self._full = full

    async def keep(self, update: WeightUpdate) -> WeightUpdate:
        return await self._full.keep(update)

    async def send(self, wire: WeightChannel, head: dict[str, Any], update: WeightUpdate) -> Any:
        delta = update.delta
        if delta is not None:
            try:
                return await wire.stream("/weights/delta", head, len(delta), _cut(delta.data))
            except OtherBase:
                pass  # it was restarted, or has missed or refused one: it gets everything
        return await self._full.send(wire, head, update)

    def close(self) -> None:
        self._full.close()


class Broadcast:
    """A group of two for each engine, made when first needed and made anew after any failure."""

    def __init__(self, folder: Path | None = None) -> None:
        self._kept = Upload(folder)
        self._sender: Sender | None = None

    async def keep(self, update: WeightUpdate) -> WeightUpdate:
        return await self._kept.keep(update)

    async def send(self, wire: WeightChannel, head: dict[str, Any], update: WeightUpdate) -> Any:
        from paceline.weights.broadcast import layout_of

        try:
            sender = self._sender = self._sender or await self._meet(wire)
            layout = layout_of(update.tensors)
            asked = asyncio.ensure_future(wire.post("/weights/receive", head | {"tensors": layout}))
            sending = asyncio.ensure_future(asyncio.to_thread(sender.send, update.tensors))
            answer, _ = await _both(asked, sending, sender.seconds)
            return answer
        except BaseException:
            self._leave()
            raise
        finally:
            if isinstance(update.tensors, StoredTensors):
                update.tensors.forget()

    async def _meet(self, wire: WeightChannel) -> "Sender":
        from paceline.weights.broadcast import Sender

        sender = Sender(members=1)
        try:
            joining = asyncio.ensure_future(asyncio.to_thread(sender.form))
            await _both(
                asyncio.ensure_future(wire.post("/weights/group", sender.invitation(1))), joining, sender.seconds
            )
        except BaseException:
            sender.close()
            raise
        return sender

    def _leave(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def close(self) -> None:
        self._leave()
        self._kept.close()


async def _both(asked: "asyncio.Future[Any]", ours: "asyncio.Future[Any]", seconds: float) -> tuple[Any, Any]:
    """The server's answer and our own part of it. A refusal counts for more than our own failure that follows."""
    try:
        await asyncio.wait({asked, ours}, return_when=asyncio.FIRST_EXCEPTION, timeout=seconds)
        if asked.done() or not ours.done() or ours.exception() is None:
            async with asyncio.timeout(seconds):
                return await asked, await ours
        await asyncio.wait({asked}, timeout=seconds)  # ours failed: its answer will say why
        if asked.done():
            asked.result()  # bounded: it is done
        return None, ours.result()  # bounded: it is done
    except TimeoutError:
        raise EngineError(f"the weights were not broadcast within {seconds:g} s") from None
    finally:
        for part in (asked, ours):
            part.cancel()
            part.add_done_callback(_forgiven)


def _forgiven(part: "asyncio.Future[Any]") -> None:
    if not part.cancelled():
        part.exception()


def carrier_for(path: WeightPath, folder: Path | None) -> Carrier:
    """`auto`: files where there is a folder both sides see, bodies where there is none, and deltas in front of either
    (the shelf makes none where they cannot pay: see `NARROW`). An explicit path has nothing in front of it, and
    `delta` needs no folder."""
    if path == "disk" and folder is None:
        raise EngineError("weights.path = `disk` needs a folder that both sides see: give HttpEngine a `folder`")
    if path == "disk" and folder is not None:
        return Disk(folder)
    if path == "http":
        return Upload(folder)
    if path == "broadcast":
        return Broadcast(folder)
    if path == "delta" or folder is None:
        return Deltas(Upload(folder, deltas=True))
    return Deltas(Disk(folder, deltas=True))


async def _pieces(file: Path) -> AsyncIterator[bytes]:
    with file.open("rb") as opened:
        while piece := await asyncio.to_thread(opened.read, PIECE):
            yield piece


async def _cut(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), PIECE):
        yield data[start : start + PIECE]
