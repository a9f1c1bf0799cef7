"""Outside the default suite (`make scale`).

Machines that join a cluster while a run is under way: real nodes of a real Ray, all on this machine.
"""

import asyncio
import os
from pathlib import Path

import pytest

from paceline.clients import Pool
from paceline.config import load

ray = pytest.importorskip("ray", reason="needs the extra `ray`")

from ray.cluster_utils import Cluster  # noqa: E402
from ray.util import placement_group_table  # noqa: E402

from paceline.runtime.ray.place import NAMESPACE, RayParts, Reservation, ResourceNeeds, grow_pool  # noqa: E402
from paceline.runtime.torch_parts import build_trainer  # noqa: E402

pytestmark = pytest.mark.skipif(os.environ.get("PACELINE_SCALE") != "1", reason="takes minutes: `make scale`")
QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.toml"
SMALL = ["--engine.max-running=8", "--engine.max-context=64", "--cluster.engine-cpus=2", "--cluster.most-engines=2"]


@pytest.fixture
def cluster():
    """A head with three cores, and more nodes as a test wants them."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False})
    ray.init(address=made.address, log_to_driver=False, configure_logging=False, namespace=NAMESPACE)
    yield made
    ray.shutdown()
    made.shutdown()


def held() -> list[str]:
    """The states of all groups of places that are not gone."""
    return [one["state"] for one in placement_group_table().values() if one["state"] != "REMOVED"]


def test_a_node_that_joins_gets_an_engine_once_one_machine_has_room_for_it(cluster, tmp_path, monkeypatch):
    """An engine takes two cores. The first leaves one on the head; two nodes of one core more leave no machine with
    two, whatever all have together; a node of two cores is room. Whatever was asked for and not given is given back."""
    monkeypatch.chdir(tmp_path)
    config = load(str(QUICKSTART), ["--name=grows", "--placement=ray", "--cluster.rank-cpus=0", *SMALL]).config

    async def story() -> None:
        needs = ResourceNeeds.of(config, 0)
        room = await Reservation.reserve(needs)
        parts = RayParts(config, room, needs, tmp_path / "live")
        first = parts.engine(0)
        pool, trainer = Pool([first]), build_trainer(config).trainer
        trainer.version = 5
        await pool.load_weights(await trainer.weights())
        async with grow_pool(parts, pool, 2):
            cluster.add_node(num_cpus=1)  # here, for its signal handlers want the main thread
            cluster.add_node(num_cpus=1)
            await asyncio.sleep(1)  # time enough for a mistake
            assert sorted(held()) == ["CREATED", "PENDING"]
            assert len(await pool.policies()) == 1
            cluster.add_node(num_cpus=2)
            while len(policies := await pool.policies()) < 2:  # noqa: ASYNC110 - another process comes up
                await asyncio.sleep(0.05)
            assert policies[0] == policies[1]
            assert policies[1].version == 5
        pool.close()
        trainer.close()
        first.close()
        room.release()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(Reservation.when_free([{"CPU": 64}]), 1)
        while held():  # noqa: ASYNC110 - Ray removes them in its own time
            await asyncio.sleep(0.05)

    asyncio.run(asyncio.wait_for(story(), 800))
