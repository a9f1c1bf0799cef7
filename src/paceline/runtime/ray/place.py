"""Places a run's engines, ranks, workers and scorers on Ray, beside the orchestrator in this process."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from transformers import PreTrainedTokenizerBase

from paceline.clients import Pool
from paceline.clients.frozen import SAMPLE, FrozenPool, attach, same_words
from paceline.config import RunConfig
from paceline.config.cluster import scored_here
from paceline.config.model import ModelConfig, ModelRef
from paceline.envs.workers import elsewhere
from paceline.errors import PacelineError
from paceline.model import load_tokenizer
from paceline.observe.monitor import RunDirectory
from paceline.runtime.local import Placed, prepare, with_sections
from paceline.runtime.ray.cluster import Needs, Room, joined, last_line
from paceline.runtime.ray.engines import EngineActor, RayEngine, ScorerActor
from paceline.runtime.ray.ranks import RankActor, RayTrainer, RayWorkers, WeightsGroup, WorkerActor

CLOSE_SECONDS = 5.0
START_SECONDS = 1800.0
"""For all parts to load the model, perhaps from a slow disk, and to compile it."""
log = logging.getLogger("paceline.ray")


@asynccontextmanager
async def on_ray(config: RunConfig, dumps: Path, phase: Callable[[str], None], given: Any) -> AsyncGenerator[Placed]:
    """Reserve room, start engines, ranks and workers, and end them all with the run."""
    async with AsyncExitStack() as stack:
        driver = prepare(config, phase, given)
        config = driver.config
        phase("joining Ray")
        stack.enter_context(joined(config))
        needs = Needs.of(config, ray.cluster_resources().get("GPU", 0.0))
        room = await Room.reserve(needs)
        stack.callback(room.give_back)
        parts = RayParts(config, room, needs, RunDirectory(dumps.parent).live)
        trainer = RayTrainer(config, parts.ranks)
        parts.group = weights_group(config, needs, trainer.first)

        phase(f"starting {needs.words} of {config.model.name}")
        engines = [parts.engine(number) for number in range(needs.counts["engine"])]
        teachers = parts.scorers()
        served = [*engines, *(scorer for each in teachers.values() for scorer in each)]
        for part in served:
            stack.callback(part.close)
        stack.callback(trainer.close)
        if needs.counts["worker"]:
            workers = RayWorkers([parts.worker(number) for number in range(needs.counts["worker"])])
            stack.callback(workers.close)
            stack.enter_context(elsewhere(workers.call))
        hello = await trainer.meet()
        await parts.up(served)
        pool = driver.pool(engines)
        stack.callback(pool.close)
        placed = driver.placed(pool, trainer, hello.ends, hello.device, hello.parameters)
        if config.cluster.most_engines is not None:
            await stack.enter_async_context(growing(parts, pool, config.cluster.most_engines))
        yield replace(placed, attach=partial(attach_scorers, config, driver.tokenizer, teachers))


def weights_group(config: RunConfig, needs: Needs, first_rank: Callable[[], Any]) -> WeightsGroup | None:
    """The group a run broadcasts in, if it is to. Over NCCL where every member has a GPU of its own."""
    own = min(needs.each[part]["GPU"] for part in ("engine", "rank")) >= 1
    path = config.weights.path
    if path == "broadcast" or (path == "auto" and own and needs.counts["engine"] > 1):
        return WeightsGroup(first_rank, "cuda" if own else "cpu")
    return None


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
        return RayEngine(self._start(EngineActor, "engine", number, room=room), name, self.group)

    def scorers(self) -> dict[str, list[RayEngine]]:
        """For each teacher of the run's own, all that score for it."""
        found: dict[str, list[RayEngine]] = {}
        numbers = count()
        for model in scored_here(self._config):
            text = config_elsewhere(of_teacher(self._config, model), self._config.cluster.scorer_cpus)
            found[model] = [
                RayEngine(self._start(ScorerActor, "scorer", number, text), f"scorer-{number}")
                for number in islice(numbers, self._config.cluster.scorers)
            ]
        return found

    def ranks(self) -> list[Any]:
        """All of them, anew: each in its old place, under a name of its own, for the old one's is not free at once. Ray
        must not start one alone, it would wait for its group."""
        suffix = f"+{self._lives}" if self._lives else ""
        self._lives += 1
        numbers = range(self.needs.counts["rank"])
        return [self._start(RankActor, "rank", number, suffix=suffix, again=False) for number in numbers]

    def worker(self, number: int) -> Any:
        return self._start(WorkerActor, "worker", number)

    async def up(self, engines: Sequence[RayEngine]) -> None:
        """Wait until all engines and scorers have loaded their model."""

        async def wait(engine: RayEngine) -> None:
            try:
                await engine.actor.whereabouts.remote()  # bounded: by START_SECONDS
            except RayError as error:
                raise PacelineError(f"{engine.name} cannot start: {last_line(error)}") from error

        try:
            async with asyncio.timeout(START_SECONDS):
                await asyncio.gather(*map(wait, engines))
        except TimeoutError:
            raise PacelineError(f"the engines were not up within {START_SECONDS:g} s: see {self._live}") from None

    def _start(
        self,
        kind: type,
        part: str,
        number: int,
        text: str = "",
        *,
        room: Room | None = None,
        suffix: str = "",
        again: bool = True,
    ) -> Any:
        """An actor in its place of the run's room, or in a room of its own; Ray starts it `again` after a death."""
        name = f"{part}-{number}"
        arguments = [text or self._text, name, self._live]
        place, room = (self.needs.index(part, number), self._room) if room is None else (0, room)
        return room.start(kind, place, f"{self._config.name}/{name}{suffix}", arguments, again=again)


