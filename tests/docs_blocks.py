"""The fenced blocks of README and docs, and the commands in them."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


class Block(NamedTuple):
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(r"(?m)^( *)```(\w*)\n((?:.*\n)*?)\1```$", text):
            line = text[: match.start()].count("\n") + 2
            found.append(Block(page.name, line, match[2], re.sub(f"(?m)^{match[1]}", "", match[3])))
    return [block for block in found if not languages or block.language in languages]


def command_lines(block: Block) -> list[list[str]]:
    text = re.sub(r"(?s)<<'(\w+)'.*?\n\1\n", "\n", block.text).replace("\\\n", " ")
    lines = [shlex.split(line, comments=True) for line in text.splitlines()]
    parts = []
    for words in lines:
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        while "&&" in words:
            parts.append(words[: words.index("&&")])
            words = words[words.index("&&") + 1 :]
        parts.append(words)
    return [words for words in parts if words]
