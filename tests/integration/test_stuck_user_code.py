"""User code that hangs, swallows or exits: the run ends when it is told to, with a sentence and a folder to resume."""

import contextlib
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from child_processes import Launched, run
from paceline.orchestrator import Checkpoints
from paceline.runtime.signals import FLUSH_SECONDS, STOP_SECONDS, USER_CODE_CALLERS

GAMES = """
import asyncio, os, sys, time
from pathlib import Path

plays = 0

async def answered(row, seat):
    global plays
    plays += 1
    reply = await seat.chat(row["messages"])
    return len(reply.text) + plays % 2

async def sleeps(row, seat):
    reward = await answered(row, seat)
    if plays > 60 and not Path("well").exists():
        print("now", flush=True)
        time.sleep(1000)  # HERE sleeps
    return reward

async def spins(row, seat):
    reward = await answered(row, seat)
    if plays > 60 and not Path("well").exists():
        print("now", flush=True)
        while True:
            pass
    return reward

async def swallows(row, seat):
    reward = await answered(row, seat)
    if plays > 60 and not Path("well").exists():
        print("now", flush=True)
        while True:
            try:
                await asyncio.sleep(0.01)
            except BaseException:
                continue
    return reward

async def threads(row, seat):
    reward = await answered(row, seat)
    if plays > 60 and not Path("well").exists():
        print("now", flush=True)
        await asyncio.to_thread(time.sleep, 1000)
    return reward

async def leaves(row, seat):
    await answered(row, seat)
    os._exit(3)  # HERE leaves
"""
SETTINGS = ["--batch-size", "8", "--group-size", "4", "--steps", "100000", "--checkpoint.every", "1"]
SETTINGS += ["--eval.every", "0", "--sampling.max-tokens", "4", "--engine.max-context", "64", "--trainer.threads", "1"]


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "games.py").write_text(GAMES)
    rows = [{"messages": [{"role": "user", "content": f"copy: {word}"}]} for word in ("ab", "cd", "ef")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def run_file(folder: Path, play: str) -> list[str]:
    text = 'name = "stuck"\n[[env]]\ntype = "custom"\nname = "game"\ndataset = "rows.jsonl"\n'
    (folder / "run.toml").write_text(f'{text}import_path = "games.py:{play}"\n')
    return [sys.executable, "-m", "paceline", "train", "run.toml", *SETTINGS]


def line_of(name: str) -> int:
    return GAMES.split(f"# HERE {name}")[0].count("\n") + 1


def last_event(folder: Path) -> dict:
    return json.loads((folder / "runs" / "stuck" / "events.jsonl").read_text().splitlines()[-1])


@pytest.mark.parametrize(
    ("play", "signals"),
    [
        ("sleeps", {"now": signal.SIGINT, "press Ctrl-C again to stop at once": signal.SIGINT}),
        ("spins", {"now": signal.SIGTERM}),
        ("swallows", {"now": signal.SIGTERM}),
        ("threads", {"now": signal.SIGINT}),
    ],
)
def test_signals_end_a_run_whatever_its_episodes_do(folder, play, signals):
    """The second of two comes once the first is heard: two of a kind that wait to be delivered are one."""
    command = run_file(folder, play)
    said = ""
    with Launched(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for sign, number in signals.items():
            said += next(line for line in process.stdout if sign in line)
            process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            said += process.communicate(timeout=240)[0]
        process.kill()
    assert process.returncode == 130, said
    end = last_event(folder)
    assert (end["event"], end["status"]) == ("end", "interrupted")
    assert end["message"].startswith("stopped by the user")
    if play in ("sleeps", "spins"):
        assert re.search(rf"while games.py, line \d+, in {play}, blocked the event loop", end["message"])
    assert Checkpoints(folder / "runs" / "stuck" / "checkpoints", 1).all()
    (folder / "well").touch()
    reached = Checkpoints(folder / "runs" / "stuck" / "checkpoints", 1).all()[-1].name
    steps = str(int(reached.removeprefix("step-")) + 1)
    done = run([*command, "--resume", "latest", "--steps", steps], cwd=folder)
    assert done.returncode == 0, done.stderr


def test_the_files_that_call_user_code_exist():
    assert [file for file in USER_CODE_CALLERS if not Path(file).exists()] == []


def test_the_limits_of_a_forced_end_leave_it_five_seconds():
    assert STOP_SECONDS + FLUSH_SECONDS < 5


def test_a_blocked_event_loop_ends_the_run_by_itself(folder):
    command = [*run_file(folder, "sleeps"), "--breaker.blocked-seconds", "2"]
    with Launched(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        said = process.communicate(timeout=280)[1]
    assert process.returncode == 1
    end = last_event(folder)
    assert (end["event"], end["status"]) == ("end", "failed")
    assert re.match(
        rf"user code has blocked the event loop for \d+ s at games.py, line {line_of('sleeps')}", end["message"]
    )
    assert end["message"] in said


@pytest.mark.parametrize("placement", ["local", "processes"])
def test_user_code_that_ends_the_process_is_named(folder, placement):
    command = [*run_file(folder, "leaves"), "--placement", placement]
    with Launched(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        said = process.communicate(timeout=280)[0]
    assert process.returncode == 1, said
    message = last_event(folder)["message"]
    assert "user code ended the process in an episode of `game`, by os._exit(3) at " in message
    assert f"games.py, line {line_of('leaves')}, in leaves" in message
    assert message in said
