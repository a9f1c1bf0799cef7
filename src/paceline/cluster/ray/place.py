"""`placement = "ray"`: the same orchestrator in this process, everything else wherever there is room."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from ray.exceptions import RayError

from paceline.cluster.local import Placed, engine_for, make_room_for_adapters, pick_device, renderer_of
from paceline.cluster.ray.cluster import Room, joined
from paceline.cluster.ray.engines import EngineActor, RayEngine
from paceline.cluster.ray.growth import Growth
from paceline.cluster.ray.ranks import RankActor, RayTrainer
from paceline.cluster.ray.workers import RayWorkers, WorkerActor
from paceline.config import RunConfig
from paceline.config.inference import Sampling
from paceline.envs.workers import elsewhere
from paceline.errors import PacelineError
from paceline.inference import EmbeddedEngine, Pool
from paceline.inference.past import PoolWithPast
from paceline.model import load_model, load_tokenizer
from paceline.monitor import RunDirectory
from paceline.orchestrator import lay_out
from paceline.orchestrator.past import members
from paceline.rollout import Recorder, Voice

START_SECONDS = 1800.0
"""For all parts to load the model, perhaps from a slow disk, and to compile it."""
REQUESTS = 4096
"""Calls one actor answers at once; what an engine runs at once is its own setting."""
log = logging.getLogger("paceline.ray")


@asynccontextmanager
async def on_ray(config: RunConfig, dumps: Path, phase: Callable[[str], None], given: Any) -> AsyncGenerator[Placed]:
    """Reserve room, start engines, ranks and workers, and end them all with the run."""
    async with AsyncExitStack() as stack:
        phase("preparing environments")
        courses = lay_out(config, given)
        tokenizer = load_tokenizer(config.model)
        past = sum(member.league.size for member in members(courses))
        config = make_room_for_adapters(config, past)
        phase("joining Ray")
        stack.enter_context(joined(config))
        room = await Room.reserve(config)
        stack.callback(room.give_back)
        parts = Parts(config, room, RunDirectory(dumps.parent).live)

        phase(f"starting {parts.words} of {config.model.name}")
        engines = [parts.engine(number) for number in range(room.needs.engines)]
        for engine in engines:
            stack.callback(engine.close)
        trainer = RayTrainer(config, parts.ranks)
        stack.callback(trainer.close)
        if room.needs.workers:
            workers = RayWorkers([parts.worker(number) for number in range(room.needs.workers)])
            stack.callback(workers.close)
            stack.enter_context(elsewhere(workers.call))
        hello = await trainer.meet()
        await parts.up(engines)

        def twin() -> EmbeddedEngine:
            """Who speaks for a past version that is a whole model: an engine of this process."""
            model = load_model(config.model, pick_device(config.device))
            return engine_for(model.requires_grad_(False), config)

        with_past = PoolWithPast(engines, twin) if past else None
        pool = with_past or Pool(engines)
        stack.callback(pool.close)
        renderer = renderer_of(tokenizer, hello.ends, config.model)
        recorder = Recorder(config.recording.host, config.recording.port, config.recording.advertise)

        def voice(sampling: Sampling) -> Voice:
            stops = frozenset((*hello.ends, *sampling.stop_token_ids))
            return Voice(pool, renderer, sampling, stops, recorder)

        if config.cluster.most_engines is not None:
            await stack.enter_async_context(Growth(parts, pool, config.cluster.most_engines))
        yield Placed(pool, trainer, tokenizer, courses, voice, hello.device, hello.parameters, with_past)


class Parts:
    """Makes the actors of one run."""

    def __init__(self, config: RunConfig, room: Room, live: Path) -> None:
        live.mkdir(parents=True, exist_ok=True)
        self.needs = room.needs
        self._config, self._room, self._live = config, room, str(live.resolve())
        self._lives = 0
        """Times the ranks were started."""
        cores = config.cluster
        # Each part has its own cores, and is told how many: it would take all that its machine has.
        self._text = config.model_copy(
            update={
                "engine": config.engine.model_copy(
                    update={"threads": config.engine.threads or max(1, int(cores.engine_cpus))}
                ),
                "trainer": config.trainer.model_copy(
                    update={"threads": config.trainer.threads or max(1, int(cores.rank_cpus))}
                ),
                "runs": str(Path(config.runs).resolve()),
            }
        ).model_dump_json()

    @property
    def words(self) -> str:
        needs = self.needs
        return f"{needs.engines} engines, {needs.ranks} trainer ranks and {needs.workers} workers"

    def engine(self, number: int) -> RayEngine:
        name = f"engine-{number}"
        return RayEngine(self._start(EngineActor, number, name, again=True), name)

    def arguments(self, name: str) -> list[str]:
        return [self._text, name, self._live]

    def ranks(self) -> list[Any]:
        """All of them, anew: each in its old place, under a name of its own, for the old one's is not free at once. Ray
        must not start one alone, it would wait for its group."""
        first, again = self.needs.engines, f"+{self._lives}" if self._lives else ""
        self._lives += 1
        return [
            self._room.start(
                RankActor,
                first + rank,
                self.full_name(f"rank-{rank}{again}"),
                self.arguments(f"rank-{rank}"),
                again=False,
                at_once=REQUESTS,
            )
            for rank in range(self.needs.ranks)
        ]

    def worker(self, number: int) -> Any:
        place = self.needs.engines + self.needs.ranks + number
        return self._start(WorkerActor, place, f"worker-{number}", again=True)

    async def up(self, engines: Sequence[RayEngine]) -> None:
        """Wait until all engines have loaded the model."""
        try:
            async with asyncio.timeout(START_SECONDS):
                await asyncio.gather(*(_here(engine) for engine in engines))
        except TimeoutError:
            raise PacelineError(f"the engines were not up within {START_SECONDS:g} s: see {self._live}") from None

    def full_name(self, name: str) -> str:
        return f"{self._config.name}/{name}"

    def _start(self, kind: type, place: int, name: str, *, again: bool) -> Any:
        return self._room.start(kind, place, self.full_name(name), self.arguments(name), again=again, at_once=REQUESTS)


async def _here(engine: RayEngine) -> None:
    try:
        await engine.actor.whereabouts.remote()
    except RayError as error:
        cause = [line for line in str(error).splitlines() if line.strip()]
        raise PacelineError(f"{engine.name} cannot start: {cause[-1].strip() if cause else error}") from error
