"""Groups as a file of the checkpoint: they come back as they were, or not at all."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.data import WireError
from paceline.orchestrator import CheckpointError
from paceline.orchestrator.saved_groups import GROUPS_FILE, DispatcherState, decode_groups, encode_groups, read_groups
from paceline.rollout import Group
from rollouts import group


def same(one: Group, other: Group) -> bool:
    samples = zip(one.samples(), other.samples(), strict=True)
    for mine, its in samples:
        assert mine.streams().keys() == its.streams().keys()
        assert all(np.array_equal(mine.streams()[name], stream) for name, stream in its.streams().items())
        assert (mine.ticket, mine.spans, mine.ended, mine.env) == (its.ticket, its.spans, its.ended, its.env)
    bare = [
        [
            (r.turns, r.reward, dict(r.metrics), r.member, r.kind, r.error, r.ticket, r.target, r.seconds)
            for r in [*g.rollouts, *g.failed]
        ]
        for g in (one, other)
    ]
    return bare[0] == bare[1] and (one.ticket, one.size) == (other.ticket, other.size)


@given(st.lists(st.floats(allow_nan=False), max_size=4))
def test_a_group_comes_back_as_it_was(numbers):
    first, second = group(0, [{"role": "user", "content": [{"type": "text", "text": "?"}]}], tuple(numbers)), group(1)
    first.rollouts[0].target, first.rollouts[0].seconds = "42", 1.5
    held = DispatcherState(
        [first, second], [second], [(first, 2)], [first], {"dropped": {"stale": 1}, "failed_rollouts": 3}
    )
    again = decode_groups(encode_groups(held))
    assert same(again.buffered[0], first)
    assert same(again.buffered[1], second)
    assert again.resolved[0] is again.buffered[1]
    assert again.remembered[0][0] is again.chosen[0] is again.buffered[0]
    assert again.remembered[0][1] == 2
    assert again.counts == held.counts


def test_a_group_that_no_file_can_keep_is_nowhere_in_it():
    strange = group(1, [{"role": "user", "content": object()}])
    again = decode_groups(encode_groups(DispatcherState([group(0), strange], [strange], [(strange, 1)], [strange])))
    assert [g.ticket.number for g in again.buffered] == [0]
    assert (again.resolved, again.remembered, again.chosen) == ([], [], [])
    strange = group(1)
    strange.rollouts[0].metrics = {"m": "a word"}
    assert [g.ticket.number for g in decode_groups(encode_groups(DispatcherState([strange, group(2)]))).buffered] == [2]


@given(st.data())
def test_a_spoilt_file_is_refused_in_a_sentence(data):
    whole = encode_groups(DispatcherState([group()]))
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    with pytest.raises(WireError, match="not a checkpoint's groups"):
        decode_groups(cut)


def test_a_checkpoint_says_which_file_is_spoilt_and_an_old_one_has_none(tmp_path):
    assert read_groups(tmp_path) == DispatcherState()
    (tmp_path / GROUPS_FILE).write_bytes(b"?")
    with pytest.raises(CheckpointError, match="resume from an older checkpoint"):
        read_groups(tmp_path)
