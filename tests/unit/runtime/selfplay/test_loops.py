"""Laws of the self-play loops: evaluation teaches nothing, a resumed loop goes on, failures stop it with a cause."""

import asyncio
import json
import logging
import shutil
import sys

import numpy as np
import pytest

from paceline.clients import Pool
from paceline.config.inference import EngineConfig
from paceline.config.model import ModelConfig
from paceline.engine import EmbeddedEngine
from paceline.errors import PacelineError
from paceline.model import load_model
from paceline.observe.monitor.exporters import Wandb
from paceline.runtime.selfplay import (
    Client,
    ConstantCredit,
    GRPOCredit,
    RAECredit,
    SelfPlayTrainer,
    SelfPlayTrainerConfig,
    load,
    optim,
    synchronous_training_loop,
    training_loop,
)
from paceline.selfplay import Actor, Arena, Artifact, ArtifactStore, EpisodeRequest, Rubric, SingleTurnEpisode
from paceline.weights.manifest import MANIFEST
from trainers import weights_of


class Guess(SingleTurnEpisode):
    """Pays for an even digit, and stores every word that was said."""

    episode_type = "guess"

    @property
    def rubric(self):
        def even(state, arena):
            arena.store("said").add(Artifact(state.last_text))
            return {"player": float(state.last_text[-1:] in set("02468"))}

        return Rubric([even])

    def get_initial_prompt(self, arena, artifact, state):
        return f"add: {artifact.data}+0"


class Guesses(Arena):
    """Two numbers a batch, four tries each."""

    def __init__(self, client=None, credit_assigner=None) -> None:
        super().__init__(client, credit_assigner)
        self.add_actor(Actor("player", max_tokens=3))
        self.add_episode(Guess())
        self.add_store("said", ArtifactStore(max_size=500))
        self.drawn: list[int] = []

    def get_batch(self):
        numbers = self.rng.sample(range(10, 99), 2)
        self.drawn += numbers
        return [EpisodeRequest("guess", Artifact(number)) for number in numbers for _ in range(4)]


@pytest.fixture(scope="module")
def engine():
    served = load_model(ModelConfig()).requires_grad_(False)
    engine = EmbeddedEngine(served, EngineConfig(adapters=1, adapter_rank=16, max_running=32, threads=1))
    engine.start()
    yield engine
    engine.close()


@pytest.fixture
def made(engine, tmp_path):
    """Makes a trainer and its arena, as a script that is started anew does."""
    trainers = []

    def make(arena=Guesses, credit=None, **settings) -> tuple[Arena, SelfPlayTrainer]:
        model, _ = load("paceline:quickstart")
        settings = {"checkpoint_dir": str(tmp_path / "checkpoints"), "clip_skip_threshold": None} | settings
        client = Client(Pool([engine]))
        trainers.append(SelfPlayTrainer(model, optim.Adam(1e-3), SelfPlayTrainerConfig(**settings), client))
        return arena(client, credit or RAECredit()), trainers[-1]

    yield make
    for trainer in trainers:
        trainer.close()


def run(work):
    return asyncio.run(asyncio.wait_for(work, 240))


def masters(trainer):
    return {name: tensor.numpy().copy() for name, tensor in weights_of(trainer._trainer).items()}


def names(folder):
    return sorted(path.name for path in (folder / "checkpoints").glob("step-*"))


def kept_after(trainer, name: str, into: dict, where: str = "") -> None:
    """Keep the weights that are there when `trainer.name(folder)` is done, of a folder with `where` in its name."""
    work = getattr(trainer, name)

    async def watched(folder):
        await work(folder)
        if where in folder.name:
            into.clear()
            into.update(masters(trainer))

    setattr(trainer, name, watched)


def test_an_evaluation_changes_nothing_of_the_training(made):
    arena, trainer = made()

    async def work():
        await arena.step()
        runner = trainer.client.runner(arena)

        def state():
            return json.dumps([arena.state(), arena.credit_assigner.state(), trainer.client.draws, trainer.version])

        before = state()
        first, second = await runner.evaluate(8), await runner.evaluate(2)
        assert state() == before
        assert first["eval/arena/reward"] == second["eval/arena/reward"]  # its own draw, the same words each time
        assert before != json.dumps([Guesses().state(), {}, 0, 0])

    run(work())


