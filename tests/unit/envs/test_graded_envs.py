"""Laws of graded environments: right answers pay, and nothing else does, whatever a policy tries."""

import asyncio
import contextlib
import importlib.util
import json
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from graded_code import coder, graded
from paceline.config import ConfigError
from paceline.config.env import MathConfig
from paceline.data import DataError, open_rows
from paceline.envs import POLICY, EnvError, Outcome
from paceline.envs import sandbox as sandbox_package
from paceline.envs.code import extract_code
from paceline.envs.questions import Math
from paceline.rollout import Reply

TOYS = Path(sandbox_package.__file__).parents[1] / "toys"
needs_math_verify = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason='needs math-verify: pip install "paceline[tasks]"'
)


class Says:
    """A seat whose policy always says the same."""

    def __init__(self, text: str) -> None:
        self._text = text

    async def chat(self, messages: Sequence[dict]) -> Reply:
        return Reply(self._text, truncated=False)

    async def complete(self, token_ids: Sequence[int]) -> Reply:
        return Reply(f"{self._text} after {len(token_ids)} tokens", truncated=False)


def write(path: Path, *rows: dict) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def plays(environment, row: dict, *replies: str) -> list[Outcome]:
    """The outcomes of several episodes of a row, one for each reply."""

    async def run():
        return await asyncio.gather(*(environment.play(row, {POLICY: Says(text)}) for text in replies))

    return asyncio.run(run())


# --- mathematics


def maths(**settings) -> Math:
    return Math(MathConfig(**{"name": "math", "dataset": str(TOYS / "math.jsonl"), "check_timeout": 60.0, **settings}))


EQUAL = [
    ("1/2", r"It is \boxed{\frac{1}{2}}."),
    (r"\frac{1}{2}", r"\boxed{0.5}"),
    ("1,080", r"\boxed{1080}"),
    (r"\{-7, 7\}", r"The solutions are \boxed{\{7, -7\}}"),
    ("x^2 + 2x + 1", r"\boxed{(x+1)^2}"),
    ("$\\sqrt{8}$", r"\boxed{2\sqrt{2}}"),
    ("18", "She has 3 * 6 = 18 dollars left. The answer is 18"),
    ("18", r"First \boxed{17}, but no: \boxed{18}"),
]
UNEQUAL = [
    ("18", r"\boxed{17}"),
    ("18", r"\boxed{18} wait, \boxed{19}"),
    ("18", " ".join(rf"\boxed{{{i}}}" for i in range(40))),
    ("18", r"\boxed{" + ", ".join(map(str, range(40))) + "}"),
    ("18", r"\boxed{17 \text{ or } 18}"),
    ("18", "I do not know."),
    ("18", ""),
    ("18", r"\boxed{}"),
    ("x+1", r"\boxed{x+2}"),
]


@needs_math_verify
def test_equal_answers_pay_however_they_are_written_and_others_do_not():
    async def run():
        environment = maths()
        for pairs, pay in ((EQUAL, 1.0), (UNEQUAL, 0.0)):
            outcomes = await asyncio.gather(*(environment.grade(said, [answer]) for answer, said in pairs))
            for (answer, said), outcome in zip(pairs, outcomes, strict=True):
                assert outcome.rewards == {POLICY: pay}, (answer, said)
                assert outcome.metrics["correct"] == pay
                assert outcome.metrics["check_failed"] == 0
        assert (await environment.grade("I do not know.", ["18"])).metrics["parsed"] == 0
        assert (await environment.grade(r"\boxed{17}", ["18"])).metrics["parsed"] == 1

    asyncio.run(run())


@needs_math_verify
def test_a_question_in_exact_tokens_is_graded_like_one_in_words(tmp_path):
    rows = [{"input_token_ids": [4, 2], "gt_answer": r"\frac{1}{2}"}, {"question": "half of 1?", "gt_answer": 0.5}]
    environment = maths(dataset=write(tmp_path / "rows.jsonl", *rows))
    tokens, words = environment.examples("train")
    assert "messages" not in tokens
    assert words["messages"][-1]["content"] == "half of 1?"
    for row in (tokens, words):
        outcomes = plays(environment, row, r"It is \boxed{0.5}", r"It is \boxed{2}")
        assert [outcome.rewards[POLICY] for outcome in outcomes] == [1, 0]


