"""The laws of knowing one's weights: each turn names the bits it was drawn from, and each kind of mismatch between
sampler and trainer shows under its own name and no other."""

import asyncio
import contextlib
import dataclasses

import httpx
import msgspec
import numpy as np
import pytest
import torch

from conftest import tiny_model
from engine_requests import linked, requests, serve, stopped_at, together, trainer_logprobs
from engines import MATRIX, random_adapter
from paceline.clients.http import HttpEngine
from paceline.config import inference
from paceline.config import trainer as config
from paceline.data import Sample, Ticket
from paceline.engine import Completion, EmbeddedEngine, GenerateRequest
from paceline.errors import EngineError, Mismatch
from paceline.model import Adapter, LMHead, WeightUpdate, clone_model, fingerprint
from paceline.model.head import make_canary
from paceline.orchestrator import saved_groups
from paceline.orchestrator.admission import Tally
from paceline.orchestrator.metrics import batch_metrics
from paceline.orchestrator.saved_groups import DispatcherState, decode_groups, encode_groups
from paceline.rollout import Group, Rollout, Turn, assemble
from paceline.rollout.assemble import count_rewritten_turns
from paceline.server import build_app
from paceline.trainer import TorchTrainer
from rollouts import group
from samples import PLAIN, make_batch, plain_logprobs

POLICIES = [tiny_model(seed) for seed in range(3)]
MARKS = [fingerprint(model.named_parameters()) for model in POLICIES]


def update(version: int, policy: int, **more) -> WeightUpdate:
    return WeightUpdate(version, dict(POLICIES[policy].named_parameters()), **more)


def ask(number: int = 0, tokens: int = 12, **more) -> GenerateRequest:
    return GenerateRequest(prompt_ids=(1, 2, 3, *range(40), number), max_tokens=tokens, noise=number, **more)


# -- version and fingerprint on every turn ----------------------------------------------------------------------------


@pytest.mark.parametrize("config", MATRIX)
def test_a_completion_names_exactly_the_weights_its_tokens_were_drawn_from(config):
    """Swaps at random moments, versions that skip and go back: every version among its tokens is named with the
    fingerprint of what was served then, nothing else is, and completions of the same weights share one mapping."""

    async def work(engine):
        await engine.load_weights(update(5, 0))
        tasks = await together(engine, requests(groups=4, members=2, seed=3, max_tokens=20), stop_at=30)
        await engine.load_weights(update(9, 1))
        await stopped_at(engine, 60)
        await engine.load_weights(update(8, 0))  # no request samples from it
        await engine.load_weights(update(7, 2))
        await engine.resume()
        return await asyncio.gather(*tasks)

    marks = {5: MARKS[0], 9: MARKS[1], 7: MARKS[2]}
    done = serve(clone_model(POLICIES[1]), work, max_running=5, **config)
    assert {v for c in done for v in c.versions} == marks.keys()
    for completion in done:
        assert completion.weights == {version: marks[version] for version in set(completion.versions)}
    pure = [c.weights for c in done if set(c.versions) == {7}]
    assert len({id(weights) for weights in pure}) == 1


def test_unchecked_weights_have_no_name_and_adapters_have_their_own():
    adapter = random_adapter(POLICIES[0], 1)

    async def work(engine):
        await engine.load_weights(WeightUpdate(4, adapter, Adapter("", 1.0)))
        await engine.load_weights(WeightUpdate(6, random_adapter(POLICIES[0], 2), Adapter("other", 1.0)))
        return [await engine.generate(ask(model=name)) for name in ("", "other", "base")]

    policy, other, base = serve(clone_model(POLICIES[0]), work, adapters=2, adapter_rank=4)
    assert policy.weights == {4: fingerprint(adapter.items())}
    assert list(other.weights) == [6]
    assert base.weights == {}

    async def unchecked(engine):
        await engine.load_weights(update(1, 1))
        return await engine.generate(ask())

    assert serve(clone_model(POLICIES[0]), unchecked, verify_weights=False).weights == {}


@pytest.mark.parametrize("config", MATRIX)
def test_a_number_that_comes_again_with_other_weights_begins_what_is_under_way_anew(config):
    """After a roll-back version 2 is trained once more. No completion holds tokens of both, and what is served is what
    the new weights alone give."""
    wanted = [ask(number, tokens=30) for number in range(3)]

    async def work(engine):
        await engine.load_weights(update(2, 0))
        tasks = await together(engine, wanted, stop_at=9)
        await engine.load_weights(update(2, 0))  # the same once more changes nothing
        await stopped_at(engine, 18)
        await engine.load_weights(update(1, 2))
        await stopped_at(engine, 27)
        await engine.load_weights(update(2, 1))
        await engine.resume()
        return await asyncio.gather(*tasks)

    for request, completion in zip(wanted, serve(clone_model(POLICIES[0]), work, max_running=4, **config), strict=True):
        assert set(completion.versions) == {2}
        assert completion.weights == {2: MARKS[1]}
        exact = trainer_logprobs(POLICIES[1], request, completion)
        assert np.abs(exact.numpy() - completion.logprobs).max() < 1e-4


