"""The end of a run: bounded, whatever tasks are left."""

import asyncio
import contextlib
import gzip
import signal
import subprocess
import sys
import threading

import pytest

from paceline.runtime.signals import run_until_complete
from paceline.util.deadlines import DeadlineError, UserCall
from simulator.engine import run_virtual


def test_a_task_that_refuses_to_be_cancelled_is_left_behind(caplog):
    async def stubborn():
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    left = []

    async def main():
        left.append(asyncio.ensure_future(stubborn()))
        await asyncio.sleep(0)
        return 7

    assert run_until_complete(main(), farewell=0.05) == 7
    left[0]._log_destroy_pending = False  # it is pending for ever, and this is the test's doing


def test_tasks_that_end_when_cancelled_are_awaited():
    cleaned = []

    async def tidy():
        try:
            await asyncio.sleep(100)
        finally:
            await asyncio.sleep(0.01)
            cleaned.append(True)

    async def main():
        task = asyncio.ensure_future(tidy())
        await asyncio.sleep(0)
        raise ZeroDivisionError(str(task.done()))

    with pytest.raises(ZeroDivisionError):
        run_until_complete(main())
    assert cleaned == [True]


def test_an_interruption_in_the_middle_cancels_the_rest():
    cleaned = []

    async def main():
        asyncio.get_running_loop().call_later(0.01, interrupt)
        try:
            await asyncio.sleep(100)
        finally:
            cleaned.append(True)

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_until_complete(main())
    assert cleaned == [True]


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_a_task_of_user_code_that_exits_does_not_end_the_loop(error, monkeypatch):
    """While a run is under way SIGINT has a handler of its own, so that the exception is user code's."""
    monkeypatch.setattr(signal, "getsignal", lambda number: None)

    async def exits():
        raise error("mine")

    async def main():
        with pytest.raises(error, match="mine"):
            await asyncio.gather(exits(), asyncio.sleep(0))
        return 7

    assert run_until_complete(main()) == 7


def test_threads_that_user_code_blocks_keep_nothing_else_waiting():
    free = threading.Event()

    async def main():
        blocked = [asyncio.ensure_future(asyncio.to_thread(free.wait, 60)) for _ in range(64)]
        try:
            return await asyncio.to_thread(lambda: 7)
        finally:
            free.set()
            await asyncio.gather(*blocked)

    started = threading.active_count()
    assert run_until_complete(main()) == 7
    assert threading.active_count() <= started + 65


def test_work_that_swallows_its_cancellation_is_abandoned_with_its_line():
    over = threading.Event()

    async def stubborn():
        while not over.is_set():
            with contextlib.suppress(BaseException):
                await asyncio.sleep(1)

    async def main():
        task = asyncio.ensure_future(UserCall(5, "an episode of `code`", stubborn()))
        with pytest.raises(DeadlineError, match=r"cancelled and did not end within 30 s, at .*, line \d+, in stubborn"):
            await task
        over.set()
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 35


LEAVES = """
import asyncio, atexit, gzip, sys, threading, time, types
from paceline.util.process_exit import exit_process

sys.modules["torch"] = types.ModuleType("torch")  # with it, memory is left as it is
text, packed, raw = open("text", "w"), gzip.open("packed", "wt"), open("raw", "wb")
text.write("kept"), packed.write("kept"), raw.write(b"kept")
threading.Thread(target=lambda: (time.sleep(0.2), print("a thread's last line"))).start()
atexit.register(print, "atexit", end="")
cycle = [text, packed, raw]
cycle.append(cycle)
exit_process(3)
"""


def test_a_process_ends_with_its_threads_its_exit_functions_and_its_files(tmp_path):
    done = subprocess.run([sys.executable, "-c", LEAVES], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "a thread's last line\natexit", "")
    assert (tmp_path / "text").read_text() == (tmp_path / "raw").read_text() == "kept"
    assert gzip.decompress((tmp_path / "packed").read_bytes()) == b"kept"


STAYS = """
import sys, threading, time
from paceline.util.process_exit import exit_process

print("the last line")
threading.Thread(target=time.sleep, args=(600,)).start()
exit_process(3)
"""


def test_what_was_printed_is_seen_where_threads_do_not_end(tmp_path):
    done = subprocess.run([sys.executable, "-c", STAYS], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, "the last line\n")
    assert "threads of user code did not end" in done.stderr