@needs_math_verify
def test_any_of_several_answers_will_do(tmp_path):
    row = {"question": "Which digit?", "answer": ["3", "5"]}
    environment = maths(dataset=write(tmp_path / "rows.jsonl", row), system="Box it.")
    (example,) = environment.examples("train")
    assert [m["role"] for m in example["messages"]] == ["system", "user"]
    outcomes = plays(environment, example, *(rf"\boxed{{{i}}}" for i in (3, 4, 5)))
    assert [outcome.rewards[POLICY] for outcome in outcomes] == [1, 0, 1]
    assert environment.examples("eval") == []


CHECKS = """
import os, sys, time
def check(said, answers):
    {trick}
    return {{"correct": said == answers[0], "parsed": {parsed}, "gold": {parsed}}}
"""


@needs_math_verify
@pytest.mark.parametrize(
    ("trick", "kind"),
    [
        ("time.sleep(1000)", "timed_out"),
        ("os._exit(1)", "exited"),
        ("os.abort()", "exited"),
        ("raise RuntimeError('broken')", "raised"),
        ("return 'x' * 10_000_000", "too_large"),
    ],
)
def test_a_check_that_goes_wrong_pays_nothing_and_says_why(tmp_path, trick, kind):
    file = tmp_path / "check.py"
    file.write_text(CHECKS.format(trick=f"if said == 'bad': {trick}", parsed=True))
    config = MathConfig(name="math", dataset="unused", check_timeout=4.0 if kind == "timed_out" else 60.0, workers=2)
    environment = Math(config, check=f"{file}:check")

    async def run():
        return await asyncio.gather(*(environment.grade(said, ["good"]) for said in ("bad", "good", "bad", "good")))

    bad, good, *_ = outcomes = asyncio.run(run())
    assert [outcome.rewards[POLICY] for outcome in outcomes] == [0, 1, 0, 1]
    assert {name for name, value in bad.metrics.items() if value} == {"check_failed", f"check_failed/{kind}"}
    assert not good.metrics["check_failed"]


@needs_math_verify
def test_a_power_tower_is_given_up():
    async def run():
        environment = maths(check_timeout=5.0, workers=1)
        outcome = await environment.grade(r"\boxed{9^{9^{9^{9}}} + 1}", ["1"])
        assert outcome.rewards == {POLICY: 0.0}
        assert outcome.metrics["check_failed/timed_out"] == 1
        assert (await environment.grade(r"\boxed{1}", ["1"])).rewards == {POLICY: 1.0}

    asyncio.run(run())


@needs_math_verify
def test_numbers_are_compared_where_math_verify_reads_nothing(tmp_path):
    file = tmp_path / "check.py"
    file.write_text(CHECKS.format(trick="pass", parsed=False))
    environment = Math(MathConfig(name="math", dataset="unused"), check=f"{file}:check")
    said = {"it is 1,080": 1, "1,080 or 3": 0, r"\boxed{1080 apples}": 1, r"\boxed{3} or 1080": 0, "none": 0}
    for text, pay in said.items():
        outcome = asyncio.run(environment.grade(text, ["1080"]))
        assert (text, outcome.rewards[POLICY]) == (text, pay)
        assert outcome.metrics["parsed"] == (text != "none")


# --- code


RIGHT = {
    "add": "def add(a, b): return a + b",
    "is_palindrome": "def is_palindrome(text):\n    text = text.lower()\n    return text == text[::-1]",
    "count_words": "from collections import Counter\ndef count_words(text): return Counter(text.split())",
    "primes": "def primes(n): return [i for i in range(2, n) if all(i % j for j in range(2, int(i**.5) + 1))]",
    "Stack": (
        "class Stack:\n    def __init__(self): self.items = []\n    def push(self, item): self.items.append(item)\n"
        "    def pop(self): return self.items.pop()\n    def size(self): return len(self.items)"
    ),
}


def test_right_solutions_of_the_toy_tasks_pay_and_wrong_ones_do_not():
    environment = coder()

    async def run():
        for row in environment.examples("train"):
            name = row["entry_point"]
            for text, pay in (
                (f"```python\n{RIGHT[name]}\n```", 1),
                (RIGHT[name], 1),
                (f"def {name}(*a): return 1", 0),
            ):
                outcome = await environment.play(row, {POLICY: Says(text)})
                assert (name, outcome.rewards[POLICY]) == (name, pay)
                assert outcome.metrics["solved"] == pay
                assert not outcome.metrics["check_failed"]

    asyncio.run(run())


