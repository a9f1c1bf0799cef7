"""A run directory, opened for reading: while the run lives, after it ended, after it crashed, or on another machine."""

import math
import tomllib
from pathlib import Path
from typing import Any

from paceline.data import Sample, WireError, decode
from paceline.errors import PacelineError
from paceline.monitor.directory import RunDirectory
from paceline.record.layout import RecordFiles
from paceline.record.lines import Lines
from paceline.record.pulse import Lanes, TimelineSpan
from paceline.record.rollouts import Rollouts
from paceline.record.settings import Changed, changed, understood
from paceline.record.status import RunStatus, status
from paceline.record.tickets import Tickets

Columns = dict[str, list[float | None]]


def open_run(path: str | Path) -> "RunFolder":
    """The run at this path; a sentence where there is none."""
    run = RunDirectory(Path(path))
    if not is_run(run):
        raise PacelineError(f"there is no run at {path}: name a run directory, such as runs/quickstart")
    return RunFolder(run)


def find_runs(folder: str | Path) -> list[Path]:
    """The run directories in a folder, or the folder itself if it is one; the one that changed last comes first."""
    root = Path(folder)
    if is_run(RunDirectory(root)):
        return [root]
    try:
        runs = [path for path in root.iterdir() if path.is_dir() and is_run(RunDirectory(path))]
    except OSError as error:
        raise PacelineError(f"{folder} cannot be read: {error.strerror}; name the folder that holds the runs") from None
    return sorted(runs, key=_touched, reverse=True)


def is_run(run: RunDirectory) -> bool:
    return run.config_file.is_file() or run.lock_file.is_file() or run.metrics_file.is_file()


def _touched(path: Path) -> float:
    run = RunDirectory(path)
    for file in (run.metrics_file, run.events_file, run.config_file, run.lock_file):
        try:
            return file.stat().st_mtime
        except OSError:
            continue
    return 0.0


class RunFolder:
    """Everything a run has written down. Each answer is as of now; whatever cannot be read is among `problems`."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self.path = run.root
        self._metrics, self._events = Lines(run.metrics_file), Lines(run.events_file)
        self.rollouts = Rollouts(run)
        self.tickets = Tickets(run)
        self._lanes = Lanes(RecordFiles(run.root))

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def status(self) -> RunStatus:
        lines = self._metrics.read()
        return status(self._run, self._events.read(), _step(lines[-1]) if lines else 0)

    def config(self) -> dict[str, Any]:
        """The resolved run file; empty where there is none yet or it cannot be read."""
        return self._config()[0]

    def changed(self) -> list[Changed]:
        """The keys that differ from the defaults; empty where the config is another version's."""
        try:
            return changed(self.config()) if self.config() else []
        except ValueError:
            return []

    def metrics(self, since: int = 0) -> Columns:
        """One list a metric, from the step `since` on; None where a step does not have it. `step` and `time` are among
        them."""
        lines = [line for line in self._metrics.read() if _step(line) >= since]
        names = dict.fromkeys(["step", "time", *(name for line in lines for name in line)])
        return {name: [_number(line.get(name)) for line in lines] for name in names}

    def events(self, since: int = 0) -> list[dict[str, Any]]:
        """The events, without the first `since`: a caller that asks again continues where the last answer ended."""
        return self._events.read()[since:]

    def batches(self) -> list[int]:
        """Steps whose samples can be read again."""
        files = {int(path.stem[5:]) for path in self._run.batches.glob("step-*.msgpack") if path.stem[5:].isdigit()}
        return sorted(files | set(self.rollouts.steps() if self.rollouts.kept else []))

    def batch(self, step: int) -> list[Sample]:
        """The samples of one step with all their streams, as they shipped; none where they were not kept."""
        path = self._run.batches / f"step-{step:06d}.msgpack"
        if not path.is_file():
            return self.rollouts.batch(step) if self.rollouts.kept else []
        try:
            return decode(path.read_bytes())
        except (OSError, WireError) as error:
            raise PacelineError(f"{path} cannot be read: {error}") from error

    def lanes(self, start: float | None = None, end: float | None = None) -> list[TimelineSpan]:
        """The timeline spans in this time, in seconds since 1970."""
        return self._lanes.find(start, end)

    def problems(self, patient: bool = True) -> list[str]:
        """What could not be read, each as a sentence. Without `patient`, a long journal of tickets is left out until
        another call has read it."""
        return [*self.brief_problems(), *self.tickets.problems(patient)]

    def brief_problems(self) -> list[str]:
        """The same without the journal of tickets, which alone takes long to read."""
        found = [*self._config()[1], *self._metrics.problems(), *self._events.problems()]
        if not found and self.config():
            try:
                understood(self.config())
            except ValueError as error:
                found.append(f"config.toml: {error}")
        return [*found, *self.rollouts.problems()]

    def _config(self) -> tuple[dict[str, Any], list[str]]:
        try:
            return tomllib.loads(self._run.config_file.read_text(encoding="utf-8")), []
        except FileNotFoundError:
            return {}, []
        except (OSError, ValueError) as error:
            return {}, [f"config.toml cannot be read: {error}"]


def _step(line: dict[str, Any]) -> int:
    step = line.get("step")
    return step if isinstance(step, int) else 0


def _number(value: Any) -> float | None:
    """A figure; None for what is none. Python's JSON has `NaN`, `1e999` and integers of any length."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None
