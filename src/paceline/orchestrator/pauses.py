"""Pauses environments for some steps when an advisory that the run file names fires for them.

    a step ends -> a thread records it and applies the rules -> pauses are known before the next draws

Pauses take effect when the next weights are published: at staleness 0 no episode runs then, so that a deterministic
run pauses at the same draw.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from paceline.config import RunConfig
from paceline.orchestrator.episodes import TrainEnv
from paceline.rollout import Rollout

Played = list[tuple[str, Sequence[Rollout]]]
"""States, and rollouts that came to them."""


class Advisor(Protocol):
    """Remembers the last steps and finds problems in them (`observe.record.advice`)."""

    def take(self, step: int, metrics: Mapping[str, float], played: Played) -> None: ...
    def advise(self, rules: frozenset[str]) -> Sequence[Any]: ...
    def forget(self, env: str) -> None: ...


class EnvPauses:
    """The paused environments, why, and until when. A run without an advisor, or rules to pause by, pauses none."""

    def __init__(
        self, config: RunConfig, envs: Mapping[str, TrainEnv], advisor: Advisor | None, note: Callable[[str], None]
    ) -> None:
        self._envs, self._note = envs, note
        self._every, self._pause_len = config.advice.interval, config.advice.steps
        usual = config.advice.pause
        self._pause_rules = {
            name: frozenset(usual if env.config.pause is None else env.config.pause) for name, env in envs.items()
        }
        self._rules: frozenset[str] = frozenset().union(*self._pause_rules.values()) if advisor else frozenset()
        self._advisor, self._step = advisor, 0
        self._played: Played = []
        self.pending_advice: asyncio.Task[Sequence[Any]] | None = None
        """Looks for advisories after the latest step; `apply` takes what it found."""
        self._until: dict[str, int] = {}
        """The step after which a resting environment is drawn from again."""
        self._reasons: dict[str, str] = {}
        for env in envs.values():
            env.paused = False

    def played(self, state: str, rollouts: Sequence[Rollout]) -> None:
        """Take finished rollouts, which do not change any more."""
        if self._rules and rollouts:
            self._played.append((state, rollouts))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take a finished step; every `advice.interval` steps the rules are applied."""
        self._step = step
        if self._rules:
            played, self._played = self._played, []
            self.pending_advice = asyncio.create_task(asyncio.to_thread(self._advise, step, dict(metrics), played))

    async def apply(self) -> None:
        """Let what was seen take effect, before anything is drawn."""
        assert self.pending_advice is not None
        look, self.pending_advice = self.pending_advice, None
        try:
            found = await look  # bounded: some thousand rows in memory, asked for a step ago
        except Exception as error:  # a run is worth more than advice
            self._rules, found = frozenset(), []
            self._note(f"advice failed and pauses no environment from now on: {type(error).__name__}: {error}")
        # A paused environment must not have all draws to itself afterwards.
        awake = [env.share for env in self._envs.values() if not (env.paused or env.exhausted)]
        for env in self._envs.values():
            if env.paused and awake:
                env.share_while_paused += max(0.0, min(awake) - env.share)
        for name, until in list(self._until.items()):
            if self._step >= until or not self._rules:
                self._envs[name].paused = False
                del self._until[name]
                if self._advisor is not None:
                    self._advisor.forget(name)  # judged by what comes from now on
                self._note(f"step {self._step}: `{name}` has rested and is drawn from again")
        for advisory in found:
            for name in [advisory.env] if advisory.env else list(self._envs):
                if advisory.rule in self._pause_rules[name] and name not in self._until:
                    self._pause(name, advisory)

    def close(self) -> None:
        if self.pending_advice is not None:
            self.pending_advice.cancel()

    def halt_reason(self) -> str:
        """Why a run that has drawn all it may ends, if that is because environments are paused; else empty."""
        left = [name for name, env in self._envs.items() if env.paused and not env.exhausted]
        if not left:
            return ""
        why = "; ".join(dict.fromkeys(self._reasons[name] for name in left))
        return (
            f"only environments that rest are left to draw from. {why}. Mend that, or take it out of `advice.pause`, "
            "and go on with --resume latest"
        )

    def _advise(self, step: int, metrics: dict[str, float], played: Played) -> Sequence[Any]:
        assert self._advisor is not None
        self._advisor.take(step, metrics, played)
        return self._advisor.advise(self._rules) if step % self._every == 0 else []

    def _pause(self, name: str, advisory: Any) -> None:
        self._envs[name].paused = True
        self._until[name] = self._step + self._pause_len
        seen = f"{advisory.title}. {advisory.seen}"
        self._reasons[name] = f"`{advisory.rule}` of `{name}`: {seen}".rstrip(".")
        self._note(
            f"step {self._step}: nothing more is drawn from `{name}` for {self._pause_len} steps, since `advice.pause` "
            f"names `{advisory.rule}`: {seen}"
        )
