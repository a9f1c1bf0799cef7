"""Outside the default suite (`make scale`): two ranks and two engines reach the bar of one process, and a rank sharded
by FSDP2 does too."""

import os
from pathlib import Path

import pytest

from paceline.config import load
from paceline.runtime import train
from paceline.util.private_folder import shorten_ray_sockets

ray = pytest.importorskip("ray", reason="needs the extra `ray`")

pytestmark = pytest.mark.skipif(os.environ.get("PACELINE_SCALE") != "1", reason="takes minutes: `make scale`")
QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.toml"


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    shorten_ray_sockets()
    ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


@pytest.mark.parametrize("shard", ["none", "full"])
def test_two_ranks_and_two_engines_reach_the_bar_of_one_process(tmp_path, monkeypatch, shard):
    monkeypatch.chdir(tmp_path)
    spread = [
        "--placement=ray",
        "--cluster.engines=2",
        "--trainer.parallel.ranks=2",
        f"--trainer.parallel.shard={shard}",
    ]
    config = load(str(QUICKSTART), [*spread, "--name=spread", "--engine.max_context=64"]).config
    result = train(config)
    assert result.outcome.status == "finished", result.outcome.message
    exact = [line["eval/reverse-text/exact"] for line in result.metrics if "eval/reverse-text/exact" in line]
    assert exact[0] <= 0.30
    assert exact[-1] >= 0.80
    assert max(line.get("staleness/max", 0) for line in result.metrics) <= 1
