"""Outside the default suite (`make scale`): ranks that host their engines reach the bar of one process."""

import os
import sys
from pathlib import Path

import pytest

from child_processes import run
from paceline.observe.monitor import read_jsonl

pytestmark = pytest.mark.skipif(os.environ.get("PACELINE_SCALE") != "1", reason="takes minutes: `make scale`")
QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.toml"
TORCHRUN = ["torch.distributed.run", "--nproc-per-node", "2", "-m"]


@pytest.mark.parametrize("starter", [[], TORCHRUN], ids=["alone", "torchrun"])
@pytest.mark.parametrize("staleness", [0, 1])
def test_ranks_with_engines_of_their_own_reach_the_bar_of_one_process(tmp_path, starter, staleness):
    ranks = [] if starter else ["--trainer.parallel.ranks", "2"]
    more = [*ranks, "--trainer.parallel.shard", "full", "--engine.max_context", "64", "--staleness", str(staleness)]
    command = [sys.executable, "-m", *starter, "paceline", "train", str(QUICKSTART), "--placement", "colocated", *more]
    done = run(command, timeout=800, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = read_jsonl(tmp_path / "runs" / "quickstart" / "metrics.jsonl")
    exact = [line["eval/reverse-text/exact"] for line in metrics if "eval/reverse-text/exact" in line]
    assert exact[0] <= 0.30
    assert exact[-1] >= 0.80
    assert max(line.get("staleness/max", 0) for line in metrics) <= staleness
