"""Places a run's engines, ranks, workers and scorers on Ray, beside the orchestrator in this process.

It joins a Ray cluster, or starts one, and reserves room on it for the actors of the run.
"""

import asyncio
import logging
import math
import os
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from transformers import PreTrainedTokenizerBase

from paceline.clients import Pool
from paceline.clients.frozen import PROBE_TEXT, FrozenPool, attach, check_same_vocabulary
from paceline.config import RunConfig
from paceline.config.cluster import scored_models
from paceline.config.model import ModelConfig, ModelRef
from paceline.envs.workers import run_remotely
from paceline.errors import PacelineError
from paceline.model import load_tokenizer
from paceline.observe.monitor import RunDirectory
from paceline.runtime.local import RunParts, prepare, with_sections
from paceline.runtime.ray.engines import CONTROL, EngineActor, RayEngine, ScorerActor, SnapshotActor, last_line
from paceline.runtime.ray.ranks import RankActor, RayTrainer, RayWorkers, WeightsGroup, WorkerActor
from paceline.util.private_folder import shorten_ray_sockets

NAMESPACE = "paceline"
ROOM_SECONDS = 60.0
"""How long the cluster may take to make room."""

REQUESTS = 4096
"""Calls one actor answers at once; what an engine runs at once is its own setting."""
CONTROLS = 64
"""Calls of its control group that one actor answers at once, beside its requests."""
Resources = dict[str, float]


@dataclass(frozen=True, slots=True)
class ResourceNeeds:
    """How many actors of each part a run has, and the resources that each of them asks for."""

    counts: dict[str, int]
    """In the order of their bundles."""
    each: dict[str, Resources]

    @classmethod
    def of(cls, config: RunConfig, gpus: float) -> "ResourceNeeds":
        c = config.cluster
        parts = {
            "engine": (c.engines, c.engine_cpus, c.engine_gpus),
            "rank": (config.trainer.parallel.ranks, c.rank_cpus, c.rank_gpus),
            "worker": (c.workers, c.worker_cpus, 0.0),
            "scorer": (c.scorers * len(scored_models(config)), c.scorer_cpus, c.scorer_gpus),
            "reference": (config.trainer.kl.workers if config.trainer.kl else 0, c.scorer_cpus, c.scorer_gpus),
        }
        one = 1.0 if gpus and config.device != "cpu" else 0.0
        each = {part: {"CPU": cpus, "GPU": one if gpu is None else gpu} for part, (_, cpus, gpu) in parts.items()}
        return cls({part: count for part, (count, *_) in parts.items()}, each)

    @property
    def actors(self) -> list[tuple[str, int]]:
        """Part and number of each actor, in the order of the bundles."""
        return [(part, number) for part, count in self.counts.items() for number in range(count)]

    @property
    def bundles(self) -> list[Resources]:
        return [_bundle(self.each[part]) for part, _ in self.actors]

    @property
    def description(self) -> str:
        names = {"rank": "trainer rank", "reference": "KL reference worker"}
        found = [(count, names.get(part, part)) for part, count in self.counts.items() if count]
        *most, last = [f"{count} {name}{'s' * (count > 1)}" for count, name in found]
        return f"{', '.join(most)} and {last}"

    def total(self, name: str) -> float:
        return sum(bundle.get(name, 0.0) for bundle in self.bundles)


def join_cluster(config: RunConfig) -> AbstractContextManager[None]:
    """Be part of the cluster that the run file names, or of one that lives as long as the run does."""
    if ray.is_initialized():
        return nullcontext()
    if (address := config.cluster.address) is not None:
        return connect_ray(address, "start one with `paceline up`, or leave cluster.address out")
    # Alone on a machine, cores are only counted: what must fit is memory, and that the planner looks at.
    cores = max(os.cpu_count() or 1, math.ceil(ResourceNeeds.of(config, 0).total("CPU")))
    shorten_ray_sockets()
    return connect_ray("local", num_cpus=cores, include_dashboard=False)


