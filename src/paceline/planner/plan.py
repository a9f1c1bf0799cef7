"""The plan of a run: its memory, the time of a step, and whether sampler or trainer waits.

Finds the settings to change where a run does not fit in memory. Each change is tried before it is advised.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from math import floor
from pathlib import Path
from typing import Any

from paceline.config import ConfigError, RunConfig, load
from paceline.errors import PacelineError
from paceline.observe.monitor.directory import replace_file, to_json_value
from paceline.planner.hardware import Hardware, found, with_planned_dtype
from paceline.planner.memory import MemoryPlan, PlannedLayout, layout_of, memory
from paceline.planner.shape import ModelShape, Work, assumed, shape_of
from paceline.planner.speed import Speeds, Times, Way, efficiency_of, ways

Attempt = Callable[[Mapping[str, Any]], MemoryPlan | None]
"""The memory plan of the run file with these keys changed; None where the run file does not allow it."""


@dataclass(frozen=True, slots=True)
class Advice:
    """Keys of the run file to set, all of them together."""

    overrides: dict[str, Any]
    saves: float
    """Bytes on the fullest device."""
    enough: bool = True
    """Whether the run fits then."""
    short: float = 0.0
    """Bytes still missing."""

    @property
    def sentence(self) -> str:
        keys = " and ".join(f"{key} = {_toml(value)}" for key, value in self.overrides.items())
        if not self.enough:
            return f"even with {keys} it is {self.short / 1e9:.1f} GB short: take more memory or a smaller model"
        return f"set {keys} (saves {self.saves / 1e9:.1f} GB)"


def advise(config: RunConfig, hardware: Hardware, before: MemoryPlan, attempt: Attempt) -> list[Advice]:
    """Each single change that makes the run fit; where none does, the fewest together; where even all do not, how much
    is missing. Nothing where it fits as it is."""
    if before.fits:
        return []
    knobs = list(_knobs(config, hardware, before))
    singles = []
    for knob in knobs:
        for overrides in knob:  # the gentlest setting that is enough by itself
            after = attempt(overrides)
            if after is not None and after.fits:
                singles.append(Advice(overrides, before.used - after.used))
                break
    return singles or [_combine(knobs, before, attempt)]


def _combine(knobs: list[list[dict[str, Any]]], before: MemoryPlan, attempt: Attempt) -> Advice:
    """All knobs at their strongest, then each taken back that is not needed."""
    chosen: dict[str, Any] = {}
    after = before
    for knob in knobs:
        if (with_it := attempt(chosen | knob[-1])) is not None:
            chosen, after = chosen | knob[-1], with_it
    if not after.fits:
        return Advice(chosen, before.used - after.used, False, after.missing)
    for key in reversed(list(chosen)):
        fewer = {name: value for name, value in chosen.items() if name != key}
        without = attempt(fewer) if fewer else None
        if without is not None and without.fits:
            chosen, after = fewer, without
    return Advice(chosen, before.used - after.used)


def _knobs(config: RunConfig, hardware: Hardware, before: MemoryPlan) -> Iterator[list[dict[str, Any]]]:
    """The knobs that apply, those that cost least first; of each its settings, the gentlest first."""
    trainer, engine = config.trainer, config.engine
    on_gpu = hardware.kind == "cuda"
    if on_gpu or engine.cache == "pages":
        yield from _cache(before)
    if not trainer.gradient_checkpointing:
        yield [{"trainer.gradient_checkpointing": True}]
    for key, start, least in (
        ("trainer.micro_batch_tokens", before.micro_batch_tokens, 512),
        ("engine.max_running", engine.max_running, 8),
        ("engine.prefill_tokens", engine.prefill_tokens, 512),
    ):
        if start > least:
            yield [{key: size} for size in _halves(start, least)]
    if trainer.kl is not None and trainer.kl.is_in_trainer and not trainer.kl.offload and on_gpu:
        yield [{"trainer.kl.offload": True}]
    if on_gpu:
        yield from _ranks(config, hardware, before)
    if on_gpu and not trainer.optimizer.offload:
        yield [{"trainer.optimizer.offload": True}]
    if config.model.dtype == "float32":
        yield [{"model.dtype": "bfloat16"}]
    if engine.max_context is None:
        yield [{"engine.max_context": 256 + config.sampling.max_tokens}]
    if config.model.lora is None:
        yield [{"model.lora": {"rank": 16}}]


def _ranks(config: RunConfig, hardware: Hardware, before: MemoryPlan) -> Iterator[list[dict[str, Any]]]:
    """Fewer ranks than there are GPUs for, or a model cut up between more of them."""
    room = hardware.count - config.cluster.engines
    if before.lacking and room >= 1:
        yield [{"trainer.parallel.ranks": room}, {"trainer.parallel.ranks": room, "trainer.parallel.shard": "none"}]
    elif room > max(1, config.trainer.parallel.ranks):
        more = range(max(2, config.trainer.parallel.ranks + 1), room + 1)
        cut = {"placement": "ray", "trainer.parallel.shard": "full"}
        yield [cut | {"trainer.parallel.ranks": ranks} for ranks in more]


def _cache(before: MemoryPlan) -> Iterator[list[dict[str, Any]]]:
    """Less for keys and values, in quarters of a GiB: just enough less, then ever less."""
    for place in before.places:
        if "KV pages" in place.parts:
            room = (place.parts["KV pages"] - place.missing) / 2**30
            settings = [room, *(room * part for part in (0.75, 0.5, 0.25))] if room > 0.25 else []
            quarters = dict.fromkeys(floor(4 * size) / 4 for size in settings)
            if chosen := [{"engine.cache_gib": size} for size in (*quarters, 0.25) if size > 0]:
                yield chosen


def _halves(start: int, least: int) -> list[int]:
    out = []
    while start > least:
        start = max(least, start // 2)
        out.append(start)
    return out


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + " }"
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else f"{value:g}"


FILE = "plan.json"
AT_START = 0.1
"""Seconds that a run spends on measuring its CPU."""
CLOSE = 0.1
"""Sampling and training times that differ by less than this keep pace."""


@dataclass(frozen=True, slots=True)
class ResourcePlan:
    """The prediction of a run: memory, times and advice."""

    hardware: Hardware
    layout: PlannedLayout
    parameters: int
    work: Work
    memory: MemoryPlan
    advice: list[Advice]
    ways: list[Way]
    times: Times | None
    """None where the hardware's speed is not known."""
    verdict: str
    source: str
    """What the shares of peak speed were fitted to."""

    def table(self) -> dict[str, Any]:
        """As JSON has it."""
        out = to_json_value(asdict(self))
        out["fits"] = self.memory.fits
        out["advice"] = [one.sentence for one in self.advice]
        for place, shown in zip(self.memory.places, out["memory"]["places"], strict=True):
            shown["used"], shown["missing"] = place.used, place.missing
        return out


