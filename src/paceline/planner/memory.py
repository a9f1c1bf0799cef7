"""Assigns the parts of a run to devices, and counts the bytes of each.

Static state is exact: it follows from the shape and the run file. Activations are a fit to the H200's peaks (within
8%); what CUDA, graphs and allocators take beside is a flat allowance.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from paceline.config import RunConfig
from paceline.config.cluster import scored_models
from paceline.planner.hardware import Hardware
from paceline.planner.shape import BYTES, ModelShape, shape_of

LOGITS = 1 << 25
"""Most logits held at once."""
SCORED_AT_ONCE = 32_768
"""Tokens of a scorer's micro-batch where the run file leaves them to be found."""
PAGE = 16
FIRST_SLOTS = 256
"""Positions a slot of the CPU's cache begins with."""
FREE_SHARE = 0.5
"""Of the GPU's free memory, what the KV cache takes when the run file names no size."""
RUNTIME = {"cuda": 1.2e9, "cpu": 0.7e9, "mlx": 0.7e9}
"""A process's own: CUDA's context, captured graphs and workspaces; on a CPU, the interpreter and its libraries."""
USABLE = 0.95
"""The rest is lost between blocks."""
AUTO_SHARE, AUTO_STEP, AUTO_MOST = 0.85, 4096, 1 << 17
EAGER = 1.5
"""Activations of an uncompiled layer, by those of a compiled one."""


@dataclass(slots=True)
class DevicePlace:
    """One device, or several that hold the same."""

    name: str
    capacity: float | None
    """Bytes that can be used; None where unknown."""
    count: int = 1
    parts: dict[str, float] = field(default_factory=dict)

    def add(self, parts: Mapping[str, float], times: int) -> None:
        for name, size in parts.items():
            self.parts[name] = self.parts.get(name, 0.0) + times * size

    @property
    def used(self) -> float:
        return sum(self.parts.values())

    @property
    def missing(self) -> float:
        """Bytes that do not fit."""
        return 0.0 if self.capacity is None else max(0.0, self.used - self.capacity)


@dataclass(frozen=True, slots=True)
class PlannedLayout:
    """How many of each part there are, and what they share."""

    engines: int = 1
    ranks: int = 1
    shards: int = 1
    """Ranks that hold one model, its masters and moments between them; 1: each has all of what `tensor` leaves it."""
    tensor: int = 1
    """Ranks that share each matrix."""
    context: int = 1
    """Ranks that share each sequence."""
    scorers: int = 0
    """For teachers of the run's own; each has a device of its own."""
    colocated: bool = False
    """Each rank hosts an engine, which sleeps while it trains."""
    apart: bool = False
    """Engines have devices of their own; else engine and first rank share one."""
    processes: int = 1
    """Processes on the shared device."""

    @property
    def devices(self) -> int:
        return self.engines + self.ranks + self.scorers if self.apart else self.ranks


