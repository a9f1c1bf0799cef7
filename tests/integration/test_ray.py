"""Engines and scorers as actors of a real Ray of this machine. Whole runs, and what is killed in them, are in
`tests/scale`."""

import asyncio
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.clients import Pool
from paceline.config import load
from paceline.config.model import ModelConfig, ModelRef
from paceline.data import Sample
from paceline.engine.base import GenerateRequest
from paceline.envs.workers import LOAD_SECONDS, WorkerFailed, WorkerLimits
from paceline.model import attach_lora, load_model, load_tokenizer, trainable_parameters
from paceline.model.loading import trained_adapter
from paceline.weights.update import Adapter, WeightUpdate

ray = pytest.importorskip("ray", reason="needs the extra `ray`")

from paceline.runtime.ray.engines import EngineActor, RayEngine  # noqa: E402
from paceline.runtime.ray.place import NAMESPACE, RayParts, Reservation, ResourceNeeds, actor, attach_scorers  # noqa: E402
from paceline.runtime.ray.ranks import RayWorkers, WorkerActor  # noqa: E402
from paceline.util.private_folder import shorten_ray_sockets  # noqa: E402
from samples import plain_logprobs  # noqa: E402

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.environ.get("PACELINE_SCALE") != "1", reason="takes half a minute: `make scale`"),
]
QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.toml"
SMALL = ["--engine.max-running", "64", "--engine.max-context", "64"]
PATIENCE = 900
"""Seconds until a story is given up as hung. An actor imports torch before it answers, and again after its death: half
a minute for each on a machine with nothing else to do."""


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    """One Ray for all tests here: it takes seconds to start."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    quiet = {"include_dashboard": False, "log_to_driver": False, "configure_logging": False}
    shorten_ray_sockets()
    ray.init(address="local", num_cpus=16, namespace=NAMESPACE, **quiet)  # whatever else runs on this machine
    yield
    ray.shutdown()


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def make(*overrides: str, file: str | Path = QUICKSTART):
        return load(str(file), ["--placement", "ray", *SMALL, *overrides]).config

    return make


def test_an_engine_that_joins_late_gets_the_weights_before_it_serves(config, tmp_path):
    run = config("--name=grow")
    live = str(tmp_path)

    def engine(number: int) -> RayEngine:
        name = f"engine-{number}"
        arguments = [run.model_dump_json(), name, live]
        return RayEngine(actor(EngineActor, f"grow/{name}", arguments, {"CPU": 1}, again=True, at_once=64), name)

    async def story() -> None:
        from paceline.runtime.torch_parts import build_trainer

        first, second = engine(0), engine(1)
        trainer = build_trainer(run).trainer
        pool = Pool([first])
        trainer.version = 7
        await pool.load_weights(await trainer.weights())
        pool.add(second)
        asked = GenerateRequest(prompt_ids=(1, 2, 3), max_tokens=4)
        while len(await pool.policies()) < 2:
            await pool.generate(asked)
            await asyncio.sleep(0.05)
        ours, theirs = await pool.policies()
        assert ours == theirs
        assert ours.version == 7
        # A killed one comes back by itself, and with the weights of the pool.
        _, pid = await first.actor.host_and_pid.remote()
        os.kill(pid, signal.SIGKILL)
        answers = await asyncio.gather(*(pool.generate(asked) for _ in range(16)))
        assert {version for answer in answers for version in answer.versions} == {7}
        assert len({tuple(answer.token_ids) for answer in answers}) == 1
        while len(await pool.policies()) < 2:
            await pool.generate(asked)
            await asyncio.sleep(0.05)
        assert [policy.version for policy in await pool.policies()] == [7, 7]
        pool.close()
        trainer.close()
        first.close()
        second.close()

    asyncio.run(asyncio.wait_for(story(), PATIENCE))


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """Where the shared engine's log goes."""
    return tmp_path_factory.mktemp("live")


@pytest.fixture(scope="module")
def engine(local_ray, live):
    """One engine for several tests: it takes seconds to start. It has places for two requests."""
    run = load(str(QUICKSTART), ["--placement", "ray", *SMALL, "--name=alone"]).config
    arguments = [run.model_dump_json(), "engine-0", str(live)]
    made = RayEngine(actor(EngineActor, "alone/engine-0", arguments, {"CPU": 1}, again=True, at_once=2), "alone")
    yield made
    made.close()


