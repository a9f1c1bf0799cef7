"""A Python module with `reward_fn(messages, answer)` and, for several turns, `interact(messages)`."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from paceline.config.env import ModuleEnvConfig as Config
from paceline.data import Row
from paceline.envs.base import POLICY, DatasetEnvironment, EnvError, Outcome, parse_reward
from paceline.envs.offloop import run_user_code
from paceline.rollout import Message, Seat
from paceline.util.importing import import_object


class ModuleEnvironment(DatasetEnvironment[Config]):
    """The policy speaks, `interact` answers, and so on; `reward_fn` judges the whole conversation.

    Functions may be sync or async. They are given the same list throughout an episode, so a module that must remember
    something about a conversation may keep it under `id(messages)`; its optional `cleanup(messages)` is called however
    the episode ends. A module's `tools`, in OpenAI's form, are offered to the policy.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._functions = {
            "reward_fn": _check_function(config, import_object(f"{config.module}:reward_fn"), "reward_fn")
        }
        module = sys.modules[import_object(f"{config.module}:__name__")]
        for name in ("interact", "cleanup"):
            if hasattr(module, name):
                self._functions[name] = _check_function(config, getattr(module, name), name)
        if config.max_turns > 1 and "interact" not in self._functions:
            raise EnvError(f"{config.module}: max_turns = {config.max_turns} needs a function `interact(messages)`")
        self._tools = _check_tools(getattr(module, "tools", None), f"{config.module}: `tools`")

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
        where = f"{self._config.module}: interact returned {answer!r:.200}"
        if not isinstance(answer, list | tuple):
            raise EnvError(f"{where}: return a list of messages to append, [] to end the episode")
        if not all(map(_is_message, answer)):
            raise EnvError(f'{where}: each message is an object like {{"role": "user", "content": "..."}}')
        return list(answer)

    async def _call(self, name: str, *args: Any) -> Any:
        """A user's function, whose every error says where it comes from."""
        where = f"{self._config.module}: {name}"
        try:
            advice = self._config.raise_hint("call_timeout")
            return await run_user_code(self._functions[name], *args, timeout=self._config.call_timeout, advice=advice)
        except Exception as error:
            raise EnvError(f"{where} raised {type(error).__name__}: {error}") from error


def _check_function(config: Config, found: Any, name: str) -> Callable[..., Any]:
    if not callable(found):
        raise EnvError(f"{config.module}: `{name}` is of type {type(found).__name__}: it must be a function")
    return found


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and bool({"content", "tool_calls"} & {*message})
    )


def _check_tools(tools: Any, where: str) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    for tool in tools if isinstance(tools, list | tuple) else [tools]:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise EnvError(f'{where} must be a list of {{"type": "function", "function": {{"name": ...}}}}')
    return list(tools) or None
