"""Hundreds of clients at once, over plain sockets: the client must not be what is slow."""

import asyncio
import json
import resource
from pathlib import Path

import pytest
from live_server import served

STREAMS = 400
"""Three times as many as the engine runs at once."""
TOKENS = 8


@pytest.fixture(scope="module")
def server():
    with served("--engine.max_running", "128", "--engine.max_context", "64") as running:
        yield running


async def one(port: int, body: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}"
    writer.write(f"{head}\r\nConnection: close\r\n\r\n".encode() + body)
    answer = await reader.read(-1)
    writer.close()
    await writer.wait_closed()
    return answer


async def all_at_once(port: int, body: bytes, streams: int = STREAMS) -> list[bytes]:
    return await asyncio.gather(*(one(port, body) for _ in range(streams)))


def resident(pid: int) -> int:
    """Memory in pages."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1])


def test_hundreds_of_streams_complete(server):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    ask = {"prompt": [3, 73, 4], "max_tokens": TOKENS, "ignore_eos": True, "stream": True, "return_token_ids": True}
    port = int(server.url.rpartition(":")[2])
    answers = asyncio.run(all_at_once(port, json.dumps(ask).encode()))
    for answer in answers:
        assert answer.startswith(b"HTTP/1.1 200")
        assert answer.rstrip().endswith(b"data: [DONE]\n\n\r\n0") or b"data: [DONE]" in answer[-40:]
        events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith(b"data: {")]
        assert sum(len(event["choices"][0]["token_ids"]) for event in events) == TOKENS
    assert server.idle()
    # Nothing of a finished stream stays behind: others after them need no more memory.
    before = resident(server.process.pid)
    asyncio.run(all_at_once(port, json.dumps(ask).encode(), STREAMS // 2))
    assert resident(server.process.pid) < before * 1.1
