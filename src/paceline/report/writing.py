"""From a run directory to a file."""

from pathlib import Path

from paceline.errors import PacelineError
from paceline.monitor.files import replace_file
from paceline.record import open_run
from paceline.report.page import page


def write_report(directory: Path, file: Path | None, rollouts: int) -> Path:
    """Write the report of a run and say where it is; whoever reads an older one meanwhile sees that one whole."""
    if rollouts < 0:
        raise PacelineError(f"--rollouts {rollouts}: write how many, 0 or more")
    run = open_run(directory)
    file = Path(f"{run.name}-report.html") if file is None else file
    try:
        replace_file(file, [page(run, rollouts).encode("utf-8")], durable=False)
    except OSError as error:
        raise PacelineError(f"{file} cannot be written: {error.strerror}; name another place with -o") from None
    return file
