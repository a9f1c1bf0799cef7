"""Real runs beside a real teacher: a second `paceline serve`, attached by its address alone."""

import asyncio
import json
import signal
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from live_server import MODEL, door, served
from test_runs import SMALL, metrics

from paceline.clients.frozen import CompletionsEngine, attach
from paceline.config import CheckpointConfig, EvalConfig, RecordConfig, RunConfig, inference
from paceline.config.algorithm import CustomConfig
from paceline.config.algorithm import OPDConfig as Distilled
from paceline.config.env import CustomEnvConfig
from paceline.config.model import LoRAConfig, ModelConfig, ModelRef
from paceline.config.trainer import OptimizerConfig, TrainerConfig
from paceline.data import decode
from paceline.engine import GenerateRequest
from paceline.envs import Environment, Outcome
from paceline.errors import EngineError
from paceline.runtime.session import train

TOOLS = """
async def second_look(row, seat):
    messages = list(row["messages"])
    reply = await seat.chat(messages)
    messages += [reply.message, {"role": "tool", "content": f"letters: {len(row['answer'])}"}]
    return float((await seat.chat(messages)).text == row["answer"]) + reply.text.count("a") / 10
"""


@pytest.fixture(scope="module")
def teacher():
    with served("--engine.max_running", "16", "--engine.max_context", "64", "--engine.threads", "1") as server:
        yield server


@pytest.fixture
def run(tmp_path, here, teacher):
    """Trains a run file in which TEACHER stands for the endpoint."""
    (tmp_path / "tools.py").write_text(TOOLS)
    words = ("banana", "papaya", "cabana", "panama")
    rows = [{"messages": [{"role": "user", "content": f"reverse: {w}"}], "answer": w[::-1]} for w in words]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(text: str, *more: str):
        reference = f'{{ name = "{MODEL}", base_url = "{teacher.url}/v1" }}'
        Path("run.toml").write_text(text.replace("TEACHER", reference))
        return here("train", "run.toml", *SMALL, *more)

    return run


MIXED = """
name = "mixed"
staleness = 0
steps = 3
group_size = 4
[sampling]
max_tokens = 8
temperature = 0.8
[record]
batches = 3
[[env]]
type = "reverse-text"
name = "by-reward"
[[env]]
type = "reverse-text"
name = "by-teacher"
algo = { type = "opd", teacher = TEACHER }
[[env]]
type = "arithmetic"
name = "by-example"
algo = { type = "sft", teacher = TEACHER }
[[env]]
type = "custom"
name = "by-tool"
import_path = "tools.py:second_look"
dataset = "rows.jsonl"
algo = { type = "echo", roles = { tool = 0.1 } }
"""


def test_four_algorithms_share_every_batch_and_the_teacher_plays_and_scores(run, tmp_path):
    done = run(MIXED)
    assert done.returncode == 0, done.stderr
    steps = metrics(tmp_path, "mixed")
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert all({"loss/rl", "loss/ce", "loss/teacher_kl"} <= line.keys() for line in steps)
    # The teacher is the policy it began as, at the same temperature: before the first update they agree.
    assert abs(steps[0]["teacher_kl"]) < 1e-3
    assert abs(steps[2]["teacher_kl"]) > abs(steps[0]["teacher_kl"])
    batch = decode(next((tmp_path / "runs" / "mixed").glob("batches/*1.*")).read_bytes())
    kinds = {name: [s for s in batch if s.env == name] for name in ("by-reward", "by-teacher", "by-example", "by-tool")}
    assert all(kinds.values())
    for sample in kinds["by-teacher"]:
        assert (sample.advantages, sample.rl_token_weights.any(), sample.ce_weights) == (None, False, None)
        assert (sample.teacher_kl_weights == sample.loss_mask).all()
        np.testing.assert_allclose(sample.teacher_logprobs, sample.logprobs, atol=1e-4)
    for sample in kinds["by-example"]:
        assert (sample.logprobs, sample.rl_token_weights.any()) == (None, False)
        assert (sample.versions == -1).all()
        assert (sample.ce_weights == sample.loss_mask).all()
    for sample in kinds["by-tool"]:
        told = sample.ce_weights != 0
        assert told.sum() == len("letters: 6")
        assert not (told & sample.loss_mask).any()


