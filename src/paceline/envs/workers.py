"""Calls functions that may hang, crash or flood in worker processes that can be killed.

A call names its function by import path and takes plain JSON values. Workers start when they are needed and are used
again; one that overruns its deadline, dies or sends invalid output is killed with its child processes, and the next
call gets a new one. A call whose process died is made once more, so a function should leave nothing behind but its
answer. Its output is discarded.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import weakref
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from paceline.errors import PacelineError
from paceline.util.deadlines import wait_within
from paceline.util.episode_spans import episode_span

WORKER_SCRIPT = Path(__file__).with_name("worker_main.py")
"""Run as a file: as a module it would import all of `paceline.envs`, torch included, into every worker."""
ATTEMPTS = 2
"""Processes a call may see die. Something else may have killed the first; a second death is the call's own doing."""
KILL_SECONDS = 30.0
"""Limit for a killed process to end; it ends at once unless it hangs in the kernel."""
LOAD_SECONDS = 120.0
"""A worker may take this long to start and import a function, before the call's own time begins."""

Failure = Literal["timed_out", "exited", "raised", "too_large"]


class WorkerFailed(PacelineError):
    """A call that gave no answer: what kind of failure, and a few words on it."""

    def __init__(self, kind: Failure, reason: str) -> None:
        super().__init__(reason)
        self.kind: Failure = kind


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    count: int
    """Processes at once; further calls wait in line."""
    memory_mb: int | None
    """Address space of each, the imported libraries included."""
    answer_bytes: int


RemoteCall = Callable[[str, Sequence[Any], float, WorkerLimits], Awaitable[Any]]
_remote_calls: list[RemoteCall] = []


@contextmanager
def run_remotely(call: RemoteCall) -> Generator[None]:
    """Within this context all calls go through `call`, which runs them on other machines."""
    _remote_calls.append(call)
    try:
        yield
    finally:
        _remote_calls.remove(call)


class Workers:
    """Calls functions in worker processes. One object serves any number of event loops, each with its own workers."""

    def __init__(
        self, count: int | None = None, memory_mb: int | None = None, answer_bytes: int = 1 << 20, kind: str = "grader"
    ) -> None:
        """`kind`: how the spans of an episode call these calls."""
        self._kind = kind
        self._limits = WorkerLimits(count or os.cpu_count() or 1, memory_mb, answer_bytes)
        self._pools: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Pool] = weakref.WeakKeyDictionary()

    async def call(self, function: str, args: Sequence[Any], timeout: float) -> Any:
        """The result of `function(*args)`, as JSON gives it back. `function` is an import path; its time counts from
        when a worker has it loaded. Raises `WorkerFailed`."""
        with episode_span(self._kind):
            return await self._call(function, args, timeout)

    async def _call(self, function: str, args: Sequence[Any], timeout: float) -> Any:
        if _remote_calls:
            return await _remote_calls[-1](function, args, timeout, self._limits)
        request = json.dumps({"function": function, "args": list(args)}).encode() + b"\n"
        loop = asyncio.get_running_loop()
        if (pool := self._pools.get(loop)) is None:
            pool = self._pools[loop] = _Pool(self._limits)
        for _ in range(ATTEMPTS - 1):
            try:
                return await pool.call(request, timeout)
            except WorkerFailed as failed:
                if failed.kind != "exited" or pool.closed:
                    raise
        return await pool.call(request, timeout)

    async def close(self) -> None:
        """End this event loop's workers now; calls under way fail. Otherwise they end with the loop."""
        if pool := self._pools.pop(asyncio.get_running_loop(), None):
            await pool.close()


