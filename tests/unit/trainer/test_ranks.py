"""However samples are spread over ranks, the update is the same. The ranks are real processes, joined by gloo."""

import asyncio
import os
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from child_processes import Launched
from conftest import tiny_model
from paceline.config import trainer as config
from paceline.config.cluster import ParallelConfig
from paceline.data import encode
from paceline.data.sample import TokenScores
from paceline.model import trainable_parameters
from paceline.trainer import TorchTrainer
from paceline.trainer.torch.world import World, gather_samples
from run_once import once
from samples import make_batch, near_policy, rewarded

# A large eps: AdamW would turn the rounding of vanishing gradients into whole steps.
FAST = config.OptimizerConfig(lr=1e-2, eps=1e-3)
CASES = {
    "token": {"minibatches": 1},
    "sample": {"normalise": "sample", "loss": config.GSPOConfig()},
    "fixed": {"normalise": "fixed", "loss": config.PPOConfig(), "kl": config.KLConfig(), "entropy_coef": 0.01},
    "one rank has nothing": {"loss": config.CISPOConfig()},
    "minibatches": {"minibatches": 2, "proximal": config.ProximalConfig(), "loss": config.PPOConfig()},
    "critic": {"minibatches": 2, "critic": config.CriticConfig(), "loss": config.PPOConfig()},
    "one rank has nothing, critic": {
        "minibatches": 2,
        "critic": config.CriticConfig(),
        "kl": config.KLConfig(how="advantage"),
    },
    "one rank has no rewards": {"critic": config.CriticConfig()},
    "rollouts": {"minibatches": 2, "normalise": "sample", "loss": config.PPOConfig()},
    "rollouts, critic": {"normalise": "sample", "critic": config.CriticConfig()},
    "budget found": {"micro_batch_tokens": "auto"},
}


def batch_of(name: str) -> list:
    batch = near_policy(make_batch(5, count=8))
    if "rollouts" in name:  # of several samples, that the ranks take apart
        batch = rewarded(1, count=8) if "critic" in name else batch
        return [replace(sample, ticket=batch[i // 3].ticket) for i, sample in enumerate(batch)]
    if "critic" in name:
        return [*rewarded(1, count=6), *batch[6:]]
    return [*rewarded(1, count=1), *batch[1:]] if name == "one rank has no rewards" else batch


def share(name: str, rank: int) -> list:
    """Half of the batch, not of the work: how it is divided the ranks find out together."""
    batch = batch_of(name)
    if name.startswith("one rank has nothing"):
        return batch if rank == 0 else []
    return batch[:3] if rank == 0 else batch[3:]


def trained(samples: list, settings: dict, group=None) -> tuple[torch.Tensor, dict[str, float], tuple[bytes, bytes]]:
    model = tiny_model()
    parallel = ParallelConfig(ranks=1 if group is None else 2)
    trainer = TorchTrainer(
        model, config.TrainerConfig(threads=1, optimizer=FAST, parallel=parallel, **settings), group=group
    )
    reports = [asyncio.run(trainer.step(samples)) for _ in range(2)]
    trainer.close()
    assert not any(report.skipped for report in reports)
    weights = torch.cat([p.detach().view(-1) for p in trainable_parameters(model).values()])
    return weights, reports[-1].metrics, (reports[-1].scores.samples, reports[-1].scores.tokens)


def rank_main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )
    results = {name: trained(share(name, rank), settings, dist.group.WORLD) for name, settings in CASES.items()}
    batch = batch_of("token")
    with_all, budget = gather_samples(share("token", rank), World(dist.group.WORLD, torch.device("cpu")), 100 + rank)
    torch.save(results | {"together": (encode(with_all) == encode(batch), budget)}, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = once(tmp_path_factory, "ranks", fill)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


def fill(folder: Path) -> None:
    code = "import sys; from test_ranks import *; rank_main(int(sys.argv[1]), Path(sys.argv[2]))"
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": f"{here}{os.pathsep}{here.parents[1]}"}
    processes = [Launched([sys.executable, "-c", code, str(rank), str(folder)], env=environment) for rank in range(2)]
    assert [process.wait(240) for process in processes] == [0, 0]


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_make_the_update_of_one(ranks, name):
    alone, metrics, scores = trained(batch_of(name), CASES[name])
    moved = (alone - torch.cat([p.detach().view(-1) for p in trainable_parameters(tiny_model()).values()])).norm()
    (first, their_metrics, part), (second, same_metrics, rest) = (rank[name] for rank in ranks)
    assert torch.equal(first, second)
    assert (first - alone).norm() / moved < 1e-5
    assert their_metrics["micro_batches"] == same_metrics["micro_batches"]
    for key in metrics.keys() - {"train_tokens/s", "micro_batches"}:
        assert their_metrics[key] == pytest.approx(metrics[key], rel=1e-3, abs=1e-5), key
        assert same_metrics[key] == their_metrics[key], key
    assert their_metrics.keys() == metrics.keys()
    assert np.isfinite(list(metrics.values())).all()
    whole, merged = TokenScores(*scores).by_sample(), TokenScores.merged([TokenScores(*part), TokenScores(*rest)])
    theirs = merged.by_sample()
    assert theirs.keys() == whole.keys()
    for place, ours in whole.items():
        for column, tolerance in (("logprob", 1e-4), ("entropy", 1e-2), ("flags", 0)):
            np.testing.assert_allclose(theirs[place][column], ours[column], rtol=tolerance, atol=tolerance)


def test_every_rank_knows_the_whole_batch_in_its_order_and_the_smallest_budget(ranks):
    assert [rank["together"] for rank in ranks] == [(True, 100)] * 2
