"""Runs the training loop: take a batch of groups, train, publish the weights.

`staleness = 0` and `staleness = S` are the same loop: the gate bounds how far sampling runs ahead of training, and the
dispatcher goes on sampling whenever this loop awaits.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from paceline.algorithms.base import reward_before_kl
from paceline.clients import Pool
from paceline.config import RunConfig
from paceline.data import DataError, Ledger, Sample, Ticket, encode, row_change
from paceline.data.sample import TokenScores
from paceline.errors import PacelineError, RunStopped
from paceline.orchestrator.admission import Tally
from paceline.orchestrator.checkpoint import CheckpointError, Checkpoints
from paceline.orchestrator.dispatcher import Dispatcher
from paceline.orchestrator.episodes import EVAL, MATCH, RolloutRunner, TrainEnv
from paceline.orchestrator.evaluation import evaluate
from paceline.orchestrator.gate import Gate
from paceline.orchestrator.kl_reference import KLReferenceModel
from paceline.orchestrator.league_checkpoints import LeagueCheckpoints
from paceline.orchestrator.metrics import EngineLoad, Stopwatch, batch_metrics, row_metrics
from paceline.orchestrator.pauses import Advisor, EnvPauses
from paceline.orchestrator.promotion import PromotionGate
from paceline.orchestrator.replay import ReplayedGroup
from paceline.orchestrator.saved_groups import GROUPS_FILE, encode_groups, read_groups
from paceline.rollout import Group, Rollout, SamplingClient
from paceline.trainer import StepReport, Trainer, TrainerError, TrainerLost
from paceline.util.deadlines import Clock, gather_or_cancel
from paceline.util.user_code import restore_import_path

Records = Sequence[dict[str, Any]]
Gauges = Mapping[str, float]


class RunMonitor(Protocol):
    """The events a run reports (`observe.monitor.Monitor` describes each)."""

    def note(self, text: str) -> None: ...
    def phase(self, text: str) -> None: ...
    def step(self, step: int, metrics: Gauges) -> None: ...
    def finished_rollouts(self, step: int, state: str, rollouts: Sequence[Rollout]) -> None: ...
    def rollouts(self, step: int, records: Records) -> None: ...
    def batch(self, step: int, data: bytes) -> None: ...
    def tickets(self, records: Records) -> None: ...
    def token_scores(self, step: int, scores: TokenScores) -> None: ...
    def spans(self, step: int, spans: Sequence[tuple[str, str, float, float]]) -> None: ...
    def gauges(self, look: Callable[[], tuple[Gauges, Gauges, Gauges]]) -> None: ...


@dataclass(slots=True)
class OrchestratorParts:
    pool: Pool
    trainer: Trainer
    client: SamplingClient
    eval_client: SamplingClient
    envs: dict[str, TrainEnv]
    monitor: RunMonitor
    checkpoints: Checkpoints
    clock: Clock
    reference: KLReferenceModel | None = None
    """The KL reference, where the trainer does not compute it."""
    advisor: Callable[[dict[str, Any]], Advisor] | None = None
    """Makes the advisor that pauses environments, of the run's config."""


class RollBack(PacelineError):
    """Roll back to a checkpoint, the latest one if none is named, and never train these draws."""

    def __init__(self, cause: str, draws: Iterable[tuple[str, int]], checkpoint: Path | None = None) -> None:
        super().__init__(cause)
        self.draws, self.checkpoint = frozenset(draws), checkpoint


