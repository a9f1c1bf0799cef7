"""Samples, packing, rows, and the books that account for them."""

from paceline.data.cursor import Cursor
from paceline.data.ledger import Ledger, LedgerError, State
from paceline.data.packing import MicroBatch, first_fit_decreasing, pack
from paceline.data.rows import DataError, Row, read_rows
from paceline.data.sample import Ended, Sample, Ticket
from paceline.data.scales import Normalise, Scales, fold
from paceline.data.wire import WireError, decode, encode

__all__ = [
    "Cursor",
    "DataError",
    "Ended",
    "Ledger",
    "LedgerError",
    "MicroBatch",
    "Normalise",
    "Row",
    "Sample",
    "Scales",
    "State",
    "Ticket",
    "WireError",
    "decode",
    "encode",
    "first_fit_decreasing",
    "fold",
    "pack",
    "read_rows",
]
