"""Laws of the promotion gates: what fails is not promoted, and a kill at any moment leaves a whole promoted version."""

import asyncio
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

import scripted_run
from paceline.clients import Pool
from paceline.commands.targets import find_run
from paceline.config import CheckpointConfig, EvalConfig, RecordConfig, RunConfig
from paceline.config.env import CustomEnvConfig
from paceline.config.inference import EngineConfig
from paceline.config.run import PromotionConfig
from paceline.config.trainer import OptimizerConfig, TrainerConfig
from paceline.data import Sample
from paceline.envs import Outcome
from paceline.errors import PacelineError
from paceline.observe.monitor import read_jsonl
from paceline.orchestrator import CheckpointError, Checkpoints, RollBack, RunStopped, build_train_envs
from paceline.orchestrator.promotion import PROMOTION_FILE, PromotedVersion, PromotionGate, kl_divergence
from paceline.runtime import session
from scripted_run import CoinFlips, conduct


class Scheduled(CoinFlips):
    """Held-out rewards by the version that plays."""

    def __init__(self, *rewards: float) -> None:
        super().__init__()
        self._held_out = rewards

    def examples(self, split):
        return super().examples(split) if split == "train" else [{"row": row, "held_out": True} for row in range(6)]

    async def play(self, example, seats):
        outcome = await super().play(example, seats)
        if "held_out" in example:
            return Outcome.solo(self._held_out[seats["policy"].turns[-1].versions[-1]])
        return outcome


SCHEDULE = (0.5, 0, 0.6, 0, 0.1, 0, 0.58, 0.9)
"""Rewards of versions 0 to 7; every second one is compared, and the last."""


def scheduled(tmp_path, schedule=SCHEDULE, steps: int = 7, **promotion):
    more = {name: promotion.pop(name) for name in ("resume", "staleness", "deterministic") if name in promotion}
    config = {
        "eval": EvalConfig(every=0),
        "checkpoint": CheckpointConfig(every=1, keep=1),
        "promotion": PromotionConfig(**{"every": 2, "max_drop": 0.05} | promotion),
    }
    trainer, log, conductor = conduct(tmp_path, Scheduled(*schedule), steps=steps, **config, **more)
    return trainer, {line["step"]: line for line in log.metrics}, log, conductor


@pytest.fixture(autouse=True)
def kept(monkeypatch):
    """`conduct` keeps a hundred checkpoints; here only the newest and the promoted one stay."""
    monkeypatch.setattr(scripted_run, "Checkpoints", lambda folder, keep: Checkpoints(folder, 1))


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_version_is_promoted_exactly_when_its_held_out_reward_holds(tmp_path, staleness):
    trainer, metrics, log, conductor = scheduled(tmp_path, staleness=staleness)
    assert {step: line["promotion/passed"] for step, line in metrics.items() if "promotion/passed" in line} == {
        2: 1.0,  # 0.6 after 0.5
        4: 0.0,  # 0.1 after 0.6
        6: 1.0,  # 0.58 after 0.6, within 0.05
        7: 1.0,  # the last one, 0.9
    }
    assert metrics[4]["promotion/reward"] == pytest.approx(0.1)
    assert metrics[4]["eval/coins/reward"] == pytest.approx(0.1)
    (note,) = (text for text in log.notes if "not promoted" in text)
    assert note == (
        "step 4 is not promoted: the held-out reward of `coins` is 0.100, and 0.600 at step 2 (promotion.max_drop = "
        "0.05); `promoted` stays at step 2"
    )
    assert conductor.promoted.name == "step-000007"
    assert len(trainer.trained) == 7  # training went on


def test_the_promoted_checkpoint_stays_whatever_comes_after_it(tmp_path):
    _, _, _, conductor = scheduled(tmp_path, (0.5, 0, 0.6, 0, 0.1, 0, 0.1, 0.1))
    assert conductor.promoted.name == "step-000002"
    assert (tmp_path / "ckpt" / "promoted").readlink().name == "step-000002"
    assert sorted(p.name for p in (tmp_path / "ckpt").glob("step-*")) == ["step-000002", "step-000007"]
    assert (conductor.promoted / "version").read_text() == "2"
    # A resumed run compares with the same version, and its checkpoint is still there.
    _, metrics, log, conductor = scheduled(tmp_path, (*SCHEDULE[:3], 0, 0, 0, 0, 0, 0.5, 0.7), steps=9, resume="latest")
    assert [metrics[step]["promotion/passed"] for step in (8, 9)] == [0.0, 1.0]
    assert "0.600 at step 2" in next(text for text in log.notes if "step 8 is not promoted" in text)
    assert conductor.promoted.name == "step-000009"


