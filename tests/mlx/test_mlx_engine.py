"""The engine on MLX: it draws what torch's draws, from a quantised base too, and holds no more memory than it needs.

The engine's own laws run against it with `PACELINE_BACKEND=mlx`; here is what only MLX can get wrong.
"""

import asyncio
import random
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("mlx_lm")

import mlx.core as mx

from conftest import VOCABULARY, tiny_model
from engines import merged, random_adapter
from mlx_models import as_mlx, quantised
from paceline.config.inference import EngineConfig
from paceline.config.model import ModelConfig
from paceline.engine import Completion, EmbeddedEngine, GenerateRequest, noise_key
from paceline.engine.engine import DecodingEngine
from paceline.engine.mlx.engine import MlxEngine
from paceline.errors import EngineError
from paceline.model import (
    Adapter,
    LMHead,
    PackedPlan,
    WeightUpdate,
    fingerprint,
    hidden_states,
    load_model,
    token_logprobs,
)
from paceline.model.head import make_canary
from paceline.model.mlx.loading import load_model as load_mlx

QUICKSTART = ModelConfig(name="paceline:quickstart")


def serve(engine: DecodingEngine, work):
    """Run `work(engine)` against a started engine."""

    async def run():
        engine.start()
        try:
            return await asyncio.wait_for(work(engine), 240)
        finally:
            engine.close()

    return asyncio.run(run())


async def stopped_at(engine: DecodingEngine, tokens: int) -> None:
    """Let the engine go on until it has drawn so many tokens, and pause it there, between two steps."""
    step, reached = engine._step, asyncio.Event()
    loop = asyncio.get_running_loop()

    def stepping() -> None:
        step()
        if engine.tokens >= tokens and not engine._paused:
            engine._set_paused(True)
            loop.call_soon_threadsafe(reached.set)

    engine._step = stepping
    await engine.resume()
    await reached.wait()
    engine._step = step


@torch.no_grad()
def logprobs_in_torch(model, request: GenerateRequest, completion: Completion) -> list[float]:
    ids = torch.tensor([*request.prompt_ids, *completion.token_ids])
    positions, plan = torch.arange(len(ids)), PackedPlan([len(ids)], "cpu")
    hidden = hidden_states(model.get_decoder(), ids, positions, plan)
    temperatures = torch.full((len(ids) - 1,), request.temperature)
    logprobs, _ = token_logprobs(LMHead(model), hidden[:-1], ids[1:], temperatures)
    return logprobs[len(request.prompt_ids) - 1 :].tolist()


def gap(one, other) -> float:
    return float(np.abs(np.array(one) - np.array(other)).max())


# -- the same as torch's ----------------------------------------------------------------------------------------------

ASKED = [{}, {"temperature": 0.0}, {"temperature": 0.6}, {"temperature": 1.7}, {"top_p": 0.7}, {"top_k": 5}]


def crowd() -> list[GenerateRequest]:
    rng, out = random.Random(0), []
    for group, length in enumerate((1, 2, 9, 40, 90)):
        prompt = tuple(rng.randrange(103) for _ in range(length))
        for member, asked in enumerate(ASKED):
            key = noise_key(group, member)
            out.append(
                GenerateRequest(prompt_ids=prompt, max_tokens=20, noise=key, order=group, top_logprobs=3, **asked)
            )
    return out


@pytest.fixture(scope="module")
def in_torch():
    """What torch's engine answers, and the scores it gives its own answers."""
    engine = EmbeddedEngine(load_model(QUICKSTART, "cpu"), EngineConfig(threads=1, max_running=12))
    return serve(engine, answered)


async def answered(engine):
    answers = await asyncio.gather(*map(engine.generate, crowd()))
    texts = [[*request.prompt_ids, *answer.token_ids] for request, answer in zip(crowd(), answers, strict=True)]
    return answers, await engine.score(texts, 0.7), await engine.policy()


