"""Dataset rows, samples, packing, and the ledger of tickets."""

from paceline.data.contamination import ContaminationReport, clean_rows, decontaminate
from paceline.data.ledger import Ledger, State
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
from paceline.data.sampler import Cursor, Mixture, make_cursor, open_dataset, skipped_rows
from paceline.data.sources import DatasetUri, listed_rows, open_rows, parse_address, register_scheme

__all__ = [
    "BadRow",
    "BadRows",
    "ContaminationReport",
    "Cursor",
    "DataError",
    "DatasetUri",
    "Ledger",
    "MicroBatch",
    "Mixture",
    "Row",
    "Sample",
    "Scales",
    "State",
    "Ticket",
    "WireError",
    "clean_rows",
    "collate",
    "component_counts",
    "decode",
    "decontaminate",
    "encode",
    "find_bad_rows",
    "first_fit_decreasing",
    "listed_rows",
    "make_cursor",
    "minibatches",
    "open_dataset",
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