class _Pool:
    """The workers of one event loop."""

    def __init__(self, limits: WorkerLimits) -> None:
        self._limits = limits
        self._places = asyncio.Semaphore(limits.count)  # first come, first served
        self._idle: list[_Worker] = []
        self._alive: set[_Worker] = set()
        self._lifetime = asyncio.create_task(self._close_with_loop(), name="paceline workers")

    async def call(self, request: bytes, timeout: float) -> Any:
        async with self._places:  # bounded: each call before it has a deadline
            worker = self._idle.pop() if self._idle else await self._start()
            try:
                answer = await worker.call(request, timeout)
            except BaseException:  # cancelled too: whatever it is doing now, no other call may get it
                await self._discard(worker)
                raise
            if self.closed:  # meanwhile
                await self._discard(worker)
            else:
                self._idle.append(worker)
        if "raised" in answer:
            raise WorkerFailed("raised", f"raised {answer['raised']}")
        if "too_large" in answer:
            raise _too_large(self._limits)
        return answer["value"]

    @property
    def closed(self) -> bool:
        return self._lifetime.done() or self._lifetime.cancelling() > 0

    async def _start(self) -> "_Worker":
        settings = {"path": sys.path, "memory_mb": self._limits.memory_mb, "bytes": self._limits.answer_bytes}
        command = [sys.executable, "-P", str(WORKER_SCRIPT), json.dumps(settings)]
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # a process group of its own, to be killed as one
            limit=self._limits.answer_bytes + 1024,
        )
        worker = _Worker(process, self._limits)
        self._alive.add(worker)
        return worker

    async def _discard(self, worker: "_Worker") -> None:
        self._alive.discard(worker)
        await worker.kill()

    async def _close_with_loop(self) -> None:
        """Wait until the event loop cancels this task at its end, then kill the workers."""
        try:
            await asyncio.get_running_loop().create_future()  # unbounded: until `close` or the end of the loop
        except asyncio.CancelledError:  # not where a loop was dropped unfinished: nothing can be awaited there
            self._idle.clear()
            await asyncio.gather(*map(self._discard, list(self._alive)))
            raise

    async def close(self) -> None:
        self._lifetime.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._lifetime  # bounded: it is cancelled


class _Worker:
    """One process: started, then asked one thing at a time, then killed."""

    def __init__(self, process: asyncio.subprocess.Process, limits: WorkerLimits) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._limits = process, limits
        self._stdin, self._stdout = process.stdin, process.stdout

    async def call(self, request: bytes, timeout: float) -> dict[str, Any]:
        loaded = await self._answer(LOAD_SECONDS, request, "loading ")
        return loaded if "raised" in loaded else await self._answer(timeout)

    async def _answer(self, seconds: float, request: bytes = b"", doing: str = "") -> dict[str, Any]:
        """The next answer, once this request is sent."""
        try:
            async with asyncio.timeout(seconds):
                if request and not self._stdin.is_closing():  # to write nothing, or to the dead, is an error on uvloop
                    with contextlib.suppress(ConnectionError):  # it died: the answer, or its absence, says how
                        self._stdin.write(request)
                        await self._stdin.drain()  # bounded: by the time-out around
                return await self._read_answer()
        except TimeoutError:
            raise WorkerFailed("timed_out", f"{doing}timed out after {seconds:g} s") from None

    async def _read_answer(self) -> dict[str, Any]:
        try:
            line = await self._stdout.readline()  # bounded: by `_answer`
        except ValueError:  # longer than the stream's limit
            raise _too_large(self._limits) from None
        if not line.endswith(b"\n"):
            code = await self._process.wait()  # bounded: by `_answer`; its pipe is closed already
            how = f"exited with code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
            raise WorkerFailed("exited", how)
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict) or not answer.keys() & {"loaded", "value", "raised", "too_large"}:
            raise WorkerFailed("exited", "wrote something that is no answer")
        return answer

    async def kill(self) -> None:
        """The whole group, and wait until it is gone. Shielded: a cancelled caller must not leave a zombie."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # gone already; macOS says it the second way
            os.killpg(self._process.pid, signal.SIGKILL)
        await wait_within(KILL_SECONDS, "the end of a worker that was killed", asyncio.shield(self._process.wait()))
        # A process it started may have left the group and hold the pipes open; asyncio has no public way to let go.
        self._process._transport.close()  # ty: ignore[missing-attribute]
        await asyncio.sleep(0)


def _too_large(limits: WorkerLimits) -> WorkerFailed:
    return WorkerFailed("too_large", f"answer larger than {limits.answer_bytes} bytes")


def failure_metrics(failed: WorkerFailed | None) -> dict[str, float]:
    """Whether a check failed, and of what; every key each time, so that means over rollouts are shares."""
    kinds = {f"check_failed/{kind}": float(failed is not None and failed.kind == kind) for kind in get_args(Failure)}
    return {"check_failed": float(failed is not None)} | kinds
