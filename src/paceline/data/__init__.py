"""Dataset rows, samples, packing, and the ledger of tickets."""

from paceline.data.balance import Cost, Cut, balanced, cuts, imbalance, lockstep
from paceline.data.ledger import Ledger, LedgerError, State
from paceline.data.mixture import (
    Mixture,
    decontaminate,
    open_dataset,
    open_mixture,
    order_of,
    skipped,
)
from paceline.data.packing import MicroBatch, Scales, count, first_fit_decreasing, fold, lay, minibatches, pack
from paceline.data.rows import BadRow, BadRows, DataError, Row, look_through, part_problem, row_change, row_digest
from paceline.data.sample import Sample, Ticket, WireError, decode, encode
from paceline.data.sampler import Curriculum, Cursor, MixtureCursor
from paceline.data.sources import DatasetUri, Scheme, listed_rows, open_rows, parse_address, register_scheme

__all__ = [
    "BadRow",
    "BadRows",
    "Cost",
    "Curriculum",
    "Cursor",
    "Cut",
    "DataError",
    "DatasetUri",
    "Ledger",
    "LedgerError",
    "MicroBatch",
    "Mixture",
    "MixtureCursor",
    "Row",
    "Sample",
    "Scales",
    "Scheme",
    "State",
    "Ticket",
    "WireError",
    "balanced",
    "count",
    "cuts",
    "decode",
    "decontaminate",
    "encode",
    "first_fit_decreasing",
    "fold",
    "imbalance",
    "lay",
    "listed_rows",
    "lockstep",
    "look_through",
    "minibatches",
    "open_dataset",
    "open_mixture",
    "open_rows",
    "order_of",
    "pack",
    "parse_address",
    "part_problem",
    "register_scheme",
    "row_change",
    "row_digest",
    "skipped",
]
