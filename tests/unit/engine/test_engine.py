"""The engine's laws: what it samples, from which weights, whatever else is being served."""

import asyncio
import random
import threading
import time

import numpy as np
import pytest
import torch

from backends import PAGES, SlotCache, apply_top_k_top_p, engine_of, inverse_cdf, paged, sample, uniform
from conftest import VOCABULARY, tiny_model
from engine_requests import complete, requests, serve, together, trainer_logprobs, until
from paceline.config.inference import EngineConfig
from paceline.config.trainer import TrainerConfig
from paceline.data import Ticket
from paceline.engine import Completion, GenerateRequest, noise_key
from paceline.engine.runner import SamplingMetadata
from paceline.engine.scheduler import Scheduler
from paceline.errors import EngineError, RequestError
from paceline.model import WeightUpdate, clone_model, fingerprint
from paceline.model.support import cache_shape
from paceline.rollout import Rollout, Turn, assemble
from paceline.weights.update import POLICY_MODEL
from trainers import trainer_of


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"prefill_tokens": 16, "max_running": 8},
        {"prefill_tokens": 5, "max_running": 4},
        paged({"cache": "pages"}),
        paged({"cache": "pages", "prefill_tokens": 16, "max_running": 8}),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_engine_logprobs_equal_trainer_logprobs(model, config, seed):
    """Continuous batching, chunked prefill and shared prompts change nothing: same tokens, same log probabilities."""
    wanted = requests(groups=8, seed=seed)
    for request, completion in zip(wanted, complete(clone_model(model), wanted, **config), strict=True):
        expected = trainer_logprobs(model, request, completion)
        assert np.abs(expected.numpy() - np.array(completion.logprobs)).max() < 1e-4


def test_a_request_does_not_depend_on_who_else_is_served(model):
    """Alone or in a crowd, in any order of arrival, the same noise key draws the same tokens."""
    wanted = requests()
    crowd = complete(clone_model(model), wanted, order=random.Random(3).sample(range(len(wanted)), len(wanted)))
    alone = [complete(clone_model(model), [request])[0] for request in wanted[::4]]
    assert [c.token_ids for c in crowd[::4]] == [c.token_ids for c in alone]


@pytest.mark.parametrize("cache", ["slots", pytest.param("pages", marks=PAGES)])
def test_deterministic_is_bit_for_bit_in_any_order(model, cache):
    wanted = requests(groups=8)
    runs = [
        complete(
            clone_model(model),
            wanted,
            random.Random(s).sample(range(24), 24),
            deterministic=True,
            max_running=7,
            cache=cache,
        )
        for s in range(3)
    ]
    assert runs[0] == runs[1] == runs[2]


def test_the_end_of_turn_token_is_kept(model):
    ends = frozenset(range(0, VOCABULARY, 3))
    for completion in complete(clone_model(model), requests(stop_token_ids=ends, max_tokens=30)):
        stopped = [token in ends for token in completion.token_ids]
        assert not any(stopped[:-1])
        assert stopped[-1] == (completion.finish == "stop")
        assert len(completion.token_ids) == len(completion.logprobs) == len(completion.versions) <= 30


def test_a_common_prompt_is_computed_once(model):
    """Members of a group copy the prompt's cache instead of computing it again."""
    prompt = tuple(range(40))
    wanted = [GenerateRequest(prompt_ids=prompt, max_tokens=4, noise=i) for i in range(16)]
    computed = []

    async def work(engine):
        launch = engine._runner.launch
        engine._runner.launch = lambda chunks: (computed.extend(c.length for c in chunks), launch(chunks))[1]
        await asyncio.gather(*(engine.generate(request) for request in wanted))

    serve(clone_model(model), work, max_running=16)
    assert sum(computed) == len(prompt) + 15 + 16 * 3  # the leader's prompt, one token per follower, three steps each


ASKED = GenerateRequest(prompt_ids=(1, 2, 3, 4), max_tokens=20, noise=5)


def swap_midway(model, other, on_swap: str, when: int = 6) -> tuple[GenerateRequest, Completion]:
    """One request whose weights change after `when` sampled tokens, exactly between two steps."""
    request = ASKED

    async def work(engine):
        step = engine._step

        def stepping():
            step()
            if engine.tokens == when and engine._served.versions[POLICY_MODEL] == 0:
                engine._apply_update(engine._weights.stage(WeightUpdate(1, dict(other.named_parameters()))))

        engine._step = stepping
        return await engine.generate(request)

    return request, serve(clone_model(model), work, on_swap=on_swap)