@pytest.mark.parametrize(
    ("config", "deterministic"),
    [({}, False), ({"prefill_tokens": 16, "max_running": 5}, False), ({"in_flight": 2}, False), ({}, True)],
)
def test_the_same_noise_draws_the_same_tokens_as_in_torch(in_torch, config, deterministic):
    """Temperature, truncation, alternatives and scores too; the quickstart's rotary base is only in `rope_parameters`,
    where mlx-lm does not look."""
    engine = MlxEngine(load_mlx(QUICKSTART), EngineConfig(**{"max_running": 12} | config), deterministic=deterministic)
    answers, scores, policy = serve(engine, answered)
    theirs, their_scores, their_policy = in_torch
    assert policy == their_policy
    for mine, other in zip(answers, theirs, strict=True):
        assert mine.token_ids == other.token_ids
        assert gap(mine.logprobs, other.logprobs) < 1e-4
        assert (mine.log_z is None) == (other.log_z is None)
        assert mine.log_z is None or gap(mine.log_z, other.log_z) < 1e-4
        for one, two in zip(mine.top, other.top, strict=True):
            assert gap([value for _, value in one], [value for _, value in two]) < 1e-4
    for one, two in zip(scores, their_scores, strict=True):
        assert one == pytest.approx(two, abs=2e-4)


def test_half_precision_is_near_and_its_cache_is_half_as_large():
    request = crowd()[-6]

    async def work(engine):
        return await engine.generate(request), sum(array.nbytes for array in engine._cache.arrays)

    whole, its_bytes = serve(MlxEngine(load_mlx(QUICKSTART), EngineConfig(max_running=2)), work)
    model = load_mlx(ModelConfig(name="paceline:quickstart", dtype="bfloat16"))
    half, half_bytes = serve(MlxEngine(model, EngineConfig(max_running=2)), work)
    assert half_bytes * 2 == its_bytes
    assert gap(half.logprobs[:1], whole.logprobs[:1]) < 0.1


def test_nothing_on_the_way_needs_torch_or_peft():
    """Loading, serving, an update and an adapter, where neither is installed."""
    said = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, timeout=240)
    assert said.returncode == 0, said.stderr
    assert said.stdout.split() == ["1", "2", "8"]


WITHOUT_TORCH = """
import asyncio, sys
sys.modules["torch"] = sys.modules["peft"] = None
from paceline.config.inference import EngineConfig
from paceline.config.model import LoRAConfig, ModelConfig
from paceline.engine.base import GenerateRequest
from paceline.engine.mlx.engine import MlxEngine
from paceline.model.mlx.loading import load_model, clone_model
from paceline.model.mlx.lora import adapter_tensors, attach_lora
from paceline.weights.update import Adapter, WeightUpdate

model = load_model(ModelConfig(name="paceline:quickstart"))
tensors, scale = adapter_tensors(attach_lora(clone_model(model), LoRAConfig(rank=4), 0).net)

async def work():
    engine = MlxEngine(model, EngineConfig(adapters=1, adapter_rank=4))
    engine.start()
    update = WeightUpdate(1, model.parameters())
    await engine.load_weights(update)
    print((await engine.policy()).version)
    await engine.load_weights(WeightUpdate(2, tensors, Adapter("", scale)))
    answer = await engine.generate(GenerateRequest(prompt_ids=(1, 2, 3), max_tokens=8))
    print(answer.versions[0], len(answer.token_ids))
    engine.close()

asyncio.run(work())
"""


@pytest.mark.parametrize("part", ["engine", "trainer"])
def test_a_process_may_end_at_once_after_a_thread_that_computed(part):
    """mlx frees what it compiled for a thread after Python's part of the thread has ended, with Python's lock; it
    aborted a process that had begun to end. Here the main thread keeps the lock until then."""
    said = subprocess.run([sys.executable, "-c", ENDS_AT_ONCE, part], capture_output=True, text=True, timeout=600)
    assert said.returncode == 0, said.stderr
    assert said.stdout.split() == ["computed"]


ENDS_AT_ONCE = """
import asyncio, sys
sys.modules["torch"] = sys.modules["peft"] = None  # which give the lock away at their own end
import mlx.core as mx
from paceline.config.inference import EngineConfig
from paceline.config.model import ModelConfig
from paceline.config.trainer import TrainerConfig
from paceline.engine.mlx.engine import MlxEngine
from paceline.model.mlx.loading import load_model
from paceline.trainer.mlx.trainer import MlxTrainer

model = load_model(ModelConfig(name="paceline:quickstart"))
functions = [mx.compile(lambda x, n=n: x + n) for n in range(100)]  # the more there are to free, the surer the abort

def compute():
    mx.eval(model.hidden(mx.array([[1, 2, 3]])), [function(mx.ones(3)) for function in functions])

if sys.argv[1] == "engine":
    part = MlxEngine(model, EngineConfig())
    part.start()
    asyncio.run(part._run_between_steps(compute))
else:
    part = MlxTrainer(model, TrainerConfig())
    asyncio.run(part._run(compute))
print("computed", flush=True)
sys.setswitchinterval(100)
part.close()
"""