def test_a_version_too_far_from_the_reference_is_not_promoted(tmp_path, monkeypatch):
    """The engine gives the tokens of the reference a tenth of their probability from version 3 on."""

    async def score(self, sequences, temperature=1.0, model=""):
        return [[0.0] + [-1.0 - (np.log(10) if self.version >= 3 else 0.0)] * (len(s) - 1) for s in sequences]

    monkeypatch.setattr(scripted_run.ScriptedEngine, "score", score)
    rising = tuple(version / 10 for version in range(10))
    far = 0.1 - 1 + np.log(10)
    _, metrics, log, conductor = scheduled(tmp_path / "a", rising, max_kl=1.0)
    assert metrics[2]["promotion/kl"] == 0.0
    assert metrics[4]["promotion/kl"] == pytest.approx(far, rel=1e-6)
    assert metrics[6]["promotion/kl"] == pytest.approx(far, rel=1e-6)
    assert conductor.promoted.name == "step-000002"
    assert "its KL divergence from step 2 is 1.4 nats a token (promotion.max_kl = 1)" in " ".join(log.notes)
    for reference, last in (("promoted", 0.0), ("start", far)):
        _, metrics, _, conductor = scheduled(tmp_path / reference, rising, reference=reference)
        assert conductor.promoted.name == "step-000007"  # without a bound it is only measured
        assert metrics[7]["promotion/kl"] == pytest.approx(last, rel=1e-6)


def test_stop_ends_the_run_with_a_checkpoint_and_the_reason(tmp_path):
    trainer, _, _, conductor = scheduled(tmp_path, on_fail="stop")
    assert conductor.step == 4 == len(trainer.trained)
    assert conductor.halt_reason.startswith("step 4 is not promoted: the held-out reward of `coins`")
    assert "--resume promoted" in conductor.halt_reason
    assert conductor.checkpoint.name == "step-000004"
    assert conductor.promoted.name == "step-000002"


def test_roll_back_names_the_promoted_checkpoint_and_every_draw_since(tmp_path):
    with pytest.raises(RollBack, match="step 4 is not promoted") as caught:
        scheduled(tmp_path, on_fail="roll_back", deterministic=True)
    assert caught.value.checkpoint == tmp_path / "ckpt" / "step-000002"
    # The two batches of four groups since then; at staleness 1 some draws before them were dropped.
    assert len(caught.value.draws) == 2 * 4
    _, state = Checkpoints(tmp_path / "ckpt", 1).find("promoted")
    assert state["promotion"]["draws"] == []


@pytest.mark.parametrize("moment", ["before the checkpoint", "before the link"])
def test_a_run_killed_while_it_promotes_loses_nothing(tmp_path, monkeypatch, moment):
    """Whatever it was about to do, the promoted checkpoint is whole, and a resumed run ends like an unbroken one."""
    name = "save" if moment == "before the checkpoint" else "promote"
    real = getattr(Checkpoints, name)

    def killed(self, step, *more):
        if step == 4:
            raise OSError(moment)
        return real(self, step, *more)

    schedule = (0.5, 0, 0.6, 0, 0.7, 0, 0.2, 0.2)
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, name, killed)
        with pytest.raises(OSError, match=moment):
            scheduled(tmp_path, schedule)
    checkpoints = Checkpoints(tmp_path / "ckpt", 1)
    assert checkpoints.promoted.name == "step-000002"
    assert (checkpoints.promoted / "state.json").is_file()
    _, _, _, conductor = scheduled(tmp_path, schedule, resume="latest")
    assert conductor.promoted.name == "step-000004"
    assert (conductor.promoted / "version").read_text() == "4"


def test_going_back_before_the_promoted_version_undoes_the_promotion(tmp_path):
    more = {"max_drop": 0.05, "every": 2}
    config = {
        "eval": EvalConfig(every=0),
        "checkpoint": CheckpointConfig(every=1),
        "promotion": PromotionConfig(**more),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scripted_run, "Checkpoints", Checkpoints)  # which keep all
        conduct(tmp_path, Scheduled(*SCHEDULE), steps=6, **config)
        assert (tmp_path / "ckpt" / "promoted").readlink().name == "step-000006"
        _, log, conductor = conduct(tmp_path, Scheduled(*SCHEDULE), steps=4, resume="step-000003", **config)
    assert conductor.promoted.name == "step-000002"
    assert not any("is gone" in text for text in log.notes)