TESTS = ["assert f(2) == 4", "assert f(3) == 9", "assert f(-1) == 1", "assert f(0) == 0"]


def test_a_setting_says_whether_some_tests_are_worth_something():
    solutions = ("def f(x): return x * x", "def f(x): return abs(x) * x", "def f(x): return 5")
    assert [o.rewards[POLICY] for o in graded(*solutions, tests=TESTS)] == [1, 0, 0]
    parts = graded(*solutions, tests=TESTS, reward="fraction")
    assert [o.rewards[POLICY] for o in parts] == [o.metrics["passed"] for o in parts] == [1, 0.75, 0]


def test_a_crash_costs_only_its_own_test():
    solution = "import os\ndef f(x): return os._exit(0) if x == 3 else x * x"
    (outcome,) = graded(solution, tests=TESTS, reward="fraction")
    assert outcome.rewards[POLICY] == 0.75


def test_values_come_back_as_they_are():
    values = [(1, [2.5, "ü", None]), {1: (2,), "a": {3}}, b"\x00", 10**5000, frozenset({1}), 1 + 2j, -(2**53), True]
    (outcome,) = graded("def f(x): return x", tests=[f"assert f({v!r}) == {v!r}" for v in values[:3] + values[4:]])
    assert outcome.rewards[POLICY] == 1
    (outcome,) = graded("def f(x): return 10 ** x", tests=["assert f(5000) == 10 ** 5000"])
    assert outcome.rewards[POLICY] == 1


def test_functions_generators_and_errors_can_be_tested():
    solution = (
        "def f(n):\n    if n < 0: raise ValueError('negative')\n    return (i for i in range(n))\n"
        "def adder(n): return lambda x: x + n"
    )
    tests = [
        "assert list(f(3)) == [0, 1, 2]",
        "try:\n    f(-1)\nexcept ValueError as e:\n    assert 'negative' in str(e)\nelse:\n    assert False",
        "assert adder(2)(3) == 5",
        "assert math.isclose(adder(0.1)(0.2), 0.3)",
    ]
    (outcome,) = graded(solution, tests=tests, entry_point=None)
    assert outcome.rewards[POLICY] == 1


ALL = "assert all(map(lambda c: f(c[0]) == c[1], [(2, 4), (3, 9)]))"
CHEATS = {
    "prints a verdict": "print('4 passed'); print('OK')\ndef f(x): print('passed'); return None",
    "exits happily": "import os\nos._exit(0)",
    "exits politely": "import sys\nsys.exit(0)",
    "exits in the call": "import os\ndef f(x): os._exit(0)",
    "raises SystemExit": "def f(x): raise SystemExit(0)",
    "equals everything": (
        "class Yes:\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n"
        "    def __hash__(self): return 0\n    def __bool__(self): return True\ndef f(x): return Yes()"
    ),
    "an int that equals everything": (
        "class Yes(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
        "def f(x): return Yes(7)"
    ),
    "ends the loop over the cases": "def f(x): raise StopIteration",
    "patches Python": (
        "import builtins, unittest\nbuiltins.all = lambda *a: True\nbuiltins.map = lambda *a: []\n"
        "builtins.AssertionError = Warning\ndef f(x): return 0\ndef all(x): return True\ndef map(*a): return []"
    ),
    "reads the frames above": (
        "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n        if 'c' in frame.f_locals:\n"
        "            return frame.f_locals['c'][1]\n        frame = frame.f_back"
    ),
    "forges answers": (
        "import os\ndef f(x): return 0\nfor n in range(3, 64):\n    try:\n"
        '        os.write(n, b\'["value", true]\\n["no jail", ""]\\n["value", {"passed": 4}]\\n\' * 50)\n'
        "    except OSError: pass"
    ),
    "forges a verdict": (
        'import os\ndef f(x):\n    os.write(4, b\'{"value": {"passed": 4, "jailed": true}}\\n\')\n    os._exit(0)'
    ),
    "kills its parent": "import os\ndef f(x):\n    os.kill(os.getppid(), 9)\n    os.killpg(0, 9)",
    "sends more than can be read": "def f(x): return 'x' * (1 << 24)",
    "sends a deep list": "def f(x):\n    y = []\n    for _ in range(900): y = [y]\n    return y",
    "is no Python": "def f(x) return",
    "is empty": "",
    "has another name": "def g(x): return x * x",
}

