"""Finds the run, checkpoint or export that a command line names, such as `runs/a@40`."""

from dataclasses import dataclass
from pathlib import Path

from paceline.config import RunConfig, load
from paceline.errors import PacelineError
from paceline.observe.monitor import RunDirectory
from paceline.orchestrator.checkpoint import LATEST, PROMOTED, Checkpoints


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


@dataclass(frozen=True, slots=True)
class RunTarget:
    """A run directory and one of its checkpoints."""

    root: Path
    config: RunConfig
    """As the run resolved it."""
    checkpoint: Path | None
    """None where the run has no whole checkpoint, or was named for its export."""

    @property
    def step(self) -> int | None:
        return None if self.checkpoint is None else step_of(self.checkpoint)

    @property
    def export(self) -> Path | None:
        """The folder the run exported to, where it has finished."""
        folder = RunDirectory(self.root).export
        return folder if (folder / "config.json").is_file() else None


def find_run(text: str) -> RunTarget | None:
    """The run that `text` names, or None where it names none; a step that the run lacks is an error. Without a step it
    is the newest complete checkpoint; `RUN@promoted` is the last that passed [promotion]."""
    root, step = _split_target(text)
    if root is None:
        return None
    checkpoints = Checkpoints(RunDirectory(root).checkpoints, keep=1)
    whole = checkpoints.all()
    if step == PROMOTED and not (step := checkpoints.promoted_name):
        raise PacelineError(f"{root} has no promoted checkpoint, which only a run with [promotion] has: name a step")
    number = (step or "").removeprefix("step-")
    matching = [path for path in whole if step is None or (number.isdecimal() and step_of(path) == int(number))]
    if step is not None and not matching:
        known = ", ".join(f"@{step_of(path)}" for path in whole) or "none"
        raise PacelineError(f"{root} has no whole checkpoint of step {step}: it has {known} (checkpoint.keep)")
    return RunTarget(root, load(RunDirectory(root).config_file).config, next(reversed(matching), None))


def is_loadable_run(folder: Path) -> bool:
    directory = RunDirectory(folder)
    return directory.config_file.is_file() and (directory.checkpoints.is_dir() or directory.lock_file.is_file())


def served_model(text: str) -> str:
    """The model that `paceline serve` loads for `text`: a run's export in the place of the run."""
    found = find_run(text)
    if found is None:
        return text
    whole = is_loadable_run(Path(text))
    if whole and found.export is not None:
        return str(found.export)
    step = "" if whole else f"@{found.step}"
    if found.checkpoint is None:
        raise PacelineError(f"{text} has neither an export nor a whole checkpoint to serve: train it first")
    raise PacelineError(
        f"{text} is {'a run without an export' if whole else 'a checkpoint'}, which holds the trainer's state: write a "
        f"model folder with `paceline export {found.root}{step} -o FOLDER` and serve that"
    )


def _split_target(text: str) -> tuple[Path | None, str | None]:
    """The run directory, and the step as it was written."""
    path = Path(text).expanduser()
    if is_loadable_run(path):
        return path, None
    head, at, step = text.rpartition("@")
    if at and is_loadable_run(Path(head).expanduser()):
        return Path(head).expanduser(), None if step == LATEST else step
    if path.parent.name == "checkpoints" and is_loadable_run(path.parent.parent):
        return path.parent.parent, None if path.name == LATEST else path.name
    return None, None
