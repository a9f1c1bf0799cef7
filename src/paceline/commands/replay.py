"""`paceline replay`: trains a recorded batch again on the CPU and discards the result.

    weights before the step (a checkpoint, or the model itself) + its samples -> the same step, beside what was measured
    the same weights + dumps/bad-batch-N -> the same step, and each of its samples alone

The samples are those of batches/step-N, or of the record where no batch was kept. Sampling, environments and engine
play no part. Any difference is due to the trainer alone: another device or type, another version of the code, or a
setting given on the command line.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import orjson
import torch
from numpy.typing import NDArray
from rich.table import Column, Table

from paceline.commands.targets import step_of
from paceline.config import RunConfig
from paceline.config import trainer as config
from paceline.data import MicroBatch, Sample, WireError, decode, minibatches
from paceline.errors import PacelineError
from paceline.model import attach_lora, load_model, load_tokenizer
from paceline.observe.monitor import RunDirectory
from paceline.observe.record import Query, RolloutNotFound, RunFolder, open_run
from paceline.observe.record.layout import REPLAYED, SKIPPED, TRAINED
from paceline.orchestrator import Checkpoints
from paceline.runtime.local import with_sections
from paceline.runtime.torch_parts import torch_trainer
from paceline.trainer import TorchTrainer
from paceline.trainer.checkpoint import check_files
from paceline.trainer.learner import Learner
from paceline.trainer.loss import TokenLosses
from paceline.trainer.terms import TrainedTokens, find_clipped, trained_positions
from paceline.trainer.trainer import truncate


@dataclass(frozen=True, slots=True)
class RecordedTokens:
    """The tokens of one sample that train, in their order; `--json` prints it as it is."""

    places: NDArray
    """Their positions in the sample."""
    logprob: NDArray
    """The policy's."""
    sampler: NDArray
    """The sampler's; NaN where that was a frozen model."""
    ratio: NDArray
    """Policy over where the rl term measures: the sampler, or under `proximal` the batch's start."""
    advantage: NDArray
    entropy: NDArray
    share: dict[str, NDArray]
    """Of the loss of all optimizer steps, by component."""
    held_back: list[dict[str, Any]]
    """Tokens that a bound held back: `token` (index in these arrays), `component` and `rule`."""
    skipped: bool
    """The whole sample was left out (`clip_skip_threshold`)."""


class TokenLossRecorder:
    """A `Learner.watch` callback that records tokens by sample. A micro-batch that runs again replaces its record."""

    def __init__(self, c: config.TrainerConfig, optimizer_steps: int, progress: Callable[[int], None]) -> None:
        self._config, self._optimizer_steps, self._progress = c, optimizer_steps, progress
        self.tokens: dict[int, RecordedTokens] = {}
        """By the sample's place in the batch."""

    def __call__(self, micro_batch: MicroBatch, tokens: TrainedTokens, losses: TokenLosses) -> None:
        starts = np.cumsum(micro_batch.lengths) - micro_batch.lengths
        places, segments = trained_positions(micro_batch), tokens.segments.cpu().numpy()
        shares = {name: values.numpy(force=True) / self._optimizer_steps for name, values in losses.scaled().items()}
        used = {name: scale.numpy(force=True) != 0 for name, scale in losses.scales.items()}
        clipped = {name: values.numpy(force=True) & used[name] for name, values in losses.clipped.items()}
        ratio = losses.ratio
        streams = [tokens.logprobs, tokens.rollout_logprobs, ratio.value, tokens.advantages, tokens.entropy]
        streams = [stream.numpy(force=True) for stream in streams]
        bounds = [streams[2], ratio.difference.numpy(force=True), streams[3], used["rl"]]
        for number, member in enumerate(micro_batch.members):
            at = np.flatnonzero(segments == number)
            if not len(at):
                continue
            skipped, own = bool(losses.skipped[number]), {name: values[at] for name, values in clipped.items()}
            held = () if skipped else find_clipped(self._config.loss, *(stream[at] for stream in bounds), own)
            self.tokens[member] = RecordedTokens(
                places[at] - starts[number],
                *(stream[at] for stream in streams),
                share={name: values[at] for name, values in shares.items() if used[name][at].any()},
                held_back=[{"token": token, "component": name, "rule": rule} for token, name, rule in held],
                skipped=skipped,
            )
        self._progress(len(self.tokens))


MOST_NAMED_SAMPLES, MOST_ROWS = 3, 20
"""Samples of a bad batch that the verdict names, and that the table lists."""