HANGS = {
    "never returns": "def f(x):\n    while True: pass",
    "never loads": "while True: pass",
    "sleeps": "import time\ndef f(x): time.sleep(1000)",
    "returns forever": "import itertools\ndef f(x): return itertools.count()",
    "forks": "import os\ndef f(x):\n    while True:\n        try: os.fork()\n        except OSError: pass",
    "starts threads": (
        "import threading, time\ndef f(x):\n    while True: threading.Thread(target=time.sleep, args=(99,)).start()"
    ),
}


@pytest.fixture(scope="module", params=["kernel", "guard"])
def sandbox(request) -> str:
    """Each kind of walls, if this machine has it."""
    try:
        (outcome,) = graded("def f(x): return x", tests=["assert f(1) == 1"], sandbox=request.param)
    except EnvError as error:
        pytest.skip(str(error))
    assert outcome.rewards[POLICY] == 1
    assert outcome.metrics["sandbox"] == (request.param == "kernel")
    return request.param


def test_no_trick_pays(sandbox):
    """And the honest solutions in between do not suffer."""
    honest = "def f(x): return x * x"
    solutions = [solution for cheat in CHEATS.values() for solution in (cheat, honest)]
    outcomes = graded(
        *solutions, tests=[TESTS[0], ALL], reward="fraction", time_limit=60.0, memory_mb=256, sandbox=sandbox
    )
    paid = {name: outcome.rewards[POLICY] for name, outcome in zip(CHEATS, outcomes[::2], strict=True)}
    assert {name: pay for name, pay in paid.items() if pay} == {}
    assert [outcome.rewards[POLICY] for outcome in outcomes[1::2]] == [1] * len(CHEATS)
    assert not any(outcome.metrics["check_failed"] for outcome in outcomes)


def test_a_solution_that_takes_forever_is_given_up(sandbox):
    outcomes = graded(*HANGS.values(), tests=TESTS, reward="fraction", time_limit=1.5, memory_mb=256, sandbox=sandbox)
    assert [outcome.rewards[POLICY] for outcome in outcomes] == [0] * len(HANGS)
    assert not any(outcome.metrics["check_failed"] for outcome in outcomes)


SECRET = "the-secret"
LEAKS = {
    "a file": "open({path!r}).read()",
    "a file in bytes": "open({path!r}.encode(), 'rb').read().decode()",
    "a file by the system's call": "os.read(os.open({path!r}, os.O_RDONLY), 100).decode()",
    "a file above": "open('../' * 20 + {path!r}[1:]).read()",
    "a link to a file": "(os.symlink({path!r}, 'link'), open('link').read())[1]",
    "another program": "__import__('subprocess').run(['cat', {path!r}], capture_output=True, text=True).stdout",
    "the shell": "os.popen('cat ' + {path!r}).read()",
    "the C library": (
        "(lambda c, b: (c.read(c.open({path!r}.encode(), 0), b, 90), b.value.decode())[1])"
        "(__import__('ctypes').CDLL(None), __import__('ctypes').create_string_buffer(99))"
    ),
    "an import": "(sys.path.insert(0, os.path.dirname({path!r})), __import__('hidden').SECRET)[1]",
    "the folder": "str(os.listdir(os.path.dirname({path!r})))",
    "the environment": "os.environ['PACELINE_TEST_SECRET']",
    "an ancestor's environment": "open('/proc/' + str(os.getppid()) + '/environ').read()",
    "the network": "__import__('socket').create_connection(('127.0.0.1', {port}), 5).recv(99).decode()",
    "a socket under its first name": (
        "(lambda s: (s.connect(('127.0.0.1', {port})), s.recv(99).decode())[1])(__import__('_socket').socket())"
    ),
}


@pytest.fixture
def server():
    """A service on this machine that tells the secret to everyone, and counts them."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        visits = []

        def serve():
            while True:
                try:
                    client, address = listening.accept()
                except OSError:
                    return
                with client:
                    client.sendall(SECRET.encode())
                visits.append(address)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listening.getsockname()[1], visits
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.fixture
def hidden():
    """A file with the secret, in a folder with the secret for a name: for all to read, unlike pytest's own folders."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        (Path(folder) / SECRET).touch()
        file = Path(folder) / "hidden.py"
        file.write_text(f"SECRET = {SECRET!r}")
        yield file


