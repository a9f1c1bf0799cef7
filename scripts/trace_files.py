"""Counts the files of src/paceline that one sample, one request and one weight update enter.

Each is really run: a quickstart in `local` placement with `staleness = 0`, so that sampling, training and the update
follow one another, and a `paceline serve` that answers one streamed chat request. A file counts where a function of it
is called, in any thread but those that only watch, while the part is under way. Coroutines that were waiting when it
began and go on in it, such as the run's own, do not count:

  sample          the third batch, from its rows to the end of its optimizer step
  weight update   after the third batch, from the trainer's weights to the engine that samples with them
  request         a second chat request, from its first byte to the first token on its way out

The files of `engine/` are counted apart for samples and requests. Exits 1 where a count is above its bar.

  python scripts/trace_files.py            the three counts
  python scripts/trace_files.py --list     and the files, with the calls into each
"""

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import httpx

import paceline
from paceline.commands import main as command
from paceline.orchestrator.gate import Gate
from paceline.orchestrator.metrics import Stopwatch

PACKAGE = str(Path(paceline.__file__).parent) + os.sep
BARS = {"sample": 25, "request": 20, "weight update": 10}
PHASES = {"sample": "sample", "score": "sample", "train": "sample", "publish": "weight update"}
"""What the run's stopwatch measures, and the part it belongs to."""
TRACED_STEP = 3
WATCHERS = {"watchdog", "record", "forced end", "lifeline"}
"""Threads that look after the run and carry no sample."""


class Tracer:
    """Files entered while a part is open, with the number of calls into each."""

    def __init__(self) -> None:
        self.entered: dict[str, Counter[str]] = {part: Counter() for part in BARS}
        self.open: Counter[str] | None = None
        self.waiting: set[FrameType] = set()
        """Frames of coroutines that a part found begun."""
        self._files: dict[object, str] = {}

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if self.open is None or event != "call" or frame in self.waiting:
            return
        if threading.current_thread().name in WATCHERS:
            return
        code = frame.f_code
        if (file := self._files.get(code)) is None:
            file = code.co_filename
            self._files[code] = file = file.removeprefix(PACKAGE) if file.startswith(PACKAGE) else ""
        if file:
            self.open[file] += 1

    @contextlib.contextmanager
    def calls(self) -> Iterator[None]:
        """Sees the calls of this thread and of those that it and its children start."""
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)


def waiting_frames(task: "asyncio.Task[object]") -> Iterator[FrameType]:
    """Of a task and the coroutines that it awaits."""
    inner: object = task.get_coro()
    while inner is not None:
        if (frame := getattr(inner, "cr_frame", None) or getattr(inner, "ag_frame", None)) is not None:
            yield frame
        inner = getattr(inner, "cr_await", None) or getattr(inner, "ag_await", None)


def callers() -> set[FrameType]:
    """Frames that are running now: the run's own coroutines, which go on after the part has begun."""
    found, frame = set(), sys._getframe(1)
    while frame is not None:
        found.add(frame)
        frame = frame.f_back
    return found


def trace_run(tracer: Tracer, runs: Path) -> None:
    """A quickstart of a few steps, one of them traced."""
    measured, published = Stopwatch.phase, Gate.open_for
    steps = Counter[str]()

    @contextlib.contextmanager
    def phase(self: Stopwatch, name: str) -> Iterator[None]:
        steps[name] += 1
        with measured(self, name):
            tracer.waiting = {frame for task in asyncio.all_tasks() for frame in waiting_frames(task)} | callers()
            tracer.open = tracer.entered[PHASES[name]] if steps[name] == TRACED_STEP and name in PHASES else None
            yield
            tracer.open = None

    def publish(self: Gate, version: int) -> None:
        tracer.open = None  # the update is in; what follows begins the next samples
        published(self, version)

    Stopwatch.phase, Gate.open_for = phase, publish
    try:
        keys = ["--steps", str(TRACED_STEP + 1), "--staleness", "0", "--eval.every", "0", "--device", "cpu"]
        if command(["train", "quickstart", "--quiet", "--runs", str(runs), *keys]):
            raise SystemExit("the run failed")
    finally:
        Stopwatch.phase, Gate.open_for = measured, published


def trace_request(tracer: Tracer) -> None:
    """A server that answers a first request, so that everything is loaded, and then the traced one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def client() -> None:
        sys.setprofile(None)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
                deadline = time.monotonic() + 120
                while time.monotonic() < deadline:
                    with contextlib.suppress(httpx.TransportError):
                        if http.get("/health").status_code == 200:
                            break
                    time.sleep(0.1)
                for traced in (False, True):
                    time.sleep(0.5)
                    tracer.open = tracer.entered["request"] if traced else None
                    body = {"messages": [{"role": "user", "content": "reverse: planet"}], "stream": True}
                    with http.stream("POST", "/v1/chat/completions", json=body | {"max_tokens": 8}) as answer:
                        answer.raise_for_status()
                        next(line for line in answer.iter_lines() if '"content"' in line)
                        tracer.open = None
        finally:
            tracer.open = None
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=client)
    thread.start()
    command(["serve", "paceline:quickstart", "--port", str(port), "--device", "cpu"])
    thread.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name the files")
    given = parser.parse_args()
    tracer = Tracer()
    with tempfile.TemporaryDirectory() as folder, tracer.calls():
        trace_run(tracer, Path(folder))
        trace_request(tracer)
    missed = False
    for part, bar in BARS.items():
        entered = tracer.entered[part]
        engine = {file for file in entered if file.startswith("engine/")} if part != "weight update" else set()
        count = len(entered) - len(engine)
        missed |= not 0 < count <= bar
        apart = f", and {len(engine)} of engine/" if engine else ""
        print(f"{part}: {count} files{apart} (at most {bar})")
        if given.list:
            for file, calls in sorted(entered.items()):
                print(f"  {calls:7d}  {file}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
