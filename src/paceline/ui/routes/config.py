"""The resolved run file, key by key, with what differs from the defaults."""

from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Response

from paceline.config.fields import KeyPath, Spot, spot_at
from paceline.ui.answers import FiniteJsonResponse
from paceline.ui.routes.here import OneRun

router = APIRouter()


@router.get("/config")
def config(run: OneRun) -> Response:
    """A row for each key: section, key, value, default, whether it was changed, and what it means."""
    table = run.config()
    changed = {entry.key: entry.default for entry in run.changed()}
    rows = []
    for path, value in _leaves(table):
        key, spot = _dotted(path), _spot(path, table)
        rows.append(
            {
                "key": key,
                "section": _section(path, table),
                "name": str(path[-1]),
                "value": value,
                "changed": key in changed,
                "default": changed.get(key),
                "help": spot.help if spot else "",
                "known": spot is not None,
            }
        )
    text = ""
    file = run.path / "config.toml"
    if file.is_file():
        text = file.read_text(errors="replace")
    return FiniteJsonResponse({"rows": rows, "text": text, "problems": run.problems(patient=False)})


def _leaves(table: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Values first, then the sections below: so they are read in the file."""
    below = []
    for key, value in table.items() if isinstance(table, dict) else enumerate(table):
        is_tables = isinstance(value, list) and value and all(isinstance(entry, dict) for entry in value)
        if is_tables or (isinstance(value, dict) and value):
            below.append((key, value))
        else:
            yield (*path, key), value
    for key, value in below:
        yield from _leaves(value, (*path, key))


def _dotted(path: KeyPath) -> str:
    """`env[0].algo.type`, as `RunFolder.changed` names keys."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")


def _section(path: KeyPath, table: Any) -> str:
    """`env · reverse-text · algo`: the elements of a list by their names."""
    words = []
    for key in path[:-1]:
        table = table[key]
        words.append(str(table.get("name") or table.get("type") or key) if isinstance(key, int) else str(key))
    return " · ".join(words)


def _spot(path: KeyPath, table: Any) -> Spot | None:
    """This version's description of a key; a run of another version may hold other keys."""
    try:
        return spot_at(path, table)
    except (TypeError, AttributeError, KeyError, IndexError):
        return None
