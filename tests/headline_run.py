"""A run whose metrics are written by hand, and its headline figures, computed from the written lines alone."""

import json
from collections.abc import Callable
from pathlib import Path

from recorded_runs import EPOCH, Told

Line = dict[str, float]


def written_run(folder: Path, name: str, lines: list[Line], steps: int = 40) -> Path:
    """A finished run with exactly these lines in `metrics.jsonl`."""
    told = Told(folder, name, steps).step(max(1, int(lines[-1]["step"]))).end()
    (told.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return told.path


def falling_lines(steps: int = 30) -> list[Line]:
    """A reward that falls from the first step to the last, in two environments, evaluated every tenth step."""
    lines: list[Line] = []
    for step in range(steps + 1):
        line: Line = {"step": step, "time": EPOCH + step}
        if step:
            line |= {"reward/letters/mean": 0.9 - 0.011 * step, "reward/sums/mean": 0.7 - 0.009 * step, "entropy": 0.2}
        if step % 10 == 0:
            line |= {f"eval/{env}/exact": 0.8 - step * slope for env, slope in (("letters", 0.0137), ("sums", 0.0091))}
        lines.append(line)
    return lines


def recorded_means(path: Path, is_wanted: Callable[[str], bool]) -> list[tuple[int, float]]:
    """Step and mean of the wanted metrics, for every line of the record that has any."""
    found = []
    for line in map(json.loads, (path / "metrics.jsonl").read_text().splitlines()):
        values = [value for name, value in line.items() if is_wanted(name)]
        if values:
            found.append((line["step"], sum(values) / len(values)))
    return found


def is_reward(name: str) -> bool:
    return name.startswith("reward/") and name.endswith("/mean")


def is_exact(name: str) -> bool:
    return name.startswith("eval/") and name.endswith("/exact")
