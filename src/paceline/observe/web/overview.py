"""Routes of the table of runs and of one run: status, metrics, lanes, settings, advice, live events.

A mark names how far a page has read: the file (a roll-back replaces it by another) and the lines of it. With it a page
that lost its connection gets what it missed, and one whose run was rolled back gets everything anew.
"""

import asyncio
import gzip
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict
from typing import Annotated, Any
from weakref import WeakKeyDictionary

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import StreamingResponse

from paceline.config.fields import KeyPath, SchemaNode, node_at
from paceline.config.filters import AdviceConfig
from paceline.observe.analysis import timeline
from paceline.observe.analysis.health import RunHealth, run_health
from paceline.observe.analysis.vitals import headline, reward_trends, tags
from paceline.observe.record import RunFolder
from paceline.observe.record.advice import RULES, AdviceWindow, Advisory, advice_window
from paceline.observe.record.advice.rules import advisories, inspect, silence_reason
from paceline.observe.record.folder import Columns, key_text
from paceline.observe.web.runs import AllRuns, FiniteJsonResponse, OneRun, Runs, encode_json, signature

MOST_EVENTS = 500
"""A run that notes something each second for a week has more than a page can hold."""


def run_state(run: RunFolder, patient: bool) -> dict[str, Any]:
    """Status, staleness allowed, the last events and what could not be read; of a long journal only with `patient`."""
    config, events = run.config(), run.events()
    return {
        "path": str(run.path),
        "status": asdict(run.status()),
        "health": asdict(cached_health(run)),
        "staleness": config.get("staleness"),
        "tags": tags(config),
        "events": events[-MOST_EVENTS:],
        "events_left_out": max(0, len(events) - MOST_EVENTS),
        "problems": run.problems(patient),
    }


_DERIVED: WeakKeyDictionary[RunFolder, tuple[Columns, dict[Any, Any]]] = WeakKeyDictionary()


def derived(run: RunFolder, columns: Columns, key: Any, compute: Callable[[], Any]) -> Any:
    """What was computed from these metrics of a run, which take long to go through; forgotten when lines are added."""
    known = _DERIVED.get(run)
    if known is None or known[0] is not columns:
        known = _DERIVED[run] = columns, {}
    if key not in known[1]:
        known[1][key] = compute()
    return known[1][key]


def cached_health(run: RunFolder) -> RunHealth:
    columns, over = run.metrics(), not run.status().alive
    return derived(run, columns, ("health", over), lambda: run_health(run, columns, over))


GROWING_FILES = ("tickets.jsonl", "rollouts.jsonl", "record/rollouts.index", "record/lanes.index")
"""Files whose size a page is told, so that it can ask for what is new."""

LiveEvent = tuple[str, Any, str]
"""The event's name, its data, and the mark to resume from, if any."""


def read_metrics(run: RunFolder, mark: str = "") -> tuple[dict[str, Any], str]:
    """The columns since a mark, whether they replace what was read before, the headline figures, and the new mark."""
    file, _, lines = mark.partition(":")
    here = str(signature(run.path / "metrics.jsonl")[0])
    columns = run.metrics()
    count = len(columns["step"])
    start = int(lines) if file == here and lines.isdecimal() and int(lines) <= count else 0
    return {
        "columns": {name: values[start:] for name, values in columns.items()},
        "fresh": start == 0,
        "ends": derived(run, columns, "headline", lambda: headline(*reward_trends(columns))),
    }, f"{here}:{count}"


class PackedMetrics:
    """All metrics of the run that was asked for last, as compressed JSON: of ten thousand steps they are megabytes."""

    def __init__(self) -> None:
        self._last: tuple[RunFolder, Columns, bytes] | None = None

    def read(self, run: RunFolder) -> bytes:
        columns, last = run.metrics(), self._last
        if last is None or last[0] is not run or last[1] is not columns:
            read, mark = read_metrics(run)
            body = gzip.compress(encode_json(read | {"mark": mark}), 1)
            last = self._last = run, columns, body
        return last[2]


