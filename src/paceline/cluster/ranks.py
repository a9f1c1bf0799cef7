"""Which rank trains which samples of a batch."""

from collections.abc import Hashable, Sequence

from numpy.typing import NDArray
from transformers import PretrainedConfig

from paceline.config.trainer import Trainer
from paceline.data import Sample
from paceline.data.balance import Cost, balanced
from paceline.data.scales import owners

BUDGET = 16_384
"""Tokens of a micro-batch where the ranks find out their own."""


def spread(batch: Sequence[Sample], ranks: int, config: Trainer, cost: Cost) -> list[list[Sample]]:
    """One share of the batch for each rank, of like cost, in the batch's order. Nothing is left out, and a rollout's
    samples stay together: its share of the normaliser is counted where they are."""
    rollouts: dict[Hashable, list[int]] = {}
    for index, owner in enumerate(owners(batch)):
        rollouts.setdefault(owner, []).append(index)
    lengths = [len(sample) for sample in batch]
    if len(rollouts) == len(batch) and ranks > 1:
        budget = config.micro_batch_tokens if isinstance(config.micro_batch_tokens, int) else BUDGET
        bins = balanced(lengths, ranks, budget, cost) if batch else [[] for _ in range(ranks)]
        shares = [[i for members in own for i in members] for own in bins]
    else:
        shares = _whole(list(rollouts.values()), cost.each(lengths), ranks)
    return [[batch[i] for i in sorted(share)] for share in shares]


def _whole(rollouts: Sequence[list[int]], costs: NDArray, ranks: int) -> list[list[int]]:
    """The costliest first, each to the rank that has least to do."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    load = [0.0] * ranks
    totals = [float(costs[members].sum()) for members in rollouts]
    for at in sorted(range(len(rollouts)), key=lambda i: -totals[i]):
        idle = load.index(min(load))
        shares[idle] += rollouts[at]
        load[idle] += totals[at]
    return shares


def cost_of(model: PretrainedConfig) -> Cost:
    """Work of a token and of a pair of tokens, from a model's shape."""
    text = model.get_text_config()
    heads = text.num_attention_heads
    return Cost.of(
        hidden=text.hidden_size,
        layers=text.num_hidden_layers,
        intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocabulary=text.vocab_size,
    )
