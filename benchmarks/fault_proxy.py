"""Proxies that relay bytes and at random drop a connection, delay an answer, or send garbage."""

import asyncio
import contextlib
import os
import random
import threading
from collections import Counter
from dataclasses import dataclass
from urllib.parse import urlsplit

GARBAGE = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 17\r\n\r\n{"choices": null}'


@dataclass
class FaultRates:
    """Chances of a fault, for each piece of an answer."""

    drop: float = 0.01
    delay: float = 0.02
    garbage: float = 0.01
    seconds: float = 2.0
    """Longest delay."""


class FaultProxies:
    """Proxies on a thread of their own, one for each address."""

    def __init__(self, rates: FaultRates, seed: int, private: str) -> None:
        self._odds, self._rng, self._private = rates, random.Random(seed), private
        self.faults: Counter[str] = Counter()
        self.on = True
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="fault proxies", daemon=True).start()

    def proxy_for(self, address: str) -> str:
        """The address of a new proxy for a server (`http://...`) or a Unix socket."""
        return asyncio.run_coroutine_threadsafe(self._open(address), self._loop).result(10)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _open(self, address: str) -> str:
        if address.startswith("http"):
            port = urlsplit(address).port
            server = await asyncio.start_server(lambda r, w: self._connect(r, w, "http", port), "127.0.0.1", 0)
            return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        path = f"{self._private}/proxy-{len(os.listdir(self._private))}.sock"  # noqa: PTH208
        await asyncio.start_unix_server(lambda r, w: self._connect(r, w, "socket", address), path)
        return path

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: str, where) -> None:
        try:
            if kind == "http":
                back, forth = await asyncio.open_connection("127.0.0.1", where)
            else:
                back, forth = await asyncio.open_unix_connection(where)
        except OSError:
            writer.close()
            return
        going = asyncio.ensure_future(self._relay(reader, forth))
        with contextlib.suppress(OSError):
            await self._relay_with_faults(back, writer, kind)
        going.cancel()
        for end in (writer, forth):
            end.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def _relay_with_faults(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: str) -> None:
        rates = self._odds
        while data := await reader.read(1 << 16):
            if self.on:
                if self._rng.random() < rates.delay:
                    self.faults[f"{kind} delayed"] += 1
                    await asyncio.sleep(self._rng.uniform(0, rates.seconds))
                if self._rng.random() < rates.drop:
                    self.faults[f"{kind} dropped"] += 1
                    return
                if self._rng.random() < rates.garbage:
                    self.faults[f"{kind} garbage"] += 1
                    writer.write(GARBAGE if kind == "http" and self._rng.random() < 0.5 else os.urandom(64))
                    await writer.drain()
                    return
            writer.write(data)
            await writer.drain()