def test_a_full_engine_still_answers_control_requests(engine):
    """Two requests fill an actor of two places and wait for a paused engine: only a call that has a place beside theirs
    can wake it."""

    async def story() -> None:
        asked = GenerateRequest(prompt_ids=(1, 2, 3), max_tokens=4)
        await engine.pause()
        waiting = [asyncio.create_task(engine.generate(asked)) for _ in range(4)]
        while (await engine.stats()).waiting < 2:  # noqa: ASYNC110 - it is another process that changes
            await asyncio.sleep(0.01)
        assert (await engine.policy()).version == 0
        await engine.resume()
        assert len({tuple((await one).token_ids) for one in waiting}) == 1

    asyncio.run(asyncio.wait_for(story(), PATIENCE))


def test_an_engine_that_fails_inside_a_living_actor_is_started_again(engine, live, config):
    def fail(actor) -> None:
        def schedule():
            raise RuntimeError("the device is gone")

        actor._engine._scheduler.schedule = schedule

    async def story() -> None:
        from paceline.runtime.torch_parts import build_trainer

        trainer, pool = build_trainer(config("--name=failed")).trainer, Pool([engine])
        trainer.version = 7
        await pool.load_weights(await trainer.weights())
        _, before = await engine.actor.host_and_pid.remote()
        await engine.actor.__ray_call__.remote(fail)
        said = await pool.generate(GenerateRequest(prompt_ids=(1, 2, 3), max_tokens=4))
        assert set(said.versions) == {7}
        _, after = await engine.actor.host_and_pid.remote()
        assert after != before
        pool.close()
        trainer.close()

    asyncio.run(asyncio.wait_for(story(), PATIENCE))
    assert "the device is gone" in (live / "engine-0.log").read_text()


@pytest.fixture
def teacher(tmp_path):
    """A folder with another model than the policy's."""
    folder = tmp_path / "teacher"
    model = load_model(ModelConfig())
    with torch.no_grad():
        model.model.norm.weight *= 1.3
    model.save_pretrained(folder)
    load_tokenizer(ModelConfig()).save_pretrained(folder)
    model.set_attn_implementation("eager")
    return model


TAUGHT = """
[[env]]
type = "reverse-text"
algo = { type = "opd", teacher = { name = "teacher" } }
"""


def test_scorers_share_what_is_asked_and_one_that_dies_is_replaced(config, teacher, tmp_path):
    (tmp_path / "run.toml").write_text(TAUGHT)
    run = config("--name=taught", "--cluster.scorers=2", file="run.toml")
    tokenizer = load_tokenizer(ModelConfig())
    dice = np.random.default_rng(0)
    asked = [dice.integers(5, 100, 12).tolist() for _ in range(24)]

    async def story() -> None:
        needs = ResourceNeeds.of(run, 0)
        assert needs.counts["scorer"] == 2
        assert len(needs.bundles) == sum(needs.counts.values())
        room = await Reservation.reserve(needs)
        parts = RayParts(run, room, needs, tmp_path / "live")
        teachers = parts.scorers()
        ((name, (first, second)),) = teachers.items()
        assert Path(name) == tmp_path / "teacher"
        pool = await attach_scorers(run, tokenizer, teachers, ModelRef(name=name))
        assert pool.scores_any_temperature
        await parts.wait_ready([first, second])
        await asyncio.gather(*(pool.score([ids], 0.7) for ids in asked))
        assert min((await first.stats()).prompt_tokens, (await second.stats()).prompt_tokens) > 0
        _, pid = await first.actor.host_and_pid.remote()
        os.kill(pid, signal.SIGKILL)
        scores = await asyncio.gather(*(pool.score([ids], 0.7) for ids in asked))
        for ids, (found,) in zip(asked, scores, strict=True):
            with torch.no_grad():
                expected = (teacher(torch.tensor([ids])).logits[0] / 0.7).log_softmax(-1)[range(11), ids[1:]]
            np.testing.assert_allclose(found[1:], expected, atol=1e-3)
        while len(await pool.stats()) < 2:  # noqa: ASYNC110 - it comes back, and takes part again
            await asyncio.sleep(0.05)
        await pool.aclose()
        for scorer in (first, second):
            scorer.close()
        room.release()

    asyncio.run(asyncio.wait_for(story(), PATIENCE))


async def process_of(part: RayEngine) -> int | None:
    """Its process; None while Ray starts it again."""
    try:
        return (await part.actor.host_and_pid.remote())[1]
    except ray.exceptions.ActorUnavailableError:
        return None


