"""The run files of `examples/seeds/infinite` train as they are, and its page names keys that exist."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

import child_processes
from installed_verifiers import needs_tasksets
from paceline.config.keys import find_tables

ROOT = Path(__file__).parents[2]
SEED, DOORS = ROOT / "examples" / "seeds" / "infinite", ROOT / "examples" / "doors"


def train(folder: Path, file: str, *flags: str, **variables: str) -> list[dict]:
    command = [sys.executable, "-m", "paceline", "train", str(SEED / file), "--name", "run", *flags]
    done = child_processes.run(command, timeout=240, cwd=folder, env=os.environ | variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (folder / "runs" / "run" / "metrics.jsonl").read_text().splitlines()]


def test_the_launch_trains_a_module_over_its_rows_to_a_better_held_out_reward(tmp_path):
    lines = train(tmp_path, "run.toml")
    held_out = [line["eval/flip/reward"] for line in lines if "eval/flip/reward" in line]
    assert held_out[-1] > held_out[0] + 0.1


@needs_tasksets
def test_variables_name_the_environment_of_the_launch(tmp_path):
    variables = {"VERIFIERS_ENV_ID": str(DOORS / "copy_words.py"), "VERIFIERS_ENV_ARGS": '{"count": 40}'}
    lines = train(tmp_path, "verifiers.toml", "--sampling.max_tokens", "12", **variables)
    steps = [line for line in lines if line["step"] > 0]
    assert len(steps) == 4  # an epoch of 32 of the 40 rows, 8 a step
    assert all(line["dropped/failed_rollouts"] == 0 for line in steps)


def test_every_key_on_the_right_of_the_page_is_one():
    rows = [line.split("|") for line in (ROOT / "docs" / "seeds" / "infinite.md").read_text().splitlines()]
    cells = " ".join(row[2] for row in rows if len(row) == 5)
    keys = [key for key in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)", cells) if not key.endswith(".py")]
    assert len(keys) > 20
    for key in keys:
        assert find_tables(key), key


@pytest.mark.parametrize("name", ["math", "language", "tools"])
def test_the_toy_rows_are_read_by_a_module_as_they_are(tmp_path, name):
    from paceline.config.env import ModuleEnvConfig
    from paceline.envs import build_environment, sandbox

    toys = Path(sandbox.__file__).parents[1] / "toys" / f"{name}.jsonl"
    environment = build_environment(ModuleEnvConfig(name="m", module=str(SEED / "flip.py"), dataset=str(toys)))
    assert len(environment.examples("train")) == 5
