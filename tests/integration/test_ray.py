"""Engines as actors of a real Ray of this machine. Whole runs, and what is killed in them, are in `tests/scale`."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from paceline.config import load
from paceline.inference import Pool
from paceline.inference.base import GenerateRequest

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
