"""Defines environments: they list examples and play episodes, in messages rather than tokens."""

import importlib
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from paceline.config.env import CustomEnvConfig, DatasetEnvConfig, ReasoningGymConfig, RetrievalConfig, TextArenaConfig
from paceline.data import BadRow, Row, listed_rows, open_dataset
from paceline.data.rows import TOKENS
from paceline.errors import PacelineError
from paceline.rollout import Message, Reply, Seat

if TYPE_CHECKING:
    from paceline.envs.judges import Judge

Split = Literal["train", "eval"]
POLICY = "policy"
"""The seat of a one-player task."""


LARGEST_REWARD = 1e18
"""Its square, and the sum of any group's squares, fit the 32 bits that advantages are kept in."""


class EnvError(PacelineError):
    """An environment that cannot be used, as a sentence for the user."""


class JudgeFailed(PacelineError):
    """A model that grades could not be reached, or what it said is no grade. Raise it from whatever asks such a model:
    `failures.judge` in the run file then says what becomes of the episode."""


class RefusedRollout(EnvError):
    """A rollout that cannot train: it is dropped, and counted as `failed/episode/REASON`."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an episode ended for each seat."""

    rewards: Mapping[str, float]
    metrics: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def solo(cls, reward: float, **metrics: float) -> "Outcome":
        return cls({POLICY: reward}, metrics)

    def __post_init__(self) -> None:
        for seat, reward in self.rewards.items():
            if problem := reward_problem(reward):
                raise EnvError(f"the reward of seat `{seat}` is {short_repr(reward)}: {problem}")


class Environment(ABC):
    """Examples and episodes. Subclass it, or `SingleTurn` for one question and one answer."""

    actors: Sequence[str] = (POLICY,)
    """Seats the policy plays."""

    judges: "Mapping[str, Judge]" = MappingProxyType({})
    """The judges that the run file names for this environment: `await self.judges[NAME].grade(seat, example)`."""

    def set_judges(self, judges: "Mapping[str, Judge]") -> None:
        """Hand over the judges, before the first episode."""
        self.judges = judges

    @abstractmethod
    def examples(self, split: Split) -> Sequence[Row]:
        """The rows of a split. Called once; the order must not change between runs."""

    async def prepare(self, example: Row) -> Row:
        """Add what all episodes of a group must have in common. Called once per group, on a copy of the row."""
        return example

    async def assign(self, example: Row, draw: int, dice: random.Random) -> Row:
        """Add random choices to the row of a training group, before `prepare`. A draw that a restart interrupted is
        assigned again, with the same dice, and should get the same."""
        return example

    def forget(self, before: int) -> None:  # noqa: B027 - optional by design
        """Draws before this one are trained or dropped, and are never assigned again."""

    @abstractmethod
    async def play(self, example: Row, seats: Mapping[str, Seat]) -> Outcome | None:
        """Play one episode on a copy of a row. None drops it."""

    def state(self) -> dict[str, Any]:
        """State of this environment for the checkpoint, as JSON."""
        return {}

    def load(self, state: dict[str, Any]) -> None:  # noqa: B027 - optional by design
        """Back to a checkpoint's state."""


class SingleTurn(Environment):
    """One prompt, one reply, one score."""

    def prompt(self, example: Row) -> list[Message]:
        return example["messages"]

    @abstractmethod
    def score(self, example: Row, reply: Reply) -> Outcome:
        """Judge a reply."""

    async def play(self, example: Row, seats: Mapping[str, Seat]) -> Outcome | None:
        reply = await seats[POLICY].chat(self.prompt(example))
        return self.score(example, reply)


def parse_reward(value: Any, where: str) -> float:
    """Convert a reward that user code returned to a float."""
    if problem := reward_problem(value):
        raise EnvError(f"{where} returned {short_repr(value)}: {problem}")
    return float(value)


def parse_outcome(value: Any, where: str) -> Outcome | None:
    """The outcome of an episode, where user code returned it or a reward; None drops the episode."""
    return value if value is None or isinstance(value, Outcome) else Outcome.solo(parse_reward(value, where))


