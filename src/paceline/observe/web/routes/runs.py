"""Routes of the table of runs, and of one run: status, metrics, lanes, settings, advice and live updates."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Response
from fastapi.responses import StreamingResponse

from paceline.config.advice import AdviceConfig
from paceline.config.fields import KeyPath, Spot, spot_at
from paceline.observe.analysis import timeline
from paceline.observe.record.advice import RULES, AdviceWindow, Advisory, advise, sight_of
from paceline.observe.record.advice.telling import silence
from paceline.observe.web.http import FiniteJsonResponse, encoded
from paceline.observe.web.runs import AllRuns, FolderNews, News, OneRun, RunNews, read_metrics, run_state

LOOK_SECONDS = 0.5
BEAT_SECONDS = 10.0
"""A line without meaning, by which both sides notice that the other has gone."""

router = APIRouter()


@router.get("/live")
def live(
    runs: AllRuns,
    run: Annotated[str | None, Query(max_length=1000)] = None,
    mark: str = "",
    last_event_id: Annotated[str, Header()] = "",
) -> Response:
    """Of one run `metrics`, `standing`, `status`, `files` and `gone`; without a run, of all of them `runs`."""
    news = FolderNews(runs) if run is None else RunNews(runs.open(run), last_event_id or mark)
    return StreamingResponse(_stream(news), media_type="text/event-stream")


async def _stream(news: FolderNews | RunNews) -> AsyncIterator[bytes]:
    quiet = BEAT_SECONDS  # the first beat comes at once: it opens the stream
    while True:
        found = await asyncio.to_thread(lambda: list(news.look()))
        for one in found:
            yield _event(one)
        quiet = 0.0 if found else quiet + LOOK_SECONDS
        if quiet >= BEAT_SECONDS:
            quiet = 0.0
            yield b": beat\n\n"
        await asyncio.sleep(LOOK_SECONDS)  # bounded: the client leaves, or the server stops


def _event(news: News) -> bytes:
    name, data, mark = news
    number = f"id: {mark}\n" if mark else ""
    return f"event: {name}\n{number}data: ".encode() + encoded(data) + b"\n\n"


@router.get("/lanes")
def lanes(
    run: OneRun,
    start: float | None = None,
    end: float | None = None,
    bins: Annotated[int, Query(ge=1, le=4000)] = 600,
) -> Response:
    """The lanes between two times (seconds since 1970), in at most so many bins."""
    return FiniteJsonResponse(timeline.lanes(run, start, end, bins))


@router.get("/metrics")
def metrics(run: OneRun, mark: str = "") -> Response:
    """Every metric as a list, beside `step` and `time`; with the mark of an earlier answer only what came since."""
    columns, mark = read_metrics(run, mark)
    return FiniteJsonResponse(columns | {"mark": mark})


@router.get("/config")
def config(run: OneRun) -> Response:
    """A row for each key: section, key, value, default, whether it was changed, and what it means."""
    table = run.config()
    changed = {entry.key: entry.default for entry in run.changed()}
    rows = []
    for path, value in _leaves(table):
        key, spot = _dotted(path), _spot(path, table)
        rows.append(
            {
                "key": key,
                "section": _section(path, table),
                "name": str(path[-1]),
                "value": value,
                "changed": key in changed,
                "default": changed.get(key),
                "help": spot.help if spot else "",
                "known": spot is not None,
            }
        )
    file = run.path / "config.toml"
    text = file.read_text(errors="replace") if file.is_file() else ""
    return FiniteJsonResponse({"rows": rows, "text": text, "problems": run.problems(patient=False)})


def _leaves(table: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Values first, then the sections below: so they are read in the file."""
    below = []
    for key, value in table.items() if isinstance(table, dict) else enumerate(table):
        is_tables = isinstance(value, list) and value and all(isinstance(entry, dict) for entry in value)
        if is_tables or (isinstance(value, dict) and value):
            below.append((key, value))
        else:
            yield (*path, key), value
    for key, value in below:
        yield from _leaves(value, (*path, key))


def _dotted(path: KeyPath) -> str:
    """`env[0].algo.type`, as `RunFolder.changed` names keys."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")


def _section(path: KeyPath, table: Any) -> str:
    """`env · reverse-text · algo`: the elements of a list by their names."""
    words = []
    for key in path[:-1]:
        table = table[key]
        words.append(str(table.get("name") or table.get("type") or key) if isinstance(key, int) else str(key))
    return " · ".join(words)


def _spot(path: KeyPath, table: Any) -> Spot | None:
    """This version's description of a key; a run of another version may hold other keys."""
    try:
        return spot_at(path, table)
    except (TypeError, AttributeError, KeyError, IndexError):
        return None


@router.get("/runs")
def runs(runs: AllRuns) -> Response:
    """Every run of the folder, in a line."""
    return FiniteJsonResponse({"folder": str(runs.folder), "runs": list(runs.table(patient=False).values())})


@router.get("/run")
def run(run: OneRun) -> Response:
    """The state of one run: its status, its events and what could not be read, but for what `live` tells in a while."""
    return FiniteJsonResponse(run_state(run, patient=False))


@router.get("/advice")
def advice(run: OneRun) -> Response:
    """Every advisory with its evidence, and all that was looked for."""
    sight = sight_of(run)
    found = advise(sight)
    rules = [
        {
            "name": rule.name,
            "asks": rule.asks,
            "limit": getattr(sight.advice, rule.name),
            "help": AdviceConfig.model_fields[rule.name].description,
            "found": sum(advisory.rule == rule.name for advisory in found),
            "pauses": [env for env in sight.envs if rule.name in _grounds(sight, env)],
        }
        for rule in RULES
    ]
    return FiniteJsonResponse(
        {
            "steps": sight.steps,
            "trained": sight.trained,
            "silence": silence(sight),
            "rules": rules,
            "found": [_advisory(sight, advisory) for advisory in found],
        }
    )


def _advisory(sight: AdviceWindow, advisory: Advisory) -> dict[str, Any]:
    """The advisory with each rollout in a few words, and each knob as it is written."""
    knobs = [asdict(knob) | {"text": knob.text, "flag": knob.flag} for knob in advisory.knobs]
    rollouts = [
        {"index": index} | {name: row[name].item() for name in ("step", "reward", "tokens")}
        for index in advisory.rollouts
        for row in [sight.rows[index - sight.first]]
    ]
    return asdict(advisory) | {"knobs": knobs, "rollouts": rollouts}


def _grounds(sight: AdviceWindow, env: str) -> Sequence[str]:
    own = sight.env(env).get("pause")
    return sight.advice.pause if own is None else own
