"""Defines the order of draws, as the orchestrator sees it: shuffled, by weight, or by curriculum."""

from collections.abc import Sequence
from typing import Any, Protocol

from paceline.data.curriculum import Curriculum
from paceline.data.cursor import Cursor
from paceline.data.mixture import Mixture, MixtureCursor
from paceline.data.rows import Row


class Draws(Protocol):
    """A place in a dataset that a checkpoint can keep."""

    rows: int

    @property
    def draws(self) -> int:
        """How many there have been."""
        ...

    def draw(self) -> tuple[int, int, int]:
        """The next (epoch, draw index, row)."""
        ...

    def state(self) -> Any:
        """For the checkpoint: plain JSON."""
        ...

    def load(self, state: Any, /) -> None:
        """Go on from a checkpoint."""
        ...


def order_of(rows: Sequence[Row], seed: int, name: str, curriculum: bool = False) -> Draws:
    """The order in which an environment's rows are drawn: by weight for a mixture, by accuracy under a curriculum."""
    if isinstance(rows, Mixture):
        return MixtureCursor(rows.sizes, rows.weights, seed, name, curriculum=curriculum)
    return Curriculum(len(rows), seed, name) if curriculum else Cursor(len(rows), seed, name)


def learn(order: Draws, row: int, rewards: Sequence[float]) -> None:
    """Tell an order how a row went. Shuffled epochs ignore it."""
    if isinstance(order, Curriculum | MixtureCursor):
        order.update(row, rewards)
