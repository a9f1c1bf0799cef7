"""Places a run's engines, ranks, workers and scorers on Ray, beside the orchestrator in this process."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from transformers import PreTrainedTokenizerBase

from paceline.clients import Pool
from paceline.clients.frozen import SAMPLE, Frozen, FrozenPool, attach, same_words
from paceline.config import RunConfig
from paceline.config.cluster import scored_here
from paceline.config.model import ModelConfig, ModelRef
from paceline.envs.workers import elsewhere
from paceline.errors import PacelineError
from paceline.model import load_tokenizer
from paceline.observe.monitor import RunDirectory
from paceline.orchestrator import build_train_envs
from paceline.runtime.local import Placed, make_room_for_adapters, past_versions, policy_clients, pool_of, with_sections
from paceline.runtime.ray.cluster import Needs, Room, joined, last_line
from paceline.runtime.ray.collective import WeightsGroup, weights_group
from paceline.runtime.ray.engines import EngineActor, RayEngine
from paceline.runtime.ray.ranks import RankActor, RayTrainer, RayWorkers, WorkerActor
from paceline.runtime.serving import scoring
from paceline.runtime.torch_backend import league_engine


class ScorerActor(EngineActor):
    """One scorer, which never samples. Started again after a death it is as good as before: its model is frozen."""

    serves = scoring


class RayScorer(RayEngine):
    """A handle on one. It belongs to the placement, not to its callers."""

    async def aclose(self) -> None: ...


class Scorers:
    """Finds the scorers of a reference: the run's own actors, which share requests by least load, or an endpoint that
    the run did not start."""

    def __init__(self, config: RunConfig, tokenizer: PreTrainedTokenizerBase, of: dict[str, list[RayScorer]]) -> None:
        self._config, self._tokenizer, self._of = config, tokenizer, of

    async def attach(self, ref: ModelRef) -> FrozenPool:
        if ref.base_url is not None:
            return await attach(ref, self._tokenizer)
        theirs = await asyncio.to_thread(load_tokenizer, of_teacher(self._config, ref.name).model)
        same_words(f"`{ref.name}`", self._tokenizer.encode(SAMPLE), theirs.encode(SAMPLE))
        engines: Sequence[Frozen] = self._of[ref.name]
        return FrozenPool(engines, ref)


def of_teacher(config: RunConfig, name: str) -> RunConfig:
    """The config of a scorer of this model: the run's settings, with another model and no adapter."""
    policy = config.model
    teacher = ModelConfig(
        name=name, dtype=policy.dtype, fp32_head=policy.fp32_head, trust_remote_code=policy.trust_remote_code
    )
    return config.model_copy(update={"model": teacher})


CLOSE_SECONDS = 5.0


class Growth:
    """Asks Ray for room for one engine more, again and again, and lets each join the pool. It serves as soon as it has
    the current weights.

    Ray gives the room once one machine has all of it: what is free on several together would hold no engine.
    """

    def __init__(self, parts: "RayParts", pool: Pool, most: int) -> None:
        self._parts, self._pool, self._most = parts, pool, most
        self._more: list[tuple[Room, RayEngine]] = []

    async def __aenter__(self) -> "Growth":
        self._task = asyncio.create_task(self._grow(), name="room for more engines")
        return self

    async def __aexit__(self, *how: Any) -> None:
        self._task.cancel()
        await asyncio.wait([self._task], timeout=CLOSE_SECONDS)
        for room, engine in self._more:
            engine.close()
            room.give_back()

    async def _grow(self) -> None:
        needs = self._parts.needs
        try:
            for number in range(needs.engines, self._most):
                room = await Room.when_free([needs.engine])  # unbounded: as long as the run lasts
                engine = self._parts.engine(number, room)
                self._more.append((room, engine))
                log.warning("there is room for %s: it joins", engine.name)
                self._pool.add(engine)
        except RayError as error:
            log.warning("the run grows no further: %s", error)


START_SECONDS = 1800.0
"""For all parts to load the model, perhaps from a slow disk, and to compile it."""
log = logging.getLogger("paceline.ray")


