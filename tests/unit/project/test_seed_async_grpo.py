"""The run file of `docs/seeds/async_grpo.md` trains with that document's loss."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import tiny_model
from paceline.algorithms import build_algorithm
from paceline.config import load
from paceline.envs import POLICY, build_environment
from paceline.model import clone_model
from paceline.rollout import Group
from paceline.runtime.scorer import Scorer
from paceline.trainer import TorchTrainer
from rollouts import TICKET, rollout
from samples import plain_logprobs

EXAMPLE = Path(__file__).parents[3] / "examples" / "seeds" / "async_grpo" / "run.toml"
LENGTHS = (5, 3, 9, 2, 4, 7, 1, 6)


@pytest.fixture(scope="module")
def run():
    return load(EXAMPLE).config


def group_of(run, rewards) -> Group:
    made = [rollout(reward, (n,), member) for member, (reward, n) in enumerate(zip(rewards, LENGTHS, strict=True))]
    group = Group(ticket=TICKET, rollouts=made, size=len(made))
    build_algorithm(run.env[0].algo).assign(group)
    return group


def test_loss_and_gradient_are_those_of_the_document(run):
    """Over all samples i of all ranks, with o_i sampled tokens in each, and A_i = (r_i - mean) / (std + 1e-4):

    1/N sum_i 1/o_i sum_t [ -A_i log pi + 1e-3 (pi_ref/pi - log(pi_ref/pi) - 1) ]
    """
    rewards = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0]
    group = group_of(run, rewards)
    policy, reference = tiny_model(0), tiny_model(1)
    scorer = Scorer(clone_model(reference), budget=64)
    scorer.start()
    samples = []
    for sample in group.samples():
        ids = sample.token_ids % 60  # of the tiny model's vocabulary
        (scores,) = asyncio.run(scorer.score([ids.tolist()]))
        samples.append(sample.with_streams(token_ids=ids, kl_ref_logprobs=scores))
    scorer.close()

    plain = clone_model(policy).requires_grad_(True)
    raw = np.array(rewards)
    advantages = (raw - raw.mean()) / (raw.std() + 1e-4)
    refs = [scores.detach() for scores in plain_logprobs(reference, samples)]
    total = torch.zeros((), dtype=torch.float64)
    for sample, a, pi, ref in zip(samples, advantages, plain_logprobs(plain, samples), refs, strict=True):
        mask = torch.from_numpy(sample.loss_mask)
        pi, ref = pi[mask].double(), ref[mask].double()
        k3 = (ref - pi).exp() - (ref - pi) - 1
        total = total + (-a * pi + 1e-3 * k3).sum() / mask.sum()
    total = total / len(samples)
    total.backward()

    settings = run.trainer.model_copy(update={"threads": 1, "parallel": type(run.trainer.parallel)()})
    trainer = TorchTrainer(policy, settings)
    gradients = []

    def collect() -> float:
        masters = trainer.learner.optimizer.masters
        gradients.append({name: master.grad.clone() for name, master in masters.items() if master.grad is not None})
        return clip()

    clip, trainer.policy.clip = trainer.policy.clip, collect
    metrics = asyncio.run(trainer.step(samples)).metrics
    trainer.close()
    assert metrics["loss/rl"] + metrics["loss/kl"] == pytest.approx(total.item(), rel=1e-4)
    (got,) = gradients
    wanted = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    apart = sum(float((got[name] - wanted[name]).square().sum()) for name in wanted) ** 0.5
    assert apart < 1e-4 * sum(float(p.square().sum()) for p in wanted.values()) ** 0.5


def test_groups_without_a_difference_count_in_the_mean(run):
    group = group_of(run, [1.0] * 8)
    assert not any(sample.advantages.any() for sample in group.samples())
    assert run.filters.zero_advantage is False


def test_rows_are_token_ids_with_an_answer_that_math_verify_grades(run):
    pytest.importorskip("math_verify", reason="needs the extra `tasks`")
    environment = build_environment(run.env[0])
    row = environment.examples("train")[0]
    answer = row["gt_answer"]
    assert row["input_token_ids"]
    assert "messages" not in row

    async def grade() -> None:
        right, wrong = (answer, f"{answer}.0", rf"\boxed{{{answer}}}"), ("-1", "", "?!")
        for text in right + wrong:
            outcome = await environment.grade(text, row["answer"])
            assert outcome.rewards == {POLICY: float(text in right)}, text
            assert not outcome.metrics["check_failed"]

    asyncio.run(grade())
