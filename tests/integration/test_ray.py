"""`placement = "ray"` on a real Ray of this machine: parts are spread, killed and added, and nothing is lost."""

import asyncio
import math
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from paceline.cluster import train
from paceline.config import load
from paceline.inference import Pool
from paceline.inference.base import GenerateRequest
from paceline.monitor import read_jsonl

ray = pytest.importorskip("ray", reason="needs the extra `ray`")

from paceline.cluster.ray.cluster import NAMESPACE, actor  # noqa: E402
from paceline.cluster.ray.engines import EngineActor, RayEngine  # noqa: E402

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.toml"
SMALL = ["--engine.max-running", "64", "--engine.max-context", "64"]


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    """One Ray for all tests here: it takes seconds to start."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False, configure_logging=False, namespace=NAMESPACE)
    yield
    ray.shutdown()


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def make(*overrides: str, file: str | Path = QUICKSTART):
        return load(str(file), ["--placement", "ray", *SMALL, *overrides]).config

    return make


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
from paceline.config.env import ReverseText as Config
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


def test_a_run_is_spread_and_leaves_one_run_directory(config, tmp_path):
    """Two ranks, an engine and a worker that grades. `make scale` does the same at length, and kills them."""
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


def test_an_engine_that_joins_late_gets_the_weights_before_it_serves(config, tmp_path):
    run = config("--name=grow")
    live = str(tmp_path)

    def engine(number: int) -> RayEngine:
        name = f"engine-{number}"
        arguments = [run.model_dump_json(), name, live]
        return RayEngine(actor(EngineActor, f"grow/{name}", arguments, {"CPU": 1}, again=True, at_once=64), name)

    async def story() -> None:
        from paceline.cluster.training import build_trainer

        first, second = engine(0), engine(1)
        trainer = build_trainer(run).trainer
        pool = Pool([first])
        trainer.version = 7
        await pool.load_weights(await trainer.weights())
        pool.add(second)
        asked = GenerateRequest(prompt_ids=(1, 2, 3), max_tokens=4)
        while len(await pool.policies()) < 2:
            await pool.generate(asked)
            await asyncio.sleep(0.05)
        ours, theirs = await pool.policies()
        assert ours == theirs
        assert ours.version == 7
        # A killed one comes back by itself, and with the weights of the pool.
        _, pid = await first.actor.whereabouts.remote()
        os.kill(pid, signal.SIGKILL)
        answers = await asyncio.gather(*(pool.generate(asked) for _ in range(16)))
        assert {version for answer in answers for version in answer.versions} == {7}
        assert len({tuple(answer.token_ids) for answer in answers}) == 1
        async with asyncio.timeout(120):
            while len(await pool.policies()) < 2:
                await pool.generate(asked)
                await asyncio.sleep(0.05)
        assert [policy.version for policy in await pool.policies()] == [7, 7]
        pool.close()
        trainer.close()
        first.close()
        second.close()

    asyncio.run(story())
