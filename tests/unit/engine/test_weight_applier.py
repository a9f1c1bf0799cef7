"""The laws of changing weights: every token was drawn from the weights it names, and a bad update changes nothing."""

import asyncio
import random
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from backends import interfere, torch_only
from conftest import VOCABULARY, tiny_model
from engine_requests import requests, serve, together, trainer_logprobs, until
from engines import MATRIX, merged, random_adapter
from paceline.clients import Pool
from paceline.engine import Completion, GenerateRequest, noise_key
from paceline.errors import DeltaBaseMismatch, EngineError, PartialUpdateError, RequestError, UnknownModel
from paceline.model import Adapter, Canary, LMHead, ServedPolicy, WeightUpdate, clone_model, fingerprint, hidden_states
from paceline.model.attention import sdpa, window_mask
from paceline.model.head import make_canary
from paceline.weights.delta import DeltaEncoder, WeightDelta

POLICIES = [tiny_model(seed) for seed in range(4)]


def weights(version: int) -> dict[str, torch.Tensor]:
    return dict(POLICIES[version].named_parameters())


def gap(expected: torch.Tensor, got: list[float]) -> float:
    return float(np.abs(expected.numpy() - np.array(got)).max())


# -- swaps under load -------------------------------------------------------------------------------------------------


class KeptKeys:
    """A plan that keeps all keys and values, of any weights: each token sees those before it and itself."""

    def __init__(self) -> None:
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}

    def attend(self, layer, q, k, v, scores):
        for store, new in ((self.keys, k), (self.values, v)):
            store[layer] = torch.cat([store[layer], new]) if layer in store else new
        total = len(self.keys[layer])
        mask = window_mask(torch.arange(total - len(q), total), torch.arange(total), scores.window)
        return sdpa(q[None], self.keys[layer][None], self.values[layer][None], scores, mask)[0]


@torch.no_grad()
def replayed_logprobs(request: GenerateRequest, completion: Completion) -> list[float]:
    """Token by token with the weights each one names, over keys that are kept across swaps. The keys of a token are
    made in the step that draws the next one, the prompt's in the step that draws the first."""
    plan, logprobs = KeptKeys(), []
    fresh, at = list(request.prompt_ids), 0
    for token, version in zip(completion.token_ids, completion.versions, strict=True):
        model = POLICIES[version]
        positions = torch.arange(at, at + len(fresh))
        hidden = hidden_states(model.get_decoder(), torch.tensor(fresh), positions, plan)
        logits = LMHead(model)(hidden[-1])
        logprobs.append(torch.log_softmax(logits / request.temperature, -1)[token].item())
        fresh, at = [token], at + len(fresh)
    return logprobs


def under_swaps(config: dict, seed: int) -> list[tuple[GenerateRequest, Completion]]:
    """A crowd of requests whose weights change between random steps, from version 0 to 3."""
    rng = random.Random(seed)
    wanted = [replace(r, max_tokens=rng.randrange(1, 40)) for r in requests(groups=6, members=2, seed=seed)]
    moments = sorted(rng.sample(range(2, 45), 3))

    async def work(engine):
        step = engine._step

        def stepping():
            step()
            version = engine._served.versions[""]
            if version < 3 and engine.steps >= moments[version]:
                engine._apply_update(engine._weights.stage(WeightUpdate(version + 1, weights(version + 1))))

        engine._step = stepping
        answers = await asyncio.gather(*await together(engine, wanted))
        assert engine.swaps == 3
        return answers

    return list(
        zip(wanted, serve(clone_model(POLICIES[0]), work, max_running=5, prefill_tokens=16, **config), strict=True)
    )


@pytest.mark.parametrize("config", MATRIX)
@pytest.mark.parametrize("on_swap", ["keep", "recompute"])
def test_each_token_was_drawn_from_the_weights_it_names(config, on_swap):
    """Kept keys give what a replay of the swaps gives, recomputed ones what the new weights give the whole prefix, and
    a request of one version is exactly that version's, also when its prompt was under way at the swap."""
    pure = mixed = 0
    for request, completion in under_swaps(config | {"on_swap": on_swap}, seed=1):
        versions = completion.versions
        assert versions == sorted(versions)
        scored = {v: trainer_logprobs(POLICIES[v], request, completion) for v in set(versions)}
        if len(scored) == 1 or on_swap == "recompute":
            exact = torch.stack([scored[v][i] for i, v in enumerate(versions)])
            assert gap(exact, completion.logprobs) < 1e-4
            pure += len(scored) == 1
        if len(scored) > 1:
            mixed += 1
            assert completion.recomputed == (on_swap == "recompute")
            wrong = torch.stack([scored[versions[0]][i] for i in range(len(versions))])
            assert gap(wrong, completion.logprobs) > 1e-2
        if on_swap == "keep":
            assert completion.logprobs == pytest.approx(replayed_logprobs(request, completion), abs=1e-4)
    assert pure
    assert mixed