def test_the_arenas_own_split_is_evaluated_and_recorded(made, tmp_path):
    class WithSplit(Guesses):
        def requests(self, split):
            return [EpisodeRequest("guess", Artifact(7))] * 3 if split == "eval" else []

    arena, trainer = made(WithSplit, eval_every=2)
    file = tmp_path / "metrics.jsonl"
    run(synchronous_training_loop(arena, trainer, 4, metrics_file=file))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["step"] for line in lines] == [line["step"] for line in trainer.metrics] == [1, 2, 3, 4]
    assert ["eval/arena/reward" in line for line in lines] == [False, True, False, True]
    assert all({"loss", "grad_norm", "reward/player", "stale_samples"} <= line.keys() for line in lines)
    assert names(tmp_path) == ["step-000004"]  # the end of the loop, which no other checkpoint is due at


def test_an_evaluation_plays_as_many_episodes_at_once_as_are_set(made):
    under_way, most = [], []

    def ended(state, arena):
        held_out = state.request.artifact.data == 7
        if held_out:
            under_way.pop()
        return {"player": float(not held_out)}

    class Counted(Guess):
        rubric = Rubric([ended])

        def get_initial_prompt(self, arena, artifact, state):
            if artifact.data == 7:
                under_way.append(state)
                most.append(len(under_way))
            return super().get_initial_prompt(arena, artifact, state)

    class WithSplit(Guesses):
        def add_episode(self, episode):
            super().add_episode(Counted())

        def requests(self, split):
            return [EpisodeRequest("guess", Artifact(7))] * 6 if split == "eval" else []

    arena, trainer = made(WithSplit, eval_every=1, eval_concurrency=2)
    run(synchronous_training_loop(arena, trainer, 1))
    assert (len(most), max(most)) == (6, 2)


@pytest.mark.parametrize("loop", [training_loop, synchronous_training_loop])
def test_a_resumed_loop_draws_what_an_unbroken_one_does_and_begins_where_the_checkpoint_is(made, tmp_path, loop):
    file, settings = tmp_path / "metrics.jsonl", {"checkpoint_every": 2, "min_samples_per_step": 1, "eval_every": 0}
    unbroken, trainer = made(checkpoint_every=0, min_samples_per_step=1, eval_every=0)
    run(loop(unbroken, trainer, 6))
    assert trainer.version == 6

    first, trainer = made(**settings)
    kept_after(trainer, "save", saved := {}, "step-000002")
    run(loop(first, trainer, 3, metrics_file=file))
    shutil.rmtree(tmp_path / "checkpoints" / "step-000003")  # as if it had been killed before the loop's end
    second, resumed = made(**settings)
    kept_after(resumed, "load", loaded := {})
    run(loop(second, resumed, 6, resume="latest", metrics_file=file))
    assert (resumed.version, len(resumed.reports)) == (6, 4)
    assert second.drawn == unbroken.drawn[4:]
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 2, 3, 4, 5, 6]
    assert names(tmp_path) == ["step-000004", "step-000006"]
    assert saved.keys() == loaded.keys()
    assert all(np.array_equal(saved[name], loaded[name]) for name in saved)
    assert any(tensor.any() for name, tensor in loaded.items() if "lora_B" in name)
    assert len(second.store("said")) >= 6 * 8 - 8


def test_a_checkpoint_that_cannot_be_used_is_a_sentence(made, tmp_path):
    settings = {"checkpoint_every": 1, "eval_every": 0}
    arena, trainer = made(**settings)
    with pytest.raises(PacelineError, match="resume = `latest`: no checkpoint at"):
        run(synchronous_training_loop(arena, trainer, 1, resume="latest"))
    run(synchronous_training_loop(arena, trainer, 2))
    run(synchronous_training_loop(arena, trainer, 3))  # the same training goes on
    assert trainer.version == 5
    run(synchronous_training_loop(*made(**settings), 1))  # another training: the checkpoints of the first are kept
    assert names(tmp_path) == ["step-000001"]
    earlier = tmp_path / "checkpoints" / "earlier-1"
    again, anew = made(**settings, checkpoint_dir=str(earlier))
    newest = earlier / "step-000005" / "trainer.safetensors"
    newest.write_bytes(newest.read_bytes()[:-100])
    with pytest.raises(PacelineError, match=r'step-000005 is damaged: .*write resume="step-000004" to go on'):
        run(synchronous_training_loop(again, anew, 6, resume="latest"))
    run(synchronous_training_loop(again, anew, 3, resume="step-000004"))  # the second of those three
    assert anew.version == 5
    (newest.parent / "state.json").write_text("{}")
    with pytest.raises(PacelineError, match=r"damaged: state\.json"):
        run(synchronous_training_loop(again, anew, 6, resume="step-000005"))
    (newest.parent / MANIFEST).unlink()
    with pytest.raises(PacelineError, match="is not a checkpoint of training_loop"):
        run(synchronous_training_loop(again, anew, 6, resume="step-000005"))


