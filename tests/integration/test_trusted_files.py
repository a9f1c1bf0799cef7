"""Damage on disk is found before anything is trained on it, and no advice costs what was trained."""

import asyncio
import errno
import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from paceline.commands import main
from paceline.config import CheckpointConfig, EvalConfig, RunConfig
from paceline.config.env import CustomEnvConfig
from paceline.config.inference import SamplingConfig
from paceline.config.model import LoRAConfig, ModelConfig
from paceline.envs import Environment, Outcome
from paceline.model import ModelError, load_model
from paceline.observe.monitor import RunRecorder
from paceline.orchestrator import CheckpointError, Checkpoints
from paceline.runtime import train
from paceline.trainer.torch import checkpoint as checkpoints
from paceline.trainer.torch.world import destroy_group, join
from run_once import once

ROWS = tuple("abcdefghijklmnop")


class Letters(Environment):
    """One row for each letter; the reward is never the same for a whole group."""

    def __init__(self, letters=ROWS) -> None:
        self.letters = letters
        self.played = 0

    def examples(self, split):
        asked = [[{"role": "user", "content": f"copy: {letter}"}] for letter in self.letters]
        return [{"messages": messages} for messages in asked] if split == "train" else []

    async def play(self, example, seats):
        await seats["policy"].chat(example["messages"])
        self.played += 1
        return Outcome.solo(self.played % 2)


def run_of(runs: Path, letters=ROWS, name="letters", checkpoint=None, **keys):
    env = CustomEnvConfig(name=name, import_path="x:y")
    settings = {
        "runs": str(runs),
        "steps": 4,
        "batch_size": 8,
        "group_size": 4,
        "eval": EvalConfig(every=0),
        "env": [env],
    }
    settings |= {"sampling": SamplingConfig(max_tokens=4), "device": "cpu"} | keys
    settings["checkpoint"] = CheckpointConfig(every=2, keep=3, **checkpoint or {})
    return train(RunConfig(**settings), environments={name: Letters(letters)})


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A finished run with the checkpoints of steps 2 and 4, and an export."""

    def work(folder: Path) -> None:
        done = run_of(folder)
        assert done.outcome.status == "finished", done.error

    return once(tmp_path_factory, "trusted-files", work)


@pytest.fixture
def runs(trained: Path, tmp_path: Path) -> Path:
    """A copy of its own, to be damaged."""
    shutil.copytree(trained / "run", tmp_path / "run", symlinks=True)
    return tmp_path


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-8])


DAMAGE = {
    "a flipped bit": (flip, "is not what was written (its digest differs)"),
    "a cut file": (cut, "bytes instead of"),
    "a missing file": (Path.unlink, "is missing"),
}


def refused(done, *words: str) -> str:
    """A run that could not be resumed: one sentence, and no advice to overwrite what there is."""
    assert done.outcome.status == "failed"
    advice = "\n".join(done.summary)
    assert "overwrite" not in advice + done.outcome.message
    assert "no batch was trained" not in advice
    for word in words:
        assert word in done.outcome.message, word
    assert not done.outcome.trace, "a sentence, no traceback"
    return done.summary[-1]


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["trainer.safetensors", "trainer.json", "groups.msgpack", "state.json"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_to_the_newest_checkpoint_is_named_and_the_whole_one_is_offered(runs, file, damage):
    harm, words = DAMAGE[damage]
    newest = runs / "run" / "checkpoints" / "step-000004"
    harm(newest / file)
    done = run_of(runs, steps=6, resume="latest")
    advice = refused(done, f"checkpoint {newest} is damaged: {file}", words, "write --resume step-000002")
    assert advice.endswith("config.toml --resume step-000002")
    assert newest.is_dir(), "nothing is removed before a run goes on"


def test_a_run_goes_on_from_the_checkpoint_that_is_offered(runs):
    flip(runs / "run" / "checkpoints" / "step-000004" / "trainer.safetensors")
    again = run_of(runs, steps=3, resume="step-000002")
    assert again.outcome.status == "finished", again.error
    assert [line["step"] for line in again.metrics] == [1, 2, 3]


def test_where_every_checkpoint_is_damaged_none_is_offered(runs):
    for step in ("step-000002", "step-000004"):
        flip(runs / "run" / "checkpoints" / step / "trainer.safetensors")
    advice = refused(run_of(runs, steps=6, resume="latest"), "there is no other whole checkpoint")
    assert advice.endswith("--name NAME")


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_state_is_a_sentence(runs, damage):
    harm, _ = DAMAGE[damage]
    harm(runs / "run" / "checkpoints" / "step-000004" / "state.json")
    done = run_of(runs, steps=6, resume=str(runs / "run" / "checkpoints" / "step-000004"))
    refused(done, "state.json", "--resume step-000002")


def test_a_checkpoint_of_an_older_version_loads_with_a_note(runs):
    for file in runs.glob("run/checkpoints/step-*/manifest.json"):
        file.unlink()
    done = run_of(runs, steps=5, resume="latest")
    assert done.outcome.status == "finished", done.error
    notes = [json.loads(line).get("text", "") for line in (runs / "run" / "events.jsonl").read_text().splitlines()]
    assert any("step-000004 has no manifest.json" in note and "unchecked" in note for note in notes)


@pytest.mark.parametrize(("harm", "words"), [(cut, "its tensors cannot be read"), (Path.unlink, "is missing")])
def test_a_torn_checkpoint_of_an_older_version_is_a_sentence_too(runs, harm, words):
    for file in runs.glob("run/checkpoints/step-*/manifest.json"):
        file.unlink()
    harm(runs / "run" / "checkpoints" / "step-000004" / "trainer.safetensors")
    refused(run_of(runs, steps=5, resume="latest"), "step-000004 is damaged", words, "step-000002")


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_files_of_ranks_are_checked_like_one(runs, damage):
    """A checkpoint as ranks write it, saved by the run's own store."""
    store, newest = Checkpoints(runs / "run" / "checkpoints", keep=3), runs / "run" / "checkpoints" / "step-000004"
    tensors, state = load_file(newest / "trainer.safetensors"), json.loads((newest / "trainer.json").read_text())

    async def trainer(folder: Path) -> None:
        group = join(0, 1, f"file://{runs}/meeting", "gloo", seconds=60)
        try:
            checkpoints.write(folder, tensors, state, group)
        finally:
            destroy_group()
        shutil.copy(newest / "groups.msgpack", folder)

    asyncio.run(store.save(5, (newest / "state.json").read_text(), trainer))
    (shard,) = runs.glob("run/checkpoints/step-000005/trainer/*.safetensors")
    assert asyncio.run(store.check(shard.parents[1])) == ""
    harm, words = DAMAGE[damage]
    harm(shard)
    with pytest.raises(
        CheckpointError, match=rf"step-000005 is damaged: trainer/{shard.name}.*--resume step-000004"
    ) as found:
        asyncio.run(store.check(shard.parents[1]))
    assert words in str(found.value)