def reward_problem(value: Any) -> str:
    """Why a value cannot be a reward; empty if it can."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return "return a number, a bool, or None to drop the episode"
    try:
        size = abs(float(value))
    except Exception as error:  # an array of several numbers, an integer beyond all floats
        return f"a reward must be one finite number ({error})"
    if not size <= LARGEST_REWARD:
        return f"a reward must be a finite number of at most {LARGEST_REWARD:g}; scale it"
    return ""


def short_repr(value: Any) -> str:
    """A short `repr` of a value of user code, for error messages."""
    try:
        text = repr(value)
    except Exception as error:  # also an integer of more digits than Python prints
        return f"something of type {type(value).__name__} ({error})"
    return text if len(text) <= 80 else f"{text[:77]}..."


def import_extra(package: str) -> Any:
    """A package that the extra `tasks` brings."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        name, missing = package.replace("_", "-"), (error.name or "").partition(".")[0]
        if missing in ("", package) or not isinstance(error, ModuleNotFoundError):
            raise EnvError(f'{name} is not installed: pip install "paceline[tasks]"') from error
        raise EnvError(f"{name} needs `{missing}`, which is not installed: pip install {missing} ({error})") from error


_TOKEN_LIMITS: ContextVar[tuple[int | None, int | None]] = ContextVar("tokens there are", default=(None, None))


@contextmanager
def token_limits(vocabulary: int | None, context: int | None = None) -> Generator[None]:
    """Refuse rows of exact tokens that hold an id the policy does not have, or leave no room in its context for a
    reply; None takes them all."""
    token = _TOKEN_LIMITS.set((vocabulary, context))
    try:
        yield
    finally:
        _TOKEN_LIMITS.reset(token)


_ROW_LIMIT: ContextVar[int | None] = ContextVar("rows of each dataset", default=None)


@contextmanager
def limit_rows(count: int) -> Generator[None]:
    """Limit environments to the first rows of their datasets, which is enough to check their fields."""
    token = _ROW_LIMIT.set(count)
    try:
        yield
    finally:
        _ROW_LIMIT.reset(token)


DatasetSection = DatasetEnvConfig | CustomEnvConfig | RetrievalConfig
"""Sections of the run file that name datasets."""


def dataset_rows(
    config: DatasetSection,
    split: Split,
    refine: Callable[[Row], Row] | None = None,
    *,
    require: Sequence[str] = (),
    prompted: bool = True,
) -> Sequence[Row]:
    """The rows a section of the run file names for a split; none when it names none. `refine` turns a row into the
    environment's form; it raises `BadRow`, and the reader adds file and line."""
    source = config.dataset if split == "train" else config.eval_dataset
    if source is None:
        return []
    return open_dataset(
        source, config.fields, limit=_ROW_LIMIT.get(), require=require, prompted=prompted, refine=refine
    )


C = TypeVar("C", bound=DatasetSection)


class DatasetEnvironment(Environment, Generic[C]):
    """An environment over the datasets that its section of the run file names."""

    require: Sequence[str] = ("messages", "answer")
    """Fields that every row must have."""
    prompted = True
    """Whether a row must hold a prompt."""

    def __init__(self, config: C, rows: Mapping[Split, Sequence[Row]] | None = None) -> None:
        self._config = config
        self._rows = rows or {}
        """Rows that are objects of this process, in place of those that the section names."""

    def examples(self, split: Split) -> Sequence[Row]:
        refine = partial(self._checked_row, *_TOKEN_LIMITS.get())
        if split in self._rows:
            name = "dataset" if split == "train" else "eval_dataset"
            return listed_rows(self._rows[split], name, self._config.fields, prompted=self.prompted, refine=refine)
        return dataset_rows(self._config, split, refine, require=self.require, prompted=self.prompted)

    def _checked_row(self, vocabulary: int | None, context: int | None, row: Row) -> Row:
        ids = row.get(TOKENS, (0,))
        if vocabulary is not None and (largest := max(ids)) >= vocabulary:
            raise BadRow(f"`{TOKENS}` holds {largest}, and the model's vocabulary ends at {vocabulary - 1}")
        if context is not None and len(ids) >= context:
            raise BadRow(
                f"`{TOKENS}` has {len(ids)} tokens, and engine.max_context = {context} leaves no room for a reply"
            )
        return self._row(row)

    def _row(self, row: Row) -> Row:
        """A row in the environment's form. Raises `BadRow`, and the reader adds file and line."""
        return row


EVAL_SEED_OFFSET = 1 << 30
"""Distance between the seeds of training and held-out rows: row i is made from seed + i, so neighbours share rows."""


def row_seeds(config: ReasoningGymConfig | TextArenaConfig, split: Split) -> range:
    """The seed of each generated row of a split."""
    first, size = (0, config.size) if split == "train" else (EVAL_SEED_OFFSET, config.eval_size)
    return range(config.seed + first, config.seed + first + size)
