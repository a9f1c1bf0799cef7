"""Outside the default suite (`make scale`).

New weights under a real Ray of this machine: broadcast to all engines, and lost with the process that held them.
"""

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from paceline.clients import Pool
from paceline.config import load
from paceline.trainer import TrainerLost
from paceline.weights.update import ServedPolicy, WeightUpdate, fingerprint

ray = pytest.importorskip("ray", reason="needs the extra `ray`")

from paceline.runtime.ray.engines import EngineActor, ObjectTensors, RayEngine  # noqa: E402
from paceline.runtime.ray.place import NAMESPACE, actor  # noqa: E402
from paceline.runtime.ray.ranks import RankActor, WeightsGroup  # noqa: E402

pytestmark = pytest.mark.skipif(os.environ.get("PACELINE_SCALE") != "1", reason="takes minutes: `make scale`")
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
    return lambda *overrides: load(str(QUICKSTART), ["--placement", "ray", *SMALL, *overrides]).config


def test_a_broadcast_reaches_all_engines_at_once_and_the_dead_by_the_object_store(config, tmp_path):
    run = config("--name=broadcast")

    async def story() -> None:
        from paceline.runtime.torch_parts import build_trainer

        trainer = build_trainer(run).trainer
        update = await trainer.weights()
        text = run.model_dump_json()
        rank = actor(RankActor, "cast/rank", [text, "rank-0", str(tmp_path)], {"CPU": 1}, again=False, at_once=64)
        group = WeightsGroup(lambda: rank, seconds=60.0)
        engines = []
        for number in range(2):
            arguments = [text, f"engine-{number}", str(tmp_path)]
            started = actor(EngineActor, f"cast/{number}", arguments, {"CPU": 1}, again=True, at_once=64)
            engines.append(RayEngine(started, f"engine-{number}", group))
        pool = Pool(engines)
        await asyncio.gather(*(part.host_and_pid.remote() for part in (rank, *(engine.actor for engine in engines))))

        async def publish(version: int) -> None:
            tensors = ObjectTensors.put({name: tensor + version for name, tensor in update.tensors.items()})
            expected = fingerprint(tensors.items())
            await pool.load_weights(WeightUpdate(version, tensors, expected=expected))
            async with asyncio.timeout(600):
                while len(held := await pool.policies()) < 2:  # noqa: ASYNC110 - another process comes back
                    await asyncio.sleep(0.05)
            assert held == [ServedPolicy(version, expected)] * 2

        await publish(1)
        await publish(2)
        assert group.broadcasts == 2
        met = group._met
        assert met is not None
        assert set(met[1]) == set(engines)
        # One dies under the next: the other has it at once, the dead one when it is back, and then both meet anew.
        _, pid = await engines[1].actor.host_and_pid.remote()
        os.kill(pid, signal.SIGKILL)
        await publish(3)
        await publish(4)
        assert group.broadcasts == 4
        assert group._met is not None
        assert set(group._met[1]) == set(engines)
        pool.close()
        trainer.close()
        for engine in engines:
            engine.close()
        ray.kill(rank)

    asyncio.run(story())


def test_weights_that_the_object_store_lost_are_told_at_once_and_lead_back_to_the_checkpoint(config, tmp_path):
    run = config("--name=lost")

    class Owner:
        def put(self):
            return [ray.put(np.zeros(1 << 20, np.uint8))]

    async def story() -> None:
        arguments = [run.model_dump_json(), "engine-0", str(tmp_path)]
        started = actor(EngineActor, "lost/0", arguments, {"CPU": 1}, again=True, at_once=64)
        engine = RayEngine(started, "engine-0")
        pool = Pool([engine])
        owner = ray.remote(Owner).options(num_cpus=1).remote()
        (reference,) = ray.get(owner.put.remote(), timeout=600)
        ray.kill(owner)  # the owner of the object is gone, and the object with it
        async with asyncio.timeout(600):
            with pytest.raises(TrainerLost, match="weights"):
                await pool.load_weights(WeightUpdate(1, ObjectTensors(reference)))
        assert (await engine.policy()).version == 0
        pool.close()
        engine.close()

    asyncio.run(story())
