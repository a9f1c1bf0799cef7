"""Killed and resumed, bit by bit the run it would have been. `benchmarks/resume.py` does the same at twenty points."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from child_processes import Launched
from paceline.observe.monitor import read_jsonl

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.toml"
STEPS = 6

RUN_FILE = f"""
include = ["{{quickstart}}"]
steps = {STEPS}
batch_size = 32
staleness = 0
deterministic = true
[eval]
every = 2
examples = 32
concurrency = 8
[engine]
max_running = 40
max_context = 64
[trainer]
threads = 1
[checkpoint]
every = 2
[record]
batches = {STEPS}
[[env]]
type = "reverse-text"
curriculum = true
[env.algo]
type = "rae"
"""


def killed_at(folder: Path, line: str, *arguments: str) -> None:
    """Run until it says so, then kill -9."""
    command = [sys.executable, "-m", "paceline", "train", "run.toml", "--name", "killed", *arguments]
    with Launched(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = next((said for said in process.stdout if re.match(line, said)), None)
        process.kill()
    assert said is not None, f"it never said `{line}`"
    assert process.returncode == -signal.SIGKILL


def steps(root: Path) -> list[dict]:
    """What each step trained and came to, less what a clock measured."""
    kept = ("step", "loss", "grad_norm", "entropy", "lr", "reward/reverse-text/mean", "eval/reverse-text/reward")
    return [{key: line.get(key) for key in kept} for line in read_jsonl(root / "metrics.jsonl")]


def batches(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((root / "batches").iterdir())}


def test_a_run_killed_anywhere_is_bit_by_bit_the_unbroken_one(tmp_path, here):
    """After a step, and in the middle of writing a checkpoint: batches, losses, rewards, held-out scores; with moving
    baselines, a curriculum, and groups that finished while evaluation held the checkpoint up."""
    (tmp_path / "run.toml").write_text(RUN_FILE.format(quickstart=os.path.relpath(QUICKSTART, tmp_path)))
    whole, killed = tmp_path / "runs" / "whole", tmp_path / "runs" / "killed"
    done = here("train", "run.toml", "--name", "whole")
    assert done.returncode == 0, done.stderr
    killed_at(tmp_path, r"step +3/")
    killed_at(tmp_path, r"\.\.\. saving checkpoint", "--resume", "latest")
    done = here("train", "run.toml", "--name", "killed", "--resume", "latest")
    assert done.returncode == 0, done.stderr
    assert steps(killed) == steps(whole)
    assert batches(killed).keys() == {f"step-{step:06d}.msgpack" for step in range(1, STEPS + 1)}
    assert batches(killed) == batches(whole)
    one, other = (read_jsonl(root / "tickets.jsonl") for root in (killed, whole))
    for state in ("trained", "dropped"):
        assert [r for r in one if r["state"] == state] == [r for r in other if r["state"] == state]
    ends = [r["number"] for r in one if r["state"] in ("trained", "dropped")]
    assert len(ends) == len(set(ends))
    last = [json.loads((root / "checkpoints" / "latest" / "state.json").read_text()) for root in (killed, whole)]
    assert last[0]["algorithms"] == last[1]["algorithms"]
    assert last[0]["cursors"] == last[1]["cursors"]
