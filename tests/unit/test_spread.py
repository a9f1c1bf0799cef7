"""How a batch is dealt to trainer ranks."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.ranks import spread
from paceline.config.trainer import Trainer
from paceline.data import Sample, Ticket
from paceline.data.balance import Cost
from paceline.data.scales import owners

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
    budget=st.integers(100, 1000),
)
def test_every_sample_goes_to_one_rank_and_a_rollout_stays_together(lengths, branches, ranks, budget):
    batch = [sample(length, i // branches) for i, length in enumerate(lengths)]
    shares = spread(batch, ranks, Trainer(micro_batch_tokens=budget), COST)
    assert len(shares) == ranks
    at = {id(one): i for i, one in enumerate(batch)}
    places = [[at[id(one)] for one in share] for share in shares]
    assert sorted(i for share in places for i in share) == list(range(len(batch)))
    assert all(share == sorted(share) for share in places)
    if branches == 1:
        return
    ranks_of: dict = {}
    names = list(owners(batch))
    for rank, share in enumerate(places):
        for i in share:
            ranks_of.setdefault(names[i], set()).add(rank)
    assert all(len(where) == 1 for where in ranks_of.values())


@given(st.integers(0, 1000))
def test_ranks_get_like_work(seed):
    dice = np.random.default_rng(seed)
    batch = [sample(int(length), i) for i, length in enumerate(dice.lognormal(4, 0.7, 256).clip(2, 500))]
    shares = spread(batch, 4, Trainer(micro_batch_tokens=2000), COST)
    work = [COST([len(one) for one in share]) for share in shares]
    assert max(work) / np.mean(work) < 1.05
