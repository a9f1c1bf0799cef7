"""Laws of packing: the fast first fit is the plain one, and ranks in lockstep get equal work and all of it."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2Config

from paceline.data import Sample, Ticket, first_fit_decreasing, token_scales
from paceline.data.packing import (
    Cost,
    all_members,
    balance_bins,
    bin_steps,
    flatten_bins,
    imbalance,
    lockstep_cost,
    owners,
    restrict_bins,
)
from paceline.trainer.backend import DUMMY_PACK, collate_bins, cost_of

laws = settings(max_examples=40, deadline=None)
lengths_lists = st.lists(st.integers(1, 40), max_size=60)
ranks_counts = st.integers(1, 9)
budgets = st.integers(1, 60)
costs = st.builds(Cost, st.floats(0.1, 10), st.floats(0, 1))
SEVEN_B = Cost(linear=2 * 7.070e9, attention=2 * 28 * 28 * 128)
"""Qwen 2.5 7B."""


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


@settings(max_examples=80, deadline=None)
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
    cut = balance_bins(lengths, ranks, budget, cost)
    assert len(cut) == ranks
    assert len({len(bins) for bins in cut}) == 1
    packs = [members for bins in cut for members in bins]
    assert sorted(itertools.chain(*packs)) == list(range(len(lengths)))
    assert all(len(members) <= 1 or sum(lengths[i] for i in members) <= budget for members in packs)
    assert len(cut[0]) == math.ceil(len(first_fit_decreasing(lengths, budget)) / ranks)


@laws
@given(lengths_lists, ranks_counts, budgets, costs)
def test_the_cut_is_a_pure_function_and_only_the_ratio_of_costs_counts(lengths, ranks, budget, cost):
    cut = balance_bins(lengths, ranks, budget, cost)
    assert cut == balance_bins(np.array(lengths, int), ranks, budget, cost)
    assert cut == balance_bins(tuple(lengths), ranks, budget, Cost(4 * cost.linear, 4 * cost.attention))


@laws
@given(lengths_lists, ranks_counts, budgets, costs)
def test_no_other_rows_are_much_cheaper(lengths, ranks, budget, cost):
    """Not of the same packs, dealt in turn as they come or by their cost, which is best; nor of first-fit's."""
    cut = balance_bins(lengths, ranks, budget, cost)
    fitted = first_fit_decreasing(lengths, budget)
    for packs in ([members for bins in cut for members in bins], fitted + [[]] * (-len(fitted) % ranks)):
        falling = sorted(packs, key=lambda members: -cost([lengths[i] for i in members]))
        for order in (packs, falling):
            dealt = [order[rank::ranks] for rank in range(ranks)]
            assert lockstep_cost(cut, lengths, cost) <= (1.02 + 1e-9) * lockstep_cost(dealt, lengths, cost)


@laws
@given(lengths_lists, ranks_counts, budgets, costs)
def test_lockstep_lasts_as_long_as_the_slowest_rank_and_the_even_share(lengths, ranks, budget, cost):
    cut = balance_bins(lengths, ranks, budget, cost)
    steps = lockstep_cost(cut, lengths, cost)
    slowest = max(sum(cost([lengths[i] for i in members]) for members in bins) for bins in cut)
    assert slowest <= steps * (1 + 1e-9)
    assert imbalance(cut, lengths, cost) >= -1e-9
    if ranks == 1:
        assert steps == pytest.approx(cost(lengths))
        assert imbalance(cut, lengths, cost) == pytest.approx(0, abs=1e-9)


@laws
@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.integers(9, 12), costs)
def test_with_fewer_samples_than_ranks_each_is_alone_and_the_others_are_blank(lengths, ranks, cost):
    cut = balance_bins(lengths, ranks, 40, cost)
    assert sorted(len(bins[0]) for bins in cut) == [0] * (ranks - len(lengths)) + [1] * len(lengths)
    assert {len(bins) for bins in cut} == {1}


@pytest.mark.parametrize("ranks", [2, 8, 64])
@pytest.mark.parametrize("seed", range(2))
def test_work_is_even_also_where_attention_costs_twice_what_was_said(ranks, seed):
    drawn = np.random.default_rng(seed).lognormal(math.log(2000), 0.9, 64 * ranks)
    lengths = np.clip(drawn, 64, 16_384).astype(int).tolist()
    cut = balance_bins(lengths, ranks, 16_384, SEVEN_B)
    assert imbalance(cut, lengths, SEVEN_B) < 0.03
    assert imbalance(cut, lengths, Cost(SEVEN_B.linear, 2 * SEVEN_B.attention)) < 0.04
    in_turn = [[[i] for i in range(rank, len(lengths), ranks)] for rank in range(ranks)]
    assert lockstep_cost(cut, lengths, SEVEN_B) < lockstep_cost(in_turn, lengths, SEVEN_B)


