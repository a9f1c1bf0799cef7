"""Runs user code off the event loop that feeds the engine.

Async functions are awaited. Sync ones run in threads, so that a tool which sleeps two seconds stops no other episode.

A thread cannot be killed. A call that ran past its deadline, or whose episode was cancelled, is *abandoned*: the caller
goes on at once, and another thread takes the call's place. Threads are daemons, so a call that never returns does not
keep the process alive. Once `MAX_ABANDONED` of them hang, further calls are refused: each holds memory. Code that may
call `os._exit`, crash, or keep the interpreter's lock belongs in a process of its own.
"""

import asyncio
import contextvars
import inspect
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from paceline.envs.base import EnvError
from paceline.util.episode_spans import episode_span
from paceline.util.user_code import is_ctrl_c

MAX_THREADS = 512
"""Sync calls that run at once; more wait in line. A thread is made when no other is free."""
MAX_ABANDONED = 2048
"""Abandoned calls still running before further ones are refused."""
IDLE_SECONDS = 10.0
"""A thread without work ends after this long."""


async def run_user_code(
    function: Callable[..., Any], *args: Any, timeout: float | None = None, advice: str = ""
) -> Any:
    """The result of `function(*args)`, wherever it runs. Context variables are those of the caller.

    Raises what the function raises, except that an attempt to end the process is an `EnvError`; `TimeoutError` when it
    takes longer than `timeout` seconds, with `advice` on what to change.
    """
    try:
        async with asyncio.timeout(timeout) as deadline:
            with episode_span("user code"):
                if inspect.iscoroutinefunction(function):
                    return await function(*args)
                value = await _POOL.run(function, args)
                # A lambda or an object around an async function cannot be told from a sync one before it was called.
                return await value if inspect.isawaitable(value) else value  # bounded: by `timeout`
    except TimeoutError as error:
        if not deadline.expired():
            raise  # the function's own
        raise TimeoutError(
            f"`{function_name(function)}` took longer than {timeout:g} s{advice and f': {advice}'}"
        ) from error
    except (SystemExit, KeyboardInterrupt) as error:  # would end the event loop, where a task of its own raises it
        if is_ctrl_c(error):
            raise
        raise _as_env_error(function, error) from error


def function_name(function: Callable[..., Any]) -> str:
    """The function's name, as its author wrote it."""
    if isinstance(function, partial):
        return function_name(function.func)
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def _as_env_error(function: Callable[..., Any], error: BaseException) -> EnvError:
    """An `EnvError` in place of an error that is not an `Exception`."""
    ends = isinstance(error, SystemExit | KeyboardInterrupt)
    said = f"{type(error).__name__}: {error}".removesuffix(": ")
    what = f"tried to end the process ({said})" if ends else f"raised {said}"
    contained = EnvError(f"`{function_name(function)}` {what}: return, or raise an ordinary error")
    contained.__cause__ = error
    return contained


class _Call:
    """One call on its way through a thread: waiting, running, then over or abandoned."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._function, self._args = function, args
        self._context = contextvars.copy_context()
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[tuple[Any, BaseException | None]] = self._loop.create_future()
        self.finished = self.abandoned = False

    def run(self) -> tuple[Any, BaseException | None]:
        try:
            return self._context.run(self._function, *self._args), None
        except Exception as error:  # handed to the caller that awaits it
            return None, error
        except BaseException as error:  # would end this thread, or pass for a cancellation over there
            return None, _as_env_error(self._function, error)

    def deliver(self, result: tuple[Any, BaseException | None]) -> None:
        """From the thread to the loop. A pair, because a future refuses to hold a StopIteration."""
        try:
            self._loop.call_soon_threadsafe(lambda: self.done.done() or self.done.set_result(result))
        except RuntimeError:
            assert self._loop.is_closed()  # the run ended first, no caller waits any more


class UserCodeThreadPool:
    """A thread pool that, unlike `ThreadPoolExecutor`, replaces abandoned threads and lets the process end."""

    def __init__(self, limit: int = MAX_THREADS, max_abandoned: int = MAX_ABANDONED) -> None:
        self._limit, self._max_abandoned = limit, max_abandoned
        self._waiting: deque[_Call] = deque()
        self._changed = threading.Condition()
        self._threads = self._idle = self._abandoned = 0

    async def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        call = _Call(function, args)
        with self._changed:
            if self._abandoned >= self._max_abandoned:
                raise EnvError(
                    f"{self._abandoned} calls of user code never came back: give the tools time limits of their own"
                )
            self._waiting.append(call)
            self._start_thread()
        try:
            value, error = await call.done  # bounded: by `run_user_code`
        except asyncio.CancelledError:
            self._abandon(call)
            raise
        if error is not None:
            raise error
        return value

    def _start_thread(self) -> None:
        """A thread for every waiting call, as far as the limit goes."""
        if len(self._waiting) <= self._idle or self._threads >= self._limit:
            self._changed.notify()
            return
        try:
            threading.Thread(target=self._run_calls, name="paceline user code", daemon=True).start()
            self._threads += 1
        # The machine gives no more threads; if there are any, they will come to every call.
        except RuntimeError as error:
            while self._threads == 0 and self._waiting:
                lost = EnvError(f"no thread can be started for user code: {error}")
                self._waiting.popleft().deliver((None, lost))

    def _run_calls(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                found = self._changed.wait_for(lambda: self._waiting, IDLE_SECONDS)
                self._idle -= 1
                if not found:
                    self._threads -= 1
                    return
                call = self._waiting.popleft()
            result = call.run()
            with self._changed:
                call.finished = True
                self._abandoned -= call.abandoned
            if call.abandoned:
                return  # its place was given away
            call.deliver(result)

    def _abandon(self, call: _Call) -> None:
        with self._changed:
            if call in self._waiting:
                self._waiting.remove(call)
            elif not call.finished:
                call.abandoned = True
                self._abandoned += 1
                self._threads -= 1
                if self._waiting:
                    self._start_thread()


_POOL = UserCodeThreadPool()