class RunWatcher:
    def __init__(self, run: RunFolder, mark: str) -> None:
        self._run, self._mark = run, mark
        self._seen: dict[str, Any] = {}

    def poll(self) -> Iterator[LiveEvent]:
        """The events since the last poll. Reads only changed files, and always the status, since a process dies without
        writing. Slow files are left to the second poll, so that the page is drawn first."""
        root, patient = self._run.path, bool(self._seen)
        if not root.is_dir():
            if self._has_changed("gone", True):
                yield "gone", {}, ""
            return
        metrics_changed = self._has_changed("metrics", signature(root / "metrics.jsonl"))
        if metrics_changed:
            columns, mark = read_metrics(self._run, self._mark)
            if mark != self._mark:
                self._mark = mark
                yield "metrics", columns, mark
        news = self._has_changed("events", [signature(root / name) for name in ("events.jsonl", "config.toml")])
        if metrics_changed:  # the verdict on them goes with the state
            news = self._has_changed("verdict", cached_health(self._run).verdict) or news
        if news or (self._has_changed("patient", patient) and self._run.problems(patient) != self._seen["problems"]):
            state = run_state(self._run, patient)
            self._seen |= {"status": state["status"], "problems": state["problems"]}
            yield "standing", state, ""
        elif self._has_changed("status", asdict(self._run.status())):
            yield "status", self._seen["status"], ""
        sizes = {name: signature(root / name)[1] for name in GROWING_FILES}
        if self._has_changed("files", sizes):
            yield "files", sizes, ""

    def _has_changed(self, what: str, value: Any) -> bool:
        before, self._seen[what] = self._seen.get(what), value
        return before != value


class FolderWatcher:
    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._rows: dict[str, dict[str, Any]] = {}

    def poll(self) -> Iterator[LiveEvent]:
        """The runs that are new or changed, and the names of those that are gone."""
        before, self._rows = self._rows, self._runs.table(patient=bool(self._rows))
        changed = [row for name, row in self._rows.items() if row != before.get(name)]
        gone = [name for name in before if name not in self._rows]
        if changed or gone:
            yield "runs", {"changed": changed, "gone": gone}, ""


POLL_SECONDS = 0.5
HEARTBEAT_SECONDS = 10.0
"""Seconds between two comment lines, by which both sides notice a lost connection."""

router = APIRouter()


@router.get("/live")
def live(
    runs: AllRuns,
    run: Annotated[str | None, Query(max_length=1000)] = None,
    mark: str = "",
    last_event_id: Annotated[str, Header()] = "",
) -> Response:
    """Of one run `metrics`, `standing`, `status`, `files` and `gone`; without a run, of all of them `runs`."""
    watcher = FolderWatcher(runs) if run is None else RunWatcher(runs.open(run), last_event_id or mark)
    # Proxies would hold events back until they have enough of them.
    return StreamingResponse(_stream(watcher), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})


