"""The plan of a run: its memory, the time of a step, and whether sampler or trainer waits."""

import contextlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paceline.config import RunConfig
from paceline.errors import PacelineError
from paceline.monitor.files import plain, replace_file
from paceline.planner.advice import Advice, advise, split, token_budget
from paceline.planner.dtypes import with_planned_dtype
from paceline.planner.hardware import Hardware, HardwareSpec, found
from paceline.planner.layout import PlannedLayout, layout_of
from paceline.planner.measured import reach
from paceline.planner.memory import MemoryPlan, memory
from paceline.planner.shape import ModelShape, shape_of
from paceline.planner.speed import Speeds, Times
from paceline.planner.weights import Way, ways
from paceline.planner.work import Work, assumed

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
        out = plain(asdict(self))
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
    layout = layout_of(config, hardware)

    def look(changed: RunConfig) -> MemoryPlan:
        return memory(changed, shape, hardware, layout_of(changed, hardware))

    there = look(config)
    routes = ways(config, shape, hardware) if hardware.measured_speed else []
    times = None
    verdict = f"how fast a {hardware.card.name} is is not known here: name a GPU that is with --hardware"
    if hardware.kind == "mlx":
        budget = token_budget(config, look)
        verdict = f"trainer.micro_batch_tokens may be up to {budget}" if budget else "no micro-batch fits"
    if hardware.measured_speed:
        way = next(way for way in routes if way.used)
        times = Speeds(config, shape, hardware, layout).times(work, there, way)
        verdict = _verdict(config, times, layout, hardware)
    return ResourcePlan(
        hardware=hardware,
        layout=layout,
        parameters=shape.parameters,
        work=work,
        memory=there,
        advice=advise(config, hardware, look),
        ways=routes,
        times=times,
        verdict=verdict,
        source=reach(hardware.kind).source,
    )


def _verdict(config: RunConfig, times: Times, layout: PlannedLayout, hardware: Hardware) -> str:
    """A sentence on whether sampler or trainer waits, and on what would change that."""
    rest = times.score + times.train + times.publish
    parts = []
    if config.staleness == 0:
        ahead = max(times.sample, rest)
        parts.append(
            f"sampler and trainer take turns; staleness = 1 would hide up to {times.step - ahead:.2g} s of a step"
        )
    elif hardware.kind == "cuda" and not layout.apart:
        parts.append(f"engine and trainer share a GPU: {times.waits / times.step:.0%} of a step goes to sampling")
    elif times.sample > (1 + CLOSE) * rest:
        parts.append(f"the trainer waits {times.waits / times.step:.0%} of the time for samples")
    elif rest > (1 + CLOSE) * times.sample:
        parts.append(f"the engine waits {1 - times.sample / rest:.0%} of the time for the trainer")
    else:
        parts.append("sampling and training keep pace")
    if times.publish > 0.25 * times.step:
        parts.append(f"publishing takes {times.publish / times.step:.0%} of a step")
    parts.append(split(times.sample, times.train, layout, hardware))
    return "; ".join(part for part in parts if part)


# -- in the run directory -----------------------------------------------------------------------------------------


def keep_plan(config: RunConfig, directory: Path) -> None:
    """Write what is expected of a run that begins. The run does not depend on it, so a plan that fails is left out."""
    with contextlib.suppress(PacelineError, OSError, ValueError):
        plan = predict(config, found(config.device, AT_START, config.backend))
        replace_file(directory / FILE, [json.dumps(plan.table(), indent=1).encode()])


def kept_hardware(table: dict[str, Any]) -> Hardware:
    """The hardware that a kept plan was made for."""
    fields = dict(table["hardware"])
    return replace(Hardware(**fields), card=HardwareSpec(**fields["card"]))
