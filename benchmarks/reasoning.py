"""A real chat model learns reasoning-gym tasks: SmolLM2-135M, from a short warm-up to held-out strict reward.

    python benchmarks/reasoning.py MODEL_FOLDER --json FILE

The model answers in sentences, so its strict reward is near zero: a reply counts only if it is the answer and nothing
else. Eight steps of `sft` on 64 training rows each teach that form and little of the task; from there `grpo` learns it.
Bars: from under 0.35 to over 0.75 held-out strict reward, within ten minutes a task, on an H200.
"""

import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from bars import arguments
from engine_gpu import Sheet
from paceline import RunConfig, train

PROMPT = "Reply with the answer alone and nothing else."


@dataclass(frozen=True)
class Task:
    name: str
    args: dict = field(default_factory=dict)
    warm_up: int = 8
    steps: int = 160


TASKS = {
    "chain_sum": Task("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}),
    "needle_haystack": Task("needle_haystack", {"min_num_statements": 3, "max_num_statements": 5}, steps=80),
    "word_sequence_reversal": Task("word_sequence_reversal", {"min_words": 3, "max_words": 3}, steps=60),
}


def run_file(task: Task, policy: str, runs: Path, name: str, steps: int, **more) -> RunConfig:
    env = {
        "type": "reasoning-gym",
        "task": task.name,
        "args": task.args,
        "answer": "text",
        "system_prompt": PROMPT,
        "size": 2000,
        "eval_size": 200,
    }
    run = {
        "name": name,
        "runs": str(runs),
        "steps": steps,
        "batch_size": 256,
        "group_size": 16,
        "staleness": 1,
        "model": {"name": policy, "dtype": "bfloat16"},
        "sampling": {"max_tokens": 24},
        "engine": {"max_running": 512, "max_context": 512, "cache_gib": 8.0, "compile": False},
        "trainer": {"micro_batch_tokens": 16_384, "compile": False, "optimizer": {"lr": 3e-5}},
        "eval": {"every": 20, "concurrency": 200},
        "checkpoint": {"every": 0},
        "env": [env],
    }
    return RunConfig.model_validate(run | more)


def learn(task: Task, model: str, runs: Path, sheet: Sheet, quick: bool) -> list[tuple[int, float]]:
    begin = time.perf_counter()
    sft = {"algo": {"type": "sft", "demonstrations": "answer"}, "group_size": 1, "batch_size": 4 if quick else 64}
    sft |= {"staleness": 0, "eval": {"every": 0}}
    steps = (1, 2) if quick else (task.warm_up, task.steps)
    small = {"batch_size": 8, "group_size": 4, "eval": {"every": 2, "examples": 4}} if quick else {}
    cpu = {"model": {"name": model}} if quick else {}
    warm = train(run_file(task, model, runs, f"{task.name}-warm", steps[0], **sft | cpu), overwrite=True, quiet=True)
    if warm.error or warm.outcome.export is None:
        raise warm.error or RuntimeError(warm.outcome.message)
    begun = str(warm.outcome.export)
    cpu = {"model": {"name": begun}} if quick else {}
    result = train(run_file(task, begun, runs, task.name, steps[1], **small | cpu), overwrite=True, screen=sys.stdout)
    if result.error:
        raise result.error
    key = next(k for line in result.metrics for k in line if k.startswith("eval/") and k.endswith("solved"))
    curve = [(line["step"], line[key]) for line in result.metrics if key in line]
    seconds = time.perf_counter() - begin
    sheet.at_most(f"{task.name}: held-out strict reward after the warm-up", "", curve[0][1], 0.35)
    sheet.at_least(f"{task.name}: held-out strict reward at the end", "", curve[-1][1], 0.75)
    sheet.at_most(f"{task.name}: warm-up and training", "s", seconds, 600)
    for step, solved in curve[1:-1]:
        sheet.note(f"{task.name}: held-out strict reward at step {step}", "", solved)
    shutil.rmtree(runs / task.name / "checkpoints", ignore_errors=True)
    return curve


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("model", help="Hugging Face folder of SmolLM2-135M-Instruct")
    parser.add_argument("--task", choices=TASKS, action="append", help="only these; repeatable")
    parser.add_argument("--runs", type=Path, default=Path("runs/reasoning"))
    parser.add_argument("--quick", action="store_true", help="a step or two, to see that it runs at all")
    given = parser.parse_args()
    sheet = Sheet(given.json, "reasoning-gym on SmolLM2-135M")
    for name in given.task or TASKS:
        learn(TASKS[name], given.model, given.runs, sheet, given.quick)
    return sheet.finish(complete=not given.quick)


if __name__ == "__main__":
    raise SystemExit(main())
