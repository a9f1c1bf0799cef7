"""Writes the report of a run as one self-contained HTML file: no script, no image, no font, no link out.

Sections of a report: summary, advisories, settings, conversations, events, and commands.
"""

import base64
import hashlib
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.observe.monitor.directory import replace_file
from paceline.observe.monitor.text import amount, change, count, reasons, score, seconds
from paceline.observe.record import Gone, Query, Row, RunFolder, open_run
from paceline.observe.record.advice import Advisory, advise, sight_of
from paceline.observe.record.advice.telling import silence
from paceline.observe.report.curves import Element, curves, joined, tag
from paceline.observe.terminal.look import around, figure, happened, line, moment
from paceline.observe.terminal.signs import MetricTrend, Signs, signs
from paceline.observe.web.rollouts.episode import talks

LATE = 20
"""Steps before the last whose rollouts are looked at: what the policy does now, not what it did at first."""
MOST_ENVS = 8
MOST_TEXT = 3000
"""Characters of one text."""
GROUPS = 64
"""Rollouts that are looked at for each that is shown."""
MOST_MESSAGES = 24
BUDGET = 300_000
"""Characters of all conversations together: the file stays one that can be sent."""


def conversations(run: RunFolder, each: int) -> Element:
    """`each` of the best, of the median and of the worst, by environment."""
    last = int(run.rollouts.view().rows["step"].max(initial=-1))
    envs = run.rollouts.names("env")
    if last < 0 or not envs:
        return tag("p", "No rollout was recorded.", class_="faint")
    if each < 1:
        return tag("p", f"Left out. The run recorded {run.rollouts.count:,} rollouts.", class_="faint")
    first = max(0, last - LATE + 1)
    kept = "" if run.rollouts.kept else " The run keeps no full record, so these are among the few it wrote down."
    parts = [tag("p", f"From training steps {first} to {last}, by reward.{kept}", class_="faint")]
    left = BUDGET
    for env in envs[:MOST_ENVS]:
        parts.append(tag("h3", line(env, 80)))
        for word, row in _chosen(run, env, (first, last), each):
            shown, left = _rollout(run, word, row, left)
            parts.append(shown)
    if len(envs) > MOST_ENVS:
        parts.append(tag("p", f"{len(envs) - MOST_ENVS} more environments are in `paceline ui`.", class_="faint"))
    return joined(*parts)


def _chosen(run: RunFolder, env: str, steps: tuple[int, int], each: int) -> list[tuple[str, Row]]:
    """No two of one ticket: members of a group that did well often said the same."""
    any_reward = (float("-inf"), None)
    asked = Query(env=env, step=steps, domain="training", error=False, reward=any_reward, limit=GROUPS * each)
    middle = run.rollouts.find(replace(asked, limit=0)).total // 2
    found: dict[int, tuple[str, Row]] = {}
    for word, query in (
        ("best", replace(asked, sort="-reward")),
        ("worst", replace(asked, sort="reward")),
        ("median", replace(asked, sort="reward", offset=middle)),
    ):
        by_ticket: dict[int, Row] = {}
        for row in run.rollouts.find(query).rows:
            if row.ticket not in found:
                by_ticket.setdefault(row.ticket, row)
        found |= {ticket: (word, row) for ticket, row in list(by_ticket.items())[:each]}
    return sorted(found.values(), key=lambda one: ("best", "median", "worst").index(one[0]))


