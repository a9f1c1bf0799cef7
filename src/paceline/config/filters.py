"""Settings that decide which sampled groups train: filters, length rules, replay, failed episodes, advisories."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, gcd
from typing import Any, Literal

from pydantic import Field, model_validator

from paceline.config.base import Section, UserCode


class PriorityConfig(Section):
    """Which of the remembered groups are replayed: each by chance, with

    p = (1 - floor) softmax(sharpness * priority) + floor / groups,

    drawn without replacement. The draw depends on `seed`, the version and the groups alone."""

    by: Literal["failure", "advantage"] = "failure"
    """A group's priority. `failure`: 1 - score / best, within 0 and 1, where the score is the mean over its rollouts.
    `advantage`: the mean absolute advantage of its tokens that train."""
    metrics: dict[str, float] = Field(default_factory=dict)
    """Functions of the rubric, parts of the reward or other metrics of the environment, each with its weight: a
    rollout's score is their weighted mean. Its reward when left out, which is what the rubric gave in all. It stands in
    for a rollout without these metrics too."""
    best: float = Field(default=1.0, gt=0)
    """The score at which nothing is left to learn."""
    sharpness: float = Field(default=3.0, ge=0, le=100)
    """How strongly high priorities are preferred: the inverse temperature of the softmax. 0 draws all alike."""
    floor: float = Field(default=1e-3, gt=0, le=1)
    """Share of the chance that all groups have alike, so that none is ever out of reach."""
    importance: float = Field(default=0.0, ge=0, le=1)
    """Exponent of the importance weights (groups * p)^-importance, over the largest of them, by which the tokens of a
    replayed group train (prioritised experience replay, arXiv 1511.05952, calls it beta). 1 takes back in expectation
    what the priorities favour; 0 leaves all weights at 1."""

    def check_keys(self) -> None:
        if wrong := [name for name, weight in self.metrics.items() if weight <= 0]:
            raise ValueError(f"the weight of the metric `{wrong[0]}` must be above 0, or leave it out")
        if self.by == "advantage" and self.metrics:
            raise ValueError(
                'metrics make a score, and by = "advantage" uses none: leave metrics out, or write by = "failure"'
            )


class ReplayConfig(Section):
    """Recent groups that train once more, while no token of theirs is older than `staleness` allows."""

    share: float = Field(default=0.0, ge=0, lt=1)
    """Most of a batch's slots that replayed groups may take; 0 turns replay off."""
    groups: int = Field(default=256, ge=1)
    """Recent groups that are remembered."""
    times: int = Field(default=1, ge=1)
    """How often a group may be replayed."""
    priority: Literal["newest", "rubric", "advantage"] | PriorityConfig = "newest"
    """Which of them are replayed. `newest`: the newest first. `rubric`: by chance, those with a low score rather than
    others; the score is what the environment's rubric gave, its reward. `advantage`: by chance, those with large
    advantages. A table sets the score and the chances."""

    @property
    def chances(self) -> PriorityConfig | None:
        """How groups are drawn by priority; None where the newest go first."""
        if isinstance(self.priority, PriorityConfig):
            return self.priority
        by: dict[str, Literal["failure", "advantage"]] = {"rubric": "failure", "advantage": "advantage"}
        return PriorityConfig(by=by[self.priority]) if self.priority in by else None

    def slots(self, batch_size: int, group_sizes: Sequence[int]) -> int:
        """Places of a batch that replay may fill: whole groups, and never so many that no fresh one fits in.

        >>> [ReplayConfig(share=share).slots(16, [4]) for share in (0.3, 0.9, 0.2)]
        [4, 12, 0]
        """
        # The share is written in decimals: 0.29 of 100 is 29, whatever the product rounds to.
        slots = min(floor(self.share * batch_size + 1e-9), batch_size - max(group_sizes))
        slots -= slots % gcd(*group_sizes)
        return slots if slots >= min(group_sizes) else 0


class FiltersConfig(Section):
    """Groups that never reach the trainer."""

    zero_advantage: bool = True
    """Drop groups in which every advantage is zero; they carry no gradient. Off where `group_size` is 1."""
    group: UserCode | None = None
    """A function `fn(group, **kwargs)` that answers whether to keep a group that has its credit already; all are kept
    when left out."""


