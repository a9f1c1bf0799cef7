"""Seconds of each phase of one batch, of the step they make together, and of each way to publish its weights.

Real runs reach shares of a device's data-sheet speed. They are fitted to measurements; each says which.
"""

from dataclasses import dataclass

from paceline.config import RunConfig
from paceline.planner.hardware import Hardware, split_threads
from paceline.planner.memory import MemoryPlan, layout_of
from paceline.planner.shape import BYTES, ModelShape, Work, teachers


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Shares of what the device could do, and the fixed costs that no data sheet has."""

    bandwidth: float
    """Share of the memory's bandwidth."""
    flops: float
    """Share of the flops, in decoding and prompts."""
    launch: float
    """Seconds a decode step spends on each layer, however few requests it has."""
    logits: float = 16.0
    """Bytes moved per entry of the vocabulary to sample one token."""
    request: float = 0.0
    """Seconds of the host per token sampled."""
    rollout: float = 0.0
    """Seconds of the host per rollout: admitting, rendering, scoring."""
    train_flops: float
    """Share of the flops, in training."""
    train_bytes: float = 0.0
    """Bytes moved in training per token, layer and unit of the hidden size: norms, activations, residuals."""
    handover: float
    """Seconds of a publish beyond moving the bytes: fingerprint, canary, swap."""
    eager_decode: float = 1.0
    """Times `launch` where the engine is not compiled."""
    eager_train: float = 1.0
    """Times `train_bytes` where the trainer is not compiled."""
    source: str


GPU = Efficiency(
    bandwidth=0.66,
    flops=0.60,
    launch=48.5e-6,
    train_flops=0.80,
    train_bytes=580.0,
    handover=0.07,
    eager_decode=2.0,
    eager_train=1.5,
    source="engine-h200.json (0.5B and 1.5B; 1, 64 and 256 requests) and trainer-h200.json (packed steps)",
)
"""Two models at three sizes give bandwidth, flops and launches of decoding; two packed steps those of training."""

CPU = Efficiency(
    bandwidth=0.66,
    flops=0.90,
    launch=1.07e-3,
    request=70e-6,
    rollout=0.8e-3,
    train_flops=0.40,
    handover=0.025,
    source="spine-cpu.json (trainer), decode steps of 1 to 128 requests and one quickstart run on two Neoverse N1",
)
"""The quickstart's model alone. `launch`, `request` and `rollout` have no file in `benchmarks/results` behind them."""

LORA_SPEED = 0.63
"""Speed of decoding through adapters: 65.5k of 107.7k tokens/s at 0.5B, 41.0k of 62.2k at 1.5B (engine-h200.json)."""
DETERMINISTIC_SPEED = 0.44
"""Speed of decoding with `deterministic = true` on a GPU (engine-h200.json)."""
HTTP_SPEED = 0.93
"""Speed of an engine behind HTTP (engine-http-h200.json)."""
RANKS = 0.9
"""Speed of each of several ranks, relative to one alone. Assumed, not measured."""
ROLLOUTS_PER_SECOND = 5170.0
"""Rollouts a second that one core can orchestrate (orchestrator-cpu.json)."""


def efficiency_of(kind: str) -> Efficiency:
    return GPU if kind == "cuda" else CPU


DISK = 2e9
"""Bytes a second to and from a local drive. Assumed, not measured."""
LOOPBACK = 1e9
"""Bytes a second as the body of a request. Assumed, not measured."""
HOST_LINK = 25e9
"""Bytes a second between a GPU and its host: PCIe 4, 16 lanes."""
OBJECTS = 4e9
"""Bytes a second through a shared object store. Assumed, not measured."""
DELTA_SHARE = 0.03
"""Share of the bytes that differ after a step; verl and slime publish 1 to 3%."""
LINK_SHARE = 0.7
"""Share of a link's rate that a broadcast reaches. Assumed, not measured."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to publish."""

    name: str
    seconds: float
    bytes: float
    used: bool = False


def ways(config: RunConfig, shape: ModelShape, hardware: Hardware) -> list[Way]:
    """All of them, the run's own marked."""
    lora = config.model.lora
    size = float(BYTES[config.model.dtype] * (shape.adapters(lora) if lora else shape.parameters))
    r = efficiency_of(hardware.kind)
    memory = hardware.card.bandwidth * r.bandwidth
    host = 2 * size / (HOST_LINK if hardware.kind == "cuda" else memory)  # out of one device, into another
    link = hardware.card.link * LINK_SHARE
    seconds = {
        "in process": 2 * size / memory,
        "disk": 2 * size / DISK + host,
        "http": 2 * size / LOOPBACK + host,
        "delta": 2 * size / memory + DELTA_SHARE * (2 * size / DISK + host),
        "broadcast": size / link,
        "object store": 2 * size / OBJECTS + host,
    }
    mine = _route_name(config)
    return [
        Way(name, r.handover + time, size * (DELTA_SHARE if name == "delta" else 1), name == mine)
        for name, time in seconds.items()
    ]


