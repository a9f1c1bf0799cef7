"""Plays environments of `verifiers` below 0.4: `load_environment(**args)` answers with a `vf.Environment`.

The environment plays its own episodes, tools and scoring included, with an `openai` client whose address records every
token. Single turns, several, tools with state or without: to this module they are all the same.
"""

import importlib
import logging
import signal
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from paceline.config.env import SPLIT_NAMES
from paceline.config.env import VerifiersConfig as Config
from paceline.data import Row
from paceline.envs.base import POLICY, EnvError, Environment, Outcome, Split, parse_reward
from paceline.envs.verifiers_tasksets import NO_HELD_OUT
from paceline.rollout import Seat

log = logging.getLogger("paceline.envs.verifiers")


class ClassicEnvironment(Environment):
    """Dataset, turns, tools, stop conditions and rubric are the package's. Each function of the rubric is a metric, by
    its name."""

    def __init__(self, config: Config, ident: str) -> None:
        self._config, self._id = config, ident
        self._where = f"verifiers environment `{config.id}`"
        if config.agents or config.env:
            raise EnvError(f"{self._where} has no agents to set: `agents` and `env` are of verifiers 0.4's interface")
        self._envs: dict[Split, Any] = {"train": self._build(config.args)}
        self._datasets: dict[Split, Any] = {}

    def examples(self, split: Split) -> Sequence[Row]:
        config = self._config
        if split == "eval":
            own = config.eval_args is not None
            self._envs["eval"] = self._build(config.args | config.eval_args) if own else self._envs["train"]
            if not own and config.eval_dataset is None and not _has_eval_rows(self._envs["eval"]):
                return []
        self._datasets[split] = found = self._dataset(self._envs[split], *config.rows_of(split))
        return [
            {"split": split, "index": at, "prompt": _prompt_text(prompt)} for at, prompt in enumerate(found["prompt"])
        ]

    def rows(self, name: str, limit: int | None) -> list[Row]:
        """The rows of a split by its name, for environments that judge answers themselves."""
        return [_plain_row(row) for row in self._dataset(self._envs["train"], name, limit)]

    async def play(self, example: Row, seats: Mapping[str, Seat]) -> Outcome | None:
        row = dict(self._datasets[example["split"]][example["index"]])
        env = self._envs[example["split"]]
        async with _client(await seats[POLICY].base_url()) as client:
            found = await env.run_rollout(row, client, POLICY, {})
        if (error := found.get("error")) is not None:
            raise EnvError(f"{self._where}: {_error_text(error)}")
        metrics = {name: float(value) for name, value in (found.get("metrics") or {}).items() if value is not None}
        return Outcome.solo(parse_reward(found["reward"], f"{self._where}: its rubric"), **metrics)

    def _build(self, args: dict[str, Any]) -> Any:
        vf = importlib.import_module("verifiers")
        try:
            with _without_signal_handlers():
                env = vf.load_environment(self._id, **args)
        except Exception as error:  # the environment's own code
            raise EnvError(f"{self._where} cannot be loaded: {error.__cause__ or error}") from error
        if not isinstance(env, vf.Environment):
            raise EnvError(f"{self._where}: load_environment() gave a {type(env).__name__} and no vf.Environment")
        if getattr(env, "message_type", "chat") != "chat":
            raise EnvError(f"{self._where} asks for completions of text: only conversations are played")
        if getattr(env, "requires_group_rollouts", False):
            raise EnvError(f"{self._where} scores the rollouts of a group together: only one at a time is scored here")
        if (most := self._config.max_turns) is not None:
            for one in getattr(env, "envs", [env]):
                if not isinstance(one, vf.SingleTurnEnv):  # which has nothing to answer a reply with
                    one.max_turns = most
        return env

    def _dataset(self, env: Any, name: str, limit: int | None) -> Any:
        """The rows of a split by its name: of the training rows where there are no others."""
        count = -1 if limit is None else limit
        if SPLIT_NAMES[name] == "eval":
            if _has_eval_rows(env):
                return env.get_eval_dataset(n=count)
            log.warning("%s", NO_HELD_OUT.format(self._config.id, name))
        try:
            return env.get_dataset(n=count)
        except ValueError as error:
            raise EnvError(f"{self._where} has no training rows: {error}") from error


def _has_eval_rows(env: Any) -> bool:
    build = getattr(env, "build_eval_dataset", None)
    return (env.eval_dataset if build is None else build()) is not None


def _plain_row(row: Mapping[str, Any]) -> Row:
    """A row in the form of a file's."""
    info = row.get("info")
    answer = row.get("answer") or (info.get("answer") if isinstance(info, Mapping) else None)
    prompt = {"prompt" if isinstance(row["prompt"], str) else "messages": row["prompt"]}
    return prompt | {"answer": "" if answer is None else answer} | ({"info": info} if info else {})


def _prompt_text(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(str(message.get("content") or "") for message in prompt if message.get("role") == "user")


def _error_text(error: Any) -> str:
    return str(error.get("error_chain_repr") or error) if isinstance(error, Mapping) else str(error)


@asynccontextmanager
async def _client(url: str) -> AsyncGenerator[Any]:
    """A client of this address, as the installed version of the package takes it."""
    openai = importlib.import_module("openai")
    # Nothing here leaves the machine: no certificates are read, no proxy is asked. The episode has its own deadline.
    transport = openai.DefaultAsyncHttpxClient(verify=False, trust_env=False, timeout=None)
    async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0, http_client=transport) as client:
        try:
            clients = importlib.import_module("verifiers.clients")
        except ModuleNotFoundError:  # up to 0.1.10
            yield client
        else:
            yield clients.OpenAIChatCompletionsClient(client)


@contextmanager
def _without_signal_handlers() -> Generator[None]:
    """Leave Ctrl-C and SIGTERM to the run: every classic environment takes them over when it is made."""
    real = signal.signal
    signal.signal = lambda *_: None  # ty: ignore[invalid-assignment]
    try:
        yield
    finally:
        signal.signal = real
