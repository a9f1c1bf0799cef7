"""Stop strings, found wherever the borders between tokens fall."""

import copy
from collections.abc import Sequence


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
        """What of the text, and of what was held back, is sure to belong to the answer."""
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
