"""Joins the modules and the style sheets of the page into one file each, so that a page costs three requests.

Our own modules only: they are plain (`import { a } from`, `import * as a from`, `export` of a declaration) and import
one another in no circle.
"""

import hashlib
import re
from pathlib import Path

_IMPORT = re.compile(r'^import (?:\* as (?P<all>\w+)|\{(?P<names>[^}]*)\}) from "(?P<path>[^"]+)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?(?:function|class|const) (\w+))", re.MULTILINE)
_STYLE = re.compile(r'<link rel="stylesheet" href="static/([^"]+)">\s*')
_MODULE = re.compile(r'<script type="module" src="static/(?P<path>[^"]+)">')


def join_modules(entry: Path) -> str:
    """One module that holds the entry and all that it imports, each in a scope of its own, the imported ones first."""
    joined: dict[Path, str] = {}

    def add(path: Path) -> str:
        if path in joined:
            return f"m{list(joined).index(path)}"

        def bind(found: re.Match[str]) -> str:
            module = add((path.parent / found["path"]).resolve())
            names = found["all"] or f"{{{found['names'].replace(' as ', ': ')}}}"
            return f"const {names} = {module};"

        body = _IMPORT.sub(bind, path.read_text(encoding="utf-8"))
        exported = ", ".join(name for _, name in _EXPORT.findall(body))
        inner = _EXPORT.sub(r"\1", body)
        joined[path] = f"(() => {{\n{inner}\nreturn {{ {exported} }};\n}})();"
        return f"m{len(joined) - 1}"

    add(entry.resolve())
    return "\n".join(f"const m{at} = {text}" for at, text in enumerate(joined.values()))


def bundle_page(page: Path) -> tuple[str, dict[str, str]]:
    """The page with one style sheet and one module, and those files by name. A name has the digest of its text, so a
    browser may keep the file for ever."""
    html, static = page.read_text(encoding="utf-8"), page.parent
    styles = "\n".join((static / path).read_text(encoding="utf-8") for path in _STYLE.findall(html))
    entry = _MODULE.search(html)
    assert entry is not None
    files = {}
    for kind, text in (("css", styles), ("js", join_modules(static / entry["path"]))):
        files[f"bundle-{hashlib.sha256(text.encode()).hexdigest()[:16]}.{kind}"] = text
    style, module = files
    tags = f'<link rel="stylesheet" href="static/{style}">\n    <script type="module" src="static/{module}">'
    return _MODULE.sub(tags, _STYLE.sub("", html)), files
