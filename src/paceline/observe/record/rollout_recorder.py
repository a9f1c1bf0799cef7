"""Writes every rollout of a run to the record, off the run's hot path.

    the run hands over references -> a bounded queue -> a thread turns them into rows, bodies and text -> the files

Rollouts are final once their fate is known, so nothing is copied when they are handed over. The run comes first: if the
thread falls behind, bodies are left out and their rows stay; if a file cannot be written, the record ends with a note
and the run goes on. The same thread samples how busy engines and environments are, twice a second.
"""

import contextlib
import errno
import logging
import math
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from paceline.data.sample import TokenScores
from paceline.observe.monitor.base import Gauges, Monitor, RunPlan
from paceline.observe.record.body import encode
from paceline.observe.record.layout import BODY, CUT_TEXT, IMAGES, Facts, RecordWriter, rollout_facts
from paceline.observe.record.rows import MOST_TEXT, fold_lines, has_images, message_texts

log = logging.getLogger("paceline.observe.record")
MOST_QUEUED_TOKENS = 8_000_000
"""Tokens that may wait to be written, prompts included. With an empty queue a batch is always taken whole."""
CHUNK_BYTES = 4 << 20
"""Bytes of bodies after which rows are written, so that memory stays small whatever a batch holds."""
RESERVED_DISK_BYTES = 1 << 30
"""Bytes of the disk that are left to checkpoints and metrics, without which the run could not go on."""
GATHER_SECONDS = 0.5
"""Seconds that dropped groups wait for one another, unless a batch has trained: late in a run there are dozens a step,
and each by itself costs more to write."""
CLOSE_SECONDS = 60.0
_LARGEST_BODY = (1 << 32) - 1
_IDLE = 3600.0
_MOST_SPANS = 16

SAMPLE_SECONDS = 0.5
LANES_PER_WINDOW = 8
"""With more of them the windows grow: the file must not."""
SHARE_LEVELS = 16
"""Shares are rounded to so many, or no two windows would ever be equal."""
LONGEST_SPAN_SECONDS = 10.0
"""Seconds after which a span is written though it goes on, so that live views show it."""


class LoadSpan(NamedTuple):
    """A span of time in which a lane's load did not change; an idle lane has none."""

    lane: str
    kind: str
    start: float
    end: float
    value: float


class LoadSampler:
    """Samples the load of engines and environments, and returns the spans that have ended."""

    def __init__(self, look: Gauges) -> None:
        self._look = look
        self._before: dict[str, float] = {}
        self._at: float | None = None
        self._open: dict[tuple[str, str], LoadSpan] = {}
        self._window = SAMPLE_SECONDS

    def due(self, now: float) -> float:
        """Seconds until the next look."""
        return 0.0 if self._at is None else max(0.0, self._at + self._window - now)

    def sample(self, now: float) -> list[LoadSpan]:
        busy, playing, calls = self._look()
        since, self._at = self._at, now
        before, self._before = self._before, dict(busy)
        if since is None or now <= since:
            return []
        values = {("environment " + env, "playing"): float(count) for env, count in playing.items()}
        values |= {(kind, "calls"): float(count) for kind, count in calls.items()}
        for engine, seconds in busy.items():
            share = (seconds - before.get(engine, seconds)) / (now - since)
            values[engine, "busy"] = round(min(1.0, max(0.0, share)) * SHARE_LEVELS) / SHARE_LEVELS
        self._window = SAMPLE_SECONDS * max(1, math.ceil(len(values) / LANES_PER_WINDOW))
        ended = []
        for key in self._open | values:
            value, going = values.get(key, 0.0), self._open.pop(key, None)
            if going is not None and (going.value != value or now - going.start > LONGEST_SPAN_SECONDS):
                ended.append(going)
                going = None
            if value:
                self._open[key] = LoadSpan(*key, going.start if going else since, now, value)
        return ended

    def end(self) -> list[LoadSpan]:
        """The spans that were still open."""
        return list(self._open.values())


