"""Tries the repository as a newcomer would: fresh clone, empty home and caches, `TMPDIR` of four lengths.

Each round clones the current commit, then runs `make demo` and `make test` there with `TMPDIR` of another length; the
first two run `make smoke` after it. Then a wheel is built and installed into a clean environment, and `paceline train
quickstart` runs from an empty folder.
Rounds share one pip cache, made here; pip's own configuration stays in force. Prints a table of times and exits with 1
if anything failed.

  python scripts/newcomer.py                             everything: four rounds and the wheel
  python scripts/newcomer.py --lengths 40 --only demo    one round of `make demo`
  python scripts/newcomer.py --only wheel --json times.json
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import smoke_wheel

ROOT = Path(__file__).resolve().parent.parent
LENGTHS = (16, 40, 90, 150)
"""Characters in the path of `TMPDIR`."""
KEPT = ("LANG", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE")
"""Variables of this shell that a newcomer has too; beside them those of pip and of proxies."""
PARTS = ("demo", "test", "smoke", "wheel")
SMOKES = 2
"""Rounds that run `make smoke` too."""
LONGEST = 7200.0


@dataclass(frozen=True, slots=True)
class Trial:
    """One command of a newcomer, and how it went."""

    what: str
    tmpdir_length: int
    seconds: float
    passed: bool
    last_lines: str


def surroundings(home: Path, tmpdir: Path, pip_cache: Path) -> dict[str, str]:
    """An empty home and empty caches; pip is configured as it is here and keeps what it has downloaded."""
    kept = {name: value for name, value in os.environ.items() if name in KEPT or name.upper().endswith("_PROXY")}
    kept |= {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "UV_"))}
    for folder in (home, tmpdir, pip_cache):
        folder.mkdir(parents=True, exist_ok=True)
    # The interpreter itself: what pyenv puts into the path needs files of the home.
    path = os.pathsep.join([str(Path(sys.base_prefix) / "bin"), os.environ["PATH"]])
    fresh = {"PATH": path, "HOME": home, "TMPDIR": tmpdir, "PIP_CACHE_DIR": pip_cache}
    fresh |= {f"XDG_{kind}_HOME": home / kind.lower() for kind in ("CACHE", "CONFIG", "DATA", "STATE")}
    if "PIP_CONFIG_FILE" not in kept and (config := pip_config()) is not None:
        fresh["PIP_CONFIG_FILE"] = config
    return kept | {name: str(value) for name, value in fresh.items()}


def pip_config() -> Path | None:
    """The user's pip configuration, which an empty home would hide. The one of the whole machine is found anyway."""
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    found = (config / "pip" / "pip.conf", Path.home() / ".pip" / "pip.conf")
    return next((path for path in found if path.is_file()), None)


def folder_of_length(parent: Path, length: int) -> Path:
    """A folder whose path has this many characters, or one more than `parent` and a slash at least."""
    path = parent / ("t" * max(1, length - len(f"{parent}/")))
    path.mkdir(parents=True, exist_ok=True)
    return path


def attempt(what: str, command: Sequence[str], folder: Path, environment: dict[str, str], log: Path) -> Trial:
    """Run one command; its output goes into a log."""
    length = len(environment["TMPDIR"])
    print(f"{what}, TMPDIR of {length} characters: {' '.join(command)}", flush=True)
    began = time.monotonic()
    with log.open("wb") as stream:
        try:
            code = subprocess.run(
                list(command), cwd=folder, env=environment, stdout=stream, stderr=subprocess.STDOUT, timeout=LONGEST
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
    seconds = time.monotonic() - began
    last = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
    print(f"  {'passed' if code == 0 else 'FAILED'} after {seconds:.0f} s", flush=True)
    if code:
        print(last, flush=True)
    return Trial(what, length, seconds, code == 0, last)


def clone(into: Path) -> Path:
    """A fresh clone of the current commit, with what stands beside a checkout (`../shared`) beside it too."""
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
    quiet = ["git", "-c", "advice.detachedHead=false"]
    subprocess.run([*quiet, "clone", "--quiet", "--no-hardlinks", str(ROOT), str(into)], check=True)
    subprocess.run([*quiet, "checkout", "--quiet", commit], cwd=into, check=True)
    shared = ROOT.parent / "shared"
    if shared.is_dir():
        (into.parent / "shared").symlink_to(shared.resolve())
    return into


def one_round(place: Path, length: int, parts: Sequence[str], pip_cache: Path, logs: Path) -> list[Trial]:
    """The commands of `make` in one clone, with one length of `TMPDIR`."""
    copy = clone(place / "paceline")
    tmpdir = folder_of_length(place.parent, length)
    environment = surroundings(place / "home", tmpdir, pip_cache)
    trials = [
        attempt(f"make {part}", ["make", part], copy, environment, logs / f"{part}-{length}.log")
        for part in parts
        if part != "wheel"
    ]
    shutil.rmtree(place, ignore_errors=True)
    shutil.rmtree(tmpdir, ignore_errors=True)
    return trials


def wheel_round(place: Path, pip_cache: Path, logs: Path) -> Trial:
    """Build, install and try the wheel of a fresh clone."""
    copy = clone(place / "paceline")
    environment = surroundings(place / "home", place / "tmp", pip_cache)
    command = [sys.executable, str(copy / "scripts" / Path(smoke_wheel.__file__).name)]
    return attempt("wheel, train quickstart", command, place, environment, logs / "wheel.log")


def table(trials: Sequence[Trial]) -> str:
    rows = [("command", "TMPDIR", "seconds", "")]
    rows += [(t.what, str(t.tmpdir_length), f"{t.seconds:.0f}", "passed" if t.passed else "FAILED") for t in trials]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=LENGTHS, help="characters in the path of TMPDIR, a round for each"
    )
    parser.add_argument("--only", choices=PARTS, action="append", help="only this part; may be given again")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the times there too")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the logs there")
    known = parser.parse_args()
    parts = [part for part in PARTS if part in (known.only or PARTS)]
    trials: list[Trial] = []
    with tempfile.TemporaryDirectory(prefix="n", dir="/tmp") as folder:
        base = Path(folder)
        logs = known.logs.resolve() if known.logs else base / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        for number, length in enumerate(known.lengths if set(parts) - {"wheel"} else ()):
            these = [part for part in parts if part != "smoke" or number < SMOKES]
            trials += one_round(base / f"round{number}", length, these, base / "pip", logs)
        if "wheel" in parts:
            trials.append(wheel_round(base / "wheel", base / "pip", logs))
    print(table(trials))
    if known.json:
        known.json.write_text(json.dumps([asdict(trial) for trial in trials], indent=1) + "\n", encoding="utf-8")
    return 0 if trials and all(trial.passed for trial in trials) else 1


if __name__ == "__main__":
    sys.exit(main())
