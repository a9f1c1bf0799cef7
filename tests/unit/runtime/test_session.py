"""A whole run of the quickstart's model on rows of files: what it says of its rows, and what it refuses."""

import json
from pathlib import Path

import pytest

from paceline.config import CheckpointConfig, EvalConfig, FiltersConfig, RecordConfig, RunConfig
from paceline.config.env import ContaminationConfig, CurriculumConfig, EqualityConfig
from paceline.config.inference import EngineConfig
from paceline.config.trainer import TrainerConfig
from paceline.observe.monitor import read_jsonl
from paceline.runtime import session
from paceline.runtime.preflight import Preflight, check_contamination

COPY = "reverse: one two three four"


@pytest.fixture
def rows(tmp_path) -> Path:
    words = [f"{a}{b}" for a in "abcd" for b in "efgh"]
    files = {
        "easy.jsonl": [f"reverse: {word}" for word in words],
        "hard.jsonl": [COPY, *(f"reverse: {word} {word}" for word in words)],
        "held_out.jsonl": ["reverse: xy", f"please {COPY}"],
    }
    for name, prompts in files.items():
        lines = (json.dumps({"prompt": prompt, "answer": prompt[-1]}) for prompt in prompts)
        (tmp_path / name).write_text("\n".join(lines))
    return tmp_path


def configured(rows: Path, **more) -> RunConfig:
    keys = ("curriculum", "contamination")
    section = {"contamination": ContaminationConfig(words=4), "curriculum": CurriculumConfig(rate=0.5)}
    section |= {key: more.pop(key) for key in keys if key in more}
    env = EqualityConfig(
        name="words",
        dataset={str(rows / "easy.jsonl"): 1.0, str(rows / "hard.jsonl"): 3.0},
        eval_dataset=str(rows / "held_out.jsonl"),
        **section,
    )
    return RunConfig(
        **{
            "runs": str(rows / "runs"),
            "steps": 2,
            "batch_size": 16,
            "group_size": 2,
            "staleness": 0,
            "deterministic": True,
            "env": [env],
            "filters": FiltersConfig(zero_advantage=False),
            "checkpoint": CheckpointConfig(every=1),
            "eval": EvalConfig(every=0),
            "engine": EngineConfig(max_running=16, max_context=128),
            "record": RecordConfig(all=False),
            "trainer": TrainerConfig(threads=1),
        }
        | more
    )


def notes(result) -> list[str]:
    return [event["text"] for event in read_jsonl(result.directory / "events.jsonl") if event["event"] == "note"]


def test_a_run_tells_of_its_rows(rows):
    """Which overlap held-out ones, how its parts do, and how far its curriculum has come."""
    result = session.train(configured(rows))
    assert result.outcome.status == "finished", result.outcome.message
    table = json.loads((result.directory / "contamination.json").read_text())["words"]
    assert (table["words"], table["checked"], table["dropped"], table["held_out"]) == (4, 33, 1, 2)
    (found,) = table["rows"]
    assert (Path(found["dataset"]).name, found["row"], found["words"]) == ("hard.jsonl", 1, "reverse one two three")
    assert any("1 of 33 training rows overlap the evaluation split" in note for note in notes(result))
    for line in (line for line in result.metrics if line["step"]):
        assert line["mixture/words/easy/share"] == 0.25 or line["step"] > 1
        assert line["mixture/words/easy/share"] + line["mixture/words/hard/share"] == 1.0
        shares = {part: line[f"mixture/words/{part}/share"] for part in ("easy", "hard")}
        mean = sum(share * line[f"mixture/words/{part}/reward"] for part, share in shares.items())
        assert mean == pytest.approx(line["reward/words/mean"])
    first, last = (line for line in result.metrics if line["step"])
    assert 0 < first["curriculum/words/hard/seen"] <= 6 / 16
    assert first["curriculum/words/hard/seen"] < last["curriculum/words/hard/seen"] <= 12 / 16
    assert 1 < last["curriculum/words/hard/effective_rows"] <= 16
    again = session.train(configured(rows, steps=3, resume="latest", curriculum=CurriculumConfig(rate=0.5, floor=0.1)))
    assert again.outcome.status == "finished", again.outcome.message
    told = "words: going on with other settings than step-000002: the curriculum's floor from 0.001 to 0.1"
    assert told in notes(again)


def test_too_much_overlap_ends_the_run_before_it_starts_and_check_says_so(rows):
    config = configured(rows, contamination=ContaminationConfig(words=4, max_share=0.02))
    result = session.train(config)
    sentence = (
        "environment `words`: 1 of 33 training rows (3.0%) overlap the evaluation split, and contamination.max_share = "
        f'0.02 allows 2.0%: row 1 of {rows / "hard.jsonl"} has "reverse one two three", and 1 rows have '
        '"reverse one two three". Take them out of one of the two sets, or raise max_share'
    )
    assert (result.outcome.status, result.outcome.message) == ("failed", sentence)
    assert not (rows / "runs" / "run" / "metrics.jsonl").exists()
    check_contamination(config, found := Preflight())
    assert found.problems == [sentence]
    check_contamination(configured(rows), found := Preflight())
    assert (found.problems, len(found.notes)) == ([], 1)
    assert "1 of 33 training rows overlap" in found.notes[0]
    check_contamination(configured(rows, contamination=False), found := Preflight())
    assert (found.problems, found.notes) == ([], [])


def test_generated_rows_are_compared_too():
    pytest.importorskip("reasoning_gym")
    source = {"dataset": "reasoning-gym:gcd?size=20", "eval_dataset": "reasoning-gym:gcd?size=5"}
    env = EqualityConfig(**source, contamination=True)
    check_contamination(RunConfig(env=[env]), found := Preflight())
    (note,) = found.notes
    assert "5 of 20 training rows overlap" in note


def test_rows_that_are_code_are_compared_when_the_run_loads_them():
    from paceline.config.env import CustomEnvConfig, VerifiersConfig

    envs = [
        VerifiersConfig(name="v", id="x", contamination=True),
        CustomEnvConfig(name="c", import_path="x:y", contamination=True),
        EqualityConfig(name="h", dataset="train@owner/name", contamination=True),
    ]
    check_contamination(RunConfig(env=envs), found := Preflight())
    assert found.problems == []
    assert [note.split(":")[0] for note in found.notes] == ["environment `v`", "environment `c`", "environment `h`"]