class LengthConfig(Section):
    """Handling of replies that come near `sampling.max_tokens`."""

    mask_truncated: bool = False
    """Sampled tokens of a cut-off rollout do not train. Its reward still counts in the baseline of the others."""
    buffer: int = Field(default=0, ge=0)
    """Tokens below `sampling.max_tokens` in which a reply costs some of its reward: nothing where they begin, all of
    `penalty` at the limit; 0 turns the penalty off."""
    penalty: float = Field(default=1.0, gt=0)
    """Reward that a reply at the limit loses."""


Choice = Literal["retry", "drop", "fail"]
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0


class FailuresConfig(Section):
    """How a failed episode is handled, by kind of error. `retry` plays it again from its beginning, with the same
    noise and after a growing pause, and drops it in the end; `drop` goes on without it; `fail` stops the run at once
    with the cause. `[breaker]` counts what was dropped, and stops a run that loses too much."""

    episode: Choice = "drop"
    """The environment raised an error of its own, or ended an episode with something that is no outcome."""
    timeout: Choice = "drop"
    """An episode took longer than its environment's `timeout`. Every try has all of that time."""
    worker: Choice = "retry"
    """A process the environment computes in died, or what it answered cannot be read."""
    engine: Choice = "retry"
    """No engine could answer: all are gone or full, or what came back cannot be read."""
    request: Choice = "drop"
    """A request that no engine can ever answer, such as one longer than the context."""
    judge: Choice = "retry"
    """A model that grades could not be reached, or gave no grade that can be read."""
    teacher: Choice = "retry"
    """A reference model could not score a sample: it is asked again, and then the sample is dropped."""
    tries: int = Field(default=3, ge=1)
    """How often `retry` tries in all, the first time included."""

    def handling(self, kind: str) -> "FailureHandling":
        return FailureHandling(getattr(self, kind), self.tries)


@dataclass(frozen=True, slots=True)
class FailureHandling:
    """What follows a failure: another try, `tries` in all; the loss of what failed; the end of the run."""

    choice: Choice = "retry"
    tries: int = 3

    def retries(self, failed: int) -> bool:
        return self.choice == "retry" and failed < self.tries

    @staticmethod
    def pause(failed: int) -> float:
        """Seconds before the next try: twice as long each time, up to a limit.

        >>> [FailureHandling.pause(failed) for failed in (1, 2, 3, 9)]
        [1.0, 2.0, 4.0, 30.0]
        """
        return min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(failed - 1, 10))

    def __str__(self) -> str:
        return f'"retry", {self.tries} tries' if self.choice == "retry" else f'"{self.choice}"'


DEFAULT_HANDLING = FailureHandling()
"""What follows most kinds of failure."""


AdvisoryName = Literal[
    "unreachable",
    "failures",
    "chat_template",
    "strict_grader",
    "constant_reward",
    "entropy_high",
    "learning_rate_high",
    "stop_token",
    "leaked_answer",
    "duplicate_rows",
    "stale_weights",
    "mismatch",
    "format",
    "judges",
    "reward_hacking",
    "overfitting",
    "entropy",
    "truncation",
    "length",
    "flat_groups",
    "dropped_groups",
    "learning_rate_low",
    "starving",
    "slow_environment",
    "idle",
]
"""In the order of causes: one that stands earlier may be the cause of those after it."""


