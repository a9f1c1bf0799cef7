"""`paceline eval` and `paceline export`: what a run's own end would say and write, from any checkpoint of it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from paceline.commands import main
from paceline.commands.evaluations import find_targets
from paceline.config import RunConfig, dump, load
from paceline.config.serve import load_served
from paceline.data import Ticket
from paceline.orchestrator.evaluation import confidence_intervals, summarise
from paceline.rollout import Rollout
from paceline.runtime import train
from paceline.trainer.torch import checkpoint as checkpoints
from paceline.trainer.torch.world import destroy_group, join
from paceline.weights.manifest import write_manifest
from run_once import once

QUICKSTART = "paceline:quickstart"


def trained(folder: Path) -> None:
    """Two steps with a LoRA adapter, a checkpoint and an evaluation after each."""
    config = {
        "name": "a",
        "runs": str(folder),
        "steps": 2,
        "batch_size": 16,
        "group_size": 4,
        "staleness": 0,
        "model": {"lora": {"rank": 2}},
        "sampling": {"max_tokens": 12},
        "eval": {"every": 1, "examples": 6},
        "checkpoint": {"every": 1, "keep": 9},
        "trainer": {"optimizer": {"lr": 1e-3}},
        "env": [{"type": "reverse-text"}],
    }
    result = train(RunConfig.model_validate(config))
    assert result.outcome.status == "finished", result.outcome.message


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return once(tmp_path_factory, "eval-export", trained) / "a"


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    """The run in a place of its own, to write into."""
    return Path(shutil.copytree(run, tmp_path / "a", symlinks=True))


def asked(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    said = capsys.readouterr()
    return code, said.out, said.err


def metrics(run: Path, step: int) -> dict:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return next(line for line in lines if line["step"] == step)


def same_weights(one: Path, other: Path) -> bool:
    a, b = load_file(one), load_file(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# -- evaluation -------------------------------------------------------------------------------------------------------


def test_an_evaluation_finds_what_the_runs_own_found(run: Path, capsys):
    """The newest checkpoint, an earlier one and the model it began from: same rows, same noise, same numbers."""
    code, out, err = asked(capsys, "eval", str(run), f"{run}@1", QUICKSTART, "--json")
    assert code == 0, err
    newest, earlier, base = json.loads(out)["targets"]
    for found, step in ((newest, 2), (earlier, 1), (base, 0)):
        own = metrics(run, step)
        table = found["environments"]["reverse-text"]
        assert table["examples"] == table["episodes"] == 6
        for name in ("reward", "exact", "length", "truncated_ratio"):
            assert table[name]["mean"] == pytest.approx(own[f"eval/reverse-text/{name}"], abs=1e-12)
            assert table[name]["low"] <= table[name]["mean"] <= table[name]["high"]
        assert table["tokens"] == round(6 * table["length"]["mean"])
    assert [found["checkpoint"] is None for found in (newest, earlier, base)] == [False, False, True]
    assert "evaluating reverse-text" in err, "progress is no part of the answer"


def test_keys_of_the_command_line_change_the_episodes(run: Path, capsys):
    flags = ["--samples", "2", "--examples", "3", "--sampling.temperature", "0", "--sampling.max_tokens=5"]
    code, out, err = asked(capsys, "eval", QUICKSTART, "--file", str(run / "config.toml"), *flags)
    assert code == 0, err
    for word in ("reverse-text", "reward", "exact", "pass@1", "pass@2", "replies cut off", "tokens"):
        assert word in out
    _, out, _ = asked(capsys, "eval", QUICKSTART, "--env", "reverse-text", *flags, "--json")
    table = json.loads(out)["targets"][0]["environments"]["reverse-text"]
    assert (table["examples"], table["episodes"]) == (3, 6)
    assert table["tokens"] <= 30
    assert table["pass@1"] == table["pass@2"], "greedy tries are alike"


def test_a_target_is_named_as_for_train(run: Path, tmp_path: Path, monkeypatch):
    """An example, as in the repository too, and an environment's type with its keys; a folder is always a model."""
    names = ["quickstart", "examples/quickstart.toml", "reverse-text"]
    targets = find_targets(names, [])
    assert [target.config.name for target in targets] == ["quickstart", "quickstart", "reverse-text"]
    (target,) = find_targets(["reverse-text"], ["--eval-examples", "5"])
    assert target.config.env[0].model_dump()["eval_examples"] == 5
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").symlink_to(run / "export")
    (target,) = find_targets(["quickstart"], [], env="reverse-text")
    assert target.config.model.name == "quickstart"
    (tmp_path / "policy.gguf").touch()
    assert load_served("policy.gguf", []).config.model.name == "policy.gguf"


