"""The rest of a report: what speaks against the run, its settings, what it said, and how to go on."""

import json
import shlex
from collections.abc import Sequence
from typing import Any

from paceline.record import RunFolder
from paceline.record.advice import Advisory
from paceline.report.markup import Element, joined, tag
from paceline.top.signs import Signs
from paceline.top.words import happened, moment

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
    """What the run file says that the defaults do not."""
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
    """What to type where the run lies."""
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
