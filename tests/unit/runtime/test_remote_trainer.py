"""A trainer behind a socket: whatever happens to the connection, every call is done once, and a new trainer is not
taken for the old one."""

import asyncio
import errno
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from conftest import tiny_model
from paceline.config import trainer as config
from paceline.data import encode
from paceline.model import WeightUpdate
from paceline.runtime.processes.child import RemoteTrainer, TrainerHost
from paceline.runtime.rpc import RpcHello
from paceline.trainer import TorchTrainer, TrainerError, TrainerLost
from paceline.util.private_folder import socket_parent
from paceline.util.user_code import UserCodeError
from samples import PLAIN, make_batch

SETTINGS = config.TrainerConfig(threads=1, optimizer=config.OptimizerConfig(lr=1e-3))


@pytest.fixture
def folder():
    """Short: a socket's path must fit into 107 bytes."""
    with tempfile.TemporaryDirectory(dir=socket_parent(len("/tmp12345678/trainer.sock"))) as name:
        yield Path(name)


@asynccontextmanager
async def hosted(folder: Path, trainer: TorchTrainer | None = None):
    """A host that serves until the block ends."""
    trainer = trainer or TorchTrainer(tiny_model(), SETTINGS)
    (folder / "weights").mkdir(exist_ok=True)
    address = folder / "trainer.sock"
    address.unlink(missing_ok=True)
    host = TrainerHost(trainer, None, folder / "weights", RpcHello(1, "cpu", (1,)))
    serving = asyncio.ensure_future(host.serve(address))
    try:
        yield trainer
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        trainer.close()


class Cutting:
    """A wire that is cut after so many pieces of each answer, again and again, until it has been cut `times` times."""

    def __init__(self, there: Path, here: Path, times: int, garbage: bool = False) -> None:
        self.there, self.here, self.left, self.garbage = there, here, times, garbage

    async def serve(self):
        return await asyncio.start_unix_server(self._meet, self.here)

    async def _meet(self, reader, writer):
        back, forth = await asyncio.open_unix_connection(self.there)
        carrying = asyncio.ensure_future(self._carry(reader, forth))
        pieces = 0
        while data := await back.read(1 << 16):
            pieces += 1
            if pieces > 1 and self.left:  # the greeting gets through
                self.left -= 1
                writer.write(b"\xff" * 64 if self.garbage else data[:3])
                break
            writer.write(data)
        carrying.cancel()
        writer.close()
        forth.close()

    async def _carry(self, reader, writer):
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()


def weights_of(update: WeightUpdate) -> dict[str, torch.Tensor]:
    return {name: update.tensors[name].clone() for name in update.tensors}


async def trained(trainer, batches) -> tuple[list, dict[str, torch.Tensor]]:
    reports = [await trainer.step(batch) for batch in batches]
    return reports, weights_of(await trainer.weights())


@pytest.mark.parametrize("garbage", [False, True], ids=["cut", "garbled"])
def test_every_call_is_done_once_however_often_the_wire_breaks(folder, garbage):
    batches = [make_batch(seed, **PLAIN) for seed in range(3)]

    async def run():
        plain = TorchTrainer(tiny_model(), SETTINGS)
        expected = await trained(plain, batches)
        plain.close()
        async with hosted(folder):
            wire = Cutting(folder / "trainer.sock", folder / "wire.sock", times=4, garbage=garbage)
            async with await wire.serve():
                remote = RemoteTrainer(folder / "wire.sock")
                got = await trained(remote, batches)
                assert wire.left == 0
                assert remote.version == 3
                remote.close()
        return expected, got

    (reports, tensors), (remote_reports, remote_tensors) = asyncio.run(run())
    assert all(torch.equal(tensors[name], remote_tensors[name]) for name in tensors)
    for one, other in zip(reports, remote_reports, strict=True):
        assert {k: v for k, v in one.metrics.items() if "/s" not in k} == {
            k: v for k, v in other.metrics.items() if "/s" not in k
        }