# -- bad updates ------------------------------------------------------------------------------------------------------

NAME = "model.layers.0.mlp.up_proj.weight"
GOOD = POLICIES[1].get_parameter(NAME)
BAD = {
    "empty": WeightUpdate(1, {}),
    "unknown": WeightUpdate(1, {NAME: GOOD, "nobody": torch.zeros(3)}),
    "shape": WeightUpdate(1, {**weights(1), NAME: GOOD[1:]}),
    "dtype": WeightUpdate(1, {**weights(1), NAME: GOOD.half()}),
    "fingerprint": WeightUpdate(1, weights(1), expected=fingerprint(weights(2).items())),
    "adapter": WeightUpdate(1, random_adapter(POLICIES[0], 1), Adapter("x", 1.0)),
    "canary": WeightUpdate(1, weights(1), canary=Canary((1, 2, 3), (0.0, -1.0), 1.0)),
    "canary's token": WeightUpdate(1, weights(1), canary=Canary((1, VOCABULARY), (0.0, -1.0), 1.0)),
}
CROWD = [GenerateRequest(prompt_ids=(1, 2, 3 + i), max_tokens=30, noise=i) for i in range(3)]


@pytest.mark.parametrize("config", MATRIX)
def test_a_refused_update_changes_nothing(config):
    """Neither the weights served nor a bit of what runs meanwhile, and the next good update goes through."""

    async def work(engine):
        undisturbed = await asyncio.gather(*await together(engine, CROWD))
        before = await engine.policy()
        tasks = await together(engine, CROWD, stop_at=93)
        for bad in BAD.values():
            with pytest.raises(EngineError):
                await engine.load_weights(bad)
        assert not any(task.done() for task in tasks)
        await engine.resume()
        disturbed = await asyncio.gather(*tasks)
        assert await engine.policy() == before
        good = WeightUpdate(1, weights(1), expected=fingerprint(weights(1).items()))
        await engine.load_weights(good)
        return undisturbed, disturbed, await engine.policy(), engine.swaps

    undisturbed, disturbed, policy, swaps = serve(clone_model(POLICIES[0]), work, **config)
    assert disturbed == undisturbed
    assert (policy.version, policy.fingerprint, swaps) == (1, fingerprint(weights(1).items()), 1)


@pytest.mark.parametrize("config", MATRIX)
def test_a_failed_canary_closes_the_door_until_a_good_update(config):
    right, wrong = (make_canary(POLICIES[v], LMHead(POLICIES[v])) for v in (1, 2))

    async def work(engine):
        (running,) = await together(engine, [replace(CROWD[0], max_tokens=100)], stop_at=4)
        with pytest.raises(EngineError, match="version 1 failed its canary"):
            await engine.load_weights(WeightUpdate(1, weights(1), canary=wrong))
        for refused in (engine.generate(CROWD[1]), engine.score([[1, 2, 3]])):
            with pytest.raises(EngineError, match="canary"):
                await refused
        with pytest.raises(EngineError, match="serve with `--engine"):  # a refused update makes nothing better
            await engine.load_weights(BAD["adapter"])
        with pytest.raises(EngineError, match="canary"):
            await engine.generate(CROWD[1])
        with pytest.raises(EngineError, match="canary"):  # no request continues with unproved weights
            await running
        await engine.load_weights(WeightUpdate(2, weights(1), canary=right))
        await engine.resume()
        return await engine.generate(CROWD[1])

    assert set(serve(clone_model(POLICIES[0]), work, **config).versions) == {2}


def test_checks_can_be_turned_off():
    wrong = make_canary(POLICIES[2], LMHead(POLICIES[2]))

    async def work(engine):
        await engine.load_weights(WeightUpdate(1, weights(1), expected="0" * 16, canary=wrong))
        return await engine.generate(CROWD[0])

    assert set(serve(clone_model(POLICIES[0]), work, verify_weights=False).versions) == {1}


