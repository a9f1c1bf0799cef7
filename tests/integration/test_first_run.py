"""The first runs of a new user: examples by name, files to begin with, runs that were moved, one sentence a failure."""

import tomllib

import pytest

from paceline.config.target import KINDS

SMALL = (
    *("--batch-size", "16", "--group-size", "4", "--eval.every", "0", "--checkpoint.every", "1"),
    *("--engine.max-running", "16", "--engine.max-context", "64"),
    *("--trainer.threads", "1", "--trainer.minibatches", "1"),
)
NEED_A_TEACHER = {"distill"}
"""Tried in test_teachers.py, which has one."""


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in NEED_A_TEACHER])
def test_every_kind_that_init_writes_is_valid_and_trains(here, tmp_path, kind):
    assert here("init", kind).returncode == 0
    checked = here("check", f"{kind}.toml")
    assert (checked.returncode, "is valid" in checked.stderr) == (0, True)
    done = here("train", f"{kind}.toml", *SMALL, "--steps", "1")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / kind / "export" / "model.safetensors").exists()


def test_an_example_trains_from_any_folder_by_its_name(here, tmp_path):
    done = here("train", "quickstart", *SMALL, "--steps", "1")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "quickstart" / "checkpoints" / "step-000001").is_dir()


def test_a_run_may_be_moved_and_fewer_steps_than_it_has_are_refused(here, tmp_path):
    (tmp_path / "run.toml").write_text('name = "a"\n')
    done = here("train", "run.toml", *SMALL, "--steps", "2")
    assert done.returncode == 0, done.stderr
    (tmp_path / "runs" / "a").rename(tmp_path / "runs" / "b")
    done = here("train", "runs/b/config.toml", "--resume", "latest", "--steps", "3")
    assert done.returncode == 0, done.stderr
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["b"]
    assert "going on after step 2" in done.stdout
    assert (tmp_path / "runs" / "b" / "checkpoints" / "step-000003").is_dir()
    assert "resume" not in tomllib.loads((tmp_path / "runs" / "b" / "config.toml").read_text())

    # Fewer steps than the run has behind it: what the number counts, and what to type.
    done = here("train", "runs/b", "--resume", "latest", "--steps", "1")
    assert done.returncode == 2
    assert "already at step 3" in done.stderr
    assert "--steps 4 to train 1 more" in done.stderr
    assert done.stdout == ""


ENVIRONMENT = """
from helper import reward

async def rollout(row, seat):
    import later  # found when the function runs, too
    reply = await seat.chat([{"role": "user", "content": row["prompt"]}])
    return reward(reply.text, later.WORD)
"""


def test_a_run_file_in_a_folder_of_its_own_finds_what_lies_beside_it(here, tmp_path):
    task = tmp_path / "task"
    task.mkdir()
    (task / "env.py").write_text(ENVIRONMENT)
    (task / "helper.py").write_text("def reward(text, word):\n    return text.count('a') / 10 + (text == word)\n")
    (task / "later.py").write_text("WORD = 'ananab'\n")
    (task / "rows.jsonl").write_text('{"prompt": "reverse: banana"}\n' * 4)
    (task / "run.toml").write_text(
        'name = "beside"\n[[env]]\ntype = "custom"\nimport_path = "env.py:rollout"\ndataset = "rows.jsonl"\n'
    )
    done = here("train", "task/run.toml", *SMALL, "--steps", "1")
    assert done.returncode == 0, done.stderr
    resolved = (tmp_path / "runs" / "beside" / "config.toml").read_text()
    assert f'"{task}/env.py:rollout"' in resolved
    assert f'"{task}/rows.jsonl"' in resolved


@pytest.mark.parametrize("quiet", [[], ["--quiet"]])
def test_why_a_run_failed_is_printed_once(here, tmp_path, quiet):
    (tmp_path / "bad.py").write_text("async def rollout(row, seat):\n    raise ValueError('my own mistake')\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n' * 4)
    (tmp_path / "bad.toml").write_text(
        'name = "bad"\n[[env]]\ntype = "custom"\nimport_path = "bad.py:rollout"\ndataset = "rows.jsonl"\n'
    )
    done = here("train", "bad.toml", *SMALL, *quiet)
    assert done.returncode == 1
    cause = "the first cause: custom: ValueError: my own mistake"
    assert (done.stdout + done.stderr).count(cause) == 1
    assert cause in done.stderr
    assert "my own mistake" not in done.stdout
    assert "failed at step 0" in done.stdout


def test_init_never_replaces_a_file_unless_it_is_told_to(here, tmp_path):
    assert here("init", "reward", "--name", "mine").returncode == 0
    (tmp_path / "reward.py").write_text("mine\n")
    refused = here("init", "reward", "--name", "other")
    assert (refused.returncode, (tmp_path / "other.toml").exists()) == (2, False)
    assert "reward.py" in refused.stderr
    assert "--force" in refused.stderr
    assert (tmp_path / "reward.py").read_text() == "mine\n"
    assert here("init", "reward", "--name", "other", "--force").returncode == 0
    assert (tmp_path / "reward.py").read_text() != "mine\n"
    unknown = here("init", "rewards")
    assert (unknown.returncode, "`reward`" in unknown.stderr) == (2, True)
    assert here("init", "algorithms/echo", "--to", "echo").returncode == 0
    assert sorted(p.name for p in (tmp_path / "echo").iterdir()) == [
        "credit.py",
        "echo.toml",
        "words.jsonl",
        "words_eval.jsonl",
    ]
