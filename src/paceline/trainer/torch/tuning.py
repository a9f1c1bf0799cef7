"""Finds by trying how many tokens of a micro-batch the GPU's memory holds."""

from collections.abc import Callable

import numpy as np
import torch
from transformers import PreTrainedModel

from paceline.config import trainer as config
from paceline.data import MicroBatch, Sample, pack, token_scales
from paceline.model import trainable_parameters
from paceline.trainer.batch import BUDGET
from paceline.trainer.torch.forward import ForwardPass

SMALLEST = 4096
LARGEST = 1 << 17
"""Beyond this a larger micro-batch is no faster."""
SHARE = 0.85
"""Of the memory that is free; the rest is for whatever the trial did not see."""
SEQUENCE = 1024


def find_token_budget(forward: ForwardPass, model: PreTrainedModel, c: config.TrainerConfig) -> int:
    """The largest safe budget for this model, beside whatever else already lives on its device."""
    if model.device.type != "cuda":
        return BUDGET
    device = model.device

    def peak(tokens: int) -> int:
        """Bytes a backward pass over so many tokens needs beyond what is there before and after it."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run_once(forward, model, c, tokens)
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before

    peak(SMALLEST // 4)  # compiles what is compiled
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    # Gradient sums and two moments come with the first step, the critic's too.
    optimizers = 0 if c.optimizer.offload else 1 + (c.critic is not None)
    coming = 12 * optimizers * sum(p.numel() for p in trainable_parameters(model).values())
    found = largest_fitting(peak, int(SHARE * free) - coming)
    torch.cuda.empty_cache()
    return found


def run_once(forward: ForwardPass, model: PreTrainedModel, c: config.TrainerConfig, tokens: int) -> None:
    """One forward and backward pass over blank samples; the gradients are thrown away."""
    model.train()
    try:
        for micro_batch in _dummy_batch(tokens, model.config.get_text_config().vocab_size):
            positions = forward.send(np.arange(1, len(micro_batch)))
            values, _, anchor = forward.logprobs(micro_batch, positions, True, bool(c.entropy_coef))
            ((values * 0).sum() + anchor).backward()
    finally:  # also where it did not fit
        model.eval()
        for parameter in trainable_parameters(model).values():
            parameter.grad = None


def largest_fitting(peak: Callable[[int], int], room: int) -> int:
    """The most tokens whose peak fits, in steps of `SMALLEST`: two trials show what a token costs, a third one checks.

    >>> largest_fitting(lambda tokens: 1000 + 2 * tokens, room=100_000)
    49152
    """
    first, second = (_peak_or_none(peak, tokens) for tokens in (SMALLEST // 2, SMALLEST))
    if first is None or second is None or second > room:
        return SMALLEST // 2
    each = max(1.0, (second - first) / (SMALLEST // 2))
    guess = int((room - first) / each) + SMALLEST // 2
    tokens = min(LARGEST, guess // SMALLEST * SMALLEST)
    while tokens > SMALLEST:
        needed = _peak_or_none(peak, tokens)
        if needed is not None and needed <= room:
            return tokens
        tokens -= max(SMALLEST, tokens // 8 // SMALLEST * SMALLEST)
    return SMALLEST


def _peak_or_none(peak: Callable[[int], int], tokens: int) -> int | None:
    try:
        return peak(tokens)
    except torch.cuda.OutOfMemoryError:
        return None


def _dummy_batch(tokens: int, vocabulary: int) -> list[MicroBatch]:
    length = min(SEQUENCE, tokens)
    mask = np.arange(length) > 0
    sample = Sample(
        token_ids=np.arange(length) % vocabulary,
        loss_mask=mask,
        versions=np.where(mask, 0, -1),
        temperatures=np.ones(length),
    )
    samples = [sample] * (tokens // length)
    return pack(samples, token_scales(samples), tokens)