@asynccontextmanager
async def growing(parts: RayParts, pool: Pool, most: int) -> AsyncGenerator[None]:
    """Ask Ray for room for one engine more, again and again, and let each join the pool. It serves as soon as it has
    the current weights.

    Ray gives the room once one machine has all of it: what is free on several together would hold no engine.
    """
    more: list[tuple[Room, RayEngine]] = []

    async def grow() -> None:
        try:
            for number in range(parts.needs.counts["engine"], most):
                room = await Room.when_free([parts.needs.each["engine"]])  # unbounded: as long as the run lasts
                engine = parts.engine(number, room)
                more.append((room, engine))
                log.warning("there is room for %s: it joins", engine.name)
                pool.add(engine)
        except RayError as error:
            log.warning("the run grows no further: %s", error)

    task = asyncio.create_task(grow(), name="room for more engines")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task], timeout=CLOSE_SECONDS)
        for room, engine in more:
            engine.close()
            room.give_back()


async def attach_scorers(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, teachers: Mapping[str, Sequence[RayEngine]], ref: ModelRef
) -> FrozenPool:
    """The scorers of a reference: the run's own actors, which share requests by least load, or an endpoint."""
    if ref.base_url is not None:
        return await attach(ref, tokenizer)
    theirs = await asyncio.to_thread(load_tokenizer, of_teacher(config, ref.name).model)
    same_words(f"`{ref.name}`", tokenizer.encode(SAMPLE), theirs.encode(SAMPLE))
    return FrozenPool(teachers[ref.name], ref)


def of_teacher(config: RunConfig, name: str) -> RunConfig:
    """The config of a scorer of this model: the run's settings, with another model and no adapter."""
    policy = config.model
    teacher = ModelConfig(
        name=name, dtype=policy.dtype, fp32_head=policy.fp32_head, trust_remote_code=policy.trust_remote_code
    )
    return config.model_copy(update={"model": teacher})


def config_elsewhere(config: RunConfig, engine_cpus: float) -> str:
    """The run file as parts elsewhere read it. Each has its own cores, and is told how many: it would take all that its
    machine has. Folders are named in full: other processes stand elsewhere."""
    threads = config.engine.threads or max(1, int(engine_cpus))
    ranks = config.trainer.threads or max(1, int(config.cluster.rank_cpus))
    folder = Path(config.model.name).expanduser()
    name = str(folder.resolve()) if folder.is_dir() else config.model.name
    config = with_sections(config, engine={"threads": threads}, trainer={"threads": ranks}, model={"name": name})
    return config.model_copy(update={"runs": str(Path(config.runs).resolve())}).model_dump_json()
