"""What do old samples cost? One task, three losses, samplers that ride 0 to 16 versions ahead; CPU, small scale.

  naive      PPO, clipped around the policy that sampled: the older the sample, the sooner a token stops learning
  decoupled  PPO, clipped around the batch's start, and weighted for the policy that sampled (`trainer.proximal`)
  dppo       the default: dropped by difference of probabilities instead of clipped by ratio

The table of AReaL (arXiv 2505.24298) has this shape. Every run trains on equally many rollouts, and none is dropped for
its age. Bars: at this learning rate naive PPO at 16 loses at least 0.1 of held-out reward against its own synchronous
run; and decoupled or dppo at 4, five seeds, loses at most 0.03 against its own synchronous run. Finished runs are kept
under `runs/staleness`.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev

from rich.console import Console
from rich.table import Table

from bars import arguments, machine
from curves import draw
from paceline.observe.monitor import read_jsonl
from trials import ROOT, evaluations, metrics, train

FILE = "examples/learn/staleness.toml"
STALENESS = (0, 1, 2, 4, 8, 16)
LOSSES = {
    "naive": ("--trainer.loss.type", "ppo", "--trainer.proximal", "false"),
    "decoupled": ("--trainer.loss.type", "ppo", "--trainer.proximal.cap", "5.0"),
    "dppo": ("--trainer.loss.type", "dppo", "--trainer.proximal", "false"),
}
COMPARED = (0, 4)
ALL_CELLS = 3
"""Seeds of every cell; seeds beyond it are for the comparison alone."""
T95 = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Student's t, two-sided 95%, by degrees of freedom."""


@dataclass(frozen=True)
class Result:
    loss: str
    staleness: int
    seed: int
    reward: float
    """Held out, at the end."""
    seconds: float
    """Of the training steps, without evaluation."""
    measured: float
    """Mean staleness of what trained, over the run's second half."""
    dropped: float
    rollouts: float

    @property
    def key(self) -> tuple[str, int, int]:
        return self.loss, self.staleness, self.seed


def trial(loss: str, staleness: int, seed: int, runs: Path) -> Result:
    overrides = ("--staleness", str(staleness), *LOSSES[loss])
    run = train(FILE, runs / f"{loss}-{staleness}-{seed}", seed, overrides)
    steps = [line for line in metrics(run) if "staleness/mean" in line]
    return Result(
        loss,
        staleness,
        seed,
        reward=evaluations(run)[-1]["eval/reverse-text/reward"],
        seconds=sum(line["time/step"] for line in steps),
        measured=fmean(line["staleness/mean"] for line in steps[len(steps) // 2 :]),
        dropped=sum(line["dropped/stale"] + line["dropped/stale_samples"] for line in steps),
        rollouts=sum(line["batch/rollouts"] for line in steps),
    )


def wanted(losses: Sequence[str], seeds: int) -> list[tuple[str, int, int]]:
    """Seed by seed, so that a whole table is there early."""
    return [
        (loss, staleness, seed)
        for seed in range(seeds)
        for staleness in STALENESS
        for loss in losses
        if seed < ALL_CELLS or (staleness in COMPARED and loss != "naive")
    ]


def of(results: Sequence[Result], loss: str, staleness: int) -> list[Result]:
    return [each for each in results if (each.loss, each.staleness) == (loss, staleness)]


def loss_of(results: Sequence[Result], loss: str, staleness: int) -> tuple[float, float]:
    """Mean reward at a staleness less that at 0, and half the width of its 95% interval, paired by seed: equal seeds
    read the same rows in the same order."""
    then = {each.seed: each.reward for each in of(results, loss, 0)}
    pairs = [each.reward - then[each.seed] for each in of(results, loss, staleness) if each.seed in then]
    half = T95[len(pairs) - 1] * stdev(pairs) / len(pairs) ** 0.5 if 1 < len(pairs) <= 10 else float("nan")
    return fmean(pairs), half


def show(results: Sequence[Result], losses: Sequence[str]) -> None:
    table = Table(title="final held-out reward (seconds of training, mean staleness measured)")
    table.add_column("staleness")
    for loss in losses:
        table.add_column(loss)
    for staleness in STALENESS:
        cells = []
        for loss in losses:
            here = of(results, loss, staleness)
            means = [fmean(getattr(each, name) for each in here) for name in ("reward", "seconds", "measured") if here]
            cells.append("{:.3f} ({:.0f} s, {:.1f})".format(*means) if here else "")
        table.add_row(str(staleness), *cells)
    Console(width=140).print(table)


def judge(results: Sequence[Result], losses: Sequence[str]) -> dict[str, object]:
    """The bars, of what has been run."""
    verdict: dict[str, object] = {"equal rollouts, no drops": _fair(results)}
    print(f"equal rollouts and none dropped: {'yes' if _fair(results) else 'NO'}")
    if of(results, "naive", 16):
        lost = -loss_of(results, "naive", 16)[0]
        verdict["naive loses at 16"] = lost
        print(f"naive at 16 loses {lost:.3f} (bar: at least 0.1)")
    compared = {loss: loss_of(results, loss, 4) for loss in losses if loss != "naive" and of(results, loss, 4)}
    for loss, (difference, half) in compared.items():
        seeds = len(of(results, loss, 4))
        print(f"{loss} at 4 against 0: {difference:+.3f}, 95% [{difference - half:+.3f}, {difference + half:+.3f}], ")
        print(f"  {seeds} seeds (bar: at least -0.03, by one of them)")
        verdict[f"{loss} at 4"] = {"difference": difference, "half width": half, "seeds": seeds}
    enough = any(difference >= -0.03 for difference, _ in compared.values())
    lost = verdict.get("naive loses at 16")
    verdict["cleared"] = _fair(results) and enough and isinstance(lost, float) and lost >= 0.1
    return verdict


def _fair(results: Sequence[Result]) -> bool:
    return len({each.rollouts for each in results}) == 1 and not any(each.dropped for each in results)


def picture(results: Sequence[Result], losses: Sequence[str]) -> None:
    series = {}
    for loss in losses:
        here = [each for each in results if each.loss == loss and each.seed < ALL_CELLS]
        seeds = sorted({each.seed for each in here})
        series[loss] = [{each.staleness: each.reward for each in here if each.seed == seed} for seed in seeds]
    path = ROOT / "docs" / "curves" / "staleness.png"
    across = "staleness: versions the sampler may be ahead"
    draw(path, "the price of old samples", series, across=across, places=STALENESS, low=0.2)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "staleness", help="where runs are kept")
    parser.add_argument("--seeds", type=int, default=5, help="of the comparison; other cells have at most three")
    parser.add_argument("--only", action="append", choices=LOSSES, help="only this loss")
    known = parser.parse_args()
    losses = [loss for loss in LOSSES if loss in (known.only or LOSSES)]
    book = known.runs / "rows.jsonl"
    results = {each.key: each for each in (Result(**row) for row in (read_jsonl(book) if book.exists() else []))}
    chosen = wanted(losses, known.seeds)
    for key in chosen:
        if key not in results:
            print(f"--- {key[0]}, staleness {key[1]}, seed {key[2]} ({time.strftime('%H:%M:%S')})", flush=True)
            results[key] = trial(*key, known.runs)
            with book.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(results[key])) + "\n")
    found = [results[key] for key in chosen]
    show(found, losses)
    verdict = judge(found, losses)
    picture(found, losses)
    result = {"title": "staleness", **verdict, "rows": [asdict(each) for each in found], **machine()}
    if known.json is not None:
        known.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result))
    return 0 if verdict["cleared"] else 1


if __name__ == "__main__":
    sys.exit(main())