def test_a_stream_that_told_of_the_old_tokens_is_refused_instead():
    async def work(engine):
        await engine.load_weights(update(2, 0))
        (task,) = await together(engine, [ask(tokens=30)], listeners=[lambda piece: None], stop_at=3)
        await engine.load_weights(update(2, 1))
        await engine.resume()
        with pytest.raises(EngineError, match="version 2 has other weights now"):
            await task
        return (await engine.generate(ask(1))).weights

    assert serve(clone_model(POLICIES[0]), work) == {2: MARKS[1]}


@pytest.mark.parametrize("config", MATRIX)
@pytest.mark.parametrize("versions", [(3, 3), (3, 1), (3, 0)], ids=["again", "back", "back to the first"])
def test_no_key_crosses_a_swap_whatever_the_numbers_are(config, versions):
    """The prompt's pages were filled under a version of the same number: they are computed anew all the same."""

    async def work(engine):
        shared = []
        for version, policy in zip(versions, (0, 1), strict=True):
            await engine.load_weights(update(version, policy))
            await engine.generate(ask(0))
            shared.append(await engine.generate(ask(0)))
            last = await engine.generate(ask(1))
        await engine.load_weights(update(versions[0], 2))
        return shared, last, await engine.generate(ask(0))

    shared, last, after = serve(clone_model(POLICIES[2]), work, **config)
    assert min(completion.cached for completion in shared) >= 32  # within one version they are shared
    assert after.cached == 0
    for policy, request, completion in ((0, ask(0), shared[0]), (1, ask(0), shared[1]), (1, ask(1), last)):
        exact = trainer_logprobs(POLICIES[policy], request, completion)
        assert np.abs(exact.numpy() - completion.logprobs).max() < 1e-4
    assert np.abs(trainer_logprobs(POLICIES[2], ask(0), after).numpy() - after.logprobs).max() < 1e-4


# -- over the link and over HTTP --------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def over_http(engine, tokenizer, monkeypatch, folder):
    """The real application around a real engine, and the real client, without a socket between."""
    app = build_app(engine, tokenizer, [], name="tiny", api_key="k", allowed=[folder], max_body_bytes=1 << 26)
    client = HttpEngine("http://here", folder=folder)
    transport, bearer = httpx.ASGITransport(app), {"Authorization": "Bearer k"}
    wire = httpx.AsyncClient(transport=transport, base_url="http://here", headers=bearer)
    async with app.router.lifespan_context(app), wire:
        monkeypatch.setattr(client, "_client", lambda: wire)
        yield client


@contextlib.contextmanager
def running(**settings):
    engine = EmbeddedEngine(clone_model(POLICIES[0]), inference.EngineConfig(threads=1, **settings))
    engine.start()
    try:
        yield engine
    finally:
        engine.close()


async def laws_over(client) -> None:
    """A proved update is named by what follows; a wrong canary or fingerprint is a `Mismatch`, and nothing is sampled
    from it until a good update comes."""
    right, wrong = (make_canary(POLICIES[p], LMHead(POLICIES[p])) for p in (1, 2))
    await client.load_weights(update(1, 1, expected=MARKS[1], canary=right))
    done = await client.generate(ask())
    assert (done.weights, set(done.versions)) == ({1: MARKS[1]}, {1})
    with pytest.raises(Mismatch, match="version 2 are damaged"):
        await client.load_weights(update(2, 2, expected=MARKS[1]))
    assert (await client.generate(ask())).weights == {1: MARKS[1]}
    with pytest.raises(Mismatch, match="version 3 failed its canary"):
        await client.load_weights(update(3, 1, canary=wrong))
    with pytest.raises(EngineError, match="version 3 failed its canary"):
        await client.generate(ask())
    await client.load_weights(update(4, 2, canary=wrong))
    assert (await client.generate(ask())).weights == {4: MARKS[2]}


def test_fingerprints_and_canaries_cross_the_link():
    with running() as engine, linked(engine) as link:
        asyncio.run(asyncio.wait_for(laws_over(link), 240))


