"""Does advice name the cause? Small runs with a planted defect, and healthy ones, each trained for real on this CPU.

A defect is found where the first advisory names its cause. Bars: 23 of 25 causes named first, and no more than one
false alarm in 40 healthy runs (a smaller table is held to the same shares). Rules were tuned on seeds 1 and 2; the
seeds reported here are others. Runs are kept under `runs/advice` and not trained again.
"""

import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import inf
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from bars import arguments, machine
from paceline.envs.words import words
from paceline.model.source import resolve
from paceline.observe.analysis.health import run_health
from paceline.observe.record import open_run
from paceline.observe.record.advice import Advisory, advice_window, advise

ROOT = Path(__file__).parents[1]
ENV = Path(__file__).with_name("advice_env.py")
FIRST_SEED = 11
SECONDS = 300.0
"""After which a run is stopped as Ctrl-C would: one without a signal draws on."""
BAR, FALSE_ALARMS = 23 / 25, 1 / 40


def plain(word: str) -> dict[str, Any]:
    return {"prompt": f"reverse: {word}", "answer": word[::-1]}


Rows = Callable[[int], list[dict[str, Any]]]


def rows(of: Callable[[str], dict[str, Any]] = plain, count: int = 256, distinct: int = 256) -> Rows:
    """Rows for a seed; fewer `distinct` ones are repeated."""

    def build(seed: int) -> list[dict[str, Any]]:
        found = [of(word) for word in words("train", distinct, seed)]
        return [found[index % distinct] for index in range(count)]

    return build


class Trial(NamedTuple):
    """A run file of the examples, or an environment of `advice_env`, with what spoils it."""

    name: str
    cause: tuple[str, ...] = ()
    """Advisories that name it; none for a healthy run."""
    file: str = "quickstart.toml"
    overrides: str = ""
    env: str = ""
    """Lines of the section [[env]], in place of the file's."""
    rows: Rows = rows()
    held_out: Rows | None = None
    """Rows to evaluate on, every second step."""
    model: Callable[[Path], None] | None = None
    """Spoils a copy of the model."""
    teacher: float = 0.0
    """Steps of the run for which the model of the first healthy run is served as its teacher."""


def forget_the_stop(folder: Path) -> None:
    """Another token ends a reply, one that the model never says: a checkpoint whose `eos_token` was changed."""
    table = json.loads((folder / "tokenizer.json").read_text())
    unknown = next(token["id"] for token in table["added_tokens"] if token["content"] == "<|unk|>")
    changes = {"config": {"eos_token_id": unknown}, "generation_config": {"eos_token_id": unknown}}
    for name, change in (changes | {"tokenizer_config": {"eos_token": "<|unk|>"}}).items():
        file = folder / f"{name}.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | change))


