"""Detokenises incrementally: a token may be half a letter, or change how its neighbour is spelt."""

import copy
from collections.abc import Callable, Sequence

BROKEN = "�"
"""Stands for bytes that are no letter, or not one yet."""
GARBAGE = 64
"""So many broken letters in a row will not mend: some decoders show a whole run of bytes as broken until its last
letter is complete, but text is not held back for ever."""


class Detokeniser:
    """Turns a growing list of tokens into text that only ever grows.

    A window of tokens is decoded together, since many decoders treat the first token of a text specially. It starts at
    a place where the text was whole. Broken letters at the end are held back, for the next token may complete them.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int] = ()) -> None:
        """`before` are the tokens the text follows upon: they are not said, but may change how it begins."""
        self._decode = decode
        self._window = list(before)
        self._context = len(self._window)
        """Tokens at the window's start whose text is known to be whole; they are there as neighbours only."""
        self._sent = len(decode(self._window).rstrip(BROKEN)) if before else 0
        """Letters of the window's text that were passed on."""

    def copy(self) -> "Detokeniser":
        twin = copy.copy(self)
        twin._window = list(self._window)
        return twin

    def feed(self, token_ids: Sequence[int]) -> str:
        """The letters these tokens complete."""
        self._window += token_ids
        text = self._decode(self._window)
        sound = len(text.rstrip(BROKEN))
        whole = sound == len(text) or len(text) - sound > GARBAGE
        end = len(text) if whole else sound
        new = text[self._sent : end]
        self._sent = max(self._sent, end)
        if whole and new:
            self._shrink()
        return new

    def flush(self) -> str:
        """The rest: a letter that was never completed."""
        return self._decode(self._window)[self._sent :]

    def _shrink(self) -> None:
        """Everything so far is whole: keep only the latest tokens, as neighbours of what comes."""
        self._window = self._window[self._context :]
        self._context = len(self._window)
        self._sent = len(self._decode(self._window))
