"""Real runs whose KL reference is a `paceline serve`, or the engine's own base."""

import asyncio
import json
import re
import threading
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from live_server import MODEL
from test_teachers import Mortal, Words, distil, mortal, teacher  # noqa: F401 - fixtures

from paceline.algorithms import AlgorithmError
from paceline.clients.frozen import attach
from paceline.config import FiltersConfig, RunConfig
from paceline.config.env import CustomEnvConfig
from paceline.config.inference import SamplingConfig
from paceline.config.model import LoRAConfig, ModelConfig, ModelRef
from paceline.config.trainer import KLConfig, OptimizerConfig, TrainerConfig
from paceline.data import decode
from paceline.orchestrator import KLReferenceModel
from paceline.orchestrator.kl_reference import token_penalty

FAST = OptimizerConfig(lr=1e-2)
ENV = [CustomEnvConfig(name="words", import_path="x:y")]


class Unequal(Words):
    """Every other rollout is paid."""

    async def play(self, example, seats):
        outcome = await super().play(example, seats)
        return replace(outcome, rewards=dict.fromkeys(outcome.rewards, float(self.played % 2)))


def held(server, tmp_path, kl: KLConfig, words: Words | None = None, **more):
    """A synchronous run of batches of eight that moves fast."""
    settings = {"env": ENV, "steps": 3, "filters": FiltersConfig(zero_advantage=False), **more}
    trainer = TrainerConfig(threads=1, optimizer=FAST, kl=kl)
    return distil(server, words or Unequal(), tmp_path, trainer=trainer, **settings)


def at(server) -> ModelRef:
    return ModelRef(name=MODEL, base_url=[f"http://127.0.0.1:{server.port}/v1"] * 2, concurrency=2)


def batches(run) -> list[list]:
    return [decode(next(run.directory.glob(f"batches/*{line['step']}.*")).read_bytes()) for line in run.metrics]


@pytest.mark.parametrize("how", ["loss", "advantage"])
def test_an_endpoint_holds_the_policy_as_the_trainers_own_copy_does(mortal, tmp_path, how):  # noqa: F811
    """Of the same model, in runs that repeat."""
    runs = {
        name: held(
            mortal, tmp_path, KLConfig(how=how, coef=0.5, reference=reference), name=name, deterministic=True, steps=3
        )
        for name, reference in (("own", "base"), ("served", at(mortal)))
    }
    assert {run.outcome.status for run in runs.values()} == {"finished"}, runs["served"].error
    own, served = ([line["kl"] for line in run.metrics] for run in runs.values())
    assert own[-1] > 1e-3
    assert served == pytest.approx(own, rel=0.02, abs=1e-5)
    assert all(sample.kl_ref_logprobs is not None for batch in batches(runs["served"]) for sample in batch)
    assert all(sample.kl_ref_logprobs is None for batch in batches(runs["own"]) for sample in batch)


@pytest.mark.parametrize("where", ["endpoint", "engine"])
def test_the_reward_loses_kl_to_an_endpoint_or_to_the_base_under_an_adapter(mortal, tmp_path, where):  # noqa: F811
    reference = at(mortal) if where == "endpoint" else "base"
    kl = KLConfig(how="reward", kind="k3", coef=0.1, reference=reference)
    lively = SamplingConfig(max_tokens=8, temperature=2.0)
    done = held(mortal, tmp_path, kl, model=ModelConfig(lora=LoRAConfig(rank=4)), sampling=lively)
    assert done.outcome.status == "finished", done.error
    penalties = [line["metric/words/kl/penalty"] for line in done.metrics]
    assert penalties[0] == pytest.approx(0, abs=1e-3), "at first the policy is its reference"
    assert penalties[-1] > 1e-2
    for batch, penalty in zip(batches(done), penalties, strict=True):
        assert all(sample.kl_ref_logprobs is not None for sample in batch)
        assert penalty == pytest.approx(sum(token_penalty(kl, sample).sum() for sample in batch) / 8, abs=1e-6)
    paid = [line["reward/words/mean"] * 8 for line in done.metrics]
    assert paid == pytest.approx([round(rewards) for rewards in paid], abs=1e-6), "the metric is what was paid"


