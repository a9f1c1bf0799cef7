"""Eight hours on a thousand GPUs, in minutes on one core: how should they be split between sampling and training?

The orchestrator is the real one, its clock is virtual, and the GPUs are a cost model (docs/simulate.md). Some splits
run for an hour each; the best one whose trainer hardly waits then runs for all of --hours. Bars of that run:

  staleness   no trained token is older than --staleness versions
  waiting     the trainer waits for batches less than 5% of the time
  memory      flat: the last quarter holds no more than 2% more Python objects than the third
"""

import gc
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bars import Row, arguments, finish
from simulator.cost import CARDS, Lengths, SimulationPlan
from simulator.run import MAX_WAIT_SHARE, SimulationReport, best, simulate, sweep

PICTURE = Path(__file__).parent.parent / "docs" / "curves" / "simulate.png"
GROWTH = 0.02
INK, FAINT, BLUE, RED = "#333333", "#DDDDDD", "#4477AA", "#EE6677"


def options():
    parser = arguments(__doc__ or "")
    plan = SimulationPlan()
    parser.add_argument("--model-b", type=float, default=7.0, help="parameters, in billions")
    parser.add_argument("--card", choices=sorted(CARDS), default="h100")
    parser.add_argument("--gpus", type=int, default=plan.gpus)
    parser.add_argument("--hours", type=float, default=8.0, help="simulated time of the long run")
    parser.add_argument("--sweep-hours", type=float, default=1.0, help="and of each split before it")
    parser.add_argument("--splits", type=int, default=9, help="splits at equal steps")
    parser.add_argument("--closer", type=int, default=4, help="splits around the best of them")
    parser.add_argument("--sampling-gpus", type=int, help="take this split and look at no other")
    parser.add_argument("--staleness", type=int, default=plan.staleness)
    parser.add_argument("--batch", type=int, default=plan.batch, help="rollouts trained between two publishes")
    parser.add_argument("--group", type=int, default=plan.group)
    parser.add_argument("--max-inflight", type=int, help="rollouts; (staleness + 1) batches when left out")
    parser.add_argument("--concurrency", type=int, default=plan.concurrency, help="requests an engine decodes at once")
    parser.add_argument("--cards-per-engine", type=int, default=plan.cards_per_engine)
    parser.add_argument("--prompt", type=int, default=plan.prompt, help="tokens")
    parser.add_argument("--median", type=float, default=plan.lengths.median, help="of the replies' tokens")
    parser.add_argument("--spread", type=float, default=plan.lengths.spread, help="deviation of their logarithm")
    parser.add_argument("--longest", type=int, default=plan.lengths.longest, help="where replies are cut off")
    parser.add_argument("--mfu", type=float, default=plan.mfu, help="of the trainer")
    parser.add_argument("--bundle", type=int, default=plan.bundle, help="rollouts that are simulated as one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    return parser.parse_args()


def planned(given) -> SimulationPlan:
    return SimulationPlan(
        parameters=given.model_b * 1e9,
        card=CARDS[given.card],
        gpus=given.gpus,
        sampling_gpus=given.sampling_gpus or given.gpus // 2,
        cards_per_engine=given.cards_per_engine,
        lengths=Lengths(given.median, given.spread, given.longest),
        prompt=given.prompt,
        staleness=given.staleness,
        batch=given.batch,
        group=given.group,
        max_inflight=given.max_inflight,
        concurrency=given.concurrency,
        mfu=given.mfu,
        bundle=given.bundle,
        seed=given.seed,
    )


def summary(report: SimulationReport) -> dict[str, float]:
    mean, most = report.staleness
    return {
        "sampling_gpus": report.plan.sampling_gpus,
        "training_gpus": report.plan.gpus - report.plan.sampling_gpus,
        "hours": report.hours,
        "batches": len(report.steps),
        "trained_tokens_per_s": round(report.tokens_per_second),
        "batches_per_hour": round(report.steps_per_hour, 2),
        "trainer_waits": round(report.waiting, 4),
        "publishing": round(report.share("publish"), 4),
        "staleness_mean": round(mean, 3),
        "staleness_max": most,
        "too_late": round(report.stale, 4),
        "rollouts_simulated": int(sum(line["batch/samples"] for line in report.steps)),
        "memory_growth": round(report.growth(), 5),
        "resident_growth": round(report.growth("resident"), 5),
        "wall_seconds": round(report.wall_seconds, 1),
    }


def show(reports: list[SimulationReport], chosen: SimulationReport) -> None:
    table = Table(title=f"{chosen.plan.gpus:,} GPUs, {chosen.plan.parameters / 1e9:g}B parameters")
    for heading in ("sampling", "training", "trained tok/s", "batches/h", "waits", "stale mean / max", "too late", ""):
        table.add_column(heading, justify="right")
    for report in reports:
        mean, most = report.staleness
        table.add_row(
            f"{report.plan.sampling_gpus:,}",
            f"{report.plan.gpus - report.plan.sampling_gpus:,}",
            f"{report.tokens_per_second:,.0f}",
            f"{report.steps_per_hour:.1f}",
            f"{report.waiting:.1%}",
            f"{mean:.1f} / {most:.0f}",
            f"{report.stale:.1%}",
            "best" if report is chosen else "",
        )
    Console(width=110).print(table)


def draw(path: Path, reports: list[SimulationReport], chosen: SimulationReport, long: SimulationReport) -> None:
    """Throughput and waiting by split; staleness and memory over the long run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 5.2), dpi=90, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2)
    gpus = [report.plan.sampling_gpus for report in reports]
    hours = [line["hour"] for line in long.steps]
    panels = (
        ("trained tokens/s, millions", gpus, [report.tokens_per_second / 1e6 for report in reports], "o-"),
        ("trainer waits, % of the time", gpus, [100 * report.waiting for report in reports], "o-"),
        (f"staleness in each batch: mean and most, {long.plan.staleness} allowed", hours, None, "-"),
        ("Python objects in use, millions", hours, [line["blocks"] / 1e6 for line in long.steps], "-"),
    )
    for place, (title, across, up, style) in zip(axes.flat, panels, strict=True):
        if up is not None:
            place.plot(across, up, style, color=BLUE, linewidth=1.6, markersize=4)
        else:
            place.plot(across, [line["staleness/max"] for line in long.steps], color=RED, linewidth=1.2)
            place.plot(across, [line["staleness/mean"] for line in long.steps], color=BLUE, linewidth=1.6)
        if across is gpus:
            place.axvline(chosen.plan.sampling_gpus, color=RED, linewidth=1, linestyle=":")
            place.set_xlabel(f"sampling GPUs of {chosen.plan.gpus:,}", color=INK, fontsize=8)
        else:
            place.set_xlabel("simulated hours", color=INK, fontsize=8)
        place.set_ylim(bottom=0)
        place.set_title(title, loc="left", fontsize=9, fontweight="bold", color=INK)
        place.grid(axis="y", color=FAINT, linewidth=0.8)
        place.set_axisbelow(True)
        place.spines[["top", "right", "left"]].set_visible(False)
        place.spines["bottom"].set_color(FAINT)
        place.tick_params(colors=INK, length=0, labelsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def tell(report: SimulationReport) -> None:
    print(
        f"{report.plan.sampling_gpus:5d} sample, {report.plan.gpus - report.plan.sampling_gpus:5d} train: "
        f"{report.tokens_per_second:12,.0f} trained tok/s, the trainer waits {report.waiting:6.1%} "
        f"({report.hours:g} h in {report.wall_seconds:.1f} s)",
        flush=True,
    )


def main() -> int:
    given = options()
    plan = planned(given)
    gc.freeze()
    if given.sampling_gpus:
        reports = [simulate(plan, given.sweep_hours)]
    else:
        reports = sweep(plan, given.sweep_hours, given.splits, given.closer, tell)
    chosen = best(reports)
    show(reports, chosen)
    long = simulate(chosen.plan, given.hours)
    tell(long)
    draw(given.picture, reports, chosen, long)
    _, most = long.staleness
    growth = 1 + long.growth()
    rows = [
        Row("staleness, most", "versions", most, plan.staleness, "allowed", plan.staleness / max(most, 1), 1.0),
        Row(
            "trainer waits",
            "%",
            100 * long.waiting,
            100 * MAX_WAIT_SHARE,
            "bar",
            MAX_WAIT_SHARE / max(long.waiting, 0.001),
            1.0,
        ),
        Row("memory, last quarter / third", "x", growth, 1 + GROWTH, "bar", (1 + GROWTH) / growth, 1.0),
    ]
    return finish(
        f"{given.hours:g} simulated hours, {long.plan.sampling_gpus:,} of {plan.gpus:,} GPUs sample",
        rows,
        given.json,
        run=summary(long),
        splits=[summary(report) for report in reports],
    )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
