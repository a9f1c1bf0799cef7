"""Environments that others wrote: a module of two functions, and the collections of three packages."""

from functools import partial
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from paceline.config.base import ImportPath, PathKey, fits_a_run_file
from paceline.config.env.base import BaseEnvConfig, DatasetEnvConfig


class ModuleEnvConfig(DatasetEnvConfig):
    """A Python module with `reward_fn(messages, answer)` and, for several turns, `interact(messages)`. Rows have
    `messages`, `prompt` or `question`, and `answer`: a string or a list."""

    type: Literal["module"] = "module"
    module: Annotated[str, PathKey("module")]
    """A file, `path/to/env.py`, or the name of an installed module, `package.env`."""
    max_turns: int = Field(default=1, ge=1)
    """Most replies of the policy in an episode. `interact` is never called after the last."""
    call_timeout: float = Field(default=60.0, gt=0)
    """Seconds one call of `interact` or `reward_fn` may take before its episode counts as failed."""


class ReasoningGymConfig(BaseEnvConfig):
    """Tasks of the `reasoning-gym` package: questions made from a seed, each scored by its task's own rule."""

    type: Literal["reasoning-gym"] = "reasoning-gym"
    task: str | None = None
    """One task by name, such as `gcd` or `chain_sum`."""
    tasks: dict[str, float] | list[str] = Field(default_factory=dict)
    """Instead of `task`, several: names with weights (`{gcd = 1.0, chain_sum = 2.0}`), or a list of equal shares."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Settings of the task (`{min_terms = 2}`); with `tasks`, settings by name (`{chain_sum = {min_terms = 2}}`)."""
    size: int = Field(default=1000, ge=1, le=1_000_000)
    """Training rows."""
    eval_size: int = Field(default=100, ge=0, le=1_000_000)
    """Held-out rows; 0 for no evaluation."""
    seed: int = Field(default=0, ge=0, lt=1 << 30)
    """Questions come from here. Held-out ones are drawn from seeds no training row uses."""
    answer: Literal["tags", "text"] = "tags"
    """The text that counts as the answer: between the last `<answer>` and `</answer>`, or the whole reply."""
    system_prompt: str | None = None
    """First message of every row. Left out: with `tags` it asks for them, with `text` there is none."""
    score_timeout: float = Field(default=30.0, gt=0)
    """Seconds a task may take to score one answer before the episode counts as failed."""

    _plain = field_validator("args")(partial(fits_a_run_file, key="args"))

    @model_validator(mode="after")
    def _named(self) -> Self:
        if (self.task is None) == (not self.tasks):
            raise ValueError("name one reasoning-gym task with `task`, or several with `tasks`")
        if unnamed := self.args.keys() - self.weights.keys() if self.tasks else None:
            raise ValueError(f"args for {sorted(unnamed)}, which `tasks` does not name")
        for name, weight in self.weights.items():
            if weight <= 0:
                raise ValueError(f"the weight of task `{name}` is {weight:g}: it must be above 0")
            if not isinstance(self.args_of(name), dict):
                raise ValueError(
                    f"args of task `{name}` must be a table: with `tasks`, write args = {{{name} = {{...}}}}"
                )
        return self

    @property
    def weights(self) -> dict[str, float]:
        """Shares by task."""
        if self.task is not None:
            return {self.task: 1.0}
        return dict(self.tasks) if isinstance(self.tasks, dict) else dict.fromkeys(self.tasks, 1.0)

    def args_of(self, task: str) -> dict[str, Any]:
        """A task's settings."""
        return self.args if self.task is not None else self.args.get(task, {})


class TextArenaConfig(BaseEnvConfig):
    """A game of the `textarena` package, by the policy alone, against itself, or against an opponent."""

    type: Literal["textarena"] = "textarena"
    game: str
    """Its id there, such as `TicTacToe-v0`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Settings of the game."""
    players: int | None = Field(default=None, ge=1)
    """How many play; the fewest the game allows when left out."""
    opponent: ImportPath = "self"
    """The player in the other seats: `self` (the policy, and every seat is trained), `random` (any legal move, where
    the game lists its moves), or the import path of `choose(observation, random) -> action`."""
    max_turns: int = Field(default=100, ge=1)
    """Moves of all players together after which an unfinished game ends, with reward 0 for everyone."""
    size: int = Field(default=1000, ge=1, le=1_000_000)
    """Training rows: each is the seed of a game. Against an opponent the policy's seat changes from row to row."""
    eval_size: int = Field(default=100, ge=0, le=1_000_000)
    """Held-out rows; 0 for no evaluation."""
    seed: int = Field(default=0, ge=0, lt=1 << 30)
    """First seed of the training rows."""
    system_prompt: str = ""
    """First message in front of the game's own words; none when empty."""

    _plain = field_validator("args")(partial(fits_a_run_file, key="args"))


class VerifiersConfig(BaseEnvConfig):
    """An environment of the `verifiers` package, unchanged: its tasks, tools, harness, rewards and judges."""

    type: Literal["verifiers"] = "verifiers"
    id: Annotated[str, PathKey("module")]
    """Its id there: an installed package that exports a `Taskset`; or a file that does, `path/to/file.py` relative to
    the run file, whose name is in lower case."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Settings of the taskset."""
    eval_args: dict[str, Any] | None = None
    """Settings that differ for the held-out rows (`{split = "test"}`); no evaluation when left out."""
    size: int | None = Field(default=None, ge=1)
    """Use only the first n tasks; needed where a taskset never ends."""
    eval_size: int | None = Field(default=100, ge=1)
    """Use only the first n held-out tasks."""
    env: str = ""
    """How agents interact, by its id there (`best-of-n`); the taskset's own way when left out."""
    agents: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Settings by agent, in that package's words (`{agent = {max_turns = 4}}`). Where no harness is chosen, agents
    talk and call tools from this process; where no runtime is chosen, it is this machine."""

    _plain = field_validator("args", "eval_args", "agents")(partial(fits_a_run_file, key="these settings"))