def test_an_endpoint_that_dies_costs_rollouts_and_then_stops_the_run_with_its_cause(mortal, tmp_path, monkeypatch):  # noqa: F811
    def die() -> None:
        mortal.die()
        monkeypatch.setattr("paceline.algorithms.reference_scorer.SECONDS", 2.0)

    done = held(mortal, tmp_path, KLConfig(how="reward", reference=at(mortal)), Words(_11=die))
    assert done.outcome.status == "failed"
    for part in ("gave no KL for the reward", "does not answer"):
        assert part in str(done.error)
    assert len(done.metrics) == 1
    monkeypatch.undo()
    mortal.live()
    again = held(mortal, tmp_path, KLConfig(how="reward", reference=at(mortal)), resume="latest")
    assert again.outcome.status == "finished", again.error
    assert [line["batch/samples"] for line in again.metrics] == [8, 8, 8]


def test_a_batch_whose_endpoint_stays_away_loses_its_samples_under_a_reason(mortal, tmp_path, monkeypatch):  # noqa: F811
    def die() -> None:
        mortal.die()
        monkeypatch.setattr("paceline.algorithms.reference_scorer.SECONDS", 2.0)

    done = held(mortal, tmp_path, KLConfig(reference=at(mortal)), Words(_11=die), steps=6)
    assert done.outcome.status == "failed"
    assert "scored nothing in 3 batches" in str(done.error)
    assert [line.get("dropped/reference_failed", 0) for line in done.metrics] == [0, 8, 8]


# --- what cannot be a reference is refused at the start


class NoScores(BaseHTTPRequestHandler):
    """An endpoint that samples, and says nothing of how likely a prompt is."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        ids = self.server.tokenizer.encode(body["prompt"]) if isinstance(body["prompt"], str) else body["prompt"]
        self._answer(200, {"choices": [{"text": "", "prompt_token_ids": ids, "token_ids": [1]}]})

    def do_GET(self) -> None:
        self._answer(404, {"error": {"message": "not here"}})

    def _answer(self, status: int, body: dict) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_) -> None: ...


@pytest.fixture
def silent(load):
    server = ThreadingHTTPServer(("127.0.0.1", 0), NoScores)
    server.tokenizer = load("quickstart")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join(10)


def test_an_endpoint_that_gives_no_scores_or_does_not_answer_is_refused_before_anything_trains(silent, tmp_path):
    class Server:
        port = silent

    done = held(Server, tmp_path, KLConfig(reference=at(Server)))
    assert done.outcome.status == "failed"
    url = f"http://127.0.0.1:{silent}/v1"
    assert f"trainer.kl.reference: `{MODEL}` at {url} and {url} cannot score" in str(done.error)
    assert not done.metrics

    class Nothing:
        port = 9  # discard: nothing listens there

    done = held(Nothing, tmp_path, KLConfig(how="reward", reference=at(Nothing)))
    assert done.outcome.status == "failed"
    assert "trainer.kl.reference: http://127.0.0.1:9 does not answer" in str(done.error)


def test_a_reference_of_another_vocabulary_is_refused(teacher, load):  # noqa: F811
    kl = KLConfig(reference=ModelRef(name=MODEL, base_url=f"{teacher.url}/v1"))
    config = RunConfig(trainer=TrainerConfig(kl=kl))
    where = re.escape(f"trainer.kl.reference: `{MODEL}` at {teacher.url}/v1 has another vocabulary than the policy")
    client = SimpleNamespace(sampling=SamplingConfig())
    with pytest.raises(AlgorithmError, match=where):
        asyncio.run(KLReferenceModel.connect(config, client, partial(attach, tokenizer=load("qwen2_5")), None))
