"""Laws of packing: the fast first fit is the plain one, and ranks in lockstep get equal work and all of it."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data import Cost, Sample, balanced, first_fit_decreasing, fold, imbalance, local, lockstep, pack

laws = settings(max_examples=200, deadline=None)
lengths_lists = st.lists(st.integers(1, 40), max_size=60)
ranks_counts = st.integers(1, 9)
budgets = st.integers(1, 60)
costs = st.builds(Cost, st.floats(0.1, 10), st.floats(0, 1))
SEVEN_B = Cost.of(hidden=3584, layers=28, intermediate=18944, heads=28, kv_heads=4, head_dim=128, vocabulary=152_064)


def plain_first_fit(lengths: list[int], budget: int) -> list[list[int]]:
    """The definition: each, the longest first, into the first bin with room."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = next((b for b, free in enumerate(room) if free >= lengths[index]), None)
        if place is None:
            place = len(bins)
            bins.append([])
            room.append(budget)
        bins[place].append(index)
        room[place] -= lengths[index]
    return bins


@settings(max_examples=500, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=120), st.integers(1, 60))
def test_first_fit_is_its_definition(lengths, budget):
    assert first_fit_decreasing(lengths, budget) == plain_first_fit(lengths, budget)


@pytest.mark.parametrize("seed", range(3))
def test_first_fit_is_its_definition_on_many(seed):
    lengths = np.random.default_rng(seed).lognormal(6, 1, 2000).astype(int).tolist()
    assert first_fit_decreasing(lengths, 4096) == plain_first_fit(lengths, 4096)


@laws
@given(lengths_lists, ranks_counts, budgets, costs)
def test_ranks_share_all_samples_in_equally_many_packs_within_the_budget(lengths, ranks, budget, cost):
    cut = balanced(lengths, ranks, budget, cost)
    assert len(cut) == ranks
    assert len({len(bins) for bins in cut}) == 1
    packs = [members for bins in cut for members in bins]
    assert sorted(itertools.chain(*packs)) == list(range(len(lengths)))
    assert all(len(members) <= 1 or sum(lengths[i] for i in members) <= budget for members in packs)
    assert len(cut[0]) == math.ceil(len(first_fit_decreasing(lengths, budget)) / ranks)


@laws
@given(lengths_lists, ranks_counts, budgets, costs)
def test_the_cut_is_a_pure_function_and_only_the_ratio_of_costs_counts(lengths, ranks, budget, cost):
    cut = balanced(lengths, ranks, budget, cost)
    assert cut == balanced(np.array(lengths, int), ranks, budget, cost)
    assert cut == balanced(tuple(lengths), ranks, budget, Cost(4 * cost.linear, 4 * cost.attention))


@laws
@given(lengths_lists, ranks_counts, budgets, costs)
def test_no_other_rows_are_much_cheaper(lengths, ranks, budget, cost):
    """Not of the same packs, dealt in turn as they come or by their cost, which is best; nor of first-fit's."""
    cut = balanced(lengths, ranks, budget, cost)
    fitted = first_fit_decreasing(lengths, budget)
    for packs in ([members for bins in cut for members in bins], fitted + [[]] * (-len(fitted) % ranks)):
        falling = sorted(packs, key=lambda members: -cost([lengths[i] for i in members]))
        for order in (packs, falling):
            dealt = [order[rank::ranks] for rank in range(ranks)]
            assert lockstep(cut, lengths, cost) <= (1.02 + 1e-9) * lockstep(dealt, lengths, cost)


@laws
@given(lengths_lists, ranks_counts, budgets, costs)
def test_lockstep_lasts_as_long_as_the_slowest_rank_and_the_even_share(lengths, ranks, budget, cost):
    cut = balanced(lengths, ranks, budget, cost)
    steps = lockstep(cut, lengths, cost)
    slowest = max(sum(cost([lengths[i] for i in members]) for members in bins) for bins in cut)
    assert slowest <= steps * (1 + 1e-9)
    assert imbalance(cut, lengths, cost) >= -1e-9
    if ranks == 1:
        assert steps == pytest.approx(cost(lengths))
        assert imbalance(cut, lengths, cost) == pytest.approx(0, abs=1e-9)


@laws
@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.integers(9, 12), costs)
def test_with_fewer_samples_than_ranks_each_is_alone_and_the_others_are_blank(lengths, ranks, cost):
    cut = balanced(lengths, ranks, 40, cost)
    assert sorted(len(bins[0]) for bins in cut) == [0] * (ranks - len(lengths)) + [1] * len(lengths)
    assert {len(bins) for bins in cut} == {1}


@pytest.mark.parametrize("ranks", [2, 8, 64])
@pytest.mark.parametrize("seed", range(2))
def test_work_is_even_also_where_attention_costs_twice_what_was_said(ranks, seed):
    drawn = np.random.default_rng(seed).lognormal(math.log(2000), 0.9, 64 * ranks)
    lengths = np.clip(drawn, 64, 16_384).astype(int).tolist()
    cut = balanced(lengths, ranks, 16_384, SEVEN_B)
    assert imbalance(cut, lengths, SEVEN_B) < 0.03
    assert imbalance(cut, lengths, Cost(SEVEN_B.linear, 2 * SEVEN_B.attention)) < 0.04
    in_turn = [[[i] for i in range(rank, len(lengths), ranks)] for rank in range(ranks)]
    assert lockstep(cut, lengths, SEVEN_B) < lockstep(in_turn, lengths, SEVEN_B)


def test_the_cost_of_a_shape_is_that_of_its_weights():
    """Qwen 2.5 7B: 7.62e9 parameters, of which 0.545e9 embed; attention catches up with them at some 70,000 tokens."""
    assert SEVEN_B.linear == pytest.approx(2 * (7.616e9 - 0.545e9), rel=0.001)
    assert SEVEN_B.attention == 2 * 28 * 28 * 128
    assert SEVEN_B([100, 200]) == pytest.approx(SEVEN_B.linear * 300 + SEVEN_B.attention * 50_000)
    windowed = Cost.of(
        hidden=8, layers=6, intermediate=16, heads=2, kv_heads=1, head_dim=4, vocabulary=10, full_layers=1
    )
    assert windowed.attention == 2 * 8


@laws
@given(st.lists(st.integers(2, 12), max_size=20), st.integers(1, 5), st.integers(2, 20))
def test_ranks_that_hold_only_their_own_pack_the_same_tokens(lengths, ranks, budget):
    """Every rank packs what it was dealt, with a blank behind; together they run each sample once, and all equally
    often."""
    batch = [_sample(n, first) for first, n in enumerate(lengths)]
    blank = _sample(2, -1)
    seen, counts = [], set()
    for bins in balanced(lengths, ranks, budget, Cost(1, 0.1)):
        held, numbered = local(bins)
        own = [*(batch[i] for i in held), blank]
        packs = pack(own, fold(own), budget, bins=numbered)
        counts.add(len(packs))
        for micro_batch, members in zip(packs, bins, strict=True):
            ids = micro_batch.token_ids[micro_batch.positions == 0].tolist()
            assert ids == (sorted(members) or [-1])
            seen += members
    assert sorted(seen) == list(range(len(lengths)))
    assert len(counts) == 1


def _sample(length: int, name: int) -> Sample:
    return Sample(
        token_ids=np.full(length, name),
        loss_mask=np.zeros(length),
        versions=np.full(length, -1),
        temperatures=np.ones(length),
    )