SELF = """
name = "self"
staleness = 0
steps = 2
group_size = 4
[sampling]
max_tokens = 8
[[env]]
type = "reverse-text"
algo = { type = "opsd", demo_key = "answer" }
[[env]]
type = "custom"
name = "read"
import_path = "tools.py:second_look"
dataset = "rows.jsonl"
algo = { type = "sft", demonstrations = "answer" }
"""


def test_the_policy_teaches_itself_beside_demonstrations_that_are_not_sampled(run, tmp_path):
    done = run(SELF, "--engine.max-context", "128")
    assert done.returncode == 0, done.stderr
    steps = metrics(tmp_path, "self")
    assert all(line["reward/read/mean"] == 1.0 for line in steps)
    assert all(abs(line["teacher_kl"]) > 1e-3 for line in steps)


OPD = """
name = "opd"
steps = 2
group_size = 4
[sampling]
max_tokens = 8
[[env]]
type = "reverse-text"
algo = { type = "opd", teacher = TEACHER }
"""


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["--env.0.algo.teacher.name", "nobody"], "there is no model `nobody` here"),
        (["--env.0.algo.teacher.base_url", "http://127.0.0.1:9"], "http://127.0.0.1:9 does not answer"),
        (["--env.0.algo.teacher.api_key_env", "NO_SUCH_KEY"], "NO_SUCH_KEY is not set"),
    ],
)
def test_a_teacher_that_cannot_teach_is_refused_before_anything_is_lost(run, tmp_path, changes, sentence):
    done = run(OPD, *changes)
    assert done.returncode in (1, 2)  # 2 where the run file alone shows it
    assert sentence in done.stderr
    assert not (tmp_path / "runs" / "opd" / "metrics.jsonl").exists()


def test_what_init_writes_for_distillation_is_valid_and_trains(here, teacher):
    assert here("init", "distill").returncode == 0
    assert "is valid" in here("check", "distill.toml").stderr
    at = ["--env.0.algo.teacher.name", MODEL, "--env.0.algo.teacher.base_url", f"{teacher.url}/v1"]
    small = ["--steps", "1", "--batch-size", "16", "--trainer.minibatches", "1", "--eval.every", "0"]
    done = here("train", "distill.toml", *SMALL, *small, *at)
    assert done.returncode == 0, done.stderr


def test_a_run_leaves_nothing_at_its_teacher(run, teacher):
    assert run(OPD).returncode == 0
    assert teacher.idle()


# --- a teacher that goes away