def test_samples_fed_before_their_batch_are_the_same_over_there(folder):
    batch = make_batch(0, **PLAIN)
    streaming = SETTINGS.model_copy(update={"stream": True})

    async def run():
        async with hosted(folder, TorchTrainer(tiny_model(), streaming)) as trainer:
            remote = RemoteTrainer(folder / "trainer.sock")
            await remote.feed([batch[4], batch[1]])
            await remote.feed([batch[7]])
            await remote.step(batch)
            assert trainer._fed == []
            remote.close()
            return weights_of(await trainer.weights())

    async def plain():
        trainer = TorchTrainer(tiny_model(), SETTINGS)
        _, tensors = await trained(trainer, [batch])
        trainer.close()
        return tensors

    fed, whole = asyncio.run(run()), asyncio.run(plain())
    assert sum(int(((fed[n] - whole[n]).abs() > 1e-6).sum()) for n in whole) < 0.01 * sum(
        t.numel() for t in whole.values()
    )


def test_another_trainer_is_not_taken_for_the_lost_one(folder):
    """Its weights are those it began with: until a checkpoint is loaded into it, nothing is trained or published."""
    (folder / "saved").mkdir()

    async def run():
        remote = RemoteTrainer(folder / "trainer.sock")
        async with hosted(folder):
            await remote.step(make_batch(0, **PLAIN))
            await remote.save(folder / "saved")
            expected = weights_of(await remote.weights())
        async with hosted(folder):
            for call in (remote.weights, lambda: remote.step(make_batch(1, **PLAIN)), remote.weights):
                with pytest.raises(TrainerLost, match="started again"):
                    await call()
            await remote.load(folder / "saved")
            assert remote.version == 1
            got = weights_of(await remote.weights())
        async with hosted(folder):  # lost again, right after it was loaded
            with pytest.raises(TrainerLost, match="started again"):
                await remote.weights()
            remote.close()
        assert all(torch.equal(expected[name], got[name]) for name in expected)

    asyncio.run(run())


def test_a_silent_trainer_is_lost_and_not_waited_for(folder):
    async def run():
        async def mute(reader, writer):
            await reader.read()
            writer.close()

        async with await asyncio.start_unix_server(mute, folder / "trainer.sock"):
            with pytest.raises(TrainerLost, match=r"not said a word for 0.1 s"):
                await RemoteTrainer(folder / "trainer.sock", silent=0.1).weights()

    asyncio.run(run())


def test_errors_keep_what_they_say(folder, monkeypatch):
    """A full disk is still a full disk over here, and a bug has its name."""

    async def run():
        async with hosted(folder) as trainer:
            remote = RemoteTrainer(folder / "trainer.sock")
            for error, kind, words in (
                (OSError(errno.ENOSPC, "No space left on device"), OSError, "No space left"),
                (TrainerError("lower the learning rate"), TrainerError, "^lower the learning rate$"),
                (ZeroDivisionError("oops"), UserCodeError, "ZeroDivisionError: oops, at .*, in fails"),
            ):

                async def fails(folder, error=error):
                    raise error

                monkeypatch.setattr(trainer, "save", fails)
                with pytest.raises(kind, match=words) as caught:
                    await remote.save(folder)
                if kind is OSError:
                    assert caught.value.errno == errno.ENOSPC
            assert (await remote.step(make_batch(0, **PLAIN))).metrics["optimizer_steps"] == 1
            remote.close()

    asyncio.run(run())


def test_weights_lie_in_a_file_whose_fingerprint_was_told(folder):
    async def run():
        async with hosted(folder):
            remote = RemoteTrainer(folder / "trainer.sock")
            for seed in range(5):
                await remote.step(make_batch(seed, **PLAIN))
                update = await remote.weights()
                assert update.fingerprint() == update.expected
                assert update.canary is not None
            assert len(list((folder / "weights").iterdir())) == 3  # the last few stay, for engines that come back
            remote.close()

    asyncio.run(run())


def test_a_batch_is_sent_as_raw_buffers():
    assert len(encode(make_batch(0))) < 40 * sum(len(sample) for sample in make_batch(0)) + 3000
