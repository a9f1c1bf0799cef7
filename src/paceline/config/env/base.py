"""Base sections of environments, and environments of a user's own: a class, a reward function, a self-play arena."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, PrivateAttr, field_validator, model_validator

from paceline.config.algorithm import AlgorithmConfig
from paceline.config.base import PathKey, Section, UserCode
from paceline.config.env.judges import JudgeConfig
from paceline.config.filters import AdvisoryName


class SeatConfig(Section):
    """One actor of an environment, where it is trained otherwise than the rest."""

    name: str
    """The actor."""
    algo: AlgorithmConfig
    """The algorithm that credits this actor, in place of the environment's `algo`."""


class CurriculumConfig(Section):
    """How rows are drawn by their accuracy, a moving average over each row's rollouts that starts at `start`:

    p = (1 - floor) softmax(sharpness (1 - accuracy)) + floor / rows."""

    rate: float = Field(default=0.05, gt=0, le=1)
    """Weight of the newest rollout in its row's accuracy."""
    sharpness: float = Field(default=3.0, ge=0, le=100)
    """How strongly rows of low accuracy are preferred: the inverse temperature of the softmax. 0 draws all alike."""
    floor: float = Field(default=1e-3, gt=0, le=1)
    """Share of draws that ignore accuracy, so that no row is ever out of reach."""
    start: float = Field(default=0.5, ge=0, le=1)
    """Accuracy of a row that was never played."""
    pass_at: float = 0.5
    """Rewards from this on count as passed."""
    mastered_at: float = Field(default=0.9, gt=0, le=1)
    """Accuracy from which a row counts as mastered, in metrics alone."""
    hopeless_at: float = Field(default=0.1, ge=0, lt=1)
    """Accuracy down to which a row counts as hopeless, in metrics alone."""

    def check_keys(self) -> None:
        if self.hopeless_at >= self.mastered_at:
            raise ValueError(
                f"hopeless_at = {self.hopeless_at:g} must be below mastered_at = {self.mastered_at:g}: no row is both"
            )


class ContaminationConfig(Section):
    """When a training row counts as a copy of a held-out one, and how many copies a run puts up with."""

    words: int = Field(default=13, ge=1)
    """Words in a row that two rows must share; of rows of tokens, tokens. Rows of fewer are compared as a whole."""
    max_share: float = Field(default=1.0, ge=0, le=1)
    """A larger share of overlapping training rows ends the run before it starts. At 1 they are left out, however many
    there are, as long as one row is left."""


class BaseEnvConfig(Section):
    """Keys that every environment has."""

    name: str = ""
    """Name in metrics and tickets; the type when left out. Must be unique in a run."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the rollouts, relative to the other environments."""
    group_size: int | None = Field(default=None, ge=1)
    """Rollouts per example; the run's `group_size` when left out."""
    min_group_size: int | None = Field(default=None, ge=1)
    """Fewer surviving rollouts drop the group. 2 for group-relative algorithms, else 1."""
    algo: AlgorithmConfig | None = None
    """This environment's algorithm; the run's `algo` when left out."""
    seats: list[SeatConfig] = Field(default_factory=list)
    """Actors with an algorithm of their own; `algo` credits all others."""
    judges: list[JudgeConfig] = Field(default_factory=list)
    """Frozen models that grade the replies, beside the environment's own reward."""
    task_weight: float = 1.0
    """Factor of the environment's own reward where judges grade too; 0 leaves the reward to them."""
    curriculum: bool | CurriculumConfig = False
    """Draw rows the policy fails at more often than those it masters, by a running accuracy of each row; a table sets
    how."""
    contamination: bool | ContaminationConfig = False
    """Leave out training rows that share thirteen words in a row with a held-out one, and shorter ones that are copies;
    a table sets how many words, and how many such rows are too many."""
    timeout: float = Field(default=120.0, gt=0)
    """Seconds an episode may take before it counts as failed; one that is played again has them again."""
    pause: list[AdvisoryName] | None = None
    """Advisories at which nothing more is drawn from this environment for a while; `advice.pause` when left out."""

    _place: int | None = PrivateAttr(default=None)

    def key(self, name: str) -> str:
        """A key of this section by its path in the run file, `env.0.timeout`, as the command line takes it."""
        return f"env.{self._place}.{name}" if self._place is not None else f"`{name}` in [[env]]"

    def raise_hint(self, name: str) -> str:
        """Advice on a limit that was too low."""
        return f"raise {self.key(name)} (now {getattr(self, name):g}) if it needs longer"

    @field_validator("judges")
    @classmethod
    def _check_judges(cls, judges: list[JudgeConfig]) -> list[JudgeConfig]:
        names = [judge.name for judge in judges]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two judges are named `{twice[0]}`: give each its own `name`")
        return judges

    @model_validator(mode="after")
    def _check_task_weight(self) -> Self:
        grading = [judge for judge in self.judges if judge.automatic]
        if self.task_weight != 1 and not grading:
            raise ValueError(
                f"task_weight = {self.task_weight:g} weighs the environment's own reward against judges that grade by "
                "themselves, and there are none: add [[env.judges]], or leave it out"
            )
        if grading and not self.task_weight and not any(judge.weight for judge in grading):
            raise ValueError("task_weight and the weight of every judge are 0, so each reward is 0: raise one of them")
        return self

    def set_place(self, place: int) -> None:
        """Note which of the run file's environments this is."""
        self._place = place

    @property
    def algorithms(self) -> list[tuple[str, AlgorithmConfig]]:
        """Every algorithm at work here, with the place to name in a sentence about it."""
        common = [("", self.algo)] if self.algo is not None else []
        return [*common, *((f", seat `{seat.name}`", seat.algo) for seat in self.seats)]

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if "/" in name or name == "all":
            raise ValueError("an environment name is used in metric keys: no '/' and not 'all'")
        return name