class _FinishedRollouts(NamedTuple):
    step: int
    state: str
    time: float
    rollouts: Sequence[Any]
    tokens: int


_Item = _FinishedRollouts | Callable[[RecordWriter], None]
"""Rollouts to write, or another change of the files."""


class RolloutRecorder(Monitor):
    """Writes `record/` in the run directory. A spectator: when it fails, the run hears a note and goes on."""

    def __init__(self, run: Path, clock: Callable[[], float] = time.time) -> None:
        self._run, self._clock = Path(run), clock
        self._writer: RecordWriter | None = None
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._next_item: list[_Item | None] = []
        """The item that was taken out of the queue and comes next; none or one."""
        self._hurry = threading.Event()
        """Something came that is to be written at once."""
        self._thread = threading.Thread(target=self._work, name="record", daemon=True)
        self._sampler: LoadSampler | None = None
        self._spans: list[LoadSpan] = []
        self._step = 0
        self._off = False
        self._handed = self._written = 0
        """Tokens that were handed over, counted by the run, and those that were written, counted by the thread."""
        self._bare = 0
        """Rollouts whose bodies were left out."""
        self.seconds = 0.0
        """CPU time of the thread, once it has ended."""

    @property
    def waiting_tokens(self) -> int:
        return self._handed - self._written

    def begin(self, plan: RunPlan) -> None:
        self._writer = RecordWriter(self._run)
        self._writer.truncate_after(plan.start_step)
        self._step = plan.start_step
        self._thread.start()

    def finished_rollouts(self, step: int, state: str, rollouts: Sequence[Any]) -> None:
        if self._off or self._writer is None or not rollouts:
            return
        now = self._clock()
        tokens = sum([len(turn.prompt_ids) + len(turn.completion_ids) for r in rollouts for turn in r.turns])
        if self.waiting_tokens and self.waiting_tokens + tokens > MOST_QUEUED_TOKENS:
            if not self._bare:
                log.warning("the record falls behind: from step %d on some rollouts are kept without their words", step)
            self._bare += len(rollouts)
            facts = [rollout_facts(rollout, state) for rollout in rollouts]
            self._queue.put(lambda writer: _append_bare_rows(step, now, facts, writer))
            return
        self._handed += tokens
        self._queue.put(_FinishedRollouts(step, state, now, tuple(rollouts), tokens))
        if not state.startswith("dropped:"):
            self._hurry.set()

    def token_scores(self, step: int, scores: TokenScores) -> None:
        if not self._off and self.waiting_tokens <= MOST_QUEUED_TOKENS:
            self._queue.put(lambda writer: writer.append_scores(step, scores))

    def spans(self, step: int, spans: Sequence[tuple[str, str, float, float]]) -> None:
        if not self._off and spans:
            self._queue.put(partial(self._append_spans, step, list(spans)))

    def gauges(self, look: Gauges) -> None:
        self._sampler = LoadSampler(look)
        self._queue.put(self._write_spans)  # the thread may be asleep until something comes

    def roll_back(self, step: int) -> None:
        self._queue.put(partial(self._cut, step))
        self._hurry.set()

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        self._queue.put(None)
        self._hurry.set()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._off = True
            log.warning("the record was not written to its end: the disk took longer than %g s", CLOSE_SECONDS)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        assert self._writer is not None
        try:
            while not self._off and (item := self._next()) is not None:
                self._take(item, self._writer)
            if self._sampler is not None:
                self._spans += self._sampler.end()
            self._write_spans(self._writer)
        except Exception as error:
            self._off = True
            cause = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            log.warning("the record ends here, and the run goes on without it: %s", cause)
        finally:
            self._writer.close()
            self.seconds = time.thread_time()

    def _next(self) -> _Item | None:
        """The next thing to write; while there is none, a look at who is busy now and then."""
        if self._next_item:
            return self._next_item.pop()
        while True:
            sampler = self._sampler
            due = _IDLE if sampler is None else sampler.due(self._clock())
            with contextlib.suppress(queue.Empty):
                return self._queue.get(timeout=max(0.001, due))
            if sampler is None:
                continue
            try:
                self._spans += sampler.sample(self._clock())
            except Exception as error:  # it reads parts that may be on their way down
                self._sampler = None
                log.debug("stopped recording how busy engines and environments are: %s", error)
            if len(self._spans) >= _MOST_SPANS:
                return self._write_spans

    def _write_spans(self, writer: RecordWriter) -> None:
        """A few at a time, or each sample would cost a write."""
        spans, self._spans = self._spans, []
        writer.append_lanes(self._step + 1, spans)

    def _append_spans(self, step: int, spans: Iterable[tuple[str, str, float, float]], writer: RecordWriter) -> None:
        self._write_spans(writer)
        writer.append_lanes(step, [LoadSpan(*span, 1.0) for span in spans])

    def _cut(self, step: int, writer: RecordWriter) -> None:
        writer.truncate_after(step)
        self._step = step

    def _take(self, item: _Item, writer: RecordWriter) -> None:
        """Write this and what lies behind it, which takes a moment to come where nothing is urgent."""
        if not isinstance(item, _FinishedRollouts):
            item(writer)
            return
        self._hurry.wait(GATHER_SECONDS)
        self._hurry.clear()  # before the queue is emptied: a later set() comes after its item was queued
        played = [item]
        while not self._queue.empty():
            following = self._queue.get_nowait()
            if not isinstance(following, _FinishedRollouts):
                self._next_item.append(following)
                break
            played.append(following)
        self._step = max(self._step, *(one.step for one in played))
        if shutil.disk_usage(self._run).free < RESERVED_DISK_BYTES:
            raise OSError(errno.ENOSPC, f"less than {RESERVED_DISK_BYTES >> 20} MiB of the disk are left")
        _write(played, writer)
        self._written += sum(one.tokens for one in played)


