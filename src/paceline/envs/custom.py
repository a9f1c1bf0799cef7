"""Loads a user's environment by import path: a class, a function that plays one row, or a module.

A module has `reward_fn(messages, answer)` and, for several turns, `interact(messages)`.
"""

import inspect
import math
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from paceline.config.env import CustomEnvConfig as Config
from paceline.config.env import ModuleEnvConfig
from paceline.data import BadRow, Row, Ticket
from paceline.data.rows import check_messages
from paceline.engine import Finish
from paceline.envs.base import (
    POLICY,
    DatasetEnvironment,
    EnvError,
    Environment,
    Outcome,
    Split,
    parse_outcome,
    parse_reward,
)
from paceline.envs.offloop import run_user_code
from paceline.envs.rollout_service import LARGEST_LOGPROB
from paceline.errors import PacelineError
from paceline.rollout import Message, Rollout, RolloutSample, Seat, Turn
from paceline.util.importing import import_object
from paceline.util.user_code import user_code

MAX_FLOAT = 3e38
"""The largest that fits the streams' type."""
UNKNOWN_TICKET = Ticket(0, "", 0, 0, 0)
STREAMS = ("prompt_ids", "completion_ids", "logprobs", "versions", "log_z")


def accept_rollout(
    rollout: Rollout | RolloutSample, seat: Seat, where: str, version: int | None = None
) -> Outcome | None:
    """The outcome of a rollout that user code built. Its turns replace those that the seat recorded; its actor and
    ticket are ignored, since the run sets them. A sample without versions is of this one."""
    if isinstance(rollout, RolloutSample):
        try:
            turns = rollout.turns(version, seat.setting("temperature"))
        except PacelineError as error:
            raise EnvError(f"{where}: {error}") from error
        rollout = Rollout(ticket=UNKNOWN_TICKET, member=0, turns=turns, reward=rollout.reward, metrics=rollout.metrics)
    if rollout.dropped:
        return None
    if rollout.error is not None:
        raise EnvError(f"{where} returned a Rollout with an error: {rollout.error}")
    if rollout.reward is None:
        raise EnvError(f"{where} returned a Rollout without a `reward`: set it, or return None to drop the episode")
    if not rollout.turns:
        raise EnvError(f"{where} returned a Rollout without turns: return None to drop the episode")
    numbered = enumerate(rollout.turns, start=1)
    turns = [_check_turn(turn, f"{where}: turn {at}", seat.vocabulary - 1, seat.version) for at, turn in numbered]
    seat.turns[:] = [replace(turn, text=turn.text or seat.decode(turn.completion_ids)) for turn in turns]
    return Outcome({POLICY: parse_reward(rollout.reward, where)}, rollout.metrics)


def _check_turn(turn: Any, where: str, last_token: int, version: int) -> Turn:
    """The turn with plain lists of one length, sampled up to this version or the one that is being published."""
    if not isinstance(turn, Turn):
        raise EnvError(f"{where} of the Rollout is of type {type(turn).__name__}: make it a paceline.rollout.Turn")
    largest = {"prompt_ids": last_token, "completion_ids": last_token, "versions": version + 1}
    streams: dict[str, Any] = {}
    for name in STREAMS:
        values, place = getattr(turn, name), f"{where}: `{name}`"
        if values is None:
            if name == "log_z":
                continue
            raise EnvError(f"{place} is missing: every turn needs it")
        if "completion_ids" in streams and len(values) != (sampled := len(streams["completion_ids"])):
            raise EnvError(
                f"{place} has {len(values)} entries, but `completion_ids` has {sampled}: "
                "every sampled token needs its own"
            )
        most = largest.get(name)
        streams[name] = _check_floats(values, place) if most is None else _check_integers(values, place, most)
        if name == "logprobs" and (above := [value for value in streams[name] if value > LARGEST_LOGPROB]):
            raise EnvError(f"{place} holds {above[0]}: a log probability is at most 0")
        if not streams[name]:
            raise EnvError(f"{place} is empty: a turn needs a prompt, and something the policy said")
    if turn.finish not in get_args(Finish):
        raise EnvError(f"{where}: `finish` is {turn.finish!r}: write " + " or ".join(map(repr, get_args(Finish))))
    if not isinstance(turn.temperature, int | float) or not 0 <= turn.temperature < math.inf:
        raise EnvError(f"{where}: `temperature` is {turn.temperature!r}: it must be a number from 0")
    return replace(turn, **streams)


def _check_integers(values: Sequence[Any], where: str, most: int) -> list[int]:
    for value in values:
        if isinstance(value, bool) or not hasattr(value, "__index__") or not 0 <= int(value) <= most:
            raise EnvError(f"{where} holds {value!r}: it must hold whole numbers from 0 to {most}")
    return [int(value) for value in values]


def _check_floats(values: Sequence[Any], where: str) -> list[float]:
    for value in values:
        if not hasattr(value, "__float__") or not abs(value) < MAX_FLOAT:
            raise EnvError(f"{where} holds {value!r}: it must hold finite numbers")
    return [float(value) for value in values]


ASYNC_ONLY = "{}: an environment function must be `async def rollout(row, seat)`"
NEEDS_ROWS = "environment `{}`: a function needs rows, name them with `dataset`"