class AdviceConfig(Section):
    """Advisories: `paceline doctor` and the page "Advice" show them, each with its evidence. A key named like an
    advisory is the limit from which it speaks, once the figures are sure to lie beyond it by three standard errors."""

    @model_validator(mode="before")
    @classmethod
    def _rename(cls, table: Any) -> Any:
        """Runs of earlier versions call `overfitting` `parting`."""
        if not isinstance(table, dict):
            return table
        table = {"overfitting" if name == "parting" else name: value for name, value in table.items()}
        if isinstance(paused := table.get("pause"), list):
            table["pause"] = ["overfitting" if name == "parting" else name for name in paused]
        return table

    steps: int = Field(default=20, ge=10, le=1000)
    """The last steps that are looked at."""
    pause: list[AdvisoryName] = Field(default_factory=list)
    """Advisories at which nothing more is drawn from the environment they speak of, until the steps that gave rise to
    them lie behind. One about the whole run, and one about the only environment left, stops the run with a checkpoint.
    `pause` of an [[env]] goes before."""
    interval: int = Field(default=5, ge=1)
    """Steps between two looks of a run that may pause an environment."""

    flat_groups: float = Field(default=0.7, gt=0, lt=1)
    """Share of groups without variance in reward. Groups that all earn the best reward seen so far are not counted."""
    length: float = Field(default=0.5, gt=0)
    """Change in length of replies, as a share of what it was, while the reward does not rise."""
    truncation: float = Field(default=0.1, gt=0, lt=1)
    """Share of replies cut off at `sampling.max_tokens`."""
    format: float = Field(default=0.8, gt=0, lt=1)
    """Share of the differences in reward within a group that metrics of form alone explain."""
    overfitting: float = Field(default=0.25, gt=0)
    """How far training reward leaves held-out reward behind, in standard deviations of the reward."""
    judges: float = Field(default=0.4, gt=0, lt=1)
    """Krippendorff's alpha below which judges count as disagreeing; 1 is agreement, 0 is chance."""
    entropy: float = Field(default=0.5, gt=0, lt=1)
    """Entropy left, as a share of the first steps', where no reward has risen in the run; a quarter of this where one
    has, and is still to be had."""
    mismatch: float = Field(default=0.015, gt=0)
    """`mismatch_kl`, in nats a token."""
    starving: float = Field(default=0.2, gt=0, lt=1)
    """Share that an environment has in the gradient, relative to what its weight asks for."""
    idle: float = Field(default=0.75, gt=0, lt=1)
    """Share of the time in which trainer or sampler has nothing to do, where they need not take turns."""
    unreachable: float = Field(default=60.0, gt=0)
    """Seconds that a run has waited for a server that does not answer."""
    entropy_high: float = Field(default=2.0, gt=1)
    """Entropy, as a multiple of the first steps', where `trainer.entropy_coef` pays for it and no reward rises."""
    failures: float = Field(default=0.1, gt=0, lt=1)
    """Share of rollouts that ended in an error."""
    strict_grader: float = Field(default=0.5, gt=0, lt=1)
    """Share of right replies that earn no more than others, where right means: the row's answer but for case, white
    space and punctuation at the ends."""
    constant_reward: float = Field(default=1e-6, gt=0)
    """Standard deviation of all rewards below which they count as one number."""
    learning_rate_high: float = Field(default=0.3, gt=0, lt=1)
    """Share of the best reward that is lost again, after steps that moved the policy far."""
    learning_rate_low: float = Field(default=1e-5, gt=0)
    """Distance of the policy from the one that sampled, in nats a token for one version (`sampler_kl` over the square
    of the staleness), while the reward does not rise."""
    stop_token: float = Field(default=0.02, gt=0, lt=1)
    """Share of replies that end by themselves, from the run's beginning on."""
    chat_template: float = Field(default=0.1, gt=0, lt=1)
    """Share of turns whose tokens do not say what their messages do, or not what was said before and more."""
    leaked_answer: float = Field(default=0.2, gt=0, lt=1)
    """Share of the best rollouts whose prompt holds the answer after a word such as `answer:`."""
    duplicate_rows: float = Field(default=0.2, gt=0, lt=1)
    """Share of tries whose prompt another row of the dataset has too."""
    stale_weights: float = Field(default=0.05, gt=0)
    """Mismatch that the age of weights explains (`mismatch/staleness`), in nats a token."""
    reward_hacking: float = Field(default=0.25, gt=0)
    """Rise of the reward, in its standard deviations, while a metric of right answers falls."""
    dropped_groups: float = Field(default=0.8, gt=0, lt=1)
    """Share of sampled groups that never train, while the trainer waits most of its time."""
    slow_environment: float = Field(default=0.5, gt=0, lt=1)
    """Share of the time in which neither trainer nor sampler works, since episodes are waited for."""
