"""A real server process for the tests that talk to one."""

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from openai import OpenAI

from child_processes import Launched

MODEL = "paceline:quickstart"
READY = re.compile(r"paceline: serving (\S+) at (http://\S+)/v1")

PLAIN = {"timeout": 120, "verify": False}
"""For clients: patience, and no certificates, which take longer to read than any of these calls."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running `paceline serve`."""

    process: subprocess.Popen
    url: str
    log: Path
    key: str | None = None

    @property
    def bearer(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    @property
    def openai(self) -> OpenAI:
        return OpenAI(
            base_url=f"{self.url}/v1", api_key=self.key or "none", max_retries=0, http_client=httpx.Client(**PLAIN)
        )

    def get(self, path: str, **more) -> httpx.Response:
        return httpx.get(self.url + path, **PLAIN | {"headers": self.bearer} | more)

    def post(self, path: str, body=None, **more) -> httpx.Response:
        return httpx.post(self.url + path, json=body, **PLAIN | {"headers": self.bearer} | more)

    def load(self) -> int:
        """Requests that run or wait in the engine."""
        stats = self.get("/stats").json()
        return stats["running"] + stats["waiting"]

    def idle(self) -> bool:
        """Whether the engine becomes empty."""
        return becomes(lambda: self.load() == 0)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(240)


def door() -> int:
    """A port for a server that is to come back there. The system gives none of these to a process that asks for any
    port, so none has it by chance while the server is away; unless it gives out all of them."""
    given = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first = int(given.read_text().split()[0]) if given.exists() else 49152
    while True:
        port = random.SystemRandom().randrange(max(1024, first - 10_000), max(11_024, first))
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port


def becomes(condition: Callable[[], bool], seconds: float = 240) -> bool:
    """Whether something comes true; how soon is the machine's affair."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@contextmanager
def served(
    *arguments: str, model: str = MODEL, starts: type[subprocess.Popen] = Launched, key: str | None = None
) -> Generator[Server]:
    """Start the real command on a free port and wait for its line; with `subprocess.Popen` in a fresh interpreter."""
    arguments += ("--api-key", key) if key else ()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "stderr.txt"
        command = [sys.executable, "-m", "paceline", "serve", model, "--port", "0", *arguments]
        with log.open("w") as errors:
            process = starts(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            assert process.stdout is not None
            ready = READY.match(process.stdout.readline())
            assert ready, log.read_text()
            yield Server(process, ready[2], log, key)
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    os.kill(process.pid, signal.SIGKILL)
                    process.wait()
            if process.stdout:
                process.stdout.close()
            assert "Traceback" not in log.read_text(), log.read_text()