@dataclass(frozen=True, slots=True)
class SampleFinding:
    """One sample's share of the batch's loss, term by term, and the norm of its share of the gradient."""

    sample: Sample
    losses: Mapping[str, float]
    grad_norm: float

    @property
    def nonfinite(self) -> list[str]:
        """The values that are not finite: streams of the sample, then the losses and gradient they led to."""
        streams = [name for name, values in self.sample.streams().items() if not np.isfinite(values).all()]
        losses = [f"loss/{name}" for name, value in self.losses.items() if not math.isfinite(value)]
        return [*streams, *losses, *([] if math.isfinite(self.grad_norm) else ["gradient"])]


def examine_samples(learner: Learner, samples: Sequence[Sample], version: int) -> list[SampleFinding]:
    """Each sample's loss and gradient alone, at the current weights: no optimizer step is taken."""
    found = []
    for sample, micro_batch in zip(samples, learner.one_per_micro_batch(samples), strict=True):
        sums = learner.backward(micro_batch, version).values
        norm = float(learner.optimizer.clip())
        learner.optimizer.zero()
        losses = {name.removeprefix("loss_"): float(x) for name, x in sums.items() if name.startswith("loss_")}
        found.append(SampleFinding(sample, losses, norm))
    return found


def nonfinite_weights(learner: Learner) -> list[str]:
    # Zero times what is not finite is NaN, in torch and in mlx.
    return [name for name, master in learner.optimizer.masters.items() if not (master * 0 == 0).all()]


def findings_verdict(findings: Sequence[SampleFinding], weights: Sequence[str]) -> str:
    """A sentence: which samples or `weights` are not finite, or else which sample has the largest gradient."""
    if weights:
        more = f" and {len(weights) - 1} more" if len(weights) > 1 else ""
        return f"the weights are not finite before this batch (`{weights[0]}`{more}): go back to an older checkpoint"
    broken = [finding for finding in findings if finding.nonfinite]
    if broken:
        named = "; ".join(f"{f.sample.where} ({', '.join(f.nonfinite)})" for f in broken[:MOST_NAMED_SAMPLES])
        more = f"; and {len(broken) - MOST_NAMED_SAMPLES} more" if len(broken) > MOST_NAMED_SAMPLES else ""
        return f"{len(broken)} of {len(findings)} samples are not finite: {named}{more}"
    if not findings:
        return "the batch holds no samples"
    largest = max(findings, key=lambda finding: finding.grad_norm)
    usual = median(finding.grad_norm for finding in findings)
    times = f", {largest.grad_norm / usual:.3g} times the batch's median" if usual else ""
    return (
        f"every sample is finite with these weights; the largest gradient is that of {largest.sample.where}: norm "
        f"{largest.grad_norm:.3g}{times}"
    )


UNCOMPARED_METRICS = ("train_tokens/s", "micro_batches", "lr", "optimizer_steps")
"""Metrics of a step that a replay does not compare."""
DUMP_PREFIX = "bad-batch-"


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """One step with its recorded and its replayed metrics."""

    step: int
    samples: list[Sample]
    weights: str
    """Where the weights came from."""
    exact: bool
    """Whether they are those the step began with."""
    recorded: dict[str, float]
    replayed: dict[str, float]
    remarks: list[str]
    """Reasons why the figures may not be those of the run."""
    source: str = ""
    """Where the samples came from."""
    tokens: dict[int, RecordedTokens] = field(default_factory=dict)
    """Each sample's recorded tokens, by its place in the batch."""
    optimizer_steps: int = 1
    """Over which the loss that is reported is a mean."""
    findings: list[SampleFinding] = field(default_factory=list)
    """Of a bad batch: each sample examined alone."""
    verdict: str = ""
    """Of a bad batch: what was wrong with it, in a sentence."""

    def differences(self) -> dict[str, float]:
        """Replayed minus recorded, where both are known."""
        return {name: self.replayed[name] - self.recorded[name] for name in self.replayed if name in self.recorded}


def replay(
    run: Path, step: int, config: RunConfig, progress: Callable[[str], None] = lambda sentence: None
) -> ReplayedStep:
    """Train the samples of a step again."""
    progress(f"reading the samples of step {step}")
    folder, directory = open_run(run), RunDirectory(run)
    samples, source, remarks = _read_batch(folder, directory, step)
    count, steps = len(samples), sum(map(bool, minibatches(samples, config.trainer.minibatches)))
    recorder = TokenLossRecorder(config.trainer, steps, lambda done: progress(f"{done} of {count} samples computed"))
    progress("loading the model")
    with _open_trainer(directory, step, config) as (trainer, weights):
        exact = trainer.version == step - 1
        trainer.learner.watch = recorder
        progress(f"computing the loss of {count} samples")
        replayed = _train_step(trainer, samples)
    recorded, remarks = folder.step_metrics(step), [*remarks, *folder.problems(patient=False)]
    return ReplayedStep(step, samples, weights, exact, recorded, replayed, remarks, source, recorder.tokens, steps)


