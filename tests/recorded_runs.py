"""Run directories as a run leaves them, without training: written by the real recorder, with made-up figures. And the
web app that shows them."""

import math
import random
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from paceline.config import dump, load
from paceline.data import Ticket
from paceline.observe.monitor import RunDirectory, RunOutcome, RunPlan, RunRecorder
from paceline.observe.record import RolloutRecorder
from paceline.observe.web import build_app
from paceline.rollout import Rollout, Turn

EPOCH = 1_790_000_000.0


class Told:
    """A run that is told step by step. It holds the directory's lock until it ends or is let go."""

    def __init__(self, runs: Path, name: str, steps: int = 40, seed: int = 0, began: float = EPOCH, **changes) -> None:
        self.seed, self.steps, self.done, self.now = seed, steps, 0, began
        flags = [f"--{key}={value}" for key, value in changes.items()]
        self.config = load(
            None, [f"--name={name}", f"--runs={runs}", f"--seed={seed}", f"--steps={steps}", *flags]
        ).config
        self.path = runs / name
        self.directory = RunDirectory.claim(self.path)
        self.directory.begin(dump(self.config))
        self.recorder = RunRecorder(self.path, clock=lambda: self.now)
        self.envs = tuple(env.name for env in self.config.env)
        plan = RunPlan(name, self.path, steps, 0, self.config.model_dump(), self.envs, "cpu", 603_904)
        self.recorder.begin(plan)
        self.recorder.phase("evaluating")
        self.recorder.step(0, self._evaluation(0))

    def step(self, count: int = 1) -> "Told":
        for _ in range(count):
            self.done += 1
            self.now += 0.9
            metrics = self._metrics(self.done)
            if self.done % 10 == 0:
                metrics |= self._evaluation(self.done)
                self.now += 0.4
            self.recorder.step(self.done, metrics)
        return self

    def note(self, text: str) -> "Told":
        self.recorder.note(text)
        return self

    def end(self, status: str = "finished", message: str = "") -> "Told":
        self.recorder.end(RunOutcome(status, self.done, message))
        return self.let_go()

    def let_go(self) -> "Told":
        """The process is gone; without an end before, the run has crashed."""
        self.recorder.close()
        self.directory.release()
        return self

    def _noise(self, step: int, what: str) -> float:
        return random.Random(f"{self.seed} {step} {what}").gauss(0, 1)

    def _evaluation(self, step: int) -> dict[str, float]:
        out = {"time/eval": 0.4}
        for env in self.envs:
            value = self._reward(step, env) + 0.01 * self._noise(step, "eval" + env)
            out |= {f"eval/{env}/reward": value, f"eval/{env}/exact": 0.9 * value, f"eval/{env}/length": 7.0}
        return out

    def _reward(self, step: int, env: str) -> float:
        return 0.28 + 0.65 / (1 + math.exp(-(step - 0.4 * self.steps - len(env) % 5) / (0.1 * self.steps)))

    def _metrics(self, step: int) -> dict[str, float]:
        out: dict[str, float] = {}
        for env in self.envs:
            reward = self._reward(step, env) + 0.03 * self._noise(step, env)
            out |= {f"reward/{env}/mean": reward, f"reward/{env}/std": 0.3, f"metric/{env}/exact": 0.9 * reward}
        loss = 0.01 * self._noise(step, "loss")
        share = 0.5 + 0.1 * self._noise(step, "busy")
        return out | {
            "length": 7 + 0.2 * self._noise(step, "length"),
            "trajectory_length": 25 + 0.4 * self._noise(step, "trajectory"),
            "truncated_ratio": max(0.0, 0.02 + 0.01 * self._noise(step, "cut")),
            "turns": 1.0,
            "staleness/min": 0.0,
            "staleness/mean": 0.9,
            "staleness/max": 1.0,
            "batch/rollouts": 128.0,
            "dropped/zero_advantage": float(max(0, round(2 + step / self.steps * 6 + self._noise(step, "zero")))),
            "dropped/stale": float(step % 7 == 0),
            "dropped/failed_rollouts": 0.0,
            "drop_ratio": 0.1,
            "loss": loss + 0.002,
            "loss/rl": loss,
            "loss/teacher_kl": 0.002,
            "entropy": 0.17 * math.exp(-step / self.steps) + 0.005 * self._noise(step, "entropy"),
            "ppo_kl": abs(0.002 * self._noise(step, "kl")),
            "sampler_kl": abs(0.003 * self._noise(step, "sampler")),
            "mismatch_kl": abs(0.0004 * self._noise(step, "mismatch")),
            "clip_fraction": 0.0,
            "ratio": 1.0,
            "grad_norm": 0.4 + 0.08 * abs(self._noise(step, "norm")),
            "lr": 2e-4,
            "tokens/s": 2800 + 200 * self._noise(step, "speed"),
            "train_tokens/s": 11_000 + 600 * self._noise(step, "train"),
            "time/sample": 0.2,
            "time/score": 0.02,
            "time/train": 0.5,
            "time/publish": 0.06,
            "time/step": 0.86,
            "wait_time_ratio": 0.2 / 0.7,
            "overlap_ratio": 0.6,
            "busy/trainer": 0.5 / 0.86,
            "busy/device": 0.7,
            "memory/device": 6e9,
            "engine/batch": 60 + 4 * self._noise(step, "batch"),
            "engine/waiting": 2.0,
            "engine/preempted": 0.0,
            "engine/cache_used": 0.4,
            "engine/shared_prompts": 0.8,
            "busy/sampler": max(0.0, min(1.0, share)),
        }


def record_rewards(path: Path, step: int, state: str, rewards: Sequence[float]) -> None:
    """Write one rollout for each row to the record of a run: `trained` in a batch, or `evaluated` after it."""
    writer = RolloutRecorder(path)
    writer.begin(RunPlan(path.name, path, None, step, {}, ("env",), "cpu", 0))
    rollouts = [
        Rollout(ticket=Ticket(row, "env", 0, row, row), member=0, turns=[_word(row)], reward=float(reward))
        for row, reward in enumerate(rewards)
    ]
    writer.finished_rollouts(step, state, rollouts)
    writer.close()


def _word(row: int) -> Turn:
    return Turn(prompt_ids=[1, row], completion_ids=[2], logprobs=[-0.5], versions=[0], finish="stop", temperature=1.0)


def torn(path: Path) -> None:
    """Leave half a line at the end and a line of nonsense in the middle, as a full disk or a bad copy does."""
    data = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*data[:2], b"\x00\xffnot json\n", *data[2:], b'{"step": 99, "time']))


@contextmanager
def served(folder: Path, key: str | None = None) -> Generator[str]:
    """The web app over a folder, at a real address, until the block ends."""
    server = uvicorn.Server(uvicorn.Config(build_app(folder, key), port=0, log_config=None, lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 120
    while not server.started and thread.is_alive() and time.monotonic() < deadline:
        thread.join(0.02)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10)
