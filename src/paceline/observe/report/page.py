"""Writes the report of a run as one self-contained HTML file: no script, image, font or external link."""

import base64
import hashlib
import importlib
import itertools
import json
import math
import shlex
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from paceline.errors import PacelineError
from paceline.observe.analysis.text import (
    escape_control_chars,
    event_text,
    format_number,
    format_timestamp,
    format_value,
    format_whole_seconds,
    safe_line,
)
from paceline.observe.analysis.vitals import MetricTrend, Trends, Vitals, vitals
from paceline.observe.monitor.directory import replace_file
from paceline.observe.monitor.text import (
    format_amount,
    format_change,
    format_count,
    format_reasons,
    format_score,
    format_seconds,
)
from paceline.observe.record import Query, RolloutNotFound, Row, RunFolder, open_run
from paceline.observe.record.advice import Advisory, advice_window, advise
from paceline.observe.record.advice.rules import silence_reason
from paceline.observe.report.charts import run_charts, timeline
from paceline.observe.web.messages import conversations

RECENT_STEPS, CANDIDATES = 20, 64
"""Steps before the last from which rollouts are picked, and how many are considered for each that is shown."""
MOST_ENVS, MOST_EVENTS, MOST_MESSAGES = 8, 40, 24
MOST_TEXT, MOST_VALUE, MOST_CONVERSATION_TEXT = 3000, 600, 300_000
"""Characters of one text, of a setting, and of all conversations together: the file stays one that can be sent."""
FALL_SHARE = 0.1
"""Share of its highest point by which a reward falls before the summary says so."""
FEWEST_FOR_NOISE, NOISE_FACTOR = 8, 3.0
"""Points from which the noise of a curve is known, and how much of it a fall exceeds."""
STATE_TEXTS = {
    "running": "is running",
    "starting": "is starting",
    "finished": "has finished",
    "interrupted": "was interrupted",
    "failed": "failed",
    "crashed": "crashed",
}
STYLE = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
CONTENT_SECURITY_POLICY = f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; form-action 'none'"
"""A second defence behind escaping: the browser runs and loads nothing."""


def _printable(value: Any) -> Any:
    """A string without control and bidirectional characters."""
    is_text = isinstance(value, str) and not isinstance(value, Markup)
    return escape_control_chars(value, keep="\n\t") if is_text else value


def _shorten(text: str) -> str:
    left = len(text) - MOST_TEXT
    return text if left <= 0 else f"{text[:MOST_TEXT]}… (and {left:,} more characters)"


TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    finalize=_printable,
    undefined=StrictUndefined,
    keep_trailing_newline=True,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters |= {
    "line": safe_line,
    "value": format_value,
    "shorten": _shorten,
    "sentence": lambda text: f"{text[:1].upper()}{text[1:]}",
}
TEMPLATES.filters |= {"timestamp": format_timestamp, "event_text": event_text}


def render_report(run: RunFolder, rollouts: int, now: float | None = None) -> str:
    shown, window = vitals(run, now), advice_window(run)
    found, status = advise(window), shown.status
    page = TEMPLATES.get_template("report.html")
    return page.render(
        run=shown,
        policy=CONTENT_SECURITY_POLICY,
        style=Markup(STYLE),  # the one text that must not be escaped: the browser hashes it as it stands
        facts=[
            *shown.facts,
            f"began {format_timestamp(status.began)}" if status.began else "",
            f"ended {format_timestamp(status.ended)}" if status.ended else "",
        ],
        problems=run.problems(),
        summary=_summary(shown, found),
        tiles=_tiles(shown),
        charts=run_charts(run),
        timeline=timeline(run),
        advice=found,
        silence=silence_reason(window),
        conversations=_conversations(run, rollouts),
        settings=[(one.key, _format_setting(one.value), _format_setting(one.default)) for one in run.changed_keys()],
        events=shown.events[-MOST_EVENTS:],
        commands=_commands(shown),
        version=importlib.import_module("paceline").__version__,  # by name: its types import torch
        now=format_timestamp(shown.now),
    )


