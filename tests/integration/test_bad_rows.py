"""One row without a demonstration is dropped, counted and named, also across a resume; a run with many ends at once."""

import json

import pytest

from paceline.config import CheckpointConfig, EvalConfig, RunConfig
from paceline.config.env import CustomEnvConfig
from paceline.config.inference import SamplingConfig
from paceline.envs import Environment, Outcome
from paceline.runtime import train

BAD = 3


class Letters(Environment):
    """Rows whose `answer` is a letter; some have none."""

    def __init__(self, *empty: int) -> None:
        self.empty = empty

    def examples(self, split):
        asked = [{"role": "user", "content": "copy: a"}]
        rows = [{"messages": asked, "answer": "" if row in self.empty else "a"} for row in range(8)]
        return rows if split == "train" else []

    async def play(self, example, seats):
        return Outcome.solo(1.0)


def taught(folder, environment, **keys):
    env = CustomEnvConfig(name="letters", import_path="x:y", algo={"type": "sft", "demonstrations": "answer"})
    settings = {
        "runs": str(folder),
        "steps": 3,
        "batch_size": 4,
        "eval": EvalConfig(every=0),
        "env": [env],
        "device": "cpu",
    }
    settings |= {"sampling": SamplingConfig(max_tokens=4), "checkpoint": CheckpointConfig(every=1)} | keys
    return train(RunConfig(**settings), environments={"letters": environment})


def test_a_bad_row_is_dropped_by_name_and_every_draw_is_accounted_for_across_a_resume(tmp_path):
    first = taught(tmp_path, Letters(BAD))
    assert first.outcome.status == "finished", first.error
    done = taught(tmp_path, Letters(BAD), steps=6, resume="latest")
    assert done.outcome.status == "finished", done.error
    sentence = f"letters: 1 row is skipped, of 8: environment `letters`, row {BAD}: there is no demonstration"
    events = [json.loads(line) for line in (done.directory / "events.jsonl").read_text().splitlines()]
    assert sum(sentence in event.get("text", "") for event in events) == 2, "once in each life"
    assert {line["data/bad_rows"] for line in done.metrics} == {1.0}
    tickets = [json.loads(line) for line in (done.directory / "tickets.jsonl").read_text().splitlines()]
    dropped = [ticket for ticket in tickets if ticket["state"] == "dropped"]
    assert dropped
    assert {(ticket["row"], ticket["reason"]) for ticket in dropped} == {(BAD, "bad_row")}
    ended = [ticket["number"] for ticket in tickets if ticket["state"] in ("dropped", "trained")]
    assert len(ended) == len(set(ended)), "each once"
    assert set(range(max(ended))) <= {ticket["number"] for ticket in tickets}
    assert not {ticket["row"] for ticket in tickets if ticket["state"] == "trained"} & {BAD}
    assert len([ticket for ticket in tickets if ticket["state"] == "trained"]) == 6 * 4


def test_many_bad_rows_end_the_run_and_the_first_are_named(tmp_path):
    done = taught(tmp_path, Letters(1, 2, 5, 7))
    assert done.outcome.status == "failed"
    message = done.outcome.message
    assert "environment `letters`, row 1: there is no demonstration" in message
    assert "4 of the first 8 rows are bad" in message
    assert "row 2" in message


def test_a_missing_dependency_of_reasoning_gym_is_told_as_that(monkeypatch):
    import importlib

    from paceline.envs.base import EnvError, import_extra

    real = importlib.import_module
    for missing, sentence in (
        ("sympy.core", "reasoning-gym needs `sympy`, which is not installed: pip install sympy"),
        ("reasoning_gym", "reasoning-gym is not installed"),
    ):

        def importing(name, *args, missing=missing):
            if name == "reasoning_gym":
                raise ModuleNotFoundError(f"No module named '{missing}'", name=missing)
            return real(name, *args)

        monkeypatch.setattr(importlib, "import_module", importing)
        with pytest.raises(EnvError, match=sentence):
            import_extra("reasoning_gym")
