"""Routes of rollouts: a filtered page, one rollout, its group, its episode, and the league."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import zip_longest
from statistics import fmean
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Depends, HTTPException, Response
from fastapi import Query as QueryParam
from pydantic import BaseModel, Field

from paceline.errors import PacelineError
from paceline.observe.analysis.payoff import Payoff
from paceline.observe.monitor.directory import RunDirectory
from paceline.observe.monitor.text import one_line
from paceline.observe.record import Query, Row, RunFolder, StoredRollout
from paceline.observe.record.layout import DOMAINS
from paceline.observe.record.rollouts import SORTS, Rollouts
from paceline.observe.web.messages import episode_lanes, episode_timeline, flat_text, rendered_conversations
from paceline.observe.web.runs import FiniteJsonResponse, OneRun

STATE_FILE = "state.json"
MOST_TRIES, MOST_TEXT = 64, 20_000
"""Columns of the page of a group, and characters of one message there; the rollout's own page has all of them."""

RoleTexts = Sequence[tuple[str, str]]
"""Role and text of each message."""

router = APIRouter(prefix="/rollouts")

Index = Annotated[int, QueryParam(alias="id", ge=0, lt=2**62)]


@router.get("/group")
def group(run: OneRun, index: Index) -> Response:
    """All tries of its ticket: the messages that all begin with, and the replies from there on. Tries that are equal
    share one; each is split where it leaves the most frequent one, or of equally frequent ones that of this try."""
    rows = comparable_tries(run.rollouts, index)
    shown = rows[:MOST_TRIES]
    if index not in {row.index for row in shown}:
        shown[-1] = run.rollouts.row(index)
    bodies = [run.rollouts.get_or_none(row.index) for row in shown]
    texts = [_role_texts(one) if one is not None else [] for one in bodies]
    shared = _shared_messages([one for one in texts if one])
    equal: dict[tuple[RoleTexts, str | None], list[int]] = {}
    for row, one, words in zip(shown, bodies, texts, strict=True):
        equal.setdefault((tuple(words), one.error if one else None), []).append(row.index)
    by_frequency = sorted(equal.items(), key=lambda item: (-len(item[1]), index not in item[1]))
    (reference, _), most_frequent = next((item for item in by_frequency if item[0][0]), by_frequency[0])
    in_order = sorted(by_frequency, key=lambda item: (item[1] is not most_frequent, index not in item[1]))
    replies = [
        {
            "rows": members,
            "error": error,
            "reference": members is most_frequent,
            "pieces": split_from_reference(reference[shared:], words[shared:]),
        }
        for (words, error), members in in_order
    ]
    tries = [{"row": row, "metrics": one.metrics if one else {}} for row, one in zip(shown, bodies, strict=True)]
    begin = [{"role": role, "text": text[:MOST_TEXT]} for role, text in reference[:shared]]
    return FiniteJsonResponse({"begin": begin, "tries": tries, "replies": replies, "total": len(rows)})


def comparable_tries(rollouts: Rollouts, index: int) -> list[Row]:
    """The rollouts that one is compared with, itself included: of one actor in one kind of episode, not a
    buyer with a seller. Where an episode has several of them, such as solvers of one question, those."""
    mine = rollouts.row(index)
    rows = [rollouts.row(at) for at in rollouts.group_members(index)]
    alike = [row for row in rows if (row.actor, row.kind) == (mine.actor, mine.kind)]
    here = [row for row in alike if row.member == mine.member]
    return here if len(here) > 1 else sorted(alike, key=lambda row: row.member)


def split_from_reference(reference: RoleTexts, other: RoleTexts) -> list[dict[str, Any]]:
    """Each message split into the text it shares with the reference and, from the first difference on, the rest."""
    is_same = True
    pieces = []
    for (role, text), beside in zip_longest(other, reference[: len(other)]):
        same = common_prefix(beside[1], text) if is_same and beside and beside[0] == role else 0
        is_same = is_same and beside == (role, text)
        begin = text[:same] if same <= MOST_TEXT else f"…{text[same - MOST_TEXT : same]}"
        rest, left_out = text[same : same + MOST_TEXT], max(0, len(text) - same - MOST_TEXT)
        pieces.append({"role": role, "same": begin, "rest": rest, "left_out": left_out})
    return pieces


def common_prefix(one: Sequence[Any], other: Sequence[Any]) -> int:
    shorter = min(len(one), len(other))
    return next((at for at in range(shorter) if one[at] != other[at]), shorter)


def _role_texts(rollout: StoredRollout) -> RoleTexts:
    if rollout.turns and rollout.turns[-1].messages is None:
        return [("assistant", turn.text) for turn in rollout.turns]
    return [(str(m.get("role", "")) if isinstance(m, dict) else "", flat_text(m)) for m in rollout.messages]