def test_fingerprints_and_canaries_cross_http(load, monkeypatch, tmp_path):
    async def check(engine):
        async with over_http(engine, load("quickstart"), monkeypatch, tmp_path) as client:
            await laws_over(client)
            broken = make_canary(POLICIES[1], LMHead(POLICIES[1]))
            broken = dataclasses.replace(broken, logprobs=(float("nan"),) * len(broken.logprobs))
            with pytest.raises(Mismatch, match="not finite: its weights are broken"):
                await client.load_weights(update(5, 1, canary=broken))

    with running() as engine:
        asyncio.run(asyncio.wait_for(check(engine), 240))


def test_an_adapter_takes_its_canary_along(load, monkeypatch, tmp_path):
    wrong = make_canary(POLICIES[2], LMHead(POLICIES[2]))
    sent = WeightUpdate(1, random_adapter(POLICIES[0], 1), Adapter("", 1.0), canary=wrong)

    async def check(engine):
        async with over_http(engine, load("quickstart"), monkeypatch, tmp_path) as client:
            with pytest.raises(Mismatch, match="failed its canary"):
                await client.load_weights(sent)

    with running(adapters=1, adapter_rank=4) as engine:
        asyncio.run(asyncio.wait_for(check(engine), 240))


# -- in the books -----------------------------------------------------------------------------------------------------


def test_a_turns_weights_are_recorded_and_survive_a_checkpoint():
    held = group()
    (turn,) = held.rollouts[0].turns
    held.rollouts[0].turns = [
        dataclasses.replace(turn, weights={4: "aa"}),
        dataclasses.replace(turn, weights={4: "bb", 5: "cc"}),  # version 4 with other weights
    ]
    assert held.rollouts[0].record()["weights"] == [(4, "aa"), (4, "bb"), (5, "cc")]
    (again,) = decode_groups(encode_groups(DispatcherState([held]))).buffered
    assert again.rollouts[0].turns == held.rollouts[0].turns


def test_a_checkpoint_from_before_turns_had_weights_still_loads(monkeypatch):
    fields = saved_groups._BufferedTurn.__struct_fields__
    names = fields[: fields.index("weights")]
    before = msgspec.defstruct("before", [(name, object) for name in names], array_like=True)
    write = saved_groups._wired_turn
    monkeypatch.setattr(
        saved_groups, "_wired_turn", lambda turn: before(*(getattr(write(turn), name) for name in names))
    )
    data = encode_groups(DispatcherState([group()]))
    monkeypatch.undo()
    (again,) = decode_groups(data).buffered
    assert again.rollouts[0].turns == group().rollouts[0].turns
    assert again.rollouts[0].turns[0].weights == {}


# -- the mismatch, by its causes --------------------------------------------------------------------------------------


def sampled_by(model, version: int, noise: float = 0.0, seed: int = 0) -> list[Sample]:
    """Samples with the log probabilities that a model gives them, perhaps rounded badly."""
    rng = np.random.default_rng(seed)
    out = []
    with torch.no_grad():
        plain = make_batch(seed, count=5, longest=30, **PLAIN)
        for sample, said in zip(plain, plain_logprobs(model, plain), strict=True):
            logprobs = said.numpy() + rng.normal(0, noise, len(sample))
            off = {"logprobs": np.where(sample.loss_mask, logprobs, 0)}
            out.append(sample.with_streams(**off, versions=np.where(sample.loss_mask, version, -1)))
    return out


def trained_on(batch: list[Sample], **settings) -> dict[str, float]:
    trainer = TorchTrainer(tiny_model(0), config.TrainerConfig(threads=1, **settings))
    trainer.version = 3
    metrics = asyncio.run(trainer.step(batch)).metrics
    trainer.close()
    return metrics


