"""Builds the sdist and the wheel, and tries the wheel as `pip install paceline` would give it, in a clean environment.

The wheel is built from the sdist, so both are proven. Everything happens in a temporary folder; the repository is only
read. Needs Python, pip and the package registry.

  python scripts/smoke_wheel.py                  build, install, run
  python scripts/smoke_wheel.py --keep FOLDER    the same in FOLDER, which stays
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
TRIALS = (("--version",), ("--help",), ("train", "quickstart", "--steps", "2"))
"""What a new user types, in an empty folder."""
LONGEST = 3600.0
"""Seconds for one command: installing torch takes minutes on a busy machine."""


def run(
    command: Sequence[str | Path], folder: Path, environment: Mapping[str, str] | None = None, seconds: float = LONGEST
) -> str:
    """The command's output, which is printed and raised with if it fails."""
    words = [str(part) for part in command]
    print("$", " ".join(words), flush=True)
    began = time.monotonic()
    done = subprocess.run(
        words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds
    )
    if done.returncode:
        print(done.stdout, flush=True)
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}")
    print(f"  {time.monotonic() - began:.0f} s", flush=True)
    return done.stdout


def clean_venv(folder: Path) -> Path:
    """A new environment's `bin` folder."""
    venv.create(folder, with_pip=True, clear=True)
    return folder / ("Scripts" if os.name == "nt" else "bin")


def pip(tools: Path) -> list[str]:
    return [str(tools / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]


def build(into: Path, environment: Mapping[str, str] | None = None) -> Path:
    """The wheel, built from the sdist that is built from the repository; both are put into `into`."""
    tools = clean_venv(into / "build-env")
    run([*pip(tools), "build"], into, environment)
    run([tools / "python", "-m", "build", "--outdir", into / "dist", ROOT], into, environment)
    (_,) = (into / "dist").glob("*.tar.gz")
    (wheel,) = (into / "dist").glob("*.whl")
    return wheel


def install(wheel: Path, into: Path, environment: Mapping[str, str] | None = None) -> Path:
    """The `paceline` command of a clean environment that holds the wheel and what it asks for."""
    tools = clean_venv(into / "wheel-env")
    run([*pip(tools), "-r", CONSTRAINTS], into, environment)
    run([*pip(tools), "-c", CONSTRAINTS, wheel], into, environment)
    return tools / "paceline"


def try_out(paceline: Path, into: Path, environment: Mapping[str, str] | None = None) -> None:
    """The first commands of a new user, from an empty folder outside the repository."""
    empty = into / "empty"
    empty.mkdir()
    version, _, trained = (run([paceline, *arguments], empty, environment) for arguments in TRIALS)
    if version.split()[-1] not in paceline_versions(into):
        raise SystemExit(f"`paceline --version` says {version.strip()!r}, the wheel is {paceline_versions(into)}")
    if "finished at step 2" not in trained:
        raise SystemExit(f"`paceline train quickstart --steps 2` did not finish:\n{trained}")
    if not list(empty.glob("runs/*/export/model.safetensors")):
        raise SystemExit(f"the run left no model: {sorted(map(str, empty.glob('runs/*/*')))}")


def paceline_versions(into: Path) -> list[str]:
    return [wheel.name.split("-")[1] for wheel in (into / "dist").glob("*.whl")]


def smoke(into: Path, environment: Mapping[str, str] | None = None) -> None:
    try_out(install(build(into, environment), into, environment), into, environment)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="work in this folder and leave it")
    keep = parser.parse_args().keep
    began = time.monotonic()
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        smoke(keep.resolve())
    else:
        with tempfile.TemporaryDirectory(prefix="paceline-wheel-") as folder:
            smoke(Path(folder))
    print(f"sdist and wheel are built, installed and run: {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