# -- adapters, over packed weights too --------------------------------------------------------------------------------

SCALES = {"": 0.5, "named": 1.25}


@pytest.fixture(params=["plain", "quantised"])
def base(request, tmp_path):
    """A model in MLX, and one in torch that computes the same."""
    if request.param == "quantised":
        return quantised(tiny_model(), tmp_path)
    return as_mlx(tiny_model()), tiny_model()


def test_adapters_run_side_by_side_and_each_update_shows_at_once(base):
    """Each request of a batch is answered through its own adapter. Nothing keeps what an adapter once was: the third of
    three updates to a slot is the one that counts."""
    in_mlx, in_torch = base
    prompts = [tuple(random.Random(i).randrange(VOCABULARY) for _ in range(n)) for i, n in enumerate((1, 7, 30))]
    wanted = [
        GenerateRequest(prompt_ids=prompt, max_tokens=15, noise=i, model=model)
        for i, prompt in enumerate(prompts)
        for model in ("", "base", "named")
    ]

    def adapted(name: str, seed: int):
        return merged(in_torch, random_adapter(in_torch, seed), SCALES[name])

    async def work(engine):
        answers = []
        for round_, seeds in enumerate(({"": 1, "named": 2}, {"": 3}, {"named": 4, "": 5})):
            for name, seed in seeds.items():
                canary = make_canary(adapted(name, seed), LMHead(in_torch))
                tensors = random_adapter(in_torch, seed)
                await engine.load_weights(WeightUpdate(round_, tensors, Adapter(name, SCALES[name]), canary=canary))
            answers.append(await asyncio.gather(*map(engine.generate, wanted)))
        return answers

    rounds = serve(MlxEngine(in_mlx, EngineConfig(adapters=2, adapter_rank=4, max_running=9)), work)
    for answers, seeds in zip(rounds, ({"": 1, "named": 2}, {"": 3, "named": 2}, {"": 5, "named": 4}), strict=True):
        models = {"base": in_torch} | {name: adapted(name, seed) for name, seed in seeds.items()}
        for request, answer in zip(wanted, answers, strict=True):
            assert gap(answer.logprobs, logprobs_in_torch(models[request.model], request, answer)) < 1e-4
            other = models["named" if request.model == "base" else "base"]
            assert gap(answer.logprobs, logprobs_in_torch(other, request, answer)) > 1e-2


@pytest.mark.parametrize("sent", [torch.float32, torch.bfloat16])
def test_an_adapter_beside_half_precision_is_held_bit_for_bit_as_it_was_sent(sent):
    """Adapters train in float32 whatever the base computes in: rounded to it they would be others, and unproved."""
    tensors = {name: tensor.to(sent) for name, tensor in random_adapter(tiny_model(), 1).items()}
    expected = fingerprint(tensors.items())

    async def work(engine):
        await engine.load_weights(WeightUpdate(1, tensors, Adapter("", 0.5), expected=expected))
        return await engine.policy()

    half = as_mlx(tiny_model(dtype=torch.bfloat16))
    assert serve(MlxEngine(half, EngineConfig(adapters=1, adapter_rank=8)), work).fingerprint == expected


def test_an_incomplete_adapter_serves_no_request_until_it_is_sent_again(monkeypatch):
    from paceline.engine.mlx.adapters import MlxAdapters

    request = GenerateRequest(prompt_ids=(1, 2), max_tokens=4)
    tensors = random_adapter(tiny_model(), 1)

    async def work(engine):
        load = MlxAdapters.load

        def broken(self, slot, tensors, scale):
            load(self, slot, dict(list(tensors.items())[:1]) | dict(list(tensors.items())[6:7]), scale)
            raise MemoryError("no room")

        monkeypatch.setattr(MlxAdapters, "load", broken)
        with pytest.raises(EngineError, match=r"broke off .*no room"):
            await engine.load_weights(WeightUpdate(1, tensors, Adapter("", 1.0)))
        monkeypatch.undo()
        with pytest.raises(EngineError, match="broke off"):
            await engine.generate(request)
        await engine.load_weights(WeightUpdate(2, tensors, Adapter("", 1.0)))
        return await engine.generate(request), await engine.policy()

    answer, policy = serve(MlxEngine(as_mlx(tiny_model()), EngineConfig(adapters=1, adapter_rank=4)), work)
    assert gap(answer.logprobs, logprobs_in_torch(merged(tiny_model(), tensors, 1.0), request, answer)) < 1e-4
    assert (policy.version, policy.fingerprint) == (2, fingerprint(tensors.items()))