def _write(played: Sequence[_FinishedRollouts], writer: RecordWriter) -> None:
    rows: list[bytes] = []
    bodies: list[bytes] = []
    texts: list[bytes] = []
    start, text = writer.ends
    data = start
    for item, rollout in [(one, rollout) for one in played for rollout in one.rollouts]:
        body, said, flags = _encode_rollout(rollout)
        place = (data, len(body), text, len(said))
        rows.append(writer.pack_row(item.step, item.time, rollout_facts(rollout, item.state), flags, place))
        bodies.append(body)
        texts.append(said)
        data, text = data + len(body), text + len(said)
        if data - start >= CHUNK_BYTES:
            writer.append(rows, bodies, texts)
            rows, bodies, texts, start = [], [], [], data
    writer.append(rows, bodies, texts)


def _append_bare_rows(step: int, now: float, known: Sequence[Facts], writer: RecordWriter) -> None:
    """The rows of rollouts whose bodies were left out for lack of time."""
    data, text = writer.ends
    writer.append([writer.pack_row(step, now, facts, 0, (data, 0, text, 0)) for facts in known], [], [])


def _encode_rollout(rollout: Any) -> tuple[bytes, bytes, int]:
    """Body, text and flags. What no body can be made of keeps its row."""
    try:
        body, new = encode(rollout)
    except (TypeError, ValueError, OverflowError, AttributeError, RecursionError) as error:
        log.debug("a rollout of ticket %s has no body: %s", rollout.ticket.number, error)
        body, new = b"", []
    if len(body) > _LARGEST_BODY:
        body = b""
    flags = (BODY if body else 0) | (IMAGES if new and has_images(new) else 0)
    verdicts = [str(verdict.get("text", "")) for verdict in rollout.verdicts]
    text = fold_lines([*message_texts(new), *[turn.text for turn in rollout.turns], *verdicts, rollout.error or ""])
    if len(text) > MOST_TEXT:
        flags |= CUT_TEXT
        text = text[:MOST_TEXT].decode(errors="ignore").encode()
    return body, text, flags