def replay_dump(run: Path, dump: str, config: RunConfig) -> ReplayedStep:
    """Train the dumped batch of a bad step again, by the step's number or the file's path, and find the samples that
    made it bad."""
    folder, directory = open_run(run), RunDirectory(run)
    path = _dump_path(directory, dump)
    step = _dump_step(path)
    try:
        samples = decode(path.read_bytes())
    except (OSError, WireError) as error:
        raise PacelineError(f"{path} cannot be read: {error}") from error
    with _open_trainer(directory, step, config) as (trainer, weights):
        exact = trainer.version == step - 1
        short = [truncate(sample, trainer.max_tokens) for sample in samples]
        broken, findings = nonfinite_weights(trainer.learner), examine_samples(trainer.learner, short, trainer.version)
        replayed = _train_step(trainer, samples)
    recorded, remarks = folder.step_metrics(step), folder.problems(patient=False)
    verdict = findings_verdict(findings, broken)
    shown = step, samples, weights, exact, recorded, replayed, remarks
    return ReplayedStep(*shown, findings=findings, verdict=verdict)


@contextmanager
def _open_trainer(directory: RunDirectory, step: int, config: RunConfig) -> Generator[tuple[TorchTrainer, str]]:
    """Open a trainer at the latest checkpoint before a step; yields it and the source of its weights."""
    torch.manual_seed(config.seed)
    model = attach_lora(load_model(config.model), config.model, config.seed)
    # A bad step is what is examined here, so it must not raise.
    trainer = torch_trainer(with_sections(config, trainer={"on_bad_step": "skip", "max_bad_steps": 1 << 30}), model)
    try:
        earlier = [path for path in Checkpoints(directory.checkpoints, keep=1).all() if step_of(path) < step]
        if earlier:
            check_files(earlier[-1])
            asyncio.run(trainer.load(earlier[-1]))
        yield trainer, str(earlier[-1]) if earlier else f"{config.model.name}, untrained"
    finally:
        trainer.close()


def _train_step(trainer: TorchTrainer, samples: Sequence[Sample]) -> dict[str, float]:
    report = asyncio.run(trainer.step(samples))
    return {name: value for name, value in report.metrics.items() if name not in UNCOMPARED_METRICS}


def loss_table(result: ReplayedStep) -> Table:
    title = f"step {result.step}: {len(result.samples)} samples, {sum(map(len, result.samples)):,} tokens"
    figures = [Column(heading, justify="right") for heading in ("recorded", "replayed", "difference")]
    shown, differences = Table("", *figures, title=title), result.differences()
    for name in sorted(result.replayed, key=lambda name: (not name.startswith("loss"), name)):
        known = name in differences
        was, apart = (f"{result.recorded[name]:.6g}", f"{differences[name]:+.2g}") if known else ("-", "-")
        shown.add_row(name, was, f"{result.replayed[name]:.6g}", apart)
    return shown


def samples_table(result: ReplayedStep) -> Table:
    """A bad batch's samples: those that are not finite first, then by the size of their gradients."""
    names = list(dict.fromkeys(name for finding in result.findings for name in finding.losses))
    ranked = sorted(result.findings, key=lambda finding: (not finding.nonfinite, -finding.grad_norm))
    title = f"{min(MOST_ROWS, len(ranked))} of {len(ranked)} samples, each alone"
    figures = [Column(heading, justify="right") for heading in (*(f"loss/{name}" for name in names), "gradient")]
    shown = Table("env", "ticket", "rollout", *figures, "not finite", title=title)
    for finding in ranked[:MOST_ROWS]:
        sample = finding.sample
        number = "-" if sample.ticket is None else str(sample.ticket.number)
        values = [f"{finding.losses.get(name, 0.0):.4g}" for name in names]
        norm, broken = f"{finding.grad_norm:.4g}", ", ".join(finding.nonfinite)
        shown.add_row(sample.env, number, str(sample.rollout), *values, norm, broken)
    return shown


def _dump_path(directory: RunDirectory, dump: str) -> Path:
    folder = directory.root / "dumps"
    path = folder / f"{DUMP_PREFIX}{int(dump):06d}.msgpack" if dump.isdecimal() else Path(dump)
    if path.is_file():
        return path
    steps = sorted(_dump_step(file) for file in folder.glob(f"{DUMP_PREFIX}*.msgpack"))
    if not steps:
        raise PacelineError(f"{folder} holds no bad batches: none of this run's steps was left out")
    raise PacelineError(f"there is no bad batch {dump} in {folder}; those kept are of steps {_format_ranges(steps)}")


def _dump_step(path: Path) -> int:
    try:
        return int(path.stem.removeprefix(DUMP_PREFIX))
    except ValueError:
        raise PacelineError(f"{path} is not named like a bad batch: {DUMP_PREFIX}NNNNNN.msgpack") from None


