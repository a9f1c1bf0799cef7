"""Dispatches groups: draws tickets while the gate has room, admits finished groups, ships batches.

    ticket -> group in flight -> credit -> filters -> buffer -> batch
                   |                                   |         |
                   +-- called off    replayed groups --+---------+--> left over

Refill happens whenever something completes, also while the trainer is busy, because completion runs on the event loop
and training does not.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from paceline.config import RunConfig
from paceline.data import Ledger, State, Ticket
from paceline.data.rollout import groups_that_fit, total_size
from paceline.errors import RunStopped
from paceline.orchestrator.admission import GroupAdmission, ReadyGroup, Tally
from paceline.orchestrator.episodes import RolloutRunner, TrainEnv
from paceline.orchestrator.gate import Gate
from paceline.orchestrator.kl_reference import KLReferenceModel
from paceline.orchestrator.replay import Replay
from paceline.orchestrator.saved_groups import DispatcherState
from paceline.rollout import Group
from paceline.util.deadlines import ABANDON_SECONDS, named_wait
from paceline.util.user_code import hook_error

STALE, OVERSAMPLED = "stale", "oversampled"
"""Why groups are dropped that nothing is wrong with: they came too late. Their environment may draw in their place, or
the slow ones would get less than their weight."""
CLEAN_UP_SECONDS = ABANDON_SECONDS + 5.0
"""Time for cancelled episodes to clean up: by then, those that do not end are abandoned."""

TrainEarly = Callable[[list[Group]], Awaitable[None]]


class GroupInFlight(NamedTuple):
    task: "asyncio.Task[Group]"
    env: TrainEnv
    start_version: int
    """The version at which it started: none of its tokens can be older."""


class Dispatcher:
    """Owns everything between a ticket and a batch. All of it runs on the event loop; nothing here is locked."""

    def __init__(
        self,
        config: RunConfig,
        envs: dict[str, TrainEnv],
        runner: RolloutRunner,
        gate: Gate,
        ledger: Ledger,
        warn: Callable[[str], None] = lambda text: None,
        reference: KLReferenceModel | None = None,
    ) -> None:
        self._reference = reference
        self._config, self._envs, self._runner = config, envs, runner
        self._gate, self._ledger = gate, ledger
        gate.extra = config.extra_rollouts
        self.admission = GroupAdmission(config, envs, warn)
        self._replay = Replay(config.replay, config.staleness, config.seed, warn)
        self._replays: list[Group] = []
        """Groups that the batch being filled replays."""
        self.replay_metrics: dict[str, float] = {}
        """Of the batch that shipped last; none where replay is off."""
        self._refill_version = self._checked_version = gate.version
        """The versions that drawing and shipping have taken note of."""
        self._in_flight: dict[Ticket, GroupInFlight] = {}
        self._cancelling: set[asyncio.Task[Group]] = set()
        self._out_of_order: dict[Ticket, Group] = {}
        """Landed before others that must be judged first."""
        self._buffer: dict[Ticket, ReadyGroup] = {}
        self._smallest = min(env.group_size for env in envs.values())
        self._changed, self._stopped = asyncio.Event(), False
        self._failure: BaseException | None = None
        self.dropped_groups: list[tuple[Group, str]] = []
        """Finished groups that were dropped, and why, until the orchestrator records them."""
        self.skipped_draws: frozenset[tuple[str, int]] = frozenset()
        """Draws, by environment and number, that are dropped and not played: they broke a step in an earlier life."""

    def refill(self) -> None:
        if self._refill_version != self._gate.version:
            self._on_new_version()
        while not self._stopped and (env := self._next_env()) is not None:
            if not self._ledger.waiting:
                self._ledger.draw(env.draw(self._ledger.drawn))
            ticket = self._ledger.start()
            is_skipped = (ticket.env, ticket.draw) in self.skipped_draws
            if is_skipped or ticket.row in env.bad_rows:
                self._drop(ticket, "skipped_draw" if is_skipped else "bad_row")
                continue
            self._gate.start(env.group_size)
            task = asyncio.create_task(self._run_group(env, ticket), name=f"ticket {ticket.number}")
            self._in_flight[ticket] = GroupInFlight(task, env, self._gate.version)
            task.add_done_callback(lambda done, t=ticket: self._on_group_done(done, t))

    async def _run_group(self, env: TrainEnv, ticket: Ticket) -> Group:
        group = await self._runner.run_group(env, ticket)
        return group if self._reference is None else await self._reference.score_group(group)

    def _next_env(self) -> TrainEnv | None:
        """Whose turn it is, if a whole group of it fits: a ticket that waits comes first, then the least served."""
        room = self._gate.capacity
        if room < self._smallest:
            return None
        if self._ledger.waiting:
            env = self._envs[self._ledger.waiting[0].env]
            return env if env.group_size <= room else None
        fits = [c for c in self._envs.values() if c.group_size <= room and not (c.exhausted or c.paused)]
        return min(fits, key=lambda c: c.share, default=None)

    def _on_new_version(self) -> None:
        """New weights: cancel stale groups and choose what the batch replays, before fresh groups take the slots."""
        self._refill_version = self._gate.version
        if self._config.cancel_stale:
            # Groups too old for the next batch; those sampled by a frozen model never go stale.
            oldest = self._gate.version - self._config.staleness
            for ticket, flight in list(self._in_flight.items()):
                if flight.start_version < oldest and flight.env.algorithm.frozen_sampler is None:
                    self._cancel(ticket, STALE)
            self._admit_in_order()
        self._replays = self._replay.choose(self._gate.version, self._gate.replay_capacity)
        self._gate.replay(total_size(self._replays))

    def _cancel(self, ticket: Ticket, reason: str) -> None:
        """Cancel a group in flight. Its books are closed at once, however long its episodes take to go."""
        flight = self._in_flight.pop(ticket)
        self._cancelling.add(flight.task)
        flight.task.cancel()
        self._gate.reject(flight.env.group_size)
        self._drop(ticket, reason)

    def _drop(self, ticket: Ticket, reason: str) -> None:
        self._ledger.drop(ticket, reason)
        self.tally.dropped[reason] += 1
        if reason in (STALE, OVERSAMPLED):
            self._envs[ticket.env].late_groups += 1

    def remember(self, batch: Sequence[Group]) -> None:
        self._replay.remember([group for group in batch if group.samples()])

    def _on_group_done(self, task: "asyncio.Task[Group]", ticket: Ticket) -> None:
        """A group came back. Whatever goes wrong from here on stops the run with its cause."""
        if self._in_flight.pop(ticket, None) is None:  # called off: its result is ignored
            self._cancelling.discard(task)
            _ = task.cancelled() or task.exception()
            return
        if task.cancelled():
            if not self._stopped:
                self._failure = self._failure or RunStopped(f"ticket {ticket.number} was cancelled from outside")
            self._changed.set()
            return
        try:
            group = task.result()  # bounded: it is done
            if self._config.deterministic:
                self._out_of_order[ticket] = group
                self._admit_in_order()
            else:
                self._admit(group)
            self.refill()
        except BaseException as error:  # out of a callback only the event loop would hear of it
            failure = error if isinstance(error, Exception) else hook_error("user code", error)
            self._failure = self._failure or failure
        self._changed.set()

    def _admit_in_order(self) -> None:
        """In a deterministic run credit is given in ticket order, not in order of completion: a moving baseline depends
        on it. So a group waits for those drawn before it, still in flight as gate and ledger see it."""
        while self._out_of_order and (first := self._ledger.first(State.IN_FLIGHT)) in self._out_of_order:
            self._admit(self._out_of_order.pop(first))

    def _admit(self, group: Group) -> None:
        try:
            verdict = self.admission.admit(group, self._gate.version)
        except BaseException:
            self.dropped_groups.append((group, "run_ended"))
            raise
        if isinstance(verdict, ReadyGroup):
            self._gate.accept(group.size)
            self._ledger.buffer(group.ticket)
            self._buffer[group.ticket] = verdict
        else:
            self._gate.reject(group.size)
            self._drop(group.ticket, verdict)
            self.dropped_groups.append((group, verdict))
            if self.admission.solved_reason:
                self.stop()

    async def next_batch(self, on_ready: TrainEarly | None = None) -> list[Group] | None:
        """The oldest groups that fill a batch; a short one at the end of the data; None when nothing is left.
        `on_ready` is given groups that will be part of it, as soon as they are there."""
        with named_wait("a batch that fills up", waits_for=("an episode of", "the preparation of")):
            while True:
                if self._failure is not None:
                    raise self._failure
                self._drop_stale()
                self.refill()
                batch = self._oldest_groups(self._config.batch_size - total_size(self._replays))
                full = total_size([*batch, *self._replays]) + self._smallest > self._config.batch_size
                if not (full or self._in_flight) and self._replays:
                    # Replay fills batches up; it does not stand in for the fresh groups that a batch lacks.
                    self._gate.release(total_size(self._replays))
                    self._replays = []
                    continue
                if full or not self._in_flight:
                    return self._ship(batch) if batch else None
                if self._stopped:
                    return None
                if on_ready is not None:
                    new = [ready for group in batch if not (ready := self._buffer[group.ticket]).in_training]
                    for ready in new:
                        ready.in_training = True
                    if new:
                        await on_ready([ready.group for ready in new])
                        continue
                self._changed.clear()
                await self._changed.wait()  # bounded: each episode has a timeout

    def _oldest_groups(self, room: int) -> list[Group]:
        """As many buffered groups as fit, in ticket order, those that train already before all others."""
        order = sorted(self._buffer.items(), key=lambda item: (not item[1].in_training, item[0]))
        return groups_that_fit((ready.group for _, ready in order), room)

    def _buffered_groups(self) -> list[Group]:
        return [self._buffer[ticket].group for ticket in sorted(self._buffer)]

    def _drop_stale(self) -> None:
        """Look again at what waits in the buffer, but only when a new version has made it older."""
        version = self._gate.version
        if self._checked_version == version:
            return
        self._checked_version = version
        for group in [ready.group for ready in self._buffer.values() if version > ready.last_version]:
            if not self.admission.limit_group_staleness(group, version):
                self._drop_buffered(group, STALE)

    def _drop_buffered(self, group: Group, reason: str) -> None:
        del self._buffer[group.ticket]
        self._gate.release(group.size)
        self._drop(group.ticket, reason)
        self.dropped_groups.append((group, reason))

    def _ship(self, batch: list[Group]) -> list[Group]:
        for group in batch:
            del self._buffer[group.ticket]
        if self._gate.extra and not self._config.staleness and self._config.on_stale == "drop":
            self._drop_leftovers()
        if self._config.replay.share:
            self.replay_metrics = self._replay.metrics(self._replays, self._gate.version)
        for group in self._replays:  # under new tickets: drawn only now, they train before the next checkpoint
            again = self._replay.reissue(group, self._ledger.drawn)
            self._ledger.replay(again.ticket, first=group.ticket.number)
            batch = [*batch, again]
        self._replays = []
        self._gate.ship(total_size(batch))
        return batch

    def _drop_leftovers(self) -> None:
        """Drop what would be too old at the next version: all groups but those sampled by a frozen model."""
        for group in self._buffered_groups():
            if self._envs[group.ticket.env].algorithm.frozen_sampler is None:
                self._drop_buffered(group, OVERSAMPLED)
        for ticket, flight in list(self._in_flight.items()):
            if flight.env.algorithm.frozen_sampler is None:
                self._cancel(ticket, OVERSAMPLED)

    def running_episodes(self) -> dict[str, float]:
        """Episodes under way, by environment; may be asked from any thread."""
        counts = dict.fromkeys(self._envs, 0.0)
        for flight in list(self._in_flight.values()):
            counts[flight.env.name] += flight.env.group_size
        return counts

    @property
    def tally(self) -> Tally:
        return self.admission.tally

    def take_tally(self, batch: Sequence[Group]) -> Tally:
        """Take the tally of this batch: groups drawn after its last ticket are left for the next one."""
        tally, self.admission.tally = self.tally, self.tally.split_next(batch)
        return tally

    def stop(self) -> None:
        """Draw nothing more and wake a pending `next_batch`."""
        self._stopped = True
        self._changed.set()

    async def close(self) -> None:
        """Cancel what is in flight; its tickets wait for a resume."""
        self._stopped = True
        tasks = {*self._cancelling, *(flight.task for flight in self._in_flight.values())}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLEAN_UP_SECONDS)

    def state(self) -> DispatcherState:
        """State for the checkpoint. Groups in flight are not in it: their tickets wait for a resume."""
        late = {env.name: env.late_groups for env in self._envs.values()}
        counts = self.tally.counts() | {
            "late": late,
            "forgone": {e.name: e.share_while_paused for e in self._envs.values()},
        }
        resolved, chosen = list(self.tally.resolved), list(self._replays)
        return DispatcherState(self._buffered_groups(), resolved, self._replay.state(), chosen, counts)

    def load(self, held: DispatcherState) -> list[Ticket]:
        """Back to a checkpoint, at the gate's version; answers with the tickets whose groups are in the buffer again.

        They are credited and counted already, so they are not judged again; what has grown too old by now goes when
        the next batch is filled. If the run file has changed so that a group no longer fits, its ticket is played
        again. The breaker starts anew: you may have fixed what it counted.
        """
        version = self._gate.version
        self._replay.load(held.remembered)
        self._replays = self._replay.still_fresh(held.chosen, version, self._gate.replay_capacity)
        self._gate.replay(total_size(self._replays))
        self._refill_version, self._checked_version = version, -1
        self._buffer, self._out_of_order = {}, {}
        for group in held.buffered:
            env = self._envs.get(group.ticket.env)
            fits = env is not None and group.size == env.group_size <= self._gate.capacity
            if fits and (group.ticket.env, group.ticket.draw) not in self.skipped_draws:
                self._gate.start(group.size)
                self._gate.accept(group.size)
                self._buffer[group.ticket] = ReadyGroup.of(group, self._config.staleness)
        again = {group.ticket for group in held.buffered if group.ticket not in self._buffer}
        self.admission.tally = Tally.of([g for g in held.resolved if g.ticket not in again], held.counts)
        for env in self._envs.values():
            env.late_groups = held.counts.get("late", {}).get(env.name, 0)
            env.share_while_paused = held.counts.get("forgone", {}).get(env.name, 0.0)
        return [group.ticket for group in self._buffered_groups()]
