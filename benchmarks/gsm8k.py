r"""GSM8K with a second try, learnt by a small chat model: SmolLM2-135M, real data, held-out exact match.

    python benchmarks/gsm8k.py MODEL_FOLDER DATA_FOLDER --json FILE        two seeds, on a GPU

MODEL_FOLDER is made by scripts/get_smollm2.py; DATA_FOLDER has GSM8K's own `train.jsonl` and `test.jsonl`. The model
cannot do these tasks, so each seed begins with a short supervised warm-up on the training rows; from there `grpo` on
the same rows, with a reward of 1 for a right last try and 0 otherwise. What counts is the share of test rows answered
right, before grpo and after it, with a 95% interval of the difference, paired by row. Settings were chosen on the last
500 training rows (`--tune`, which leaves them out of training), never on test rows.
"""

import sys
import time
import tomllib
from argparse import Namespace
from collections.abc import Mapping
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from bars import arguments
from engine_gpu import Sheet
from paceline import RunConfig, RunResult, train
from paceline.observe.monitor.directory import RunDirectory
from paceline.observe.record.rollouts import Rollouts
from paceline.observe.record.rows import Query

EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "seeds" / "async_rl_loop"
TUNING_ROWS = 500
Z_95 = 1.96
RISE = 0.03
CREDIT = {"gsm8k": {"algo": {"type": "grpo", "std": "none"}}}
"""Chosen with the settings below; the run file divides by the group's standard deviation, as its document does."""
DEFAULTS = {"epochs": 3.0, "warm_lr": 3e-4, "lr": 3e-5, "steps": 200, "batch": 384, "group": 16, "max_tokens": 200}


def run_file(example: str, given: Namespace, **more: Any) -> RunConfig:
    """One of the example's run files with this benchmark's settings."""
    run = tomllib.loads((EXAMPLES / f"{example}.toml").read_text(encoding="utf-8"))
    train_rows, held_out = row_files(given)
    rows = {"dataset": str(train_rows), "eval_dataset": str(held_out), "timeout": 600.0}
    common = {
        "runs": str(given.runs),
        "model": {"dtype": "bfloat16"},
        "sampling": {"max_tokens": given.max_tokens},
        "engine": {"max_running": 512, "max_context": 1024, "cache_gib": 12.0},
        "trainer": {"micro_batch_tokens": 32_768, "compile": False},
        "checkpoint": {"every": 0},
        "eval": {"concurrency": 512, "examples": 4 if given.quick else 10_000},
        "env": [run["env"][0] | rows | CREDIT.get(example, {})],
    }
    return RunConfig.model_validate(merge(merge(run, common), more))


def merge(base: dict, more: dict) -> dict:
    both = {key: merge(base[key], more[key]) for key in base.keys() & more.keys() if isinstance(more[key], dict)}
    return base | more | both


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


def warm_up(given: Namespace, seed: int) -> str:
    """The folder of a model that has seen the training rows' solutions."""
    size = 4 if given.quick else 64
    with row_files(given)[0].open(encoding="utf-8") as lines:
        steps = 2 if given.quick else max(1, int(given.epochs * sum(1 for _ in lines) / size))
    optimizer = {"lr": given.warm_lr, "schedule": "cosine", "warmup_steps": 10}
    config = run_file(
        "gsm8k_warm_up",
        given,
        name=f"gsm8k-warm-up-{seed}",
        seed=seed,
        steps=steps,
        batch_size=size,
        model={"name": given.model},
        eval={"every": 0},
        trainer={"optimizer": optimizer},
    )
    return str(train(config, overwrite=True, quiet=True).outcome.export)


def learn(given: Namespace, model: str, seed: int) -> RunResult:
    small = {"batch_size": 8, "group_size": 4, "filters": {"zero_advantage": False}} if given.quick else {}
    steps = 2 if given.quick else given.steps
    settings = {
        "name": f"gsm8k-{seed}",
        "seed": seed,
        "steps": steps,
        "batch_size": given.batch,
        "group_size": given.group,
        "model": {"name": model},
        "eval": {"every": max(1, steps // 2)},
        "trainer": {"optimizer": {"lr": given.lr, "warmup_steps": 5}, "loss": {"type": "dppo"}},
    }
    return train(run_file("gsm8k", given, **merge(settings, small)), overwrite=True, screen=sys.stdout)


def scores_by_row(run: Path, step: int, name: str) -> dict[int, float]:
    """What each held-out row scored in the evaluation of a step: the mean of its tries, by a metric's name."""
    rollouts = Rollouts(RunDirectory(run))
    found = rollouts.find(Query(state="evaluated", step=(step, step), limit=None)).rows
    scores: dict[int, list[float]] = {}
    for row in found:
        if row.reward is not None:
            scores.setdefault(row.row, []).append(float(rollouts.get(row.index).metrics[name]))
    return {row: fmean(tries) for row, tries in scores.items()}


def paired_interval(before: Mapping[int, float], after: Mapping[int, float]) -> tuple[float, float, float]:
    """The mean difference over rows with its 95% interval."""
    differences = [after[row] - before[row] for row in before.keys() & after.keys()]
    mean, error = fmean(differences), stdev(differences) / sqrt(len(differences))
    return mean, mean - Z_95 * error, mean + Z_95 * error


def report(sheet: Sheet, run: Path, seed: int, steps: int) -> None:
    for name, what in (("correct", "in up to two tries"), ("first", "at the first try")):
        before, after = (scores_by_row(run, step, name) for step in (0, steps))
        rise, low, high = paired_interval(before, after)
        sheet.note(f"seed {seed}: exact match {what}, after the warm-up", "", fmean(before.values()))
        sheet.note(f"seed {seed}: exact match {what}, after grpo", "", fmean(after.values()))
        if name == "correct":
            sheet.at_least(f"seed {seed}: rise {what}", "", rise, RISE, rows=len(before))
            sheet.at_least(f"seed {seed}: lower end of its 95% interval", "", low, 1e-9)
        else:
            sheet.note(f"seed {seed}: rise {what}", "", rise)
            sheet.note(f"seed {seed}: lower end of its 95% interval, {what}", "", low)
        sheet.note(f"seed {seed}: upper end of its 95% interval, {what}", "", high)


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("model", help="Hugging Face folder of SmolLM2-135M-Instruct")
    parser.add_argument("data", type=Path, help="folder with GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--runs", type=Path, default=Path("runs/gsm8k"))
    parser.add_argument("--seed", type=int, action="append", help="seeds to train; repeatable")
    parser.add_argument("--tune", action="store_true", help=f"hold out the last {TUNING_ROWS} training rows instead")
    parser.add_argument("--warm", help="begin from this folder instead of warming up")
    parser.add_argument("--warm-only", action="store_true", help="end after the warm-up")
    parser.add_argument("--quick", action="store_true", help="a step or two, to see that it runs at all")
    for name, default in DEFAULTS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    given = parser.parse_args()
    sheet = Sheet(given.json, "GSM8K on SmolLM2-135M")
    for seed in given.seed or (1, 2):
        begin = time.perf_counter()
        model = given.warm or warm_up(given, seed)
        sheet.note(f"seed {seed}: warm-up", "s", time.perf_counter() - begin)
        if given.warm_only:
            continue
        result = learn(given, model, seed)
        sheet.note(f"seed {seed}: warm-up and training", "s", time.perf_counter() - begin)
        report(sheet, result.directory, seed, result.outcome.step)
    return sheet.finish(complete=not (given.quick or given.warm_only))


if __name__ == "__main__":
    raise SystemExit(main())
