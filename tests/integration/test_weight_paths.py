"""The same update by every path to a real `paceline serve`: the same fingerprint there, and the same tokens."""

import asyncio
import dataclasses
import tempfile
from pathlib import Path

import httpx
import pytest
import torch
from live_server import MODEL, PLAIN, door, served

from conftest import tiny_model
from paceline.clients import HttpEngine, Pool
from paceline.config import RunConfig, inference
from paceline.config import trainer as settings
from paceline.engine import EmbeddedEngine, GenerateRequest, noise_key
from paceline.errors import EngineError, Mismatch
from paceline.model import LMHead, ServedPolicy, WeightUpdate, clone_model, fingerprint, load_model
from paceline.model.head import make_canary
from paceline.runtime.processes.child import RemoteTrainer, TrainerHost
from paceline.runtime.rpc import RpcHello
from paceline.server import build_app
from paceline.trainer import TorchTrainer
from paceline.util.private_folder import socket_parent
from paceline.weights.update import bits_of
from samples import PLAIN as RL
from samples import make_batch

KEY = "secret"
PATHS = ("disk", "http", "delta", "broadcast", "auto")


@pytest.fixture(scope="module")
def model():
    return load_model(RunConfig.model_validate({"model": {"name": MODEL, "dtype": "bfloat16"}}).model, "cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def server(folder):
    own = ("--port", str(door()))
    with served("--api-key", KEY, "--allow", str(folder), "--model.dtype", "bfloat16", *own) as running:
        yield running


def updates(model, count: int) -> list[WeightUpdate]:
    """Versions that differ from one another in one element of a hundred."""
    made = []
    tensors = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for version in range(1, count + 1):
        torch.manual_seed(version)
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        for tensor in tensors.values():
            bits_of(tensor)[torch.rand(tensor.numel()) < 0.01] ^= 3 << 5
        model.load_state_dict(tensors, strict=False)
        made.append(WeightUpdate(version, tensors, expected=fingerprint(tensors.items())))
        made[-1] = dataclasses.replace(made[-1], canary=make_canary(model, LMHead(model)))
    return made


ASKED = [
    GenerateRequest(prompt_ids=tuple(range(3, 14 + n)), max_tokens=6, noise=noise_key(1, n), order=n) for n in range(2)
]


class Counted(HttpEngine):
    """Remembers which doors its updates went through."""

    doors: tuple[str, ...] = ()

    async def post(self, path, body=None):
        self.doors += (path,) if path.startswith("/weights") else ()
        return await super().post(path, body)

    async def stream(self, path, head, size, pieces):
        self.doors += (path,)
        return await super().stream(path, head, size, pieces)


def test_every_path_leads_to_the_same_weights_and_tokens(server, folder, model):
    """Two versions by each: where deltas travel, the first goes as a whole and the second does not. All is checked as
    always, and a version by number alone, another fingerprint's or a cut body, is refused and changes nothing."""
    first, second = updates(model, 2)
    doors = {
        "disk": ("/weights/load",) * 2,
        "http": ("/weights/upload",) * 2,
        "delta": ("/weights/upload", "/weights/delta"),
        "broadcast": ("/weights/group", "/weights/receive", "/weights/receive"),
        "auto": ("/weights/load", "/weights/delta"),
    }

    async def by(path):
        engine = Counted(server.url, api_key=KEY, folder=folder if path in ("disk", "auto") else None, path=path)
        try:
            for update in (first, second):
                await engine.load_weights(update)
                assert dataclasses.astuple(await engine.policy()) == (update.version, update.expected)
            assert engine.doors == doors[path]
            done = [await engine.generate(request) for request in ASKED]
            assert all(answer.weights == {2: second.expected} for answer in done)
            wrong = dataclasses.replace(first, version=3, expected="0" * 16)
            with pytest.raises(Mismatch, match="damaged"):
                await engine.load_weights(wrong)
            assert (await engine.policy()).version == 2
            return [(answer.token_ids, answer.logprobs) for answer in done]
        finally:
            await engine.aclose()

    async def whole():
        return {path: await by(path) for path in PATHS}

    got = asyncio.run(asyncio.wait_for(whole(), 240))
    assert all(tokens == got["disk"] for tokens in got.values())
    assert not list(folder.iterdir())


def test_raw_bodies_are_guarded_and_bounded(server, model):
    """No key, no head, another type, more bytes than the model has, bytes that are no weights: each its own refusal."""
    head = {"Paceline-Update": '{"version": 9}', "Content-Type": "application/octet-stream"}
    key = {"Authorization": f"Bearer {KEY}"}
    most = sum(p.numel() * p.element_size() for p in model.parameters()) + (8 << 20)

    def post(path, data=b"nothing", **headers):
        return httpx.post(server.url + path, content=data, headers=head | headers, **PLAIN)

    for path in ("/weights/upload", "/weights/delta"):
        assert post(path).status_code == 401
        assert post(path, **key).status_code == 400
        assert post(path, **key, **{"Content-Type": "application/json"}).status_code == 415
        assert "missing" not in post(path, **key).json()["error"]["message"]
        assert post(path, **key, **{"Paceline-Update": "{}"}).json()["error"]["param"] == "version"
        assert post(path, bytes(most + 1), **key).status_code == 413
        endless = (bytes(1 << 20) for _ in range(most // (1 << 20) + 2))  # without a word on how much there will be
        assert post(path, endless, **key).status_code == 413
    assert server.get("/policy", headers=key).json()["version"] != 9


def test_a_group_that_is_not_there_is_said(server):
    nothing = {"version": 1, "tensors": [{"name": "a", "dtype": "uint8", "shape": [1]}]}
    unreachable = {"address": "127.0.0.1", "port": 9, "world": 2, "rank": 1, "seconds": 1.0}

    async def run():
        engine = HttpEngine(server.url, api_key=KEY)
        with pytest.raises(EngineError, match="no sender listens"):
            await engine.post("/weights/group", unreachable)
        with pytest.raises(EngineError, match="in no group"):
            await engine.post("/weights/receive", nothing)
        await engine.aclose()

    asyncio.run(asyncio.wait_for(run(), 240))


def test_an_engine_that_comes_back_gets_all_of_it(server, folder, model):
    """Three versions as deltas; the server is killed and another takes its place, with the weights it began with. The
    roster sends it the last update: whole, composed of the first file and the deltas since."""
    made = updates(model, 4)
    flags = ("--api-key", KEY, "--allow", str(folder), "--model.dtype", "bfloat16")

    async def run():
        engine = Counted(server.url, api_key=KEY, folder=folder)
        pool = Pool([engine])
        for update in made[:3]:
            await pool.load_weights(update)
        before = [await pool.generate(request) for request in ASKED]
        server.process.kill()
        server.process.wait(30)
        with served(*flags, "--port", server.url.rpartition(":")[2]):
            after = [await pool.generate(request, deadline=200) for request in ASKED]
            assert {v for answer in after for v in answer.versions} == {3}
            await pool.load_weights(made[3])
            assert (await engine.policy()).fingerprint == made[3].expected
        pool.close()
        await engine.aclose()
        return before, after, engine.doors

    before, after, doors = asyncio.run(asyncio.wait_for(run(), 240))
    assert [answer.token_ids for answer in before] == [answer.token_ids for answer in after]
    assert doors == ("/weights/load", "/weights/delta", "/weights/delta", *("/weights/delta", "/weights/load"),
                     "/weights/delta")  # fmt: skip
    assert not list(folder.iterdir())


def test_the_trainers_process_sends_what_a_step_changed(tmp_path, monkeypatch, load):
    """Trainer behind its socket, orchestrator's client, server's application: whole weights first, then deltas, each
    with its canary and fingerprint; after a checkpoint was loaded into the trainer, from there on."""
    model = tiny_model().to(torch.bfloat16)
    trainer = TorchTrainer(model, settings.TrainerConfig(threads=1, optimizer=settings.OptimizerConfig(lr=1e-4)))
    sockets = tempfile.mkdtemp(dir=socket_parent(len("/tmp12345678/door")))
    weights, address = tmp_path / "weights", Path(sockets) / "door"
    weights.mkdir()
    (tmp_path / "saved").mkdir()
    engine = EmbeddedEngine(clone_model(model), inference.EngineConfig(threads=1))
    app = build_app(engine, load("quickstart"), [], name="tiny", api_key=KEY, allowed=[weights], max_body_bytes=1 << 26)
    client = Counted("http://here", folder=weights)
    host = TrainerHost(trainer, None, weights, RpcHello(1, "cpu", (1,)))

    async def run():
        serving = asyncio.ensure_future(host.serve(address))
        wire = httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://here", headers={"Authorization": f"Bearer {KEY}"}
        )
        monkeypatch.setattr(client, "_client", lambda: wire)
        remote = RemoteTrainer(address)
        async with app.router.lifespan_context(app), wire:
            for step in range(4):
                update = await remote.weights()
                await client.load_weights(update)
                assert update.canary is not None
                held, own = await client.policy(), await trainer.weights()
                assert held == ServedPolicy(step, own.fingerprint()) == ServedPolicy(update.version, update.expected)
                assert all(torch.equal(bits_of(update.tensors[n]), bits_of(own.tensors[n])) for n in own.tensors)
                if step == 1:
                    await remote.save(tmp_path / "saved")
                await remote.step(make_batch(step, **RL))
            await remote.load(tmp_path / "saved")
            await client.load_weights(await remote.weights())
            assert await client.policy() == ServedPolicy(1, (await trainer.weights()).fingerprint())
        remote.close()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    engine.start()
    try:
        asyncio.run(asyncio.wait_for(run(), 240))
    finally:
        engine.close()
        trainer.close()
    assert client.doors == ("/weights/load", *["/weights/delta"] * 4)
