"""Attention's law: a packed sequence attends to itself alone, wherever it lies in the pack."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.model.attention import PackedPlan, Scores, attending, attention, sdpa, similar_lengths, window_mask


@settings(max_examples=30, deadline=None)
@example([2, 6], None)
@example([10, 13, 7, 70, 3], 5)
@given(
    st.one_of(st.lists(st.integers(1, top), min_size=1, max_size=12) for top in (16, 70)),
    st.sampled_from([None, 1, 5, 64]),
)
def test_a_pack_is_its_sequences_side_by_side(lengths, window):
    torch.manual_seed(sum(lengths))
    total = sum(lengths)
    q, k, v = torch.randn(total, 4, 8), torch.randn(total, 2, 8), torch.randn(total, 2, 8)
    packed = PackedPlan(lengths, "cpu").attend(0, q, k, v, Scores(0.3, window))
    at = 0
    for length in lengths:
        here = slice(at, at + length)
        positions = torch.arange(length)
        mask = window_mask(positions, positions, window)
        alone = sdpa(q[here][None], k[here][None], v[here][None], Scores(0.3), mask)[0]
        assert torch.allclose(packed[here], alone, atol=1e-5)
        at += length


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=50))
def test_buckets_hold_each_sequence_once_and_waste_little(lengths):
    groups = similar_lengths(lengths)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        inside = [lengths[i] for i in group]
        assert group == sorted(group)
        assert min(inside) >= min(0.7 * max(inside), max(inside) - 16)


def test_gradients_stay_inside_a_sequence():
    q, k, v = (torch.randn(30, 2, 8, requires_grad=True) for _ in range(3))
    out = PackedPlan([10, 13, 7], "cpu").attend(0, q, k, v, Scores(1.0))
    out[10:23].sum().backward()
    for x in (q, k, v):
        assert x.grad[:10].abs().max() == x.grad[23:].abs().max() == 0
        assert x.grad[10:23].abs().max() > 0


def test_what_the_attention_does_not_do_is_refused_by_name():
    from paceline.model import UnsupportedModel

    module = torch.nn.Linear(1, 1)
    x = torch.zeros(1, 1, 1, 8)
    with pytest.raises(RuntimeError, match="without an attention plan"):
        attention(module, x, x, x, None)
    with attending(PackedPlan([1], "cpu")):
        with pytest.raises(UnsupportedModel, match="`indices`"):
            attention(module, x, x, x, None, indices=x)
        with pytest.raises(UnsupportedModel, match="mask"):
            attention(module, x, x, x, torch.zeros(1, 1, 1, 1))
