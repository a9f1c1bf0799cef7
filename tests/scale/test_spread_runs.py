"""Outside the default suite (`make scale`): runs spread over a local Ray, whose parts are killed."""

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
import test_ray

from paceline.observe.monitor import read_jsonl
from paceline.runtime import train

ray = pytest.importorskip("ray", reason="needs the extra `ray`")

from paceline.runtime.ray.place import NAMESPACE  # noqa: E402

pytestmark = pytest.mark.skipif(os.environ.get("PACELINE_SCALE") != "1", reason="takes minutes: `make scale`")
local_ray, config = test_ray.local_ray, test_ray.config


def clean(root: Path, batches: int) -> None:
    """Every ticket that ended did so once, and every step trained a whole batch."""
    records = read_jsonl(root / "tickets.jsonl")
    ended = Counter(r["number"] for r in records if r["state"] in ("trained", "dropped"))
    assert set(ended.values()) == {1}
    steps = Counter(r["step"] for r in records if r["state"] == "trained")
    assert set(steps) == set(range(1, batches + 1))
    assert len(set(steps.values())) == 1
    assert [line["step"] for line in read_jsonl(root / "metrics.jsonl") if line["step"]] == list(range(1, batches + 1))


GRADED = """
from paceline.config.env import ReverseTextConfig as Config
from paceline.envs import Outcome
from paceline.envs.reverse_text import ReverseText
from paceline.envs.workers import Workers


def grade(given, wanted):
    return float(given == wanted), sum(a == b for a, b in zip(given, wanted)) / max(len(given), len(wanted), 1)


class Graded(ReverseText):
    def __init__(self):
        super().__init__(Config(eval_examples=32))
        self._workers = Workers(1)

    async def play(self, example, seats):
        reply = await seats["policy"].chat(example["messages"])
        exact, partial = await self._workers.call(__file__ + ":grade", [reply.text, example["answer"]], 60)
        return Outcome.solo(max(exact, 0.3 * partial), exact=exact)
"""


RUN_FILE = """
name = "spread"
steps = 9
batch_size = 32
[model]
name = "paceline:quickstart"
[sampling]
max_tokens = 16
[cluster]
engines = 2
workers = 1
[trainer.parallel]
ranks = 2
[checkpoint]
every = 2
[eval]
every = 0
[[env]]
type = "custom"
name = "graded"
import_path = "graded.py:Graded"
"""


class Watcher(threading.Thread):
    """Does something to a run once a step is reached."""

    def __init__(self, root: Path, plan: dict[int, Callable[[], None]]) -> None:
        super().__init__(daemon=True)
        self._root, self._plan, self.done = root, dict(plan), []
        self.start()

    def run(self) -> None:
        while self._plan:
            step = min(self._plan)
            with contextlib.suppress(OSError):
                if any(line["step"] >= step for line in read_jsonl(self._root / "metrics.jsonl")):
                    self._plan.pop(step)()
                    self.done.append(step)
            time.sleep(0.05)


def kill(run: str, part: str) -> None:
    _, pid = ray.get(ray.get_actor(f"{run}/{part}", namespace=NAMESPACE).host_and_pid.remote(), timeout=600)
    os.kill(pid, signal.SIGKILL)


def test_an_engine_a_rank_and_a_worker_are_killed_and_nothing_is_lost(config, tmp_path):
    """Two ranks, two engines and a worker that grades; each kind loses one, and the run goes on by itself."""
    (tmp_path / "graded.py").write_text(GRADED)
    (tmp_path / "run.toml").write_text(RUN_FILE)
    run = config(file="run.toml")
    root = tmp_path / "runs" / "spread"
    parts = {2: "worker-0", 4: "engine-0", 6: "rank-1"}
    watcher = Watcher(root, {step: partial(kill, "spread", part) for step, part in parts.items()})
    result = train(run, overwrite=True)
    assert result.outcome.status == "finished", result.outcome.message
    assert watcher.done == [2, 4, 6]
    clean(root, 9)
    notes = " ".join(event.get("text", "") for event in read_jsonl(root / "events.jsonl"))
    assert "engine-0 serves" in notes
    assert "rank 1 of 2 is lost" in notes
    assert all(math.isfinite(line["loss"]) for line in result.metrics)
    logs = {log.name for log in (root / ".live").glob("*.log")}
    assert logs == {"engine-0.log", "engine-1.log", "rank-0.log", "rank-1.log", "worker-0.log"}


def test_a_run_is_spread_and_leaves_one_run_directory(config, tmp_path):
    """Two ranks, an engine and a worker that grades."""
    (tmp_path / "graded.py").write_text(GRADED)
    (tmp_path / "run.toml").write_text(RUN_FILE)
    run = config("--steps=3", "--cluster.engines=1", file="run.toml")
    result = train(run)
    assert result.outcome.status == "finished", result.outcome.message
    root = tmp_path / "runs" / "spread"
    clean(root, 3)
    assert all(math.isfinite(line["loss"]) for line in result.metrics)
    logs = {log.name for log in (root / ".live").glob("*.log")}
    assert logs == {"engine-0.log", "rank-0.log", "rank-1.log", "worker-0.log"}
    assert (root / "export" / "model.safetensors").is_file()
    assert len(list((root / "checkpoints" / "step-000003" / "trainer").glob("*.safetensors"))) == 2
