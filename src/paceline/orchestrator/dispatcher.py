"""Keeps the sampler riding: draws tickets while the gate has room, and judges what comes back.

    ticket -> group in flight -> credit -> filters -> buffer -> batch
                                                                 |
                                  remembered groups, replayed ---+

Refill happens whenever something completes, also while the trainer is busy, because completion runs on the event loop
and training does not.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from paceline.config import RunConfig
from paceline.data import Ledger, Sample, State, Ticket
from paceline.orchestrator.breaker import Breaker, RunStopped
from paceline.orchestrator.buffered import Held
from paceline.orchestrator.course import Course
from paceline.orchestrator.episodes import Player
from paceline.orchestrator.filters import USERS, Filters
from paceline.orchestrator.gate import Gate
from paceline.orchestrator.replay import Replay, Replayed
from paceline.orchestrator.staleness import fresh_enough
from paceline.rollout import Group

PATIENCE = 4
"""Batches' worth of groups that may be dropped in a row before the user is told; then twice as many, and so on."""


Ahead = Callable[[list[Group]], Awaitable[None]]
"""Begins the work on part of a batch."""


@dataclass(slots=True)
class Tally:
    """What happened since the last batch shipped."""

    resolved: list[Group] = field(default_factory=list)
    """Groups that finished, before any filter."""
    past: list[Group] | None = None
    """Of those, what led to the batch that shipped, once somebody has asked."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Groups, by reason."""
    failed_rollouts: int = 0
    stale_samples: int = 0
    lost_samples: Counter[str] = field(default_factory=Counter)
    """Samples an algorithm could not finish when their batch shipped, by reason."""