def test_weights_that_arrive_damaged_close_the_door(monkeypatch):
    """Whatever the engine now holds is not the old version: nothing computed before is found, nothing new begins."""

    async def work(engine):
        await engine.generate(CROWD[0])

        interfere(monkeypatch, lambda number, put, tensor: put(tensor * 1.5))
        with pytest.raises(EngineError, match="does not hold the weights of version 1"):
            await engine.load_weights(WeightUpdate(1, weights(1)))
        with pytest.raises(EngineError, match="does not hold"):
            await engine.generate(CROWD[0])
        monkeypatch.undo()
        await engine.load_weights(WeightUpdate(2, weights(2)))
        return await engine.generate(CROWD[0])

    good = serve(clone_model(POLICIES[0]), work)
    assert gap(trainer_logprobs(POLICIES[2], CROWD[0], good), good.logprobs) < 1e-4


class Gone:
    """A copy that fails at the k-th tensor, as one does that finds no memory; there is room the next time."""

    def __init__(self, at: int) -> None:
        self.at, self.failed = at, False

    def __call__(self, number, put, tensor):
        if number == self.at and not self.failed:
            self.failed = True
            raise torch.OutOfMemoryError(f"no room for tensor {number}")
        put(tensor)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("at", [0, 3, len(weights(0)) - 1])
def test_what_breaks_off_in_the_middle_has_no_name_until_all_weights_come(monkeypatch, at, check):
    """Not a token is answered from the mixture, nothing can build on it, and a whole update makes all good."""
    last = DeltaEncoder(share=9.0)
    last.advance(0, weights(0))
    change = last.advance(1, weights(1))
    assert change is not None

    async def work(engine):
        tasks = await together(engine, CROWD, stop_at=10)
        interfere(monkeypatch, Gone(at))
        with pytest.raises(PartialUpdateError, match=f"version 1 broke off .*no room for tensor {at}"):
            await engine.load_weights(WeightUpdate(1, weights(1)))
        monkeypatch.undo()
        await engine.resume()
        for refused in (*tasks, engine.generate(CROWD[0]), engine.score([[1, 2, 3]])):
            with pytest.raises(PartialUpdateError, match="broke off"):
                await refused
        broken = await engine.policy()
        assert broken.version < 0
        assert (broken.fingerprint == fingerprint(weights(0).items())) == (at == 0)
        for part in (WeightUpdate(1, {}, delta=change), WeightUpdate(1, {NAME: GOOD})):
            with pytest.raises(DeltaBaseMismatch, match="broke off here"):
                await engine.load_weights(part)
            with pytest.raises(PartialUpdateError):
                await engine.generate(CROWD[0])
        await engine.load_weights(WeightUpdate(1, weights(1), delta=change))  # which has all of it beside the delta
        return await asyncio.gather(*map(engine.generate, CROWD)), await engine.policy()

    answers, policy = serve(clone_model(POLICIES[0]), work, verify_weights=check)
    assert policy == ServedPolicy(1, fingerprint(weights(1).items()))
    for request, completion in zip(CROWD, answers, strict=True):
        assert set(completion.versions) == {1}
        assert gap(trainer_logprobs(POLICIES[1], request, completion), completion.logprobs) < 1e-4


@torch_only("MLX takes no deltas")
def test_a_delta_that_breaks_off_in_the_middle_leaves_no_name_either(monkeypatch):
    last = DeltaEncoder(share=9.0)
    last.advance(0, weights(0))
    change = last.advance(1, weights(1))
    assert change is not None

    async def work(engine):
        write = WeightDelta.write

        def half(self, tensors):
            write(self, tensors)
            raise RuntimeError("a kernel failed")

        monkeypatch.setattr(WeightDelta, "write", half)
        with pytest.raises(PartialUpdateError, match="a kernel failed"):
            await engine.load_weights(WeightUpdate(1, {}, delta=change))
        monkeypatch.undo()
        with pytest.raises(DeltaBaseMismatch):
            await engine.load_weights(WeightUpdate(1, {}, delta=change))
        await engine.load_weights(WeightUpdate(1, weights(1)))
        return await engine.generate(CROWD[0])

    good = serve(clone_model(POLICIES[0]), work)
    assert gap(trainer_logprobs(POLICIES[1], CROWD[0], good), good.logprobs) < 1e-4