CHATML = """{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content }}\
{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
NO_CONTENT = """{% for message in messages %}{{ '<|' + message.role + '|>' + (message.text or '') + '<|end|>' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


def with_template(template: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "chat_template.jinja").write_text(template) and None


def by_chance(word: str) -> dict[str, Any]:
    """A row whose answer is one of three by no rule, so that it can only be learnt by heart."""
    answer = random.Random(word).choice((word, word[::-1], "".join(sorted(word))))
    return {"prompt": f"reverse: {word}", "answer": answer}


def unknowable(word: str) -> dict[str, Any]:
    return plain(word) | {"answer": word.translate(str.maketrans("abcdefghij", "0123456789"))}


def capital(word: str) -> dict[str, Any]:
    return plain(word) | {"answer": word[::-1].upper()}


def with_dot(word: str) -> dict[str, Any]:
    return plain(word) | {"answer": f" {word[::-1]}. "}


def reward(function: str, more: str = "") -> str:
    return f'type = "reward"\nname = "words"\nimport_path = "{ENV}:{function}"\ndataset = "ROWS"\n{more}'


def episode(function: str, more: str = "") -> str:
    return reward(function, more).replace('"reward"', '"custom"')


HIGH, LOW = ("learning_rate_high",), ("learning_rate_low",)
BREAKER = "--breaker.consecutive 100000 --breaker.window 100000"
TEACHER = "--env.0.algo.teacher.base_url TEACHER"
UNFILTERED = "--filters.zero_advantage false"
DEFECTS = (
    Trial("lr x100", HIGH, overrides="--trainer.optimizer.lr 2e-2"),
    Trial("lr x30, two turns", HIGH, "learn/alphabet_sort.toml", "--trainer.optimizer.lr 1e-2 --steps 30"),
    Trial("lr x100, own reward", HIGH, overrides="--trainer.optimizer.lr 2e-2", env=reward("GRADED")),
    Trial("lr x200, staleness 0", HIGH, overrides="--trainer.optimizer.lr 4e-2 --staleness 0"),
    Trial("lr / 100,000", LOW, overrides="--trainer.optimizer.lr 2e-9"),
    Trial("lr / 10,000, two turns", LOW, "learn/alphabet_sort.toml", "--trainer.optimizer.lr 3e-8 --steps 30"),
    Trial("lr 0", LOW, overrides="--trainer.optimizer.lr 0"),
    Trial("reward always 0", ("strict_grader",), env=reward("never")),
    Trial("reward always 1", ("constant_reward",), env=reward("always")),
    Trial("no reward filter, always 0", ("strict_grader",), overrides=UNFILTERED, env=reward("never")),
    Trial("max_tokens 3", ("truncation",), overrides="--sampling.max_tokens 3"),
    Trial("max_tokens 4, own reward", ("truncation",), overrides="--sampling.max_tokens 4", env=reward("exact")),
    Trial("stop token unknown", ("stop_token",), model=forget_the_stop),
    Trial(
        "answer in the prompt", ("leaked_answer",), env=reward("GRADED"),
        rows=rows(lambda word: plain(word) | {"prompt": f"reverse: {word}\nanswer: {word[::-1]}"}),
    ),
    Trial(
        "solution in the prompt", ("leaked_answer",), env=reward("exact"),
        rows=rows(lambda word: plain(word) | {"prompt": f"solution: {word[::-1]}\nreverse: {word}"}),
    ),
    Trial("8 rows, 32 times each", ("duplicate_rows",), env=reward("GRADED"), rows=rows(distinct=8)),
    Trial("40 rows, six times each", ("duplicate_rows",), env=reward("GRADED"), rows=rows(count=240, distinct=40)),
    Trial("staleness 16", ("stale_weights",), overrides="--staleness 16 --on_stale keep --trainer.optimizer.lr 6e-4"),
    Trial("grader fails", ("failures",), overrides=BREAKER, env=reward("fails")),
    Trial(
        "environment sleeps", ("slow_environment",), overrides="--max_inflight 32 --batch_size 32 --steps 12",
        env=episode("slow"),
    ),
    Trial(
        "episodes time out", ("failures",), overrides=BREAKER,
        env=episode("slow", "timeout = 0.5"),
    ),
    Trial(
        "form alone pays", ("format", "reward_hacking"),
        env=reward("FORM", "reward_weights = { format = 1.0, exact = 0.0 }"),
    ),
    Trial("a proxy pays", ("reward_hacking",), env=reward("PROXY", "reward_weights = { in_order = 1.0, exact = 0.0 }")),
    Trial("judges by chance", ("judges",), env=reward("JUDGES")),
    Trial("hopeless task", ("flat_groups",), overrides="--steps 12", env=reward("rarely"), rows=rows(unknowable)),
    Trial("mastered task", ("dropped_groups",), file="", overrides="--model.name MASTER --steps 45"),
    Trial("history rewritten", ("chat_template",), env=episode("rewrites")),
    Trial("template of another model", ("chat_template",), model=with_template(CHATML)),
    Trial("template without content", ("chat_template",), env=reward("GRADED"), model=with_template(NO_CONTENT)),
    Trial("grader minds case", ("strict_grader",), env=reward("GRADED"), rows=rows(capital)),
    Trial("grader minds white space", ("strict_grader",), env=reward("exact"), rows=rows(with_dot)),
    Trial("teacher dies", ("unreachable",), "algorithms/opd.toml", f"--steps 60 {BREAKER} {TEACHER}", teacher=8.0),
    Trial(
        "learnt by heart", ("overfitting",), overrides="--trainer.optimizer.lr 5e-4 --steps 80",
        env=reward("GRADED"), rows=rows(by_chance, 16, 16), held_out=rows(by_chance, 64, 64),
    ),
    Trial(
        "taught by its own top_p samples", ("entropy",), overrides="--trainer.optimizer.lr 4e-4 --steps 160 "
        "--sampling.top_p 0.4 --allow_truncated_sampling true",
        env=reward("chance", 'algo.type = "constant"'),
    ),
    Trial("entropy is paid", ("entropy_high",), overrides="--trainer.entropy_coef 0.3"),
    Trial(
        "length pays", ("reward_hacking", "length"), overrides="--steps 60 --sampling.temperature 1.3",
        env=reward("LONG", "reward_weights = { long = 1.0, exact = 0.0 }"),
    ),
    Trial("temperature 0.01", ("flat_groups", "dropped_groups"), overrides="--sampling.temperature 0.01"),
    Trial("lr 0, staleness 0", LOW, overrides="--trainer.optimizer.lr 0 --staleness 0"),
    Trial("lr / 100,000, staleness 0", LOW, overrides="--trainer.optimizer.lr 2e-9 --staleness 0"),
)  # fmt: skip

HEALTHY = (
    Trial("quickstart"),
    Trial("quickstart, staleness 0", overrides="--staleness 0"),
    Trial("quickstart, lr 5e-4", overrides="--trainer.optimizer.lr 5e-4"),
    Trial("sums", file="python/sums.toml"),
    Trial("alphabet-sort", file="learn/alphabet_sort.toml", overrides="--steps 40"),
    Trial("calculator", file="learn/calculator.toml", overrides="--steps 40"),
    Trial("flip-text", file="learn/flip_text.toml"),
    Trial("staleness 4", file="learn/staleness.toml"),
    Trial("mixed", file="learn/mixed.toml", overrides="--env.1.algo.teacher.base_url TEACHER", teacher=inf),
    Trial("tic-tac-toe", file="arenas/tic_tac_toe.toml", overrides="--steps 40"),
    Trial("kuhn-poker", file="arenas/kuhn_poker.toml", overrides="--steps 40"),
    Trial("negotiation", file="arenas/negotiation.toml", overrides="--steps 40"),
    Trial("proposer-solver", file="arenas/proposer_solver.toml", overrides="--steps 30"),
    Trial("reward", file="environments/reward.toml"),
    Trial("echo", file="environments/echo.toml"),
    Trial("second-try", file="environments/second_try.toml"),
    Trial("grpo", file="algorithms/grpo.toml"),
    Trial("max_rl", file="algorithms/max_rl.toml"),
    Trial("own credit", file="algorithms/custom.toml"),
    Trial("rejection", file="algorithms/constant.toml"),
    Trial("no comparison", file="algorithms/reward.toml"),
    Trial("second look", file="algorithms/echo.toml", overrides="--steps 40"),
    Trial("critic", file="algorithms/gae.toml"),
    Trial("role baselines", file="algorithms/rae.toml", overrides="--steps 40"),
    Trial("demonstrations", file="algorithms/demonstrations.toml"),
    Trial("sft", file="algorithms/sft.toml", overrides=TEACHER, teacher=inf),
    Trial("opd", file="algorithms/opd.toml", overrides=TEACHER, teacher=inf),
)


@contextmanager
def served(model: Path, log: Path, watched: Path, steps: float) -> Iterator[str]:
    """The address of this model, which is killed once the metrics that are `watched` have so many steps."""

    def watch() -> None:
        while process.poll() is None:
            if watched.exists() and watched.read_text().count("\n") >= steps:
                process.kill()
            time.sleep(0.05)

    port = free_port()
    command = [sys.executable, "-m", "paceline", "serve", str(model), "--port", str(port), "--name", "teacher"]
    with log.open("w") as lines:
        process = subprocess.Popen(command, stdout=lines, stderr=lines)
    try:
        while process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.2)
        Thread(target=watch, daemon=True).start()
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as door:
        return door.getsockname()[1]


def train(trial: Trial, seed: int, runs: Path, seconds: float) -> Path:
    """Train it once; a run that is there is left as it is."""
    run = runs / f"{''.join(char if char.isalnum() else '-' for char in trial.name)}-{seed}"
    if (run / "metrics.jsonl").exists():
        return run
    work = runs / "work" / run.name
    if (work / "log.txt").exists():
        return run
    work.mkdir(parents=True, exist_ok=True)
    file = ROOT / "examples" / (trial.file or "quickstart.toml")
    if trial.env:
        built = trial.rows(seed)
        (work / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in built))
        head = file.read_text().partition("[[env]]")[0]
        file = work / "run.toml"
        env, every = trial.env, 0
        if trial.held_out is not None:
            kept = trial.held_out(seed + 1000)
            (work / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
            env, every = env + 'eval_dataset = "held_out.jsonl"\n', 2
        file.write_text(f"{head}\n[[env]]\n{env.replace('ROWS', 'rows.jsonl')}\n\n[eval]\nevery = {every}\n")
    overrides = trial.overrides
    if "MASTER" in overrides:
        overrides = overrides.replace("MASTER", str(train(HEALTHY[0], seed, runs, seconds) / "export"))
    if trial.model is not None:
        shutil.copytree(resolve("paceline:quickstart"), work / "model", dirs_exist_ok=True)
        trial.model(work / "model")
        overrides += f" --model.name {work / 'model'}"
    with ExitStack() as stack:
        if trial.teacher:
            master = train(HEALTHY[0], seed, runs, seconds) / "export"
            url = stack.enter_context(served(master, work / "teacher.txt", run / "metrics.jsonl", trial.teacher))
            overrides = overrides.replace("TEACHER", url)
        command = [sys.executable, "-m", "paceline", "train", str(file), "--runs", str(runs), "--name", run.name]
        command += ["--seed", str(seed), "--overwrite", *overrides.split()]
        log = stack.enter_context((work / "log.txt").open("w"))
        process = subprocess.Popen(command, cwd=work, stdout=log, stderr=log)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            process.wait(120)
    return run


class Row(NamedTuple):
    trial: str
    seed: int
    expected: str
    """Causes that count; empty for a healthy run."""
    named: list[str]
    """Advisories in the order they were given."""
    health: str
    step: int | None
    """The first step after which the cause was named first."""

    @property
    def right(self) -> bool:
        return (
            self.named[:1] == []
            if not self.expected
            else self.named[:1] != [] and self.named[0] in self.expected.split()
        )


def judge(trial: Trial, seed: int, path: Path) -> Row:
    if not path.exists():
        return Row(trial.name, seed, " ".join(trial.cause), [], "it did not start", None)
    run = open_run(path)
    found = names(advise(advice_window(run)))
    last = max((int(step) for step in run.metrics()["step"] if step is not None), default=0)
    first = next(
        (step for step in range(1, last + 1) if names(advise(advice_window(run, step)))[:1] == found[:1]), last
    )
    verdict = run_health(run, run.metrics(), over=True).verdict
    return Row(trial.name, seed, " ".join(trial.cause), found, verdict, first if found else None)


def names(found: Sequence[Advisory]) -> list[str]:
    return [advisory.rule for advisory in found]


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "advice", help="where runs are kept")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds of each")
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED)
    parser.add_argument("--part", choices=("defects", "healthy"), help="one half of the table")
    parser.add_argument("--only", action="append", help="only trials whose name holds this")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="longest time of a run")
    known = parser.parse_args()
    runs = known.runs.resolve()
    found: list[Row] = []
    for seed in range(known.first_seed, known.first_seed + known.seeds):
        for trial in (*(DEFECTS if known.part != "healthy" else ()), *(HEALTHY if known.part != "defects" else ())):
            if known.only and not any(part in trial.name for part in known.only):
                continue
            row = judge(trial, seed, train(trial, seed, runs, known.seconds))
            mark = "ok  " if row.right else "MISS"
            print(f"{mark} {row.trial}, seed {seed}: {' '.join(row.named) or 'nothing'}; {row.health}", flush=True)
            found.append(row)
    return finish(found, known.json)


