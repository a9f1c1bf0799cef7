"""What K optimizer steps a batch and a sampler S versions ahead look like: GSM8K with a second try, a small chat model.

    python benchmarks/minibatches.py MODEL_FOLDER GSM8K_FOLDER --json FILE

A short warm-up on worked solutions, since the model must solve a problem now and then to learn anything from reward.
From there two runs that differ in nothing but K and S:

  K=1, S=1   the policy is where the batch began when it is stepped: ppo_kl is 0 but for rounding
  K=2, S=2   its second step sees the first: ppo_kl and clip_fraction above 0; the trainer waits no longer than before

`ppo_kl` is the distance from the policy at the batch's start; at K=2 `clip_fraction` is measured from there too.
"""

import json
import re
import sys
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).parent))

from bars import arguments
from engine_gpu import Sheet
from paceline import RunConfig, train

STEPS, CADENCE = 12, 4
NOTE = re.compile(r"<<.*?>>")
"""The dataset's marks for a calculator."""


def rows_file(folder: Path, target: Path, count: int) -> Path:
    """GSM8K's own rows, with the worked solution in the form the environment asks for."""
    lines = []
    for line in (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()[:count]:
        row = json.loads(line)
        steps, _, answer = row["answer"].rpartition("####")
        lines.append(json.dumps(row | {"solution": f"{NOTE.sub('', steps)}\\boxed{{{answer.strip()}}}"}))
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return target


def run_file(name: str, policy: str, rows: Path, runs: Path, quick: bool, **changes) -> RunConfig:
    run = {
        "name": name,
        "runs": str(runs),
        "steps": STEPS,
        "batch_size": 128,
        "group_size": 8,
        "model": {"name": policy, "dtype": "bfloat16"},
        "sampling": {"max_tokens": 192},
        "engine": {"max_running": 512, "max_context": 1024, "cache_gib": 16.0, "compile": False},
        "trainer": {"micro_batch_tokens": 16_384, "compile": False},
        "checkpoint": {"every": CADENCE, "keep": STEPS},
        "eval": {"every": 0},
        "env": [{"type": "gsm8k", "dataset": str(rows)}],
    }
    if quick:
        run |= {"steps": 4, "batch_size": 8, "group_size": 4, "checkpoint": {"every": 2, "keep": STEPS}}
        run |= {"sampling": {"max_tokens": 24}, "filters": {"zero_advantage": False}, "engine": {}}
        run |= {"trainer": {"micro_batch_tokens": 2048}, "model": {"name": policy}}
    changes["trainer"] = run["trainer"] | changes.get("trainer", {})
    return RunConfig.model_validate(run | changes)


def warmed_up(model: str, rows: Path, runs: Path, quick: bool) -> str:
    """The model after some worked solutions."""
    changes = {
        "steps": 1 if quick else 60,
        "batch_size": 2 if quick else 64,
        "group_size": 1,
        "staleness": 0,
        "checkpoint": {"every": 0},
        "algo": {"type": "sft", "demonstrations": "solution"},
        "trainer": {"optimizer": {"lr": 5e-5}},
    }
    result = train(run_file("warm", model, rows, runs, quick, **changes), overwrite=True, screen=sys.stdout)
    if result.error or result.outcome.export is None:
        raise result.error or RuntimeError(result.outcome.message)
    return str(result.outcome.export)


def trial(policy: str, rows: Path, runs: Path, quick: bool, k: int, s: int) -> tuple[list[dict], list[str]]:
    """Lines of a run's metrics, and the names of its checkpoints."""
    trainer = {"minibatches": k, "loss": {"type": "ppo"}, "optimizer": {"lr": 2e-5}}
    name = f"k{k}-s{s}"
    config = run_file(name, policy, rows, runs, quick, staleness=s, trainer=trainer)
    result = train(config, overwrite=True, screen=sys.stdout)
    if result.error:
        raise result.error
    saved = sorted(path.name for path in (runs / name / "checkpoints").glob("step-*"))
    return [line for line in result.metrics if "staleness/max" in line], saved


def judge(sheet: Sheet, ones: tuple[list[dict], list[str]], twos: tuple[list[dict], list[str]]) -> None:
    for (lines, _), k, s in ((ones, 1, 1), (twos, 2, 2)):
        name, late = f"K={k}, S={s}", lines[2:]
        kl = fmean(line["ppo_kl"] for line in late)
        clipped = fmean(line["clip_fraction"] for line in late)
        if k == 1:
            sheet.at_most(f"{name}: ppo_kl", "", abs(kl), 1e-4)
            sheet.note(f"{name}: clip_fraction", "", clipped)
        else:
            sheet.at_least(f"{name}: ppo_kl", "", kl, 1e-6)
            sheet.at_least(f"{name}: clip_fraction", "", clipped, 1e-6)
        sheet.at_most(f"{name}: oldest sample trained", "versions", max(line["staleness/max"] for line in lines), s)
        steps = lines[-1]["optimizer_steps"] / len(lines)
        sheet.at_least(f"{name}: optimizer steps a batch", "", steps, k)
        sheet.at_most(f"{name}: optimizer steps a batch", "", steps, k)
        reward = next(key for key in lines[0] if key.startswith("reward/") and key.endswith("/mean"))
        sheet.note(f"{name}: mean reward", "", fmean(line[reward] for line in lines))
        sheet.note(f"{name}: turns", "", fmean(line["turns"] for line in lines))
        sheet.note(f"{name}: seconds a step", "s", fmean(line["time/step"] for line in late))
    before, after = (fmean(line["wait_time_ratio"] for line in lines[2:]) for lines, _ in (ones, twos))
    sheet.note("K=1, S=1: share of time the trainer waits", "", before)
    sheet.at_most("K=2, S=2: share of time the trainer waits, in whole percents", "", round(after, 2), round(before, 2))
    sheet.at_least("checkpoints at the same steps", "", float(ones[1] == twos[1] and len(ones[1]) > 1), 1)


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("model", help="Hugging Face folder of a small chat model, such as SmolLM2-135M-Instruct")
    parser.add_argument("data", type=Path, help="folder with GSM8K's train.jsonl")
    parser.add_argument("--runs", type=Path, default=Path("runs/minibatches"))
    parser.add_argument("--quick", action="store_true", help="tiny batches, to see that it runs at all")
    given = parser.parse_args()
    sheet = Sheet(given.json, "GSM8K, K optimizer steps a batch, S versions ahead")
    rows = rows_file(given.data, given.runs / "rows.jsonl", 64 if given.quick else 4000)
    policy = warmed_up(given.model, rows, given.runs, given.quick)
    ones, twos = (trial(policy, rows, given.runs, given.quick, k, k) for k in (1, 2))
    judge(sheet, ones, twos)
    return sheet.finish(complete=not given.quick)


if __name__ == "__main__":
    raise SystemExit(main())
