"""Bad wires: a proxy that hands bytes on, and now and then drops a connection, dawdles, or talks nonsense."""

import asyncio
import contextlib
import os
import random
import threading
from collections import Counter
from dataclasses import dataclass
from urllib.parse import urlsplit

NONSENSE = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 17\r\n\r\n{"choices": null}'


@dataclass
class Odds:
    """Chances of a fault, for each piece of an answer."""

    drop: float = 0.01
    delay: float = 0.02
    garbage: float = 0.01
    seconds: float = 2.0
    """Longest delay."""


class Wires:
    """Proxies on a thread of their own, one for each address they were asked to stand before."""

    def __init__(self, odds: Odds, seed: int, private: str) -> None:
        self._odds, self._dice, self._private = odds, random.Random(seed), private
        self.faults: Counter[str] = Counter()
        self.on = True
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="wires", daemon=True).start()

    def before(self, address: str) -> str:
        """The address of a proxy before a server (`http://...`) or a Unix socket."""
        return asyncio.run_coroutine_threadsafe(self._open(address), self._loop).result(10)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _open(self, address: str) -> str:
        if address.startswith("http"):
            port = urlsplit(address).port
            door = await asyncio.start_server(lambda r, w: self._meet(r, w, "http", port), "127.0.0.1", 0)
            return f"http://127.0.0.1:{door.sockets[0].getsockname()[1]}"
        path = f"{self._private}/wire-{len(os.listdir(self._private))}.sock"  # noqa: PTH208
        await asyncio.start_unix_server(lambda r, w: self._meet(r, w, "socket", address), path)
        return path

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: str, where) -> None:
        try:
            if kind == "http":
                back, forth = await asyncio.open_connection("127.0.0.1", where)
            else:
                back, forth = await asyncio.open_unix_connection(where)
        except OSError:
            writer.close()
            return
        going = asyncio.ensure_future(self._carry(reader, forth))
        with contextlib.suppress(OSError):
            await self._spoil(back, writer, kind)
        going.cancel()
        for end in (writer, forth):
            end.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def _spoil(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: str) -> None:
        odds = self._odds
        while data := await reader.read(1 << 16):
            if self.on:
                if self._dice.random() < odds.delay:
                    self.faults[f"{kind} delayed"] += 1
                    await asyncio.sleep(self._dice.uniform(0, odds.seconds))
                if self._dice.random() < odds.drop:
                    self.faults[f"{kind} dropped"] += 1
                    return
                if self._dice.random() < odds.garbage:
                    self.faults[f"{kind} garbage"] += 1
                    writer.write(NONSENSE if kind == "http" and self._dice.random() < 0.5 else os.urandom(64))
                    await writer.drain()
                    return
            writer.write(data)
            await writer.drain()
