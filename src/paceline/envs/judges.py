"""Asks judges, frozen models behind endpoints, to grade episodes, and adds their grades to the reward.

A judge is asked once for each question: what it answered is remembered for the rest of the run, and those who ask the
same while it is being answered wait for the same answer. All judges of a run that name one address share its limits.
"""

import asyncio
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import orjson

from paceline.clients.chat import ChatEndpoint
from paceline.config.env.base import BaseEnvConfig
from paceline.config.env.judges import TASK, JudgeConfig
from paceline.config.secret import read_key
from paceline.data import Row
from paceline.data.rollout import JudgeVerdict, message_text
from paceline.envs.base import EnvError, Environment, JudgeFailed, Outcome, parse_reward
from paceline.envs.verdicts import fill_prompt, instruction, read_grade, transcript
from paceline.errors import EngineError
from paceline.rollout import Message, Seat
from paceline.util.deadlines import gather_or_cancel
from paceline.util.episode_spans import episode_span

REMEMBERED = 16_384
"""Verdicts that a run remembers; the one that was not asked for longest goes first."""
MOST_TEXT = 8_000
"""Characters of a judge's answer that are kept with a rollout, and shown to it again."""
T = TypeVar("T")


class JudgeService:
    """The endpoints of a run's judges, and the verdicts that are remembered. One for each run."""

    def __init__(self) -> None:
        self._endpoints: dict[tuple[str, str | None], tuple[ChatEndpoint, str]] = {}
        """By address and key; with who named it first."""
        self._verdicts: OrderedDict[bytes, asyncio.Task[JudgeVerdict]] = OrderedDict()

    def panel(self, config: BaseEnvConfig, environment: Environment) -> "JudgePanel | None":
        """The judges of an environment, which its own code reaches as `self.judges`; None if it has none."""
        if not config.judges:
            return None
        panel = JudgePanel(self, config, [Judge(judge, config.name, self) for judge in config.judges])
        for judge in panel.values():
            if unknown := [actor for actor in judge.config.actors if actor not in environment.actors]:
                known = ", ".join(f"`{actor}`" for actor in environment.actors)
                raise EnvError(f"{judge.where}: actors: there is no actor `{unknown[0]}`, only {known}")
        environment.set_judges(panel)
        return panel

    def endpoint(self, config: JudgeConfig, url: str, where: str) -> ChatEndpoint:
        model = config.model
        made = ChatEndpoint(url, read_key(model.api_key_env, where))
        found, _ = self._endpoints.setdefault((made.address, model.api_key_env), (made, where))
        found.limit(model.concurrency, model.requests_per_minute)
        return found

    async def check(self) -> None:
        """Raise a sentence unless every endpoint answers and takes its key."""
        for endpoint, where in self._endpoints.values():
            try:
                await endpoint.check()
            except EngineError as error:
                raise EnvError(f"{where}: {error}: start it, or take the judge out of the run file") from None

    async def remember(self, question: bytes, ask: Callable[[], Coroutine[Any, Any, JudgeVerdict]]) -> JudgeVerdict:
        """The verdict on a question, asked anew only where it is not remembered or being asked right now."""
        known = self._verdicts.get(question)
        cached = known is not None and not known.cancelled()
        if known is None or not cached:
            known = self._verdicts[question] = asyncio.ensure_future(ask())
            known.add_done_callback(lambda task: self._forget_failure(question, task))
            while len(self._verdicts) > REMEMBERED:
                self._verdicts.popitem(last=False)
        self._verdicts.move_to_end(question)
        # One who leaves must not cut short what others wait for; each answer has deadlines of its own.
        verdict = await asyncio.shield(known)  # bounded: by the judge's timeouts and attempts
        return replace(verdict, cached=True, seconds=0.0) if cached else verdict

    def _forget_failure(self, question: bytes, task: "asyncio.Task[JudgeVerdict]") -> None:
        if (task.cancelled() or task.exception() is not None) and self._verdicts.get(question) is task:
            del self._verdicts[question]

    async def aclose(self) -> None:
        asked = [task for task in self._verdicts.values() if not task.done()]
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)  # bounded: they are cancelled
        for endpoint, _ in self._endpoints.values():
            await endpoint.aclose()


