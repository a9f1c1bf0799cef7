"""The environment of the attacked run: reversing words, by code that does to its run what user code may do.

`PACELINE_ATTACK` holds a seed and the chance of each fault per episode.
"""

import asyncio
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

VARIABLE = "PACELINE_ATTACK"
VARIABLE_FIRED = "PACELINE_ATTACK_FIRED"
"""The file in which faults are counted."""
_settings = json.loads(os.environ.get(VARIABLE, "{}"))
_rng = random.Random(_settings.get("seed", 0))
_odds: dict[str, float] = _settings.get("odds", {})
_tasks: list[asyncio.Task] = []
FAULTS: dict[str, Callable[[dict], Any]] = {}
LETHAL = {"leave_process", "block_loop"}
"""After which a run may end by itself."""


def fault(function: Callable[[dict], Any]) -> Callable[[dict], Any]:
    FAULTS[function.__name__] = function  # ty: ignore[missing-attribute]
    return function


def note(name: str) -> None:
    """Keep count of what was done, whatever becomes of this process."""
    if VARIABLE_FIRED in os.environ:
        with open(os.environ[VARIABLE_FIRED], "a") as file:  # noqa: PTH123
            file.write(name + "\n")


class Outcome(BaseException):
    """As test frameworks end a test."""


async def play(row: dict, seat: Any) -> Any:
    """`reverse: planet` wants `tenalp`; now and then something else happens."""
    reply = await seat.chat(row["messages"])
    wanted = row["answer"]
    reward = sum(a == b for a, b in zip(reply.text.strip(), wanted, strict=False)) / len(wanted)
    for name, chance in _odds.items():
        if _rng.random() < chance:
            note(name)
            answer = FAULTS[name](row)
            if asyncio.iscoroutine(answer):
                answer = await answer
            if answer is not row:
                return answer
    return reward + 0.01 * _rng.random()


@fault
def raise_error(row: dict) -> Any:
    """An error of any kind."""
    raise _rng.choice([KeyError("x"), OSError(28, "No space left on device"), MemoryError(), RecursionError("deep")])


@fault
def raise_base(row: dict) -> Any:
    """What `except Exception` does not catch."""
    raise _rng.choice([SystemExit(0), SystemExit("bye"), KeyboardInterrupt(), GeneratorExit(), Outcome("failed")])


@fault
def raise_group(row: dict) -> Any:
    """A group of errors, or one that fails to describe itself."""

    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

        __repr__ = __str__

    raise _rng.choice([Mute(), BaseExceptionGroup("all", [SystemExit(3), KeyError("y")]), StopAsyncIteration()])


@fault
def cancel_itself(row: dict) -> Any:
    """A cancellation that was not asked for."""
    if _rng.random() < 0.5:
        raise asyncio.CancelledError("by itself")
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    return asyncio.sleep(0.1)


@fault
async def sleep_for_ever(row: dict) -> None:
    """An episode that never ends by itself."""
    await asyncio.sleep(1e6)


@fault
async def swallow_cancellation(row: dict) -> None:
    """An episode that never ends at all."""
    while True:
        try:
            await asyncio.sleep(1)
        except BaseException:
            continue


@fault
def block_loop(row: dict) -> Any:
    """Seconds in which the event loop does nothing else."""
    time.sleep(_rng.choice([1, 3, 30]))
    return row


@fault
def odd_reward(row: dict) -> Any:
    """Rewards that are no number, or no usual one."""
    import numpy as np

    odd = [float("nan"), float("inf"), -float("inf"), 1e308, -1e308, None, "seven", "1", b"1", 10**400, True, 1j, {}]
    return _rng.choice([*odd, np.float32(1), np.array(1.0), np.array([1.0, 2.0]), np.nan, [1, 2], object()])


@fault
def odd_outcome(row: dict) -> Any:
    """What is no outcome, or one of another world."""
    from paceline.envs import Outcome as Ended

    ways = [
        lambda: Ended.solo(float("nan")),
        lambda: Ended({}),
        lambda: Ended({"ghost": 1.0}),
        lambda: Ended,
        lambda: play,
    ]
    return _rng.choice(ways)()


@fault
def change_row(row: dict) -> Any:
    """The row is the run's own: whatever is done to it must reach no other episode."""
    _rng.choice(
        [
            row.clear,
            lambda: row.update(answer="", messages=None, loop=row),
            lambda: row["messages"].append({"role": "user", "content": "more"}),
            lambda: row["messages"][0].update(content="copy: x"),
        ]
    )()
    return 0.0


@fault
def leave_thread(row: dict) -> Any:
    """A thread that outlives the run."""
    threading.Thread(target=time.sleep, args=(1e6,), daemon=_rng.random() < 0.5).start()
    return row


@fault
def leave_task(row: dict) -> Any:
    """A task that fails, or never ends, after its episode."""

    async def later() -> None:
        await asyncio.sleep(_rng.random())
        raise ValueError("late")

    _tasks.append(asyncio.ensure_future(_rng.choice([later, lambda: swallow_cancellation(row)])()))
    return row


@fault
def print_much(row: dict) -> Any:
    """Text on both streams, control codes among it."""
    print("\x1b[2J\0\r" * 50 + "x" * _rng.choice([10, 100_000]), file=_rng.choice([sys.stdout, sys.stderr]))
    return row


@fault
def clear_environment(row: dict) -> Any:
    """Environment variables are gone."""
    for name in list(os.environ):
        if name.startswith(("PACELINE", "TMPDIR", "HOME", "PATH")):
            del os.environ[name]
    return row


@fault
def disturb_globals(row: dict) -> Any:
    """State that every library shares."""
    import numpy as np
    import torch

    def other_folder() -> None:
        os.chdir("/")

    ways = [lambda: random.seed(0), lambda: np.random.seed(0), lambda: torch.manual_seed(0), other_folder]
    _rng.choice([*ways, lambda: sys.path.clear(), lambda: sys.setrecursionlimit(200)])()
    return row


@fault
def leave_process(row: dict) -> Any:
    """The process ends."""
    os._exit(_rng.choice([0, 1, 3]))
