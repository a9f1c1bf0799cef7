"""A load of completions over HTTP, in a process of its own: prints one JSON line with useful tokens a second.

python benchmarks/http_load.py URL --form flat|openai|stream --clients 256 --prompt 128 --output 512
"""

import argparse
import asyncio
import json
import random
import time
from urllib.parse import urlsplit

import orjson


async def post(host: str, port: int, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 26)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    status = await reader.readline()
    assert b" 200 " in status, (status, await reader.read(2000))
    while (await reader.readline()).strip():
        pass
    return reader, writer


def chunks_of(raw: bytes) -> bytes:
    """The body behind chunked transfer coding, if it was used."""
    if raw[:1] in (b"{", b"d"):
        return raw
    out, at = b"", 0
    while True:
        end = raw.index(b"\r\n", at)
        size = int(raw[at:end], 16)
        if not size:
            return out
        out += raw[end + 2 : end + 2 + size]
        at = end + 4 + size


async def whole(host: str, port: int, body: bytes, form: str) -> int:
    """Tokens of one answer that comes at once; every one must have its log probability."""
    reader, writer = await post(host, port, body)
    answer = orjson.loads(chunks_of(await reader.read()))
    writer.close()
    choice = answer["choices"][0]
    logprobs = choice["token_logprobs"] if form == "flat" else choice["logprobs"]["token_logprobs"]
    return len(logprobs)


async def streamed(host: str, port: int, body: bytes) -> int:
    reader, writer = await post(host, port, body)
    tokens = 0
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            for choice in orjson.loads(line[6:])["choices"]:
                tokens += len((choice.get("logprobs") or {}).get("token_logprobs", ()))
        elif line.startswith(b"data: [DONE]"):
            break
    writer.close()
    return tokens


async def load(given: argparse.Namespace, seed: int) -> float:
    url = urlsplit(given.url)
    rng = random.Random(seed)
    bodies = []
    for _ in range(given.clients):
        body = {
            "model": given.model,
            "prompt": [rng.randrange(given.vocabulary) for _ in range(given.prompt)],
            "max_tokens": given.output,
            "temperature": 1.0,
            "ignore_eos": True,
            "seed": rng.randrange(1 << 30),
        }
        body |= {"flat": True} if given.form == "flat" else {"logprobs": 0, "stream": given.form == "stream"}
        bodies.append(orjson.dumps(body))
    start = time.perf_counter()
    one = streamed if given.form == "stream" else lambda h, p, b: whole(h, p, b, given.form)
    counts = await asyncio.gather(*(one(url.hostname, url.port, body) for body in bodies))
    seconds = time.perf_counter() - start
    assert all(count == given.output for count in counts), sorted(set(counts))
    return sum(counts) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--form", choices=["flat", "openai", "stream"], default="flat")
    parser.add_argument("--model", default="bench")
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    import uvloop

    rates = [uvloop.run(load(given, seed)) for seed in range(given.rounds)]
    print(json.dumps({"form": given.form, "rates": rates, "median": sorted(rates)[len(rates) // 2]}))


if __name__ == "__main__":
    main()