def _check_source(source: str | list[str] | dict[str, float]) -> str | list[str] | dict[str, float]:
    if not source:
        raise ValueError("name at least one dataset")
    if isinstance(source, list) and (twice := sorted({name for name in source if source.count(name) > 1})):
        raise ValueError(f'`{twice[0]}` is named twice: to draw it more often write {{"{twice[0]}" = 2.0, ...}}')
    for name, weight in source.items() if isinstance(source, dict) else ():
        if weight <= 0:
            raise ValueError(f"the weight of `{name}` is {weight:g}: it must be above 0")
    return source


Source = Annotated[str | list[str] | dict[str, float], AfterValidator(_check_source), PathKey("dataset")]
"""A dataset by file or URI; a list of several, in equal shares; or several with weights."""


class DatasetEnvConfig(BaseEnvConfig):
    """An environment whose rows come from a dataset."""

    dataset: Source
    """Training rows: a .jsonl, .json, .csv, .parquet or .arrow file, `split@owner/name` of the hub, or a URI such as
    `reasoning-gym:gcd?size=100`. A list mixes several in equal shares, `{"a.jsonl" = 3.0, "b.csv" = 1.0}` by weight."""
    eval_dataset: Source | None = None
    """Held-out rows; no evaluation when left out."""
    fields: dict[str, str] = Field(default_factory=dict)
    """Renames fields of the rows, `{gt_answer = "answer"}`; `a.b` reaches into an object."""


class LeagueConfig(Section):
    """Past versions of the policy as opponents. Under LoRA each is one more adapter of the same engine; otherwise each
    has an engine of its own, and its memory."""

    every: int = Field(default=20, ge=1)
    """Steps between two versions that are kept; the untrained policy always is."""
    size: int = Field(default=4, ge=2)
    """Past versions at most. A full league keeps those that are spread best over the run."""
    rule: Literal["latest", "uniform", "hardest"] = "hardest"
    """Which of them is met: the newest, any, or rather those the policy loses to."""
    mirror: float = Field(default=0.5, ge=0, le=1)
    """Share of groups in which the policy meets itself as it is."""
    games: int = Field(default=32, ge=2)
    """Games for the ratings against each past version, at every evaluation."""


class ArenaEnvConfig(BaseEnvConfig, UserCode):
    """Self-play: a `paceline.selfplay.Arena` class, or a function that makes one, by import path."""

    type: Literal["arena"] = "arena"
    train_examples: int = Field(default=1024, ge=1)
    """Draws that make an epoch, where the arena draws its episodes itself (`get_batch`)."""
    league: LeagueConfig | None = None
    """Opponents from the past, and ratings."""


class RewardEnvConfig(DatasetEnvConfig, UserCode):
    """One prompt, one completion, scored by your own function `score(completion, answer)`: parameters are filled by
    name with the row's columns. Rows have `messages`, `prompt` or `question`, and whatever the function asks for."""

    type: Literal["reward"] = "reward"
    reward_weights: dict[str, float] = Field(default_factory=dict)
    """Where `import_path` names a list or dict of functions: what each is multiplied by in the sum, by name; 1 when
    left out."""
    system: str = ""
    """System message put before rows that have none; empty for none."""


class CustomEnvConfig(BaseEnvConfig, UserCode):
    """A user's own, by import path: an `Environment` class, or an async function `rollout(row, seat)` that answers with
    a reward, an `Outcome`, a `Rollout`, or None to drop the episode."""

    type: Literal["custom"] = "custom"
    dataset: Source | None = None
    """Training rows for a function, whatever they hold: a .jsonl, .json, .csv, .parquet or .arrow file,
    `split@owner/name` of the hub, or a URI such as `reasoning-gym:gcd?size=100`. A list mixes several in equal shares,
    `{"a.jsonl" = 3.0, "b.csv" = 1.0}` by weight."""
    eval_dataset: Source | None = None
    """Held-out rows for a function; no evaluation when left out."""
    fields: dict[str, str] = Field(default_factory=dict)
    """Renames fields of the rows, `{gt_answer = "answer"}`; `a.b` reaches into an object."""
