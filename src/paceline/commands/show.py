"""Prints conversations, and dataset rows as the chat template renders them with their token counts.

A conversation that ends in an assistant message is a demonstration: there the assistant's words train, each reply with
the token that ends it. Any other is a prompt, and what trains is yet to be sampled.
"""

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from paceline.data import Row
from paceline.data.rollout import message_text
from paceline.observe.monitor.show_rollout import ROLES
from paceline.observe.monitor.text import CONTROL_PICTURES, format_amount
from paceline.rollout import Message
from paceline.rollout.render import Renderer, RenderError

TRAINED, CONTEXT, TEMPLATE, ANSWER = "bold green", "default", "dim", "yellow"
MOST_CHARACTERS = 6000
"""Characters of a row that are shown; the middle of a longer one is left out."""

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class RenderedRow:
    text: str
    trained_spans: list[Span]
    tokens: int
    trained_tokens: int
    unplaced_replies: int = 0
    """Replies the template rewrites beyond recognition, so that they cannot be placed."""


def show_rows(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, limit: int, console: Console
) -> list[RenderedRow]:
    """Print the first rows and a summary of their token counts."""
    printer = RowPrinter(tokenizer)
    shown: list[RenderedRow] = []
    for number, row in enumerate(islice(rows, limit), start=1):
        try:
            shown.append(printer.render(row))
        except RenderError as error:
            raise RenderError(f"row {number}: {error}") from error
        printer.show(console, number, row, shown[-1])
    console.rule(style="dim")
    counts = [one.tokens for one in shown] or [0]
    mean = sum(counts) / len(counts)
    text = Text(f"{len(shown)} of {len(rows):,} rows, {min(counts)} to {max(counts)} tokens, {mean:.0f} on average   ")
    if any(one.trained_spans for one in shown):
        text.append("trained", TRAINED).append("  ")
    console.print(text.append("context", CONTEXT).append("  ").append("template", TEMPLATE))
    return shown


def show_messages(messages: Sequence[Message], console: Console) -> None:
    """Print a conversation: the role and the text of each message."""
    page = Table.grid("", Column(overflow="fold"), padding=(0, 2))
    for message in messages:
        role = str(message.get("role", "?"))
        calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
        called = [f"→ {call.get('name')}({call.get('arguments')})" for call in calls]
        text = "\n".join([message_text(message), *called]).strip()
        page.add_row(Text(role, ROLES.get(role, "white")), text.translate(CONTROL_PICTURES))
    console.print(page, markup=False)


class RowPrinter:
    """Renders rows with a tokenizer, and prints them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._renderer = Renderer(tokenizer, ())
        added = [str(token) for token in tokenizer.added_tokens_decoder.values()]
        self._marks = re.compile("|".join(map(re.escape, sorted(added, key=len, reverse=True))) or r"(?!)")

    def render(self, row: Row) -> RenderedRow:
        messages = row.get("messages")
        if messages is None:
            ids = list(row["input_token_ids"])
            return RenderedRow(str(self._tokenizer.decode(ids)), [], len(ids), 0)
        tools = row.get("tools") if isinstance(row.get("tools"), list) else None

        def write(some: Sequence[Message], reply: bool) -> str:
            return self._renderer.text(some, tools, reply)

        if messages[-1]["role"] != "assistant":
            text = write(messages, True)
            return RenderedRow(text, [], len(self._token_offsets(text)), 0)
        text = write(messages, False)
        spans = [
            self._reply_span(write, text, messages, at) for at, m in enumerate(messages) if m["role"] == "assistant"
        ]
        trained = [span for span in spans if span is not None]
        offsets = self._token_offsets(text)
        count = sum(any(start <= at < end for start, end in trained) for at in offsets)
        return RenderedRow(text, trained, len(offsets), count, len(spans) - len(trained))

    def _reply_span(
        self, write: Callable[[Sequence[Message], bool], str], whole: str, messages: Sequence[Message], at: int
    ) -> Span | None:
        """The span of a reply in the conversation: after what opens it, to the token that ends it."""
        opening, begun = (write(messages[:at], reply) if at else "" for reply in (True, False))
        closed = write(messages[: at + 1], False)
        if opening != begun and whole.startswith(opening) and whole.startswith(closed):
            return len(opening), len(closed.rstrip())
        # Some templates write a reply otherwise once the conversation goes on (thoughts are gone, say), and some open
        # the next one unasked. Then only the words themselves tell where it ends.
        reply = message_text(messages[at]).strip()
        shared = os.path.commonprefix([opening, whole])  # noqa: RUF071 - texts, no paths
        start = len(shared) if at else max(0, whole.find(reply))
        for words in filter(None, (reply, reply.rpartition("</think>")[2].strip())):
            if found := re.compile(rf"\s*(<think>.*?</think>\s*)?{re.escape(words)}", re.DOTALL).match(whole, start):
                ending = self._marks.match(whole, found.end())
                return start, ending.end() if ending else found.end()
        return None

    def _token_offsets(self, text: str) -> list[int]:
        """The offset at which each token begins."""
        if self._tokenizer.is_fast:
            encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            return [start for start, _ in encoded["offset_mapping"]]
        pieces = [str(self._tokenizer.decode([i])) for i in self._tokenizer.encode(text, add_special_tokens=False)]
        return [0, *accumulate(map(len, pieces))][: len(pieces)]

    def show(self, console: Console, number: int, row: Row, shown: RenderedRow) -> None:
        kind = f", {shown.trained_tokens} trained" if shown.trained_spans or shown.unplaced_replies else ""
        console.rule(
            Text(f"row {number}: {format_amount(shown.tokens, 'token')}{kind}", "bold"), align="left", style="dim"
        )
        page = Table.grid(Column(ratio=1, overflow="fold"), padding=(0, 2), expand=True)
        cells = [self._styled_text(shown)]
        if (answer := row.get("answer")) is not None:
            text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, default=str)
            page.add_column(max_width=max(12, console.width // 4), overflow="fold")
            cells.append(Text("answer\n", "dim").append(text.translate(CONTROL_PICTURES), ANSWER))
        page.add_row(*cells)
        console.print(page)
        if shown.unplaced_replies:
            lost = format_amount(shown.unplaced_replies, "assistant message")
            console.print(Text(f"{lost}: the template rewrites what was said, so it is not coloured", "red"))

    def _styled_text(self, shown: RenderedRow) -> Text:
        text = Text(shown.text.translate(CONTROL_PICTURES), CONTEXT)
        for mark in self._marks.finditer(shown.text):
            text.stylize(TEMPLATE, *mark.span())
        for span in shown.trained_spans:
            text.stylize(TRAINED, *span)
        if len(text) <= MOST_CHARACTERS:
            return text
        left_out = Text(f"\n... {len(text) - MOST_CHARACTERS:,} characters left out ...\n", "dim italic")
        return Text.assemble(text[: MOST_CHARACTERS // 2], left_out, text[-MOST_CHARACTERS // 2 :])