def _shared_messages(texts: list[RoleTexts]) -> int:
    """How many messages all tries have in common at the start, without the last message of any."""
    return min((common_prefix(texts[0][:-1], one[:-1]) for one in texts), default=0)


EXCERPT = 160
"""Characters of what was said that a line of the table has room for."""
SmallInt = Annotated[int | None, Field(ge=-(2**31), lt=2**31)]
LargeInt = Annotated[int | None, Field(ge=-(2**62), lt=2**62)]
ShortText = Annotated[str | None, Field(max_length=1000)]


class RolloutFilters(BaseModel):
    """The filters of a request; None matches everything. Ranges include both ends."""

    env: list[str] | None = None
    actor: ShortText = None
    state: ShortText = None
    finish: ShortText = None
    error: ShortText = None
    """`any`, `none` or a kind of failure."""
    domain: ShortText = None
    step_from: SmallInt = None
    step_to: SmallInt = None
    reward_from: float | None = None
    reward_to: float | None = None
    length_from: SmallInt = None
    length_to: SmallInt = None
    ticket: LargeInt = None
    row: LargeInt = None
    text: Annotated[str, Field(max_length=1000)] = ""
    sort: str = "-step"
    offset: Annotated[int, Field(ge=0, lt=2**62)] = 0
    limit: Annotated[int, Field(ge=0, le=200)] = 50


def _query(filters: Annotated[RolloutFilters, QueryParam()]) -> Query:
    values: dict[str, Any] = filters.model_dump()
    sort, error = values["sort"], values["error"]
    if sort.removeprefix("-") not in SORTS:
        raise HTTPException(400, f"rollouts cannot be sorted by `{sort}`: choose one of {', '.join(SORTS)}")
    for name in ("step", "reward", "length"):
        values[name] = values.pop(f"{name}_from"), values.pop(f"{name}_to")
    return Query(**values | {"error": {"any": True, "none": False}.get(error, error)})


OneQuery = Annotated[Query, Depends(_query)]


def column_counts(run: RunFolder) -> dict[str, dict[str, int]]:
    """How many rollouts of the run have each value of the columns that can be chosen from."""
    view, found = run.rollouts.view(), {}
    for column in ("env", "actor", "state", "finish", "error", "domain"):
        names = DOMAINS if column == "domain" else view.names
        many = zip(names, np.bincount(view.rows[column]).tolist(), strict=False)
        found[column] = {name: count for name, count in many if count}
    found["error"].pop("", None)
    return found


def table_line(run: RunFolder, row: Row, text: str) -> dict[str, Any]:
    """A row of the table: its question, what the row expects, the metrics, and a few words around what was searched
    for, or else of the last reply."""
    rollout = run.rollouts.get_or_none(row.index) if row.whole else None
    if rollout is None:
        return asdict(row)
    texts = [flat_text(message) for message in rollout.messages] or [turn.text for turn in rollout.turns]
    return asdict(row) | {
        "question": one_line(_question(rollout)[: 4 * EXCERPT])[:EXCERPT],
        "target": one_line(rollout.target)[:EXCERPT],
        "metrics": rollout.metrics,
        "excerpt": _excerpt([*texts, rollout.error or ""], text),
    }


def _question(rollout: StoredRollout) -> str:
    """The last message of the user in the first prompt: examples of a prompt come before it. Where turns were not kept,
    the first of the conversation."""
    first = rollout.turns[0].messages or () if rollout.turns else rollout.messages
    asked = [message for message in first if isinstance(message, dict) and message.get("role") == "user"]
    return flat_text(asked[-1 if rollout.turns else 0]) if asked else ""