def _read_batch(folder: RunFolder, directory: RunDirectory, step: int) -> tuple[list[Sample], str, list[str]]:
    """A step's samples as they shipped, where they were found, and what is missing of them."""
    try:
        samples = folder.batch(step)
    except RolloutNotFound as error:
        raise PacelineError(f"the samples of step {step} cannot be read: {error}") from error
    if samples:
        path = directory.batches / f"step-{step:06d}.msgpack"
        return (samples, str(path), []) if path.is_file() else (samples, "the record", _missing_remarks(folder, step))
    steps = folder.batches()
    if not steps:
        raise PacelineError(
            f"{directory.root} holds no samples of any step: train with --record.all, or with --record.batches 10 to "
            "keep the last ten batches"
        )
    raise PacelineError(f"the samples of step {step} are not kept; those kept are {_format_ranges(steps)}")


def _missing_remarks(folder: RunFolder, step: int) -> list[str]:
    query = Query(step=(step, step), state=[TRAINED, REPLAYED, SKIPPED], domain="training", limit=None)
    rows = folder.rollouts.find(query).rows
    count = f"{sum(not row.whole for row in rows)} of the step's {len(rows)} rollouts"
    remark = f"{count} were kept without their tokens: this is the loss of the others"
    return [] if all(row.whole for row in rows) else [remark]


def _format_ranges(numbers: Sequence[int]) -> str:
    """Consecutive numbers as ranges: 3 to 5, 9."""
    places = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in run] for _, run in places]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


SUM_TOLERANCE = 1e-4
"""Relative error up to which the float32 shares of a component count as adding up to its loss."""


def as_json(run: Path, result: ReplayedStep, config: RunConfig) -> bytes:
    """The step as `paceline replay --json` prints it. Numbers that are not finite become null."""
    decode_token, remarks = _token_decoder(config)
    indices, numbers, samples = _rollout_indices(run, result.step), Counter(), []
    for at, sample in enumerate(result.samples):
        owner = None if sample.ticket is None else (sample.ticket.number, sample.rollout)
        ids = sample.token_ids.tolist()
        samples.append(
            {
                "env": sample.env,
                "ticket": None if sample.ticket is None else sample.ticket.number,
                "member": sample.rollout,
                "ids": ids,
                "text": None if decode_token is None else [decode_token(token) for token in ids],
                "trained": result.tokens.get(at),
                "rollout": indices.get(owner),
                "number": numbers[owner],
            }
        )
        numbers[owner] += owner is not None
    components = list(dict.fromkeys(name for tokens in result.tokens.values() for name in tokens.share))
    document = {
        "step": result.step,
        "weights": {"from": result.weights, "exact": result.exact},
        "samples_from": result.source,
        "settings": config.trainer.model_dump(mode="json", exclude={"optimizer", "parallel"}),
        "optimizer_steps": result.optimizer_steps,
        "components": components,
        "loss": {
            name: {"recorded": result.recorded.get(name), "replayed": value} for name, value in result.replayed.items()
        },
        "remarks": [*result.remarks, *remarks, *_sum_remarks(result, components)],
        "samples": samples,
    }
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)


def _sum_remarks(result: ReplayedStep, components: list[str]) -> list[str]:
    """A remark for each component whose shares do not add up to its loss, as in a bad step."""
    remarks = []
    for name in components:
        shares = [tokens.share[name] for tokens in result.tokens.values() if name in tokens.share]
        values = np.concatenate(shares).astype(np.float64)
        loss = result.replayed.get(f"loss/{name}")
        if loss is not None and not abs(values.sum() - loss) <= SUM_TOLERANCE * max(1e-6, float(np.abs(values).sum())):
            remarks.append(
                f"the shares of `{name}` add up to {values.sum():.6g}, and its loss is {loss:.6g}: a step was bad"
            )
    return remarks


def _rollout_indices(run: Path, step: int) -> dict[tuple[int, int] | None, int]:
    """The number in the record of each rollout of the step, by ticket and member."""
    rollouts = open_run(run).rollouts
    if not rollouts.keeps_all:
        return {}
    rows = rollouts.find(Query(step=(step, step), domain="training", limit=None)).rows
    return {(row.ticket, row.member): row.index for row in rows}


def _token_decoder(config: RunConfig) -> tuple[Callable[[int], str] | None, list[str]]:
    """A function that decodes one token, where the tokenizer is at hand; else None and a remark."""
    try:
        tokenizer = load_tokenizer(config.model)
    except PacelineError as error:
        return None, [f"tokens are shown by their numbers: {error}"]

    @cache
    def decode_token(token: int) -> str:
        text, raw = str(tokenizer.decode([token])), str(tokenizer.convert_ids_to_tokens(token))
        # SentencePiece drops the space before what it takes for the first word.
        return f" {text}" if raw.startswith("\u2581") and not text.startswith(" ") else text

    return decode_token, []
