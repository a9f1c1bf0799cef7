"""Starts a vLLM server of this run on this machine, and ends it."""

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from paceline.clients.vllm import VllmEngine
from paceline.engine.base import EngineLimits
from paceline.errors import EngineError
from paceline.weights.update import ServedPolicy, WeightUpdate

GUARD = Path(__file__).parent / "guard"
LOOK_SECONDS = 0.5
STOP_SECONDS = 30.0
MOST_STARTS = 4
"""A server that dies more often than this is not started again."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM takes as the highest rank of an adapter."""


@dataclass(slots=True)
class VllmProcess:
    """One server on a loopback port, with a key of its own and its log in a file."""

    python: str
    arguments: Sequence[str]
    log: Path
    settings: dict[str, str]
    seconds: float
    key: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    port: int = field(default_factory=lambda: _free_port())
    starts: int = 0
    _process: "subprocess.Popen | None" = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def dead(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def begin(self) -> None:
        """Start it, without waiting until it can be asked."""
        self.starts += 1
        places = [str(GUARD), os.environ.get("PYTHONPATH", "")]
        ours = {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_API_KEY": self.key,  # not as an argument, which every user of the machine can read
            "PYTHONPATH": os.pathsep.join(filter(None, places)),
        }
        command = [self.python, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--middleware", "paceline_guard.Guard", *self.arguments]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self.log.open("a", encoding="utf-8") as log:
                self._process = subprocess.Popen(
                    command,
                    env={**os.environ, **ours, **self.settings},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C is for the run, which ends it in its own time
                )
        except OSError as error:
            raise EngineError(f"vLLM cannot be started with {self.python}: {error.strerror}") from error

    async def answers(self) -> None:
        """Wait until it can be asked; raises if it does not come up."""
        deadline = time.monotonic() + self.seconds
        async with httpx.AsyncClient(base_url=self.url, timeout=5.0, trust_env=False) as client:
            while time.monotonic() < deadline:
                if self.dead:
                    words = self._last_words()
                    raise EngineError(f"vLLM ended before it could be asked: {words} (all of it: {self.log})")
                with contextlib.suppress(httpx.TransportError):
                    if (await client.get("/health")).is_success:
                        return
                await asyncio.sleep(LOOK_SECONDS)  # bounded: by the deadline
        raise EngineError(
            f"vLLM did not answer within {self.seconds:g} s: see {self.log}, or raise engine.launch.seconds"
        )

    def revive(self) -> None:
        """Start a dead one again, a few times at most."""
        if self.dead and self.starts < MOST_STARTS:
            if self._process is not None:
                _end_group(self._process)
            self.begin()

    def end(self) -> None:
        """Ask it to stop, and end all of its processes if it does not."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        _end_group(process)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)

    def _last_words(self) -> str:
        lines = [line.strip() for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines()]
        return next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "nothing was said")


class LaunchedVllm(VllmEngine):
    """A vLLM that belongs to this run: started with it, started again when it dies, ended with it."""

    def __init__(self, process: VllmProcess, **more: object) -> None:
        super().__init__(process.url, api_key=process.key, priority=True, **more)  # ty: ignore[invalid-argument-type]
        self._process = process
        self._met = False

    def start(self) -> None:
        """Begin only: it takes long to come up, and the first update waits for it without blocking the event loop."""
        self._process.begin()

    async def load_weights(self, update: WeightUpdate) -> float:
        if not self._met:
            await self._process.answers()
            await asyncio.to_thread(super().start)
            self._met = True
        return await super().load_weights(update)

    async def policy(self) -> ServedPolicy:
        self._process.revive()
        return await super().policy()

    async def limits(self) -> EngineLimits:
        """While a server is gone the pool asks for this again and again."""
        self._process.revive()
        return await super().limits()

    def close(self) -> None:
        self._process.end()
        super().close()


def _end_group(process: subprocess.Popen) -> None:
    """Workers that outlived their server too."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def lora_rank(rank: int) -> int:
    """The smallest highest rank that vLLM knows and that has room for ours."""
    found = next((known for known in RANKS if known >= rank), None)
    if found is None:
        raise EngineError(f"vLLM serves adapters of rank {RANKS[-1]} at most, not {rank}: lower model.lora.rank")
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