def test_where_the_promoted_checkpoint_is_gone_the_run_says_what_takes_its_place(tmp_path):
    scheduled(tmp_path, (0.5, 0, 0.6, 0, 0.1), steps=4)
    folder = tmp_path / "ckpt"
    (folder / "promoted").unlink()
    for path in sorted((folder / "step-000002").iterdir()):
        path.unlink()
    (folder / "step-000002").rmdir()
    _, _, log, conductor = scheduled(tmp_path, (0.5, 0, 0.6, 0, 0.1, 0, 0.2), steps=6, resume="latest")
    assert "the promoted checkpoint of step 2 is gone: step-000004 takes its place" in log.notes
    assert conductor.promoted.name == "step-000006"


def test_a_run_that_had_no_gates_gets_them_on_resume(tmp_path):
    config = {"eval": EvalConfig(every=0), "checkpoint": CheckpointConfig(every=1)}
    conduct(tmp_path, Scheduled(*SCHEDULE), steps=3, **config)
    _, metrics, _, conductor = scheduled(tmp_path, (0.5, 0, 0, 0.8, 0.1), steps=4, resume="latest")
    assert metrics[4]["promotion/passed"] == 0.0
    assert conductor.promoted.name == "step-000003"


def test_without_held_out_rows_there_is_nothing_to_compare(tmp_path):
    with pytest.raises(RunStopped, match="no environment has any: add eval_dataset"):
        conduct(tmp_path, CoinFlips(), steps=1, promotion=PromotionConfig())


def test_an_actor_without_any_reward_fails_the_gate():
    """All its held-out episodes failed, and those of the other actor went well."""

    class Duel(Scheduled):
        actors = ("x", "o")

    config = RunConfig(env=[CustomEnvConfig(name="duel", import_path="duel:Duel")])
    gate = PromotionGate(PromotionConfig(), Pool([]), build_train_envs(config, {"duel": Duel()}), 1)
    gate.promoted = PromotedVersion(2, {"duel/x": 0.5, "duel/o": 0.5})
    _, reasons = asyncio.run(gate.compare(4, {"eval/duel/x/reward": 0.9, "eval/duel/o/failed": 6.0}))
    (reason,) = reasons
    assert reason.startswith("the held-out reward of `duel/o` is unknown, since no episode of it has one, and 0.500")


def test_a_reference_that_cannot_be_read_is_one_sentence(tmp_path):
    _, _, _, conductor = scheduled(tmp_path, steps=2)
    (conductor.promoted / PROMOTION_FILE).write_bytes(b"?")
    (conductor.promoted / "manifest.json").unlink()  # else its digest says so first
    with pytest.raises(CheckpointError, match=f"{PROMOTION_FILE} cannot be read"):
        scheduled(tmp_path, steps=3, resume="latest")


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.01, 1), min_size=2, max_size=6), st.data())
def test_the_estimate_is_in_the_mean_the_kl_divergence(weights, data):
    """Over every token that the reference may sample, each as often as it does."""
    p = np.array(weights) / sum(weights)
    others = data.draw(st.lists(st.floats(0.01, 1), min_size=len(weights), max_size=len(weights)))
    q = np.array(others) / sum(others)
    estimates = [estimate(np.log(p[token]), np.log(q[token])) for token in range(len(p))]
    assert min(estimates) >= 0
    assert p @ estimates == pytest.approx(float(p @ np.log(p / q)), rel=1e-3, abs=1e-5)


def estimate(reference: float, version: float) -> float:
    sample = Sample.as_sampled([1, 2]).with_streams(kl_ref_logprobs=np.array([0.0, reference]))
    return kl_divergence([sample], [np.array([5.0, version])])


def test_no_token_is_no_divergence_and_infinities_are_bounded():
    assert kl_divergence([], []) == 0.0
    assert np.isfinite(estimate(-1.0, -np.inf))
    assert estimate(-1.0, -np.inf) > 18
    assert not estimate(-1.0, np.nan) <= 1e9


def quickstart(tmp_path, **more) -> RunConfig:
    lr = more.pop("lr", 2e-4)
    return RunConfig(
        **{
            "runs": str(tmp_path),
            "batch_size": 64,
            "staleness": 0,
            "checkpoint": CheckpointConfig(every=1, keep=1),
            "eval": EvalConfig(every=0, examples=32, concurrency=32),
            "engine": EngineConfig(max_running=32, max_context=64),
            "record": RecordConfig(all=False),
            "trainer": TrainerConfig(optimizer=OptimizerConfig(lr=lr), threads=1),
            "promotion": PromotionConfig(every=2, max_kl=0.5, max_drop=0.1),
        }
        | more
    )


