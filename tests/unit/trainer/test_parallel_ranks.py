"""Two ranks that share a model by FSDP2, its matrices or its sequences make the update of one process.

The short form of `test_sharding.py`, `test_tensor_parallel.py` and `test_context_parallel.py`, whose many cases take
minutes (`make scale`): one case of each, in two real processes joined by gloo.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_context_parallel import CASES as CONTEXT
from test_context_parallel import check_update
from test_sharding import CASES as SHARDED
from test_sharding import share, trained
from test_tensor_parallel import CASES as TENSOR

from child_processes import Launched
from paceline.trainer.torch.world import destroy_group, join
from run_once import once

CASES = {"fsdp2": replace(SHARDED["full"], worlds=(2,)), "tensor": TENSOR["held"], "context": CONTEXT["held"]}


def rank_main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    group = join(rank, 2, f"file://{folder}/meeting", "gloo", seconds=120)
    results = {name: trained(case, share(case, rank, 2), group, 2) for name, case in CASES.items()}
    torch.save(results, folder / f"rank{rank}.pt")
    destroy_group()


def run_both(folder: Path) -> None:
    code = "import sys; from test_parallel_ranks import *; rank_main(int(sys.argv[1]), Path(sys.argv[2]))"
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": f"{here}{os.pathsep}{here.parents[1]}"}
    processes = [Launched([sys.executable, "-c", code, str(rank), str(folder)], env=environment) for rank in range(2)]
    assert [process.wait(240) for process in processes] == [0, 0]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> dict[int, list[dict]]:
    folder = once(tmp_path_factory, "parallel", run_both)
    return {2: [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]}


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_make_the_update_of_one(ranks, name):
    check_update(CASES[name], ranks, name)
