"""Converts texts of models into trees that the page builds elements from: Markdown, code, JSON and boards of cells.

A tree is a text or `[tag, attributes, children]`. It never becomes markup: the page builds elements from a short list
of tags, links lead to http(s) and mail alone, and images are named, not loaded. HTML in a text stays text. Formulas
are outlines with their source; one that cannot be typeset keeps its source, in the letters of code.
"""

import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.rules_inline import StateInline
from markdown_it.tree import SyntaxTreeNode
from pygments.lexers import get_lexer_by_name
from pygments.token import Comment, Keyword, Name, Number, Operator, String
from pygments.util import ClassNotFound

from paceline.observe.web.typeset import typeset

MOST_MARKUP = 20_000
"""Characters of a text that is rendered; a longer one is shown as it is."""
Tree = str | list[Any]
_LINK = re.compile(r"(?:https?://|mailto:)", re.IGNORECASE)
_BRACES = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\}){0,200}\}){0,200}\}"
_FORMULA = re.compile(
    r"\$\$.{1,1000}?\$\$|\$(?=\S)[^$\n]{1,200}?(?<=\S)\$(?!\w)|\\\(.{1,1000}?\\\)|\\\[.{1,1000}?\\\]|\\boxed" + _BRACES,
    re.DOTALL,
)
_BOXED = re.compile(r"\\(?:boxed|fbox)(" + _BRACES + ")")
_KINDS = ((Comment, "comment"), (Keyword, "keyword"), (String, "string"), (Number, "number"), (Operator, "operator"))
_NAMES = (Name.Function, Name.Class, Name.Tag, Name.Builtin, Name.Attribute)


def render(text: str) -> list[Tree] | None:
    """The trees of a text, or None where it has nothing to draw: plain words are shown as they are."""
    if len(text) > MOST_MARKUP:
        return None
    if (pretty := _pretty_json(text)) is not None:
        return [_code(pretty, "json")]
    found: list[Tree] = []
    for part in _split_boards(text):
        found += [_grid(part)] if isinstance(part, list) else _children(SyntaxTreeNode(_markdown().parse(part)))
    is_plain = all(tree[0] == "p" and all(isinstance(one, str) for one in tree[2]) for tree in found)
    return None if is_plain else found


@cache
def _markdown() -> MarkdownIt:
    """CommonMark with tables and without HTML. Entities and indented lines stay as they were written."""
    found = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"]).disable(["entity", "code"])
    found.inline.ruler.before("escape", "formula", _parse_formula)
    return found


def _parse_formula(state: StateInline, silent: bool) -> bool:
    """A formula, whose backslashes and underscores are not Markdown's."""
    found = _FORMULA.match(state.src, state.pos)
    if found is None:
        return False
    if not silent:
        state.push("formula", "", 0).content = found[0]
    state.pos = found.end()
    return True


def _children(node: SyntaxTreeNode) -> list[Tree]:
    return [tree for child in node.children for tree in _trees(child)]


def _trees(node: SyntaxTreeNode) -> Iterator[Tree]:
    match node.type:
        case "text":
            yield node.content
        case "softbreak" | "hardbreak":
            yield "\n"
        case "formula":
            yield _formula(node.content)
        case "code_inline":
            yield ["code", {}, [node.content]]
        case "fence" | "code_block":
            yield _code(node.content, node.info.partition(" ")[0])
        case "image":
            yield f"[an image at {node.attrs.get('src')}, which is not loaded: {node.content}]"
        case "link" if _LINK.match(str(node.attrs.get("href", ""))):
            yield ["a", {"href": node.attrs["href"]}, _children(node)]
        case _ if node.tag and node.type != "link" and not (node.is_nested and node.hidden):
            start = {"start": node.attrs["start"]} if "start" in node.attrs else {}
            yield [node.tag, start, _children(node)]
        case _:
            yield from _children(node)


def _formula(source: str) -> Tree:
    """A formula as outlines, its boxed parts each in a box; as code where a part of it cannot be typeset."""
    marks = 0 if source.startswith("\\boxed") else 2 if source.startswith(("$$", "\\")) else 1
    parts = _BOXED.split(source[marks : len(source) - marks])  # by turns beside a box and in one, with its braces
    trees: list[Tree] = []
    for at, part in enumerate(parts):
        tex = part[1:-1] if at % 2 else part
        if not tex.strip():
            continue
        if (outline := typeset(tex)) is None:
            return ["code", {"class": "formula"}, [source]]
        tree: Tree = ["formula", outline._asdict(), [tex.strip()]]
        trees.append(["span", {"class": "boxed"}, [tree]] if at % 2 else tree)
    is_block = source.startswith(("$$", "\\["))
    return ["span", {"class": "formula block" if is_block else "formula"}, trees]


def _code(text: str, language: str) -> Tree:
    """A block of code, its words marked by what they are where the language is known."""
    try:
        lexer = get_lexer_by_name(language, stripnl=False, ensurenl=False) if language else None
    except ClassNotFound:
        lexer = None
    words: list[Tree] = []
    for kind, word in lexer.get_tokens(text) if lexer else [(None, text)]:
        name = next((name for above, name in _KINDS if kind in above), "name" if kind in _NAMES else None)
        words.append(word if name is None else ["span", {"class": f"code-{name}"}, [word]])
    return ["pre", {}, words]


def _pretty_json(text: str) -> str | None:
    """An object or array with a line for each value."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return json.dumps(value, indent=2, ensure_ascii=False) if value else None


MOST_CELL, LEAST_ROWS = 5, 3
"""Characters of a cell, and rows of a board whose cells stand apart by spaces alone."""
_BETWEEN_ROWS = re.compile(r"[ +]*[-=─][-=─+|┼│ ]*")
_DELIMITER = re.compile(r":?-+:?")
_BARS = re.compile(r"[|│]")
Row = list[str]


def _cells(line: str) -> tuple[str, Row]:
    """How the cells of a line are set apart, and the cells; none where it is no row of a board."""
    if _BARS.search(line):
        cells = [cell.strip() for cell in _BARS.split(line.strip().strip("|│"))]
        is_row = len(cells) > 1 and max(map(len, cells)) <= MOST_CELL
        return "bars", cells if is_row and not all(map(_DELIMITER.fullmatch, cells)) else []
    cells = line.split()
    return "spaces", cells if len(cells) >= LEAST_ROWS and max(map(len, cells)) == 1 else []


def _split_boards(text: str) -> Iterator[str | list[Row]]:
    """The text with its boards as rows of cells: lines of equally many short cells, with or without rules between."""
    lines, words, at = text.split("\n"), [], 0
    while at < len(lines) and "```" not in text:
        how, first = _cells(lines[at])
        rows, end = [], at
        while first and end < len(lines):
            if rows and end + 1 < len(lines) and _BETWEEN_ROWS.fullmatch(lines[end]):
                end += 1
            kind, cells = _cells(lines[end])
            if (kind, len(cells)) != (how, len(first)):
                break
            rows.append(cells)
            end += 1
        if len(rows) >= (LEAST_ROWS if how == "spaces" else 2):
            yield "\n".join(words)
            yield rows
            words, at = [], end
        else:
            words.append(lines[at])
            at += 1
    yield "\n".join([*words, *lines[at:]])


def _grid(rows: Sequence[Row]) -> Tree:
    return ["table", {"class": "grid"}, [["tbody", {}, [["tr", {}, [["td", {}, [c]] for c in row]] for row in rows]]]]