def test_the_cost_of_a_model_is_that_of_its_weights():
    """Qwen 2.5 7B: 7.62e9 parameters, of which 0.545e9 embed; attention catches up with them at some 70,000 tokens."""
    sizes = {"hidden_size": 3584, "num_hidden_layers": 28, "intermediate_size": 18944, "vocab_size": 152_064}
    cost = cost_of(Qwen2Config(**sizes, num_attention_heads=28, num_key_value_heads=4))
    assert cost.linear == pytest.approx(2 * (7.616e9 - 0.545e9), rel=0.001)
    assert cost.attention == 2 * 28 * 28 * 128
    assert cost([100, 200]) == pytest.approx(cost.linear * 300 + cost.attention * 50_000)


batches = st.lists(st.tuples(st.integers(2, 12), st.integers(0, 9)), max_size=20).map(
    lambda drawn: [_sample(length, rollout, i) for i, (length, rollout) in enumerate(drawn)]
)


@laws
@given(batches, st.integers(1, 3), st.integers(1, 5), st.integers(2, 20))
def test_the_cut_of_a_batch_holds_every_sample_once_and_whole_rollouts_to_a_step(batch, steps, ranks, budget):
    found = bin_steps(batch, steps, ranks, budget, Cost(1, 0.1))
    assert len(found) == steps
    seen: dict[int, int] = {}
    for step, cut in enumerate(found):
        assert len(cut) == ranks
        assert len({len(bins) for bins in cut}) == 1
        for members in itertools.chain(*cut):
            assert len(members) <= 1 or sum(len(batch[i]) for i in members) <= budget
            assert not seen.keys() & set(members)
            seen |= dict.fromkeys(members, step)
    assert sorted(seen) == list(range(len(batch)))
    owned = {(owner, seen[i]) for i, owner in enumerate(owners(batch))}
    assert len(owned) == len(set(owners(batch)))


@laws
@given(batches, st.integers(1, 3), st.integers(1, 5), st.integers(2, 20))
def test_which_step_trains_a_sample_does_not_hang_on_the_number_of_ranks(batch, steps, ranks, budget):
    one, several = (bin_steps(batch, steps, number, budget, Cost(1, 0.1)) for number in (1, ranks))
    assert [all_members(cut) for cut in one] == [all_members(cut) for cut in several]


@laws
@given(batches, st.integers(1, 3), st.integers(1, 5), st.integers(2, 20), st.sets(st.integers(0, 19)))
def test_a_pass_over_some_samples_keeps_the_ranks_in_step(batch, steps, ranks, budget, chosen):
    found = bin_steps(batch, steps, ranks, budget, Cost(1, 0.1))
    part = restrict_bins(found, chosen)
    assert all_members(part) == sorted(chosen & set(range(len(batch))))
    assert len({len(bins) for bins in part}) == 1
    assert all(any(row) for row in zip(*part, strict=True))
    for bins, *whole in zip(part, *found, strict=True):
        assert set(flatten_bins(bins)) <= set(flatten_bins(list(itertools.chain(*whole))))


@laws
@given(batches, st.integers(1, 5), st.integers(2, 20), st.sampled_from(["token", "sample", "fixed"]))
def test_ranks_fold_the_scales_that_one_alone_would(batch, ranks, budget, normalise):
    whole = token_scales(batch, normalise, 7)
    (cut,) = bin_steps(batch, 1, ranks, budget, Cost(1, 0.1))
    for bins in cut:
        own = flatten_bins(bins)
        for i, scales in zip(own, token_scales(batch, normalise, 7, own=own), strict=True):
            np.testing.assert_array_equal(scales.rl, whole[i].rl)
            np.testing.assert_array_equal(scales.regulariser, whole[i].regulariser)


@laws
@given(batches, st.integers(1, 5), st.integers(2, 20))
def test_ranks_pack_their_parts_and_blanks_where_they_have_none(batch, ranks, budget):
    scales = dict(enumerate(token_scales(batch)))
    (cut,) = bin_steps(batch, 1, ranks, budget, Cost(1, 0.1))
    packs = [collate_bins(batch, scales, bins, {}) for bins in cut]
    assert len({len(one) for one in packs}) == 1
    for bins, one in zip(cut, packs, strict=True):
        for members, micro_batch in zip(bins, one, strict=True):
            names = micro_batch.token_ids[micro_batch.positions == 0].tolist()
            assert names == sorted(members) if members else micro_batch is DUMMY_PACK
            assert micro_batch.rl_scale.any() == bool(members)


def _sample(length: int, rollout: int, name: int) -> Sample:
    mask = np.arange(length) > 0
    return Sample(
        token_ids=np.full(length, name),
        loss_mask=mask,
        versions=np.where(mask, 0, -1),
        temperatures=np.ones(length),
        ticket=Ticket(rollout // 2, "e", 0, 0, 0),
        rollout=rollout % 2,
    )