def _rollout(run: RunFolder, word: str, row: Row, left: int) -> tuple[Element, int]:
    """The rollout, and what is left of the budget."""
    fate = row.state.replace(":", ": ").replace("_", " ")
    facts = f"reward {figure(row.reward)}, step {row.step}, ticket {row.ticket}, {row.tokens} tokens, {fate}"
    title = tag("b", line(f"{word}: {facts}"))
    if left <= 0:
        return tag("article", title, tag("p", "Left out: the file is large enough.", class_="faint")), left
    try:
        told = talks(run.rollouts.get(row.index))
    except Gone as error:
        return tag("article", title, tag("p", f"It cannot be read: {error}", class_="faint")), left
    if not told["shown"]:
        return tag("article", title, tag("p", "Its conversation was not kept.", class_="faint")), left
    messages = told["shown"][-1]["messages"]
    skipped = max(0, len(messages) - MOST_MESSAGES)
    shown = [_message(message) for message in messages[skipped:]]
    before = tag("p", f"{skipped} earlier messages are left out.", class_="faint") if skipped else None
    others = told["total"] - 1
    more = tag("p", f"{others} more conversations of this rollout are in `paceline ui`.", class_="faint")
    whole = tag("article", title, before, *shown, more if others else None)
    return whole, left - len(whole)


def _message(message: Mapping[str, Any]) -> Element:
    role = str(message["role"])
    known = role if role in ("assistant", "tool", "system", "user") else ""
    name = f" {message['name']}" if message.get("name") else ""
    calls = [tag("pre", _cut(f"calls {call['name']}({call['arguments']})")) for call in message["calls"]]
    parts = [
        tag("pre", _cut(part["text"] if part["kind"] != "image" else f"[{part['text']}]"), class_=part["kind"])
        for part in message["parts"]
    ]
    return tag("div", tag("span", line(f"{role}{name}", 60), class_="role"), *parts, *calls, class_=f"message {known}")


def _cut(text: str) -> str:
    left = len(text) - MOST_TEXT
    return text if left <= 0 else f"{text[:MOST_TEXT]}… (and {left:,} more characters)"


STATES = {
    "running": "is running",
    "starting": "is starting",
    "finished": "has finished",
    "interrupted": "was interrupted",
    "failed": "failed",
    "crashed": "crashed",
}


def summary(signs: Signs, advice: list[Advisory]) -> Element:
    """Sentences for a reader who has not seen the run."""
    return tag("div", *(tag("p", sentence) for sentence in _sentences(signs, advice)))


def _sentences(signs: Signs, advice: list[Advisory]) -> Iterable[str]:
    status = signs.status
    steps = (
        amount(status.step, "step") if not status.total_steps else f"{status.step:,} of {status.total_steps:,} steps"
    )
    took = f" in {around(signs.seen - status.began)}" if signs.seen and status.began else ""
    yield f"The run {STATES[status.state]}: it has done {steps}{took}{f' on {status.device}' if status.device else ''}."
    for env, course in _single(signs.rewards).items():
        yield f"The reward in training{env} {_went(course)}."
    for env, course in _single(signs.held_out).items():
        what = "share of exactly right replies" if signs.kind == "exact" else "reward"
        yield f"On held-out rows{env} the {what} {_went(course)}."
    if signs.recent:
        yield f"Who waits for whom: {signs.waits}."
    if signs.dropped:
        yield f"Dropped on the way: {line(reasons(signs.dropped))}."
    if advice:
        yield f"Its own figures raise {amount(len(advice), 'point')}, below."


def _single(courses: dict[str, MetricTrend]) -> dict[str, MetricTrend]:
    """Environments one by one, by the words that name them; a single one needs no name."""
    envs = {f" of {line(env, 60)}": course for env, course in courses.items() if env}
    return envs if len(envs) > 1 else dict(list(courses.items())[:1])


def _went(course: MetricTrend) -> str:
    first, last = score(course.first), score(course.last)
    if len(course.curve) < 2:
        return f"was measured once, {last}"
    if first == last:
        return f"stayed at {last}"
    return f"{'rose' if course.last > course.first else 'fell'} from {first} to {last}"


