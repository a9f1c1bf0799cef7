"""What texts of models draw: trees of a few tags, from Markdown, code, JSON and boards; never markup."""

import json
import re

import pytest

from paceline.observe.web import typeset
from paceline.observe.web.markup import MOST_MARKUP, render


def flat(trees) -> str:
    return "".join(tree if isinstance(tree, str) else flat(tree[2]) for tree in trees or [])


def tags(trees) -> set[str]:
    inner = [tree for tree in trees or [] if not isinstance(tree, str)]
    return {tree[0] for tree in inner} | {tag for tree in inner for tag in tags(tree[2])}


@pytest.mark.parametrize(
    "text",
    [
        "plain words\nand more",
        "x < y\n  indented &lt;",
        "oxcdxfgoi",
        "",
        "5",
        "a|b",
        "it costs $5 and $6",
        "$HOME/bin:$PATH",
    ],
)
def test_plain_words_are_left_as_they_are(text):
    assert render(text) is None


def test_markdown_becomes_a_tree():
    trees = render("# Title\n\n- one **two**\n- `three`\n\n| a | b |\n|---|---|\n| 1 | 2 |")
    assert tags(trees) == {"h1", "ul", "li", "strong", "code", "table", "thead", "tbody", "tr", "th", "td"}
    assert flat(trees) == "Titleone twothreeab12"


@pytest.mark.parametrize(
    "text",
    [
        "**x** <script>alert(1)</script>",
        "**x** <img src=x onerror=alert(1)>",
        "**x** [a](javascript:alert(1)) [b](data:text/html,x) [c](vbscript:x) [d](//evil.test)",
        "**x** ![picture](https://evil.test/x.png)",
        "```html\n<script>alert(1)</script>\n```",
        '```" onload=alert(1)\nx\n```',
        '{"a": "<script>alert(1)</script>"}',
    ],
)
def test_nothing_that_runs_or_loads_leaves_a_text(text):
    written = json.dumps(render(text))
    assert not tags(render(text)) & {"script", "img", "iframe", "a"}
    assert '"href"' not in written
    assert '"src"' not in written
    assert '"onload"' not in written


def test_a_link_to_the_web_is_one():
    assert render("[x](https://a.test)") == [["p", {}, [["a", {"href": "https://a.test"}, ["x"]]]]]


def test_code_and_json_are_marked_by_what_their_words_are():
    (code,) = render("```python\ndef f():\n    return 1  # one\n```")
    assert flat([code]) == "def f():\n    return 1  # one\n"
    assert ["span", {"class": "code-keyword"}, ["def"]] in code[2]
    assert flat(render('{"a": [1, {"b": null}]}')) == json.dumps({"a": [1, {"b": None}]}, indent=2)


@pytest.mark.parametrize(
    ("board", "rows"),
    [
        (" 0 | X | 2 \n---+---+---\n 3 | O | 5 ", [["0", "X", "2"], ["3", "O", "5"]]),
        ("|.|.|X|\n|O|.|.|", [[".", ".", "X"], ["O", ".", "."]]),
        (". . X .\nO . . .\n. X . .", [list("..X."), list("O..."), list(".X..")]),
    ],
)
def test_a_board_becomes_a_grid_between_the_words_around_it(board, rows):
    trees = render(f"The board:\n{board}\nYour move.")
    assert [tree[0] for tree in trees] == ["p", "table", "p"]
    assert trees[1][1] == {"class": "grid"}
    assert [[flat(cell[2]) for cell in row[2]] for row in trees[1][2][0][2]] == rows


@pytest.mark.parametrize(
    "piece",
    ["[", "![", "*a", "_a_ ", "`", ">", "- ", "|a", "<", "[a](", "\\(", "$a ", "---", "a b c\n", "```py\n(", "{"],
)
def test_hostile_texts_end(piece):
    """In a second at most; what takes minutes meets the limit of the suite."""
    render(piece * (MOST_MARKUP // len(piece)))
    assert render(piece * MOST_MARKUP * 2) is None


FORMULAS = [
    r"$\frac{1}{2}$",
    r"\(a\_b*c*d\)",
    "$x_1 + y_2$",
    r"\(x \le 3 \implies y\)",
    r"\[\sum_{i=1}^n i\]",
    "$$a\n+b$$",
    r"so \boxed{\frac{36}{2}}",
]


@pytest.mark.parametrize("text", FORMULAS)
def test_a_formula_is_an_outline_that_keeps_its_source(text):
    trees = render(text)
    assert tags(trees) >= {"formula", "span"}
    (outline,) = [tree for tree in walk(trees) if tree[0] == "formula"]
    assert re.fullmatch(r"(M-?\d+ -?\d+([LQC](-?\d+ ?)+)*Z)+", outline[1]["path"])
    assert outline[1]["width"] > 0.3
    assert outline[1]["ascent"] > 0.3
    assert flat([outline]).strip() in text


def walk(trees):
    for tree in trees:
        if not isinstance(tree, str):
            yield tree
            yield from walk(tree[2])


def test_what_is_boxed_is_drawn_in_a_box_and_all_beside_it():
    (found,) = [
        tree for tree in walk(render(r"$x = \boxed{\frac{1}{2}} + 1$")) if "formula" in tree[1].get("class", "")
    ]
    assert [(tree[0], flat([tree])) for tree in found[2]] == [
        ("formula", "x ="),
        ("span", r"\frac{1}{2}"),
        ("formula", "+ 1"),
    ]


UNKNOWN = [
    r"$\unknown{x}$",
    r"$\begin{pmatrix}1\end{pmatrix}$",
    r"$\input{/etc/passwd}$",
    "$" + "{" * 50 + "}" * 50 + "$",
    "${}$",
]


@pytest.mark.parametrize("text", UNKNOWN)
def test_a_formula_that_is_not_known_keeps_its_source(text):
    assert ["code", {"class": "formula"}, [text]] in [*walk(render(f"so {text} it is"))]


def test_formulas_of_one_answer_take_a_bounded_time(monkeypatch):
    monkeypatch.setattr(typeset, "MOST_SECONDS", -1.0)
    with typeset.limit_typesetting():
        assert "formula" not in tags(render("$x_{late}$"))
    assert "formula" in tags(render("$x_{late}$"))
