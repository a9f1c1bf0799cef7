"""Finds waits without a bound in the package: `python scripts/lint_waits.py [FILE or FOLDER ...]`.

A wait is bounded where it stands inside `wait_within(...)`, `wait_for(...)` or `asyncio.timeout(...)`, or is given a
timeout itself. Where the bound lies elsewhere, or waiting for ever is the job (a server waits for clients), its line
says so:

    line = await stdout.readline()  # bounded: by the caller's deadline
    line = await queue.get()  # unbounded: a worker without work waits for some
"""

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "paceline"

BOUNDS = {"wait_within", "_within", "wait_for", "timeout", "timeout_at"}
FOREVER = {"serve", "serve_forever", "create_future"}
AWAITED = (
    FOREVER
    | {"wait", "join", "acquire", "recv", "accept", "drain", "communicate", "wait_closed", "put"}
    | {f"{verb}{what}" for verb in ("read", "recv") for what in ("", "_into", "exactly", "until", "line")}
)
"""Methods that wait when they are awaited, whatever they are given."""
CALLED = {"recv", "recv_into", "recvfrom", "accept", "communicate", "waitpid", "select"}
"""Methods that hold up their thread, unless they are given a timeout by name."""
BARE = {"wait", "join", "get", "acquire", "result", "select"}
"""Methods that hold up their thread when they are given nothing: no timeout either."""
LOCKS = {"Lock", "Semaphore", "BoundedSemaphore", "Condition"}
INSTEAD = {
    "join": "give it a timeout and say what to do when it is over",
    "sleep": "count the tries, or stop at a deadline",
    "result": "give it a timeout, or say why it is done already",
}
MARK = re.compile(r"#.*\b(un)?bounded: \S")


@dataclass(frozen=True, order=True)
class Offence:
    """A wait without a bound."""

    file: Path
    line: int
    what: str
    method: str

    def __str__(self) -> str:
        better = INSTEAD.get(self.method, "write `await wait_within(SECONDS, NAME, ...)`, or give it a timeout")
        mark = "or say on its line `# bounded: BY WHAT` or `# unbounded: WHY`"
        return f"{self.file}:{self.line}: `{self.what}` may wait for ever: {better}; {mark}"


class _Search(ast.NodeVisitor):
    """Walks one file, knowing whether a bound is around it."""

    def __init__(self, tree: ast.Module) -> None:
        self.found: dict[tuple[int, str], tuple[ast.expr, str]] = {}
        self._bounded = self._looping = False
        self._judged: set[int] = set()
        """Calls that were judged as part of an `await`."""
        self._made = {"locks": _made(tree, "asyncio", LOCKS), "vars": _made(tree, "", {"ContextVar"})}

    def visit_Await(self, node: ast.Await) -> None:
        self._judge_awaited(node.value)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if id(node) not in self._judged:
            self._judge_called(node)
        self._inside(node, _name(node.func) in BOUNDS)

    def visit_AsyncWith(self, node: ast.AsyncWith) -> None:
        for item in node.items:
            if _plain(item.context_expr) in self._made["locks"] and not self._bounded:
                self._offend(item.context_expr, "acquire")
            self.visit(item.context_expr)
        outer, self._bounded = self._bounded, self._bounded or any(_is_bound(i.context_expr) for i in node.items)
        for statement in node.body:
            self.visit(statement)
        self._bounded = outer

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """A function is called far from the bounds around its definition."""
        outer = self._bounded, self._looping
        self._bounded = self._looping = False
        self.generic_visit(node)
        self._bounded, self._looping = outer

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_While(self, node: ast.While) -> None:
        """Sleeping in a loop is waiting, too."""
        outer, self._looping = self._looping, True
        self.generic_visit(node)
        self._looping = outer

    def _inside(self, node: ast.AST, bounded: bool) -> None:
        outer, self._bounded = self._bounded, self._bounded or bounded
        self.generic_visit(node)
        self._bounded = outer

    def _judge_awaited(self, value: ast.expr) -> None:
        """`await` of a primitive, of a future itself, or of several together."""
        if self._bounded:
            return
        if isinstance(value, ast.Name | ast.Attribute | ast.Subscript):
            self._offend(value, "await")
            return
        if not isinstance(value, ast.Call):
            return
        self._judged.add(id(value))
        method = _name(value.func)
        if method in BOUNDS or _has_timeout(value):
            return
        if method in ("gather", "shield", "wrap_future"):
            for argument in value.args:
                inner = argument.value if isinstance(argument, ast.Starred) else argument
                if isinstance(inner, ast.Call) and _name(inner.func) == "map":
                    if method == "gather" and inner.args and _plain(inner.args[0]).endswith("wrap_future"):
                        self._offend(value, method)
                else:
                    self._judge_awaited(inner.elt if isinstance(inner, ast.GeneratorExp | ast.ListComp) else inner)
        elif method == "sleep":
            self._judge_called(value)
        elif isinstance(value.func, ast.Attribute) and (
            method in AWAITED or (method == "get" and _given_nothing(value))
        ):
            self._offend(value, method)

    def _judge_called(self, call: ast.Call) -> None:
        if self._bounded or not isinstance(call.func, ast.Attribute) or _has_timeout(call):
            return
        method, receiver = call.func.attr, _plain(call.func.value)
        bare = method in BARE and _given_nothing(call) and receiver not in self._made["vars"]
        runs = receiver == "subprocess" and method in ("run", "check_output", "check_call", "call")
        polls = self._looping and method == "sleep" and receiver in ("asyncio", "time")
        if bare or runs or polls or (method in CALLED and _waits(method, call)):
            self._offend(call, method)

    def _offend(self, node: ast.expr, method: str) -> None:
        self.found[node.lineno, ast.unparse(node)] = (node, method)


