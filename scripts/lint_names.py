"""Checks names and prose of the package: `python scripts/lint_names.py`.

Every class has a name of its own. Names, docstrings, comments and messages, also those of benchmarks, scripts and the
modules of the pages, use none of the words that hide the subject of a sentence. A module's docstring opens with what
the module does, not with a question word.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "paceline"
SHARED: dict[str, str] = {}
"""Class names that several modules may define, each with the reason."""
VAGUE = re.compile(r"(?<![a-z])(nobody|somebody|whoever|whomever|everybody|anybody)(?![a-z])", re.IGNORECASE)
"""Words for a subject that has a name: the caller, the engine, a client, another run."""
ALLOWED = {
    "src/paceline/envs/sandbox/cell.py": "NOBODY is the name of a Unix user",
    "benchmarks/engine.py": "a story that models summarise",
    "scripts/lint_names.py": "the list itself",
    "scripts/make_big_run.py": "words of made-up replies",
}
"""Files that may use a vague word, each with the reason."""
OPENERS = ("What ", "Who ", "Whose ", "Where ", "Whoever ")


def class_names(trees: dict[Path, ast.Module]) -> dict[str, list[str]]:
    """Where each class is defined, at any depth."""
    found = defaultdict(list)
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(f"{_path(file)}:{node.lineno}")
    return found


def shared_names(names: dict[str, list[str]]) -> Iterator[str]:
    for name, places in sorted(names.items()):
        if len(places) > 1 and name not in SHARED:
            yield f"{name} is the name of {len(places)} classes: {', '.join(places)}; give each a name of its own"


def vague_words(file: Path) -> Iterator[str]:
    """Of code, comments and strings alike."""
    if str(_path(file)) in ALLOWED:
        return
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        for found in VAGUE.finditer(line):
            yield f"{_path(file)}:{number}: `{found[0]}`: name the subject: the caller, the engine, a client, you"


def opening(file: Path, tree: ast.Module) -> Iterator[str]:
    said = ast.get_docstring(tree) or ""
    if said.startswith(OPENERS):
        yield f"{_path(file)}:1: the docstring opens with `{said.split()[0]}`: say what the module does"


def main() -> int:
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in sorted(PACKAGE.rglob("*.py"))}
    names = class_names(trees)
    problems = [*shared_names(names)]
    for file, tree in trees.items():
        problems += opening(file, tree)
    pages = sorted(PACKAGE.rglob("*.js"))
    for file in [*trees, *pages, *sorted(ROOT.glob("benchmarks/*.py")), *sorted(ROOT.glob("scripts/*.py"))]:
        problems += vague_words(file)
    print(*problems or [f"{len(names)} classes: every name is unique; {len(trees)} files: no vague subject"], sep="\n")
    return 1 if problems else 0


def _path(file: Path) -> Path:
    return file.relative_to(ROOT)


if __name__ == "__main__":
    sys.exit(main())
