"""Runs trainer ranks as Ray actors that make one trainer, and reward and tool code on other machines.

The first rank broadcasts full weights to all engines at once, by a collective:

    every engine is asked to load -> the first rank and those engines form a group, or keep theirs
                                  -> bucket by bucket to all of them at the same time -> each applies what it staged

The update lies in the object store of the first rank's machine as well: an engine that is left out, because it was
dead, hung or not yet there, fetches it from there. A group that breaks meets once more, without those that are gone.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import ray
import torch
from numpy.typing import NDArray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from ray.util import get_node_ip_address
from transformers import PreTrainedTokenizerBase

from paceline.config import RunConfig
from paceline.data.packing import Cost
from paceline.envs.workers import ATTEMPTS, LOAD_SECONDS, Failure, WorkerFailed, WorkerLimits, Workers
from paceline.errors import first_line
from paceline.model import end_tokens, load_tokenizer
from paceline.runtime import rpc
from paceline.runtime.ray.engines import (
    FLAT_BUFFER,
    ObjectTensors,
    RayActor,
    RayEngine,
    as_flat_buffer,
    last_line,
    pack_tensors,
)
from paceline.runtime.torch_parts import LoadedTrainer, build_trainer, join_ranks
from paceline.trainer import TrainerError, TrainerLost
from paceline.trainer.backend import cost_of
from paceline.util.child_process import free_port
from paceline.weights.broadcast import Sender
from paceline.weights.update import WeightUpdate

START_SECONDS = 1800.0
"""For all ranks to be placed, to load the model and to form their process group."""
log = logging.getLogger("paceline.ray")


class RankActor(RayActor):
    """One rank: its share of the model, of each batch, and of each checkpoint. The first sends weights to engines."""

    _sender: Sender | None = None

    async def rendezvous_address(self) -> tuple[str, int]:
        """Host and port of the process group's store, if this is the first rank."""
        return get_node_ip_address(), free_port("")

    async def join(self, host: str, port: int, rank: int, world: int) -> tuple[bytes, tuple[float, float]]:
        """Join the process group and load the model; returns a greeting, and what a token and a pair of tokens cost."""

        def load() -> tuple[LoadedTrainer, PreTrainedTokenizerBase]:
            built = build_trainer(self.config, join_ranks(self.config, rank, world, f"{host}:{port}"))
            return built, load_tokenizer(self.config.model)

        built, tokenizer = await asyncio.to_thread(load)
        self._handler = rpc.TrainerRpcHandler(built.trainer, tokenizer)
        cost = cost_of(built.model.config)
        hello = rpc.RpcHello(built.parameters, built.device, end_tokens(tokenizer, built.model))
        return rpc.encode_message(hello), (cost.linear, cost.attention)

    async def execute(self, call: bytes) -> bytes:
        """Step, save, load or export, with all the others."""
        return rpc.encode_message(await self._handler.answer(rpc.decode_call(call)))

    async def weights(self) -> tuple[bytes, NDArray]:
        """The weights' metadata and the weights themselves, on the first rank; the others help to gather them."""
        update = await self._handler.trainer.weights()
        expected = await asyncio.to_thread(update.fingerprint)
        data = await asyncio.to_thread(pack_tensors, update.tensors)
        return rpc.encode_message(rpc.SentWeights(update.version, "", update.adapter, expected, update.canary)), data

    async def open_group(self, members: int, device: str, seconds: float) -> list[dict[str, Any]]:
        """Listen for so many engines; answers with their invitations."""
        if self._sender is not None:
            self._sender.close()
        self._sender = Sender(members, device, seconds, host=get_node_ip_address())
        return [self._sender.invitation(rank) for rank in range(1, members + 1)]

    async def form_group(self) -> None:
        assert self._sender is not None
        await asyncio.to_thread(self._sender.form)

    async def stage_weights(self, weights: NDArray) -> int:
        """Look at weights in the object store of this machine; answers with their length in bytes."""
        self._flat_buffer = as_flat_buffer(weights)
        return len(self._flat_buffer)

    async def broadcast_weights(self) -> None:
        assert self._sender is not None
        flat_buffer, self._flat_buffer = self._flat_buffer, torch.empty(0, dtype=torch.uint8)
        await asyncio.to_thread(self._sender.send, {FLAT_BUFFER: flat_buffer})