def test_a_solution_sees_neither_files_nor_network_nor_environment(sandbox, server, hidden, monkeypatch):
    monkeypatch.setenv("PACELINE_TEST_SECRET", SECRET)
    port, visits = server
    head = "import os, sys\ndef f(x): return "  # what is loaded anyway
    solutions = [head + leak.format(path=str(hidden), port=port) for leak in LEAKS.values()]
    control = f"def f(x): return {SECRET!r}"
    *outcomes, honest = graded(
        *solutions, control, tests=[f"assert {SECRET!r} in f(0)"], sandbox=sandbox, time_limit=30.0
    )
    paid = {name: outcome.rewards[POLICY] for name, outcome in zip(LEAKS, outcomes, strict=True)}
    assert {name: pay for name, pay in paid.items() if pay} == {}
    assert honest.rewards[POLICY] == 1
    assert visits == []


def test_each_check_has_an_empty_folder_and_small_files(sandbox):
    solution = (
        "import os\ndef f(x):\n    found = os.listdir('.')\n"
        "    with open('kept.txt', 'w') as file:\n        file.write('me')\n"
        "    return found\n"
        "def g(size):\n    try:\n        with open('large', 'wb') as file:\n            file.write(bytes(size))\n"
        "        return os.path.getsize('large')\n    except OSError:\n        return 'refused'"
    )
    tests = ["assert f(0) == []\nassert f(0) == ['kept.txt']\nassert g(9000) == 9000\nassert g(9 << 20) == 'refused'"]
    outcomes = graded(solution, solution, tests=tests, entry_point=None, file_mb=1, sandbox=sandbox)
    assert [outcome.rewards[POLICY] for outcome in outcomes] == [1, 1]


def test_the_standard_library_is_there(sandbox):
    solution = (
        "import bisect, collections, dataclasses, datetime, decimal, fractions, functools, hashlib, heapq, itertools\n"
        "import json, math, random, re, statistics, string, tempfile, typing\n"
        "@dataclasses.dataclass\nclass Point:\n    x: int\n    y: int = 2\n"
        "def f(x):\n    import zlib, unicodedata, csv\n    return [Point(x).y, hashlib.sha256(b'').hexdigest()[:4]]"
    )
    (outcome,) = graded(solution, tests=["assert f(1) == [2, 'e3b0']"], sandbox=sandbox)
    assert outcome.rewards[POLICY] == 1


# --- processes


def named(mark: str) -> list[str]:
    """Processes that call themselves so."""
    found = []
    for comm in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += [comm.parent.name] if comm.read_text().strip() == mark else []
    return found