@pytest.mark.parametrize("on_swap", ["keep", "recompute"])
def test_a_swap_shows_in_the_next_token_and_never_in_an_earlier_one(on_swap):
    old, new = tiny_model(0), tiny_model(1)
    request, completion = swap_midway(old, new, on_swap)
    assert completion.versions == [0] * 6 + [1] * 14
    logprobs = np.array(completion.logprobs)
    before = trainer_logprobs(old, request, completion).numpy()
    after = trainer_logprobs(new, request, completion).numpy()
    assert np.abs(before - logprobs)[:6].max() < 1e-4
    assert np.abs(before - logprobs)[6:].max() > 0.1
    assert completion.recomputed == (on_swap == "recompute")
    # Recomputed, the tokens after the swap are exactly the new policy's; kept, they still see the old cache.
    assert (np.abs(after - logprobs)[6:].max() < 1e-4) == (on_swap == "recompute")


@pytest.mark.parametrize("on_swap", ["keep", "recompute"])
def test_numerics_is_other_kernels_alone_and_kept_keys_have_a_metric_of_their_own(on_swap):
    old, new = tiny_model(0), tiny_model(1)
    turns = []
    for said in (swap_midway(old, new, on_swap)[1], complete(new, [ASKED])[0]):
        turns.append(
            Turn(
                prompt_ids=list(ASKED.prompt_ids),
                completion_ids=said.token_ids,
                logprobs=said.logprobs,
                versions=said.versions if len(set(said.versions)) > 1 else [1] * len(said.versions),
                finish=said.finish,
                temperature=ASKED.temperature,
                recomputed=said.recomputed,
            )
        )
    samples = [
        sample.with_streams(advantages=sample.loss_mask)
        for member, turn in enumerate(turns)
        for sample in assemble(Rollout(ticket=Ticket(0, "toy", 0, 0, 0), member=member, turns=[turn]))
    ]

    async def step():
        trainer = trainer_of(tiny_model(1), TrainerConfig(optimizer={"lr": 0.0}))
        trainer.version = 1  # the weights that sampled last
        try:
            return (await trainer.step(samples)).metrics
        finally:
            trainer.close()

    metrics = asyncio.run(step())
    assert metrics["mismatch/numerics"] == metrics["mismatch_kl"] < 1e-8
    assert ("mismatch/kv_kept" in metrics) == (on_swap == "keep")
    assert metrics.get("mismatch/kv_kept", 1.0) > 1e-4
    assert metrics["mismatch/staleness"] > 1e-2, "six tokens are of the old weights, whatever became of their keys"


def test_a_prompt_is_never_shared_across_versions(model):
    """A request admitted after a swap computes its prompt with the new weights, though the old cache is at hand."""
    other = tiny_model(1)
    request = GenerateRequest(prompt_ids=tuple(range(30)), max_tokens=60, noise=1)

    async def work(engine):
        (first,) = await together(engine, [request], stop_at=3)
        await engine.load_weights(WeightUpdate(1, dict(other.named_parameters())))
        await engine.resume()
        return await engine.generate(request), await first

    second, first = serve(clone_model(model), work)
    assert set(second.versions) == {1}
    assert first.versions == [0] * 3 + [1] * 57
    assert np.abs(trainer_logprobs(other, request, second).numpy() - np.array(second.logprobs)).max() < 1e-4


def test_the_engine_tells_which_weights_it_serves(model):
    other = tiny_model(1)

    async def work(engine):
        before = await engine.policy()
        await engine.load_weights(WeightUpdate(7, dict(other.named_parameters())))
        return before, await engine.policy()

    before, after = serve(clone_model(model), work)
    assert (before.version, before.fingerprint) == (0, fingerprint(model.named_parameters()))
    assert (after.version, after.fingerprint) == (7, fingerprint(other.named_parameters()))
    assert before.fingerprint != after.fingerprint


def test_fingerprint_sees_every_bit_and_every_place(model):
    parameters = dict(model.named_parameters())
    whole = fingerprint(parameters.items())
    name, tensor = next(iter(parameters.items()))
    for change in (lambda t: t.view(-1)[7].mul_(1 + 1e-6), lambda t: t.copy_(t.flip(0))):
        changed = tensor.detach().clone()
        change(changed)
        assert fingerprint((parameters | {name: changed}).items()) != whole


