"""Rollouts of a run without a record: the few of each step that `rollouts.jsonl` shows, asked for in the same way."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.sample import Ticket
from paceline.record.facts import FAILED, TRAINED, error_kind
from paceline.record.layout import BODY, IMAGES, NAMED, ROW
from paceline.record.lines import Lines
from paceline.record.rows import Told, row_of
from paceline.record.said import fold, has_images, pieces


class Sampled:
    """Like `Stored`, from readable lines: conversations, but neither tokens nor samples."""

    fresh = True
    missing = 0

    def __init__(self, lines: Lines) -> None:
        self._records = lines.read()
        self.identity = (0, 0, len(self._records))
        self.names, self.kinds = [""], [""]
        self._known: dict[tuple[str, str], int] = {}
        self.rows = np.zeros(len(self._records), ROW)
        for place, record in enumerate(self._records):
            self._fill(self.rows[place], record)
        self.rows["offset"] = np.arange(len(self._records))
        self.rows = self.rows[np.argsort(self.rows["step"], kind="stable")]

    def told(self, index: int) -> Told:
        row = row_of(index, self.rows[index], self.names)
        record = self._records[int(self.rows[index]["offset"])]
        metrics, messages, error = record.get("metrics"), record.get("messages"), record.get("error")
        return Told(
            row=row,
            ticket=Ticket(row.ticket, row.env, 0, 0, row.row),
            reward=row.reward,
            metrics=metrics if isinstance(metrics, dict) else {},
            error=None if error is None else str(error),
            messages=messages if isinstance(messages, list) else [],
        )

    def measured(self, index: int) -> dict[str, Any]:
        return self.told(index).metrics

    def saying(self, needle: bytes, among: NDArray[Any]) -> NDArray[Any]:
        return among[np.array([needle in self._text(int(self.rows[index]["offset"])) for index in among], bool)]

    def _text(self, place: int) -> bytes:
        record = self._records[place]
        messages = record.get("messages")
        return fold(
            "\n".join([*pieces(messages if isinstance(messages, list) else []), str(record.get("error") or "")])
        )

    def _fill(self, cells: np.void, record: dict[str, Any]) -> None:
        error, versions, messages = record.get("error"), record.get("versions"), record.get("messages")
        messages = messages if isinstance(messages, list) else []
        named = {
            "env": record.get("env"),
            "actor": record.get("actor"),
            "kind": record.get("kind"),
            "state": TRAINED if error is None else FAILED,
            "finish": record.get("finish"),
            "error": "" if error is None else error_kind(str(error), False),
        }
        for column in NAMED:
            cells[column] = self._number(column, str(named[column] or ""))
        for column, key in (("step", "step"), ("ticket", "ticket"), ("row", "row"), ("member", "member")):
            cells[column] = _integer(record.get(key))
        cells["tokens"], cells["turns"] = _integer(record.get("tokens")), int(bool(messages))
        spoken = [v for v in versions if isinstance(v, int)] if isinstance(versions, list) else []
        cells["version_min"], cells["version_max"] = min(spoken, default=-1), max(spoken, default=-1)
        reward = record.get("reward")
        cells["reward"] = reward if isinstance(reward, int | float) else math.nan
        cells["advantage"] = math.nan
        cells["flags"] = BODY | (IMAGES if has_images(messages) else 0)

    def _number(self, kind: str, name: str) -> int:
        if not name:
            return 0
        if (kind, name) not in self._known:
            self._known[kind, name] = len(self.names)
            self.names.append(name)
            self.kinds.append(kind)
        return self._known[kind, name]


def _integer(value: Any) -> int:
    return value if isinstance(value, int) and abs(value) < 2**31 else 0
