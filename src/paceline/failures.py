"""What to do about something that failed: three small values, picked once from the run file."""

from dataclasses import dataclass

from paceline.config.failures import Choice

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0


@dataclass(frozen=True, slots=True)
class Retry:
    """Try again, `tries` times in all; then give it up."""

    tries: int

    def again(self, failed: int) -> bool:
        """Whether to try once more after so many failures."""
        return failed < self.tries

    @staticmethod
    def pause(failed: int) -> float:
        """Seconds before the next try: twice as long each time, up to a limit.

        >>> [Retry.pause(failed) for failed in (1, 2, 3, 9)]
        [1.0, 2.0, 4.0, 30.0]
        """
        return min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(failed - 1, 10))

    def __str__(self) -> str:
        return f'"retry", {self.tries} tries'


@dataclass(frozen=True, slots=True)
class Drop:
    """Give it up at once and go on."""

    def __str__(self) -> str:
        return '"drop"'


@dataclass(frozen=True, slots=True)
class Fail:
    """Stop the run with the cause."""

    def __str__(self) -> str:
        return '"fail"'


Policy = Retry | Drop | Fail
USUAL: Policy = Retry(3)
"""What most kinds of failure get."""


def policy(choice: Choice, tries: int) -> Policy:
    """The value a word of the run file stands for."""
    return {"retry": Retry(tries), "drop": Drop(), "fail": Fail()}[choice]