def _summary(run: Vitals, advice: list[Advisory]) -> Iterator[str]:
    """The summary, for a reader who has not seen the run: first of all whether its reward fell."""
    status = run.status
    curves = [("The reward in training", run.rewards), (_held_out_name(run), run.held_out)]
    trends = [(name + env, trend) for name, by_env in curves for env, trend in _by_env(by_env).items()]
    falls = {name: fall for name, trend in trends if (fall := _fall_text(trend.values))}
    yield from (f"{name} {fall}." for name, fall in falls.items())
    total = status.total_steps
    steps = f"{status.step:,} of {total:,} steps" if total else format_amount(status.step, "step")
    took = f" in {format_whole_seconds(run.last_seen - status.began)}" if run.last_seen and status.began else ""
    device = f" on {status.device}" if status.device else ""
    yield f"The run {STATE_TEXTS[status.state]}: it has done {steps}{took}{device}."
    yield f"By its own metrics it is {run.health.verdict}. {run.health.reason}"
    yield from (f"{name} {_trend_text(trend)}." for name, trend in trends if name not in falls)
    if run.recent_means:
        yield f"Who waits for whom: {run.waiting_side}."
    if run.dropped_counts:
        yield f"Dropped on the way: {safe_line(format_reasons(run.dropped_counts))}."
    if advice:
        yield f"Its own figures raise {format_amount(len(advice), 'point')}, below."


def _held_out_name(run: Vitals) -> str:
    return "The share of exactly right held-out replies" if run.eval_kind == "exact" else "The held-out reward"


def _by_env(trends: Trends) -> Trends:
    """The trends by environment; a single environment is not named."""
    envs = {f" of {safe_line(env, 60)}": trend for env, trend in trends.items() if env}
    return envs if len(envs) > 1 else dict(list(trends.items())[:1])


def _trend_text(trend: MetricTrend) -> str:
    first, last = format_score(trend.first), format_score(trend.last)
    if not trend.has_moved:
        return f"is {last} ({trend.last_steps})"
    start, end = f"{first} ({trend.first_steps})", f"{last} ({trend.last_steps})"
    if first == last:
        return f"stayed at {start}, now {end}"
    return f"{'rose' if trend.last > trend.first else 'fell'} from {start} to {end}"