def test_commands_that_read_a_checkpoint_check_it_too(runs, capsys):
    flip(runs / "run" / "checkpoints" / "step-000004" / "trainer.safetensors")
    assert main(["export", str(runs / "run"), "-o", str(runs / "out")]) == 2
    assert "step-000004 is damaged: trainer.safetensors is not what was written" in capsys.readouterr().err
    assert main(["export", f"{runs / 'run'}@2", "-o", str(runs / "out")]) == 0


# -- advice ------------------------------------------------------------------------------------------------------------


def test_a_resume_that_fails_names_the_checkpoints_and_never_advises_to_erase_them(runs):
    whole = ("the newest whole checkpoint is", "write --resume step-000004", "before it there is step-000002")
    refused(run_of(runs, steps=6, resume="step-000003"), "no checkpoint at", *whole)
    refused(run_of(runs, steps=6, resume="latest", name="other"), "knows no environment ['other']", *whole)
    lora = ModelConfig(lora=LoRAConfig(rank=4))
    refused(run_of(runs, steps=6, resume="latest", model=lora), "another LoRA setting: set [model] as", *whole)
    refused(run_of(runs, steps=6, resume="latest", letters=()), "has no training rows", *whole)


def test_another_rank_of_lora_is_told_by_its_shapes(tmp_path):
    """Tensors of the same names: a rank of 1 would have been spread over all rows without a word."""
    first = run_of(tmp_path, steps=1, model=ModelConfig(lora=LoRAConfig(rank=1)))
    assert first.outcome.status == "finished", first.error
    refused(
        run_of(tmp_path, steps=2, resume="latest", model=ModelConfig(lora=LoRAConfig(rank=4))), "another LoRA setting"
    )


def test_a_disk_that_is_full_before_any_checkpoint_has_one_advice(tmp_path, monkeypatch):
    whole = RunRecorder.step

    def full(self, step, metrics):
        if step == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        whole(self, step, metrics)

    monkeypatch.setattr(RunRecorder, "step", full)
    done = run_of(tmp_path)
    assert "make room, then start the run again (no checkpoint was saved)" in done.outcome.message
    told = done.outcome.message + "\n".join(done.summary)
    assert "--resume" not in told
    assert "--overwrite" not in told, "a step was trained"


# -- exports -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_export_is_not_loaded(runs, damage):
    harm, words = DAMAGE[damage]
    export = runs / "run" / "export"
    load_model(ModelConfig(name=str(export)))
    harm(export / "generation_config.json")
    with pytest.raises(ModelError) as error:
        load_model(ModelConfig(name=str(export)))
    assert "generation_config.json" in str(error.value)
    assert words in str(error.value)
    (export / "manifest.json").unlink()
    if damage == "a missing file":
        load_model(ModelConfig(name=str(export)))


# -- datasets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("letters", "how"),
    [
        (ROWS[::-1], "its 16 rows have another order or other content"),
        (ROWS[:5], "it had 16 rows and has 5"),
        (("z", *ROWS[1:]), "its 16 rows have another order or other content"),
    ],
    ids=["shuffled", "cut", "edited"],
)
def test_a_changed_dataset_is_told_with_what_to_write_to_go_on(runs, letters, how):
    done = run_of(runs, letters, steps=7, resume="latest")
    refused(done, f"the dataset of `letters` has changed since step-000004: {how}", "--checkpoint.allow_changed_rows")
    done = run_of(runs, letters, steps=7, resume="latest", checkpoint={"allow_changed_rows": True})
    assert done.outcome.status == "finished", done.error
    tickets = [json.loads(line) for line in (runs / "run" / "tickets.jsonl").read_text().splitlines()]
    ended = [ticket["number"] for ticket in tickets if ticket["state"] in ("dropped", "trained")]
    assert len(ended) == len(set(ended)), "each once"
    assert "allow_changed_rows" not in (runs / "run" / "config.toml").read_text(), "it holds for one command"
    assert run_of(runs, letters, steps=8, resume="latest").outcome.status == "finished", "now these are its rows"
