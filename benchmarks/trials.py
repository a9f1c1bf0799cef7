"""Training runs as trials: each in a process of its own, kept in its folder, gone on with where it was stopped."""

import re
import signal
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.config import load
from paceline.observe.monitor import read_jsonl

ROOT = Path(__file__).parents[1]
READY = re.compile(r"paceline: serving \S+ at (http://\S+/v1)")
Line = Mapping[str, Any]


def train(file: str, run: Path, seed: int, overrides: Sequence[str] = ()) -> Path:
    """Train to the end. A run that is finished is left as it is: delete its folder to have it again."""
    if finished(run):
        return run
    command = [sys.executable, "-m", "paceline", "train", str(ROOT / file)]
    command += ["--runs", str(run.parent), "--name", run.name, "--seed", str(seed), *overrides]
    command += ["--resume", "latest"] if (run / "checkpoints" / "latest").exists() else ["--overwrite"]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if code:
        raise SystemExit(f"{run.name} ended with exit code {code}: type the same command again to go on")
    return run


def finished(run: Path) -> bool:
    """All steps are trained and the model is exported."""
    if not (run / "export" / "config.json").exists():
        return False
    steps = load(run / "config.toml").config.steps
    return bool(steps) and any(line["step"] == steps for line in metrics(run))


def metrics(run: Path) -> list[Line]:
    return list(read_jsonl(run / "metrics.jsonl"))


def evaluations(run: Path) -> list[Line]:
    """The lines that hold results on held-out rows, from step 0 to the last."""
    return [line for line in metrics(run) if any(key.startswith("eval/") for key in line)]


def seconds(run: Path) -> float:
    """Of training and evaluation, over all sittings."""
    return sum(line.get("time/step", 0.0) + line.get("time/eval", 0.0) for line in metrics(run))


@contextmanager
def serving(model: Path, name: str) -> Generator[str]:
    """A `paceline serve` of a model in a second process; gives its base URL, and stops it in the end."""
    command = [sys.executable, "-m", "paceline", "serve", str(model), "--name", name, "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        ready = READY.match(process.stdout.readline())
        if ready is None:
            raise SystemExit(f"the server of {model} did not start: its own lines above say why")
        yield ready[1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        process.stdout.close()