def test_a_run_without_checkpoints_is_evaluated_by_its_export(copy: Path, capsys):
    shutil.rmtree(copy / "checkpoints")
    (copy / "checkpoints").mkdir()
    _, out, _ = asked(capsys, "eval", str(copy), "--json")
    found = json.loads(out)["targets"][0]
    assert found["model"] == str(copy / "export")
    assert found["environments"]["reverse-text"]["examples"] == 6
    shutil.rmtree(copy / "export")
    code, _, err = asked(capsys, "eval", str(copy))
    assert (code, "neither a whole checkpoint nor an export" in err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([QUICKSTART], "add --env TYPE"),
        ([QUICKSTART, "--env", "reverse-text", "--file", "x.toml"], "leave one of them out"),
        (["{run}@7"], "has no whole checkpoint of step 7: it has @1, @2"),
        (["quikstart"], "did you mean `quickstart`?"),
        (["{run}/export/adapter", "--env", "reverse-text"], "is a LoRA adapter: evaluate its run"),
    ],
)
def test_what_cannot_be_evaluated_is_a_sentence(run: Path, capsys, arguments, sentence):
    code, _, err = asked(capsys, "eval", *(argument.format(run=run) for argument in arguments))
    assert code == 2
    assert sentence in err


def rollouts(rewards: list[list[float]]) -> list[Rollout]:
    tickets = [Ticket(row, "env", 0, row, row) for row in range(len(rewards))]
    tries = [(ticket, tried) for ticket, row in zip(tickets, rewards, strict=True) for tried in enumerate(row)]
    return [Rollout(ticket=ticket, member=member, reward=reward) for ticket, (member, reward) in tries]


def test_intervals_are_over_rows_and_never_vanish_for_shares():
    """Twice as many tries of the same rows are no more evidence; twice as many rows are."""
    once_each, twice_each = rollouts([[0.2], [0.9], [0.4]]), rollouts([[0.2] * 2, [0.9] * 2, [0.4] * 2])
    assert confidence_intervals(once_each, 1)["reward"] == pytest.approx(confidence_intervals(twice_each, 2)["reward"])
    low, high = confidence_intervals(rollouts([[0.2], [0.9], [0.4]] * 4), 1)["reward"]
    wide_low, wide_high = confidence_intervals(once_each, 1)["reward"]
    assert wide_low < low < summarise(once_each, 1)["reward"] < high < wide_high
    # Wilson's interval of 0 of 10, from its closed form z² / (n + z²).
    low, high = confidence_intervals(rollouts([[0.0]] * 10), 1)["reward"]
    assert (low, high) == (0.0, pytest.approx(1.96**2 / (10 + 1.96**2)))


# -- export -----------------------------------------------------------------------------------------------------------


