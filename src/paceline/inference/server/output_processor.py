"""Turns the tokens of one choice into text, and ends it at a stop string."""

import codecs
import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.inference.base import Completion, GenerateRequest, Piece, TopLogprobs
from paceline.inference.server.detokenise import Detokeniser
from paceline.inference.server.token_bytes import TokenBytes
from paceline.inference.server.tokenizer import ServerTokenizer


class StopMatcher:
    """Passes text on until a stop string is complete, and then nothing more.

    The stop string that is complete first wins; of two that end together, the longer. So the outcome depends on the
    text alone, never on how it was cut. Text that may still become a stop string is held back.

        stops ["END"]:  "one E" -> "one ",  "NT" -> "ENT",  " EN" -> " ",  "D" -> "", found
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self._held = ""
        self.found = False

    def copy(self) -> "StopMatcher":
        return copy.copy(self)

    def feed(self, text: str) -> str:
        """The part of the text, and of text held back before, that is sure to belong to the answer."""
        if self.found:
            return ""
        if not self.stops:
            return text
        text = self._held + text
        hits = [(start + len(stop), start) for stop in self.stops if (start := text.find(stop)) >= 0]
        if hits:
            self.found, self._held = True, ""
            return text[: min(hits)[1]]
        keep = self._beginning(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text is over: what was held back is no stop string after all."""
        text, self._held = self._held, ""
        return text

    def _beginning(self, text: str) -> int:
        """Length of the longest end of the text with which some stop string begins."""
        longest = min(max(map(len, self.stops)) - 1, len(text))
        return next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in self.stops)), 0)


@dataclass(slots=True)
class ChoiceDelta:
    """New output of a choice: text that is sure, and the tokens that were sampled."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top: list[TopLogprobs] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    """Where in the text each token begins; only where asked for."""

    def add(self, other: "ChoiceDelta") -> None:
        self.text += other.text
        self.token_ids += other.token_ids
        self.logprobs += other.logprobs
        self.versions += other.versions
        self.top += other.top
        self.offsets += other.offsets


class OutputProcessor:
    """Detokenises what one choice says and ends it at a stop string.

    A piece is decoded as a whole; only where a stop string ends inside it are its tokens gone through one by one.
    The tokens reported are all that were sampled, to the one that completed the stop: only the text is cut.
    """

    def __init__(self, scribe: ServerTokenizer, request: GenerateRequest, stops: Sequence[str], offsets: bool) -> None:
        self._detokeniser = scribe.detokeniser(request.prompt_ids)
        self._matcher = StopMatcher(stops)
        self._ends = request.stop_token_ids
        self._ruler = Ruler(scribe.lexicon) if offsets else None
        self.finish: str | None = None
        self.sampled = 0
        self.cached = 0

    def hear(self, piece: Piece) -> ChoiceDelta:
        """Take newly sampled tokens. Once `finish` is set nothing more is said."""
        if self.finish:
            return ChoiceDelta()
        before = (self._detokeniser.copy(), self._matcher.copy()) if self._matcher.stops else None
        text = self._matcher.feed(self._detokeniser.feed(self._said(piece.token_ids)))
        taken = len(piece.token_ids)
        if before and self._matcher.found:
            self.finish = "stop"
            taken = self._until_found(piece.token_ids, *before)
        self.sampled += taken
        delta = ChoiceDelta(text, piece.token_ids[:taken], piece.logprobs[:taken], piece.versions[:taken])
        delta.top = (piece.top or [])[:taken]
        if self._ruler is not None:
            delta.offsets = self._ruler.measure(delta.token_ids)
        return delta

    def end(self, completion: Completion, listened: bool) -> ChoiceDelta:
        """The engine is done: say what was held back. Unless it was listened to, everything is yet to be said."""
        self.cached = completion.cached
        delta = ChoiceDelta()
        if not listened:
            whole = Piece(completion.token_ids, completion.logprobs, completion.versions, completion.top)
            delta = self.hear(whole)
        if self.finish is None:
            delta.text += self._matcher.feed(self._detokeniser.flush())
            delta.text += self._matcher.flush()
            self.finish = "stop" if self._matcher.found else completion.finish
        return delta

    def _said(self, token_ids: list[int]) -> list[int]:
        """Without the token that only ends the answer; nothing comes after it."""
        return token_ids[:-1] if token_ids and token_ids[-1] in self._ends else token_ids

    def _until_found(self, token_ids: list[int], detokeniser: Detokeniser, matcher: StopMatcher) -> int:
        """How many tokens it takes to complete the stop string."""
        for place, token in enumerate(token_ids, start=1):
            matcher.feed(detokeniser.feed((token,)))
            if matcher.found:
                return place
        return len(token_ids)


class Ruler:
    """Tells where in the text each token begins, from the tokens' bytes: half a letter has no length yet."""

    def __init__(self, lexicon: TokenBytes) -> None:
        self._lexicon = lexicon
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._length = 0

    def measure(self, token_ids: Sequence[int]) -> list[int]:
        offsets = []
        for token in token_ids:
            offsets.append(self._length)
            self._length += len(self._decode(bytes(self._lexicon.spell(token)[1])))
        return offsets
