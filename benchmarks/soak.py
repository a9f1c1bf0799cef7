"""A soak of `paceline serve`: many requests, new weights every second, and nothing may be lost or leak.

The tiny model of the package is served in its own process. Clients ask for short completions over HTTP, some of them
streamed, some abandoned half-way; meanwhile all weights are pushed again every second under a new version. Bars: every
request that was not abandoned is answered in full with versions that never go back, and the memory of server and engine
grows by less than 5% from the first tenth of the run to its end.

    python benchmarks/soak.py --requests 50000 --json benchmarks/results/soak-cpu.json
"""

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import orjson
from rich.progress import Progress
from safetensors.torch import save_file

from bars import arguments, machine
from http_load import chunks_of
from paceline.config.model import ModelConfig
from paceline.model import load_model

KEY = "soak"
PORT = 8155
MOST_GROWTH = 1.05


class Soak:
    """What the clients saw."""

    def __init__(self, total: int) -> None:
        self.left = total
        self.answered = self.abandoned = 0
        self.failed: list[str] = []
        self.versions: set[int] = set()

    async def client(self, seed: int, progress: Progress, task) -> None:
        rng = random.Random(seed)
        while self.left > 0:
            self.left -= 1
            try:
                await self.one(rng)
            except (OSError, AssertionError, KeyError, ValueError, asyncio.IncompleteReadError) as error:
                self.failed.append(f"{type(error).__name__}: {str(error)[:200]}")
            progress.advance(task)

    async def one(self, rng: random.Random) -> None:
        wanted = rng.randrange(1, 16)
        kind = rng.choices(["flat", "stream", "abandon"], [90, 7, 3])[0]
        body = {
            "model": "soak",
            "prompt": [rng.randrange(3, 90) for _ in range(rng.randrange(1, 24))],
            "max_tokens": wanted,
            "ignore_eos": True,
            "temperature": 1.0,
            "seed": rng.randrange(1 << 30),
        }
        body |= {"flat": True} if kind == "flat" else {"stream": True, "return_token_ids": True}
        reader, writer = await asyncio.open_connection("127.0.0.1", PORT, limit=1 << 24)
        data = orjson.dumps(body)
        writer.write(post("/v1/completions", data))
        status = await asyncio.wait_for(reader.readline(), 60)
        assert b" 200 " in status, status + await reader.read(500)
        while (await reader.readline()).strip():
            pass
        if kind == "abandon":
            writer.close()
            self.abandoned += 1
            return
        raw = chunks_of(await asyncio.wait_for(reader.read(), 60))
        writer.close()
        self.check(kind, raw, wanted)

    def check(self, kind: str, raw: bytes, wanted: int) -> None:
        if kind == "flat":
            choice = orjson.loads(raw)["choices"][0]
            assert len(choice["token_ids"]) == len(choice["token_logprobs"]) == wanted, choice
            assert choice["versions"] == sorted(choice["versions"]), choice["versions"]
            self.versions.update(choice["versions"])
        else:
            events = [orjson.loads(line[6:]) for line in raw.split(b"\n") if line.startswith(b"data: {")]
            assert sum(len(e["choices"][0]["token_ids"]) for e in events) == wanted, raw[-500:]
            assert raw.rstrip().endswith(b"data: [DONE]")
        self.answered += 1


def post(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json"
    return f"{head}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


async def push(folder: Path, every: float, pushed: list[float]) -> None:
    """All weights again, once a second, each time under a new version."""
    for version in range(1, 1_000_000):
        await asyncio.sleep(every)
        data = orjson.dumps({"path": str(folder / "model.safetensors"), "version": version})
        reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
        writer.write(post("/weights/load", data))
        raw = await asyncio.wait_for(reader.read(), 60)
        writer.close()
        assert b" 200 " in raw.split(b"\r\n", 1)[0], raw
        pushed.append(orjson.loads(raw.split(b"\r\n\r\n", 1)[1])["pause_seconds"])


def memory(pid: int) -> float:
    """MiB held by a process and its children."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20 + sum(memory(int(child)) for child in children)


async def watch(pid: int, readings: list[tuple[float, float]]) -> None:
    while True:
        readings.append((time.perf_counter(), memory(pid)))
        await asyncio.sleep(1)


async def soak(given, pid: int, folder: Path) -> tuple[Soak, list[float], list[float], float]:
    state = Soak(given.requests)
    pushed: list[float] = []
    readings: list[tuple[float, float]] = []
    start = time.perf_counter()
    with Progress() as progress:
        task = progress.add_task("requests", total=given.requests)
        beside = [asyncio.create_task(push(folder, 1.0, pushed)), asyncio.create_task(watch(pid, readings))]
        await asyncio.gather(*(state.client(seed, progress, task) for seed in range(given.clients)))
        for other in beside:
            if other.done():
                other.result()
            other.cancel()
    return state, pushed, [value for _, value in readings], time.perf_counter() - start


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--isolate", action="store_true", help="engine in its own process")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = load_model(ModelConfig(name="paceline:quickstart"))
        save_file({n: p.detach().contiguous() for n, p in model.named_parameters()}, folder / "model.safetensors")
        command = [sys.executable, "-m", "paceline", "serve", "paceline:quickstart", "--name", "soak"]
        command += ["--port", str(PORT), "--allow", name, "--isolate" if given.isolate else "--no-isolate"]
        command += ["--api-key", KEY]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            assert "serving" in server.stdout.readline()
            state, pushed, readings, seconds = asyncio.run(soak(given, server.pid, folder))
        finally:
            server.terminate()
            server.wait(30)
    tenth = max(1, len(readings) // 10)
    before, after = max(readings[:tenth] + readings[tenth : tenth + 5]), sum(readings[-3:]) / len(readings[-3:])
    result = {
        "title": "soak",
        "requests": given.requests,
        "answered": state.answered,
        "abandoned": state.abandoned,
        "failed": len(state.failed),
        "failures": state.failed[:5],
        "updates": len(pushed),
        "longest_pause_ms": 1e3 * max(pushed, default=0),
        "versions_seen": len(state.versions),
        "memory_mib": {"after a tenth": before, "at the end": after, "growth": after / before, "bar": MOST_GROWTH},
        "seconds": seconds,
        **machine(),
    }
    complete = state.answered + state.abandoned == given.requests and not state.failed
    result["cleared"] = complete and after / before <= MOST_GROWTH
    print(json.dumps(result, indent=2))
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result))
    return 0 if result["cleared"] else 1


if __name__ == "__main__":
    sys.exit(main())