async def _stream(watcher: FolderWatcher | RunWatcher) -> AsyncIterator[bytes]:
    idle_seconds = HEARTBEAT_SECONDS  # the first heartbeat is sent at once and opens the stream
    while True:
        found = await asyncio.to_thread(lambda: list(watcher.poll()))
        for name, data, mark in found:
            number = f"id: {mark}\n" if mark else ""
            yield f"event: {name}\n{number}data: ".encode() + encode_json(data) + b"\n\n"
        idle_seconds = 0.0 if found else idle_seconds + POLL_SECONDS
        if idle_seconds >= HEARTBEAT_SECONDS:
            idle_seconds = 0.0
            yield b": beat\n\n"
        await asyncio.sleep(POLL_SECONDS)  # bounded: the client leaves, or the server stops


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
def metrics(request: Request, run: OneRun, mark: str = "", accept_encoding: Annotated[str, Header()] = "") -> Response:
    """Every metric as a list, beside `step` and `time`; with the mark of an earlier answer only what came since."""
    if not mark and "gzip" in accept_encoding:
        headers = {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
        return Response(request.app.state.packed_metrics.read(run), media_type="application/json", headers=headers)
    columns, mark = read_metrics(run, mark)
    return FiniteJsonResponse(columns | {"mark": mark})


@router.get("/config")
def config(run: OneRun) -> Response:
    """A row for each key: section, key, value, default, whether it was changed, and what it means."""
    table = run.config()
    changed = {entry.key: entry.default for entry in run.changed_keys()}
    rows = [
        {
            "key": key,
            "section": _section_title(path, table),
            "name": str(path[-1]),
            "value": value,
            "changed": key in changed,
            "default": changed.get(key),
            "help": spot.help if spot else "",
            "known": spot is not None,
        }
        for path, value in _leaf_keys(table)
        for key, spot in [(key_text(path), _spot_or_none(path, table))]
    ]
    file = run.path / "config.toml"
    text = file.read_text(errors="replace") if file.is_file() else ""
    return FiniteJsonResponse({"rows": rows, "text": text, "problems": run.problems(patient=False)})


def _leaf_keys(table: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Every key with its value, the values of a section before its subsections, as in the file."""
    below = []
    for key, value in table.items() if isinstance(table, dict) else enumerate(table):
        is_tables = isinstance(value, list) and value and all(isinstance(entry, dict) for entry in value)
        if is_tables or (isinstance(value, dict) and value):
            below.append((key, value))
        else:
            yield (*path, key), value
    for key, value in below:
        yield from _leaf_keys(value, (*path, key))


def _section_title(path: KeyPath, table: Any) -> str:
    """`env · reverse-text · algo`: the elements of a list by their names."""
    words = []
    for key in path[:-1]:
        table = table[key]
        words.append(str(table.get("name") or table.get("type") or key) if isinstance(key, int) else str(key))
    return " · ".join(words)


def _spot_or_none(path: KeyPath, table: Any) -> SchemaNode | None:
    """This version's description of a key; a run of another version may hold other keys."""
    try:
        return node_at(path, table)
    except (TypeError, AttributeError, KeyError, IndexError):
        return None


@router.get("/runs")
def runs(runs: AllRuns) -> Response:
    return FiniteJsonResponse({"folder": str(runs.folder), "runs": list(runs.table(patient=False).values())})


@router.get("/run")
def run(run: OneRun) -> Response:
    """The state of one run: its status, events and unreadable files; `live` sends later what is slow to read."""
    return FiniteJsonResponse(run_state(run, patient=False))


@router.get("/advice")
def advice(run: OneRun) -> Response:
    """Every advisory with its evidence, and all rules."""
    window = advice_window(run)
    measured = inspect(window)
    found = advisories(window, measured)
    own = {env: window.env(env).get("pause") for env in window.envs}
    pauses = {env: window.advice.pause if rules is None else rules for env, rules in own.items()}
    rules = [
        {
            "name": rule.name,
            "asks": rule.question,
            "limit": getattr(window.advice, rule.name),
            "help": AdviceConfig.model_fields[rule.name].description,
            "found": [advisory.env for advisory in found if advisory.rule == rule.name],
            "below": rule.below,
            "measured": [
                {"env": env, "value": finding.value, "missing": finding.missing}
                for one, env, finding in measured
                if one is rule
            ],
            "pauses": [env for env, pausing in pauses.items() if rule.name in pausing],
        }
        for rule in RULES
    ]
    return FiniteJsonResponse(
        {
            "steps": window.steps,
            "trained": window.trained,
            "silence": silence_reason(window),
            "rules": rules,
            "found": [_advisory_view(window, advisory) for advisory in found],
        }
    )


def _advisory_view(window: AdviceWindow, advisory: Advisory) -> dict[str, Any]:
    """The advisory with each rollout in a few words, and each knob as it is written."""
    knobs = [asdict(knob) | {"text": knob.text, "flag": knob.flag} for knob in advisory.knobs]
    rollouts = [
        {"index": index} | {name: row[name].item() for name in ("step", "reward", "tokens")}
        for index in advisory.rollouts
        for row in [window.rows[index - window.first]]
    ]
    return asdict(advisory) | {"comparison": advisory.comparison, "knobs": knobs, "rollouts": rollouts}
