"""Dataset rows, samples, packing, and the ledger of tickets."""

from paceline.data.balance import Cost, Cut, balance_bins, cut_steps, imbalance, lockstep_cost
from paceline.data.ledger import Ledger, LedgerError, State
from paceline.data.mixture import (
    Mixture,
    decontaminate,
    make_cursor,
    open_dataset,
    open_mixture,
    skipped_rows,
)
from paceline.data.packing import (
    MicroBatch,
    Scales,
    collate,
    component_counts,
    first_fit_decreasing,
    minibatches,
    pack,
    token_scales,
)
from paceline.data.rows import BadRow, BadRows, DataError, Row, find_bad_rows, part_problem, row_change, row_digest
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
    "balance_bins",
    "collate",
    "component_counts",
    "cut_steps",
    "decode",
    "decontaminate",
    "encode",
    "find_bad_rows",
    "first_fit_decreasing",
    "imbalance",
    "listed_rows",
    "lockstep_cost",
    "make_cursor",
    "minibatches",
    "open_dataset",
    "open_mixture",
    "open_rows",
    "pack",
    "parse_address",
    "part_problem",
    "register_scheme",
    "row_change",
    "row_digest",
    "skipped_rows",
    "token_scales",
]
