"""Reads and draws the standings of a run's leagues, from its newest checkpoint."""

from pathlib import Path

from paceline.errors import PacelineError
from paceline.observe.analysis.payoff import draw_league
from paceline.observe.monitor import RunDirectory
from paceline.orchestrator import Checkpoints
from paceline.selfplay import Payoff


def leagues(run: Path) -> dict[str, Payoff]:
    """Each environment's games between versions, where any were played."""
    if not run.is_dir():
        raise PacelineError(f"there is no run at {run}: name a run directory, such as runs/tic-tac-toe")
    checkpoints = Checkpoints(RunDirectory(run).checkpoints, keep=1)
    if not checkpoints.all():
        raise PacelineError(f"{run} has no checkpoint yet: its league is kept there")
    _, state = checkpoints.find("latest")
    found = {name: Payoff() for name in state.get("leagues", ())}
    for name, payoff in found.items():
        payoff.load(state["environments"][name]["league"]["payoff"])
    return {name: payoff for name, payoff in found.items() if payoff.counts}


def save_picture(run: Path, name: str, payoff: Payoff) -> Path:
    """Draw a league into the run's directory."""
    path = run / f"league-{name.replace('/', '-')}.png"
    draw_league(payoff, path, f"{run.name}: {name}")
    return path


def standings(run: Path) -> list[str]:
    """A line for each league, strongest first, with the picture that shows it."""
    lines = []
    for name, payoff in leagues(run).items():
        ratings = ", ".join(f"{r.player} {r.points:+.0f} ({r.low:+.0f} to {r.high:+.0f})" for r in payoff.ratings())
        lines.append(f"league {name}: {ratings}; picture {save_picture(run, name, payoff)}")
    return lines
