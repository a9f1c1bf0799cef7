"""Four tasks from their run files: tools, several turns, self-play, one actor that teaches another.

Every bar is a difference between the policy's first and last evaluation of the same run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.config import load
from paceline.runtime.league import leagues
from paceline.selfplay import Payoff
from rows import Row
from trials import Line, evaluations, seconds, train


@dataclass(frozen=True)
class Measure:
    """Something that must rise by `bar` between the first evaluation and the last."""

    name: str
    of: Callable[[Line], float]
    bar: float


@dataclass(frozen=True)
class Task:
    name: str
    file: str
    measures: tuple[Measure, ...]
    league: str = ""
    """The environment whose versions must be told apart by their ratings."""

    def __call__(self, seed: int, runs: Path) -> Row:
        run = train(self.file, runs / f"{self.name}-{seed}", seed)
        first, *_, last = evaluations(run)
        changes = {m.name: (m.of(first), m.of(last)) for m in self.measures}
        cleared = all(changes[m.name][1] - changes[m.name][0] >= m.bar for m in self.measures)
        if self.league:
            payoff = leagues(run)[self.league]
            changes |= standing(payoff)
            cleared = cleared and told_apart(payoff)
        (start, end), *_ = changes.values()
        algorithm = load(run / "config.toml").config.env[0].algo
        assert algorithm is not None
        others = dict(list(changes.items())[1:])
        return Row(self.name, algorithm.type, seed, start, end, last["step"], seconds(run), others, cleared)


def at(key: str) -> Callable[[Line], float]:
    return lambda evaluation: evaluation[key]


def mean(*keys: str) -> Callable[[Line], float]:
    return lambda evaluation: sum(evaluation[key] for key in keys) / len(keys)


TASKS = (
    Task(
        "calculator",
        "examples/learn/calculator.toml",
        (
            Measure("correct", at("eval/calculator/correct"), 0.2),
            Measure("tool calls", at("eval/calculator/calls"), 0.5),
            Measure("reward", at("eval/calculator/reward"), 0.2),
        ),
    ),
    Task(
        "alphabet-sort", "examples/learn/alphabet_sort.toml", (Measure("exact", at("eval/alphabet-sort/exact"), 0.2),)
    ),
    Task(
        "tic-tac-toe",
        "examples/arenas/tic_tac_toe.toml",
        (Measure("wins against random", mean("eval/tic-tac-toe/x/win", "eval/tic-tac-toe/o/win"), 0.25),),
        league="tic-tac-toe",
    ),
    Task(
        "proposer-solver",
        "examples/arenas/proposer_solver.toml",
        (Measure("held-out sums", at("eval/proposer-solver/solver/reward"), 0.1),),
    ),
)


def ends(payoff: Payoff) -> tuple[str, str]:
    """The first version and the last one."""
    ordered = sorted(payoff.players, key=lambda player: int(player[1:]))
    return ordered[0], ordered[-1]


def standing(payoff: Payoff) -> dict[str, tuple[float, float]]:
    old, new = ends(payoff)
    ratings = {rating.player: rating.points for rating in payoff.ratings()}
    return {
        "points against version 0": (0.5, payoff.score(new, old) or 0.0),
        "rating": (ratings[old], ratings[new]),
    }


def told_apart(payoff: Payoff) -> bool:
    """The last version beats the first more often than not, and their 95% intervals do not touch."""
    old, new = ends(payoff)
    ratings = {rating.player: rating for rating in payoff.ratings()}
    return (payoff.score(new, old) or 0.0) > 0.5 and ratings[new].low > ratings[old].high
