"""A batch spread over ranks in lockstep: how much work is lost to waiting, and how long the spreading takes.

All ranks run their k-th micro-batches together (a row). Work is the forward flops of a 7B model (Qwen 2.5's shape):
linear in tokens, and quadratic in each sequence's for attention. Micro-batches hold up to --budget tokens, and samples
are up to as long. Worst of --seeds drawn batches; bars:

  imbalance   sum over rows of the costliest micro-batch, over (all work / ranks), minus 1              under 3%
  padding     share of empty tokens if each row were padded to its fullest micro-batch; a blank one
              is all padding (none of it is computed: packs carry no padding, blanks two tokens)        under 3%
  speed       100,000 samples over 64 ranks, CPU seconds, best of five                                  under 1 s

  long tail   log-normal, median 2,000, deviation of the logarithm 0.9, cut off at the budget
  two kinds   80% normal around 1,000 (deviation 250), 20% around 3/4 of the budget (6%)
  uniform     64 tokens to the budget

Against: `first fit`, samples dealt to ranks in turn, each rank packing its own by first-fit-decreasing; `naive`, dealt
in turn and packed in the order of arrival. Where one rank has fewer micro-batches than another it runs blanks.

Reported without a bar: budget used (tokens / all places, the least of the seeds), imbalance if attention cost twice
what the packing was told, and batches of --few samples a rank. There a few long samples can cost more than any other
micro-batch of their row may hold, and nothing balances them.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from bars import Row, arguments, finish
from paceline.data import first_fit_decreasing
from paceline.data.packing import Cost, balance_bins, imbalance

BAR, SECONDS, MANY = 0.03, 1.0, 100_000
RANKS = (2, 4, 8, 16, 32, 64)
COST = Cost(linear=2 * 7.070e9, attention=2 * 28 * 28 * 128)  # Qwen 2.5 7B
DEARER = Cost(COST.linear, 2 * COST.attention)
CAPTION = (
    "imbalance: sum over rows of the costliest micro-batch / (all work / ranks) - 1; padding: share of empty tokens "
    "if each row were padded to its fullest micro-batch, blanks included. Each the worst of all seeds."
)
Cut = list[list[list[int]]]


def drawn(kind: str, number: int, longest: int, seed: int) -> list[int]:
    rng = np.random.default_rng(seed)
    match kind:
        case "long tail":
            lengths = rng.lognormal(math.log(2000), 0.9, number)
        case "two kinds":
            short = rng.random(number) < 0.8
            lengths = np.where(short, rng.normal(1000, 250, number), rng.normal(0.75 * longest, 0.06 * longest, number))
        case _:
            lengths = rng.uniform(64, longest, number)
    return np.clip(lengths, 64, longest).astype(int).tolist()


def first_fit(lengths: list[int], ranks: int, budget: int) -> Cut:
    return dealt(lengths, ranks, lambda own: first_fit_decreasing(own, budget))


def naive(lengths: list[int], ranks: int, budget: int) -> Cut:
    return dealt(lengths, ranks, lambda own: list(arrivals(own, budget)))


def dealt(lengths: list[int], ranks: int, packed: Callable[[list[int]], list[list[int]]]) -> Cut:
    """Samples dealt in turn, packed by each rank, and blanks where a rank has fewer packs."""
    cut = [[[i * ranks + rank for i in members] for members in packed(lengths[rank::ranks])] for rank in range(ranks)]
    most = max(map(len, cut))
    return [bins + [[] for _ in range(most - len(bins))] for bins in cut]


def arrivals(lengths: list[int], budget: int) -> Iterator[list[int]]:
    members: list[int] = []
    room = budget
    for index, length in enumerate(lengths):
        if members and length > room:
            yield members
            members, room = [], budget
        members.append(index)
        room -= length
    if members:
        yield members


def padding(cut: Cut, lengths: list[int]) -> float:
    rows = [[sum(lengths[i] for i in members) for members in row] for row in zip(*cut, strict=True)]
    return 1 - sum(lengths) / (len(cut) * sum(map(max, rows)))


@dataclass(frozen=True)
class Case:
    """The worst of several batches."""

    lengths: str
    ranks: int
    samples_per_rank: int
    micro_batches: int
    imbalance: float
    padding: float
    first_fit_imbalance: float
    first_fit_padding: float
    naive_imbalance: float
    naive_padding: float
    dearer_attention: float
    budget_used: float


def case(kind: str, ranks: int, per_rank: int, budget: int, seeds: int) -> Case:
    def one(seed: int) -> tuple[float, ...]:
        lengths = drawn(kind, ranks * per_rank, budget, seed)
        ours = balance_bins(lengths, ranks, budget, COST)
        cuts = (ours, first_fit(lengths, ranks, budget), naive(lengths, ranks, budget))
        figures = [f for cut in cuts for f in (imbalance(cut, lengths, COST), padding(cut, lengths))]
        unused = 1 - sum(lengths) / (ranks * len(ours[0]) * budget)
        return len(ours[0]), *figures, imbalance(ours, lengths, DEARER), unused

    rows, *worst, unused = (max(column) for column in zip(*map(one, range(seeds)), strict=True))
    return Case(kind, ranks, per_rank, int(rows), *worst, 1 - unused)


def seconds(work: Callable[[], object]) -> float:
    def once() -> float:
        start = time.process_time()
        work()
        return time.process_time() - start

    return min(once() for _ in range(5))


def show(title: str, cases: list[Case]) -> None:
    table = Table(title=title, caption=CAPTION)
    for heading in ("lengths", "ranks", "rows", "ours", "first fit", "naive", "attention x2", "budget used"):
        table.add_column(heading, justify="left" if heading == "lengths" else "right")
    for c in cases:
        pairs = (
            (c.imbalance, c.padding),
            (c.first_fit_imbalance, c.first_fit_padding),
            (c.naive_imbalance, c.naive_padding),
        )
        figures = (f"{a:.1%} / {b:.1%}" for a, b in pairs)
        extra = (f"{c.dearer_attention:.1%}", f"{c.budget_used:.0%}")
        table.add_row(c.lengths, str(c.ranks), str(c.micro_batches), *figures, *extra)
    Console(width=120).print(table)


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--per-rank", type=int, default=64, help="samples of a batch for each rank")
    parser.add_argument("--few", type=int, default=16, help="the same where they are few")
    parser.add_argument("--budget", type=int, default=16_384, help="tokens of a micro-batch, and of the longest sample")
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    kinds = ("long tail", "two kinds", "uniform")

    def cases(per_rank: int) -> list[Case]:
        return [case(kind, ranks, per_rank, given.budget, given.seeds) for kind in kinds for ranks in RANKS]

    barred, few = cases(given.per_rank), cases(given.few)
    show(f"{given.per_rank} samples a rank, {given.budget:,} tokens a micro-batch", barred)
    show(f"{given.few} samples a rank: no bar", few)
    rows = []
    for c in barred:
        for what in ("imbalance", "padding"):
            ours, peer = getattr(c, what), getattr(c, f"first_fit_{what}")
            name = f"{c.lengths}, {c.ranks} ranks: {what}"
            rows.append(Row(name, "%", 100 * ours, 100 * peer, "first fit", BAR / max(ours, 1e-4), 1.0))
    for kind in kinds:
        many = drawn(kind, MANY, given.budget, 0)
        ours = seconds(lambda many=many: balance_bins(many, 64, given.budget, COST))
        alone = seconds(lambda many=many: first_fit_decreasing(many, given.budget))
        rows.append(Row(f"{kind}, {MANY:,} samples", "s", ours, alone, "first fit, 1 rank", SECONDS / ours, 1.0))
    return finish(
        "packing over ranks (ratio: bar / ours)",
        rows,
        given.json,
        cases=[asdict(c) for c in barred],
        few_samples=[asdict(c) for c in few],
    )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
