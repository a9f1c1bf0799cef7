"""`paceline eval`: evaluates models and runs on held-out rows, one or several side by side."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from paceline.commands.rollouts import split_sampling
from paceline.commands.targets import RunTarget, find_run
from paceline.config import RunConfig, load
from paceline.config.model import ModelConfig
from paceline.config.target import load_target, names_environment, names_run_file, nearest_target, split_by_prefix
from paceline.errors import PacelineError
from paceline.orchestrator import Clock, build_train_envs
from paceline.orchestrator.episodes import EVAL, RolloutRunner, judge_services
from paceline.orchestrator.evaluation import confidence_intervals, evaluate, group_by_actor, summarise
from paceline.rollout import Rollout, SamplingClient
from paceline.runtime.episode_runtime import open_episode_runtime
from paceline.runtime.signals import run_until_complete


@dataclass(frozen=True, slots=True)
class EvalTarget:
    """A model to evaluate: a run file's, or a checkpoint's weights in its place."""

    name: str
    """As the command line has it."""
    config: RunConfig
    checkpoint: Path | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over held-out rows with its 95% interval; no interval where the number is a count."""

    mean: float
    low: float | None = None
    high: float | None = None

    def as_json(self) -> Any:
        if self.low is None:
            return int(self.mean) if float(self.mean).is_integer() else self.mean
        return {"mean": self.mean, "low": self.low, "high": self.high}


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Results of one target on held-out rows, by environment (and actor, where there are several)."""

    target: EvalTarget
    tables: dict[str, dict[str, Estimate]]
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """Counts as numbers, means with their intervals."""
        checkpoint, tables = self.target.checkpoint, self.tables.items()
        return {
            "target": self.target.name,
            "model": self.target.config.model.name,
            "checkpoint": checkpoint and str(checkpoint),
            "seconds": round(self.seconds, 3),
            "environments": {name: {key: value.as_json() for key, value in table.items()} for name, table in tables},
        }


def find_targets(
    names: Sequence[str], overrides: Sequence[str], env: str | None = None, file: str | None = None
) -> list[EvalTarget]:
    """The targets by their names: run files or examples, environment types, run directories (`RUN@STEP`), models.

    Rows come from `file` or from an environment of type `env` for all of them. Without these a run or run file brings
    its own, and a model is evaluated on the rows of the first run or run file among `names`.
    """
    if env is not None and file is not None:
        raise PacelineError("--env and --file both say where the rows come from: leave one of them out")
    source = file or env or ""
    shared = _load_for_eval(lambda more: load_target(source, more).config, overrides) if source else None
    # With a shared config the overrides are its keys, not the run's.
    runs = [find_run(name) for name in names]
    own = [_own_config(name, run, () if shared else overrides) for name, run in zip(names, runs, strict=True)]
    rows = shared or next(filter(None, own), None)
    return [_build_target(*named, shared, rows) for named in zip(names, runs, own, strict=True)]


def _own_config(name: str, run: RunTarget | None, overrides: Sequence[str]) -> RunConfig | None:
    """The config of a run or run file with the overrides of the command line; None for a model, which has none."""
    if run is not None:
        return _load_for_eval(lambda more: load(run.root, more).config, overrides)
    named = names_run_file(name) or names_environment(name)
    return _load_for_eval(lambda more: load_target(name, more).config, overrides) if named else None


def _build_target(
    name: str, run: RunTarget | None, own: RunConfig | None, shared: RunConfig | None, rows: RunConfig | None
) -> EvalTarget:
    if own is not None:
        if run is None or run.checkpoint is not None:
            return EvalTarget(name, _with_model(shared or own, own.model), None if run is None else run.checkpoint)
        if run.export is None:
            raise PacelineError(f"{name} has neither a whole checkpoint nor an export: nothing was trained yet")
        return EvalTarget(name, _with_model(shared or own, own.model, str(run.export)))
    if rows is None:
        hint = "" if Path(name).exists() else nearest_target(name)
        raise PacelineError(
            f"{name} is a model, which has no held-out rows of its own: add --env TYPE (such as reverse-text) or "
            f"--file RUN.toml{hint and f'; {hint}'}"
        )
    if (Path(name) / "adapter_config.json").is_file():
        raise PacelineError(f"{name} is a LoRA adapter: evaluate its run, or a merged export (`paceline export`)")
    return EvalTarget(name, _with_model(rows, rows.model, name))


def _load_for_eval(read: Callable[[Sequence[str]], RunConfig], overrides: Sequence[str]) -> RunConfig:
    """Load a config for evaluation; `--sampling.*` overrides apply to the sampling of `eval`."""
    others, own = split_by_prefix(overrides, ["sampling"])
    config = read(others)
    if not own["sampling"]:
        return config
    start = split_sampling(config, "eval").model_dump()
    whole = [f"--eval.sampling.{key}={json.dumps(value)}" for key, value in start.items()]
    changed = [re.sub("^--", "--eval.sampling.", word) for word in own["sampling"]]
    return read([*others, *whole, *changed])


def _with_model(config: RunConfig, model: ModelConfig, name: str = "") -> RunConfig:
    """The config with this model; `name` replaces it by a full model: no adapter, its own tokenizer and dtype."""
    whole = {"name": name, "lora": None, "tokenizer": None, "dtype": "auto"} if name else {}
    return config.model_copy(update={"model": model.model_copy(update=whole)})


def evaluate_target(target: EvalTarget, progress: Callable[[str], None]) -> Evaluation:
    """Play the held-out rows with the target's weights in this process."""
    config, began = target.config, perf_counter()
    envs = build_train_envs(config)
    if not any(env.eval_rows for env in envs.values()):
        known = ", ".join(f"`{name}`" for name in envs)
        raise PacelineError(f"{target.name}: {known} has no held-out rows (the `eval` split of its dataset)")
    progress(f"loading {config.model.name}")
    rollouts: list[Rollout] = []
    sampling = split_sampling(config, "eval")
    with open_episode_runtime(config, sampling, None, config.eval.concurrency, target.checkpoint) as runtime:
        assert isinstance(runtime.client, SamplingClient)
        runner = RolloutRunner(runtime.client, Clock(), config.seed, EVAL)

        async def play() -> None:
            try:
                await evaluate(envs, runner, config.eval, progress, rollouts.extend)
            finally:
                await runtime.close()
                for service in judge_services(envs):
                    await service.aclose()

        run_until_complete(play())
    tables = {
        name: _estimates(played, config.eval.samples)
        for env in envs.values()
        for name, played in group_by_actor(env, [rollout for rollout in rollouts if rollout.env == env.name]).items()
    }
    return Evaluation(target, tables, perf_counter() - began)


def _estimates(rollouts: Sequence[Rollout], samples: int) -> dict[str, Estimate]:
    bounds = confidence_intervals(rollouts, samples)
    out = {key: Estimate(value, *bounds.get(key, ())) for key, value in summarise(rollouts, samples).items()}
    return out | {
        "examples": Estimate(len({rollout.ticket for rollout in rollouts})),
        "episodes": Estimate(len(rollouts)),
        "truncated": Estimate(sum(rollout.truncated for rollout in rollouts)),
        "tokens": Estimate(sum(rollout.completion_length for rollout in rollouts)),
    }