class Judge:
    """A frozen model that grades. Its own section of the run file says how."""

    def __init__(self, config: JudgeConfig, env: str, service: JudgeService) -> None:
        self.config = config
        self.where = f"judge `{config.name}` of environment `{env}`"
        self._service, self._turns = service, count()
        self._endpoints = [service.endpoint(config, url, self.where) for url in config.model.urls]
        self._prompt = read_prompt(config, self.where)

    async def grade(self, seat: Seat, row: Row) -> JudgeVerdict:
        """Its verdict on the last reply of a seat, kept with the seat's rollout."""
        verdict = await self.ask(self.question(seat, row))
        seat.verdicts.append(verdict)
        return verdict

    async def ask(self, messages: Sequence[Message]) -> JudgeVerdict:
        """Its verdict on a question of your own, in which you say how to answer."""
        with episode_span("judge"):
            return await self._ask_or_remember(self._body(messages))

    async def _ask_or_remember(self, body: dict[str, Any]) -> JudgeVerdict:
        if not self.config.cache:
            return await self._ask(body)
        config = self.config
        rule = [config.verdict, config.key, config.scale, config.name, config.weight, self._endpoints[0].name]
        return await self._service.remember(orjson.dumps([rule, body], default=str), lambda: self._ask(body))

    def question(self, seat: Seat, row: Row) -> list[Message]:
        """The judge's prompt about the last reply of a seat."""
        turn = seat.turns[-1]
        fields: dict[str, Any] = {**row, "reply": turn.text}
        if turn.messages is not None:
            fields["conversation"] = transcript(turn.messages)
        elif "{conversation}" in self._prompt:
            raise EnvError(f"{self.where}: this environment speaks in tokens: leave {{conversation}} out of the prompt")
        text = f"{fill_prompt(self._prompt, fields, self.where)}\n\n{instruction(self.config)}"
        system = [{"role": "system", "content": self.config.system}] if self.config.system else []
        return [*system, {"role": "user", "content": text}]

    def _body(self, messages: Sequence[Message]) -> dict[str, Any]:
        config = self.config
        body: dict[str, Any] = {"model": config.model.name, "messages": list(messages), "max_tokens": config.max_tokens}
        body |= {} if config.temperature is None else {"temperature": config.temperature}
        return {key: value for key, value in (body | config.extra_body).items() if value != "omit"}

    async def _ask(self, body: dict[str, Any]) -> JudgeVerdict:
        config, model, seconds, finish = self.config, self.config.model, 0.0, None

        async def answer(unreadable: Sequence[Unreadable]) -> str:
            nonlocal seconds, finish
            messages = list(body["messages"])
            for text, problem in unreadable:
                again = f"That cannot be read: {problem}. {instruction(config)}"
                messages.append({"role": "assistant", "content": text[:MOST_TEXT] or "(no answer)"})
                messages.append({"role": "user", "content": again})
            endpoint = self._endpoints[next(self._turns) % len(self._endpoints)]
            choice, took = await endpoint.chat({**body, "messages": messages}, model.timeout, model.retries)
            seconds, finish = seconds + took, choice.get("finish_reason")
            return answer_text(choice["message"])

        def read(text: str) -> tuple[float, float]:
            if finish == "length":
                raise ValueError(f"it was cut off at max_tokens = {config.max_tokens}")
            return read_grade(config, text)

        try:
            text, (value, score), attempts = await ask_until_readable(answer, read, config.attempts)
        except EngineError as error:
            cause = str(error)
        except JudgeFailed as error:
            cause = f"{error}; it answers at {' and '.join(model.urls)}"
        else:
            facts: dict[str, Any] = {
                "text": text[:MOST_TEXT],
                "model": model.name,
                "seconds": seconds,
                "attempts": attempts,
            }
            return JudgeVerdict(judge=config.name, score=score, weight=config.weight, value=value, **facts)
        # Without a cause: a judge that is gone is no failure of the policy's engines.
        raise JudgeFailed(f"{self.where}, `{model.name}`: {cause}")


