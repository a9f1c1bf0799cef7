"""Thousands of episodes at once, with tools that take their time: does the engine ever wait?

2,000 episodes of the quickstart model are kept in flight. After each reply a tool sleeps for 0 to 2 seconds, then the
conversation goes on; four turns make an episode. What counts is the engine's idle share while all of them are running,
and what a turn costs the orchestrator: processor time of the event loop's thread, over turns.

Bars: idle under 5% (as a ratio: 5% over what was measured, at least 1), and under 1 ms a turn. One tool in a hundred
hangs until its deadline, one raises, one floods, one calls `sys.exit`: none of them may harm another episode.
"""

import argparse
import asyncio
import itertools
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from bars import Row, arguments, finish
from paceline.config import RunConfig
from paceline.config.env import CustomEnvConfig
from paceline.data import Ticket
from paceline.envs import Environment, Outcome
from paceline.envs.offloop import run_user_code
from paceline.orchestrator import Clock
from paceline.orchestrator.episodes import RolloutRunner
from paceline.rollout import SamplingClient
from paceline.runtime.local import RunParts, local_placement

TURNS = 4


def tool(seconds: float, trouble: str) -> str:
    """A user's tool as they come: synchronous, slow, and not always well behaved."""
    time.sleep(3600 if trouble == "hangs" else seconds)
    if trouble == "raises":
        raise ValueError("the tool broke")
    if trouble == "exits":
        sys.exit(3)
    return "x" * 10_000_000 if trouble == "floods" else "ok"


class SlowTools(Environment):
    """Talk, call, talk."""

    def __init__(self) -> None:
        self._played = itertools.count()
        self.harmed = 0
        """Episodes that failed though their own tool behaved."""

    def examples(self, split):
        rng = random.Random(0)
        return [{"word": "".join(rng.choices("abcdefghij", k=6)), "seed": i} for i in range(512)]

    async def play(self, example, seats):
        rng = random.Random(f"{example['seed']} {next(self._played)}")
        trouble = rng.choices(["", "hangs", "raises", "floods", "exits"], [96, 1, 1, 1, 1])[0]
        try:
            return await self._talk(example["word"], seats, rng, trouble)
        except Exception:
            self.harmed += not trouble
            raise

    async def _talk(self, word, seats, rng, trouble):
        messages = [{"role": "user", "content": f"reverse: {word}"}]
        for turn in range(TURNS):
            reply = await seats["policy"].chat(messages)
            if turn == TURNS - 1:
                break
            answer = await run_user_code(tool, rng.uniform(0, 2), trouble if turn == 1 else "", timeout=20.0)
            messages += [reply.message, {"role": "user", "content": f"reverse: {answer[:6]}"}]
        return Outcome.solo(1.0)


async def crowd(here: RunParts, client: SamplingClient, options: argparse.Namespace) -> dict[str, float]:
    player = RolloutRunner(client, Clock(), seed=0)
    course = here.envs["slow"]
    ends, turns = Counter(), 0
    begun, stop = 0, False
    running: set[asyncio.Task] = set()

    async def one(number: int) -> None:
        nonlocal turns
        ticket = Ticket(number, "slow", 0, number, number % len(course.rows))
        (rollout,) = await player.run_episode(course, course.rows[ticket.row], ticket, 0, number)
        turns += len(rollout.turns)
        ends["finished" if rollout.error is None else rollout.error.split(": ")[1][:24]] += 1

    def refill() -> None:
        nonlocal begun
        while not stop and len(running) < options.episodes:
            task = asyncio.create_task(one(begun))
            begun += 1
            running.add(task)
            task.add_done_callback(lambda done: (running.discard(done), refill()))

    refill()
    await asyncio.sleep(options.warm)
    wall, busy, own, before = time.perf_counter(), here.pool.busy_seconds, time.thread_time(), turns
    await asyncio.sleep(options.seconds)
    wall, busy = time.perf_counter() - wall, here.pool.busy_seconds - busy
    own, done = time.thread_time() - own, turns - before
    stop = True
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    return {"idle": max(0.0, 1 - busy / wall), "ms_per_turn": 1e3 * own / max(done, 1), "turns": done, **ends}


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--episodes", type=int, default=2000, help="kept in flight")
    parser.add_argument("--seconds", type=float, default=60, help="measured, after --warm")
    parser.add_argument("--warm", type=float, default=30)
    options = parser.parse_args()
    section = CustomEnvConfig(
        name="slow", import_path="benchmarks:none", timeout=300.0, group_size=1, algo={"type": "reward"}
    )
    config = RunConfig(env=[section], batch_size=1, group_size=1, staleness=1, eval={"every": 0})
    slow = {"slow": SlowTools()}

    async def measure(folder: Path) -> dict[str, float]:
        async with local_placement(config, folder, lambda text: None, slow) as here:
            client = here.make_client(config.sampling.model_copy(update={"max_tokens": 12}))
            return await crowd(here, client, options)

    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(Path(folder)))
    print(found)
    rows = [
        Row("engine idle", "", found["idle"], 0.05, "allowed", 0.05 / max(found["idle"], 1e-9), 1.0),
        Row("orchestrator", "ms a turn", found["ms_per_turn"], 1.0, "allowed", 1.0 / found["ms_per_turn"], 1.0),
        Row("episodes harmed by others", "", slow["slow"].harmed, 0, "allowed", float(not slow["slow"].harmed), 1.0),
    ]
    return finish(f"{options.episodes} episodes with slow tools", rows, options.json, found=found)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
