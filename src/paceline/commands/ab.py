"""Trains two arms side by side: two adapters on one engine, over the same draws and the same noise."""

import dataclasses
import re
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from statistics import fmean
from typing import TextIO, cast

from paceline.clients import Pool
from paceline.config import RunConfig
from paceline.engine.base import Completion, Engine, GenerateRequest, Listener
from paceline.errors import EngineError, PacelineError
from paceline.model import load_tokenizer, short_switch_interval
from paceline.observe.monitor import Monitor, RunOutcome
from paceline.observe.record import open_run
from paceline.observe.record.paired import Verdict, verdict
from paceline.orchestrator import build_train_envs
from paceline.orchestrator.league_checkpoints import league_envs
from paceline.runtime.local import (
    DriverParts,
    RunParts,
    load_run_model,
    share_cores,
    with_sections,
    with_settled_dtype,
    with_trainer,
)
from paceline.runtime.preflight import refuse_unready
from paceline.runtime.session import Given, Placement, RunSession, run_sessions
from paceline.runtime.signals import STOPPED_BY_USER, Signals
from paceline.weights.update import ServedPolicy, WeightUpdate


class AdapterView:
    """Presents one adapter of an engine as its policy, so that several policies share one engine. The code that made
    the engine starts and ends it."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine, self._name = engine, name
        self._fingerprint = ""
        self.limits, self.stats = engine.limits, engine.stats
        self.pause, self.resume, self.sleep, self.wake = engine.pause, engine.resume, engine.sleep, engine.wake

    async def generate(self, request: GenerateRequest, listener: Listener | None = None) -> Completion:
        routed = dataclasses.replace(request, model=request.model or self._name)
        return await self._engine.generate(routed, listener)

    async def score(
        self, sequences: Sequence[Sequence[int]], temperature: float = 1.0, model: str = ""
    ) -> list[list[float]]:
        return await self._engine.score(sequences, temperature, model or self._name)

    async def load_weights(self, update: WeightUpdate) -> float:
        if update.adapter is None:
            raise EngineError("policies that share an engine are adapters, and this update is of a whole model")
        named = dataclasses.replace(update.adapter, name=update.adapter.name or self._name)
        pause = await self._engine.load_weights(dataclasses.replace(update, adapter=named))
        if named.name == self._name:
            self._fingerprint = update.expected or update.fingerprint()
        return pause

    async def policy(self) -> ServedPolicy:
        adapters = (await self._engine.limits()).adapters
        return ServedPolicy(adapters.get(self._name, 0), self._fingerprint)

    @property
    def busy_seconds(self) -> float:
        return self._engine.busy_seconds

    def start(self) -> None:
        """Nothing to do: the shared engine runs already."""

    def close(self) -> None:
        """Nothing to do: the shared engine serves the other arm too."""


REWARD_METRIC = re.compile("reward/[^/]+/mean")
REAL_DIFFERENCE = "the difference is real"


class ArmComparison:
    """Prints the comparison whenever both arms have taken one more step. The arms go by the names of their runs."""

    def __init__(self, arms: Mapping[str, Path], screen: TextIO | None, signals: Signals | None) -> None:
        self._arms, self._screen, self._signals = arms, screen, signals
        self._names = {arm: path.name for arm, path in arms.items()}
        self._steps = dict.fromkeys(arms, 0)
        self._rewards: dict[str, dict[int, float]] = {arm: {} for arm in arms}
        self._printed_step, self._printed_held_out, self._last_note = 0, "", ""

    def print(self, text: str) -> None:
        if self._screen is not None:
            print(text, file=self._screen, flush=True)

    def print_of(self, arm: str, text: str) -> None:
        self.print(f"{self._names[arm]}: {text}")

    def note(self, arm: str, text: str) -> None:
        """Print a note; one that both arms get is printed once."""
        if text != self._last_note:
            self.print_of(arm, text)
        self._last_note = text

    def record_step(self, arm: str, step: int, reward: float | None) -> None:
        self._steps[arm] = step
        if reward is not None:
            self._rewards[arm][step] = reward
        common = min(self._steps.values())
        if common <= self._printed_step:
            return
        self._printed_step = common
        found = self.verdict()
        rewards = "  ".join(
            f"{self._names[one]} {by_step.get(common, float('nan')):.3f}" for one, by_step in self._rewards.items()
        )
        band = "" if found is None else found.band + (" (real)" if found.decided_after else "")
        self.print(f"step {common}  reward  {rewards}  {band}")
        self._print_held_out(found)
        if found is not None and found.decided_after is not None and self._signals is not None:
            self._signals.stop(REAL_DIFFERENCE, f"{found.sentence}: stopping after this step")

    def _print_held_out(self, found: Verdict | None) -> None:
        """Print the latest evaluation that both made, once."""
        sentence = "" if found is None else found.held_out_sentence
        if sentence and sentence != self._printed_held_out:
            self._printed_held_out = sentence
            self.print(sentence)

    def print_verdict(self) -> None:
        if (found := self.verdict()) is None:
            return
        self.print(found.sentence)
        self._printed_held_out = ""  # the last word names it again
        self._print_held_out(found)
        if found.pairs.different_rows:
            self.print(f"{found.pairs.different_rows} draws were left out: the arms drew other rows there")

    def verdict(self) -> Verdict | None:
        """The records' verdict so far; None while there is none."""
        try:
            one, other = map(open_run, self._arms.values())
            return verdict(one, other)
        except PacelineError:
            return None


