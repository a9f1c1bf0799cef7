"""Reads append-only JSON lines while another process writes them."""

import json
import os
import threading
from pathlib import Path
from typing import Any


class Lines:
    """The objects of a file, read on from where the last reading ended.

    A last line without its end is not there yet. A file that was replaced or cut (the run went back) is read anew. What
    is no JSON object is left out and counted.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._forget()

    def read(self) -> list[dict[str, Any]]:
        """Everything so far; the list is the reader's own."""
        with self._lock:
            self._refresh()
            return list(self._records)

    def problems(self) -> list[str]:
        with self._lock:
            self._refresh()
            if not self._strange:
                return []
            count, first = len(self._strange), self._strange[0]
            many = f"{count} lines are" if count > 1 else "a line is"
            return [f"{self.path.name}: {many} damaged and left out, the first is line {first}"]

    def _forget(self) -> None:
        self._identity: tuple[int, int] | None = None
        self._at = self._number = 0
        self._records: list[dict[str, Any]] = []
        self._strange: list[int] = []

    def _refresh(self) -> None:
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if (status.st_dev, status.st_ino) != self._identity or status.st_size < self._at:
                    self._forget()
                    self._identity = status.st_dev, status.st_ino
                file.seek(self._at)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._at += len(line)
                    self._number += 1
                    self._take(line)
        except FileNotFoundError:
            self._forget()

    def _take(self, line: bytes) -> None:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict):
            self._records.append(record)
        else:
            self._strange.append(self._number)
