"""Reads a run's leagues from its newest checkpoint: ratings, and the points of each pair of players."""

import json
from pathlib import Path
from typing import Any

from paceline.arena.payoff import Payoff
from paceline.errors import PacelineError
from paceline.monitor.directory import RunDirectory
from paceline.record import RunFolder

STATE = "state.json"


def has_league(run: RunFolder) -> bool:
    """Whether anything says that versions of the policy meet in this run: its run file, or what it measured."""
    environments = run.config().get("env")
    listed = environments if isinstance(environments, list) else []
    asked = any(isinstance(env, dict) and env.get("league") for env in listed)
    return asked or any(name.startswith("league/") for name in run.metrics())


def leagues(run: RunFolder) -> dict[str, Any]:
    """Each environment's league, strongest player first, and the step of the checkpoint it is from."""
    path = _newest(RunDirectory(run.path).checkpoints)
    if path is None:
        return {"step": None, "leagues": []}
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        found = {name: _payoff(state["environments"][name]) for name in state.get("leagues", ())}
    except FileNotFoundError:  # a newer checkpoint has just taken its place
        raise PacelineError("the checkpoint was replaced while it was read: ask once more") from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise PacelineError(f"the league in {path / STATE} cannot be read: {error}") from error
    return {"step": state.get("step"), "leagues": [_told(name, payoff) for name, payoff in found.items()]}


def _newest(folder: Path) -> Path | None:
    """The checkpoint that `latest` names, or the newest whole one: a copied folder may have lost the link."""
    whole = sorted(path for path in folder.glob("step-*") if (path / STATE).is_file())
    latest = folder / "latest"
    return latest if (latest / STATE).is_file() else whole[-1] if whole else None


def _payoff(environment: dict[str, Any]) -> Payoff:
    payoff = Payoff()
    payoff.load(environment["league"]["payoff"])
    return payoff


def _told(name: str, payoff: Payoff) -> dict[str, Any]:
    ratings = payoff.ratings()
    players = [rating.player for rating in ratings]
    return {
        "env": name,
        "ratings": ratings,
        "scores": [[payoff.score(one, other) if one != other else None for other in players] for one in players],
        "games": [[payoff.games(one, other) if one != other else 0 for other in players] for one in players],
    }