class Orchestrator:
    """Executes one run, or the part of it between two roll-backs.

    Draws in `skipped_draws` are dropped instead of trained: an earlier attempt of this run found that they break it.
    """

    def __init__(
        self, config: RunConfig, parts: OrchestratorParts, skipped_draws: frozenset[tuple[str, int]] = frozenset()
    ) -> None:
        self._config = config
        self._parts = parts
        self._ticket_records: list[dict] = []
        self._ledger = Ledger(journal=self._ticket_records.append)
        assert config.max_inflight is not None
        reserve = config.replay.slots(config.batch_size, [env.group_size for env in parts.envs.values()])
        self._gate = Gate(config.batch_size, config.staleness, config.max_inflight, total=config.steps, reserve=reserve)
        self._runner = RolloutRunner(parts.client, parts.clock, config.seed)
        self._dispatcher = Dispatcher(
            config, parts.envs, self._runner, self._gate, self._ledger, parts.monitor.note, parts.reference
        )
        self._dispatcher.skipped_draws = skipped_draws
        self._league_checkpoints = LeagueCheckpoints(parts.envs, parts.pool, parts.monitor.note)
        self._promotion = PromotionGate(config.promotion, parts.pool, parts.envs, config.eval.concurrency)
        advisor = parts.advisor(config.model_dump()) if parts.advisor else None
        self._env_pauses = EnvPauses(config, parts.envs, advisor, parts.monitor.note)
        self._engine_load = EngineLoad()
        self._stopwatch = Stopwatch(parts.clock, lambda: parts.pool.busy_seconds)
        self._clock_offset = time.time() - parts.clock.now()
        self._finished_tickets: set[Ticket] = set()
        """Groups of the batch under way whose samples are finished."""
        self._saved_at: int | None = None
        self._notes: list[str] = []
        """For the user, once the run has begun."""
        self._restored = self._stopping = False
        self.step = 0
        self.halt_reason = ""
        """Why the run stopped before its end, where advisories left it nothing to draw from."""
        self.solved_reason = ""
        """Why the run ended before its last step, where nothing was left to learn."""

    async def run(self) -> None:
        """Train until the steps are done, the rows are used up, or `stop` is called."""
        # Asked from any thread.
        pool, episodes, calls = self._parts.pool, self._dispatcher.running_episodes, self._runner.running_calls
        self._parts.monitor.gauges(lambda: (pool.busy, episodes(), dict(calls)))
        early = self._train_early if self._config.trainer.stream else None
        await self._begin()
        try:
            while not self._finished:
                with self._stopwatch.phase("sample"):
                    batch = await self._dispatcher.next_batch(early)
                if batch is None:
                    break
                with self._stopwatch.phase("score"):  # `time/score`: baselines over the batch, references
                    samples = await self._finish_samples(batch)
                with self._stopwatch.phase("train"):
                    report = await self._parts.trainer.step(samples)
                if report.roll_back:
                    fresh = [group.ticket for group in batch if not isinstance(group, ReplayedGroup)]
                    draws = {(ticket.env, ticket.draw) for ticket in fresh}
                    raise RollBack(f"step {self.step + 1}: {report.trouble}", draws)
                self._update_curriculum(batch, report)
                with self._stopwatch.phase("publish"):
                    await self._publish(self.step + 1)
                await self._finish_step(batch, samples, report)
            if not self._stopping and self._promotion.is_unchecked(self.step):  # the rows are used up
                metrics = await self._evaluate()
                await self._promote_or_refuse(metrics, (await self._promotion.compare(self.step, metrics))[1])
            await self._save()
            if not self._finished and (solved := self._dispatcher.admission.solved_reason):
                self.solved_reason = solved
                self._parts.monitor.note(solved)
            elif not self._finished:
                self.halt_reason = self._env_pauses.halt_reason()
        finally:
            self._report_dropped(self.step + 1)  # the groups that ended the run are worth a look
            self._env_pauses.close()
            await self._dispatcher.close()
            await self._parts.client.close()

    async def restore(self) -> None:
        """Go back to the checkpoint the run file names, if it names one. Nothing is written or removed before all of it
        has been read; `run` does this unless it was done."""
        if self._config.resume and not self._restored:
            self._restored = True
            await self._restore(self._config.resume)

    def stop(self) -> None:
        """End after the step under way, with a checkpoint."""
        self._stopping = True
        self._dispatcher.stop()

    @property
    def _finished(self) -> bool:
        return self._stopping or (self._config.steps is not None and self.step >= self._config.steps)

    async def _begin(self) -> None:
        await self.restore()
        for note in (*self._notes, *(env.note for env in self._parts.envs.values() if env.note)):
            self._parts.monitor.note(note)
        may_roll_back = self._config.placement != "local" or self._config.trainer.on_bad_step == "roll_back"
        if may_roll_back and not self._parts.checkpoints.all():
            self._saved_at = None  # what it resumed from is another run's
            await self._save()
        await self._publish(self.step)
        is_first = bool(self._config.eval.every) and self.step == 0
        if is_first or self._promotion.lacks_version:
            metrics = await self._evaluate()
            if is_first:
                self._parts.monitor.step(0, metrics)
            if self._promotion.lacks_version:  # the weights a run starts from are promoted as they are
                await self._promote(metrics)
        self._stopwatch.restart()

    async def _train_early(self, groups: Sequence[Group]) -> None:
        """Begin to train on part of a batch while the rest of it is sampled."""
        with self._stopwatch.phase("score"):
            samples = await self._finish_samples(groups)
        self._finished_tickets |= {group.ticket for group in groups}
        with self._stopwatch.phase("train"):
            await self._parts.trainer.feed(samples)

    async def _finish_samples(self, batch: Sequence[Group]) -> list[Sample]:
        """Samples of the batch, finished by each environment's algorithm: all environments at once. What is replayed
        was finished when it first trained."""
        shares: dict[str, list[Group]] = {}
        for group in batch:
            if not isinstance(group, ReplayedGroup) and group.ticket not in self._finished_tickets:
                shares.setdefault(group.ticket.env, []).append(group)
        work = [self._parts.envs[env].algorithm.finish_batch(groups) for env, groups in shares.items()]
        for reasons in await gather_or_cancel(work):
            self._dispatcher.tally.lost_samples.update(reasons or {})
        if self._parts.reference is not None:
            fresh = [group for groups in shares.values() for group in groups]
            self._dispatcher.tally.lost_samples.update(await self._parts.reference.score_batch(fresh))
        return [sample for group in batch for sample in group.samples()]

    def _update_curriculum(self, batch: Sequence[Group], report: StepReport) -> None:
        """Tell each environment's order of rows how they went, before the next ones are drawn or replayed."""
        for group in self._dispatcher.tally.resolved_by(batch):
            rewards = [reward_before_kl(rollout) for rollout in group.rollouts if rollout.reward is not None]
            self._parts.envs[group.ticket.env].cursor.update(group.ticket.row, rewards)
        if not report.skipped:  # what broke one gradient must not come back to break another
            self._dispatcher.remember(batch)

    async def _publish(self, trained: int) -> None:
        """Hand the engine the weights of so many trained batches; the gate opens for the next version."""
        update = await self._parts.trainer.weights()
        if update.version != trained:
            raise RunStopped(f"the trainer has trained {update.version} batches, and the run {trained}: resume it")
        await self._parts.pool.load_weights(update)
        if self._parts.reference is not None:
            await self._parts.reference.take_if_due(update)
        if self._league_checkpoints.members:
            await self._league_checkpoints.offer(update)
        if self._env_pauses.pending_advice:
            await self._env_pauses.apply()
        self._gate.open_for(update.version)
        if not self._stopping:
            self._dispatcher.refill()

    async def _finish_step(self, batch: Sequence[Group], samples: Sequence[Sample], report: StepReport) -> None:
        """The batch is trained and published: enter it in the books, report, evaluate, save."""
        load = await self._engine_load.lap(self._parts.pool)
        restore_import_path()
        self.step += 1
        self._finished_tickets.clear()
        for group in batch:
            self._ledger.train(group.ticket, self.step, group.size)
        for env in self._parts.envs.values():
            oldest = self._ledger.oldest(env.name)
            env.environment.forget(env.cursor.draws if oldest is None else oldest)
        tally = self._dispatcher.take_tally(batch)
        metrics = batch_metrics(batch, samples, tally, self._gate.version - 1) | report.metrics
        if report.memory:
            metrics["memory/trainer"] = report.memory
        if bad := sum(env.skipped for env in self._parts.envs.values()):
            metrics["data/bad_rows"] = float(bad)
        metrics |= self._dispatcher.replay_metrics
        metrics |= row_metrics(self._parts.envs.values(), tally.resolved)
        metrics |= self._runner.metrics()
        metrics |= load | self._stopwatch.lap(sum(r.completion_length for g in tally.resolved for r in g.rollouts))
        if report.skipped:
            self._parts.monitor.note(f"step {self.step}: {report.trouble}")
        every, reasons = self._config.eval.every, None
        is_promotion_due = self._promotion.is_due(self.step, self._config.steps)
        if is_promotion_due or (every and (self.step % every == 0 or self.step == self._config.steps)):
            metrics |= await self._evaluate()
        self._promotion.add_trained(batch)
        if is_promotion_due:
            with self._stopwatch.phase("eval"):
                compared, reasons = await self._promotion.compare(self.step, metrics)
            metrics |= compared
        self._record(batch, samples, tally, metrics, report)
        if reasons is not None:
            await self._promote_or_refuse(metrics, reasons)
        if self._config.checkpoint.every and self.step % self._config.checkpoint.every == 0:
            await self._save()
        self._stopwatch.restart()

    async def _evaluate(self) -> dict[str, float]:
        with self._stopwatch.phase("eval"):
            parts, config = self._parts, self._config
            progress, played = parts.monitor.phase, partial(parts.monitor.finished_rollouts, self.step)
            runner = RolloutRunner(parts.eval_client, parts.clock, config.seed, EVAL, self._runner.running_calls)
            self._promotion.clear_replies()

            def evaluated(rollouts: Sequence[Rollout]) -> None:
                played("evaluated", rollouts)
                self._promotion.add_replies(rollouts)

            metrics = await evaluate(parts.envs, runner, config.eval, progress, evaluated)
            runner = RolloutRunner(parts.eval_client, parts.clock, config.seed, MATCH, self._runner.running_calls)
            metrics |= await self._league_checkpoints.rate_version(
                runner, self._gate.version, config.eval.concurrency, progress, partial(played, "matched")
            )
        return metrics | {"time/eval": self._stopwatch.seconds("eval")}

    async def _promote_or_refuse(self, evaluation: Gauges, reasons: Sequence[str]) -> None:
        """Promote the version that was compared, or do what the run file says of one that failed."""
        if not reasons:
            await self._promote(evaluation)
            return
        assert self._config.promotion is not None
        assert self._promotion.promoted is not None
        how, stays = self._config.promotion.on_fail, f"`promoted` stays at step {self._promotion.promoted.step}"
        cause = f"step {self.step} is not promoted: {'; '.join(reasons)}; {stays}"
        if how == "roll_back":
            raise RollBack(cause, self._promotion.draws, self._parts.checkpoints.promoted)
        self._parts.monitor.note(cause)
        if how == "stop":
            self.halt_reason = f"{cause}. Lower trainer.optimizer.lr, or let [promotion] allow more, and go on with "
            self.halt_reason += "--resume promoted"
            self.stop()

    async def _promote(self, evaluation: Gauges) -> None:
        """The checkpoint of this step, which says so itself, is the promoted one from now on. Killed in between, a
        resumed run finds the checkpoint and points `promoted` at it."""
        await self._promotion.promote(self.step, evaluation)
        self._saved_at = None  # one of this step may be there that does not know
        await self._save()
        self._parts.checkpoints.promote(self.step)

    @property
    def promoted(self) -> Path | None:
        """The checkpoint of the last version that passed [promotion]; None where nothing is promoted."""
        return None if self._config.promotion is None else self._parts.checkpoints.promoted

    def _record(
        self,
        batch: Sequence[Group],
        samples: Sequence[Sample],
        tally: Tally,
        metrics: dict[str, float],
        report: StepReport,
    ) -> None:
        monitor, skipped = self._parts.monitor, report.skipped
        monitor.step(self.step, metrics)
        self._report_dropped(self.step)
        fresh = [group for group in batch if not isinstance(group, ReplayedGroup)]
        again = [group for group in batch if isinstance(group, ReplayedGroup)]
        if report.scores is not None:
            monitor.token_scores(self.step, _in_record_order(report.scores, batch) if again else report.scores)
        self._report_rollouts(self.step, "skipped" if skipped else "trained", _all_rollouts(fresh))
        monitor.finished_rollouts(self.step, "skipped" if skipped else "replayed", _all_rollouts(again))
        shift = self._clock_offset
        spans = [("run", name, start + shift, end + shift) for name, start, end in self._stopwatch.take_spans()]
        monitor.spans(self.step, spans)
        failed = [rollout for group in tally.resolved for rollout in group.failed]
        shown = [rollout for group in batch for rollout in group.rollouts][: self._config.record.rollouts]
        monitor.rollouts(self.step, [rollout.record() for rollout in [*shown, *failed[:1]]])
        if self._config.record.batches:
            monitor.batch(self.step, encode(samples))
        self._env_pauses.step(self.step, metrics)
        self._flush_tickets()

    def _report_dropped(self, step: int) -> None:
        """Record the groups dropped since the last batch under this one: its checkpoint knows of them."""
        for group, reason in self._dispatcher.dropped_groups:
            self._report_rollouts(step, f"dropped:{reason}", _all_rollouts([group]))
        self._dispatcher.dropped_groups.clear()

    def _report_rollouts(self, step: int, state: str, rollouts: list[Rollout]) -> None:
        self._parts.monitor.finished_rollouts(step, state, rollouts)
        self._env_pauses.played(state, rollouts)

    def _flush_tickets(self) -> None:
        self._parts.monitor.tickets(self._ticket_records)
        self._ticket_records.clear()

    async def _save(self) -> None:
        if self._saved_at == self.step:
            self._flush_tickets()  # groups may have been dropped since
            self._report_dropped(self.step + 1)
            return
        self._report_dropped(self.step)
        self._parts.monitor.phase("saving checkpoint")
        envs = self._parts.envs.values()
        # Written before anything is awaited: what lands while the trainer saves comes after this checkpoint.
        groups = encode_groups(self._dispatcher.state())
        state = {
            "step": self.step,
            "ledger": self._ledger.state(self.step),
            "cursors": {env.name: env.cursor.state() for env in envs},
            "rows": {env.name: env.row_digest for env in envs},
            "algorithms": {env.name: env.algorithm.state() for env in envs},
            "environments": {env.name: env.environment.state() for env in envs},
            "skipped_draws": sorted(self._dispatcher.skipped_draws),
            "leagues": [member.env.name for member in self._league_checkpoints.members],
            "promotion": self._promotion.state(),
        }

        async def files(folder: Path) -> None:
            await self._parts.trainer.save(folder)
            self._league_checkpoints.save(folder)
            self._promotion.save(folder)
            if self._parts.reference is not None:
                self._parts.reference.save(folder)
            (folder / GROUPS_FILE).write_bytes(groups)

        text = json.dumps(state)
        self._flush_tickets()  # the journal never knows less than the checkpoint
        await self._parts.checkpoints.save(self.step, text, files)
        self._saved_at = self.step
        self._flush_tickets()

    async def _restore(self, resume: str) -> None:
        checkpoints, envs = self._parts.checkpoints, self._parts.envs
        path, state = checkpoints.find(resume)
        if note := await checkpoints.check(path):
            self._notes.append(note)
        if strange := sorted(envs.keys() - state["cursors"].keys()):
            raise CheckpointError(
                f"{path} knows no environment {strange}: it knows {sorted(state['cursors'])}. Go on with these, or "
                f"begin a new run from its export (model.name); {checkpoints.list_resumable()}"
            )
        if gone := sorted({Ticket(*fields).env for fields in state["ledger"]["open"]} - envs.keys()):
            raise CheckpointError(
                f"{path} has rows of {gone} under way, which the run file no longer has: name them again, or begin a "
                f"new run from its export (model.name); {checkpoints.list_resumable()}"
            )
        changed = self._changed_rows(path, state.get("rows", {}))
        try:
            await self._parts.trainer.load(path)
        except TrainerLost:
            raise
        except TrainerError as error:
            raise CheckpointError(f"{error}; {checkpoints.list_resumable()}") from error
        self.step = self._saved_at = state["step"]
        self._dispatcher.skipped_draws |= set(map(tuple, state.get("skipped_draws", state.get("shunned", ()))))
        # Whole batches, as the gate counts them: the batch size may have changed since.
        self._gate.open_for(self._parts.trainer.version)
        self._gate.accepted = self._gate.version * self._config.batch_size
        held = read_groups(path)
        kept = self._dispatcher.load(held)
        for fields in state["ledger"]["open"]:  # a changed dataset must have the row, unless its group is finished
            if (ticket := Ticket(*fields)).env in changed and ticket not in kept:
                fields[:] = ticket._replace(row=ticket.row % len(envs[ticket.env].rows))
        self._ledger.load(state["ledger"], kept)
        skipped = sum((g.ticket.env, g.ticket.draw) in self._dispatcher.skipped_draws for g in held.buffered)
        if again := state["ledger"].get("buffered", 0) - len(kept) - skipped:
            self._notes.append(
                f"{again} finished groups are played again: the run file's sizes changed, or a file could not keep them"
            )
        for env in envs.values():
            try:
                if how := env.cursor.load(state["cursors"][env.name]):
                    self._notes.append(f"{env.name}: going on with other settings than {path.name}: {how}")
            except DataError as error:
                raise CheckpointError(f"{path}, environment `{env.name}`: {error}") from error
            env.algorithm.load(state["algorithms"][env.name])
            env.environment.load(state["environments"][env.name])
        await self._league_checkpoints.load(path)
        self._promotion.load(path, state.get("promotion", {}))
        if self._parts.reference is not None:
            await self._parts.reference.load(path)
        checkpoints.delete_after(self.step)
        promoted = self._promotion.promoted
        if promoted is not None and not checkpoints.promote(promoted.step):
            self._notes.append(f"the promoted checkpoint of step {promoted.step} is gone: {path.name} takes its place")
            self._promotion.promoted = None

    def _changed_rows(self, path: Path, saved: Mapping[str, Mapping]) -> set[str]:
        """Environments whose rows are not those the checkpoint was trained on; an error unless that is allowed."""
        changes = {
            name: how
            for name, env in self._parts.envs.items()
            if (old := saved.get(name)) and env.row_digest and (how := row_change(old, env.row_digest))
        }
        changed = [f"the dataset of `{name}` has changed since {path.name}: {how}" for name, how in changes.items()]
        if changed and not self._config.checkpoint.allow_changed_rows:
            raise CheckpointError(
                f"{'; '.join(changed)}. Bring the old rows back, or add --checkpoint.allow_changed_rows to go on with "
                f"the new ones; {self._parts.checkpoints.list_resumable()}"
            )
        self._notes += [f"{text}; the run goes on with the new rows" for text in changed]
        return set(changes)

    @property
    def checkpoint(self) -> Path | None:
        return next(reversed(self._parts.checkpoints.all()), None)


def _in_record_order(scores: TokenScores, batch: Sequence[Group]) -> TokenScores:
    """The record has the batch's own groups first and then the replayed."""
    replayed = np.array([isinstance(group, ReplayedGroup) for group in batch for _ in group.samples()], bool)
    return scores.renumbered(np.argsort(np.argsort(replayed, kind="stable")).tolist())


def _all_rollouts(groups: Iterable[Group]) -> list[Rollout]:
    return [rollout for group in groups for rollout in (*group.rollouts, *group.failed)]