def weights(folder) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def test_a_collapsed_policy_is_not_exported(tmp_path):
    """Four good steps; then a learning rate ten thousand times too high. The export is that of step 4."""
    good = session.train(quickstart(tmp_path, steps=4))
    assert good.outcome.status == "finished"
    before = weights(good.directory / "export")
    bad = session.train(quickstart(tmp_path, steps=6, lr=2.0, resume="latest"))
    assert bad.outcome.status == "finished"
    last = [line for line in bad.metrics if "promotion/passed" in line][-1]
    assert (last["step"], last["promotion/passed"]) == (6, 0.0)
    assert last["promotion/kl"] > 0.5
    assert same(weights(bad.directory / "export"), before)
    notes = [event["text"] for event in read_jsonl(bad.directory / "events.jsonl") if event["event"] == "note"]
    assert "export/ has the weights of step-000004, the last that passed [promotion]" in notes
    assert Checkpoints(bad.directory / "checkpoints", 1).promoted.name == "step-000004"
    for name in (f"{bad.directory}@promoted", str(bad.directory / "checkpoints" / "promoted")):
        target = find_run(name)
        assert target is not None
        assert (target.step, target.checkpoint) == (4, bad.directory / "checkpoints" / "step-000004")
    (bad.directory / "checkpoints" / "promoted").unlink()
    with pytest.raises(PacelineError, match="no promoted checkpoint"):
        find_run(f"{bad.directory}@promoted")


def test_a_failed_gate_rolls_back_and_trains_other_draws(tmp_path, monkeypatch):
    """Version 2 is refused once: its draws never train, and the run ends with a promoted version."""
    from paceline.orchestrator.promotion import PromotionGate

    real, refused = PromotionGate.compare, []

    async def refusing(self, step, evaluation):
        metrics, reasons = await real(self, step, evaluation)
        if not refused:
            refused.extend(self.draws)
            return metrics | {"promotion/passed": 0.0}, ["it is refused"]
        return metrics, reasons

    monkeypatch.setattr(PromotionGate, "compare", refusing)
    gates = PromotionConfig(every=2, max_drop=1.0, on_fail="roll_back")
    result = session.train(quickstart(tmp_path, steps=4, promotion=gates))
    assert result.outcome.status == "finished"
    events = read_jsonl(result.directory / "events.jsonl")
    assert [event["step"] for event in events if event["event"] == "roll_back"] == [0]
    assert not [event for event in events if "are played again" in event.get("text", "")]  # skipped, not played again
    ends = {(r["env"], r["draw"]): r for r in read_jsonl(result.directory / "tickets.jsonl") if r["state"] == "dropped"}
    assert len(refused) == 2 * 8
    assert all(ends[draw]["reason"] == "skipped_draw" for draw in refused)
    assert Checkpoints(result.directory / "checkpoints", 1).promoted.name == "step-000004"


KILLED = """
import os, signal
from paceline.__main__ import main
from paceline.orchestrator import Checkpoints

real = Checkpoints.promote

def promote(self, step):
    if step == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, step)

Checkpoints.promote = promote
main()
"""


def test_kill_minus_nine_between_decision_and_promotion_loses_nothing(tmp_path):
    flags = {
        "runs": tmp_path,
        "steps": 2,
        "batch_size": 64,
        "staleness": 0,
        "promotion.every": 2,
        "promotion.max_drop": 1.0,
        "eval.examples": 8,
        "engine.max_context": 64,
    }
    words = ["train", "quickstart", "--quiet", *(f"--{key}={value}" for key, value in flags.items())]
    killed = subprocess.run([sys.executable, "-c", KILLED, *words], timeout=300, check=False, env=os.environ)
    assert killed.returncode == -signal.SIGKILL
    checkpoints = Checkpoints(tmp_path / "quickstart" / "checkpoints", 2)
    assert checkpoints.promoted.name == "step-000000"
    assert json.loads((checkpoints.all()[-1] / "state.json").read_text())["promotion"]["step"] == 2
    subprocess.run([sys.executable, "-m", "paceline", *words, "--resume=latest"], timeout=300, check=True)
    assert checkpoints.promoted.name == "step-000002"
    assert (tmp_path / "quickstart" / "export" / "model.safetensors").is_file()