RUNAWAY = """
import ctypes, os, time
def f(x):
    ctypes.CDLL(None).prctl(15, {mark!r}.encode())
    ctypes.CDLL(None).prctl(1, 0)  # no longer to die with its parent
    if os.fork() == 0:
        os.setsid()
        time.sleep(1000)
    os.setsid()
    {then}
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes where Linux lists them")
@pytest.mark.parametrize("sandbox", ["kernel"], indirect=True)
def test_nothing_a_solution_starts_outlives_its_check(sandbox, tmp_path):
    mark = f"pl{time.time_ns() % 10**12}"
    environment = coder(sandbox=sandbox, time_limit=1000.0)

    async def until(wanted: bool) -> None:
        async with asyncio.timeout(240):
            while bool(named(mark)) != wanted:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def run():
        # One that returns, though what it started does not.
        outcome = await environment.grade(RUNAWAY.format(mark=mark, then="return 4"), TESTS[:1], "f")
        assert outcome.rewards[POLICY] == 1
        await until(False)
        # One whose episode is cancelled: no caller is left to report it to.
        hanging = RUNAWAY.format(mark=mark, then="time.sleep(1000)")
        task = asyncio.create_task(environment.grade(hanging, TESTS[:1], "f"))
        await until(True)
        task.cancel()
        await asyncio.wait([task])
        await until(False)

    asyncio.run(run())


# --- tests that say nothing


def test_a_test_that_never_calls_the_solution_pays_nothing():
    for tests, entry_point in ((["assert True"], "f"), (["def check(candidate):\n    assert candidate(1) == 1"], None)):
        (outcome,) = graded("def f(x): return x", tests=tests, entry_point=entry_point)
        assert outcome.rewards[POLICY] == 0


def test_a_solution_gives_only_the_names_it_is_asked_for():
    """Else it would define what the tests compare with."""
    solution = "def f(x): return 0\ndef close(a, b): return True\ndef sorted(x): return [1, 2]\ndef set(x): return 0"
    tests = ["def close(a, b): return abs(a - b) < 1\nassert close(f(9), 9)", "assert sorted(f(1)) == [1, 2]"]
    tests += ["assert set([f(1)]) == set([1])", "assert unknown(f(1))"]
    (outcome,) = graded(solution + "\ndef unknown(x): return True", tests=tests, reward="fraction")
    assert outcome.rewards[POLICY] == 0


def test_a_functions_result_has_no_methods_of_its_own():
    solution = (
        "class Yes:\n    def startswith(self, text): return True\ndef f(x): return Yes()\nclass F(Yes):\n    pass"
    )
    (outcome,) = graded(solution, tests=["assert f(1).startswith('a')"])
    assert outcome.rewards[POLICY] == 0
    (outcome,) = graded(solution, tests=["assert F().startswith('a')"], entry_point="F")
    assert outcome.rewards[POLICY] == 1


# --- replies and rows


def test_the_last_python_block_counts_or_else_the_whole_reply():
    assert extract_code("x = 1") == "x = 1"
    assert extract_code("```\nx = 1\n```") == "x = 1\n"
    assert extract_code("```py\nx = 1\n```\n```\noutput\n```") == "x = 1\n"
    assert extract_code("```python\nx = 1\n```\nor\n``` Python\nx = 2\n```\n```json\n{}\n```") == "x = 2\n"


BAD_CODE_ROWS = [
    ({"prompt": "?"}, r"rows\.jsonl:2: a row needs `tests`"),
    ({"prompt": "?", "tests": []}, r"rows\.jsonl:2: `tests` must be"),
    ({"prompt": "?", "tests": [1]}, r"rows\.jsonl:2: `tests` must be"),
    ({"prompt": "?", "tests": "assert ("}, r"rows\.jsonl:2: a test is not valid Python"),
    ({"prompt": "?", "tests": "assert f()", "entry_point": "f()"}, r"rows\.jsonl:2: `entry_point` must be"),
    ({"tests": "assert f()"}, r"rows\.jsonl:2: a row needs `messages`"),
]


@pytest.mark.parametrize(("row", "why"), BAD_CODE_ROWS)
def test_a_bad_row_is_named(tmp_path, row, why):
    good = {"prompt": "?", "tests": "assert f()"}
    with pytest.raises(DataError, match=why):
        coder(dataset=write(tmp_path / "rows.jsonl", good, row)).examples("train")


@needs_math_verify
def test_a_bad_maths_row_is_named(tmp_path):
    for bad in ({"question": "?"}, {"question": "?", "answer": []}, {"answer": "1"}):
        rows = write(tmp_path / "rows.jsonl", {"question": "?", "answer": "1"}, bad)
        with pytest.raises(DataError, match=r"rows\.jsonl:2: "):
            maths(dataset=rows).examples("train")


def test_toy_sets_have_five_rows_each():
    for file in sorted(TOYS.glob("*.jsonl")):
        assert len(open_rows(str(file))) == 5, file.name
    assert {file.stem for file in TOYS.glob("*.jsonl")} == {"math", "code", "language", "tools"}


@needs_math_verify
def test_the_toy_answers_are_right():
    async def run():
        environment = maths()
        for row in environment.examples("train"):
            for answer in row["answer"]:
                outcome = await environment.grade(rf"\boxed{{{answer}}}", row["answer"])
                assert outcome.rewards == {POLICY: 1.0}, answer

    asyncio.run(run())
    for row in open_rows(str(TOYS / "tools.jsonl")):
        sum_ = row["messages"][0]["content"].removeprefix("What is ").partition("?")[0]
        assert float(eval(sum_)) == float(row["answer"])


def test_settings_are_checked():
    for settings in ({"check_timeout": 0.0}, {"workers": 0}, {"unknown": 1}):
        with pytest.raises(ConfigError):
            MathConfig(dataset="rows.jsonl", **settings)
