"""Routes of tickets (a page, and the life of one from draw to gradient) and of a rollout's tokens.

The journal knows states and no times. Times come from what surrounds them: a version is published at a known moment, so
what it sampled came after; a step's phases are lanes.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, HTTPException, Query, Response

from paceline.data import State
from paceline.observe.analysis.text import format_four_digits as figure
from paceline.observe.monitor.text import format_amount
from paceline.observe.record import Query as RolloutQuery
from paceline.observe.record import Row, RunFolder, StoredRollout
from paceline.observe.web.card import token_card
from paceline.observe.web.rollouts import why_dropped
from paceline.observe.web.runs import FiniteJsonResponse, OneRun
from paceline.observe.web.tokens import TokenStrip, newest_rollout, select_strip, token_page

MOST_ROLLOUTS = 400
"""Rollouts of a ticket that are listed."""
PHASES = ("score", "train", "publish")
Journal = Sequence[dict[str, Any]]
"""The lines of `tickets.jsonl` about one ticket."""

router = APIRouter()
Name = Annotated[str | None, Query(max_length=1000)]
STATES = [str(state) for state in State if state is not State.WAITING]
"""The states in a journal, which does not hold that a ticket waits."""


@router.get("/tickets")
def tickets(
    run: OneRun,
    env: Name = None,
    state: Name = None,
    reason: Name = None,
    offset: Annotated[int, Query(ge=0)] = 0,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
) -> Response:
    """Tickets as they stand, the newest first, and how many there are of each state and reason. Each has its number of
    attempts and the reason for a drop."""
    found, rows = run.tickets.find(env, state, reason, offset, limit), []
    for one in found.rows:
        journal = run.tickets.history(one["number"], one["env"])
        first = _replayed_ticket(journal)
        why = why_dropped(one["reason"]) if "reason" in one else ""
        rows.append(one | {"attempts": _attempts(journal), "why": why} | ({} if first is None else {"replays": first}))
    envs = [one.get("name") for one in run.config().get("env", []) if isinstance(one, dict)]
    standing = run.tickets.states()
    dropped = {name: sum(count for _, count in steps) for name, steps in run.tickets.dropped().items()}
    return FiniteJsonResponse(
        {
            "total": found.total,
            "rows": rows,
            "states": {name: standing.get(name, 0) for name in STATES},
            "reasons": dict(sorted(dropped.items(), key=lambda item: -item[1])),
            "envs": [name for name in envs if isinstance(name, str)],
            "problems": run.tickets.problems(),
        }
    )


@router.get("/ticket")
def ticket(run: OneRun, ticket: Annotated[int | None, Query(ge=0, lt=1 << 62)] = None) -> Response:
    """The life of one ticket, from the draw to the gradient; without a number, of the newest."""
    if ticket is None:
        rows = run.tickets.find(limit=1).rows
        if not rows:
            return FiniteJsonResponse({"nothing": "No ticket was drawn yet."})
        ticket = rows[0]["number"]
    journal = run.tickets.history(ticket)
    found = run.rollouts.find(RolloutQuery(ticket=ticket, domain="training", sort="step", limit=MOST_ROLLOUTS))
    if not journal and not found.total:
        raise HTTPException(404, f"there is no ticket {ticket} in this run: go back to the list of tickets")
    return FiniteJsonResponse(
        {
            "number": ticket,
            "state": journal[-1].get("state", "") if journal else "",
            "stages": list(_stages(run, ticket, journal, found.rows)),
            "journal": journal,
            "rollouts": found.rows,
            "rollouts_total": found.total,
            "kept": run.rollouts.keeps_all,
        }
    )


Place = Annotated[int | None, Query(ge=0, lt=1 << 31)]
NO_ROLLOUT = {"nothing": "No rollout is recorded yet.", "rollout": None}


def _sequence(run: OneRun, id: Place = None, sample: Place = None, turn: Place = None) -> tuple | None:
    index = newest_rollout(run) if id is None else id
    return None if index is None else (rollout := run.rollouts.get(index), select_strip(rollout, sample, turn))


TokenSequence = Annotated[tuple[StoredRollout, TokenStrip | None] | None, Depends(_sequence)]
"""A rollout (without an id the last one that trained), and the sample or turn of it that is asked for."""


@router.get("/tokens")
def tokens(run: OneRun, sequence: TokenSequence) -> Response:
    return FiniteJsonResponse(NO_ROLLOUT if sequence is None else token_page(run, *sequence))


@router.get("/tokens/card")
def card(run: OneRun, sequence: TokenSequence, at: Annotated[int, Query(ge=0)] = 0) -> Response:
    if sequence is None:
        return FiniteJsonResponse(NO_ROLLOUT)
    rollout, strip = sequence
    if strip is None or at >= len(strip.ids):
        raise HTTPException(404, f"there is no token {at}: the sequence has {0 if strip is None else len(strip.ids)}")
    return FiniteJsonResponse(token_card(run, rollout, strip, at))


def _attempts(journal: Journal) -> int:
    return sum(line["state"] == "in flight" for line in journal)


def _replayed_ticket(journal: Journal) -> int | None:
    return next((line["replays"] for line in journal if "replays" in line), None)


def _stages(run: RunFolder, number: int, journal: Journal, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    last, first = journal[-1] if journal else {}, _replayed_ticket(journal)
    if journal:
        line = journal[0]
        place = f"row {line['row']} of `{line['env']}`: draw {line['draw']}, epoch {line['epoch']}"
        if first is None:
            yield {"name": "drawn", "text": f"Drawn from the data: {place}."}
        else:
            text = f"The group of ticket {first} entered once more ({place})."
            yield {"name": "replayed", "text": text, "ticket": first}
    yield _sampled_stage(run, rows, journal, first)
    if rows:
        yield _scored_stage(rows)
    credit = [row.advantage for row in rows if row.advantage is not None]
    spread = f" Advantages from {figure(min(credit))} to {figure(max(credit))}." if credit else ""
    if any(line["state"] == "buffered" for line in journal):
        yield {"name": "accepted", "text": f"Judged worth training and kept for a batch.{spread}"}
        spread = ""
    if last.get("state") == "dropped":
        reason = last.get("reason", "")
        stage = {"name": "dropped", "text": f"Dropped (`{reason}`): {why_dropped(reason)}.{spread}", "reason": reason}
        yield stage | ({"step": rows[0].step, "by": rows[0].time} if rows else {})
    if last.get("state") == "trained":
        yield from _trained_stages(run, last.get("step"))
        # Tickets under which the group trained again: same environment, row and draw, and the journal says of whom.
        query = RolloutQuery(
            env=last["env"], row=last["row"], state="replayed", domain="training", sort="step", limit=MOST_ROLLOUTS
        )
        for ticket, step in dict.fromkeys((row.ticket, row.step) for row in run.rollouts.find(query).rows):
            if any(line.get("replays") == number for line in run.tickets.history(ticket)):
                text = f"Trained once more in step {step}, as ticket {ticket}."
                yield {"name": "replayed", "text": text, "ticket": ticket, "step": step}


def _sampled_stage(run: RunFolder, rows: Sequence[Row], journal: Journal, first: int | None) -> dict[str, Any]:
    if not rows:
        last = journal[-1]["state"] if journal else ""
        texts = {"in flight": "It is being played, or was when the run stopped.", "dropped": "It left no rollout."}
        return {"name": "sampled", "text": texts.get(last, "Its rollouts are not in the record (yet).")}
    versions = [row.version_min for row in rows if row.version_min >= 0] + [row.version_max for row in rows]
    low, high = min(versions), max(versions)
    tokens = sum(row.tokens for row in rows)
    text = f"{format_amount(len(rows), 'rollout')}, {tokens:,} tokens sampled"
    if high >= 0:
        text += f" by version {low}" + (f" to {high}: new weights came while it played" if high > low else "")
    if (flights := _attempts(journal)) > 1:
        text += f"; played in {flights} attempts, since the run stopped in between"
    stage: dict[str, Any] = {"name": "sampled", "text": f"{text}.", "versions": [low, high]}
    if first is not None:
        stage["text"] = f"Sampled for ticket {first}: {stage['text']}"
    elif high >= 0 and (since := _publish_time(run, high)) is not None:
        stage |= {"after": since}
    return stage


def _scored_stage(rows: Sequence[Row]) -> dict[str, Any]:
    rewards = [row.reward for row in rows if row.reward is not None and not row.error]
    errors = [row.error for row in rows if row.error]
    parts = []
    if rewards:
        mean = figure(sum(rewards) / len(rewards))
        parts.append(f"Rewards from {figure(min(rewards))} to {figure(max(rewards))}, mean {mean}")
    if errors:
        parts.append(f"{format_amount(len(errors), 'rollout')} failed ({', '.join(sorted(set(errors)))})")
    return {"name": "scored", "text": f"{'; '.join(parts) or 'No reward was given'}."}


def _trained_stages(run: RunFolder, step: int | None) -> Iterator[dict[str, Any]]:
    if step is None:
        return
    measured, phases = run.step_metrics(step), _phases(run, step)
    loss = [f"{name} {figure(measured[name])}" for name in ("loss", "grad_norm", "lr") if name in measured]
    text = f"Shipped and trained in step {step}" + (f" ({', '.join(loss)})" if loss else "") + "."
    ends = {phase["name"]: phase["end"] for phase in phases}
    yield {"name": "trained", "text": text, "step": step, "phases": phases, "time": ends.get("train")}
    published = f"The weights it helped to make are version {step}."
    yield {"name": "published", "text": published, "time": ends.get("publish")}


def _phases(run: RunFolder, step: int) -> list[dict[str, Any]]:
    """The phases of a step's batch, with their times. The metrics line of a step is written after its last phase."""
    measured = run.step_metrics(step)
    if "time" not in measured:
        return []
    took = sum(value for name, value in measured.items() if name.startswith("time/"))
    spans = run.lanes(measured["time"] - took - 60, measured["time"] + 1)
    mine = [span for span in spans if span.lane == "run" and span.step == step and span.kind in PHASES]
    return [{"name": span.kind, "start": span.start, "end": span.end} for span in mine]


def _publish_time(run: RunFolder, version: int) -> float | None:
    """When a version began to sample; version 0 does when the run begins."""
    if version == 0:
        return run.status().began
    return next((phase["end"] for phase in _phases(run, version) if phase["name"] == "publish"), None)