Unreadable = tuple[str, ValueError]
"""An answer of a judge, and why no grade can be read in it."""


async def ask_until_readable(
    ask: Callable[[Sequence[Unreadable]], Awaitable[str]], read: Callable[[str], T], attempts: int
) -> tuple[str, T, int]:
    """The first answer that `read` takes, what it read, and how many answers it took. `ask` is given those before."""
    unreadable: list[Unreadable] = []
    while len(unreadable) < attempts:
        text = await ask(unreadable)
        try:
            return text, read(text), len(unreadable) + 1
        except ValueError as error:
            unreadable.append((text, error))
    text, problem = unreadable[0]
    raise JudgeFailed(
        f"the judge gave no verdict that can be read in {attempts} answers; the first: {text[:80]!r} ({problem})"
    )


def answer_text(message: Mapping[str, Any]) -> str:
    """All that a judge wrote, with thoughts that its server keeps apart."""
    content, thoughts = message.get("content") or "", message.get("reasoning_content") or message.get("reasoning")
    text = content if isinstance(content, str) else message_text({"content": content})
    return f"<think>{thoughts}</think>{text}" if isinstance(thoughts, str) and thoughts else text


def read_prompt(config: JudgeConfig, where: str) -> str:
    """The question of a judge, wherever its section keeps it."""
    if config.prompt_file is None:
        return config.prompt
    try:
        return Path(config.prompt_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EnvError(f"{where}: prompt_file {config.prompt_file} cannot be read: {error}") from None


class JudgePanel(Mapping[str, Judge]):
    """The judges of an environment, by name."""

    def __init__(self, service: JudgeService, config: BaseEnvConfig, judges: Sequence[Judge]) -> None:
        self.service = service
        self._judges = {judge.config.name: judge for judge in judges}
        self._task_weight = config.task_weight

    def __getitem__(self, name: str) -> Judge:
        if name not in self._judges:
            known = ", ".join(f"`{judge}`" for judge in self._judges)
            raise EnvError(f"there is no judge `{name}`: the run file names {known}")
        return self._judges[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._judges)

    def __len__(self) -> int:
        return len(self._judges)

    async def grade_episode(self, row: Row, seats: Mapping[str, Seat], outcome: Outcome) -> Outcome:
        """The outcome with the grades of the automatic judges in it: each seat that spoke gets the weighted sum of its
        own reward and its grades."""
        asked = [
            (name, judge)
            for name, seat in seats.items()
            if seat.turns and seat.trained and name in outcome.rewards
            for judge in self._judges.values()
            if judge.config.automatic and seat.actor in (judge.config.actors or (seat.actor,))
        ]
        found = await gather_or_cancel([judge.ask(judge.question(seats[name], row)) for name, judge in asked])
        rewards = dict(outcome.rewards)
        for name in dict.fromkeys(name for name, _ in asked):
            own = float(outcome.rewards[name])
            parts = [JudgeVerdict(judge=TASK, score=own, weight=self._task_weight, value=own)]
            parts += [verdict for (seat, _), verdict in zip(asked, found, strict=True) if seat == name]
            seats[name].verdicts += parts
            total = math.fsum(part.weight * part.score for part in parts)
            rewards[name] = parse_reward(total, f"the weighted sum of the judges' grades for `{name}`")
        return replace(outcome, rewards=rewards)


def verdict_metrics(verdicts: Sequence[JudgeVerdict]) -> dict[str, float]:
    """The mean grade of each judge as `judge/NAME`, and the environment's own reward as `task_reward`."""
    scores: dict[str, list[float]] = {}
    for verdict in verdicts:
        scores.setdefault("task_reward" if verdict.judge == TASK else f"judge/{verdict.judge}", []).append(
            verdict.score
        )
    return {name: fmean(given) for name, given in scores.items()}