def test_the_pool_sends_all_weights_to_an_engine_whose_update_broke_off(monkeypatch):
    """Requests that ran are answered, from the new weights alone."""

    async def work(engine):
        pool = Pool([engine])
        await engine.pause()
        asked = [asyncio.ensure_future(pool.generate(request)) for request in CROWD]
        await until(lambda: engine._inbox.qsize() + engine._scheduler.num_waiting == len(CROWD))
        gone = Gone(4)
        interfere(monkeypatch, gone)
        await pool.load_weights(WeightUpdate(1, weights(1)))
        assert gone.failed
        await engine.resume()
        return await asyncio.gather(*asked), await engine.policy()

    answers, policy = serve(clone_model(POLICIES[0]), work)
    assert policy == ServedPolicy(1, fingerprint(weights(1).items()))
    for request, completion in zip(CROWD, answers, strict=True):
        assert gap(trainer_logprobs(POLICIES[1], request, completion), completion.logprobs) < 1e-4


def test_an_update_is_read_and_checked_before_anybody_waits_for_it(monkeypatch):
    """The engine's thread decodes while the tensors are read and their fingerprint is taken."""
    readers = []

    class Read(dict):
        def __getitem__(self, name):
            readers.append(threading.current_thread().name)
            return super().__getitem__(name)

        def items(self):
            readers.append(threading.current_thread().name)
            return super().items()

    async def work(engine):
        await engine.load_weights(WeightUpdate(1, Read(weights(1))))
        assert readers
        assert "paceline-engine" not in readers
        return await engine.policy()

    assert serve(clone_model(POLICIES[0]), work).version == 1


# -- adapters ---------------------------------------------------------------------------------------------------------

LORA = {"adapters": 2, "adapter_rank": 4}
SCALES = {"": 0.5, "named": 1.25}


def adapter_update(name: str, seed: int, version: int = 1, canary: Canary | None = None) -> WeightUpdate:
    return WeightUpdate(version, random_adapter(POLICIES[0], seed), Adapter(name, SCALES[name]), canary=canary)


def mixed_crowd(max_tokens: int = 20) -> list[GenerateRequest]:
    rng, crowd = random.Random(5), []
    for i in range(9):
        prompt = tuple(rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 6, 35])))
        model = ("", "base", "named")[i % 3]
        crowd.append(GenerateRequest(prompt_ids=prompt, max_tokens=max_tokens, noise=noise_key(i), model=model))
    return crowd


@pytest.mark.parametrize("config", MATRIX)
def test_base_policy_and_adapters_run_side_by_side(config):
    """In one batch, each request is answered and scored by its own model and no other."""
    base = POLICIES[0]
    plain = {"base": base} | {
        name: merged(base, random_adapter(base, seed), SCALES[name]) for name, seed in (("", 1), ("named", 2))
    }
    crowd = mixed_crowd()

    async def work(engine):
        canary = make_canary(plain["named"], LMHead(plain["named"]))
        await engine.load_weights(adapter_update("", 1, version=3))
        await engine.load_weights(adapter_update("named", 2, version=8, canary=canary))
        answers = await asyncio.gather(*map(engine.generate, crowd))
        scores = [
            (await engine.score([[*r.prompt_ids, *a.token_ids]], model=r.model))[0]
            for r, a in zip(crowd, answers, strict=True)
        ]
        assert (await engine.limits()).adapters == {"named": 8}
        return answers, scores

    answers, scores = serve(clone_model(base), work, prefill_tokens=20, **LORA, **config)
    for request, answer, score in zip(crowd, answers, scores, strict=True):
        expected = trainer_logprobs(plain[request.model], request, answer)
        assert gap(expected, answer.logprobs) < 1e-4
        assert gap(expected, score[len(request.prompt_ids) :]) < 1e-4
        assert set(answer.versions) == {{"": 3, "named": 8, "base": 0}[request.model]}
        other = trainer_logprobs(plain["named" if request.model != "named" else "base"], request, answer)
        assert gap(other, answer.logprobs) > 1e-2