def finish(found: Sequence[Row], path: Path | None) -> int:
    table = Table(title="advice: the first cause named")
    for heading in ("run", "seed", "expected", "named first", "at step", "health", ""):
        table.add_column(heading)
    for row in found:
        cells = (row.expected or "nothing", (row.named or ["nothing"])[0], str(row.step or "–"), row.health)
        table.add_row(row.trial, str(row.seed), *cells, "[green]ok[/]" if row.right else "[red]missed[/]")
    Console(width=140).print(table)
    defects, healthy = [row for row in found if row.expected], [row for row in found if not row.expected]
    named, alarms = sum(row.right for row in defects), sum(not row.right for row in healthy)
    cleared = named >= BAR * len(defects) and alarms <= max(FALSE_ALARMS * len(healthy), 1 if len(healthy) >= 20 else 0)
    print(f"{named} of {len(defects)} causes named first (bar {BAR:.0%}); {alarms} false alarms in {len(healthy)} "
          f"healthy runs (bar {FALSE_ALARMS:.1%})")  # fmt: skip
    result = {
        "title": "advice",
        "cleared": cleared,
        "named": named,
        "defects": len(defects),
        "false_alarms": alarms,
        "healthy": len(healthy),
        "rows": [row._asdict() | {"right": row.right} for row in found],
        **machine(),
    }
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result))
    return 0 if cleared else 1


if __name__ == "__main__":
    sys.exit(main())
