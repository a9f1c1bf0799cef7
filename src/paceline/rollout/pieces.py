"""Text to tokens, piece by piece: what was tokenised once is not tokenised again."""

import re

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerBase

from paceline.rollout.recent import Recent

REMEMBERED = 1 << 20
"""Tokens of pieces kept."""
SHORTEST = 32
"""Characters of a piece: those between an end-of-turn token and the next role belong to what follows."""


class Pieces:
    """The tokenizer's ids of a text, exactly as it would give them for the whole.

    Before it does anything else a tokenizer looks for its added tokens in the text as it stands, the leftmost first and
    of several the longest, and from there on never looks across one. So a text can be cut at them beforehand, and a
    conversation that is rendered anew is tokenised only where it is new. Each piece begins with its added token, for
    some tokenizers treat the beginning of a text in a way of its own: only the first piece is one.

    Tokens that are looked for in normalised text are no matter, as they are found within a piece. Where one swallows
    the white space beside it, or counts only as a word of its own, the text stays whole.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._quick: Tokenizer | None = None
        self._cut: re.Pattern[str] | None = None
        self._known: Recent[list[int]] = Recent(REMEMBERED)
        backend = None if tokenizer.split_special_tokens else getattr(tokenizer, "backend_tokenizer", None)
        if isinstance(backend, Tokenizer):
            self._quick, self._cut = backend, _cut(list(backend.get_added_tokens_decoder().values()))

    def encode(self, text: str) -> list[int]:
        if self._cut is None:
            return self._whole(text)
        ids: list[int] = []
        start = 0
        for match in self._cut.finditer(text):
            at = match.start()
            if at - start >= SHORTEST:
                ids += self._piece(text[start:at])
                start = at
        ids += self._piece(text[start:])
        return ids

    def _piece(self, text: str) -> list[int]:
        ids = self._known.get(text)
        if ids is None:
            ids = self._whole(text)
            self._known.put(text, ids, len(ids))
        return ids

    def _whole(self, text: str) -> list[int]:
        # The same tokens by the shorter way: half of the time would go into options nobody set.
        quick = self._quick
        if quick is not None and quick.truncation is None and quick.padding is None:
            return quick.encode(text, add_special_tokens=False).ids
        return self._tokenizer.encode(text, add_special_tokens=False)


def _cut(added: list[AddedToken]) -> re.Pattern[str] | None:
    """Finds the tokens a text may be cut at; None if it may not."""
    plain = [token for token in added if token.content and not token.normalized]
    if not plain or any(token.lstrip or token.rstrip or token.single_word for token in plain):
        return None
    return re.compile("|".join(re.escape(token.content) for token in sorted(plain, key=lambda t: -len(t.content))))
