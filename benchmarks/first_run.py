"""What a newcomer waits for on a GPU: the quickstart, and a 0.5B run that starts uncompiled and switches by itself.

    python benchmarks/first_run.py --gpu --tokenizer FOLDER

Every run is a `paceline train` of its own, started with empty caches (the second 0.5B run: with those of the first) and
timed from outside by the lines it prints. The 0.5B policy has random Qwen2.5-shaped weights; a step is 32 prompts x 8,
128 tokens in and 512 out. "Steady" is the mean of the steps after both parts run compiled code.
"""

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from bars import arguments
from engine_gpu import Sheet
from trainer import policy

ENVIRONMENT = """
import numpy as np
from paceline import Environment, Outcome


class Guessing(Environment):
    def examples(self, split):
        rng = np.random.default_rng(0)
        return [{{"ids": rng.integers(0, 100_000 if {inside} > 16 else 1000, {inside}).tolist()}} for _ in range(512)]

    async def play(self, example, seats):
        reply = await seats["policy"].complete(example["ids"])
        return Outcome.solo(float(reply.text.count("a") % 2 + reply.tokens % 2))
"""
SWITCHED = ("the engine runs compiled code", "the trainer runs compiled code")
LIMIT = 240.0


@dataclass
class Watched:
    """A `paceline train` seen from outside: each line with the second at which it came."""

    seconds: float
    lines: list[tuple[float, str]] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    """`time/step` of each, from metrics.jsonl."""

    def at(self, text: str) -> float:
        """When a line with this text came first."""
        return next((second for second, line in self.lines if text in line), float("nan"))

    def at_first_step(self) -> float:
        return next((second for second, line in self.lines if re.match(r"step +1/", line)), float("nan"))

    def step_of(self, text: str) -> int:
        """Steps that were done when it came."""
        return sum(
            line.startswith("step") and " 0/" not in line for second, line in self.lines if second <= self.at(text)
        )


def watch(command: list[str], caches: Path, folder: Path, stop_after: int | None = None) -> Watched:
    """Run it to its end, or until `stop_after` steps with compiled code are done: then Ctrl-C, as a user would."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHINDUCTOR", "TRITON"))}
    environment |= {"HOME": str(caches), "XDG_CACHE_HOME": str(caches / "cache"), "TRITON_CACHE_DIR": str(caches / "t")}
    begin = time.perf_counter()
    run = Watched(0.0)
    with subprocess.Popen(
        [sys.executable, "-m", "paceline", "train", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        cwd=folder,
    ) as process:
        assert process.stdout is not None
        compiled, stopping = 0, False
        for line in process.stdout:
            now = time.perf_counter() - begin
            run.lines.append((now, line.rstrip()))
            print(f"  {now:6.1f} {line.rstrip()}"[:150], flush=True)
            both = all(any(text in seen for _, seen in run.lines) for text in SWITCHED)
            compiled += both and line.startswith("step")
            if not stopping and ((stop_after and compiled >= stop_after) or now > LIMIT):
                stopping = True
                process.send_signal(signal.SIGINT)
    run.seconds = time.perf_counter() - begin
    metrics = [*folder.glob("runs/*/metrics.jsonl")]
    rows = [json.loads(line) for line in metrics[0].read_text().splitlines()] if metrics else []
    run.steps = [row["time/step"] for row in rows if "time/step" in row]
    return run


def run_file(model: Path, folder: Path, tiny: bool, **top: object) -> Path:
    prompts, group, inside, out = (4, 4, 16, 16) if tiny else (32, 8, 128, 512)
    (folder / "guessing.py").write_text(ENVIRONMENT.format(inside=inside))
    lines = [
        *(f"{key} = {json.dumps(value)}" for key, value in top.items()),
        f"batch_size = {prompts * group}",
        f"group_size = {group}",
        "staleness = 0",
        "eval.every = 0",
        "checkpoint.every = 0",
        "filters.zero_advantage = false",
        f'model = {{ name = "{model}", dtype = "{"float32" if tiny else "bfloat16"}" }}',
        f"sampling.max_tokens = {out}",
        f"engine = {{ max_running = {prompts * group}, max_context = 2048, prefill_tokens = 8192, cache_gib = 16.0 }}",
        f"trainer.micro_batch_tokens = {1024 if tiny else 65536}",
        "trainer.optimizer.lr = 1e-6",
        '[[env]]\ntype = "custom"\nname = "guessing"\nimport_path = "guessing.py:Guessing"',
    ]
    file = folder / "run.toml"
    file.write_text("\n".join(lines) + "\n")
    return file


def quickstart(sheet: Sheet, scratch: Path) -> None:
    folder, caches = scratch / "quickstart", scratch / "quickstart-caches"
    folder.mkdir()
    example = Path(__file__).parents[1] / "examples/quickstart.toml"
    run = watch([str(example)], caches, folder)
    sheet.at_most("quickstart with defaults, empty caches: the whole command", "s", run.seconds, 40)
    sheet.at_most("quickstart: its 30 steps", "s", sum(run.steps), 12)


def half_billion(sheet: Sheet, scratch: Path, model: Path, tiny: bool) -> None:
    caches = scratch / "caches"
    runs = {}
    for name, steps, settings, stop in (
        ("auto", 200, [], 9),
        ("again", 200, [], 5),
        ("compiled", 10, ["--engine.compile", "true", "--trainer.compile", "true"], None),
    ):
        folder = scratch / name
        folder.mkdir()
        file = run_file(model, folder, tiny, name=name, steps=4 if tiny else steps)
        print(f"{name}:", flush=True)
        runs[name] = watch([file.name, *settings], caches, folder, stop)
    first, second, reference = runs.values()
    sheet.at_most(
        "0.5B, empty caches: first step after sampling began",
        "s",
        first.at_first_step() - first.at("paceline auto"),
        20,
    )
    switched = max(first.step_of(text) for text in SWITCHED)
    sheet.note("0.5B: steps before both parts ran compiled code", "steps", switched)
    steady, peer = statistics.fmean(first.steps[switched + 2 : -1]), statistics.fmean(reference.steps[3:-1])
    sheet.at_most("0.5B: steady step after the switch", "of compile = true", steady / peer, 1.03, seconds=steady)
    sheet.note("0.5B: uncompiled step", "s", statistics.fmean(first.steps[1:4]))
    ready = max(second.at(text) for text in SWITCHED)
    sheet.at_most(
        "0.5B, second run: compiled after the weights were loaded", "s", ready - second.at("starting the engine"), 10
    )


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--gpu", action="store_true", help="the real shapes; without it a tiny one, to try the script")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of a tokenizer, for the 0.5B runs")
    parser.add_argument("--only", choices=["quickstart", "0.5B"])
    given = parser.parse_args()
    sheet = Sheet(given.json, "the first run on one GPU")
    complete = False
    try:
        with tempfile.TemporaryDirectory() as name:
            scratch = Path(name)
            if given.only in (None, "quickstart"):
                quickstart(sheet, scratch)
            if given.only in (None, "0.5B"):
                with policy(given.tokenizer, "cuda" if given.gpu else "cpu", tiny=not given.gpu) as model:
                    half_billion(sheet, scratch, model, tiny=not given.gpu)
        complete = given.only is None
    except Exception:
        traceback.print_exc()
    return sheet.finish(complete)


if __name__ == "__main__":
    raise SystemExit(main())