class FunctionEnvironment(DatasetEnvironment[Config]):
    """`async def rollout(row, seat)` over a dataset; it returns a reward, an `Outcome`, a `Rollout`, a
    `RolloutSample` or None (drop). One that takes the row alone samples from the policy by itself. A parameter `judges`
    gets the judges of the run file."""

    require = ()
    prompted = False

    def __init__(
        self, play: Callable[..., Awaitable[Any]], config: Config, rows: Mapping[Split, Sequence[Row]] | None = None
    ) -> None:
        if not inspect.iscoroutinefunction(play):
            raise EnvError(ASYNC_ONLY.format(config.import_path))
        if config.dataset is None:
            raise EnvError(NEEDS_ROWS.format(config.name))
        super().__init__(config, rows)
        self._play = play
        parameters = inspect.signature(play).parameters
        self._takes_judges = "judges" in parameters
        own = [p for name, p in parameters.items() if name not in config.kwargs and name != "judges"]
        kinds = [p.kind for p in own if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)]
        self._takes_seat = len(kinds) != 1 or kinds[0] == inspect.Parameter.VAR_POSITIONAL

    async def play(self, example: Row, seats: Mapping[str, Seat]) -> Outcome | None:
        seat = seats[POLICY]
        given, version = ((example, seat), None) if self._takes_seat else ((example,), seat.version)
        judges = {"judges": self.judges} if self._takes_judges else {}
        answer = await self._play(*given, **judges, **self._config.kwargs)
        if isinstance(answer, Rollout | RolloutSample):
            return accept_rollout(answer, seat, self._config.import_path, version)
        return parse_outcome(answer, self._config.import_path)


def custom_environment(config: Config) -> Environment:
    """The environment that the import path names, ready to play."""
    found = import_object(config.import_path)
    if inspect.isclass(found) and issubclass(found, Environment):
        with user_code(f"the environment `{config.import_path}` ([[env]] `{config.name}`)"):
            return found(**config.kwargs)
    if callable(found) and not inspect.isclass(found):
        return FunctionEnvironment(found, config)
    raise EnvError(f"{config.import_path}: neither a paceline.Environment class nor an async function")


class ModuleEnvironment(DatasetEnvironment[ModuleEnvConfig]):
    """The policy speaks, `interact` answers, and so on; `reward_fn` judges the whole conversation.

    Functions may be sync or async. They are given the same list throughout an episode, so a module that must remember
    something about a conversation may keep it under `id(messages)`; its optional `cleanup(messages)` is called however
    the episode ends. A module's `tools`, in OpenAI's form, are offered to the policy.
    """

    def __init__(self, config: ModuleEnvConfig) -> None:
        super().__init__(config)
        import_object(f"{config.module}:reward_fn")  # which a module must have
        module = sys.modules[import_object(f"{config.module}:__name__")]
        names = ("reward_fn", "interact", "cleanup")
        self._functions = {name: getattr(module, name) for name in names if hasattr(module, name)}
        for name, found in self._functions.items():
            if not callable(found):
                raise EnvError(f"{config.module}: `{name}` is of type {type(found).__name__}: it must be a function")
        if config.max_turns > 1 and "interact" not in self._functions:
            raise EnvError(f"{config.module}: max_turns = {config.max_turns} needs a function `interact(messages)`")
        self._tools = _check_tools(getattr(module, "tools", None), f"{config.module}: `tools`")

    def _row(self, row: Row) -> Row:
        answers = row["answer"] if isinstance(row["answer"], list) else [row["answer"]]
        if not answers or any(text is None or (isinstance(text, str) and not text.strip()) for text in answers):
            raise BadRow(f"`answer` must not be empty: it is {row['answer']!r}")
        return row

    async def play(self, example: Row, seats: Mapping[str, Seat]) -> Outcome | None:
        messages: list[Message] = example["messages"]
        try:
            turns = await self._converse(messages, seats[POLICY])
            reward = await self._call("reward_fn", messages, example["answer"])
        finally:
            # Also when the episode failed: the next list may live at the same address.
            if "cleanup" in self._functions:
                await self._call("cleanup", messages)
        if reward is None:
            return None
        return Outcome.solo(parse_reward(reward, f"{self._config.module}: reward_fn"), turns=float(turns))

    async def _converse(self, messages: list[Message], seat: Seat) -> int:
        """Talk until `interact` has nothing more to say; returns the number of replies."""
        turns = 0
        while True:
            reply = await seat.chat(messages, self._tools)
            messages.append(reply.message)
            turns += 1
            if turns == self._config.max_turns or not (answer := await self._answer(messages)):
                return turns
            messages.extend(answer)

    async def _answer(self, messages: list[Message]) -> list[Message]:
        answer = await self._call("interact", messages)
        try:
            return check_messages(answer, "messages")
        except BadRow as problem:
            raise EnvError(
                f"{self._config.module}: interact returned {answer!r:.200}: {problem}. Return a list of messages to "
                'append, {"role": "user", "content": "..."}, or [] to end the episode'
            ) from None

    async def _call(self, name: str, *args: Any) -> Any:
        """A user's function, whose every error says where it comes from."""
        config = self._config
        advice = config.raise_hint("call_timeout")
        try:
            return await run_user_code(self._functions[name], *args, timeout=config.call_timeout, advice=advice)
        except Exception as error:
            raise EnvError(f"{config.module}: {name} raised {type(error).__name__}: {error}") from error


def _check_tools(tools: Any, where: str) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    for tool in tools if isinstance(tools, list | tuple) else [tools]:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise EnvError(f'{where} must be a list of {{"type": "function", "function": {{"name": ...}}}}')
    return list(tools) or None