def tiles(signs: Signs) -> Element:
    """The vital signs, as on the page of a run."""
    status, recent = signs.status, signs.recent
    allowed = "" if signs.allowed is None else f"versions old; {signs.allowed} allowed"
    pace = "" if signs.pace is None else f"{seconds(signs.pace)} a step"
    left = "" if signs.left is None else f", about {around(signs.left)} left"
    found = [
        ("Step", f"{status.step:,}" + (f" of {status.total_steps:,}" if status.total_steps else ""), pace + left),
        ("Reward", *_ends(signs.rewards.get(""))),
        (f"Held-out {signs.kind}", *_ends(signs.held_out.get(""))),
        ("Loss", figure(recent.get("loss")), ""),
        ("Gradient norm", figure(recent.get("grad_norm")), "before clipping"),
        ("Entropy", figure(recent.get("entropy")), "nats a token"),
        ("Mismatch", figure(recent.get("mismatch_kl")), "KL of trainer and sampler"),
        ("Staleness", figure(recent.get("staleness/mean")), allowed),
        ("Tokens a second", _speed(recent.get("tokens/s")), f"sampled; {_speed(recent.get('train_tokens/s'))} trained"),
    ]
    busy = [(lane.lane, f"{lane.share:.0%}", lane.detail or "busy, at the end") for lane in signs.busy.lanes]
    return tag("dl", *(_tile(*one) for one in [*found, *busy]), class_="tiles")


def _ends(course: MetricTrend | None) -> tuple[str, str]:
    if course is None:
        return "–", "not measured"
    return score(course.last), f"{score(course.first)} at the start, {change(course.first, course.last)}"


def _tile(name: str, value: str, more: str) -> Element:
    return tag("div", tag("dt", line(name, 60)), tag("dd", value), tag("dd", more) if more else None)


def _speed(value: float | None) -> str:
    return "–" if value is None else count(value)


MOST_EVENTS = 40
MOST_VALUE = 600


def advisories(found: Sequence[Advisory], silence: str) -> Element:
    """Each with what was seen, how sure that is and what to change."""
    if not found:
        return tag("p", f"{silence[:1].upper()}{silence[1:]}.", class_="faint")
    return joined(*(_advisory(one) for one in found))


def _advisory(one: Advisory) -> Element:
    first, last = one.steps
    knobs = [
        tag("li", tag("code", knob.flag), f" {knob.why}", None if knob.now is None else f" (now {knob.now})")
        for knob in one.knobs
    ]
    rollouts = f"Rollouts that show it: {', '.join(map(str, one.rollouts))}." if one.rollouts else None
    return tag(
        "article",
        tag("b", one.title),
        tag("p", f"{one.seen} (steps {first} to {last})"),
        tag("p", f"How sure: {one.sure}", class_="faint"),
        tag("p", f"But: {one.caution}", class_="faint") if one.caution else None,
        tag("ul", *knobs) if knobs else None,
        tag("p", rollouts, class_="faint") if rollouts else None,
    )


def settings(run: RunFolder) -> Element:
    """The keys of the run file that differ from the defaults."""
    changed = run.changed()
    if not changed:
        return tag("p", "Nothing, or its run file cannot be read by this version.", class_="faint")
    rows = [tag("tr", tag("td", one.key, class_="code"), _value(one.value), _value(one.default)) for one in changed]
    return _table(("Key", "Value", "Default"), rows)


def _value(value: Any) -> Element:
    if value is None:
        return tag("td", "–", class_="faint")
    text = json.dumps(value, ensure_ascii=False, default=str)
    return tag("td", text if len(text) <= MOST_VALUE else f"{text[:MOST_VALUE]}…", class_="code")


def dropped(signs: Signs) -> Element:
    if not signs.dropped:
        return tag("p", "Nothing was dropped.", class_="faint")
    rows = [
        tag("tr", tag("td", reason.replace("_", " ")), tag("td", f"{number:,}", class_="number"))
        for reason, number in sorted(signs.dropped.items(), key=lambda item: -item[1])
    ]
    return _table(("Reason", "Groups and samples"), rows)


def events(signs: Signs) -> Element:
    if not signs.events:
        return tag("p", "It said nothing.", class_="faint")
    rows = [
        tag("tr", tag("td", moment(stamp) if isinstance(stamp := event.get("time"), int | float) else ""), _what(event))
        for event in reversed(signs.events[-MOST_EVENTS:])
    ]
    return _table(("Time", "What"), rows)