class RayTrainer(rpc.RankGroup):
    """All ranks as one trainer. What a lost rank knew is gone, and `load` starts new ones."""

    def __init__(self, config: RunConfig, start: Callable[[], Sequence[Any]]) -> None:
        super().__init__(config)
        self._start = start

    async def start_ranks(self) -> rpc.RpcHello:
        """Start the ranks and wait until they have formed their process group and loaded the model."""
        self._ranks = self._start()
        try:
            async with asyncio.timeout(START_SECONDS):
                host, port = (await self._gather_ranks([self._ranks[0].rendezvous_address.remote()]))[0]
                world = len(self._ranks)
                joined = [rank.join.remote(host, port, i, world) for i, rank in enumerate(self._ranks)]
                (greeting, cost), *_ = await self._gather_ranks(joined)
        except TimeoutError:
            raise TrainerError(
                f"the trainer's ranks were not up within {START_SECONDS:g} s: is there still room for them? See "
                "`paceline status`, then add --resume latest"
            ) from None
        hello, self._cost = rpc.decode_from_trainer(greeting), Cost(*cost)
        assert isinstance(hello, rpc.RpcHello)
        self.version = 0
        return hello

    def first_rank(self) -> Any:
        """The rank that has the whole weights."""
        self._require_ranks()
        return self._ranks[0]

    async def weights(self) -> WeightUpdate:
        self._require_ranks()
        answers = [rank.weights.options(num_returns=2).remote() for rank in self._ranks]
        heads = await self._gather_ranks([head for head, _ in answers])
        sent = msgspec.msgpack.decode(heads[0], type=rpc.SentWeights)
        tensors = ObjectTensors(answers[0][1])
        return WeightUpdate(sent.version, tensors, sent.adapter, sent.expected, sent.canary)

    async def load(self, folder: Path) -> None:
        if not self._ranks:
            await self.start_ranks()
        await super().load(folder)

    def close(self) -> None:
        ranks, self._ranks = self._ranks, ()
        for rank in ranks:
            with contextlib.suppress(RayError):
                ray.kill(rank)

    async def _ask(self, rank: Any, call: rpc.RpcCall) -> rpc.RpcAnswer:
        return rpc.decode_answer(await rank.execute.remote(rpc.encode_message(call)))

    def _require_ranks(self) -> None:
        if not self._ranks:
            raise TrainerLost("the trainer's ranks are gone")

    def _rank_lost_error(self, rank: int, error: BaseException) -> BaseException | None:
        if isinstance(error, RayError) and not isinstance(error, RayTaskError):
            return TrainerLost(f"rank {rank} of {len(self._ranks)} is lost: {first_line(error)}")
        return None

    def _cause(self, ended: Mapping[int, BaseException | None]) -> BaseException:
        cause = super()._cause(ended)
        return TrainerError(last_line(cause)) if isinstance(cause, RayTaskError) else cause


SECONDS = 60.0
"""For a group to form, and for one bucket to arrive: how long a member that hangs can hold up the others."""
ECHO_SECONDS = 5.0
"""How much longer than a bucket the others are waited for once one has failed."""
LONGEST_SECONDS = 900.0
"""For a whole broadcast, and for all to apply it."""
MOST_FAILURES = 3
"""Broadcasts in a row that came to nothing, after which this run tries no more."""


@dataclass(eq=False, slots=True)
class BroadcastRound:
    """One update on its way to those who asked for it before it left."""

    wanted: dict[RayEngine, asyncio.Future[bytes | None]] = field(default_factory=dict)
    """Each engine's answer, as soon as it came; None where the update did not reach it."""
    begun: bool = False
    task: asyncio.Task[None] | None = None


class WeightsGroup:
    """The first rank and the engines, as the orchestrator leads them."""

    def __init__(self, first_rank: Callable[[], Any], device: str = "cpu", seconds: float = SECONDS) -> None:
        self._first_rank, self._device, self._seconds = first_rank, device, seconds
        self._met: tuple[Any, list[RayEngine]] | None = None
        self._turn = asyncio.Lock()
        self._failures = 0
        self.broadcasts = 0
        """Those that reached an engine."""

    async def deliver(self, engine: RayEngine, head: bytes, tensors: ObjectTensors) -> bytes | None:
        """The engine's answer to weights that were broadcast to it; None if they must reach it otherwise."""
        if self._failures >= MOST_FAILURES:
            return None
        if tensors.round is None:
            this = tensors.round = BroadcastRound()
            this.task = asyncio.ensure_future(self._broadcast(this, head, tensors.reference))
        if tensors.round.begun:
            self._met = None  # it comes late, or a second time: a restarted engine is in no group
            return None
        mine = tensors.round.wanted[engine] = asyncio.get_running_loop().create_future()
        return await mine  # bounded: each step of a broadcast is

    async def _broadcast(self, this: BroadcastRound, head: bytes, reference: Any) -> None:
        try:
            async with self._turn:  # bounded: by the broadcast before
                this.begun = True  # all engines that were asked in the same moment have said so
                left = list(this.wanted)
                for _ in range(2):
                    if left:
                        left = await self._try(left, this, head, reference)
                reached = any(answer.done() for answer in this.wanted.values())
                self._failures = 0 if reached else self._failures + 1
                self.broadcasts += reached
        finally:
            for answer in this.wanted.values():
                if not answer.done():
                    answer.set_result(None)

    async def _try(
        self, members: list[RayEngine], this: BroadcastRound, head: bytes, reference: Any
    ) -> list[RayEngine]:
        """Reach all of them; answers with those for whom it is worth another try."""

        async def send_to(engine: RayEngine, size: int) -> bytes:
            answer = await engine.actor.receive_weights.remote(head, size)
            if not this.wanted[engine].done():
                this.wanted[engine].set_result(answer)
            return answer

        try:
            rank = self._first_rank()
            outcomes = await self._form_group(rank, members)
            if not _failed(outcomes):
                async with asyncio.timeout(self._seconds):
                    size = await rank.stage_weights.remote(reference)
                calls = {engine: send_to(engine, size) for engine in members}
                outcomes = await self._gather({rank: rank.broadcast_weights.remote(), **calls})
        except (RayError, TrainerLost, TimeoutError) as error:  # the next call that needs the rank reports it
            log.warning("the first rank takes no part in a broadcast: %s", last_line(error))
            self._met = None
            return []
        left = [engine for engine in members if not this.wanted[engine].done()]
        if left:
            failed = _failed(outcomes)
            causes = "; ".join(map(last_line, failed.values())) or "no answer"
            log.warning("a broadcast of weights broke off: %s", causes)
            self._met = None
            left = [e for e in left if e in outcomes and not isinstance(failed.get(e), RayActorError)]
        return left

    async def _form_group(self, rank: Any, members: list[RayEngine]) -> dict[Any, Any]:
        if self._met == (rank, members):
            return {}
        async with asyncio.timeout(self._seconds):
            invitations = await rank.open_group.remote(len(members), self._device, self._seconds)
        calls = {
            engine: engine.actor.join_group.remote(invitation, self._device)
            for engine, invitation in zip(members, invitations, strict=True)
        }
        outcomes = await self._gather({rank: rank.form_group.remote(), **calls})
        if not _failed(outcomes):
            self._met = (rank, members)
        return outcomes

    async def _gather(self, calls: Mapping[Any, Awaitable[Any]]) -> dict[Any, Any]:
        """Each call's answer or error. After the first failure the others have as long as a bucket may take to fail
        too, and a call that is still open then is missing from the answer."""
        tasks = {asyncio.ensure_future(call): who for who, call in calls.items()}
        try:
            _, silent = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION, timeout=LONGEST_SECONDS)
            if silent:
                await asyncio.wait(silent, timeout=self._seconds + ECHO_SECONDS)
            done = {who: task for task, who in tasks.items() if task.done()}
            return {who: task.exception() or task.result() for who, task in done.items()}  # bounded: all are done
        finally:
            for task in tasks:
                task.cancel()