def offences(file: Path) -> list[Offence]:
    """The unbounded waits of one file that are not marked."""
    text = file.read_text(encoding="utf-8")
    tree = ast.parse(text)
    search, lines = _Search(tree), text.splitlines()
    search.visit(tree)
    return sorted(
        Offence(file, node.lineno, " ".join(ast.unparse(node).split())[:60], method)
        for node, method in search.found.values()
        if not any(MARK.search(line) for line in lines[node.lineno - 1 : node.end_lineno])
    )


def main(places: Iterable[str]) -> int:
    """Print what was found; 1 if there is any."""
    roots = [Path(place) for place in places] or [SOURCE]
    files = [file for root in roots for file in (sorted(root.rglob("*.py")) if root.is_dir() else [root])]
    found = [offence for file in files for offence in offences(file)]
    for offence in found:
        print(offence)
    verdict = f"{len(found)} waits have no bound" if found else "every wait has its bound"
    print(f"{len(files)} files: {verdict}")
    return 1 if found else 0


def _made(tree: ast.Module, module: str, kinds: set[str]) -> set[str]:
    """Names and attributes that are bound to a new object of one of these kinds."""
    return {name for node in ast.walk(tree) for name in _targets(node) if _makes(node, module, kinds)}


def _targets(node: ast.AST) -> Iterator[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    yield from (_plain(target) for target in targets)


def _makes(node: ast.AST, module: str, kinds: set[str]) -> bool:
    value = getattr(node, "value", None)
    if not isinstance(value, ast.Call) or _name(value.func) not in kinds:
        return False
    return not module or _plain(value.func).startswith(f"{module}.")


def _waits(method: str, call: ast.Call) -> bool:
    if method == "select":  # `selector.select(5)` and `select.select(r, w, x, 5)` are bounded
        return not call.args or (_plain(call.func) == "select.select" and len(call.args) < 4)
    return method != "accept" or not call.args


def _given_nothing(call: ast.Call) -> bool:
    return not call.args and not call.keywords


def _has_timeout(call: ast.Call) -> bool:
    given = [keyword for keyword in call.keywords if keyword.arg in ("timeout", "timeout_s", "seconds")]
    return any(not (isinstance(keyword.value, ast.Constant) and keyword.value.value is None) for keyword in given)


def _is_bound(node: ast.expr) -> bool:
    if not isinstance(node, ast.Call) or _name(node.func) not in ("timeout", "timeout_at"):
        return False
    return bool(node.args) and not (isinstance(node.args[0], ast.Constant) and node.args[0].value is None)


def _name(function: ast.expr) -> str:
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def _plain(node: ast.expr) -> str:
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
