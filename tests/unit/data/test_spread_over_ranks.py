"""How a batch is handed to trainer ranks, which then agree on who trains what."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.data import Sample, Ticket
from paceline.data.packing import Cost, owners
from paceline.runtime.rpc import split_batch

COST = Cost(1.0, 0.01)


def sample(length: int, rollout: int) -> Sample:
    mask = np.arange(length) > 0
    return Sample(
        token_ids=np.ones(length),
        loss_mask=mask,
        versions=np.where(mask, 0, -1),
        temperatures=np.ones(length),
        ticket=Ticket(0, "e", 0, 0, 0),
        rollout=rollout,
    )


@given(
    lengths=st.lists(st.integers(1, 400), max_size=40),
    branches=st.integers(1, 3),
    ranks=st.integers(1, 5),
)
def test_shares_end_to_end_are_the_batch_and_a_rollout_stays_together(lengths, branches, ranks):
    batch = [sample(length, i // branches) for i, length in enumerate(lengths)]
    shares = split_batch(batch, ranks, COST)
    assert len(shares) == ranks
    at = {id(one): i for i, one in enumerate(batch)}
    places = [[at[id(one)] for one in share] for share in shares]
    assert [i for share in places for i in share] == list(range(len(batch)))
    ranks_of: dict = {}
    names = list(owners(batch))
    for rank, share in enumerate(places):
        for i in share:
            ranks_of.setdefault(names[i], set()).add(rank)
    assert all(len(where) == 1 for where in ranks_of.values())


@given(st.integers(0, 1000))
def test_no_share_is_off_by_more_than_one_rollout(seed):
    dice = np.random.default_rng(seed)
    batch = [sample(int(length), i) for i, length in enumerate(dice.lognormal(4, 0.7, 256).clip(2, 500))]
    shares = split_batch(batch, 4, COST)
    work = np.array([COST([len(one) for one in share]) for share in shares])
    assert np.abs(work - work.mean()).max() <= max(COST([len(one)]) for one in batch)