def layout_of(config: RunConfig, hardware: Hardware) -> PlannedLayout:
    parallel, on_ray = config.trainer.parallel, config.placement == "ray"
    colocated, left = config.placement == "colocated", max(1, parallel.ranks // parallel.tensor)
    shards = {"none": 1, "full": left, "hybrid": max(1, left // parallel.replicas)}
    return PlannedLayout(
        engines=config.cluster.engines if on_ray else parallel.ranks if colocated else 1,
        ranks=parallel.ranks,
        shards=shards[parallel.shard],
        apart=on_ray and hardware.kind == "cuda",
        processes=1 if config.placement in ("local", "colocated") else 2,
        tensor=parallel.tensor,
        context=parallel.context,
        scorers=sum(count for _, count in scorer_counts(config)),
        colocated=colocated,
    )


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The bytes of each part of a run, on each device."""

    places: list[DevicePlace]
    requests: int
    """Requests of full length that the KV cache holds."""
    micro_batch_tokens: int
    """As given, or what `auto` would find."""
    lacking: int = 0
    """Devices the run wants beyond those there are."""
    process: float = 0.0
    """Bytes of the trainer's process at its peak, as `memory/trainer` measures them: what it allocates on a GPU, or all
    that it has in memory on a CPU."""

    @property
    def used(self) -> float:
        """Bytes on the fullest device."""
        return max(place.used for place in self.places)

    @property
    def missing(self) -> float:
        return max(place.missing for place in self.places)

    @property
    def fits(self) -> bool:
        return self.missing == 0 and self.requests >= 1 and not self.lacking


class _Sizes:
    """The arithmetic, part by part."""

    def __init__(self, config: RunConfig, shape: ModelShape, hardware: Hardware, layout: PlannedLayout) -> None:
        self.c, self.shape, self.layout = config, shape, layout
        self.item = BYTES[config.model.dtype]
        self.weights = float(shape.parameters * (shape.packed or self.item))
        self.held = shape.parameters / layout.tensor
        """Parameters of a rank before they are sharded."""
        self.on_gpu = hardware.kind == "cuda"
        lora = config.model.lora
        self.adapters = shape.adapters(lora) if lora else 0
        self.trainable = self.adapters or self.held
        self.longest = shape.longest(config.engine)

    # -- engine -----------------------------------------------------------------------------------------------------

    def engine(self) -> Iterator[tuple[str, float]]:
        yield "engine weights", self.weights
        if self.c.engine.products == "half" and not self.on_gpu and self.item == 4:
            yield "engine weights in float16", 2.0 * self.shape.parameters
        engine, lora = self.c.engine, self.c.model.lora
        slots = max(engine.adapters, 1 if lora else 0)
        if slots:
            rank = max(engine.adapter_rank, lora.rank if lora else 0)
            per_rank = self.adapters / lora.rank if lora else self.shape.layers * 8 * self.shape.hidden
            yield "engine adapters", slots * rank * per_rank * self.item
        wide = max(engine.prefill_tokens, engine.max_running)
        width = 6 * self.shape.hidden + 3 * self.shape.mlp * self.shape.active_experts
        logits = engine.max_running * self.shape.vocabulary * 8
        yield "engine activations", float(wide * width * self.item + logits)

    def cache(self, free: float) -> tuple[float, int]:
        """Bytes of keys and values, and requests of full length that they hold."""
        per_token = self.shape.kv_elements * self.item
        running, engine = self.c.engine.max_running, self.c.engine
        if not self.on_gpu and engine.cache != "pages":
            slot = FIRST_SLOTS
            while slot < 128 + self.c.sampling.max_tokens:  # it doubles until a prompt and reply fit
                slot *= 2
            need = self.longest if self.c.deterministic else min(self.longest, slot)
            return float((running + 1) * need * per_token), running
        page = per_token * PAGE
        pages_each = -(-self.longest // PAGE)
        budget = engine.cache_gib * 2**30 if engine.cache_gib else FREE_SHARE * max(0.0, free)
        if not page:  # no layer attends
            return 0.0, running
        pages = min(int(budget // page), running * pages_each)
        return float((pages + 1) * page), min(running, pages // pages_each)

    # -- trainer ----------------------------------------------------------------------------------------------------

    def trainer(self, host: dict[str, float]) -> Iterator[tuple[str, float]]:
        """Of one rank, but for activations. What is offloaded goes to `host` instead."""
        t, split = self.c.trainer, self.layout.shards
        to = host if t.parallel.cpu_offload and self.on_gpu else None
        # What trains lies in shards in float32: a rank's part is its own master.
        item = 4 if split > 1 and not self.adapters else self.item
        yield from _moved("trainer weights", item * self.held / split, to)
        if split > 1:
            # Embeddings and head stay whole, and of the layers this one and the next.
            gathered = min(self.shape.gathered_elements / self.layout.tensor, self.held * (1 - 1 / split))
            yield "trainer gathered blocks", gathered * self.item
        own = self.trainable / (1 if self.adapters else split)  # adapters are whole on every rank
        yield from self._optimizer("trainer", own, host)
        if t.kl is not None and t.kl.is_in_trainer and not (self.adapters and t.kl.reference == "base"):
            kept = (4 if t.kl.reference == "ema" else self.item) + self.item  # and the policy's own, while it scores
            to = host if t.kl.offload else None
            yield from _moved("KL reference", kept * self.trainable / split, to)
        if t.critic is not None:
            on_host = t.parallel.cpu_offload and self.on_gpu and not self.adapters
            yield from _moved("critic weights", item * own, host if on_host else None)
            yield from self._optimizer("critic", own, host)

    def _optimizer(self, whose: str, trainable: float, host: dict[str, float]) -> Iterator[tuple[str, float]]:
        """Float32 masters where the model is rounded, two moments, gradient sums; and a micro-batch's own gradient."""
        t, sharded = self.c.trainer, self.layout.shards > 1 and not self.adapters
        offload = self.on_gpu and (t.optimizer.offload or (t.parallel.cpu_offload and sharded))
        rounded = not sharded and (self.item < 4 or offload)
        to = host if offload else None
        yield from _moved(f"{whose} masters", 4 * trainable if rounded else 0.0, to)
        yield from _moved(f"{whose} moments", 8 * trainable, to)
        yield from _moved(f"{whose} gradients", 4 * trainable, to)
        if rounded:
            yield f"{whose} fresh gradients", self.item * trainable

    def activations(self, tokens: float) -> float:
        """Kept from the forward to the backward pass over so many tokens, the head's chunk of logits included. Of what
        ranks share, a rank keeps its part: of a sequence its tokens, of a matrix its columns."""
        t, shape = self.c.trainer, self.shape
        tokens /= self.layout.context
        wide = 2 * shape.hidden + (4 * shape.hidden + 2 * shape.mlp * shape.active_experts) / self.layout.tensor
        wide *= 1 if t.compile and self.on_gpu else EAGER
        borders = shape.layers * shape.hidden + EAGER * wide  # of every layer, and the inside of one
        kept = borders if t.gradient_checkpointing else shape.layers * wide
        head = LOGITS * 8 + (0 if self.adapters else 4 * shape.hidden * shape.vocabulary)
        return tokens * kept * self.item + head

    def micro_batch(self, room: float) -> int:
        """Tokens of the largest micro-batch: the budget, or one long sample alone."""
        given, most = self.c.trainer.micro_batch_tokens, self.c.trainer.max_sample_tokens or self.shape.max_context
        longest = min(most, self.longest, 128 + self.c.sampling.max_tokens)
        if given != "auto":
            return max(given, longest)
        tokens = AUTO_STEP
        if self.on_gpu:
            each = (self.activations(2 * AUTO_STEP) - self.activations(AUTO_STEP)) / AUTO_STEP
            tokens = int((AUTO_SHARE * room - self.activations(0)) / each) // AUTO_STEP * AUTO_STEP
        return max(min(tokens, AUTO_MOST), AUTO_STEP // 2, longest)


def _moved(name: str, size: float, host: dict[str, float] | None) -> Iterator[tuple[str, float]]:
    if host is not None:
        host[name] = host.get(name, 0.0) + size
    elif size:
        yield name, size


def memory(config: RunConfig, shape: ModelShape, hardware: Hardware) -> MemoryPlan:
    """All parts, on all devices."""
    layout = layout_of(config, hardware)
    sizes = _Sizes(config, shape, hardware, layout)
    device = USABLE * hardware.card.memory if hardware.card.memory else None
    runtime = RUNTIME[hardware.kind]
    host: dict[str, float] = {}
    engine, trainer = dict(sizes.engine()), dict(sizes.trainer(host))
    own_base = layout.apart or layout.processes > 1 or not sizes.adapters
    if not own_base:  # the frozen base is one, between engine and trainer
        trainer["trainer weights"] = float(sizes.adapters * sizes.item)
    alone = {**engine, "runtime": runtime}
    shared = {**engine, **trainer, "runtime": runtime * layout.processes}
    rank = {**trainer, "runtime": runtime}
    beside = engine["engine weights"] + (0.0 if layout.apart else trainer.get("trainer weights", 0.0))
    cache, requests = sizes.cache(hardware.card.memory - beside - runtime)
    (alone if layout.apart else shared)["KV pages"] = cache
    micro = sizes.micro_batch((device or 0.0) - sum((rank if layout.apart else shared).values()))
    rank["trainer activations"] = shared["trainer activations"] = sizes.activations(micro)
    own = rank if layout.apart or layout.processes > 1 else shared
    if layout.colocated:  # engine and trainer take turns in the same memory
        shared["trainer activations"] = max(0.0, shared["trainer activations"] - cache)
    process = sum(own.values()) - (runtime if sizes.on_gpu else 0.0)
    if not sizes.on_gpu:  # all parts share the machine's memory
        everything = DevicePlace("memory", device, 1, dict(shared))
        everything.add(shared if layout.colocated else rank, layout.ranks - 1)
        places = [everything]
    else:
        hosts = 0 if layout.apart else layout.ranks if layout.colocated else 1  # ranks that share a GPU with an engine
        places = [
            DevicePlace("engine GPU", device, layout.engines if layout.apart else 0, alone),
            DevicePlace("GPU of engine and trainer", device, hosts, shared),
            DevicePlace("trainer GPU", device, layout.ranks - hosts, rank),
        ]
        places = [place for place in places if place.count]
    for scorers in scorer_places(config, device, runtime):
        if sizes.on_gpu:
            places.append(scorers)
        else:
            places[0].add(scorers.parts, scorers.count)
    if host:
        host = {name: layout.ranks * size for name, size in host.items()}
        places.append(DevicePlace("host", USABLE * hardware.host_memory if hardware.host_memory else None, 1, host))
    lacking = layout.devices - hardware.count if hardware.kind == "cuda" else 0
    return MemoryPlan(places, requests, micro, max(0, lacking), process)


def scorer_places(config: RunConfig, device: float | None, runtime: float) -> list[DevicePlace]:
    """Each scorer holds its model and one micro-batch, of which nothing is kept for a backward pass."""
    item, places = BYTES[config.model.dtype], []
    budget = config.trainer.micro_batch_tokens
    tokens = SCORED_AT_ONCE if budget == "auto" else budget
    for name, count in scorer_counts(config):
        shape = shape_of(name)
        wide = 6 * shape.hidden + 2 * shape.mlp * shape.active_experts
        parts = {
            "teacher weights": float(shape.parameters * item),
            "teacher activations": float(tokens * wide * item + LOGITS * 8),
            "runtime": runtime,
        }
        places.append(DevicePlace(f"scorer GPU, {name}", device, count, parts))
    return places


def scorer_counts(config: RunConfig) -> list[tuple[str, int]]:
    """Each model that actors of the run only score, and how many of them do."""
    counts = [(name, config.cluster.scorers) for name in scored_models(config)]
    if (kl := config.trainer.kl) is not None and kl.workers:
        counts.append((config.model.name, kl.workers))
    return counts