@pytest.mark.parametrize("config", MATRIX)
@pytest.mark.parametrize("on_swap", ["keep", "recompute"])
def test_an_adapter_update_leaves_the_others_alone(config, on_swap):
    """Requests of other models go on bit for bit; with kept keys even the batches stay the same."""
    crowd = mixed_crowd(25)

    async def run(engine, update):
        await engine.load_weights(adapter_update("", 1))
        await engine.load_weights(adapter_update("named", 2))
        step = engine._step

        def stepping():
            step()
            if update and engine.steps == 9:
                engine._apply_update(engine._weights.stage(adapter_update("named", 3, version=2)))

        engine._step = stepping
        return await asyncio.gather(*await together(engine, crowd))

    still, updated = (
        serve(clone_model(POLICIES[0]), lambda engine, u=update: run(engine, u), on_swap=on_swap, **LORA, **config)
        for update in (False, True)
    )
    for request, before, after in zip(crowd, still, updated, strict=True):
        if request.model == "named":
            assert set(after.versions) == {1, 2}
        elif on_swap == "keep":
            assert after == before
        else:
            assert after.token_ids == before.token_ids
            assert after.logprobs == pytest.approx(before.logprobs, abs=1e-4)


@pytest.mark.parametrize("config", MATRIX)
def test_what_one_model_cannot_say_in_numbers_does_not_stay_in_the_cache(config):
    """An adapter that is finite but overflows fails its requests by name. The next request in their place finds no NaN
    there, which no mask would hide."""
    huge = {name: tensor * 1e25 for name, tensor in random_adapter(POLICIES[0], 1).items()}
    long = GenerateRequest(prompt_ids=tuple(range(40)), max_tokens=5, noise=3)

    async def work(engine):
        await engine.load_weights(WeightUpdate(1, huge, Adapter("named", 1.0)))
        doomed = [engine.generate(replace(long, prompt_ids=(i, *long.prompt_ids), model="named")) for i in range(2)]
        for answer in await asyncio.gather(*doomed, return_exceptions=True):
            assert isinstance(answer, EngineError)
            assert "not finite" in str(answer)
        short = [replace(long, prompt_ids=(i, 5), max_tokens=60) for i in range(2)]
        return list(zip(short, await asyncio.gather(*map(engine.generate, short)), strict=True))

    for request, answer in serve(clone_model(POLICIES[0]), work, max_running=2, **LORA, **config):
        assert gap(trainer_logprobs(POLICIES[0], request, answer), answer.logprobs) < 1e-4


def test_trust_is_each_models_own():
    """An adapter that fails its canary is refused alone, and another's good update does not clear its name."""
    wrong = make_canary(POLICIES[2], LMHead(POLICIES[2]))

    async def work(engine):
        with pytest.raises(EngineError, match="canary"):
            await engine.load_weights(adapter_update("named", 2, canary=wrong))
        await engine.load_weights(adapter_update("", 1))
        await asyncio.gather(*(engine.generate(replace(CROWD[0], model=model)) for model in ("", "base")))
        with pytest.raises(EngineError, match="canary"):
            await engine.generate(replace(CROWD[0], model="named"))
        await engine.load_weights(adapter_update("named", 2, version=2))
        return await engine.generate(replace(CROWD[0], model="named"))

    assert set(serve(clone_model(POLICIES[0]), work, **LORA).versions) == {2}


def test_unknown_models_and_full_slots_are_refused():
    async def work(engine):
        with pytest.raises(UnknownModel, match="`named`"):
            await engine.generate(replace(CROWD[0], model="named"))
        with pytest.raises(UnknownModel):
            await engine.score([[1, 2]], model="named")
        await engine.load_weights(adapter_update("", 1))
        await engine.load_weights(adapter_update("named", 2))
        tensors = random_adapter(POLICIES[0], 3)
        for update, why in (
            (WeightUpdate(1, tensors, Adapter("third", 1.0)), "slots are taken"),
            (WeightUpdate(1, tensors, Adapter("base", 1.0)), "plain base"),
            (WeightUpdate(1, random_adapter(POLICIES[0], 3, rank=5), Adapter("named", 1.0)), "rank 5"),
            (WeightUpdate(1, tensors, Adapter("named", float("nan"))), "scale"),
            (WeightUpdate(1, tensors, Adapter("named", 1.0), expected="0" * 16), "fingerprint"),
        ):
            with pytest.raises(EngineError, match=why) as refusal:
                await engine.load_weights(update)
            assert not isinstance(refusal.value, RequestError)
        return await engine.generate(replace(CROWD[0], model="named"))

    answer = serve(clone_model(POLICIES[0]), work, **LORA)
    expected = merged(POLICIES[0], random_adapter(POLICIES[0], 2), SCALES["named"])
    assert gap(trainer_logprobs(expected, CROWD[0], answer), answer.logprobs) < 1e-4