def _fall_text(values: list[float]) -> str:
    """From where a reward fell to where, and which share of it is gone; empty where it did not fall. Its highest point
    counts and not its first: a collapse mostly comes after a rise. A fall is one by a tenth of that and by more than
    the noise of single steps, as far as there are steps enough to know it."""
    few = max(1, min(5, len(values) // 4))
    means = [statistics.fmean(values[at : at + few]) for at in range(len(values) - few + 1)]
    top, last = max(means), means[-1]
    squares = [(b - a) ** 2 for a, b in itertools.pairwise(values)]
    noise = math.sqrt(statistics.fmean(squares) / 2 / few) if len(values) >= FEWEST_FOR_NOISE else 0.0
    if top - last <= max(FALL_SHARE * abs(top), NOISE_FACTOR * noise):
        return ""
    when = "" if top == means[0] else ", its highest,"
    share = f": {(top - last) / top:.0%} of it is gone" if top > 0 and last >= 0 else f", by {format_score(top - last)}"
    return f"fell from {format_score(top)}{when} to {format_score(last)}{share}"


def _tiles(run: Vitals) -> list[tuple[str, str, str]]:
    """Name, value and detail of each vital sign, as on the page of a run."""
    status, recent = run.status, run.recent_means
    allowed = "" if run.max_staleness is None else f"versions old; {run.max_staleness} allowed"
    pace = "" if run.pace is None else f"{format_seconds(run.pace)} a step"
    left = "" if run.seconds_left is None else f", about {format_whole_seconds(run.seconds_left)} left"
    sampled, trained = (
        format_count(recent[name]) if name in recent else "–" for name in ("tokens/s", "train_tokens/s")
    )
    return [
        ("Step", f"{status.step:,}" + (f" of {status.total_steps:,}" if status.total_steps else ""), pace + left),
        ("Reward", *_trend_tile(run.rewards.get(""))),
        (f"Held-out {run.eval_kind}", *_trend_tile(run.held_out.get(""))),
        ("Loss", format_number(recent.get("loss")), ""),
        ("Gradient norm", format_number(recent.get("grad_norm")), "before clipping"),
        ("Entropy", format_number(recent.get("entropy")), "nats a token"),
        ("Mismatch", format_number(recent.get("mismatch_kl")), "KL of trainer and sampler"),
        ("Staleness", format_number(recent.get("staleness/mean")), allowed),
        ("Tokens a second", sampled, f"sampled; {trained} trained"),
        *((lane.lane, f"{lane.share:.0%}", lane.detail or "busy, at the end") for lane in run.load.lanes),
    ]


def _trend_tile(trend: MetricTrend | None) -> tuple[str, str]:
    if trend is None:
        return "–", "not measured"
    moved = f"{format_change(trend.first, trend.last)} from {format_score(trend.first)} ({trend.first_steps})"
    return format_score(trend.last), f"{trend.last_steps}, {moved}" if trend.has_moved else trend.last_steps


def _format_setting(value: Any) -> str | None:
    if value is None:
        return None
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MOST_VALUE else f"{text[:MOST_VALUE]}…"


def _commands(run: Vitals) -> list[tuple[str, str]]:
    """Commands to run where the run directory is, and what each does."""
    place = shlex.quote(str(run.path))
    what, command = run.next_action
    return [
        (command, what),
        (f"paceline ui {place}", "shows every rollout, token and ticket in a browser"),
        (f"paceline doctor {place}", "shows who waits for whom, and what is wrong with it"),
        (f"paceline replay {place} {max(1, run.status.step)}", "computes a recorded step's loss once more"),
    ]


def _conversations(run: RunFolder, each: int) -> Iterator[Markup]:
    """`each` of the best, of the median and of the worst, by environment."""
    faint = Markup('<p class="faint">{}</p>').format
    last = int(run.rollouts.view().rows["step"].max(initial=-1))
    envs = run.rollouts.names("env")
    if last < 0 or not envs:
        yield faint("No rollout was recorded.")
        return
    if each < 1:
        yield faint(f"Left out. The run recorded {run.rollouts.count:,} rollouts.")
        return
    first = max(0, last - RECENT_STEPS + 1)
    few = "" if run.rollouts.keeps_all else " The run keeps no full record, so these are among the few it wrote down."
    yield faint(f"From training steps {first} to {last}, by reward.{few}")
    left = MOST_CONVERSATION_TEXT
    for env in envs[:MOST_ENVS]:
        yield Markup("<h3>{}</h3>").format(safe_line(env, 80))
        for rank, row in _pick_rollouts(run, env, (first, last), each):
            state = row.state.replace(":", ": ").replace("_", " ")
            reward = format_number(row.reward)
            facts = f"reward {reward}, step {row.step}, ticket {row.ticket}, {row.tokens} tokens, {state}"
            content = _conversation(run, row) if left > 0 else {"problem": "Left out: the file is large enough."}
            empty = {"problem": "", "messages": (), "skipped": 0, "others": 0, "target": "", "metrics": {}}
            title = safe_line(f"{rank}: {facts}")
            shown = TEMPLATES.get_template("conversation.html").render(empty | content, title=title)
            left -= len(shown) if "messages" in content else 0
            yield Markup(shown)
    if len(envs) > MOST_ENVS:
        yield faint(f"{len(envs) - MOST_ENVS} more environments are in `paceline ui`.")


def _conversation(run: RunFolder, row: Row) -> dict[str, Any]:
    try:
        rollout = run.rollouts.get(row.index)
        found = conversations(rollout)
    except RolloutNotFound as error:
        return {"problem": f"It cannot be read: {error}"}
    if not found["shown"]:
        return {"problem": "Its conversation was not kept."}
    messages = found["shown"][-1]["messages"]
    skipped = max(0, len(messages) - MOST_MESSAGES)
    why = {"target": rollout.target, "metrics": rollout.metrics}
    return {"messages": messages[skipped:], "skipped": skipped, "others": found["total"] - 1} | why


def _pick_rollouts(run: RunFolder, env: str, steps: tuple[int, int], each: int) -> list[tuple[str, Row]]:
    """The best, median and worst rollouts, at most one of a ticket: members of a group often say the same."""
    any_reward = (float("-inf"), None)
    query = Query(env=env, step=steps, domain="training", error=False, reward=any_reward, limit=CANDIDATES * each)
    middle = run.rollouts.find(replace(query, limit=0)).total // 2
    found: dict[int, tuple[str, Row]] = {}
    for rank, sort, offset in (("best", "-reward", 0), ("worst", "reward", 0), ("median", "reward", middle)):
        by_ticket: dict[int, Row] = {}
        for row in run.rollouts.find(replace(query, sort=sort, offset=offset)).rows:
            by_ticket.setdefault(row.ticket, row)
        fresh = [ticket for ticket in by_ticket if ticket not in found]
        found |= {ticket: (rank, by_ticket[ticket]) for ticket in fresh[:each]}
    return sorted(found.values(), key=lambda one: ("best", "median", "worst").index(one[0]))


def write_report(directory: Path, file: Path | None, rollouts: int) -> Path:
    """Write the report of a run and return its path; a reader of an older one still sees that one whole."""
    if rollouts < 0:
        raise PacelineError(f"--rollouts {rollouts}: write how many, 0 or more")
    run = open_run(directory)
    file = Path(f"{run.name}-report.html") if file is None else file
    try:
        replace_file(file, [render_report(run, rollouts).encode("utf-8")], durable=False)
    except OSError as error:
        raise PacelineError(f"{file} cannot be written: {error.strerror}; name another place with -o") from None
    return file
