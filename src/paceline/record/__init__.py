"""Everything a run did, written off its hot path and read from its directory alone. Imports neither torch nor
transformers."""

from paceline.record.folder import RunFolder, find_runs, open_run
from paceline.record.keeper import Keeper
from paceline.record.lanes import Span
from paceline.record.rows import Found, Gone, Query, Row, Told
from paceline.record.settings import Changed
from paceline.record.status import Status
from paceline.record.tickets import FoundTickets
from paceline.record.told import ToldTurn

__all__ = [
    "Changed",
    "Found",
    "FoundTickets",
    "Gone",
    "Keeper",
    "Query",
    "Row",
    "RunFolder",
    "Span",
    "Status",
    "Told",
    "ToldTurn",
    "find_runs",
    "open_run",
]
