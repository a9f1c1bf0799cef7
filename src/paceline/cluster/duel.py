"""Two runs side by side on one screen, with what is known of their difference."""

import re
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import TextIO

from paceline.cluster.signals import Signals
from paceline.errors import PacelineError
from paceline.monitor import Monitor, RunOutcome
from paceline.record import open_run
from paceline.record.paired import Verdict, verdict

REWARD = re.compile("reward/[^/]+/mean")
REAL = "the difference is real"


class Duel:
    """Speaks whenever both have taken one more step."""

    def __init__(self, arms: Mapping[str, Path], screen: TextIO | None, signals: Signals | None) -> None:
        self._arms, self._screen, self._signals = arms, screen, signals
        self._steps = dict.fromkeys(arms, 0)
        self._rewards: dict[str, dict[int, float]] = {arm: {} for arm in arms}
        self._told = 0
        self._noted = ""

    def corner(self, arm: str) -> Monitor:
        """Who looks on at one of them."""
        return _Corner(self, arm)

    def say(self, text: str) -> None:
        if self._screen is not None:
            print(text, file=self._screen, flush=True)

    def note(self, arm: str, text: str) -> None:
        """What both are told is said once."""
        if text != self._noted:
            self.say(f"{arm}: {text}")
        self._noted = text

    def step(self, arm: str, step: int, reward: float | None) -> None:
        self._steps[arm] = step
        if reward is not None:
            self._rewards[arm][step] = reward
        common = min(self._steps.values())
        if common <= self._told:
            return
        self._told = common
        known = self.verdict()
        rewards = "  ".join(f"{one} {told.get(common, float('nan')):.3f}" for one, told in self._rewards.items())
        band = "" if known is None else known.band + (" (real)" if known.real else "")
        self.say(f"step {common}  reward  {rewards}  {band}")
        if known is not None and known.real is not None and self._signals is not None:
            self._signals.stop(REAL, f"{known.sentence}: stopping after this step")

    def conclude(self) -> None:
        """Both are over."""
        known = self.verdict()
        if known is None:
            return
        self.say(known.sentence)
        if known.pairs.strangers:
            self.say(f"{known.pairs.strangers} draws were left out: the arms drew other rows there")

    def verdict(self) -> Verdict | None:
        """What the records say by now; None while they say nothing."""
        try:
            one, other = map(open_run, self._arms.values())
            return verdict(one, other)
        except PacelineError:
            return None


class _Corner(Monitor):
    """One of the two runs, as its monitors hear it."""

    def __init__(self, duel: Duel, arm: str) -> None:
        self._duel, self._arm = duel, arm

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        rewards = [value for name, value in metrics.items() if REWARD.fullmatch(name)]
        self._duel.step(self._arm, step, fmean(rewards) if rewards else None)

    def note(self, text: str) -> None:
        self._duel.note(self._arm, text)

    def end(self, outcome: RunOutcome) -> None:
        why = f": {outcome.message}" if outcome.message else ""
        self._duel.say(f"{self._arm}: {outcome.status} at step {outcome.step}{why}")