def test_an_arena_whose_state_is_no_json_is_named(made, caplog):
    class Odd(Guesses):
        def get_batch(self):
            self.store("said").add(Artifact(object()))
            return super().get_batch()

    arena, trainer = made(Odd, checkpoint_every=1)
    with pytest.raises(PacelineError, match=r"cannot be kept in a checkpoint .* or set checkpoint_every = 0"):
        run(synchronous_training_loop(arena, trainer, 1))
    with caplog.at_level(logging.WARNING):  # what was trained is not lost for a script that goes on
        run(synchronous_training_loop(*made(Odd, checkpoint_every=9), 1))
    assert "no checkpoint of step 1: the arena's state cannot be kept in a checkpoint" in caplog.text


class Cancel:
    """Cancels the task it was made in when a method of the trainer is called for the n-th time, and lets it go on."""

    def __init__(self, trainer, method: str, times: int) -> None:
        task, real = asyncio.current_task(), getattr(trainer._trainer, method)

        async def watched(*args):
            self.calls += 1
            if self.calls == times:
                task.cancel()
            return await real(*args)

        self.calls = 0
        setattr(trainer._trainer, method, watched)


@pytest.mark.parametrize("loop", [training_loop, synchronous_training_loop])
@pytest.mark.parametrize(("method", "times", "taken"), [("step", 3, 3), ("weights", 4, 3), ("accumulate", 3, 3)])
def test_a_loop_that_is_stopped_keeps_its_last_step_and_goes_on_after_it(
    made, tmp_path, caplog, loop, method, times, taken
):
    """As Ctrl-C does: in the middle of a step, of publishing, of the gradients that become a step."""
    file, settings = tmp_path / "metrics.jsonl", {"min_samples_per_step": 1, "eval_every": 0}
    first, trainer = made(**settings)

    async def stopped():
        Cancel(trainer, method, times)
        await loop(first, trainer, 6, metrics_file=file)

    with caplog.at_level(logging.WARNING), pytest.raises(asyncio.CancelledError):
        run(stopped())
    assert f'stopped after step {taken}, in batch {taken} of 6: go on with resume="latest"' in caplog.text
    assert names(tmp_path) == [f"step-00000{taken}"]
    second, resumed = made(**settings)
    run(loop(second, resumed, 6, resume="latest", metrics_file=file))
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 2, 3, 4, 5, 6]
    unbroken = Guesses()
    for _ in range(6):
        unbroken.get_batch()
    assert first.drawn[: 2 * taken] + second.drawn == unbroken.drawn


def test_a_stopped_loop_goes_on_with_the_same_trainer(made):
    """As in a notebook: gradients that wait for a step when it is stopped count in the next one."""
    arena, trainer = made(min_samples_per_step=16, eval_every=0)

    async def stopped():
        Cancel(trainer, "accumulate", 1)
        await training_loop(arena, trainer, 4)

    with pytest.raises(asyncio.CancelledError):
        run(stopped())
    run(training_loop(arena, trainer, 3))
    assert trainer.version == 2


def test_a_loop_that_fails_keeps_its_last_step(made, tmp_path, caplog):
    class FailsLater(Guesses):
        def get_batch(self):
            if len(self.drawn) == 6:
                raise KeyError("no more")
            return super().get_batch()

    with caplog.at_level(logging.WARNING), pytest.raises(KeyError, match="no more"):
        run(synchronous_training_loop(*made(FailsLater, min_samples_per_step=1), 9))
    assert 'stopped after step 3, in batch 3 of 9: go on with resume="latest"' in caplog.text
    assert names(tmp_path) == ["step-000003"]


def test_five_failures_in_a_row_end_the_loop_with_the_first_cause(made):
    class Broken(Guess):
        def get_initial_prompt(self, arena, artifact, state):
            raise KeyError(f"lamp {artifact.data}")

    class Dark(Guesses):
        def add_episode(self, episode):
            super().add_episode(Broken())

    arena, trainer = made(Dark)
    with pytest.raises(PacelineError, match=r"5 rollouts failed in a row; the first cause: .*lamp"):
        run(training_loop(arena, trainer, 3))
    assert trainer.version == 0