def test_an_export_is_what_the_end_of_the_run_wrote(run: Path, tmp_path: Path, capsys):
    code, out, err = asked(capsys, "export", str(run), "-o", str(tmp_path / "out"))
    assert code == 0, err
    assert out == f"{tmp_path / 'out'}: step 2 of {run}\n"
    files = {path.relative_to(run / "export") for path in (run / "export").rglob("*") if path.is_file()}
    assert files == {path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*") if path.is_file()}
    for name in ("model.safetensors", "adapter/adapter_model.safetensors"):
        assert same_weights(run / "export" / name, tmp_path / "out" / name)
    code, _, err = asked(capsys, "export", str(run), "-o", str(tmp_path / "out"))
    assert (code, "already holds files" in err) == (2, True)
    (tmp_path / "out" / "notes.txt").write_text("mine")
    code, *_ = asked(capsys, "export", f"{run}@1", "-o", str(tmp_path / "out"), "--overwrite")
    assert code == 0
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"
    assert not same_weights(run / "export" / "model.safetensors", tmp_path / "out" / "model.safetensors")


def test_an_adapter_alone_loads_with_peft_and_a_type_can_be_chosen(copy: Path, capsys):
    from peft import AutoPeftModelForCausalLM

    assert asked(capsys, "export", str(copy), "--adapter")[0] == 0
    adapter = copy / "export-adapter"
    assert same_weights(
        adapter / "adapter_model.safetensors", copy / "export" / "adapter" / "adapter_model.safetensors"
    )
    assert not (adapter / "model.safetensors").exists()
    AutoPeftModelForCausalLM.from_pretrained(adapter)
    assert asked(capsys, "export", f"{copy}@1", "--merged", "--dtype", "bfloat16")[0] == 0
    merged = copy / "export-1"
    assert json.loads((merged / "config.json").read_text())["dtype"] == "bfloat16"
    assert not (merged / "adapter").exists()
    with safe_open(merged / "model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118 - no mapping


def test_a_killed_runs_shards_are_exported_like_one_file(copy: Path, capsys):
    """A checkpoint as ranks write it, and no export: a run that was killed on several GPUs."""
    newest = copy / "checkpoints" / "step-000002"
    tensors, state = load_file(newest / "trainer.safetensors"), json.loads((newest / "trainer.json").read_text())
    group = join(0, 1, f"file://{copy}/meeting", "gloo", seconds=60)
    try:
        checkpoints.write(newest, tensors, state, group)
    finally:
        destroy_group()
    (newest / "trainer.safetensors").unlink()
    write_manifest(newest)
    assert list((newest / "trainer").glob("*.safetensors"))
    written = copy.parent / "written"
    (copy / "export").rename(written)
    assert asked(capsys, "export", str(copy))[0] == 0
    assert same_weights(copy / "export" / "model.safetensors", written / "model.safetensors")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["{run}/export"], "is no run directory"),
        (["{run}@9"], "has no whole checkpoint of step 9"),
        (["{full}", "--adapter"], "leave --adapter out"),
    ],
)
def test_what_cannot_be_exported_is_a_sentence(run: Path, copy: Path, capsys, arguments, sentence):
    config = load(run / "config.toml").config
    full = config.model_copy(update={"model": config.model.model_copy(update={"lora": None})})
    (copy / "config.toml").write_text(dump(full))
    code, _, err = asked(capsys, "export", *(argument.format(run=run, full=copy) for argument in arguments))
    assert (code, sentence in err) == (2, True), err


def test_a_run_is_served_by_its_export_and_a_checkpoint_names_the_command(run: Path, copy: Path, capsys):
    from paceline.commands.targets import served_model

    for name in (f"{run}/checkpoints/latest", f"{run}@2", f"{run}/checkpoints/step-000002"):
        code, _, err = asked(capsys, "serve", name)
        assert code == 2
        assert f"`paceline export {run}@2 -o FOLDER`" in err
    assert served_model(str(run)) == str(run / "export")
    assert served_model(QUICKSTART) == QUICKSTART
    shutil.rmtree(copy / "export")
    code, _, err = asked(capsys, "serve", str(copy))
    assert (code, f"`paceline export {copy} -o FOLDER`" in err) == (2, True)


def test_a_run_writes_down_the_type_it_chose(run: Path):
    assert load(run / "config.toml").config.model.dtype == "float32"
    saved = json.loads((run / "checkpoints" / "step-000001" / "trainer.json").read_text())
    assert saved["dtype"] == "float32"