def predict(
    config: RunConfig, hardware: Hardware, work: Work | None = None, shape: ModelShape | None = None
) -> ResourcePlan:
    """The plan of a run file on given hardware, for given lengths or assumed ones."""
    shape = shape or shape_of(config.model.name)
    config = with_planned_dtype(config, hardware)
    if config.device == "cpu" and hardware.kind == "cuda":
        raise PacelineError('the run file says device = "cpu": leave --hardware out, or add --device auto')
    work = work or assumed(config, shape)
    layout, used = layout_of(config, hardware), memory(config, shape, hardware)

    def attempt(overrides: Mapping[str, Any]) -> MemoryPlan | None:
        try:
            return memory(load(config, settings=overrides).config, shape, hardware)
        except ConfigError:
            return None

    routes: list[Way] = []
    times = None
    if hardware.measured_speed:
        routes = ways(config, shape, hardware)
        times = Speeds(config, shape, hardware).times(work, used, next(way for way in routes if way.used))
        verdict = _verdict(config, times, layout, hardware)
    elif hardware.kind == "mlx":
        tried = ((tokens, attempt({"trainer.micro_batch_tokens": tokens})) for tokens in _halves(1 << 17, 256))
        budget = next((tokens for tokens, plan in tried if plan is not None and plan.fits), 0)
        verdict = f"trainer.micro_batch_tokens may be up to {budget}" if budget else "no micro-batch fits"
    else:
        verdict = f"how fast a {hardware.card.name} is is not known here: name a GPU that is with --hardware"
    return ResourcePlan(
        hardware=hardware,
        layout=layout,
        parameters=shape.parameters,
        work=work,
        memory=used,
        advice=advise(config, hardware, used, attempt),
        ways=routes,
        times=times,
        verdict=verdict,
        source=efficiency_of(hardware.kind).source,
    )


def _verdict(config: RunConfig, times: Times, layout: PlannedLayout, hardware: Hardware) -> str:
    """A sentence on whether sampler or trainer waits, and on what would change that."""
    rest = times.score + times.train + times.publish
    waits = f"{times.waits / times.step:.0%}"
    if config.staleness == 0:
        hidden = times.step - max(times.sample, rest)
        parts = [f"sampler and trainer take turns; staleness = 1 would hide up to {hidden:.2g} s of a step"]
    elif hardware.kind == "cuda" and not layout.apart:
        parts = [f"engine and trainer share a GPU: {waits} of a step goes to sampling"]
    elif times.sample > (1 + CLOSE) * rest:
        parts = [f"the trainer waits {waits} of the time for samples"]
    elif rest > (1 + CLOSE) * times.sample:
        parts = [f"the engine waits {1 - times.sample / rest:.0%} of the time for the trainer"]
    else:
        parts = ["sampling and training keep pace"]
    if times.publish > 0.25 * times.step:
        parts.append(f"publishing takes {times.publish / times.step:.0%} of a step")
    if hardware.count > 1:  # how many of the devices should sample, by the work on either side
        sampling, training, devices = times.sample * layout.engines, times.train * layout.ranks, hardware.count
        engines = min(devices - 1, max(1, round(devices * sampling / max(sampling + training, 1e-9))))
        ranks, idle = devices - engines, devices - layout.devices
        unused = f", where the run file leaves {idle} of {devices} GPUs idle" if idle > 0 else ""
        balanced = f'placement = "ray", cluster.engines = {engines} and trainer.parallel.ranks = {ranks}'
        parts.append(f"in balance: {balanced}{unused}")
    return "; ".join(parts)


# -- in the run directory -----------------------------------------------------------------------------------------


def write_plan(config: RunConfig, directory: Path) -> None:
    """Write what is expected of a run that begins. The run does not depend on it, so a plan that fails is left out."""
    with contextlib.suppress(PacelineError, OSError, ValueError):
        plan = predict(config, found(config.device, AT_START, config.backend))
        replace_file(directory / FILE, [json.dumps(plan.table(), indent=1).encode()])
