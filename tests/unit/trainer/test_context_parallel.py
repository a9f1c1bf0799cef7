"""Ranks that share sequences make the update of one that has them whole. They are real processes, joined by gloo."""

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from test_sharding import CASES as SHARDED
from test_sharding import SCORED, Case, batch, go_on, moved, share, trained, written

from child_processes import Launched
from paceline.config import trainer as config
from paceline.config.cluster import ParallelConfig
from paceline.model import PackedPlan
from paceline.model.attention import Scores
from paceline.trainer.torch.forward import ContextShards, SlicedPlan, assign_slices
from paceline.trainer.torch.world import Ranks, destroy_group, join
from run_once import once
from samples import make_batch, near_policy, rewarded

PPO = {"loss": config.PPOConfig()}
HELD = {"kl": config.KLConfig(), "entropy_coef": 0.01, **PPO}
CASES = {
    "scored": Case(SCORED | {"micro_batch_tokens": 64}, shard="none", context=2),
    "held": Case(HELD, shard="none", context=2),
    "by sequence": Case({"loss": config.GSPOConfig(), "clip_skip_threshold": 0.3}, shard="none", context=2),
    "recomputed": Case({"gradient_checkpointing": True}, shard="none", context=2),
    "lora": Case(HELD, shard="none", model="lora", context=2),
    "clipped": Case(SHARDED["clipped"].settings, context=2),
    "full": Case(SCORED | {"micro_batch_tokens": 128}, context=2, worlds=(4,)),
    "none": Case(HELD, shard="none", context=2, worlds=(4,)),
    "hybrid": Case(HELD, shard="hybrid", context=2, worlds=(4,)),
}
SAVED = {2: "held", 4: "hybrid"}
SHORT = Case({"micro_batch_tokens": 1}, shard="none", context=4, worlds=(4,))
CRITIC = Case({"minibatches": 2, "critic": config.CriticConfig(), **PPO}, shard="none", context=2)
LENGTHS = (37, 1, 16, 2, 5)


def attended(lengths: tuple[int, ...], window: int | None, group=None) -> list[torch.Tensor]:
    """What comes out of attention and flows back into its arguments, for whole sequences or a rank's part of them."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((4, 8), (2, 8), (2, 8))
    q, k, v = (torch.randn(sum(lengths), *size, generator=generator).requires_grad_() for size in sizes)
    weights = torch.randn(q.shape, generator=generator)
    if group is None:
        plan, positions = PackedPlan(list(lengths), "cpu"), np.arange(sum(lengths))
    else:
        ranks = Ranks(group, torch.device("cpu"), ParallelConfig(ranks=2, context=2))
        shards = ContextShards(ranks.context, lengths)
        plan, positions = SlicedPlan(shards, torch.device("cpu")), shards.own_positions
    out = plan.attend(0, *(x[positions] for x in (q, k, v)), Scores(0.3, window))
    (out * weights[positions]).sum().backward()
    grads = [x.grad for x in (q, k, v) if x.grad is not None]
    return [torch.zeros(q.shape).index_copy(0, torch.from_numpy(positions), out.detach()), *grads]


def critic_batch() -> list:
    return [*rewarded(1, count=6), *batch()[6:]]


def short_batch() -> list:
    """Some samples of two and three tokens, for four ranks."""
    return [*near_policy(make_batch(7, count=3, longest=4)), *batch()[4:7:2]]


def cases_main(rank: int, world: int, folder: Path, cases: Mapping[str, Case], saved: Mapping[int, str]) -> dict:
    """What a rank sees: the cases of so many ranks, and the checkpoints it writes and goes on from."""
    torch.set_num_threads(1)
    group = join(rank, world, f"file://{folder}/meeting{world}", "gloo", seconds=120)
    results: dict = {}
    for name, case in cases.items():
        if world in case.worlds:
            results[name] = trained(case, share(case, rank, world), group, world)
    case = cases[saved[world]]
    results["written"] = written(folder / f"ranks{world}", case, rank, world, group)
    results["resumed"] = go_on(folder / f"one{world}", case, rank, world, group)
    return results


def rank_main(rank: int, world: int, folder: Path) -> None:
    results = cases_main(rank, world, folder, CASES, SAVED)
    group = torch.distributed.group.WORLD
    if world == 2:
        results["critic"] = trained(CRITIC, critic_batch(), group, world)
        results["attended"] = {window: attended(LENGTHS, window, group) for window in (None, 4)}
    else:
        results["short"] = trained(SHORT, short_batch(), group, world)
    torch.save(results, folder / f"rank{rank}of{world}.pt")
    destroy_group()


def run_ranks(module: str, folder: Path, cases: Mapping[str, Case], saved: Mapping[int, str]) -> None:
    """Each world's ranks one world after the other, beside the checkpoints one process wrote of the same cases."""
    code = f"import sys; from {module} import *; rank_main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))"
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": f"{here}{os.pathsep}{here.parents[1]}"}
    for world in saved:
        alone = whole(cases[saved[world]])
        torch.save(written(folder / f"one{world}", alone, 0, 1, None), folder / f"one{world}.pt")
        commands = [[sys.executable, "-c", code, str(rank), str(world), str(folder)] for rank in range(world)]
        processes = [Launched(command, env=environment) for command in commands]
        assert [process.wait(240) for process in processes] == [0] * world


