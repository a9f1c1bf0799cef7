"""Routes of rollouts: a filtered page, one of them in full, its group, its episode, and the league."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from paceline.errors import PacelineError
from paceline.observe.monitor.directory import RunDirectory
from paceline.observe.record import RunFolder
from paceline.observe.web.http import FiniteJsonResponse
from paceline.observe.web.rollouts.episode import conversations, episode_story
from paceline.observe.web.rollouts.group import OneQuery, compare_tries, counts, table_line, tries
from paceline.observe.web.runs import OneRun
from paceline.selfplay.payoff import Payoff

STATE = "state.json"


def has_league(run: RunFolder) -> bool:
    """Whether anything says that versions of the policy meet in this run: its run file, or what it measured."""
    envs = run.config().get("env")
    asked = isinstance(envs, list) and any(isinstance(env, dict) and env.get("league") for env in envs)
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
    return {"step": state.get("step"), "leagues": [_league(name, payoff) for name, payoff in found.items()]}


def _newest(folder: Path) -> Path | None:
    """The checkpoint that `latest` names, or the newest whole one: a copied folder may have lost the link."""
    whole = sorted(path for path in folder.glob("step-*") if (path / STATE).is_file())
    latest = folder / "latest"
    return latest if (latest / STATE).is_file() else whole[-1] if whole else None


def _payoff(environment: dict[str, Any]) -> Payoff:
    payoff = Payoff()
    payoff.load(environment["league"]["payoff"])
    return payoff


def _league(name: str, payoff: Payoff) -> dict[str, Any]:
    ratings = payoff.ratings()
    players = [rating.player for rating in ratings]
    return {
        "env": name,
        "ratings": ratings,
        "scores": [[payoff.score(one, other) if one != other else None for other in players] for one in players],
        "games": [[payoff.games(one, other) if one != other else 0 for other in players] for one in players],
    }


router = APIRouter(prefix="/rollouts")

Index = Annotated[int, Query(alias="id", ge=0, lt=2**62)]


@router.get("")
def rollouts(run: OneRun, query: OneQuery) -> Response:
    """A page of what is asked for, how many there are, and what can be asked for. With a limit of 0 only counted."""
    found = run.rollouts.find(query)
    if not query.limit:
        return FiniteJsonResponse({"total": found.total, "all": run.rollouts.count})
    return FiniteJsonResponse(
        {
            "total": found.total,
            "all": run.rollouts.count,
            "rows": [table_line(run, row, query.text) for row in found.rows],
            "counts": counts(run),
            "kept": run.rollouts.kept,
            "problems": run.rollouts.problems(),
            "league": has_league(run),
        }
    )


@router.get("/one")
def one(run: OneRun, index: Index, query: OneQuery) -> Response:
    """One rollout: its conversations, what it earned, and its neighbours among those that are asked for."""
    told = run.rollouts.get(index)
    beside = run.rollouts.beside(index, replace(query, offset=0, limit=None))
    return FiniteJsonResponse(
        {
            "row": told.row,
            "parent": told.parent,
            "epoch": told.ticket.epoch,
            "reward": told.reward,
            "metrics": told.metrics,
            "error": told.error,
            "talks": conversations(told),
            "beside": beside and asdict(beside),
            "tries": len(tries(run.rollouts, index)),
            "seats": len(run.rollouts.episode(index)),
            "kept": run.rollouts.kept,
        }
    )


@router.get("/group")
def group(run: OneRun, index: Index) -> Response:
    """All tries of its ticket, side by side."""
    return FiniteJsonResponse(compare_tries(run.rollouts, index))


@router.get("/episode")
def episode(run: OneRun, index: Index) -> Response:
    """All seats of its episode in one line of time."""
    return FiniteJsonResponse(episode_story(run.rollouts, index))


@router.get("/league")
def league(run: OneRun) -> Response:
    """The leagues of the run."""
    return FiniteJsonResponse(leagues(run))