@contextmanager
def connect_ray(address: str, advice: str = "", **more: Any) -> Generator[None]:
    """Be connected to a cluster while the block runs. `advice` is for the user where none answers."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False, **more)
    except (ConnectionError, RuntimeError, ValueError) as error:
        if not advice:
            raise
        raise PacelineError(f"no cluster answers at {address} ({error}): {advice}") from error
    try:
        yield
    finally:
        ray.shutdown()


@dataclass(frozen=True, slots=True)
class Reservation:
    """Reserved places, one for each actor of a run. All are reserved or none, so two runs cannot each hold half."""

    _group: PlacementGroup
    _bundles: Sequence[Resources]

    @classmethod
    async def reserve(cls, needs: ResourceNeeds) -> "Reservation":
        """Room for a whole run, within a bound."""
        there = ray.cluster_resources()
        for name, unit in (("GPU", "GPUs"), ("CPU", "cores")):
            if needs.total(name) > there.get(name, 0.0) + 1e-6:
                raise PacelineError(
                    f"the run needs {needs.total(name):g} {unit} ({needs.description}) and the cluster has "
                    f"{there.get(name, 0.0):g}: ask for fewer in [cluster] or [trainer.parallel], or join more "
                    "machines with `paceline up --join`"
                )
        try:
            async with asyncio.timeout(ROOM_SECONDS):
                return await cls.when_free(needs.bundles)
        except TimeoutError:
            free = ", ".join(f"{amount:g} {name}" for name, amount in sorted(ray.available_resources().items()))
            raise PacelineError(
                f"the cluster made no room for {needs.bundles} within {ROOM_SECONDS:g} s: free are {free}; wait for "
                "other runs to end (`paceline status`), or ask for less"
            ) from None

    @classmethod
    async def when_free(cls, bundles: Sequence[Resources]) -> "Reservation":
        """Wait for room, each bundle on one machine. A caller that stops waiting leaves nothing behind."""
        group = placement_group([_bundle(one) for one in bundles], strategy="PACK")
        try:
            await group.ready()  # unbounded: the caller decides how long
        except BaseException:
            remove_placement_group(group)
            raise
        return cls(group, bundles)

    def start_actor(self, kind: type, place: int, name: str, arguments: Sequence[Any], *, again: bool) -> Any:
        """An actor in the given place."""
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=place)
        return actor(kind, name, arguments, self._bundles[place], again=again, scheduling_strategy=strategy)

    def release(self) -> None:
        remove_placement_group(self._group)


def _bundle(resources: Resources) -> Resources:
    """Ray wants something of every bundle, and nothing of which there is none."""
    return {name: amount for name, amount in resources.items() if amount} or {"CPU": 0.001}


def actor(
    kind: type,
    name: str,
    arguments: Sequence[Any],
    resources: Resources,
    *,
    again: bool,
    at_once: int = REQUESTS,
    **options: Any,
) -> Any:
    """A named actor, which Ray starts `again` after a death. Ray itself retries no call: the caller decides."""
    options |= {
        "name": name,
        "num_cpus": resources.get("CPU", 0.0),
        "num_gpus": resources.get("GPU", 0.0),
        "max_restarts": -1 if again else 0,
        "max_task_retries": 0,
        "max_concurrency": at_once,
        "concurrency_groups": {CONTROL: CONTROLS},
    }
    try:
        return ray.remote(**options)(kind).remote(*arguments)
    except ValueError as error:
        if "already" not in str(error):
            raise
        run = name.partition("/")[0]
        raise PacelineError(f"a run named {run} is on this cluster already: choose another --name ({error})") from error


CLOSE_SECONDS = 5.0
START_SECONDS = 1800.0
"""For all parts to load the model, perhaps from a slow disk, and to compile it."""
log = logging.getLogger("paceline.ray")


@asynccontextmanager
async def ray_placement(
    config: RunConfig, run_folder: Path, phase: Callable[[str], None], given: Any
) -> AsyncGenerator[RunParts]:
    """Reserve room, start engines, ranks and workers, and end them all with the run."""
    async with AsyncExitStack() as stack:
        driver = prepare(config, phase, given)
        config = driver.config
        phase("joining Ray")
        stack.enter_context(join_cluster(config))
        needs = ResourceNeeds.of(config, ray.cluster_resources().get("GPU", 0.0))
        room = await Reservation.reserve(needs)
        stack.callback(room.release)
        parts = RayParts(config, room, needs, RunDirectory(run_folder).live)
        trainer = RayTrainer(config, parts.ranks)
        # Weights are broadcast over NCCL where every member has a GPU of its own.
        own = min(needs.each[part]["GPU"] for part in ("engine", "rank")) >= 1
        path = config.weights.path
        if path == "broadcast" or (path == "auto" and own and needs.counts["engine"] > 1):
            parts.group = WeightsGroup(trainer.first_rank, "cuda" if own else "cpu")

        phase(f"starting {needs.description} of {config.model.name}")
        engines = [parts.engine(number) for number in range(needs.counts["engine"])]
        teachers = parts.scorers()
        references = parts.references()
        served = [*engines, *references, *(scorer for each in teachers.values() for scorer in each)]
        for part in served:
            stack.callback(part.close)
        stack.callback(trainer.close)
        if needs.counts["worker"]:
            workers = RayWorkers([parts.start_actor(WorkerActor, "worker", at) for at in range(needs.counts["worker"])])
            stack.callback(workers.close)
            stack.enter_context(run_remotely(workers.call))
        hello = await trainer.start_ranks()
        await parts.wait_ready(served)
        pool = driver.pool(engines)
        stack.callback(pool.close)
        run_parts = driver.build_run_parts(pool, trainer, hello.ends, hello.device, hello.parameters)
        if references:
            reference = Pool(references)
            stack.callback(reference.close)
            run_parts = replace(run_parts, reference=reference)
        if config.cluster.most_engines is not None:
            await stack.enter_async_context(grow_pool(parts, pool, config.cluster.most_engines))
        yield replace(run_parts, attach=partial(attach_scorers, config, driver.tokenizer, teachers))


class RayParts:
    """Makes the actors of one run."""

    def __init__(self, config: RunConfig, room: Reservation, needs: ResourceNeeds, live: Path) -> None:
        live.mkdir(parents=True, exist_ok=True)
        self.needs = needs
        self._config, self._room, self._live = config, room, str(live.resolve())
        self._rank_starts = 0
        """Times the ranks were started."""
        self.group: WeightsGroup | None = None
        """In which weights are broadcast, if they are."""
        self._text = remote_config(config, config.cluster.engine_cpus)

    def engine(self, number: int, room: Reservation | None = None) -> RayEngine:
        """An engine in its place of the run's room, or in a room of its own."""
        name = f"engine-{number}"
        return RayEngine(self.start_actor(EngineActor, "engine", number, room=room), name, self.group)

    def scorers(self) -> dict[str, list[RayEngine]]:
        """For each teacher of the run's own, all that score for it."""
        found: dict[str, list[RayEngine]] = {}
        cluster = self._config.cluster
        for at, model in enumerate(scored_models(self._config)):
            text = remote_config(teacher_config(self._config, model), cluster.scorer_cpus)
            found[model] = [
                RayEngine(self.start_actor(ScorerActor, "scorer", number, text), f"scorer-{number}")
                for number in range(at * cluster.scorers, (at + 1) * cluster.scorers)
            ]
        return found

    def references(self) -> list[RayEngine]:
        """The workers of the KL reference."""
        text, kl = remote_config(self._config, self._config.cluster.scorer_cpus), self._config.trainer.kl
        kind = SnapshotActor if kl is not None and kl.reference == "snapshot" else ScorerActor
        return [
            RayEngine(self.start_actor(kind, "reference", number, text), f"reference-{number}")
            for number in range(self.needs.counts["reference"])
        ]

    def ranks(self) -> list[Any]:
        """All of them, anew: each in its old place, under a name of its own, for the old one's is not free at once. Ray
        must not start one alone, it would wait for its group."""
        suffix = f"+{self._rank_starts}" if self._rank_starts else ""
        self._rank_starts += 1
        count = self.needs.counts["rank"]
        return [self.start_actor(RankActor, "rank", number, suffix=suffix, again=False) for number in range(count)]

    async def wait_ready(self, engines: Sequence[RayEngine]) -> None:
        """Wait until all engines and scorers have loaded their model."""

        async def wait(engine: RayEngine) -> None:
            try:
                await engine.actor.host_and_pid.remote()  # bounded: by START_SECONDS
            except RayError as error:
                raise PacelineError(f"{engine.name} cannot start: {last_line(error)}") from error

        try:
            async with asyncio.timeout(START_SECONDS):
                await asyncio.gather(*map(wait, engines))
        except TimeoutError:
            raise PacelineError(f"the engines were not up within {START_SECONDS:g} s: see {self._live}") from None

    def start_actor(
        self,
        kind: type,
        part: str,
        number: int,
        text: str = "",
        *,
        room: Reservation | None = None,
        suffix: str = "",
        again: bool = True,
    ) -> Any:
        """An actor in its place of the run's room, or in a room of its own; Ray starts it `again` after a death."""
        name = f"{part}-{number}"
        arguments = [text or self._text, name, self._live]
        place, room = (self.needs.actors.index((part, number)), self._room) if room is None else (0, room)
        return room.start_actor(kind, place, f"{self._config.name}/{name}{suffix}", arguments, again=again)


