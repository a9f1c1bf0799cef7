"""Laws of workers: a call gets its own answer, and one that fails harms no other."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import uvloop

from child_processes import Launched
from paceline.envs.workers import WorkerFailed, Workers

TRICKS = """
import os, re, signal, subprocess, sys, time

def pid(): return os.getpid()
def echo(*values): return list(values)
def slow_echo(value): time.sleep(0.01); return [value, os.getpid()]
def hang(): time.sleep(1000)
def stuck(): return bool(re.match("(a+)+$", "a" * 40 + "!"))  # native code that keeps the interpreter's lock
def fail(): raise ValueError("not today")
def leave(): os._exit(3)
def polite(): sys.exit(4)
def die(): os.kill(os.getpid(), signal.SIGSEGV)
def large(size): return "x" * size
def unspeakable(): return object()
def eat(): return len(bytearray(2 << 30))

def flood():
    for stream in (1, 2):
        for _ in range(100):
            os.write(stream, b"x" * 100_000)
    print("x" * 1_000_000)
    return sys.stdin.read()

def babble():
    for handle in range(3, 50):
        try:
            os.write(handle, b"nonsense\\n")
        except OSError:
            pass
    time.sleep(1000)

def family(file, detached):
    child = subprocess.Popen(["sleep", "1000"], start_new_session=detached)
    report(file, child.pid)

def report(file, *pids):
    with open(file + ".new", "w") as out:
        out.write(" ".join(map(str, [os.getpid(), *pids])))
    os.rename(file + ".new", file)
    time.sleep(1000)
"""


@pytest.fixture(scope="module")
def tricks(tmp_path_factory):
    """The import path of a function of the file above."""
    file = tmp_path_factory.mktemp("tricks") / "tricks.py"
    file.write_text(TRICKS)
    return lambda name: f"{file}:{name}"


def gone(pid: int) -> bool:
    """A zombie counts as gone: reaping orphans is left to the machine."""
    status = Path(f"/proc/{pid}/stat")
    if not Path("/proc/self/stat").exists():  # macOS
        return subprocess.run(["ps", "-p", str(pid)], stdout=subprocess.DEVNULL).returncode != 0
    try:
        return status.read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


async def reason(call) -> str:
    with pytest.raises(WorkerFailed) as failed:
        await call
    return str(failed.value)


async def appears(file: Path) -> list[int]:
    """The numbers written into a file, once they are."""
    async with asyncio.timeout(240):
        while not file.exists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return [int(word) for word in file.read_text().split()]


async def vanish(*pids: int) -> None:
    async with asyncio.timeout(240):
        while not all(map(gone, pids)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


# --- answers


def test_a_call_gets_what_the_function_returns(tricks):
    async def run():
        given = [1, 2.5, "ü\ud800", None, [True, {"a": []}]]
        assert await Workers(1).call(tricks("echo"), given, 30) == given
        assert await Workers(1).call("math:sqrt", [9], 30) == 3
        assert await Workers(1).call("os.path:join", ["a", "b"], 30) == os.path.join("a", "b")  # noqa: PTH118

    asyncio.run(run())


def test_two_hundred_calls_at_once_share_a_few_processes(tricks):
    async def run():
        workers = Workers(3)
        answers = await asyncio.gather(*(workers.call(tricks("slow_echo"), [i], 30) for i in range(200)))
        assert [value for value, _ in answers] == list(range(200))
        assert 1 <= len({pid for _, pid in answers}) <= 3

    asyncio.run(run())


def test_first_come_first_served(tricks):
    async def run():
        workers, order = Workers(1), []

        async def call(i):
            await workers.call(tricks("echo"), [i], 30)
            order.append(i)

        await asyncio.gather(*map(call, range(20)))
        assert order == list(range(20))

    asyncio.run(run())


def test_what_a_function_prints_goes_nowhere(tricks):
    async def run():
        workers = Workers(1)
        assert await workers.call(tricks("flood"), [], 60) == ""
        assert await workers.call(tricks("echo"), [1], 30) == [1]

    asyncio.run(run())


# --- failures

FAILURES = [
    ("hang", 0.5, "timed_out", "timed out after 0.5 s"),
    ("stuck", 0.5, "timed_out", "timed out after 0.5 s"),
    ("fail", 60, "raised", "raised ValueError: not today"),
    ("leave", 60, "exited", "exited with code 3"),
    ("polite", 60, "exited", "exited with code 4"),
    ("die", 60, "exited", "was killed by SIGSEGV"),
    ("unspeakable", 60, "raised", "raised TypeError: Object of type object is not JSON serializable"),
    ("babble", 60, "exited", "wrote something that is no answer"),
    ("missing", 60, "raised", "has no `missing`"),
]


def test_a_failing_call_says_why_and_harms_only_itself(tricks):
    async def run():
        workers = Workers(2)
        good = [workers.call(tricks("echo"), [i], 30) for i in range(30)]
        bad = [workers.call(tricks(name), [], seconds) for name, seconds, _, _ in FAILURES]
        calls = [call for pair in zip(bad, good, strict=False) for call in pair] + good[len(bad) :]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        failed = [answer for answer in answers if isinstance(answer, BaseException)]
        assert [answer for answer in answers if answer not in failed] == [[i] for i in range(30)]
        for failure, (_, _, kind, why) in zip(failed, FAILURES, strict=True):
            assert isinstance(failure, WorkerFailed)
            assert failure.kind == kind
            assert why in str(failure)

    asyncio.run(run())


def test_a_worker_that_exits_is_told_on_uvloop_too(tricks):
    """Its pipes raise another error than asyncio's where the other end is gone; actors of Ray run on it."""

    async def run():
        workers = Workers(1)
        for _ in range(4):
            assert await reason(workers.call(tricks("leave"), [], 30)) == "exited with code 3"

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def test_an_answer_may_only_be_so_large(tricks):
    async def run():
        workers = Workers(1, answer_bytes=1000)
        assert len(await workers.call(tricks("large"), [900], 30)) == 900
        for size in (1001, 10_000_000):
            assert await reason(workers.call(tricks("large"), [size], 30)) == "answer larger than 1000 bytes"
        assert await workers.call(tricks("echo"), [1], 30) == [1]

    asyncio.run(run())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits address space")