class Mortal:
    """A teacher at one address, which can die and come back."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.port = door()
        self.live()

    def live(self) -> None:
        small = ("--engine.max_running", "16", "--engine.max_context", "64", "--engine.threads", "1")
        self._server = self._stack.enter_context(served("--port", str(self.port), *small))

    def die(self) -> None:
        self._server.stop(signal.SIGKILL)


@pytest.fixture
def mortal():
    with ExitStack() as stack:
        yield Mortal(stack)


class Words(Environment):
    """Something happens to the world when a given row is played first."""

    def __init__(self, **events) -> None:
        self.events = {int(row[1:]): event for row, event in events.items()}
        self.played = 0

    def examples(self, split):
        return [{"messages": [{"role": "user", "content": f"reverse: {c * 3}"}]} for c in "abcdefgh"]

    async def play(self, example, seats):
        self.played += 1
        if event := self.events.pop(self.played, None):
            await asyncio.to_thread(event)
        reply = await seats["policy"].chat(example["messages"])
        return Outcome.solo(float(len(reply.text)))


def distil(mortal: Mortal, words: Words, tmp_path, **more):
    """Batches of eight rollouts."""
    ref = ModelRef(name=MODEL, base_url=f"http://127.0.0.1:{mortal.port}/v1", concurrency=2)
    config = RunConfig(
        **{
            "runs": str(tmp_path),
            "batch_size": 8,
            "group_size": 4,
            "steps": 6,
            "staleness": 0,
            "sampling": inference.SamplingConfig(max_tokens=8),
            "engine": inference.EngineConfig(max_running=8, max_context=64),
            "eval": EvalConfig(every=0),
            "checkpoint": CheckpointConfig(every=1),
            "record": RecordConfig(batches=6),
            "env": [CustomEnvConfig(name="words", import_path="x:y", algo=Distilled(teacher=ref))],
            **more,
        }
    )
    return train(config, environments={"words": words})


def test_a_teacher_that_dies_and_comes_back_costs_time_and_nothing_else(mortal, tmp_path):
    def restart():
        mortal.die()
        mortal.live()

    done = distil(mortal, Words(_11=restart), tmp_path, steps=3)
    assert done.outcome.status == "finished", done.error
    assert [line["batch/samples"] for line in done.metrics] == [8, 8, 8]
    assert not any("dropped/teacher_failed" in line for line in done.metrics)


def test_a_teacher_that_stays_away_costs_batches_and_then_stops_the_run_to_be_resumed(mortal, tmp_path, monkeypatch):
    def die() -> None:
        mortal.die()
        monkeypatch.setattr("paceline.algorithms.reference_scorer.SECONDS", 2.0)  # none is waited for any longer

    done = distil(mortal, Words(_11=die), tmp_path)
    assert done.outcome.status == "failed"
    for part in (
        f"http://127.0.0.1:{mortal.port}/v1 scored nothing in 3 batches",
        "does not answer",
        "--resume latest",
    ):
        assert part in str(done.error)
    assert [line["batch/samples"] for line in done.metrics] == [8, 0, 0]
    assert [line.get("dropped/teacher_failed", 0) for line in done.metrics] == [0, 8, 8]
    assert all(np.isfinite(value) for line in done.metrics for value in line.values())
    monkeypatch.undo()
    mortal.live()
    again = distil(mortal, Words(), tmp_path, resume="latest")
    assert again.outcome.status == "finished", again.error
    assert [line["batch/samples"] for line in again.metrics[3:]] == [8, 8, 8]


# --- the policy as a reference

MIRROR = """
from paceline.algorithms import Algorithm, broadcast
from paceline.algorithms.reference_scorer import ReferenceScorer

class Mirror(Algorithm):
    async def begin(self, context):
        self.reference = await ReferenceScorer.connect("policy", context)

    def assign(self, group):
        for rollout in group.rollouts:
            broadcast(rollout, 1.0)
            rollout.samples = [s.with_streams(teacher_kl_weights=s.loss_mask) for s in rollout.samples]

    async def finish_batch(self, groups):
        return await self.reference.add_logprobs(groups)
"""


@pytest.mark.parametrize("lora", [None, LoRAConfig(rank=4)])
def test_the_policy_that_scores_is_the_one_that_sampled_not_the_base_beneath_it(tmp_path, lora):
    """By a user's own class, in a synchronous run whose policy moves fast."""
    (tmp_path / "mirror.py").write_text(MIRROR)
    config = RunConfig(
        runs=str(tmp_path),
        model=ModelConfig(lora=lora),
        batch_size=8,
        group_size=4,
        steps=4,
        staleness=0,
        sampling=inference.SamplingConfig(max_tokens=8, temperature=0.8),
        engine=inference.EngineConfig(max_running=8, max_context=64),
        trainer=TrainerConfig(threads=1, optimizer=OptimizerConfig(lr=1e-2)),
        eval=EvalConfig(every=0),
        record=RecordConfig(batches=4),
        env=[
            CustomEnvConfig(
                name="words", import_path="x:y", algo=CustomConfig(import_path=f"{tmp_path / 'mirror.py'}:Mirror")
            )
        ],
    )
    done = train(config, environments={"words": Words()})
    assert done.outcome.status == "finished", done.error
    for step in range(1, 5):
        batch = decode(next(done.directory.glob(f"batches/*{step}.*")).read_bytes())
        assert {int(v) for s in batch for v in s.versions[s.loss_mask]} == {step - 1}
        for sample in batch:
            np.testing.assert_allclose(sample.teacher_logprobs, sample.logprobs, atol=1e-3)