@pytest.mark.parametrize("lora", [False, True])
def test_a_reference_worker_that_is_killed_gets_the_snapshot_before_it_serves_and_no_score_is_lost(
    config, tmp_path, lora
):
    """Killed with requests in flight. What the restarted one serves is the snapshot, not the model it loaded."""
    run = config("--trainer.kl.workers=2", "--trainer.kl.reference=snapshot", *(["--model.lora.rank=4"] * lora))
    dice = np.random.default_rng(0)
    asked = [dice.integers(5, 100, 12).tolist() for _ in range(48)]
    policy = attach_lora(load_model(run.model), run.model, 0)
    with torch.no_grad():
        for parameter in trainable_parameters(policy).values():
            parameter.add_(torch.randn(parameter.shape) * 0.02)
    tensors, adapter = trainable_parameters(policy), None
    if lora:
        tensors, scale = trained_adapter(policy)
        adapter = Adapter("", scale)

    def expected(ids: list[int]) -> torch.Tensor:
        return plain_logprobs(policy, [Sample.as_sampled(ids)])[0][1:].detach()

    async def story() -> None:
        needs = ResourceNeeds.of(run, 0)
        assert needs.counts["reference"] == 2
        room = await Reservation.reserve(needs)
        parts = RayParts(run, room, needs, tmp_path / "live")
        first, second = parts.references()
        await parts.wait_ready([first, second])
        pool = Pool([first, second])
        await pool.load_weights(WeightUpdate(7, tensors, adapter))
        _, pid = await first.actor.host_and_pid.remote()
        tasks = [asyncio.ensure_future(pool.score([ids])) for ids in asked]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        os.kill(pid, signal.SIGKILL)
        for ids, (found,) in zip(asked, await asyncio.gather(*tasks), strict=True):
            np.testing.assert_allclose(found[1:], expected(ids), atol=1e-3)
        while len(await pool.stats()) < 2:  # noqa: ASYNC110 - it comes back, and takes part again
            await asyncio.sleep(0.05)
        assert (await first.actor.host_and_pid.remote())[1] != pid
        assert (await first.policy()).version == 7
        np.testing.assert_allclose((await first.score(asked[:1]))[0][1:], expected(asked[0]), atol=1e-3)
        # One that comes back between two batches, and so unnoticed, does not score as the model it loaded.
        _, pid = await second.actor.host_and_pid.remote()
        os.kill(pid, signal.SIGKILL)
        while await process_of(second) in (None, pid):  # noqa: ASYNC110 - it is another process that changes
            await asyncio.sleep(0.05)
        scores = await asyncio.gather(*(pool.score([ids]) for ids in asked))
        for ids, (found,) in zip(asked, scores, strict=True):
            np.testing.assert_allclose(found[1:], expected(ids), atol=1e-3)
        pool.close()
        for worker in (first, second):
            worker.close()
        room.release()

    asyncio.run(asyncio.wait_for(story(), PATIENCE))


def test_calls_go_to_other_workers_while_one_is_started_again(config, tmp_path):
    """The killed one is not back before all calls have their answers."""
    run, closed = config("--name=checks"), tmp_path / "closed"

    class GatedActor(WorkerActor):
        def __init__(self, *arguments: str) -> None:
            super().__init__(*arguments)
            while closed.exists():
                time.sleep(0.05)

    async def story() -> None:
        names = ["worker-0", "worker-1"]
        made = [
            actor(GatedActor, f"checks/{name}", [run.model_dump_json(), name, str(tmp_path)], {"CPU": 1}, again=True)
            for name in names
        ]
        (_, first), (_, second) = [await one.host_and_pid.remote() for one in made]
        workers = RayWorkers(made)

        async def process_that_answers() -> int:
            return await workers.call("os:getppid", [], 60.0, WorkerLimits(1, None, 1024))

        assert set(await asyncio.gather(*(process_that_answers() for _ in range(4)))) == {first, second}
        closed.touch()
        os.kill(first, signal.SIGKILL)
        async with asyncio.timeout(LOAD_SECONDS / 2):  # after so long a call gives up the one it waits for
            assert set(await asyncio.gather(*(process_that_answers() for _ in range(8)))) == {second}
        closed.unlink()
        while await process_that_answers() == second:  # noqa: ASYNC110 - it is another process that changes
            await asyncio.sleep(0.05)
        with pytest.raises(WorkerFailed, match=r"timed out after 0\.1 s"):  # a check that hangs
            await workers.call("time:sleep", [PATIENCE], 0.1, WorkerLimits(1, None, 1024))
        workers.close()

    asyncio.run(asyncio.wait_for(story(), PATIENCE))