def test_bad_requests_are_refused_and_others_go_on(model):
    async def work(engine):
        for bad in ((), tuple(range(50)) * 3):
            with pytest.raises(RequestError):
                await engine.generate(GenerateRequest(prompt_ids=bad, max_tokens=2))
        with pytest.raises(EngineError, match="does not have"):
            await engine.load_weights(WeightUpdate(1, {"nobody": torch.zeros(1)}))
        long = await engine.generate(GenerateRequest(prompt_ids=(1,) * 120, max_tokens=1000))
        return long

    assert len(serve(clone_model(model), work).token_ids) == 8  # the context of 128 ends it


def test_a_request_that_is_abandoned_while_it_ends_harms_no_other(model):
    """Its future is cancelled, and the engine is told so only after several of its steps have landed."""
    engine = engine_of(model, EngineConfig(threads=1, in_flight=3))
    engine.start()
    told, doomed = threading.Event(), []
    launch, enqueue = engine._runner.launch, engine._enqueue

    def launch_late(chunks):
        if doomed:
            future = doomed.pop()
            tell = future._invoke_callbacks
            future._invoke_callbacks = lambda: (told.wait(240), tell())
            threading.Thread(target=future.cancel, daemon=True).start()
            while not future.cancelled():
                time.sleep(0.001)
        return launch(chunks)

    try:
        engine._runner.launch = launch_late
        engine._enqueue = lambda sequence: doomed.append(sequence.future) or enqueue(sequence)
        engine.submit(GenerateRequest(prompt_ids=(1, 2, 3), max_tokens=20, stop_token_ids=tuple(range(VOCABULARY))))
        engine._enqueue = enqueue
        answer = engine.submit(GenerateRequest(prompt_ids=(1, 2, 3), max_tokens=4)).result(240)
        assert len(answer.token_ids) == 4
        assert not doomed
    finally:
        told.set()
        engine.close()


def test_cancelled_requests_leave_and_their_slots_are_used_again(model):
    async def work(engine):
        doomed = await together(engine, requests(max_tokens=100), stop_at=5)
        for task in doomed:
            task.cancel()
        await asyncio.wait(doomed)
        assert all(task.cancelled() for task in doomed)
        await engine.resume()
        kept = await engine.generate(GenerateRequest(prompt_ids=(1, 2), max_tokens=3))
        await until(lambda: engine._scheduler.is_idle)
        return kept, engine._cache.usage

    kept, used = serve(clone_model(model), work, max_running=4)
    assert len(kept.token_ids) == 3
    assert used == 0


def test_not_finite_logits_fail_the_request_by_name(model):
    broken = clone_model(model)
    with torch.no_grad():
        next(broken.parameters()).fill_(float("nan"))
    with pytest.raises(EngineError, match="not finite"):
        complete(broken, requests(groups=1, members=1))


def test_an_engine_that_breaks_fails_every_request_with_the_cause(model):
    async def work(engine):
        engine._runner.launch = lambda chunks: 1 / 0
        answers = await asyncio.gather(*(engine.generate(r) for r in requests()), return_exceptions=True)
        with pytest.raises(EngineError, match="division by zero"):
            await engine.generate(requests()[0])
        return answers

    assert all(isinstance(answer, EngineError) for answer in serve(clone_model(model), work))


def test_an_engine_that_breaks_answers_what_was_still_on_its_way(model):
    """Weights, scores and requests queued behind the step that failed get the cause and never hang."""

    async def work(engine):
        stepping, asked = threading.Event(), threading.Event()

        def fail(chunks):
            stepping.set()
            assert asked.wait(240)
            raise RuntimeError("out of memory")

        engine._runner.launch = fail
        first = asyncio.create_task(engine.generate(requests()[0]))
        await until(stepping.is_set)
        update = WeightUpdate(1, dict(model.named_parameters()))
        late = [engine.policy(), engine.generate(requests()[1]), engine.load_weights(update)]
        tasks = [first, *map(asyncio.ensure_future, late)]
        await until(lambda: engine._inbox.qsize() == len(late))
        asked.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    answers = serve(clone_model(model), work)
    assert all(isinstance(answer, EngineError) and "out of memory" in str(answer) for answer in answers)


def test_a_cancelled_policy_request_does_no_harm(model):
    async def work(engine):
        asked = asyncio.create_task(engine.policy())
        await asyncio.sleep(0)
        asked.cancel()
        return await engine.generate(GenerateRequest(prompt_ids=(1, 2), max_tokens=3))

    assert len(serve(clone_model(model), work).token_ids) == 3


def draws(rows: int, **settings) -> SamplingMetadata:
    values = {"temperatures": 1.0, "top_p": 1.0, "top_k": 0} | settings
    keys = torch.full((rows,), noise_key(11))
    return SamplingMetadata(
        temperatures=torch.full((rows,), float(values["temperatures"])),
        top_p=torch.full((rows,), float(values["top_p"])),
        top_k=torch.full((rows,), int(values["top_k"])),
        keys=keys,
        indices=torch.arange(rows),
        truncates=values["top_p"] < 1 or values["top_k"] > 0,
        greedy=values["temperatures"] == 0,
    )