def test_packed_weights_are_not_changed_by_whole_ones(tmp_path):
    """A quantised base has other tensors under the same names: an update of whole weights is refused by their form."""
    in_mlx, in_torch = quantised(tiny_model(), tmp_path)

    async def work(engine):
        before = await engine.policy()
        with pytest.raises(EngineError, match="uint32"):
            await engine.load_weights(WeightUpdate(1, dict(in_torch.named_parameters())))
        return before == await engine.policy()

    assert serve(MlxEngine(in_mlx, EngineConfig()), work)


# -- memory -----------------------------------------------------------------------------------------------------------

LONG = [GenerateRequest(prompt_ids=tuple(range(9)), max_tokens=230, noise=i) for i in range(8)]
ROOM = EngineConfig(max_running=8, max_context=240)


@pytest.mark.parametrize("config", [{}, {"in_flight": 2}, {"adapters": 1, "adapter_rank": 4}])
def test_decoding_holds_no_more_memory_the_longer_it_goes_on(config):
    """What a step leaves behind is computed: an unevaluated graph would hold every array of every step."""

    async def work(engine):
        tasks = [asyncio.create_task(engine.generate(request)) for request in LONG]
        held = []
        for tokens in (200, 600, 1000, 1400):
            await stopped_at(engine, tokens)
            held.append(mx.get_active_memory())
        await engine.resume()
        await asyncio.gather(*tasks)
        return held

    held = serve(MlxEngine(load_mlx(QUICKSTART), ROOM.model_copy(update=config)), work)
    assert max(held) - min(held) < 2048, held


@pytest.mark.parametrize("scored", [False, True])
def test_a_piece_of_a_prompt_is_computed_in_its_step(scored):
    """Though nothing is sampled from it. What is still to be computed belongs to the thread that asked for it: another
    one that looks is refused."""
    prompt = tuple(range(100))

    async def work(engine):
        step = engine._step
        request = GenerateRequest(prompt_ids=prompt, max_tokens=1)

        def stepping() -> None:
            step()
            engine._paused = engine.steps == 3

        engine._step = stepping
        task = asyncio.ensure_future(engine.score([prompt]) if scored else engine.generate(request))
        while not engine._paused:  # noqa: ASYNC110 - another thread changes it
            await asyncio.sleep(0.001)
        held = [np.array(array) for array in engine._cache.arrays]
        await engine.resume()
        await task
        return held

    config = EngineConfig(max_running=2, prefill_tokens=8)
    for array in serve(MlxEngine(load_mlx(QUICKSTART), config), work):
        assert np.abs(array[0, :, 23]).max() > 0
        assert not array[0, :, 24:].any()


def test_a_step_writes_to_the_cache_where_it_lies():
    """Arrays of MLX never change: a write that found another holder of the cache would copy all of it."""
    engine = MlxEngine(load_mlx(QUICKSTART), EngineConfig(max_running=300, max_context=256))
    layer = engine._cache.keys[0].nbytes

    async def work(engine):
        await asyncio.gather(*(engine.generate(replace(request, max_tokens=4)) for request in LONG))
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        await asyncio.gather(*(engine.generate(replace(request, max_tokens=20)) for request in LONG))
        return mx.get_peak_memory() - before

    assert serve(engine, work) < layer / 2


def test_an_update_from_this_process_costs_no_memory_and_stays_out_of_the_callers_model():
    model = load_mlx(QUICKSTART)
    before = fingerprint(model.parameters().items())

    async def work(engine):
        new = {name: array * 1.01 for name, array in model.parameters().items()}
        mx.eval(new)
        await engine.load_weights(WeightUpdate(1, new))
        held = mx.get_active_memory()
        for version in (2, 3):
            await engine.load_weights(WeightUpdate(version, new))
        return mx.get_active_memory() - held, (await engine.policy()).fingerprint, fingerprint(new.items())

    grown, served, sent = serve(MlxEngine(model, EngineConfig(max_running=2)), work)
    assert (grown, served) == (0, sent)
    assert fingerprint(model.parameters().items()) == before


def test_what_only_torch_has_is_refused_by_name():
    with pytest.raises(EngineError, match=r'engine\.cache = "pages"'):
        MlxEngine(load_mlx(QUICKSTART), EngineConfig(cache="pages"))
