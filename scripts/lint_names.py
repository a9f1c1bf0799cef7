"""Checks names of the package: `python scripts/lint_names.py`. Every class has a name of its own."""

import ast
import sys
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "paceline"
SHARED: dict[str, str] = {}
"""Class names that several modules may define, each with the reason."""


def class_names(files: list[Path]) -> dict[str, list[str]]:
    """Where each class is defined, at any depth."""
    found = defaultdict(list)
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(f"{file.relative_to(PACKAGE.parent)}:{node.lineno}")
    return found


def main() -> int:
    names = class_names(sorted(PACKAGE.rglob("*.py")))
    problems = [
        f"{name} is the name of {len(places)} classes: {', '.join(places)}; give each a name of its own"
        for name, places in sorted(names.items())
        if len(places) > 1 and name not in SHARED
    ]
    print(*problems or [f"{len(names)} classes: every name is unique"], sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
