"""Sharing a prompt changes what is computed once, never what comes out."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_trainer import make_sample, trainer_of

from conftest import VOCABULARY, tiny_model
from paceline.config import trainer as config
from paceline.data import Sample, pack, token_scales
from paceline.trainer.torch import forward
from paceline.trainer.torch.forward import share_prefixes


def groups(seed: int, sizes: list[int], trunk: int, longest: int) -> list[Sample]:
    """Samples in groups; those of one group begin with the same tokens."""
    rng = np.random.default_rng(seed)
    out = []
    for number, size in enumerate(sizes):
        common = rng.integers(0, VOCABULARY, trunk)
        for _ in range(size):
            sample = make_sample(rng, trunk + int(rng.integers(1, longest)), number)
            tokens = sample.token_ids.copy()
            tokens[:trunk] = common
            out.append(sample.with_streams(token_ids=tokens))
    return out


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 999), st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 40), st.integers(2, 30))
def test_every_token_finds_the_state_of_its_own_history(seed, sizes, trunk, longest):
    batch = groups(seed, sizes, trunk, longest)
    (micro_batch,) = pack(batch, token_scales(batch), 100_000)
    shared = share_prefixes(micro_batch)
    assert len(shared.token_ids) == sum(map(len, shared.trees)) <= len(micro_batch)
    assert (shared.token_ids[shared.where] == micro_batch.token_ids).all()
    assert (shared.positions[shared.where] == micro_batch.positions).all()


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 999), st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 40), st.integers(2, 30))
def test_the_gradient_is_the_same_with_and_without_sharing(seed, sizes, trunk, longest):
    batch = groups(seed, sizes, trunk, longest)
    gradients = []
    for waste in (1e9, 0.0):
        old, forward.WASTE = forward.WASTE, waste
        try:
            model = tiny_model()
            trainer = trainer_of(model, config.TrainerConfig())
            for micro_batch in pack(batch, token_scales(batch), 100_000):
                trainer.learner.backward(micro_batch, trainer.version)
            trainer.close()
        finally:
            forward.WASTE = old
        gradients.append(torch.cat([p.grad.view(-1) for p in model.parameters()]).double())
    assert (gradients[0] - gradients[1]).norm() / gradients[1].norm() < 1e-5


def test_a_group_of_tries_is_computed_as_one_tree():
    batch = groups(0, [8, 8], trunk=18, longest=9)
    (micro_batch,) = pack(batch, token_scales(batch), 100_000)
    assert [len(tree.branches) for tree in share_prefixes(micro_batch).trees] == [8, 8]


def test_long_rests_are_left_alone():
    """A mask over all branches would cost more than the prompts it saves."""
    batch = groups(0, [8], trunk=10, longest=100)
    (micro_batch,) = pack(batch, token_scales(batch), 100_000)
    assert max(len(tree.branches) for tree in share_prefixes(micro_batch).trees) < 8
