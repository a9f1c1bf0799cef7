"""Seconds of each phase of one batch, and of the step they make together."""

from dataclasses import dataclass

from paceline.config import RunConfig
from paceline.planner.hardware import Hardware, split_threads
from paceline.planner.layout import BYTES, PlannedLayout
from paceline.planner.measured import ADAPTED, CONDUCTED, DETERMINISTIC, OVER_HTTP, RANKS, Reach, reach
from paceline.planner.memory import MemoryPlan, Way
from paceline.planner.shape import ModelShape
from paceline.planner.work import Work, teachers


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

    def __init__(self, config: RunConfig, shape: ModelShape, hardware: Hardware, layout: PlannedLayout) -> None:
        self.c, self.shape, self.hardware, self.layout = config, shape, hardware, layout
        self.r: Reach = reach(hardware.kind)
        self.item = BYTES[config.model.dtype]
        card = hardware.card
        on_gpu = hardware.kind == "cuda"
        self._flops = card.flops if on_gpu and self.item == 2 else card.flops32
        self._bandwidth = card.bandwidth * self.r.bandwidth
        self._engine_share, self._trainer_share = (1.0, 1.0) if on_gpu else self._cores()
        self.on_gpu = on_gpu

    def _cores(self) -> tuple[float, float]:
        """Shares of the cores, as the local placement deals them out."""
        cores = self.hardware.cores
        engine, trainer = split_threads(cores, self.shape.parameters, self.c.staleness > 0)
        given = self.c.engine.threads or engine, self.c.trainer.threads or trainer
        return min(1.0, given[0] / cores), min(1.0, given[1] / cores)

    # -- engine -----------------------------------------------------------------------------------------------------

    def launches(self) -> float:
        """Seconds of a decode step in which the device may do something else."""
        eager = self.r.eager_decode if self.on_gpu and not self.c.engine.compile else 1.0
        return self.r.launch * self.shape.layers * eager

    def decode_seconds(self, running: float, context: float) -> float:
        """One token for each request: launches; weights read or multiplied, whichever takes longer; keys and values;
        logits."""
        flops = self._flops * self.r.flops * self._engine_share
        read = self.shape.read * self.item / self._bandwidth
        multiply = 2 * self.shape.multiplied * running / flops
        kv = running * context * self.shape.kv * self.item / self._bandwidth
        logits = running * self.shape.vocabulary * self.r.logits / self._bandwidth
        plain = self.launches() + max(read, multiply) + kv + logits + running * self.r.request
        return plain / self._slowed()

    def prefill_seconds(self, tokens: float) -> float:
        flops = self._flops * self.r.flops * self._engine_share
        return 2 * self.shape.multiplied * tokens / flops / self._slowed()

    def _slowed(self) -> float:
        adapted = ADAPTED if self.c.model.lora and self.on_gpu else 1.0
        steady = DETERMINISTIC if self.c.deterministic and self.on_gpu else 1.0
        return adapted * steady * (OVER_HTTP if self.c.placement not in ("local", "colocated") else 1.0)

    def sample(self, work: Work, memory: MemoryPlan) -> tuple[float, float, float]:
        """Seconds to sample a batch, seconds of it that the device computes, and requests at once in one engine.

        Beyond staleness 0 the engines are kept full; at 0 a batch is sampled alone and ends with its longest reply.
        """
        if not work.sampled:
            return 0.0, 0.0, 0.0
        context = work.prompt + work.reply / 2
        engines = self.layout.engines
        most = max(1.0, min(self.c.engine.max_running, self.room(memory, work), self._in_flight(work) / engines))
        tokens = work.sampled * work.reply / engines
        steps = max(tokens / most, work.longest if self.c.staleness == 0 else 0.0)
        running = tokens / steps
        prompts = self.prefill_seconds(work.sampled / work.group * work.prompt / engines)
        decode = steps * self.decode_seconds(running, context)
        host = work.sampled * self.r.rollout
        seconds = max(decode + prompts + host, work.sampled / CONDUCTED)
        return seconds, seconds - steps * self.launches(), running

    def room(self, memory: MemoryPlan, work: Work) -> float:
        """Requests of the expected length that the cache holds."""
        longest = min(self.c.engine.max_context or self.shape.max_context, self.shape.max_context)
        return memory.requests * max(1.0, longest / (work.prompt + work.reply))

    def _in_flight(self, work: Work) -> float:
        return min(float(self.c.max_inflight or 1), work.sampled * (1 + self.c.staleness))

    # -- trainer ----------------------------------------------------------------------------------------------------

    def train_seconds(self, work: Work) -> float:
        """Forward and backward, whatever else must be scored, and the optimizer."""
        tokens = work.computed_tokens(shared=not self.on_gpu)
        return tokens * self.token_seconds(work.prompt + work.reply) / self._ranks() + self.optimizer_seconds()

    def token_seconds(self, length: float) -> float:
        """Of one token in a sequence of so many, on one rank."""
        c, shape = self.c.trainer, self.shape
        flops = 6 * shape.multiplied + 6 * shape.layers * shape.heads * shape.head_dim * length
        flops += 2 * shape.vocabulary * shape.hidden  # the head's logits, once more in the backward pass
        moved = self.r.train_bytes * shape.layers * shape.hidden * self.item / 2
        moved *= 1 if c.compile or not self.on_gpu else self.r.eager_train
        passes = 1.0 + (1 / 3 if c.gradient_checkpointing else 0.0)
        passes += 1 / 3 * ((c.kl is not None) + (c.proximal is not None and c.minibatches > 1))
        passes += 4 / 3 if c.critic is not None else 0.0
        rate = self._flops * self.r.train_flops * self._trainer_share
        return passes * (flops / rate + moved / self._bandwidth)

    def optimizer_seconds(self) -> float:
        """Masters, moments and gradients, read and written once a step; gradients between ranks."""
        c, lora = self.c.trainer, self.c.model.lora
        trainable = self.shape.adapters(lora) if lora else self.shape.parameters
        bandwidth = 20e9 if c.optimizer.offload and self.on_gpu else self._bandwidth
        seconds = 60 * trainable / self.layout.tensor / self.layout.shards / bandwidth
        if self.layout.ranks > 1:
            seconds += 2 * 4 * trainable / self.hardware.card.link
        return c.minibatches * seconds * (2 if c.critic is not None else 1)

    def _ranks(self) -> float:
        return self.layout.ranks * (RANKS if self.layout.ranks > 1 else 1.0)

    # -- teachers and evaluation ------------------------------------------------------------------------------------

    def score_seconds(self, work: Work) -> float:
        """Until all teachers have said what they think of a batch; they are asked at once."""
        return max((self._scored(work, teacher.share, teacher.shape) for teacher in teachers(self.c)), default=0.0)

    def _scored(self, work: Work, share: float, shape: ModelShape | None) -> float:
        length = work.prompt + work.reply
        tokens = share * work.rollouts * length
        if shape is None:
            return self.prefill_seconds(tokens) / self.layout.engines
        flops = 2 * shape.multiplied + 2 * shape.layers * shape.heads * shape.head_dim * length
        rate = self._flops * self.r.train_flops * self._trainer_share
        return tokens * (flops + 2 * shape.vocabulary * shape.hidden) / rate / self.c.cluster.scorers

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