def _route_name(config: RunConfig) -> str:
    """As the run file says, or as `auto` decides on one machine."""
    if config.placement in ("local", "colocated"):
        return "in process"
    if config.placement == "ray":
        return "object store"
    if config.model.lora:
        return "http"
    if config.weights.path != "auto":
        return config.weights.path
    return "disk" if config.model.dtype == "float32" else "delta"


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one batch. `sample` to `publish` are as if each had its devices to itself."""

    sample: float
    score: float
    train: float
    publish: float
    step: float
    waits: float
    """Of the step, what the trainer waits for samples."""
    running: float
    """Requests an engine decodes at once, on average."""
    decode_tokens_s: float
    train_tokens_s: float
    evaluate: float
    """One evaluation, which happens every so many steps beside them; 0 where its number of episodes is unknown."""
    device_busy: float
    """Of `sample`, what the engine's device computes; the rest is launches, in which others may compute."""


class Speeds:
    """One run's rooflines."""

    def __init__(self, config: RunConfig, shape: ModelShape, hardware: Hardware) -> None:
        self.c, self.shape, self.hardware, self.layout = config, shape, hardware, layout_of(config, hardware)
        self.r: Efficiency = efficiency_of(hardware.kind)
        self.item = BYTES[config.model.dtype]
        card = hardware.card
        on_gpu = hardware.kind == "cuda"
        flops = card.flops if on_gpu and self.item == 2 else card.flops32
        self._bandwidth = card.bandwidth * self.r.bandwidth
        engine_share = trainer_share = 1.0
        if not on_gpu:  # shares of the cores, as the local placement deals them out
            engine, trainer = split_threads(hardware.cores, shape.parameters, config.staleness > 0)
            engine_share = min(1.0, (config.engine.threads or engine) / hardware.cores)
            trainer_share = min(1.0, (config.trainer.threads or trainer) / hardware.cores)
        self._engine_flops = flops * self.r.flops * engine_share
        self._trainer_flops = flops * self.r.train_flops * trainer_share
        self.on_gpu = on_gpu

    # -- engine -----------------------------------------------------------------------------------------------------

    def launches(self) -> float:
        """Seconds of a decode step in which the device may do something else."""
        eager = self.r.eager_decode if self.on_gpu and not self.c.engine.compile else 1.0
        return self.r.launch * self.shape.layers * eager

    def decode_seconds(self, running: float, context: float) -> float:
        """One token for each request: launches; weights read or multiplied, whichever takes longer; keys and values;
        logits."""
        read = self.shape.decode_parameters * self.item / self._bandwidth
        multiply = 2 * self.shape.active_parameters * running / self._engine_flops
        kv = running * context * self.shape.kv_elements * self.item / self._bandwidth
        logits = running * self.shape.vocabulary * self.r.logits / self._bandwidth
        plain = self.launches() + max(read, multiply) + kv + logits + running * self.r.request
        return plain / self._speed_factor()

    def prefill_seconds(self, tokens: float) -> float:
        return 2 * self.shape.active_parameters * tokens / self._engine_flops / self._speed_factor()

    def _speed_factor(self) -> float:
        adapted = LORA_SPEED if self.c.model.lora and self.on_gpu else 1.0
        steady = DETERMINISTIC_SPEED if self.c.deterministic and self.on_gpu else 1.0
        return adapted * steady * (HTTP_SPEED if self.c.placement not in ("local", "colocated") else 1.0)

    def sample(self, work: Work, memory: MemoryPlan) -> tuple[float, float, float]:
        """Seconds to sample a batch, seconds of it that the device computes, and requests at once in one engine.

        Beyond staleness 0 the engines are kept full; at 0 a batch is sampled alone and ends with its longest reply.
        """
        if not work.sampled:
            return 0.0, 0.0, 0.0
        context = work.prompt + work.reply / 2
        engines = self.layout.engines
        in_flight = min(float(self.c.max_inflight or 1), work.sampled * (1 + self.c.staleness))
        # Requests of the expected length that the cache holds.
        room = memory.requests * max(1.0, self.shape.longest(self.c.engine) / (work.prompt + work.reply))
        most = max(1.0, min(self.c.engine.max_running, room, in_flight / engines))
        tokens = work.sampled * work.reply / engines
        steps = max(tokens / most, work.longest if self.c.staleness == 0 else 0.0)
        running = tokens / steps
        prompts = self.prefill_seconds(work.sampled / work.group * work.prompt / engines)
        decode = steps * self.decode_seconds(running, context)
        host = work.sampled * self.r.rollout
        seconds = max(decode + prompts + host, work.sampled / ROLLOUTS_PER_SECOND)
        return seconds, seconds - steps * self.launches(), running

    # -- trainer ----------------------------------------------------------------------------------------------------

    def train_seconds(self, work: Work) -> float:
        """Forward and backward, whatever else must be scored, and the optimizer."""
        tokens = work.computed_tokens(shared=not self.on_gpu)
        ranks = self.layout.ranks * (RANKS if self.layout.ranks > 1 else 1.0)
        return tokens * self.token_seconds(work.prompt + work.reply) / ranks + self.optimizer_seconds()

    def token_seconds(self, length: float) -> float:
        """Of one token in a sequence of so many, on one rank."""
        c, shape = self.c.trainer, self.shape
        flops = 6 * shape.active_parameters + 6 * shape.attending * shape.heads * shape.head_dim * length
        flops += 2 * shape.vocabulary * shape.hidden  # the head's logits, once more in the backward pass
        moved = self.r.train_bytes * shape.layers * shape.hidden * self.item / 2
        moved *= 1 if c.compile or not self.on_gpu else self.r.eager_train
        passes = 1.0 + (1 / 3 if c.gradient_checkpointing else 0.0)
        passes += 1 / 3 * ((c.kl is not None and c.kl.is_in_trainer) + bool(c.proximal and c.minibatches > 1))
        passes += 4 / 3 if c.critic is not None else 0.0
        return passes * (flops / self._trainer_flops + moved / self._bandwidth)

    def optimizer_seconds(self) -> float:
        """Masters, moments and gradients, read and written once a step; gradients between ranks."""
        c, lora = self.c.trainer, self.c.model.lora
        trainable = self.shape.adapters(lora) if lora else self.shape.parameters
        bandwidth = 20e9 if c.optimizer.offload and self.on_gpu else self._bandwidth
        seconds = 60 * trainable / self.layout.tensor / self.layout.shards / bandwidth
        if self.layout.ranks > 1:
            seconds += 2 * 4 * trainable / self.hardware.card.link
        return c.minibatches * seconds * (2 if c.critic is not None else 1)

    # -- teachers and evaluation ------------------------------------------------------------------------------------

    def score_seconds(self, work: Work) -> float:
        """Until all teachers have scored a batch; they are asked at once."""
        seconds, length = [0.0], work.prompt + work.reply
        for share, shape in teachers(self.c):
            tokens = share * work.rollouts * length
            if shape is None:
                seconds.append(self.prefill_seconds(tokens) / self.layout.engines)
                continue
            flops = 2 * shape.active_parameters + 2 * shape.attending * shape.heads * shape.head_dim * length
            flops += 2 * shape.vocabulary * shape.hidden
            seconds.append(tokens * flops / self._trainer_flops / self.c.cluster.scorers)
        return max(seconds)

    def evaluate_seconds(self, work: Work) -> float:
        """All episodes of one evaluation, so many at once."""
        episodes = work.evaluated
        if not episodes or not self.c.eval.every:
            return 0.0
        engines = self.layout.engines
        running = max(1.0, min(self.c.eval.concurrency, episodes, engines * self.c.engine.max_running) / engines)
        steps = episodes * work.reply / (running * engines)
        decode = steps * self.decode_seconds(running, work.prompt + work.reply / 2)
        return decode + self.prefill_seconds(episodes * work.prompt / engines) + episodes * self.r.rollout

    # -- all of it --------------------------------------------------------------------------------------------------

    def times(self, work: Work, memory: MemoryPlan, way: Way) -> Times:
        sample, busy, running = self.sample(work, memory)
        train, score = self.train_seconds(work), self.score_seconds(work)
        rest = score + train + way.seconds
        if self.c.staleness == 0 or self.layout.colocated:
            step = sample + rest
        elif self.on_gpu and not self.layout.apart:
            step = max(sample, rest, busy + rest)  # one device computes both; launches of one hide in the other
        else:
            step = max(sample, rest)
        return Times(
            sample=sample,
            score=score,
            train=train,
            publish=way.seconds,
            step=step,
            waits=step - rest,
            evaluate=self.evaluate_seconds(work),
            running=running,
            decode_tokens_s=work.sampled * work.reply / sample if sample else 0.0,
            train_tokens_s=work.trained_tokens / train,
            device_busy=busy,
        )
