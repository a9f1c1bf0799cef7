"""Learning rate schedules, and loss scaling for float16."""

import math

from paceline.config import trainer as config

LARGEST_SCALE, SMALLEST_SCALE = 2.0**16, 2.0**4
PATIENCE = 100
"""Steps until a scale that was too large is tried again."""


def rate(c: config.OptimizerConfig, step: int, total: int | None) -> float:
    """Learning rate of the step after `step` others, of `total`."""
    if step < c.warmup_steps:
        return c.lr * (step + 1) / c.warmup_steps
    if c.schedule == "constant" or not total:
        return c.lr
    done = min(1.0, (step - c.warmup_steps) / max(1, total - c.warmup_steps))
    left = 1 - done if c.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return c.lr * (c.final_lr_ratio + (1 - c.final_lr_ratio) * left)


def lengths(c: config.TrainerConfig, batches: int | None) -> tuple[int | None, int | None]:
    """Optimizer steps of the policy and of the critic in a run of so many batches. The policy takes none while the
    critic warms up."""
    if not batches:
        return None, None
    waiting = 0 if c.critic is None else c.critic.freeze_steps
    return max(1, (batches - waiting) * c.minibatches), batches * c.minibatches


class LossScale:
    """By what the loss of a float16 model is multiplied before it is differentiated (arXiv 1710.03740): one token's
    share of a large batch is a gradient below what that type can hold. Other types need none."""

    def __init__(self, half: bool) -> None:
        self.value = LARGEST_SCALE if half else 1.0

    def retreat(self, sound: bool) -> bool:
        """After a gradient that was not finite: whether to compute it again, with the loss scaled up less. Not where
        the loss itself is at fault, not `sound`, and not for ever."""
        if not sound or self.value <= SMALLEST_SCALE:
            return False
        self.value /= 4
        return True

    def stepped(self, steps: int) -> None:
        """So many steps were taken, this one too."""
        if self.value != 1 and steps % PATIENCE == 0:
            self.value = min(2 * self.value, LARGEST_SCALE)

    def load(self, value: float | None) -> None:
        """Back to a checkpoint's, which a model of another type may have written."""
        self.value = value if value and self.value != 1 else self.value