class ArmMonitor(Monitor):
    """Reports the steps and notes of one arm to the comparison."""

    def __init__(self, comparison: ArmComparison, arm: str) -> None:
        self._comparison, self._arm = comparison, arm

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        rewards = [value for name, value in metrics.items() if REWARD_METRIC.fullmatch(name)]
        self._comparison.record_step(self._arm, step, fmean(rewards) if rewards else None)

    def note(self, text: str) -> None:
        self._comparison.note(self._arm, text)

    def end(self, outcome: RunOutcome) -> None:
        why = f": {outcome.message}" if outcome.message else ""
        self._comparison.print_of(self._arm, f"{outcome.status} at step {outcome.step}{why}")


SHARED_KEYS = ("model", "engine", "seed", "deterministic", "backend", "device", "placement", "batch_size", "group_size")
"""Keys in which the arms may not differ: one engine serves both, and both draw the same rows."""


def train_arms(
    arms: Mapping[str, RunConfig], *, overwrite: bool = False, screen: TextIO | None = None, until_real: bool = False
) -> int:
    """Train both arms; each leaves a run directory like any other. With `until_real` they end as soon as the difference
    is beyond doubt. Answers with an exit code."""
    check_comparable(arms)
    for config in arms.values():
        refuse_unready(config)
    arms = {arm: with_settled_dtype(config) for arm, config in arms.items()}
    signals = Signals()
    runs = {arm: Path(config.runs) / config.name for arm, config in arms.items()}
    comparison = ArmComparison(runs, screen, signals if until_real else None)
    with _shared_engine(arms) as placement:
        sessions = [RunSession(c, placement(arm), [ArmMonitor(comparison, arm)]) for arm, c in arms.items()]
        results = run_sessions(sessions, overwrite=overwrite, signals=signals)
    comparison.print_verdict()
    ends = {result.outcome.status for result in results}
    return 1 if "failed" in ends else 130 if any(result.outcome.message == STOPPED_BY_USER for result in results) else 0


def check_comparable(arms: Mapping[str, RunConfig]) -> None:
    """Raise PacelineError if the two arms cannot be compared."""
    one, other = arms.values()
    if one.model.lora is None:
        raise PacelineError("`paceline ab` trains two adapters on one engine: set model.lora.rank, such as 8")
    if one.placement != "local" or one.engine.backend != "paceline":
        raise PacelineError('`paceline ab` runs in one process on our own engine: placement = "local"')
    for key in SHARED_KEYS:
        if getattr(one, key) != getattr(other, key):
            raise PacelineError(f"both arms share `{key}`: leave out --a.{key} and --b.{key}, or give it to both")
    if not one.record.all or not other.record.all:
        raise PacelineError("the arms are compared by their records: leave record.all as it is")
    if one.model_dump(exclude={"name"}) == other.model_dump(exclude={"name"}):
        raise PacelineError("both arms are the same: say what differs, such as --b.env.0.algo.type max_rl")


@contextmanager
def _shared_engine(arms: Mapping[str, RunConfig]) -> Generator[Callable[[str], Placement]]:
    """Loads the model, tokenizer and engine that both arms share; yields a function that places an arm on them."""
    config = next(iter(arms.values()))
    assert config.model.lora is not None
    loaded = load_run_model(config)
    rank = max(config.model.lora.rank, config.engine.adapter_rank)
    config = with_sections(config, engine={"adapters": max(len(arms), config.engine.adapters), "adapter_rank": rank})
    engine = loaded.engine(share_cores(config, loaded.parameters))

    def placement(arm: str) -> Placement:
        @asynccontextmanager
        async def place(
            config: RunConfig, run_folder: Path, phase: Callable[[str], None], given: Given
        ) -> AsyncGenerator[RunParts]:
            phase("preparing environments")
            envs = build_train_envs(config, given, len(tokenizer))
            if league_envs(envs):
                raise PacelineError("a league's past would speak for both arms: leave [env.league] out of a comparison")
            driver = DriverParts(share_cores(config, loaded.parameters), tokenizer, envs)
            view = cast(Engine, AdapterView(engine, arm))  # attributes that are bound methods are methods too
            pool = Pool([view])
            with with_trainer(loaded, driver, run_folder / "dumps", pool) as parts, closing(pool):
                yield parts

        return place

    try:
        engine.start()
        with loaded.compute_settings(), short_switch_interval(loaded.device):
            tokenizer = load_tokenizer(config.model)
            yield placement
    finally:
        engine.close()