def _what(event: dict[str, Any]) -> Element:
    return tag("td", tag("b", "note ") if event.get("event") == "note" else None, happened(event))


def commands(signs: Signs) -> Element:
    """Commands to run where the run directory is."""
    place = shlex.quote(str(signs.path))
    what, command = signs.onward
    found = [
        (command, what),
        (f"paceline ui {place}", "shows every rollout, token and ticket in a browser"),
        (f"paceline doctor {place}", "says who waits for whom, and what speaks against it"),
        (f"paceline replay {place} {max(1, signs.status.step)}", "computes a recorded step's loss once more"),
    ]
    return tag("ul", *(tag("li", tag("code", command), f"  {why}") for command, why in found if command))


def _table(names: Sequence[str], rows: Sequence[Element]) -> Element:
    return tag("table", tag("tr", *(tag("th", name, scope="col") for name in names)), *rows)


STYLE = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
POLICY = f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; form-action 'none'"
"""Text is escaped; should markup get in all the same, the browser runs and loads nothing of it."""


def page(run: RunFolder, rollouts: int, now: float | None = None) -> str:
    """The whole file."""
    told, sight, problems = signs(run, now), sight_of(run), run.problems()
    found = advise(sight)
    sections = {
        "Summary": joined(summary(told, found), tiles(told)),
        "Curves": curves(run),
        "Advice": advisories(found, silence(sight)),
        "Rollouts": conversations(run, rollouts),
        "Settings that differ from the defaults": settings(run),
        "Dropped, by reason": dropped(told),
        "Events": events(told),
        "See more, or go on": commands(told),
    }
    body = tag(
        "body",
        tag("header", _title(told), _trouble(told), _unread(problems)),
        tag("main", *(tag("section", tag("h2", title), content) for title, content in sections.items())),
        tag("footer", tag("p", f"Written by Paceline {version('paceline')} at {moment(told.now)}.", class_="faint")),
    )
    return f"<!doctype html>\n{tag('html', _head(told), body, lang='en')}\n"


def _head(told: Signs) -> Element:
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", f"{line(told.name, 80)}: a run of Paceline"),
        # The one text that must not be escaped: the browser hashes it as it stands.
        tag("style", Element(STYLE)),
    )


def _title(told: Signs) -> Element:
    status = told.status
    facts = [
        *told.tags,
        status.device,
        f"{count(status.parameters)} parameters" if status.parameters else "",
        f"began {moment(status.began)}" if status.began else "",
        f"ended {moment(status.ended)}" if status.ended else "",
    ]
    state = tag("span", status.state, class_=f"state {status.state}")
    return joined(
        tag("h1", line(told.name, 120), " ", state),
        tag("p", " · ".join(fact for fact in facts if fact), class_="faint"),
    )


def _trouble(told: Signs) -> Element | None:
    state = told.status.state
    if state in ("running", "starting", "finished"):
        return None
    title = tag("b", f"{state.capitalize()} at step {told.status.step}. ")
    why = f"{told.why[:1].upper()}{told.why[1:]}"
    return tag("div", title, why, class_=f"notice {'' if state == 'interrupted' else 'bad'}")


def _unread(problems: list[str]) -> Element | None:
    if not problems:
        return None
    return tag(
        "div",
        tag("b", "Not all of it could be read."),
        tag("ul", *(tag("li", one) for one in problems)),
        class_="notice",
    )


def write_report(directory: Path, file: Path | None, rollouts: int) -> Path:
    """Write the report of a run and return its path; a reader of an older one still sees that one whole."""
    if rollouts < 0:
        raise PacelineError(f"--rollouts {rollouts}: write how many, 0 or more")
    run = open_run(directory)
    file = Path(f"{run.name}-report.html") if file is None else file
    try:
        replace_file(file, [page(run, rollouts).encode("utf-8")], durable=False)
    except OSError as error:
        raise PacelineError(f"{file} cannot be written: {error.strerror}; name another place with -o") from None
    return file