@asynccontextmanager
async def on_ray(config: RunConfig, dumps: Path, phase: Callable[[str], None], given: Any) -> AsyncGenerator[Placed]:
    """Reserve room, start engines, ranks and workers, and end them all with the run."""
    async with AsyncExitStack() as stack:
        phase("preparing environments")
        courses = build_train_envs(config, given)
        tokenizer = load_tokenizer(config.model)
        past = past_versions(courses)
        config = make_room_for_adapters(config, past)
        phase("joining Ray")
        stack.enter_context(joined(config))
        needs = Needs.of(config, ray.cluster_resources().get("GPU", 0.0))
        room = await Room.reserve(needs)
        stack.callback(room.give_back)
        parts = RayParts(config, room, needs, RunDirectory(dumps.parent).live)
        trainer = RayTrainer(config, parts.ranks)
        parts.group = weights_group(config, needs, trainer.first)

        phase(f"starting {needs.words} of {config.model.name}")
        engines = [parts.engine(number) for number in range(needs.engines)]
        teachers = parts.scorers()
        scorers = [scorer for each in teachers.values() for scorer in each]
        for part in (*engines, *scorers):
            stack.callback(part.close)
        stack.callback(trainer.close)
        if needs.workers:
            workers = RayWorkers([parts.worker(number) for number in range(needs.workers)])
            stack.callback(workers.close)
            stack.enter_context(elsewhere(workers.call))
        hello = await trainer.meet()
        await parts.up([*engines, *scorers])
        pool = pool_of(engines, past, lambda: league_engine(config))
        stack.callback(pool.close)
        voice = policy_clients(config, pool, tokenizer, hello.ends)
        if config.cluster.most_engines is not None:
            await stack.enter_async_context(Growth(parts, pool, config.cluster.most_engines))
        find = Scorers(config, tokenizer, teachers).attach
        yield Placed(pool, trainer, tokenizer, courses, voice, hello.device, hello.parameters, find)


class RayParts:
    """Makes the actors of one run."""

    def __init__(self, config: RunConfig, room: Room, needs: Needs, live: Path) -> None:
        live.mkdir(parents=True, exist_ok=True)
        self.needs = needs
        self._config, self._room, self._live = config, room, str(live.resolve())
        self._lives = 0
        """Times the ranks were started."""
        self.group: WeightsGroup | None = None
        """In which weights are broadcast, if they are."""
        self._text = config_elsewhere(config, config.cluster.engine_cpus)

    def engine(self, number: int, room: Room | None = None) -> RayEngine:
        """An engine in its place of the run's room, or in a room of its own."""
        name = f"engine-{number}"
        place, room = (number, self._room) if room is None else (0, room)
        return RayEngine(self._start(EngineActor, place, name, self._text, room), name, self.group)

    def scorers(self) -> dict[str, list[RayScorer]]:
        """For each teacher of the run's own, all that score for it."""
        found: dict[str, list[RayScorer]] = {}
        place = first = self.needs.engines + self.needs.ranks + self.needs.workers
        for model in scored_here(self._config):
            text = config_elsewhere(of_teacher(self._config, model), self._config.cluster.scorer_cpus)
            for _ in range(self._config.cluster.scorers):
                name = f"scorer-{place - first}"
                scorer = RayScorer(self._start(ScorerActor, place, name, text), name)
                found.setdefault(model, []).append(scorer)
                place += 1
        return found

    def ranks(self) -> list[Any]:
        """All of them, anew: each in its old place, under a name of its own, for the old one's is not free at once. Ray
        must not start one alone, it would wait for its group."""
        first, again = self.needs.engines, f"+{self._lives}" if self._lives else ""
        self._lives += 1
        return [
            self._room.start(
                RankActor,
                first + rank,
                self._full_name(f"rank-{rank}{again}"),
                [self._text, f"rank-{rank}", self._live],
                again=False,
            )
            for rank in range(self.needs.ranks)
        ]

    def worker(self, number: int) -> Any:
        place = self.needs.engines + self.needs.ranks + number
        return self._start(WorkerActor, place, f"worker-{number}", self._text)

    async def up(self, engines: Sequence[RayEngine]) -> None:
        """Wait until all engines and scorers have loaded their model."""
        try:
            async with asyncio.timeout(START_SECONDS):
                await asyncio.gather(*(_here(engine) for engine in engines))
        except TimeoutError:
            raise PacelineError(f"the engines were not up within {START_SECONDS:g} s: see {self._live}") from None

    def _full_name(self, name: str) -> str:
        return f"{self._config.name}/{name}"

    def _start(self, kind: type, place: int, name: str, text: str, room: Room | None = None) -> Any:
        """Ray starts it anew after a death."""
        arguments = [text, name, self._live]
        return (room or self._room).start(kind, place, self._full_name(name), arguments, again=True)


def config_elsewhere(config: RunConfig, engine_cpus: float) -> str:
    """The run file as parts elsewhere read it. Each has its own cores, and is told how many: it would take all that its
    machine has. Folders are named in full: other processes stand elsewhere."""
    threads = config.engine.threads or max(1, int(engine_cpus))
    ranks = config.trainer.threads or max(1, int(config.cluster.rank_cpus))
    folder = Path(config.model.name).expanduser()
    name = str(folder.resolve()) if folder.is_dir() else config.model.name
    config = with_sections(config, engine={"threads": threads}, trainer={"threads": ranks}, model={"name": name})
    return config.model_copy(update={"runs": str(Path(config.runs).resolve())}).model_dump_json()


async def _here(engine: RayEngine) -> None:
    try:
        await engine.actor.whereabouts.remote()
    except RayError as error:
        raise PacelineError(f"{engine.name} cannot start: {last_line(error)}") from error