def _excerpt(texts: list[str], text: str) -> str:
    needle = text.casefold()
    for words in texts if needle else ():
        if (at := words.casefold().find(needle)) >= 0:
            start = max(0, at - EXCERPT // 3)
            return ("…" if start else "") + one_line(words[start : start + EXCERPT + len(text)])
    last = next((words for words in reversed(texts) if words.strip()), "")
    return one_line(last[: 4 * EXCERPT])[:EXCERPT]


DROP_REASONS = {
    "zero_advantage": "every advantage in the group is zero, so it carries no gradient (filters.zero_advantage)",
    "group_too_small": "fewer rollouts survived than the environment's min_group_size",
    "stale": "its oldest trained token was more than `staleness` versions old when its batch was to ship",
    "oversampled": "more groups were started than the batch needed, and the rest would be too old for the next one",
    "skipped_draw": "its draw broke a step before a roll-back, so it was not played again",
    "group_filter": "the function in filters.group did not keep it",
    "run_ended": "the run ended while the group was being judged",
    "environment": "the environment let this episode go: it answered with no outcome",
    "no_sample": "nothing of it was left to train on: its samples were too old, or could not be scored",
}
DROP_REASONS["shunned"] = DROP_REASONS["skipped_draw"]
DROP_REASONS["failed"] = DROP_REASONS["run_ended"]
"""As earlier versions wrote them."""
STATE_TEXTS = {
    "trained": "It trained.",
    "replayed": "It trained once more: a replay under a ticket of its own.",
    "skipped": "Its step was left out, since the gradient was bad.",
    "evaluated": "Played to see how good the policy is; it never trains.",
    "matched": "Played against the league to rate the policy; it never trains.",
    "failed": "The episode failed, so it is outside the group's baseline and does not train.",
}
TRAINED_STATES = ("trained", "replayed")


def state_text(state: str) -> str:
    if state.startswith("dropped:"):
        return f"Dropped, so it did not train: {why_dropped(state.removeprefix('dropped:'))}."
    return STATE_TEXTS.get(state, state)


def why_dropped(reason: str) -> str:
    return DROP_REASONS.get(reason, reason)


def has_league(run: RunFolder) -> bool:
    envs = run.config().get("env")
    configured = isinstance(envs, list) and any(isinstance(env, dict) and env.get("league") for env in envs)
    return configured or any(name.startswith("league/") for name in run.metrics())


@router.get("/league")
def league(run: OneRun) -> Response:
    """Each environment's league, strongest player first, and the step of the checkpoint it is from: the one that
    `latest` names, or the newest whole one, since a copied folder may have lost the link."""
    files = RunDirectory(run.path)
    latest = files.checkpoints / "latest"
    path = latest if (latest / STATE_FILE).is_file() else files.newest_checkpoint()
    if path is None:
        return FiniteJsonResponse({"step": None, "leagues": []})
    try:
        state = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
        saved = {name: state["environments"][name]["league"]["payoff"] for name in state.get("leagues", ())}
        found = [_league_view(name, payoff) for name, payoff in saved.items()]
    except FileNotFoundError:  # a newer checkpoint has just taken its place
        raise PacelineError("the checkpoint was replaced while it was read: ask once more") from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise PacelineError(f"the league in {path / STATE_FILE} cannot be read: {error}") from error
    return FiniteJsonResponse({"step": state.get("step"), "leagues": found})


def _league_view(name: str, saved: Any) -> dict[str, Any]:
    payoff = Payoff()
    payoff.load(saved)
    ratings = payoff.ratings()
    pairs = [[(one.player, other.player) for other in ratings] for one in ratings]
    return {
        "env": name,
        "ratings": ratings,
        "scores": [[payoff.score(a, b) if a != b else None for a, b in row] for row in pairs],
        "games": [[payoff.games(a, b) if a != b else 0 for a, b in row] for row in pairs],
    }


@router.get("")
def rollouts(run: OneRun, query: OneQuery) -> Response:
    """One page of the matching rollouts, their number, and the values to filter by. A limit of 0 only counts."""
    found = run.rollouts.find(query)
    page: dict[str, Any] = {"total": found.total, "all": run.rollouts.count}
    if query.limit:
        page |= {
            "rows": [table_line(run, row, query.text) for row in found.rows],
            "counts": column_counts(run),
            "kept": run.rollouts.keeps_all,
            "problems": run.rollouts.problems(),
            "league": has_league(run),
        }
    return FiniteJsonResponse(page)


@router.get("/one")
def one_rollout(run: OneRun, index: Index, query: OneQuery) -> Response:
    rollout = run.rollouts.get(index)
    beside = run.rollouts.neighbours(index, replace(query, offset=0, limit=None))
    tries = comparable_tries(run.rollouts, index)
    rewards = [row.reward for row in tries if row.reward is not None and not row.error]
    return FiniteJsonResponse(
        {
            "row": rollout.row,
            "parent": rollout.parent,
            "epoch": rollout.ticket.epoch,
            "reward": rollout.reward,
            "metrics": rollout.metrics,
            "verdicts": [verdict for verdict in rollout.verdicts if isinstance(verdict, dict)],
            "error": rollout.error,
            "talks": rendered_conversations(rollout),
            "beside": beside,
            "tries": len(tries),
            "mean_reward": fmean(rewards) if rewards else None,
            "target": rollout.target,
            "seconds": rollout.seconds,
            "turn_seconds": sum(turn.seconds for turn in rollout.turns),
            "lanes": episode_lanes(rollout),
            "seats": len(run.rollouts.episode(index)),
            "kept": run.rollouts.keeps_all,
        }
    )


@router.get("/episode")
def episode(run: OneRun, index: Index) -> Response:
    return FiniteJsonResponse(episode_timeline(run.rollouts, index))
