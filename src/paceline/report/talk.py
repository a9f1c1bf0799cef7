"""A few rollouts as conversations: the best, the median and the worst of the last steps, for each environment."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.record import Gone, Query, Row, RunFolder
from paceline.report.markup import Element, joined, tag
from paceline.top.words import figure, line
from paceline.ui.rollouts.talk import talks

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
