"""One prompt, one completion, scored by the user's own reward functions over the rows of a dataset."""

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property, partial
from typing import Any

from paceline.config.env.base import RewardEnvConfig as Config
from paceline.data import BadRow, Row
from paceline.envs.answers import conversation
from paceline.envs.base import POLICY, DatasetEnvironment, EnvError, Outcome, Split, parse_reward
from paceline.envs.offloop import function_name, run_user_code
from paceline.rollout import Reply, Seat
from paceline.util.importing import import_object

COMPLETION, PROMPT = "completion", "prompt"
RESERVED = ("reward", "failed", "length", "truncated_ratio")
"""Metrics that every evaluation has: a part of the reward must not be called like one of them."""
Rewards = Callable[..., Any] | Sequence[Callable[..., Any]] | Mapping[str, Callable[..., Any]]
"""One reward function, several, or several by name."""


@dataclass(frozen=True)
class RewardFunction:
    """A user's function and what it asks for.

    `score(completion, answer)` gets the completion's text and the row's column `answer`. The completion goes to the
    parameter of that name, else to the first one; all others are columns, and `**kwargs` gets every column. A function
    with a parameter `completions` is one of TRL's: it is called with lists of one, and returns a list of one.
    """

    name: str
    function: Callable[..., Any]
    weight: float = 1.0
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise EnvError(f"reward `{self.name}` is {self.function!r}: give a function, such as score(completion)")
        if not math.isfinite(self.weight):
            raise EnvError(f"reward `{self.name}` has the weight {self.weight}: give a finite number")
        if not self._parameters:
            raise EnvError(f"reward `{self.name}` takes no argument: its first one is the completion's text")

    def check(self, row: Row) -> None:
        """Raise `BadRow` where the row lacks a column that the function asks for."""
        target = self._target
        if target in row and target != COMPLETION:
            raise BadRow(
                f"the reward `{self.name}` has no parameter for the completion: its first one, `{target}`, is a column "
                "of this row; call one of them `completion`"
            )
        for name, parameter in self._parameters.items():
            known = name in (target, "completions", "prompts", PROMPT) or name in row or name in self.kwargs
            open_ended = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            if known or open_ended or parameter.default is not parameter.empty:
                continue
            near = get_close_matches(name, row, n=1)
            hint = f"; did you mean `{near[0]}`?" if near else ""
            raise BadRow(
                f"the reward `{self.name}` takes `{name}`, which is no column of this row; it has "
                f"{', '.join(f'`{column}`' for column in row)}{hint}"
            )

    async def __call__(self, row: Row, reply: Reply) -> float | None:
        """Its value for one completion, not yet multiplied by the weight; None where it has no opinion."""
        if "completions" in self._parameters:
            return await self._call_batched(row, reply)
        known = {PROMPT: row["messages"], **row, **self.kwargs}
        target = self._target
        arguments = self._accepted_arguments({name: value for name, value in known.items() if name != target})
        parameter = self._parameters.get(target)
        if parameter is not None and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            call = partial(self.function, reply.text, **arguments)
        else:
            call = partial(self.function, **{target: reply.text}, **arguments)
        value = await run_user_code(call)
        return None if value is None else parse_reward(value, f"the reward `{self.name}`")

    async def _call_batched(self, row: Row, reply: Reply) -> float | None:
        """As TRL calls it: a prompt of messages has a completion of messages, a text one of text."""
        prompt = row.get(PROMPT, row["messages"])
        completion = reply.text if isinstance(prompt, str) else [reply.message]
        columns = {name: [value] for name, value in row.items() if name != PROMPT}
        known = {"prompts": [prompt], "completions": [completion], **columns, **self.kwargs}
        values = await run_user_code(partial(self.function, **self._accepted_arguments(known)))
        if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != 1:
            raise EnvError(
                f"the reward `{self.name}` returned {values!r} for a list of 1 completion: return a list of 1 number, "
                "or name the parameter `completion` to score one at a time"
            )
        return None if values[0] is None else parse_reward(values[0], f"the reward `{self.name}`")

    @property
    def _target(self) -> str:
        """The parameter that gets the completion."""
        first = next(iter(self._parameters.values()))
        if COMPLETION in self._parameters or first.kind is first.VAR_KEYWORD:
            return COMPLETION
        return "completions" if "completions" in self._parameters else first.name

    def _accepted_arguments(self, known: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the known values that the function takes."""
        open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in self._parameters.values())
        return {name: value for name, value in known.items() if open_ended or name in self._parameters}

    @cached_property
    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        try:
            return inspect.signature(self.function).parameters
        except (TypeError, ValueError):  # built in, without a signature: it gets the completion alone
            return {COMPLETION: inspect.Parameter(COMPLETION, inspect.Parameter.POSITIONAL_ONLY)}


class RewardEnvironment(DatasetEnvironment[Config]):
    """Rows of a dataset, and the weighted sum of some reward functions. Where there are several, each is a metric of
    its own: `metric/<env>/<name>` in training, `eval/<env>/<name>` on held-out rows."""

    require = ("messages",)

    def __init__(
        self, config: Config, rewards: Rewards | None = None, rows: Mapping[Split, Sequence[Row]] | None = None
    ) -> None:
        super().__init__(config, rows)
        functions = import_object(config.import_path) if rewards is None else rewards
        self._rewards = reward_functions(functions, config.reward_weights, config.kwargs)

    async def play(self, example: Row, seats: Mapping[str, Seat]) -> Outcome | None:
        reply = await seats[POLICY].chat(example["messages"])
        values = await asyncio.gather(*(reward(example, reply) for reward in self._rewards))
        parts = [(reward, value) for reward, value in zip(self._rewards, values, strict=True) if value is not None]
        if not parts:
            return None
        weighed = (parse_reward(r.weight * value, f"the reward `{r.name}`, weighted,") for r, value in parts)
        metrics = {reward.name: value for reward, value in parts} if len(self._rewards) > 1 else {}
        return Outcome({POLICY: math.fsum(weighed)}, metrics)

    def _row(self, row: Row) -> Row:
        row = row | {"messages": conversation(row, self._config.system)}
        for reward in self._rewards:
            reward.check(row)
        return row


def reward_functions(
    rewards: Rewards, weights: Mapping[str, float], kwargs: Mapping[str, Any] | None = None
) -> list[RewardFunction]:
    """Each function with its name and weight; refuses names that are not unique or are reserved."""
    if callable(rewards):
        pairs = [(_name(rewards), rewards)]
    elif isinstance(rewards, Mapping):
        pairs = [(str(name), function) for name, function in rewards.items()]
    elif isinstance(rewards, Sequence) and not isinstance(rewards, str):
        pairs = [(_name(function), function) for function in rewards]
    else:
        raise EnvError(f"the reward is {rewards!r:.80}: give a function, a list of functions, or a dict of them")
    names = [name for name, _ in pairs]
    if not pairs:
        raise EnvError("the list of reward functions is empty: give at least one function")
    if unknown := sorted(weights.keys() - set(names)):
        known = ", ".join(f"`{name}`" for name in names)
        raise EnvError(f"reward_weights names `{unknown[0]}`, which is no reward function: there are {known}")
    for name in names if len(names) > 1 else ():
        if names.count(name) > 1:
            raise EnvError(f"two reward functions are called `{name}`: give them as a dict, {{name: function}}")
        if name in RESERVED or "/" in name or name.startswith("pass@"):
            raise EnvError(f"`{name}` cannot name a part of the reward: choose another, as in {{'my_{name}': {name}}}")
    return [RewardFunction(name, function, float(weights.get(name, 1.0)), kwargs or {}) for name, function in pairs]


def _name(function: Callable[..., Any]) -> str:
    return function_name(function).rpartition(".")[2]
