"""Finds which tokens of a prompt are a message's own words, and which the chat template's."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from paceline.inference.server.token_bytes import TokenBytes
from paceline.rollout.render import Renderer, RenderError
from paceline.rollout.template import Tools
from paceline.rollout.types import Message, Turn

MARK = "paceline-here-are-the-words"
"""A word that is put in place of a message's own, to see what the template writes around it."""


class MessageSpan(NamedTuple):
    """Tokens `start` to `end` of a prompt are words of message `message`."""

    message: int
    start: int
    end: int


class Bodies:
    """Tells messages from template, exactly or not at all.

    Where a message's words stand in the rendered text is seen by putting others in their place: what comes before and
    after must stay the same to the letter. Where the tokens of a prompt stand in that text is known from their
    spelling, byte by byte, and the bytes must be those the text ends in. A prompt that goes on from a recorded turn
    begins with tokens that are spelled as they were sampled; they are no message's body, and only the rest is looked
    at. A token that is partly template, and a special token written into a message, belong to no message.
    """

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._lexicon = TokenBytes(renderer.tokenizer)
        self._special = frozenset(renderer.tokenizer.all_special_ids)

    def find(self, turn: Turn, messages: Sequence[int], begin: int = 0) -> list[MessageSpan]:
        """The spans of some messages' bodies in a turn's prompt, from token `begin` on. A message whose words cannot
        be told from the template's has none."""
        assert turn.messages is not None
        ids = turn.prompt_ids[begin:]
        try:
            whole = self._text(turn.messages, turn.tools)
        except RenderError:  # a hand-made turn, of messages this template cannot write
            return []
        written, edges = whole.encode(), [0, *accumulate(len(self._lexicon.spell(token)[1]) for token in ids)]
        if b"".join(bytes(self._lexicon.spell(token)[1]) for token in ids) != written[len(written) - edges[-1] :]:
            return []
        first = len(written) - edges[-1]
        found = []
        for place in messages:
            span = self._span(turn.messages, turn.tools, place, whole)
            if span is None:
                continue
            inside = [
                at
                for at, token in enumerate(ids)
                if span[0] <= first + edges[at] and first + edges[at + 1] <= span[1] and token not in self._special
            ]
            found += [MessageSpan(place, begin + start, begin + end) for start, end in _runs(inside)]
        return found

    def _span(self, messages: Sequence[Message], tools: Tools | None, place: int, whole: str) -> tuple[int, int] | None:
        """The bytes of the text that are a message's words."""
        if not messages[place].get("content"):
            return None
        marked = [*messages[:place], {**messages[place], "content": MARK}, *messages[place + 1 :]]
        try:
            before, mark, after = self._text(marked, tools).partition(MARK)
        except RenderError:
            return None
        fits = len(before) + len(after) <= len(whole)
        if not (mark and fits and whole.startswith(before) and whole.endswith(after)):
            return None
        return len(before.encode()), len(whole.encode()) - len(after.encode())

    def _text(self, messages: Sequence[Message], tools: Tools | None) -> str:
        return self._renderer.text(messages, tools)


def _runs(places: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbours as ranges: [2, 3, 7] is [(2, 4), (7, 8)]."""
    runs: list[tuple[int, int]] = []
    for at in places:
        if runs and runs[-1][1] == at:
            runs[-1] = (runs[-1][0], at + 1)
        else:
            runs.append((at, at + 1))
    return runs