def moved(scale: float = 0.02):
    model = tiny_model(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += scale * torch.randn_like(parameter)
    return model


def test_numerics_and_staleness_are_told_apart():
    fresh = trained_on(sampled_by(tiny_model(0), 3))
    assert fresh["mismatch/numerics"] == fresh["mismatch_kl"] < 1e-9
    assert fresh["mismatch/staleness"] == 0

    rounded = trained_on(sampled_by(tiny_model(0), 3, noise=0.1))
    assert rounded["mismatch/numerics"] == pytest.approx(0.005, rel=0.5)  # noise^2 / 2
    assert rounded["mismatch/staleness"] == 0

    old = trained_on([*sampled_by(tiny_model(0), 3), *sampled_by(moved(), 2, seed=1)])
    assert old["mismatch/numerics"] < 1e-9
    assert old["mismatch/staleness"] > 1e-5

    both = trained_on([*sampled_by(tiny_model(0), 3, noise=0.1), *sampled_by(tiny_model(0), 2, noise=0.1, seed=1)])
    assert both["mismatch/numerics"] > 1e-3
    assert both["mismatch/staleness"] < 0.4 * both["mismatch/numerics"]  # old tokens that only numerics moved

    alone = trained_on(sampled_by(moved(), 1))
    assert "mismatch_kl" not in alone
    assert alone["mismatch/staleness"] > 1e-5


def test_neither_depends_on_the_cut():
    batch = [*sampled_by(tiny_model(0), 3, noise=0.1), *sampled_by(moved(), 2, seed=1)]
    whole, cut = (trained_on(batch, micro_batch_tokens=budget) for budget in (10_000, 32))
    for name in ("mismatch/numerics", "mismatch/staleness"):
        assert cut[name] == pytest.approx(whole[name], rel=1e-4)


def played(*turns: Turn) -> Group:
    ticket = Ticket(0, "a", 0, 0, 0)
    rollout = Rollout(ticket=ticket, member=0, turns=list(turns), reward=1.0)
    rollout.samples = assemble(rollout)
    return Group(ticket=ticket, rollouts=[rollout], size=1)


def measured(held: Group) -> dict[str, float]:
    return batch_metrics([held], held.samples(), Tally(), 0)


def turn_of(completion: Completion, prompt: tuple[int, ...]) -> Turn:
    return Turn(
        prompt_ids=list(prompt),
        completion_ids=completion.token_ids,
        logprobs=completion.logprobs,
        versions=completion.versions,
        finish=completion.finish,
        temperature=1.0,
        log_z=completion.log_z,
    )


def test_what_sampling_cuts_away_is_the_divergence_from_the_full_distribution():
    """Against the definition: sum over kept tokens of q log(q / p), token by token of a real completion."""
    plain, cut = ask(tokens=8), ask(tokens=8, top_k=5)

    async def work(engine):
        return [await engine.generate(request) for request in (plain, cut)]

    free, bound = serve(clone_model(POLICIES[0]), work)
    assert measured(played(turn_of(free, plain.prompt_ids)))["mismatch/mask"] == 0
    ids = torch.tensor([[*cut.prompt_ids, *bound.token_ids]])
    model = clone_model(POLICIES[0])
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logp = model(ids).logits[0, len(cut.prompt_ids) - 1 : -1].log_softmax(-1)
    kept = logp.topk(5).values
    q = kept.softmax(-1)
    divergence = (q * (q.log() - kept)).sum(-1).mean().item()
    assert divergence > 0.1
    assert measured(played(turn_of(bound, cut.prompt_ids)))["mismatch/mask"] == pytest.approx(divergence, rel=1e-3)


def said(prompt: list[int], completion: list[int], messages: list[dict] | None = None) -> Turn:
    count = len(completion)
    return Turn(
        prompt_ids=prompt,
        completion_ids=completion,
        logprobs=[-1.0] * count,
        versions=[0] * count,
        finish="stop",
        temperature=1.0,
        messages=messages,
    )


USER, REPLY = {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}


@pytest.mark.parametrize(
    ("turns", "share"),
    [
        ([said([1], [2, 3])], 0),
        ([said([1], [2, 3]), said([1, 2, 3, 4], [5])], 0),
        ([said([1], [2, 3]), said([1, 2, 3, 4], [5]), said([1, 2, 3, 9], [5])], 0),  # a branch
        ([said([1], [2, 3]), said([1], [4, 3])], 0),  # sampled twice from one prompt
        ([said([1], [2, 3], [USER]), said([7], [4, 3], [USER])], 0),  # another conversation
        ([said([1], [2, 3]), said([1, 2, 8, 4], [5])], 1 / 2),  # a thought was dropped from the reply
        ([said([1], [2, 3], [USER]), said([7, 2, 3, 4], [5], [USER, REPLY, USER])], 1 / 2),  # another system prompt
        ([said([1], [2]), said([1, 2, 3], [4]), said([1, 9, 3, 4, 5], [6])], 1 / 3),
        ([said([6, 1], [2], [USER, REPLY, USER]), said([7, 1], [2], [USER, REPLY, USER])], 0),  # written by the task
    ],
)
def test_a_rewritten_past_is_counted_and_a_branch_is_not(turns, share):
    assert measured(played(*turns))["mismatch/template"] == pytest.approx(share)
    assert count_rewritten_turns(turns) == round(share * len(turns))
