"""Does it learn? Four tasks from their run files on this CPU, three seeds each, one row per finished run.

  calculator       a tool in a two-turn conversation: calls must rise with the reward
  alphabet-sort    a list that grows over two turns
  tic-tac-toe      self-play: against random moves, against version 0, and in ratings
  proposer-solver  one actor writes the questions another one learns from

Progress is kept under `runs/learn`: a run that was stopped goes on from its checkpoint, and what is finished is not run
again. Every bar is a difference between the policy's first and last evaluation of the same run.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bars import arguments, machine
from paceline.arena import Payoff
from paceline.cluster.league import leagues
from paceline.config import load
from paceline.monitor import read_jsonl

ROOT = Path(__file__).parents[1]
Evaluation = Mapping[str, float]


@dataclass(frozen=True)
class Measure:
    """Something that must rise by `bar` between the first evaluation and the last."""

    name: str
    of: Callable[[Evaluation], float]
    bar: float


@dataclass(frozen=True)
class Task:
    name: str
    file: str
    measures: tuple[Measure, ...]
    league: str = ""
    """The environment whose versions must be told apart by their ratings."""


@dataclass(frozen=True)
class Row:
    """One finished run; `start` and `end` are those of its first measure."""

    task: str
    algorithm: str
    seed: int
    start: float
    end: float
    steps: int
    seconds: float
    """Of training and evaluation, over all sittings."""
    others: dict[str, tuple[float, float]]
    cleared: bool


def at(key: str) -> Callable[[Evaluation], float]:
    return lambda evaluation: evaluation[key]


def mean(*keys: str) -> Callable[[Evaluation], float]:
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


def train(task: Task, seed: int, runs: Path) -> Path:
    """Train to the end, going on from where an earlier sitting stopped."""
    run = runs / f"{task.name}-{seed}"
    command = [sys.executable, "-m", "paceline", "train", str(ROOT / task.file)]
    command += ["--runs", str(runs), "--name", run.name, "--seed", str(seed)]
    command += ["--resume", "latest"] if (run / "checkpoints" / "latest").exists() else ["--overwrite"]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if code:
        raise SystemExit(f"{run.name} ended with exit code {code}: type the same command again to go on")
    return run


def judge(task: Task, seed: int, run: Path) -> Row:
    lines = read_jsonl(run / "metrics.jsonl")
    evaluations = [line for line in lines if any(key.startswith("eval/") for key in line)]
    first, last = evaluations[0], evaluations[-1]
    changes = {m.name: (m.of(first), m.of(last)) for m in task.measures}
    cleared = all(changes[m.name][1] - changes[m.name][0] >= m.bar for m in task.measures)
    if task.league:
        payoff = leagues(run)[task.league]
        changes |= standing(payoff)
        cleared = cleared and told_apart(payoff)
    (start, end), *_ = changes.values()
    algorithm = load(run / "config.toml").config.env[0].algo
    assert algorithm is not None
    return Row(
        task=task.name,
        algorithm=algorithm.type,
        seed=seed,
        start=start,
        end=end,
        steps=last["step"],
        seconds=sum(line.get("time/step", 0.0) + line.get("time/eval", 0.0) for line in lines),
        others=dict(list(changes.items())[1:]),
        cleared=cleared,
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


def show(rows: Sequence[Row]) -> None:
    table = Table(title="learning on this CPU")
    for heading in ("task", "algorithm", "seed", "start", "end", "steps", "seconds", "besides", ""):
        table.add_column(heading)
    for row in rows:
        besides = ", ".join(f"{name} {start:.2f} -> {end:.2f}" for name, (start, end) in row.others.items())
        mark = "[green]ok[/]" if row.cleared else "[red]missed[/]"
        figures = (f"{row.start:.2f}", f"{row.end:.2f}", str(row.steps), f"{row.seconds:.0f}")
        table.add_row(row.task, row.algorithm, str(row.seed), *figures, besides, mark)
    Console(width=150).print(table)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "learn", help="where runs and the table are kept")
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds of each task")
    parser.add_argument("--task", action="append", choices=[task.name for task in TASKS], help="only this task")
    known = parser.parse_args()
    book = known.runs / "rows.jsonl"
    rows = {(row["task"], row["seed"]): Row(**row) for row in (read_jsonl(book) if book.exists() else [])}
    chosen = [task for task in TASKS if not known.task or task.name in known.task]
    for seed in range(known.seeds):
        for task in chosen:
            if (task.name, seed) in rows:
                continue
            print(f"--- {task.name}, seed {seed} ({time.strftime('%H:%M:%S')})", flush=True)
            row = judge(task, seed, train(task, seed, known.runs))
            rows[task.name, seed] = row
            with book.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(row)) + "\n")
            show([row])
    wanted = [rows[task.name, seed] for task in chosen for seed in range(known.seeds)]
    show(wanted)
    cleared = all(row.cleared for row in wanted)
    result = {"title": "learning", "cleared": cleared, "rows": [asdict(row) for row in wanted], **machine()}
    if known.json is not None:
        known.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result))
    return 0 if cleared else 1


if __name__ == "__main__":
    sys.exit(main())