def test_samples_follow_the_distribution():
    """A chi-square test over 40,000 draws, at two temperatures and a vocabulary of more than one block."""
    torch.manual_seed(0)
    logits = torch.randn(1500) * 2
    for temperature in (0.7, 1.3):
        tokens, logprobs, *_ = sample(logits.expand(40_000, -1), draws(40_000, temperatures=temperature))
        probs = torch.softmax(logits / temperature, -1)
        counts = torch.bincount(tokens, minlength=1500)
        often = probs * 40_000 > 10
        chi2 = ((counts - probs * 40_000) ** 2 / (probs * 40_000))[often].sum()
        assert chi2 < often.sum() + 4 * (2 * often.sum()) ** 0.5
        assert torch.allclose(logprobs, probs.log()[tokens], atol=1e-5)


def test_truncation_keeps_exactly_the_top():
    probs = torch.tensor([[0.1, 0.4, 0.2, 0.3]])
    assert apply_top_k_top_p(probs, torch.tensor([0.7]), torch.tensor([0])).tolist() == [
        [0.0, pytest.approx(0.4), 0.0, pytest.approx(0.3)]
    ]
    assert apply_top_k_top_p(probs, torch.tensor([1.0]), torch.tensor([1])).count_nonzero() == 1
    for tiny in (1e-9, 5e-324):  # the second is zero in float32
        assert apply_top_k_top_p(probs, torch.tensor([tiny]), torch.tensor([0])).count_nonzero() == 1
    tokens, logprobs, log_z, _ = sample(probs.log().expand(500, -1), draws(500, top_k=2))
    assert set(tokens.tolist()) == {1, 3}
    # Log probabilities stay those of the full vocabulary; what was cut is reported beside them.
    assert torch.allclose(logprobs, probs[0].log()[tokens])
    assert log_z.exp().tolist() == pytest.approx([0.7] * 500)


def test_temperature_zero_is_greedy():
    logits = torch.randn(50, 97)
    assert sample(logits, draws(50, temperatures=0.0)).tokens.equal(logits.argmax(-1))


def test_noise_is_a_pure_function_and_uniform():
    keys = torch.tensor([noise_key(1, 2, 3), noise_key(1, 2, 4), noise_key(1, 2, 3)])
    u = uniform(keys, torch.tensor([0, 0, 0]))
    assert u[0] == u[2] != u[1]
    many = uniform(torch.full((100_000,), noise_key(9)), torch.arange(100_000))
    assert many.min() >= 0
    assert many.max() < 1
    assert abs(many.mean() - 0.5) < 0.005
    assert abs(np.corrcoef(many[:-1], many[1:])[0, 1]) < 0.01


def test_inverse_cdf_never_picks_what_has_no_mass():
    edges = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    for size in (600, 3000):
        probs = torch.zeros(3, size)
        probs[:, [3, size - 1]] = 0.5
        assert inverse_cdf(probs, edges).tolist() == [3, size - 1, size - 1]
        probs[:, size - 1] = 0.0
        assert inverse_cdf(probs, edges).tolist() == [3, 3, 3]


def test_requests_queue_by_order_then_arrival(model):
    """Older tickets first, whichever arrives first."""
    cache = SlotCache(cache_shape(model), 1, 16, 16, torch.float32, "cpu")
    scheduler = Scheduler(cache, prefill_tokens=100)
    from concurrent.futures import Future

    from paceline.engine.sequence import DecodeSequence

    for order in (5, 1, 3, 1):
        request = GenerateRequest(prompt_ids=(1, order), max_tokens=2, order=order)
        scheduler.add(DecodeSequence(request, Future(), [1, order], limit=4))
    served = []
    while chunks := scheduler.schedule():
        served.append(chunks[0].sequence.request.order)
        scheduler.land(chunks[0])
        scheduler.release(chunks[0].sequence)
    assert served == [1, 1, 3, 5]


def test_the_statistics_of_an_engine_that_stopped_say_so_at_once(model):
    """`/health` asks for them, and must not wait for a thread that works or is gone."""

    async def work(engine):
        await engine.stats()
        engine._inbox.put(lambda: 1 // 0)
        await until(lambda: engine._failure is not None)
        with pytest.raises(EngineError, match="the engine stopped: integer division"):
            await engine.stats()

    serve(model, work)