@asynccontextmanager
async def grow_pool(parts: RayParts, pool: Pool, most: int) -> AsyncGenerator[None]:
    """Ask Ray for room for one engine more, again and again, and let each join the pool. It serves as soon as it has
    the current weights.

    Ray gives the room once one machine has all of it: what is free on several together would hold no engine.
    """
    more: list[tuple[Reservation, RayEngine]] = []

    async def grow() -> None:
        try:
            for number in range(parts.needs.counts["engine"], most):
                room = await Reservation.when_free([parts.needs.each["engine"]])  # unbounded: as long as the run lasts
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
            room.release()


async def attach_scorers(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, teachers: Mapping[str, Sequence[RayEngine]], ref: ModelRef
) -> FrozenPool:
    """The scorers of a reference: the run's own actors, which share requests by least load, or an endpoint."""
    if ref.base_url is not None:
        return await attach(ref, tokenizer)
    theirs = await asyncio.to_thread(load_tokenizer, teacher_config(config, ref.name).model)
    check_same_vocabulary(f"`{ref.name}`", tokenizer.encode(PROBE_TEXT), theirs.encode(PROBE_TEXT))
    return FrozenPool(teachers[ref.name], ref)


def teacher_config(config: RunConfig, name: str) -> RunConfig:
    """The config of a scorer of this model: the run's settings, with another model and no adapter."""
    kept = config.model.model_dump(include={"dtype", "fp32_head", "trust_remote_code"})
    return config.model_copy(update={"model": ModelConfig(name=name, **kept)})


def remote_config(config: RunConfig, engine_cpus: float) -> str:
    """The run file as parts elsewhere read it. Each has its own cores, and is told how many: it would take all that its
    machine has. Folders are named in full: other processes stand elsewhere."""
    threads = config.engine.threads or max(1, int(engine_cpus))
    ranks = config.trainer.threads or max(1, int(config.cluster.rank_cpus))
    folder = Path(config.model.name).expanduser()
    name = str(folder.resolve()) if folder.is_dir() else config.model.name
    config = with_sections(config, engine={"threads": threads}, trainer={"threads": ranks}, model={"name": name})
    return config.model_copy(update={"runs": str(Path(config.runs).resolve())}).model_dump_json()