def test_a_loop_that_trains_nothing_says_so(made, caplog):
    class Flat(Guess):
        rubric = Rubric([lambda state, arena: {"player": 1.0}])

    class Level(Guesses):
        def add_episode(self, episode):
            super().add_episode(Flat())

    arena, trainer = made(Level, GRPOCredit())
    with caplog.at_level(logging.WARNING):
        run(training_loop(arena, trainer, 2))
    assert trainer.version == 0
    assert "2 batches and no optimizer step: in every group all rewards were equal" in caplog.text


def test_an_arena_that_cannot_be_played_is_a_sentence(made):
    arena, _ = made()
    with pytest.raises(PacelineError, match=r"Guesses has no client to play on: .*credit_assigner=GRPOCredit\(\)"):
        run(Guesses().step())
    for concurrency in (0, "8"):
        with pytest.raises(PacelineError, match=f"concurrency = {concurrency!r} lets no episode begin"):
            run(arena.step(concurrency=concurrency))


class NotBegun(Guesses):
    def __init__(self) -> None:
        pass


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"arena": Guesses}, "arena: got a type: give an object of your class of Arena"),
        ({"arena": NotBegun()}, r"NotBegun.__init__ calls no super\(\).__init__\(client, credit_assigner\)"),
        ({"trainer": "Trainer"}, r"trainer: got a str: give Trainer\(model, optimizer, config, client\)"),
        ({"num_steps": "3"}, "num_steps = '3': give the number of batches"),
        ({"num_steps": -1}, "num_steps = -1: give the number of batches"),
        ({"metrics_file": "."}, "metrics_file `.` cannot be written .*a file for the other"),
    ],
)
def test_wrong_arguments_of_a_loop_are_sentences(made, wrong, why):
    arena, trainer = made()
    with pytest.raises(PacelineError, match=why):
        run(training_loop(**({"arena": arena, "trainer": trainer, "num_steps": 1} | wrong)))


def test_a_checkpoint_dir_that_cannot_be_written_ends_a_loop_before_it_trains(made, tmp_path):
    (tmp_path / "file").write_text("")
    arena, trainer = made(checkpoint_dir=str(tmp_path / "file"))
    with pytest.raises(PacelineError, match=r"checkpoint_dir `.*file` .* cannot be written .*: give a folder"):
        run(training_loop(arena, trainer, 1))
    assert arena.drawn == []


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (None, r"gave None: give a list of EpisodeRequests"),
        ([{"question": 1}], r"gave .*question.*: give EpisodeRequests"),
        ([EpisodeRequest("guess", 5)], r"write EpisodeRequest\(TYPE, Artifact\(DATA\), \{...\}\)"),
        ([EpisodeRequest("guess", Artifact(5), None)], r"write EpisodeRequest\(TYPE, Artifact\(DATA\), \{...\}\)"),
        ([EpisodeRequest("quess", Artifact(5))], "episode type `quess` is not registered in this arena"),
        ([], "has nothing to play"),
    ],
)
def test_a_batch_that_cannot_be_played_is_a_sentence(made, given, why):
    class Odd(Guesses):
        def get_batch(self):
            return given

    with pytest.raises(PacelineError, match=why):
        run(Odd(made()[0].client, RAECredit()).step())


def test_the_loop_gives_an_arena_without_a_client_the_trainers(made):
    _, trainer = made(min_samples_per_step=1)
    run(training_loop(Guesses(None, ConstantCredit()), trainer, 1))
    assert trainer.version == 1


def test_weights_and_biases_is_optional(made, monkeypatch, caplog):
    arena, trainer = made(wandb_project="games", wandb_run_name="first")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with caplog.at_level(logging.WARNING):
        run(synchronous_training_loop(arena, trainer, 1))
    assert "pip install 'paceline[wandb]'; the loop goes on without it" in caplog.text
    assert trainer.version == 1


def test_weights_and_biases_gets_every_step_offline(made, monkeypatch, tmp_path):
    pytest.importorskip("wandb", reason="wandb is an extra")
    monkeypatch.setenv("WANDB_MODE", "offline")
    sent, send = [], Wandb.step

    def watched(self, step, metrics):
        send(self, step, metrics)  # wandb writes its file when it likes
        sent.append((self._run.project, self._run.name, step, "reward/player" in metrics))

    monkeypatch.setattr(Wandb, "step", watched)
    arena, trainer = made(wandb_project="games", wandb_run_name="first")
    run(synchronous_training_loop(arena, trainer, 2))
    assert sent == [("games", "first", 1, True), ("games", "first", 2, True)]
    assert len([*(tmp_path / "checkpoints").glob("wandb/offline-run-*/*.wandb")]) == 1
