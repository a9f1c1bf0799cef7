r"""GSM8K with a second try, learnt by a small chat model: SmolLM2-135M, real data, held-out exact match.

    python benchmarks/gsm8k.py MODEL DATA --json FILE                      two seeds, on a GPU
    python benchmarks/gsm8k.py MODEL DATA --seed 1 --json one.json         one seed in each of two calls, and then
    python benchmarks/gsm8k.py MODEL DATA --seed 2 --json two.json
    python benchmarks/gsm8k.py --add one.json --add two.json --json FILE   both in one file and one picture

MODEL is a folder made by scripts/get_smollm2.py; DATA has GSM8K's own `train.jsonl` and `test.jsonl`. The model cannot
do these tasks, so each seed begins with a short supervised warm-up on the training rows; from there `grpo` on the same
rows, with a reward of 1 for a right last try and 0 otherwise. Both are run files of examples/seeds/async_rl_loop with
the flags that are printed. What counts is the share of test rows answered right, before grpo and after it, with a 95%
interval of the difference, paired by row. Settings were chosen on the last 500 training rows (`--tune`, which leaves
them out of training), never on test rows.

A call that is cut short is typed again: what is finished is read from --runs, what is not goes on from its newest
checkpoint. Delete a run's folder there to have it again, with other settings for instance. The curve is drawn beside
--json.
"""

import importlib.util
import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Mapping, Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from bars import arguments, machine
from curves import draw
from engine_gpu import Sheet
from paceline.observe.monitor.directory import RunDirectory
from paceline.observe.record.rollouts import Rollouts
from paceline.observe.record.rows import Query
from trials import evaluations, finished, metrics, seconds, train

EXAMPLES = "examples/seeds/async_rl_loop"
TITLE = "GSM8K on SmolLM2-135M"
SEEDS = (1, 2)
TUNING_ROWS = 500
Z_95 = 1.96
RISE = 0.03
RIGHT = {"in up to two tries": "12", "at the first try": "1"}
"""What is counted, and the marks of the rows that count: how many tries the answer took."""
WRONG, UNPLAYED = ".", "?"
COMMON = {"model.dtype": "bfloat16", "env.0.timeout": 600, "eval.concurrency": 512, "trainer.compile": False}
COMMON |= {"engine.max_running": 512, "engine.max_context": 1024, "engine.cache_gib": 12.0}
COMMON |= {"trainer.micro_batch_tokens": 32_768}
# Chosen with the settings below. The run file divides by the group's standard deviation, and clips, as its document.
GRPO = {"env.0.algo.std": "none", "trainer.loss.type": "dppo", "trainer.optimizer.warmup_steps": 5}
QUICK = {"engine.max_running": 16, "engine.cache_gib": 0.5, "sampling.max_tokens": 24, "filters.zero_advantage": False}
QUICK |= {} if torch.cuda.is_available() else {"model.dtype": "float32"}  # bfloat16 is slow on a CPU
SETTINGS = {
    "epochs": (3.0, "passes of the warm-up over the training rows"),
    "warm_lr": (3e-4, "learning rate of the warm-up"),
    "lr": (3e-5, "learning rate of grpo"),
    "steps": (200, "batches of grpo"),
    "every": (50, "batches from one evaluation, and one checkpoint, to the next"),
    "batch": (384, "rollouts in a batch of grpo"),
    "group": (16, "rollouts of a row"),
    "max_tokens": (200, "longest reply"),
}


def run(example: str, given: Namespace, name: str, seed: int, flags: Mapping[str, Any]) -> Path:
    """The folder of a run of an example, trained to its end."""
    train_rows, held_out = row_files(given)
    rows = {"env.0.dataset": train_rows.resolve(), "env.0.eval_dataset": held_out.resolve()}
    every = {"sampling.max_tokens": given.max_tokens, "eval.examples": 4 if given.quick else 10_000}
    folder = given.runs.resolve() / f"{name}-{seed}"
    settings = COMMON | rows | every | flags | (QUICK if given.quick else {})
    spelled = [word for key, value in settings.items() for word in (f"--{key}", _spell(value))]
    if finished(folder):
        print(f"{folder.name}: finished in an earlier call", flush=True)
    else:
        print(f"paceline train {EXAMPLES}/{example}.toml --name {folder.name} --seed {seed}", *spelled, flush=True)
    return train(f"{EXAMPLES}/{example}.toml", folder, seed, spelled)