def test_memory_is_limited(tricks):
    async def run():
        workers = Workers(1, memory_mb=1024)
        assert await reason(workers.call(tricks("eat"), [], 60)) == "exited with code 137"
        assert await workers.call(tricks("echo"), [1], 30) == [1]

    asyncio.run(run())


def test_a_call_past_its_deadline_is_killed_with_what_it_started(tricks, tmp_path):
    async def run():
        workers = Workers(1)
        for seconds in (1, 10, 100):  # until the time was long enough to start a process at all
            call = workers.call(tricks("family"), [str(tmp_path / "pids"), False], seconds)
            assert await reason(call) == f"timed out after {seconds} s"
            if (tmp_path / "pids").exists():
                break
        await vanish(*await appears(tmp_path / "pids"))

    asyncio.run(run())


# --- cancellation and ends


def test_a_cancelled_call_leaves_no_busy_worker(tricks, tmp_path):
    async def run():
        workers = Workers(1)
        busy = asyncio.create_task(workers.call(tricks("report"), [str(tmp_path / "pids")], 1000))
        (pid,) = await appears(tmp_path / "pids")
        waiting = asyncio.create_task(workers.call(tricks("echo"), [0], 30))
        await asyncio.sleep(0)
        for task in (waiting, busy):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert gone(pid)
        assert await workers.call(tricks("pid"), [], 30) != pid

    asyncio.run(run())


def test_a_call_cancelled_at_any_moment_leaves_its_place_to_others(tricks):
    async def run():
        workers = Workers(1)
        for moment in range(12):
            task = asyncio.create_task(workers.call(tricks("echo"), ["stale"], 30))
            for _ in range(moment):
                await asyncio.sleep(0.004)
            task.cancel()
            await asyncio.wait([task])
            assert await workers.call(tricks("echo"), [moment], 30) == [moment]

    asyncio.run(run())


def test_closing_ends_calls_under_way(tricks, tmp_path):
    async def run():
        workers = Workers(1)
        call = asyncio.create_task(workers.call(tricks("report"), [str(tmp_path / "pids")], 1000))
        (pid,) = await appears(tmp_path / "pids")
        await workers.close()
        assert gone(pid)
        assert await reason(call) == "was killed by SIGKILL"
        await workers.close()
        assert await workers.call(tricks("echo"), [1], 30) == [1]

    asyncio.run(run())


def test_workers_end_with_their_event_loop_and_serve_the_next(tricks, tmp_path):
    workers = Workers(2)

    async def run(file):
        idle = await asyncio.gather(*(workers.call(tricks("pid"), [], 30) for _ in range(2)))
        busy = asyncio.create_task(workers.call(tricks("family"), [str(file), False], 1000))
        pids = await appears(file)
        assert not busy.done()
        return {*idle, *pids}

    seen = [asyncio.run(run(tmp_path / str(i))) for i in range(3)]
    for pids in seen:
        asyncio.run(vanish(*pids))


PARENT = """
import asyncio, sys
from paceline.envs.workers import Workers
asyncio.run(Workers(1).call(sys.argv[1], [sys.argv[2]], 1000))
"""


def test_workers_die_with_a_killed_parent(tricks, tmp_path):
    parent = Launched([sys.executable, "-c", PARENT, tricks("report"), str(tmp_path / "pids")])
    pids = asyncio.run(appears(tmp_path / "pids"))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    asyncio.run(vanish(*pids))