class Dispatcher:
    """Owns everything between a ticket and a batch. All of it runs on the event loop; nothing here is locked."""

    def __init__(
        self,
        config: RunConfig,
        courses: dict[str, Course],
        player: Player,
        gate: Gate,
        ledger: Ledger,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._config = config
        self._courses = courses
        self._player = player
        self._gate = gate
        self._ledger = ledger
        self._warn = warn
        self._breaker = Breaker(config.breaker)
        self._filters = Filters(config)
        self._drops_in_a_row = 0
        self._next_warning = PATIENCE * config.batch_size // self._smallest()
        self._aged_at = gate.version
        self._replay = Replay(config.replay, config.staleness)
        self._replays: list[Group] = []
        self._chosen_at = gate.version
        self._tasks: set[asyncio.Task[Group]] = set()
        self._buffer: dict[Ticket, Group] = {}
        self._promised: set[Ticket] = set()
        """Of those in the buffer: what the next batch has begun to train on."""
        self._young_until: dict[Ticket, int] = {}
        """The last version at which all of a buffered group may train, so that few are looked at again."""
        self._early: dict[Ticket, Group] = {}
        """Landed before others that must be judged first."""
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self._stopped = False
        self.tally = Tally()

    # -- drawing ----------------------------------------------------------------------------------------------------

    def refill(self) -> None:
        """Start groups while the gate has room."""
        self._choose_replays()
        while not self._stopped and (course := self._next_course()) is not None:
            if not self._ledger.waiting:
                self._ledger.draw(course.draw(self._ledger.drawn))
            ticket = self._ledger.start()
            self._gate.start(course.group_size)
            task = asyncio.create_task(self._player.group(course, ticket), name=f"ticket {ticket.number}")
            self._tasks.add(task)
            task.add_done_callback(lambda done, t=ticket: self._landed(done, t))

    def _next_course(self) -> Course | None:
        """Whose turn it is, if a whole group of it fits: a ticket that waits comes first, then the least served."""
        room = self._gate.capacity
        if self._ledger.waiting:
            course = self._courses[self._ledger.waiting[0].env]
            return course if course.group_size <= room else None
        fits = [c for c in self._courses.values() if c.group_size <= room and not c.exhausted]
        return min(fits, key=lambda c: c.share, default=None)

    # -- replaying --------------------------------------------------------------------------------------------------

    def remember(self, batch: Sequence[Group]) -> None:
        """These groups trained, and may train again."""
        self._replay.remember([group for group in batch if group.samples()])

    def _choose_replays(self) -> None:
        """A new version: settle what its batch replays before fresh groups take the places."""
        if self._chosen_at == self._gate.version:
            return
        self._chosen_at = self._gate.version
        self._replays = self._replay.choose(self._gate.version, self._gate.replayable)
        self._gate.replay(places(self._replays))

    def _forgo_replays(self) -> None:
        """Replay fills batches up; it does not stand in for the fresh groups that a batch lacks."""
        self._gate.give_back(places(self._replays))
        self._replays = []

    def _enter_replays(self) -> list[Replayed]:
        """The chosen groups under new tickets. Drawn only now, they are trained before the next checkpoint."""
        entered = []
        for group in self._replays:
            again = self._replay.again(group, self._ledger.drawn)
            self._ledger.replay(again.ticket, first=group.ticket.number)
            entered.append(again)
        self._replays = []
        return entered

    # -- judging ----------------------------------------------------------------------------------------------------

    def _landed(self, task: "asyncio.Task[Group]", ticket: Ticket) -> None:
        """A group came back. Whatever goes wrong from here on stops the run with its cause."""
        self._tasks.discard(task)
        if task.cancelled():
            if not self._stopped:
                self._failure = self._failure or RunStopped(f"ticket {ticket.number} was cancelled from outside")
            self._changed.set()
            return
        try:
            self._judge_in_turn(task.result())
            self.refill()
        except Exception as error:
            self._failure = self._failure or error
        self._changed.set()

    def _judge_in_turn(self, group: Group) -> None:
        """Where a run must repeat itself, credit goes by ticket and not by who came first: a moving baseline hangs on
        the order. So a group waits for those drawn before it, still in flight as gate and ledger see it."""
        if not self._config.deterministic:
            return self._judge(group)
        self._early[group.ticket] = group
        while (first := self._ledger.first(State.IN_FLIGHT)) in self._early:
            self._judge(self._early.pop(first))

    def _judge(self, group: Group) -> None:
        self._count_failures(group)
        self.tally.resolved.append(group)
        course = self._courses[group.ticket.env]
        reason = self._why_not(group, course)
        if reason is not None:
            self._gate.reject(group.places)
            self._ledger.drop(group.ticket, reason)
            self.tally.dropped[reason] += 1
            self._count_drop(reason)
            return
        self._drops_in_a_row = 0
        self._gate.accept(group.places)
        self._ledger.buffer(group.ticket)
        self._buffer[group.ticket] = group
        ages = [sample.oldest_version for sample in group.samples()]
        self._young_until[group.ticket] = min((v for v in ages if v is not None), default=0) + self._config.staleness

    def _count_drop(self, reason: str) -> None:
        """That no group carries a signal is a state a run may pass through, but nobody should have to guess it."""
        self._drops_in_a_row += 1
        if self._drops_in_a_row == self._next_warning:
            self._next_warning *= 2
            mend = "make the task easier, raise group_size, or let the reward tell rollouts apart"
            mend = "look at what filters.group asks for" if reason == USERS else mend
            self._warn(f"the last {self._drops_in_a_row} groups were all dropped ({reason}), so nothing trains: {mend}")

    def _why_not(self, group: Group, course: Course) -> str | None:
        """Credit the group; the reason if it must not train."""
        assert course.config.min_group_size is not None
        if group.members < course.config.min_group_size:
            return "group_too_small"
        self._filters.before_credit(group)
        course.algorithm.assign(group)
        self._filters.after_credit(group)
        if self._config.filters.zero_advantage and course.group_size > 1 and without_signal(group):
            return "zero_advantage"
        if not self._filters.keeps(group):
            return USERS
        return None if self._age(group) else "stale"

    def _age(self, group: Group) -> bool:
        """Drop or mask what is too old by now; False if nothing is left."""
        limit, how, version = self._config.staleness, self._config.on_stale, self._gate.version
        for rollout in group.rollouts:
            aged = [fresh_enough(sample, version, limit, how) for sample in rollout.samples]
            self.tally.stale_samples += aged.count(None)
            rollout.samples = [sample for sample in aged if sample is not None]
        return any(rollout.samples for rollout in group.rollouts)

    def _count_failures(self, group: Group) -> None:
        self.tally.failed_rollouts += len(group.failed)
        for rollout in sorted([*group.failed, *group.rollouts], key=lambda rollout: rollout.member):
            if rollout.error is None:
                self._breaker.success()
            elif not rollout.dropped:
                self._breaker.failure(rollout.error)

    # -- shipping ---------------------------------------------------------------------------------------------------

    async def next_batch(self, ahead: Ahead | None = None) -> list[Group] | None:
        """The oldest groups that fill a batch; a short one at the end of the data; None when nothing is left. `ahead`
        is given groups that will be part of it, as soon as they are there."""
        while True:
            if self._failure is not None:
                raise self._failure
            self._drop_stale()
            self.refill()
            batch = self._oldest()
            full = places([*batch, *self._replays]) + self._smallest() > self._config.batch_size
            if not (full or self._tasks) and self._replays:
                self._forgo_replays()
                continue
            if full or not self._tasks:
                return self._ship(batch) if batch else None
            if self._stopped:
                return None
            if ahead is not None and (early := [group for group in batch if group.ticket not in self._promised]):
                self._promised |= {group.ticket for group in early}
                await ahead(early)
                continue
            self._changed.clear()
            await self._changed.wait()

    def _oldest(self) -> list[Group]:
        """Buffered groups in ticket order, those promised before, as many as fit into a batch beside what it
        replays."""
        batch, room = [], self._config.batch_size - places(self._replays)
        for ticket in sorted(self._buffer, key=lambda ticket: (ticket not in self._promised, ticket)):
            group = self._buffer[ticket]
            if group.places <= room:
                batch.append(group)
                room -= group.places
        return batch

    def _smallest(self) -> int:
        return min(course.group_size for course in self._courses.values())

    def _drop_stale(self) -> None:
        """Look again at what waits in the buffer, but only when a new version has made it older."""
        if self._aged_at == self._gate.version:
            return
        self._aged_at = self._gate.version
        for ticket, group in list(self._buffer.items()):
            if self._gate.version > self._young_until.get(ticket, -1) and not self._age(group):
                del self._buffer[ticket]
                self._young_until.pop(ticket, None)
                self._gate.give_back(group.places)
                self._ledger.drop(ticket, "stale")
                self.tally.dropped["stale"] += 1

    def _ship(self, batch: list[Group]) -> list[Group]:
        self._promised.clear()
        for group in batch:
            del self._buffer[group.ticket]
            self._young_until.pop(group.ticket, None)
        batch = [*batch, *self._enter_replays()]
        # A batch that groups could not fill exactly still counts as a whole one, or the gate would drift open.
        self._gate.accepted += self._config.batch_size - places(batch)
        return batch

    def take_tally(self, batch: Sequence[Group]) -> Tally:
        """What led to this batch: groups drawn after its last ticket are left for the next one."""
        past = self.resolved_by(batch)
        tally, self.tally = self.tally, Tally()
        taken = {group.ticket.number for group in past}
        self.tally.resolved = [group for group in tally.resolved if group.ticket.number not in taken]
        tally.resolved = past
        return tally

    def resolved_by(self, batch: Sequence[Group]) -> list[Group]:
        """Groups that led to this batch, in ticket order: those that trained and those that were dropped. Whoever asks
        again gets the same answer; a straggler that has landed since is the next batch's."""
        if self.tally.past is None:
            last = max(group.ticket.number for group in batch if not isinstance(group, Replayed))
            past = [group for group in self.tally.resolved if group.ticket.number <= last]
            self.tally.past = sorted(past, key=lambda group: group.ticket.number)
        return self.tally.past

    def stop(self) -> None:
        """Draw nothing more and wake whoever waits for a batch."""
        self._stopped = True
        self._changed.set()

    async def close(self) -> None:
        """Cancel what is in flight; its tickets wait for a resume."""
        self._stopped = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def state(self) -> Held:
        """What a checkpoint keeps. Groups in flight are not in it: their tickets wait for a resume."""
        tally = self.tally
        return Held(
            buffered=[self._buffer[ticket] for ticket in sorted(self._buffer)],
            resolved=list(tally.resolved),
            remembered=self._replay.state(),
            chosen=list(self._replays),
            counts={
                "dropped": dict(tally.dropped),
                "lost_samples": dict(tally.lost_samples),
                "failed_rollouts": tally.failed_rollouts,
                "stale_samples": tally.stale_samples,
            },
        )

    def load(self, held: Held) -> list[Ticket]:
        """Back to a checkpoint, at the gate's version; answers with the tickets whose groups are in the buffer again.

        They are credited and counted already, so they are not judged again; what has grown too old by now goes when
        the next batch is filled. If the run file has changed so that a group no longer fits, its ticket is played
        again. The breaker starts with new patience: whoever resumes may have mended what it counted.
        """
        version = self._gate.version
        self._replay.load(held.remembered)
        self._replays = self._replay.still(held.chosen, version, self._gate.replayable)
        self._gate.replay(places(self._replays))
        self._chosen_at, self._aged_at = version, -1
        self._buffer, self._young_until, self._early, self._promised = {}, {}, {}, set()
        for group in held.buffered:
            course = self._courses.get(group.ticket.env)
            if course is not None and group.places == course.group_size <= self._gate.capacity:
                self._gate.start(group.places)
                self._gate.accept(group.places)
                self._buffer[group.ticket] = group
        held = held.without(group.ticket for group in held.buffered if group.ticket not in self._buffer)
        counts = held.counts
        self.tally = Tally(
            resolved=held.resolved,
            dropped=Counter(counts.get("dropped")),
            lost_samples=Counter(counts.get("lost_samples")),
            failed_rollouts=counts.get("failed_rollouts", 0),
            stale_samples=counts.get("stale_samples", 0),
        )
        return list(self._buffer)


def places(groups: Sequence[Group]) -> int:
    """What the groups count in a batch."""
    return sum(group.places for group in groups)


def without_signal(group: Group) -> bool:
    """No sample of the group would move a weight: where rl trains every advantage is zero, and nothing else trains."""
    return not any(map(_moves, group.samples()))


def _moves(sample: Sample) -> bool:
    if any(weights is not None and weights.any() for weights in (sample.ce_weights, sample.ref_kl_weights)):
        return True
    # Credit that is not there yet comes from a critic, or when the batch ships.
    pending = sample.advantages is None or sample.rewards is not None
    return bool((sample.rl if pending else sample.rl * sample.advantages).any())