def _spell(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def row_files(given: Namespace) -> tuple[Path, Path]:
    """Training rows and held-out rows; with `--tune` both from the training rows."""
    if not given.tune:
        return given.data / "train.jsonl", given.data / "test.jsonl"
    files = given.runs / "rows" / "train.jsonl", given.runs / "rows" / "held_out.jsonl"
    lines = (given.data / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    files[0].parent.mkdir(parents=True, exist_ok=True)
    for file, part in zip(files, (lines[:-TUNING_ROWS], lines[-TUNING_ROWS:]), strict=True):
        file.write_text("".join(part), encoding="utf-8")
    return files


def warm_up(given: Namespace, seed: int) -> Path:
    """The run of a model that has seen the training rows' solutions."""
    size = 4 if given.quick else 64
    with row_files(given)[0].open(encoding="utf-8") as lines:
        steps = 2 if given.quick else max(1, int(given.epochs * sum(1 for _ in lines) / size))
    flags = {"model.name": given.model.resolve(), "steps": steps, "batch_size": size, "eval.every": 0}
    flags |= {"engine.compile": False}  # nothing is sampled
    flags |= {"trainer.optimizer.lr": given.warm_lr, "trainer.optimizer.schedule": "cosine"}
    return run("gsm8k_warm_up", given, "warm-up", seed, flags | {"trainer.optimizer.warmup_steps": 10})


def learn(given: Namespace, model: Path, seed: int) -> Path:
    """The run of grpo that begins with this model."""
    small = {"steps": 2, "batch_size": 8, "group_size": 4, "eval.every": 1, "checkpoint.every": 1}
    flags = {"steps": given.steps, "batch_size": given.batch, "group_size": given.group}
    flags |= {"eval.every": given.every, "checkpoint.every": given.every} | (small if given.quick else {})
    flags |= {"model.name": model.resolve(), "trainer.optimizer.lr": given.lr}
    return run("gsm8k", given, "grpo", seed, GRPO | flags)


def marks(directory: Path, step: int) -> str:
    """A letter for each held-out row: the tries that its right answer took, or what is known of it besides."""
    rollouts = Rollouts(RunDirectory(directory))
    found = rollouts.find(Query(state="evaluated", step=(step, step), limit=None, sort="time")).rows
    played = {}
    for row in found:
        if row.reward is not None:
            values = rollouts.get(row.index).metrics
            played[row.row] = str(int(values["tries"])) if values["correct"] else WRONG
    return "".join(played.get(number, UNPLAYED) for number in range(1 + max(played, default=-1)))


def record(given: Namespace, warm: Path | None, learnt: Path) -> dict[str, Any]:
    """All that is kept of a seed."""
    trained = [line for line in metrics(learnt) if "optimizer_steps" in line]
    reward = next(key for key in trained[-1] if key.startswith("reward/") and key.endswith("/mean"))
    return {
        "settings": {key: getattr(given, key) for key in (*SETTINGS, "quick", "tune")},
        "warm_up_seconds": seconds(warm) if warm else 0.0,
        "grpo_seconds": seconds(learnt),
        "evaluations": {str(line["step"]): marks(learnt, line["step"]) for line in evaluations(learnt)},
        "rewards": [round(line[reward], 4) for line in trained],
        "staleness_max": max(line.get("staleness/max", 0.0) for line in trained),
        "wait_time_ratio": fmean(line.get("wait_time_ratio", 0.0) for line in trained),
        "math_verify": importlib.util.find_spec("math_verify") is not None,
    } | machine()


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """A mean over rows with its 95% interval."""
    error = stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0
    return fmean(values), fmean(values) - Z_95 * error, fmean(values) + Z_95 * error


def scores(evaluations: Iterable[str], right: str) -> dict[int, float]:
    """The share of seeds that answered a row, for each row that all of them played."""
    rows = enumerate(zip(*evaluations, strict=True))
    return {row: fmean(mark in right for mark in each) for row, each in rows if UNPLAYED not in each}


def paired(before: Mapping[int, float], after: Mapping[int, float]) -> list[float]:
    return [after[row] - before[row] for row in sorted(before.keys() & after.keys())]


def report(sheet: Sheet, seeds: Mapping[str, dict], quick: bool) -> None:
    """One seed after the other, and their mean."""
    for name, seed in seeds.items():
        sheet.note(f"seed {name}: warm-up", "s", seed["warm_up_seconds"])
        sheet.note(f"seed {name}: grpo and its evaluations", "s", seed["grpo_seconds"])
        tenth = max(1, len(seed["rewards"]) // 10)
        sheet.note(f"seed {name}: reward in training, first tenth", "", fmean(seed["rewards"][:tenth]))
        sheet.note(f"seed {name}: reward in training, last tenth", "", fmean(seed["rewards"][-tenth:]))
        sheet.at_most(f"seed {name}: versions behind, at most", "", seed["staleness_max"], 1)
        sheet.note(f"seed {name}: share of a step spent waiting", "", seed["wait_time_ratio"])
    groups = {f"seed {name}": [seed] for name, seed in seeds.items()}
    if len(seeds) > 1:
        groups[f"mean of {len(seeds)} seeds"] = list(seeds.values())
    for who, members in groups.items():
        for what, right in RIGHT.items():
            ends = [[list(seed["evaluations"].values())[at] for seed in members] for at in (0, -1)]
            before, after = (scores(end, right) for end in ends)
            rise, low, high = interval(paired(before, after))
            sheet.note(f"{who}: exact match {what}, after the warm-up", "", fmean(before.values()))
            sheet.note(f"{who}: exact match {what}, after grpo", "", fmean(after.values()))
            bar = right != "1" and not quick
            for line, value, least in (("rise", rise, RISE), ("lower end of its 95% interval", low, 1e-9)):
                if bar:
                    sheet.at_least(f"{who}: {line} {what}", "", value, least, rows=len(before))
                else:
                    sheet.note(f"{who}: {line} {what}", "", value)
            sheet.note(f"{who}: upper end of its 95% interval {what}", "", high)


def picture(file: Path, seeds: Mapping[str, dict]) -> None:
    """Held-out exact match against steps: the mean of the seeds with its interval over rows, and thin each seed."""
    series, bands = {}, {}
    for what, right in RIGHT.items():
        each = [{int(step): scores([e], right) for step, e in seed["evaluations"].items()} for seed in seeds.values()]
        series[what] = [{step: fmean(rows.values()) for step, rows in curve.items()} for curve in each]
        shared = [step for step in seeds[next(iter(seeds))]["evaluations"] if all(int(step) in c for c in each)]
        together = {int(s): scores([seed["evaluations"][s] for seed in seeds.values()], right) for s in shared}
        bands[what] = {step: interval(list(rows.values()))[1:] for step, rows in together.items()}
    top = max(high for band in bands.values() for _, high in band.values())
    draw(file, TITLE, series, up="held-out exact match", bands=bands, high=min(1.0, max(0.05, 1.15 * top)))


def finish(given: Namespace, seeds: Mapping[str, dict]) -> int:
    """The table, the file, the picture, and the exit code."""
    sheet = Sheet(title=TITLE)
    report(sheet, seeds, given.quick)
    whole = not any(seed["settings"][key] for seed in seeds.values() for key in ("quick", "tune"))
    result = sheet.write(complete=whole)
    (first, *_) = seeds.values()
    result |= {key: first[key] for key in ("machine", "cores", "torch", "python", "date", "commit")}
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(result | {"seeds": seeds}, indent=2) + "\n", encoding="utf-8")
        if importlib.util.find_spec("matplotlib") is None:
            print(f"no picture, for matplotlib is not installed: --add {given.json} draws it where it is")
        else:
            picture(given.json.with_suffix(".png"), seeds)
            print(f"wrote {given.json} and {given.json.with_suffix('.png')}")
    print(json.dumps(result))
    return 0 if result["cleared"] or not whole else 1


def parser() -> ArgumentParser:
    made = arguments(__doc__ or "")
    made.add_argument("model", type=Path, nargs="?", help="Hugging Face folder of SmolLM2-135M-Instruct")
    made.add_argument("data", type=Path, nargs="?", help="folder with GSM8K's train.jsonl and test.jsonl")
    made.add_argument("--runs", type=Path, default=Path("runs/gsm8k"), help="folder of the runs (%(default)s)")
    made.add_argument("--seed", type=int, action="append", help="train this seed; repeatable (1 and 2)")
    made.add_argument("--add", type=Path, action="append", default=[], help="take the seeds of this result too")
    made.add_argument("--tune", action="store_true", help=f"hold out the last {TUNING_ROWS} training rows instead")
    made.add_argument("--warm", type=Path, help="begin from this folder instead of warming up")
    made.add_argument("--warm-only", action="store_true", help="end after the warm-up")
    made.add_argument("--quick", action="store_true", help="a step or two, to see that it runs at all")
    for name, (default, what) in SETTINGS.items():
        flag = f"--{name.replace('_', '-')}"
        made.add_argument(flag, type=type(default), default=default, help=f"{what} (%(default)s)")
    return made


def check(given: Namespace, made: ArgumentParser) -> None:
    """Before anything is trained."""
    if not given.data and (given.model or not given.add):
        made.error("MODEL and DATA are missing: without them only results are combined, with --add")
    needed = [given.model / "config.json", given.data / "train.jsonl", given.data / "test.jsonl"] if given.data else []
    needed += [given.warm / "config.json"] if given.warm else []
    for file in (*needed, *given.add):
        if not file.is_file():
            made.error(f"{file} does not exist")


def main() -> int:
    made = parser()
    given = made.parse_args()
    check(given, made)
    seeds: dict[str, dict] = {}
    for file in given.add:
        earlier = json.loads(file.read_text(encoding="utf-8"))
        if "seeds" not in earlier:
            made.error(f"{file} is no result of this benchmark: it has no seeds")
        seeds |= earlier["seeds"]
    for seed in (given.seed or SEEDS) if given.data else ():
        warm = None if given.warm else warm_up(given, seed)
        if not given.warm_only:
            learnt = learn(given, given.warm or warm / "export", seed)
            seeds[str(seed)] = record(given, warm, learnt)
    return finish(given, dict(sorted(seeds.items()))) if seeds else 0


if __name__ == "__main__":
    raise SystemExit(main())