def _failed(outcomes: Mapping[Any, Any]) -> dict[Any, BaseException]:
    return {who: got for who, got in outcomes.items() if isinstance(got, BaseException)}


AGAIN_SECONDS = 0.5


class WorkerActor(RayActor):
    """Runs calls in processes of its machine."""

    def __init__(self, *arguments: str) -> None:
        super().__init__(*arguments)
        self._workers: dict[WorkerLimits, Workers] = {}

    async def call(
        self, function: str, args: Sequence[Any], timeout: float, limits: tuple[int, int | None, int]
    ) -> dict[str, Any]:
        """The function's value, or how it failed."""
        workers = self._workers.setdefault(WorkerLimits(*limits), Workers(*limits))
        try:
            return {"value": await workers.call(function, args, timeout)}
        except WorkerFailed as failed:
            return {"kind": failed.kind, "reason": str(failed)}


class RayWorkers:
    """Sends each call to the least busy actor. While Ray starts one again the others have its calls; a call whose
    machine dies under it is made once more, elsewhere."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self._busy = [0] * len(actors)
        self._away_until = [0.0] * len(actors)
        """When to ask an actor again that was being started."""
        self._actors = actors

    async def call(self, function: str, args: Sequence[Any], timeout: float, limits: WorkerLimits) -> Any:
        now = asyncio.get_running_loop().time
        lost: list[int] = []
        waiting_since: float | None = None
        while len(lost) < ATTEMPTS:
            began = now()
            away = [until > began for until in self._away_until]
            chosen = min(range(len(away)), key=lambda at: (at in lost, away[at], self._busy[at]))
            if away[chosen]:  # all are, but for those that were lost under this call
                waiting_since = waiting_since or began
                if began - waiting_since > LOAD_SECONDS:
                    raise WorkerFailed("exited", f"no worker was back within {LOAD_SECONDS:g} s")
                await asyncio.sleep(AGAIN_SECONDS)  # bounded: by LOAD_SECONDS
                continue
            self._busy[chosen] += 1
            reference = self._actors[chosen].call.remote(
                function, list(args), timeout, (limits.count, limits.memory_mb, limits.answer_bytes)
            )
            try:
                answer = await reference  # bounded: the actor ends the call at its timeout
            except asyncio.CancelledError:
                ray.cancel(reference)  # its process is killed, as it would be here
                raise
            except RayTaskError:
                raise  # a bug over there: no worker was lost
            except ActorUnavailableError:  # it is being started again, which is no verdict on the call
                self._away_until[chosen] = now() + AGAIN_SECONDS
                continue
            except RayError:
                lost.append(chosen)
                continue
            finally:
                self._busy[chosen] -= 1
            if "value" in answer:
                return answer["value"]
            kind: Failure = answer["kind"]
            raise WorkerFailed(kind, answer["reason"])
        raise WorkerFailed("exited", f"{len(lost)} workers were lost under it")

    def close(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
