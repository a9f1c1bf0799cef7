"""Prints an episode to the terminal: its messages, which of them were sampled, and its reward.

A record is a plain dict, as `Rollout.record()` gives it. Keys, all of them optional:

    env, row, member, actor, kind      who played what
    messages                           the conversation; `conversations` where an episode held several
    sampled                            positions in `messages` that the policy said; all assistant messages if left out
    reward, metrics, error             how it ended
    verdicts                           the grades of judges
    tokens, context, samples           sampled tokens, tokens of the longest prompt with its reply, training samples
    versions, finish, seconds
    tools                              what the prompt offered, in OpenAI's form
    turns                              each call's `prompt` and `completion` as exact text, shown in place of messages
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.rule import Rule
from rich.text import Text

from paceline.observe.monitor.text import CONTROL_PICTURES, format_amount, format_score, format_seconds

MAX_WIDTH = 120
ROLES = {"system": "yellow", "developer": "yellow", "user": "blue", "assistant": "green", "tool": "magenta"}

Record = Mapping[str, Any]


def show_rollout(record: Record, console: Console) -> None:
    width = min(console.width, MAX_WIDTH)
    console.print(Rule(_heading(record), style="bright_black", align="left"), width=width)
    for tool in record.get("tools") or ():
        function = tool.get("function", tool)
        names = ", ".join((function.get("parameters") or {}).get("properties") or {})
        purpose = f": {function['description']}" if function.get("description") else ""
        line = Text(_plain(f"tool {function.get('name')}({names})"), "magenta")
        console.print(line.append(_plain(purpose), "dim"), soft_wrap=True)
    turns = [turn for turn in record.get("turns") or () if "prompt" in turn]
    for number, turn in enumerate(turns, start=1):  # letter by letter: no frame, no wrapping
        console.print(Text(f"prompt of turn {number}, {format_amount(turn['prompt_tokens'], 'token')}", "blue"))
        console.print(Text(_plain(turn["prompt"])), soft_wrap=True)
        console.print(Text(f"sampled in turn {number}", "bold green"))
        console.print(Text(_plain(turn["completion"]), "bold"), soft_wrap=True)
    conversations = [] if turns else record.get("conversations") or [record]
    for number, conversation in enumerate(conversations, start=1):
        if len(conversations) > 1:
            console.print(Text(f"conversation {number} of {len(conversations)}", "dim"))
        messages, sampled = conversation.get("messages") or [], conversation.get("sampled")
        said = sampled if sampled is not None else [i for i, m in enumerate(messages) if m.get("role") == "assistant"]
        for place, message in enumerate(messages):
            console.print(_panel(message, place in said, width))
    show_verdicts(record, console)
    console.print(_verdict(record), width=width)
    if record.get("error"):
        console.print(Panel(Text(_plain(str(record["error"])), "red"), title="error", border_style="red", width=width))


def show_summary(records: Sequence[Record], console: Console) -> None:
    """One line over all episodes: mean reward and metrics, and how many failed."""
    played = [record for record in records if record.get("reward") is not None]
    line = Text(format_amount(len(records), "rollout"), "bold")
    if played:
        rewards = [float(record["reward"]) for record in played]
        line.append(f"  reward {format_score(fmean(rewards))}", "bold")
        line.append(f" ({format_score(min(rewards))} to {format_score(max(rewards))})", "dim")
    for name in sorted({name for record in played for name in record.get("metrics") or {}}):
        values = [float(record["metrics"][name]) for record in played if name in (record.get("metrics") or {})]
        line.append(f"  {name} {format_score(fmean(values))}")
    if failed := sum(1 for record in records if record.get("error")):
        line.append(f"  {failed} failed", "red")
    console.print(line)


def _heading(record: Record) -> Text:
    parts = [str(record.get("env") or "episode")]
    parts += [f"{key} {record[key]}" for key in ("row", "member") if record.get(key) is not None]
    if (actor := record.get("actor")) and actor != "policy":
        parts.append(f"{record['kind']} {actor}" if record.get("kind") else str(actor))
    if record.get("trained") is False:
        parts.append("not trained")
    return Text(" · ".join(parts), "bold cyan")


def _panel(message: Mapping[str, Any], sampled: bool, width: int) -> Panel:
    role = str(message.get("role", "?"))
    colour = ROLES.get(role, "white")
    return Panel(
        Group(*_body(message, sampled)),
        title=Text(f"{role}, sampled" if sampled else role, f"bold {colour}" if sampled else colour),
        title_align="left",
        border_style=colour if sampled else f"dim {colour}",
        width=width,
    )


def _body(message: Mapping[str, Any], sampled: bool) -> Iterator[Text]:
    style = "bold" if sampled else "dim"
    calls, content = message.get("tool_calls") or [], message.get("content") or ""
    if not isinstance(content, str):  # it comes in parts
        content = "".join(str(part.get("text", f"[{part.get('type')}]")) for part in content)
    if content or not calls:
        yield Text(_plain(content), style) if content else Text("(nothing)", "dim italic")
    for call in calls:
        function = call.get("function") or {}
        given = function.get("arguments", "")
        arguments = given if isinstance(given, str) else json.dumps(given)
        yield Text(_plain(f"→ {function.get('name')}({arguments})"), f"{style} magenta")


def show_verdicts(record: Record, console: Console) -> None:
    """A line for each judge: its grade and what it wrote."""
    for verdict in record.get("verdicts") or ():
        if verdict.get("text"):
            line = Text(f"judge {verdict['judge']}: {format_score(verdict['score'])}  ", "bold yellow")
            console.print(line.append(_plain(" ".join(verdict["text"].split())), "dim"), soft_wrap=True)


def _verdict(record: Record) -> Text:
    """`reward 1.000  correct 1.000  2 searches ...` and, dimmer, how it came about."""
    reward = record.get("reward")
    said = "no reward" if reward is None else f"reward {format_score(float(reward))}"
    line = Text().append(said, "bold green" if reward is not None and reward > 0 else "bold yellow")
    for name, value in (record.get("metrics") or {}).items():
        line.append(f"  {name} {format_score(float(value))}")
    line.append("".join(f"  {part}" for part in _circumstances(record)), "dim")
    return line


def _circumstances(record: Record) -> Iterator[str]:
    if record.get("tokens") is not None:
        yield format_amount(record["tokens"], "token")
    if record.get("context"):
        yield f"context {record['context']}"
    if record.get("samples") is not None:
        yield format_amount(record["samples"], "sample")
    if versions := record.get("versions"):
        yield f"version {versions[0]}" if len(versions) == 1 else f"versions {versions[0]} to {versions[-1]}"
    if record.get("finish") == "length":
        yield "cut off at the token limit"
    if record.get("seconds") is not None:
        yield format_seconds(record["seconds"])


def _plain(text: str) -> str:
    return text.translate(CONTROL_PICTURES)
