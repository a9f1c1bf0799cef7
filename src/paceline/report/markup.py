"""HTML from elements and text. There is no way from a string to markup: whatever is no element is escaped."""

import html

from paceline.top.words import harmless

VOID = frozenset({"meta", "line", "rect", "circle", "polyline"})


class Element(str):
    """Markup that `tag` made; nothing else is one."""

    __slots__ = ()


Child = Element | str | int | float | None


def tag(name: str, /, *children: Child, **attributes: str | float | None) -> Element:
    """`tag("p", "text", class_="faint")`. None is left out, as child and as attribute."""
    told = "".join(f' {_name(key)}="{escaped(str(value))}"' for key, value in attributes.items() if value is not None)
    if name in VOID and not children:
        return Element(f"<{name}{told}/>")
    return Element(f"<{name}{told}>{joined(*children)}</{name}>")


def joined(*children: Child) -> Element:
    """Elements and text, one behind the other."""
    return Element("".join(_child(child) for child in children if child is not None))


def escaped(text: str) -> str:
    """Text for a page: no markup, no control character, nothing that turns what follows around."""
    return html.escape(harmless(text, keep="\n\t"))


def _child(child: Child) -> str:
    return child if isinstance(child, Element) else escaped(str(child))


def _name(key: str) -> str:
    return key.rstrip("_").replace("_", "-")
