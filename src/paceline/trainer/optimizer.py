"""Learning rate schedule and float16 loss scaling, shared by the optimizers of torch and mlx."""

import math

from paceline.config import trainer as config

LARGEST_SCALE, SMALLEST_SCALE = 2.0**16, 2.0**4
PATIENCE = 100
"""Steps until a scale that was too large is tried again."""


def learning_rate(c: config.OptimizerConfig, step: int, total: int | None) -> float:
    """Learning rate of the step after `step` others, of `total`."""
    if step < c.warmup_steps:
        return c.lr * (step + 1) / c.warmup_steps
    if c.schedule == "constant" or not total:
        return c.lr
    done = min(1.0, (step - c.warmup_steps) / max(1, total - c.warmup_steps))
    left = 1 - done if c.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return c.lr * (c.final_lr_ratio + (1 - c.final_lr_ratio) * left)


def schedule_lengths(c: config.TrainerConfig, batches: int | None) -> tuple[int | None, int | None]:
    """Optimizer steps of the policy, which takes none while the critic warms up, and of the critic in a whole run."""
    if not batches:
        return None, None
    waiting = 0 if c.critic is None else c.critic.freeze_steps
    return max(1, (batches - waiting) * c.minibatches), batches * c.minibatches


class Schedule:
    """How far an optimizer is: steps taken, the learning rate of the next one, and the scale of a float16 loss."""

    def __init__(self, c: config.OptimizerConfig, total_steps: int | None, half: bool) -> None:
        self._config, self._total = c, total_steps
        self.steps = 0
        self.scale = LARGEST_SCALE if half else 1.0
        """By what the loss of a float16 model is multiplied before it is differentiated (arXiv 1710.03740): one token's
        share of a large batch is a gradient below what that type can hold. Other types need none."""

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return learning_rate(self._config, self.steps, self._total)

    def lower_scale(self, sound: bool) -> bool:
        """After a gradient that was not finite: whether to compute it again, with its loss scaled up less. Not where
        the loss itself is at fault, not `sound`, and not for ever."""
        if not sound or self.scale <= SMALLEST_SCALE:
            return False
        self.scale /= 4
        return True

    def count_step(self) -> None:
        self.steps += 1
        if self.scale != 1 and self.steps % PATIENCE == 0:
            self.scale = min(2 * self.scale, LARGEST_SCALE)

    def load(self, steps: int, scale: float | None) -> None:
        """Back to a checkpoint's, which a model of another type may have written."""
        self.steps = steps
        self.scale = scale if scale and self.scale != 1 else self.scale