# --- endpoints that are no `paceline serve`


def test_an_openai_endpoint_scores_and_plays_in_tokens_as_our_own_client_does(teacher, load, monkeypatch):
    """Our server, asked in what it shares with others: `echo` with `logprobs`, and `return_token_ids`."""
    tokenizer, ref = load("quickstart"), ModelRef(name=MODEL, base_url=f"{teacher.url}/v1", concurrency=2)
    prompt = tuple(tokenizer.encode("<|user|>reverse: banana<|end|><|assistant|>"))
    request = GenerateRequest(prompt_ids=prompt, max_tokens=8, temperature=0.0, stop_token_ids=frozenset([6]))

    async def ask() -> tuple[bool, list[list[float]], list[int], str]:
        pool = await attach(ref, tokenizer)
        try:
            scores = await pool.score([prompt, prompt[:5]])
            said = await pool.generate(request)
            return pool.scores_any_temperature, scores, said.token_ids, said.finish
        finally:
            await pool.aclose()

    ours = asyncio.run(ask())
    monkeypatch.setattr(CompletionsEngine, "is_paceline", lambda self: asyncio.sleep(0, False))
    theirs = asyncio.run(ask())
    assert (ours[0], theirs[0]) == (True, False)
    for one, other in zip(ours[1], theirs[1], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert ours[2:] == theirs[2:]


def test_another_vocabulary_is_refused(teacher, load):
    ref = ModelRef(name=MODEL, base_url=f"{teacher.url}/v1")
    with pytest.raises(EngineError, match="has another vocabulary than the policy"):
        asyncio.run(attach(ref, load("qwen2_5")))


def test_a_run_at_another_temperature_needs_an_endpoint_that_knows_it(run, monkeypatch):
    monkeypatch.setattr(CompletionsEngine, "is_paceline", lambda self: asyncio.sleep(0, False))
    done = run(OPD, "--sampling.temperature", "0.7")
    assert done.returncode == 1
    assert "scores at temperature 1 only, and the run samples at 0.7" in done.stderr
    assert run(OPD, "--steps", "1").returncode == 0


def test_workers_that_only_score_share_the_work_and_agree_with_an_engine(teacher, load):
    """Two of them behind one reference, by the trainer's code; the engine's numbers, to rounding."""
    flags = ("--scores-only", "--trainer.micro_batch_tokens", "256")
    ids = [[int(token) for token in row] for row in np.random.default_rng(0).integers(3, 60, (24, 20))]

    async def story(urls: list[str]) -> tuple[list, list, list]:
        one = await attach(ModelRef(name=MODEL, base_url=f"{teacher.url}/v1"), load("quickstart"))
        both = await attach(ModelRef(name=MODEL, base_url=[f"{url}/v1" for url in urls]), load("quickstart"))
        try:
            theirs = await one.score(ids, 0.8)
            ours = await asyncio.gather(*(both.score([row], 0.8) for row in ids))
            stats = await both.stats()
            with pytest.raises(EngineError, match="only scores"):
                await both.generate(GenerateRequest(prompt_ids=(3, 4), max_tokens=2))
            return theirs, [row for (row,) in ours], stats
        finally:
            await one.aclose()
            await both.aclose()

    with served(*flags) as first, served(*flags) as second:
        theirs, ours, stats = asyncio.run(story([first.url, second.url]))
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert [stat.tokens for stat in stats] == [0, 0]