def seen(folder: Path, saved: Mapping[int, str]) -> dict[int, list[dict]]:
    return {world: [torch.load(folder / f"rank{rank}of{world}.pt") for rank in range(world)] for world in saved}


def whole(case: Case) -> Case:
    """The same for one process."""
    return replace(case, shard="none", tensor=1, context=1)


def check_update(case: Case, ranks: Mapping[int, list[dict]], name: str, samples: list | None = None) -> None:
    """The update, and all that is reported of it, are those of one process."""
    alone, metrics = trained(whole(case), batch() if samples is None else samples)
    for world in case.worlds:
        weights, theirs = ranks[world][0][name]
        assert moved(whole(case), alone, weights) < 1e-5
        assert theirs.keys() == metrics.keys()
        for key in metrics.keys() - {"train_tokens/s", "micro_batches"}:
            assert theirs[key] == pytest.approx(metrics[key], rel=1e-3, abs=1e-5), key
        for other in ranks[world][1:]:
            others, same = other[name]
            assert not len(others)  # weights leave from the first rank
            for key in metrics.keys() - {"train_tokens/s", "micro_batches"}:
                assert same[key] == pytest.approx(theirs[key], rel=1e-6), key


def check_checkpoints(case: Case, folder: Path, world: int, ranks: list[dict]) -> None:
    """One process goes on from the ranks' checkpoint, and they from one's; what they publish and export is the same."""
    plain = whole(case)
    alone, first = torch.load(folder / f"one{world}.pt"), ranks[0]
    assert moved(plain, alone["unbroken"], first["written"]["unbroken"]) < 1e-5
    assert moved(plain, alone["unbroken"], first["written"]["resumed"]) < 1e-5
    assert moved(plain, alone["unbroken"], first["resumed"]) < 1e-5
    assert moved(plain, alone["unbroken"], go_on(folder / f"ranks{world}", plain, 0, 1, None)) < 1e-5
    published = first["written"]["first"]
    assert list(published) == list(alone["first"])
    assert all(torch.equal(tensor, published[name]) for name, tensor in alone["first"].items())
    for rank in ranks:
        assert rank["written"]["canary"] == pytest.approx(alone["canary"], abs=1e-4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    if os.environ.get("PACELINE_SCALE") != "1":
        pytest.skip("ranks that share a model take half a minute: `make scale`")
    return once(tmp_path_factory, "context", lambda at: run_ranks("test_context_parallel", at, CASES, SAVED))


@pytest.fixture(scope="module")
def ranks(folder):
    return seen(folder, SAVED)


@pytest.mark.parametrize("name", CASES)
def test_ranks_that_share_sequences_make_the_update_of_one(ranks, name):
    check_update(CASES[name], ranks, name)


def test_a_critic_learns_the_same_from_shared_sequences(ranks):
    check_update(CRITIC, ranks, "critic", critic_batch())


def test_ranks_without_a_token_change_nothing(ranks):
    check_update(SHORT, ranks, "short", short_batch())


@pytest.mark.parametrize("world", SAVED)
def test_checkpoints_go_from_shared_sequences_to_whole_ones_and_back(ranks, folder, world):
    check_checkpoints(CASES[SAVED[world]], folder, world, ranks[world])


@pytest.mark.parametrize("window", [None, 4])
def test_slices_attend_as_their_sequence_does(ranks, window):
    whole = attended(LENGTHS, window)
    parts = [rank["attended"][window] for rank in ranks[2]]
    for expected, one, other in zip(whole, *parts, strict=True):
        torch.testing.assert_close(one + other, expected)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_token_is_dealt_once_and_the_work_evenly(size):
    lengths = [1, 2, 500, 7, 16, 33, 1000]
    shares = assign_slices(lengths, size)
    taken = sorted((s.at + s.start, s.at + s.end) for share in shares for s in share)
    assert [end for _, end in taken] == [start for start, _ in taken[1:]] + [sum(lengths)]
    assert all(a.at + a.end <= b.at + b.start for share in shares for a, b in pairwise(share))
    work = [sum((s.start + 1 + s.end) * (s.end - s.start) / 2 for s in share) for share in shares]
    assert max(work) < 1.05 * sum(work) / size
