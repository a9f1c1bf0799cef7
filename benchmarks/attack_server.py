"""Attacks on a running `paceline serve`, an honest client beside them, and a prober of `/health`.

Run as a program it is the prober: a process of its own, so that no thread of the benchmark delays what it measures.
"""

import contextlib
import functools
import http.client
import json
import math
import os
import random
import re
import secrets
import shutil
import signal
import socket
import string
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path

CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else {0}
READY = re.compile(r"paceline: serving (\S+) at http://127\.0\.0\.1:(\d+)/v1")
BODY_LIMIT = 4 << 20
GRACE = 2
ANSWER_SECONDS = 90.0
"""A call without any answer after this long hangs."""
HONEST_SECONDS = 30.0
END_SECONDS = 5.0
HEALTH_SECONDS = 0.1
CALM_SECONDS = 60.0
TICK = 0.05
"""Between two probes."""
HONEST = {"messages": [{"role": "user", "content": "reverse: paceline"}], "temperature": 0, "max_tokens": 16}
CHAT, COMPLETIONS, RESPONSES, SCORE, TOKENIZE = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/score",
    "/tokenize",
)
CONTROL = ["/pause", "/resume", "/sleep", "/wake", "/adapters/load"]
CONTROL += [f"/weights/{way}" for way in ("load", "upload", "delta", "group", "receive")]
JSON = {"Content-Type": "application/json"}

# -- what is counted ---------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """Counts of one attack over all its attempts."""

    times: int = 0
    answers: Counter = field(default_factory=Counter)
    worst_seconds: float = 0.0
    violations: int = 0


class AttackLog:
    """All attacks, and every violation with what repeats it."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.attacks: dict[str, Tally] = {}
        self.violations: list[dict] = []
        self.notes: list[str] = []
        self._lock = threading.Lock()
        self._numbers: Counter = Counter()

    def number(self, name: str) -> int:
        """Counts the times of an attack; with the seed it gives the parameters, whatever else is drawn."""
        with self._lock:
            self._numbers[name] += 1
            return self._numbers[name]

    def rng(self, name: str, number: int) -> random.Random:
        return random.Random(f"{self.seed}/{name}/{number}")

    def add(self, name: str, answers: Counter, seconds: float) -> None:
        with self._lock:
            tally = self.attacks.setdefault(name, Tally())
            tally.times += 1
            tally.answers += answers
            tally.worst_seconds = max(tally.worst_seconds, seconds)

    def violate(self, kind: str, name: str, text: str, **parameters: object) -> None:
        """`kind` is the bar that is missed: hang, tickets, corruption, control, server, sentence, leftovers."""
        with self._lock:
            self.attacks.setdefault(name, Tally()).violations += 1
            self.violations.append({"kind": kind, "attack": name, "text": text, "seed": self.seed, **parameters})
        print(f"  VIOLATION {kind}: {name}: {text} {json.dumps(parameters, default=str)[:300]}", flush=True)


# -- the server --------------------------------------------------------------------------------------------------------


@dataclass
class Reply:
    """An answer, or what came in its place."""

    status: int
    """0: the connection was closed without an answer."""
    body: bytes
    seconds: float


@dataclass
class Server:
    """A running `paceline serve`, with a key that the benchmark made or none."""

    process: subprocess.Popen
    port: int
    key: str | None
    folder: Path
    temporary: Path
    limit: int = BODY_LIMIT

    @property
    def log(self) -> str:
        return (self.folder / "stderr.txt").read_text(errors="replace")

    @property
    def bearer(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def call(self, method: str, path: str, body: bytes | None, headers: dict[str, str], seconds: float) -> Reply:
        """One request on a connection of its own; a server that closes early has still answered."""
        begun = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.putrequest(method, path, skip_host="Host" in headers, skip_accept_encoding=True)
                if body is not None and not {"Content-Length", "Transfer-Encoding"} & headers.keys():
                    connection.putheader("Content-Length", str(len(body)))
                for name, value in headers.items():
                    connection.putheader(name, value)
                connection.endheaders(body)
            answer = connection.getresponse()
            return Reply(answer.status, answer.read(), time.monotonic() - begun)
        except (ConnectionError, http.client.HTTPException):
            return Reply(0, b"", time.monotonic() - begun)
        finally:
            connection.close()

    def ask(self, path: str, body: object = None, seconds: float = HONEST_SECONDS) -> Reply:
        """A call as the owner makes it."""
        data = None if body is None else json.dumps(body).encode()
        return self.call("GET" if body is None else "POST", path, data, {**JSON, **self.bearer}, seconds)

    def resident(self) -> int:
        """Bytes of memory of the server and its children."""
        return sum(resident(pid) for pid in tree(self.process.pid))


def resident(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def tree(root: int) -> list[int]:
    """A process and all its descendants."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                parents.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for pid in found:
        found += parents.get(pid, [])
    return found


def on_its_own_core() -> list[str]:
    """Begins the server's command where there are several cores: attackers have machines of their own, so ours take
    nothing from it."""
    first, *others = sorted(CORES)
    if not others or not shutil.which("taskset"):
        return []
    os.sched_setaffinity(0, others)  # of this thread, and of all it starts
    return ["taskset", "-c", str(first)]


@contextlib.contextmanager
def serving(key: str | None) -> Generator[Server]:
    """The real command on a free port, in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="attack-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (temporary := folder / "tmp").mkdir()
        environment = {name: value for name, value in os.environ.items() if name != "PACELINE_API_KEY"}
        environment |= {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
        environment |= {"PACELINE_API_KEY": key} if key else {}
        command = [sys.executable, "-m", "paceline", "serve", "paceline:quickstart", "--port", "0"]
        command += ["--max-body-bytes", str(BODY_LIMIT), "--grace", str(GRACE)]
        with (folder / "stderr.txt").open("w") as errors:
            process = subprocess.Popen(
                [*on_its_own_core(), *command],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
                cwd=folder,
            )
        assert process.stdout is not None
        try:
            ready = READY.match(process.stdout.readline())
            if not ready:
                raise RuntimeError((folder / "stderr.txt").read_text())
            yield Server(process, int(ready[2]), key, folder, temporary)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
            process.stdout.close()
            if len(CORES) > 1:
                os.sched_setaffinity(0, CORES)


# -- the prober --------------------------------------------------------------------------------------------------------


def probe(port: int, path: Path) -> None:
    """Ask `/health` every `TICK`, in turn on a kept and on a fresh connection, and note how late an idle sleep ends.

    A probe that takes several ticks counts once for each of them, with what a probe begun then would have waited.
    """
    kept = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    with contextlib.suppress(OSError):  # before the attackers, whose core it shares
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    with path.open("w") as out:
        for number in range(1 << 62):
            begun = time.perf_counter()
            time.sleep(TICK)
            late = time.perf_counter() - begun - TICK
            connection = kept if number % 2 else http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            begun, status = time.perf_counter(), 0
            try:
                connection.request("GET", "/health")
                answer = connection.getresponse()
                answer.read()
                status = answer.status
            except (OSError, http.client.HTTPException):
                connection.close()
            seconds = time.perf_counter() - begun
            if connection is not kept:
                connection.close()
            out.write(f"{time.monotonic() - seconds:.3f} {status} {seconds:.6f} {late:.6f}\n")
            out.flush()


@dataclass
class Probes:
    """Latencies of `/health`, with those of ticks that a slow probe left out, and delays of idle sleeps."""

    latencies: list[float] = field(default_factory=list)
    calm: list[float] = field(default_factory=list)
    """Those of the time without attacks."""
    delays: list[float] = field(default_factory=list)
    failed: int = 0
    slow: list[tuple[float, float]] = field(default_factory=list)
    """When a probe over the bar began, and how long it took."""


def probes(path: Path, calm_from: float) -> Probes:
    found = Probes()
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            at, status, seconds, late = line.split()
            found.failed += status != "200"
            found.latencies += spread(float(seconds))
            found.calm += spread(float(seconds)) if float(at) > calm_from else []
            found.delays += spread(float(late))
            if float(seconds) > HEALTH_SECONDS:
                found.slow.append((float(at), float(seconds)))
    return found


def spread(seconds: float) -> list[float]:
    return [seconds, *(seconds - TICK * skipped for skipped in range(1, int(seconds / TICK) + 1))]


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


# -- attacks -----------------------------------------------------------------------------------------------------------


@dataclass
class Attempt:
    """One time of one attack: its rng, and what it got back."""

    server: Server
    rng: random.Random
    violate: Callable[..., None]
    answers: Counter = field(default_factory=Counter)
    worst: float = 0.0

    def call(
        self,
        path: str,
        body: object = None,
        *,
        headers: dict[str, str] | None = None,
        method: str = "POST",
        key: str | None = "right",
        seconds: float = ANSWER_SECONDS,
        allowed: Callable[[int], bool] = lambda status: True,
    ) -> Reply:
        """Send it; no answer and 5xx other than 503 are violations, and so is what is not `allowed`."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        sent = dict(JSON) if headers is None else dict(headers)
        if key == "right":
            sent |= self.server.bearer
        elif key is not None:
            sent["Authorization"] = key
        start = time.monotonic()
        about = {"path": path, "body": (data or b"")[:300].decode(errors="replace"), "headers": sent}
        try:
            reply = self.server.call(method, path, data, sent, seconds)
        except TimeoutError:
            self.worst = max(self.worst, time.monotonic() - start)
            self.answers["none"] += 1
            self.violate("hang", f"no answer in {seconds:g} s", **about)
            return Reply(-1, b"", seconds)
        self.worst = max(self.worst, reply.seconds)
        self.answers[reply.status] += 1
        if reply.status >= 500 and reply.status != 503:
            self.violate("server", f"answered {reply.status}: {reply.body[:300].decode(errors='replace')}", **about)
        elif not allowed(reply.status):
            kind = "control" if any(control in path.lower() for control in CONTROL) else "server"
            self.violate(kind, f"answered {reply.status}: {reply.body[:200].decode(errors='replace')}", **about)
        return reply

    def socket(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port), timeout=ANSWER_SECONDS)

    def head(self, path: str, length: int | str = 2, **more: str) -> bytes:
        lines = {"Host": "localhost", **JSON, "Content-Length": str(length), **self.server.bearer, **more}
        return f"POST {path} HTTP/1.1\r\n".encode() + b"".join(f"{k}: {v}\r\n".encode() for k, v in lines.items())

    def word(self, least: int = 1, most: int = 12) -> str:
        return "".join(self.rng.choices(string.ascii_lowercase, k=self.rng.randint(least, most)))


Attack = Callable[[Attempt], None]
ATTACKS: dict[str, Attack] = {}


def attack(function: Attack) -> Attack:
    ATTACKS[function.__name__] = function  # ty: ignore[missing-attribute]
    return function


def refused(status: int) -> bool:
    """With a sentence, or by closing a connection that sends too much."""
    return 400 <= status < 500 or status == 0


def chat(**more: object) -> dict:
    return {"messages": [{"role": "user", "content": "reverse: tip"}], "max_tokens": 4, **more}


JINJA = [
    "{% for n in range(99999) %}" * 3 + "x" + "{% endfor %}" * 3,
    "{{ 'a' * 2000000000 }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ range(10**12) | list }}",
]
RESERVED = ["chat_template", "conversation", "messages", "tools", "documents", "tokenize", "tokenizer_kwargs"]
RESERVED += ["add_generation_prompt", "continue_final_message", "return_tensors", "eos_token"]


@attack
def template_of_the_client(s: Attempt) -> None:
    """Names of `chat_template_kwargs` that would replace the template or the conversation."""
    for name in s.rng.sample(RESERVED, 4):
        s.call(CHAT, chat(chat_template_kwargs={name: s.rng.choice(JINJA)}), allowed=refused)


@attack
def template_values(s: Attempt) -> None:
    """Free names of `chat_template_kwargs` with Jinja, deep and huge values."""
    deep: object = "x"
    for _ in range(s.rng.choice([10, 100, 900])):
        deep = {"a": deep} if s.rng.random() < 0.5 else [deep]
    values = [s.rng.choice(JINJA), deep, "a" * s.rng.randint(1, BODY_LIMIT // 2), list(range(200_000)), 10**300]
    s.call(CHAT, chat(chat_template_kwargs={s.word(): s.rng.choice(values)}))


@attack
def many_messages(s: Attempt) -> None:
    """Up to a million messages of one letter."""
    n = int(10 ** s.rng.uniform(3, 6))
    one = {"role": s.rng.choice(["user", "assistant", "tool", "system", "x"]), "content": s.word(1, 2)}
    s.call(CHAT, {"messages": [one] * n}, allowed=refused)


@attack
def deep_json(s: Attempt) -> None:
    """Brackets within brackets, whole or never closed, in place of a body or a field."""
    depth = int(10 ** s.rng.uniform(2, 6))
    left, right = s.rng.choice([("[", "]"), ('{"a":', "}")])
    nest = left * depth + "1" + right * (depth if s.rng.random() < 0.7 else 0)
    name = s.rng.choice(["messages", "prompt", "stop", "metadata", "tools", "response_format", "chat_template_kwargs"])
    body = nest if s.rng.random() < 0.3 else f'{{"{name}": {nest}}}'
    s.call(s.rng.choice([CHAT, COMPLETIONS, RESPONSES, TOKENIZE, SCORE]), body.encode())


@attack
def giant_body(s: Attempt) -> None:
    """Bodies around and far beyond the limit, told by length or in chunks."""
    size = s.rng.choice([s.server.limit - 1, s.server.limit + 1, s.server.limit * 4, s.server.limit * 16])
    text = b'{"prompt": "' + b"a" * (size - 20) + b'"}'
    path = s.rng.choice([CHAT, COMPLETIONS, TOKENIZE, SCORE])
    if s.rng.random() < 0.5:
        s.call(path, text, allowed=lambda status: size < s.server.limit or refused(status))
        return
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in cut(text, 1 << 18)) + b"0\r\n\r\n"
    s.call(path, chunks, headers={**JSON, "Transfer-Encoding": "chunked"})


def cut(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


@attack
def wrong_type(s: Attempt) -> None:
    """JSON under no or a false content type, as a web page can send it without asking first."""
    kinds = [{}, {"Content-Type": "text/plain"}, {"Content-Type": "multipart/form-data"}, {"Content-Type": "a" * 5000}]
    kinds += [{"Content-Type": "application/x-www-form-urlencoded"}, {"Content-Type": ""}]
    kind = s.rng.choice(kinds)
    s.call(s.rng.choice([CHAT, COMPLETIONS]), chat(), headers=kind, allowed=refused)
    path = s.rng.choice(CONTROL)
    s.call(path, {}, headers=kind, key=None, allowed=refused)


@attack
def foreign_origin(s: Attempt) -> None:
    """A web page of another origin."""
    origins = ["https://page.example", "null", "file://", "http://localhost:3000", "http://a.localhost", "x" * 99]
    headers = {**JSON, "Origin": s.rng.choice(origins)}
    s.call(s.rng.choice([CHAT, *CONTROL]), chat(), headers=headers, key=None, allowed=refused)
    s.call("/v1/models", headers=headers, method=s.rng.choice(["GET", "OPTIONS", "HEAD"]), key=None, allowed=refused)


@attack
def rebound_host(s: Attempt) -> None:
    """A name that was pointed at this machine."""
    hosts = ["rebound.example", "127.0.0.1.nip.io", "", "[::1", f"{s.word()}:{s.server.port}", "localhost.evil.example"]
    headers = {**JSON, "Host": s.rng.choice(hosts)}
    s.call(s.rng.choice([CHAT, *CONTROL]), chat(), headers=headers, key=None, allowed=refused)


@attack
def control_calls(s: Attempt) -> None:
    """Pause, sleep, weights and adapters without the key, or with a wrong one."""
    keys = [None, "Bearer ", "Bearer wrong", "bearer x", "Basic YTpi", "Bearer " + "k" * 9000, "Bearer \xe9\xff"]
    if s.server.key:
        keys += [f"Bearer {s.server.key[:-1]}", f"Basic {s.server.key}", f"Bearer {s.server.key},", s.server.key]
    for _ in range(5):
        path = s.rng.choice(CONTROL)
        tricks = [path, path + "/", path + "?x=1", "/" + path, path.upper(), path + "%00", "/v1/.." + path]
        way = s.rng.choice(tricks) if s.rng.random() < 0.5 else path
        body = s.rng.choice([None, {}, {"path": "/"}, b"\0" * 100])
        s.call(way, body, key=s.rng.choice(keys), allowed=refused)


@attack
def group_call(s: Attempt) -> None:
    """`/weights/group` to a socket of ours, which must never be connected to."""
    with socket.socket() as trap:
        trap.bind(("0.0.0.0", 0))
        trap.listen()
        trap.settimeout(0.3)
        stranger = s.rng.choice(["127.0.0.2", "localhost.", "0.0.0.0", "127.1", "2130706433", "::ffff:127.0.0.1"])
        body = {"address": stranger, "port": trap.getsockname()[1], "world": 2, "rank": 1}
        s.call("/weights/group", body, key="right", allowed=refused)
        s.call("/weights/group", body | {"address": "127.0.0.1"}, key="Bearer wrong", allowed=refused)
        with contextlib.suppress(TimeoutError):
            trap.accept()[0].close()
            s.violate("control", "the server connected to an address of the caller's choice", body=body)


def nasty_pattern(rng: random.Random, depth: int) -> str:
    if not depth:
        strange = [r"\p{L}", "[a-", "(?=a)", r"\1", "^", "$", ""]
        return rng.choice(strange if rng.random() < 0.02 else ["a", ".", "[^a]", r"\w", r"\s", "é", "b?"])
    inner = nasty_pattern(rng, depth - 1)
    other = nasty_pattern(rng, depth - 1)
    low = rng.choice([0, 0, 1, 1, 9, 99])
    most = rng.choice([low, low + 9, low + 99] * 5 + [999, 99999, 10**12])
    ways = [f"({inner})*", f"({inner})+", f"({inner}){{{low},{most}}}", f"({inner}|{other})", f"{inner}{other}"]
    return rng.choice([*ways, f"(({inner})*)*", f"(?:{inner}|{inner}a)+"])


@attack
def nasty_regex(s: Attempt) -> None:
    """Quantifiers within quantifiers, alternatives that overlap, syntax that no engine knows."""
    patterns = [nasty_pattern(s.rng, s.rng.randint(1, 7)), "((.{0,99}){0,99}){0,99}b", "(x+x+)+y", "(" * 5000]
    for pattern in (s.rng.choice(patterns), *(nasty_pattern(s.rng, s.rng.randint(1, 5)) for _ in range(3))):
        s.call(s.rng.choice([CHAT, COMPLETIONS]), chat(prompt="a", regex=pattern or "a"))


def nasty_schema(rng: random.Random, depth: int) -> object:
    if not depth:
        leaves = [{"type": "string", "pattern": nasty_pattern(rng, 3)}, {"$ref": "#"}, {"$ref": "#/$defs/a"}, {}, True]
        leaves += [{"enum": [str(n) for n in range(rng.choice([1, 1000, 50_000]))]}, {"const": "x" * 10_000}, False]
        leaves += [
            {"type": rng.choice(["integer", "number", "null", "boolean", "any", 7])},
            {"$ref": "file:///etc/passwd"},
        ]
        leaves += [{"type": "string", "minLength": 10**9}, {"type": "integer", "minimum": -(10**30), "maximum": 10**30}]
        return rng.choice(leaves)
    inner = nasty_schema(rng, depth - 1)
    other = nasty_schema(rng, depth - 1)
    ways = [
        {"type": "array", "items": inner, "maxItems": rng.choice([1, 50, 10**9])},
        {
            "type": "object",
            "properties": {f"p{n}": inner for n in range(rng.choice([1, 20]))},
            "required": ["p0", "zz"],
        },
        {"type": "object", "additionalProperties": inner, "patternProperties": {"((a*)*)*": other}},
        {"anyOf": [inner, other]},
        {"allOf": [inner, other, {"$ref": "#"}]},
        {"oneOf": [inner] * rng.choice([1, 30])},
        {"if": inner, "then": other, "else": inner},
        {"not": inner},
    ]
    return rng.choice(ways)


@attack
def nasty_json_schema(s: Attempt) -> None:
    """Circles of `$ref`, huge enums, counts without end."""
    schema = nasty_schema(s.rng, s.rng.randint(0, 4))
    if isinstance(schema, dict) and s.rng.random() < 0.5:
        schema["$defs"] = {
            "a": {"$ref": "#/$defs/b"},
            "b": s.rng.choice([{"$ref": "#/$defs/a"}, {"anyOf": [{"$ref": "#"}]}]),
        }
    s.call(CHAT, chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}))


@attack
def many_choices(s: Attempt) -> None:
    """As many choices as are allowed, of one prompt."""
    s.call(CHAT, chat(n=s.rng.choice([64, 128]), max_tokens=s.rng.choice([1, 8, 16]), logprobs=True))
    s.call(CHAT, chat(n=s.rng.choice([129, 10**9, -1, 2**63])), allowed=refused)


@attack
def many_prompts(s: Attempt) -> None:
    """Lists of equal, distinct, empty and too long prompts."""
    n = s.rng.choice([16, 256, 256, 2048, 2049])
    prompts = s.rng.choice(
        [
            ["ab"] * n,
            [s.word() for _ in range(n)],
            [""] * n,
            ["word " * s.rng.choice([50, 200])] * min(n, 64),
            [[1, 2]] * n,
        ]
    )
    s.call(COMPLETIONS, {"prompt": prompts, "max_tokens": 2, "n": s.rng.choice([1, 2])}, seconds=2 * ANSWER_SECONDS)


@attack
def long_everything(s: Attempt) -> None:
    """Long stops, token lists and tool lists."""
    many = s.rng.choice([1_000, 100_000, 300_000])
    fields = [{"stop": [s.word() for _ in range(many)]}, {"stop": "a" * many}, {"stop_token_ids": list(range(many))}]
    fields += [{"tools": [{"type": "function", "function": {"name": "a" * 60}}] * (many // 100)}, {"user": "u" * many}]
    fields += [
        {"metadata": {str(n): n for n in range(many)}},
        {"top_logprobs": 2**40, "logprobs": True},
        {"seed": 2**70},
    ]
    s.call(CHAT, chat(**s.rng.choice(fields)))
    s.call(SCORE, {"token_ids": s.rng.choice([[[1] * many], [[1, 2]] * (many // 10), [[10**9]]])})


@attack
def half_headers(s: Attempt) -> None:
    """Requests whose headers never end, some sent letter by letter."""
    sockets = [s.socket() for _ in range(s.rng.randint(5, 100))]
    for door in sockets:
        with contextlib.suppress(OSError):
            door.sendall(s.head(CHAT)[: s.rng.randint(1, 90)])
    _hold_then_close(s, sockets, s.rng.uniform(0, 5))


@attack
def half_bodies(s: Attempt) -> None:
    """Bodies that promise more than they send."""
    sockets = [s.socket() for _ in range(s.rng.randint(5, 100))]
    for door in sockets:
        with contextlib.suppress(OSError):
            door.sendall(s.head(CHAT, s.rng.choice([50, 10**6])) + b'\r\n{"messages": [')
    _hold_then_close(s, sockets, s.rng.uniform(0, 5))


@attack
def idle_connections(s: Attempt) -> None:
    """Hundreds of connections that say nothing."""
    _hold_then_close(s, [s.socket() for _ in range(s.rng.randint(100, 800))], s.rng.uniform(1, 10))


def _hold_then_close(s: Attempt, sockets: list[socket.socket], seconds: float) -> None:
    time.sleep(seconds)
    for door in sockets:
        if s.rng.random() < 0.5:  # a reset in place of an end
            door.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        door.close()
        s.answers["hung up"] += 1


@attack
def hang_ups(s: Attempt) -> None:
    """Clients that leave in mid-body, or before the answer."""
    for _ in range(s.rng.randint(20, 300)):
        body = json.dumps(chat(max_tokens=64, n=s.rng.choice([1, 4]))).encode()
        with contextlib.suppress(OSError), s.socket() as door:
            door.sendall(s.head(CHAT, len(body)) + b"\r\n" + body[: s.rng.choice([5, len(body)])])
            if s.rng.random() < 0.7:
                door.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        s.answers["hung up"] += 1


@attack
def cancelled_streams(s: Attempt) -> None:
    """Streams left after some bytes."""
    for _ in range(s.rng.randint(10, 100)):
        more = {"n": s.rng.choice([1, 1, 8]), "stream": True, "logprobs": s.rng.random() < 0.5, "ignore_eos": True}
        body = json.dumps(chat(max_tokens=s.rng.choice([4, 64]), **more)).encode()
        with contextlib.suppress(OSError), s.socket() as door:
            door.sendall(s.head(CHAT, len(body), Connection="close") + b"\r\n" + body)
            for _ in range(s.rng.randint(0, 4)):
                door.recv(s.rng.choice([1, 100, 4000]))
        s.answers["hung up"] += 1


ODD = [None, True, False, 0, -1, 1.5, 1e308, float("nan"), float("inf"), -float("inf"), 2**63, -(2**63), 10**400 // 1]
ODD += [
    "",
    "\0",
    "\ud800",
    "a\udfffb",
    "é" * 50,
    "{{ 7*7 }}",
    "%s%n",
    "../../etc/passwd",
    [],
    {},
    [[]],
    [None],
    {"": None},
]
ODD += [[{"role": "user"}], {"type": "function"}, ["a", 1], "text", "auto", "required", {"type": "json_object"}]
WHOLE = {
    CHAT: chat(),
    COMPLETIONS: {"prompt": "reverse: tip", "max_tokens": 4},
    RESPONSES: {"input": "reverse: tip", "max_output_tokens": 16},
    SCORE: {"token_ids": [[1, 2, 3]]},
    TOKENIZE: {"prompt": "tip"},
}


@functools.cache
def fields(path: str) -> list[str]:
    """What a body may hold, and one name that it may not."""
    from paceline.server import bodies, responses

    kinds = {CHAT: bodies.ChatBody, COMPLETIONS: bodies.CompletionBody, RESPONSES: responses.ResponseBody}
    kinds |= {SCORE: bodies.ScoreBody, TOKENIZE: bodies.TokenizeBody}
    return [*kinds[path].model_fields, "bogus"]


def odd(rng: random.Random, depth: int = 2) -> object:
    if depth and rng.random() < 0.3:
        return {
            rng.choice(["type", "text", "role", "content", "name", "function"]): odd(rng, depth - 1) for _ in range(2)
        }
    if depth and rng.random() < 0.2:
        return [odd(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    return rng.choice(ODD)


@attack
def odd_fields(s: Attempt) -> None:
    """Fields of a whole request with values of any type: NaN, huge numbers, lone surrogates, nulls."""
    for _ in range(20):
        path = s.rng.choice(list(WHOLE))
        names = s.rng.sample(fields(path), s.rng.randint(1, min(3, len(fields(path)))))
        s.call(path, {**WHOLE[path], **{name: odd(s.rng) for name in names}})


@attack
def odd_messages(s: Attempt) -> None:
    """Messages, tool calls and parts of any form."""
    for _ in range(10):
        message: dict = {"role": s.rng.choice(["user", "assistant", "tool", "system", "developer", "", 1])}
        keys = [
            "content",
            "tool_calls",
            "tool_call_id",
            "name",
            "refusal",
            "reasoning_content",
            "function_call",
            "audio",
        ]
        message |= {key: odd(s.rng, 3) for key in s.rng.sample(keys, s.rng.randint(1, 3))}
        s.call(CHAT, {"messages": [message] * s.rng.choice([1, 3]), "max_tokens": 2})
        s.call(RESPONSES, {"input": [{**message, "type": s.rng.choice(["message", "function_call", "x"])}]})


@attack
def torn_json(s: Attempt) -> None:
    """Bytes of a good request changed, cut or doubled."""
    for _ in range(20):
        path = s.rng.choice(list(WHOLE))
        data = bytearray(json.dumps(WHOLE[path]).encode())
        for _ in range(s.rng.randint(1, 4)):
            at = s.rng.randrange(len(data))
            data[at : at + s.rng.randint(0, 3)] = s.rng.randbytes(s.rng.randint(0, 4))
        s.call(path, bytes(data) or b" ")


@attack
def garbage_bytes(s: Attempt) -> None:
    """Anything but HTTP at the port."""
    starts = [b"\x16\x03\x01\x02\0", b"GET / HTTP/9.9\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\0" * 100, b""]
    starts += [b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 20_000, b"POST / HTTP/1.1\r\nContent-Length: -5\r\n\r\n"]
    starts += [b"POST /pause HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\nffffffffffffffff\r\n"]
    starts += [b"GET /health HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n"]
    for _ in range(20):
        with contextlib.suppress(OSError), s.socket() as door:
            door.sendall(s.rng.choice(starts) + s.rng.randbytes(s.rng.choice([0, 10, 5000])))
            door.settimeout(0.05)
            if door.recv(100).startswith(b"HTTP/1.1 5"):
                s.violate("server", "bytes that are no request were answered with 5xx")
        s.answers["hung up"] += 1


@attack
def pipelined(s: Attempt) -> None:
    """Many requests at once on one connection whose answers are not read."""
    body = json.dumps(chat()).encode()
    one = s.head(CHAT, len(body)) + b"\r\n" + body
    with contextlib.suppress(OSError), s.socket() as door:
        door.settimeout(2)
        door.sendall(one * s.rng.randint(2, 200))
        time.sleep(s.rng.uniform(0, 1))
    s.answers["hung up"] += 1


@attack
def odd_paths(s: Attempt) -> None:
    """Paths that lead out, or to what a framework offers by itself."""
    paths = [
        "/..%2f..%2fetc/passwd",
        "//etc/passwd",
        "/%00",
        "/docs",
        "/openapi.json",
        "/redoc",
        "/v1/models/../../x",
        "/static/",
    ]
    paths += [
        "/" + "a" * s.rng.choice([100, 60_000]),
        "/v1/completions%20",
        "/?" + "a=b&" * 1000,
        "/health/../pause",
        "/" + "%2e" * 99,
    ]
    for path in s.rng.sample(paths, 5):
        reply = s.call(
            path,
            method=s.rng.choice(["GET", "POST", "PUT", "DELETE", "PATCH", "TRACE", "X"]),
            key=s.rng.choice([None, "right"]),
        )
        if b"root:" in reply.body:
            s.violate("server", "a file of the machine was served", path=path)


@attack
def weights_without_key(s: Attempt) -> None:
    """Megabytes of weights without the key."""
    data = os.urandom(s.rng.choice([10, BODY_LIMIT, 8 * BODY_LIMIT]))
    headers = {
        "Content-Type": "application/octet-stream",
        "Paceline-Update": s.rng.choice(["{}", '{"version": 9}', "x"]),
    }
    s.call(s.rng.choice(["/weights/upload", "/weights/delta"]), data, headers=headers, key=None, allowed=refused)


# -- the server's half of the time -------------------------------------------------------------------------------------


class HonestClient(threading.Thread):
    """A client of the `openai` package that asks the same again and again, and knows the answer."""

    def __init__(self, server: Server, log: AttackLog) -> None:
        super().__init__(name="honest", daemon=True)
        import httpx
        from openai import OpenAI

        plain = httpx.Client(timeout=ANSWER_SECONDS, verify=False)
        url = f"http://127.0.0.1:{server.port}/v1"
        self._client = OpenAI(base_url=url, api_key=server.key or "none", max_retries=0, http_client=plain)
        self._log = log
        self.reference = self._ask()
        self.seconds: list[float] = []
        self.busy = 0
        self.over = threading.Event()

    def _ask(self) -> str | None:
        return self._client.chat.completions.create(model="paceline:quickstart", **HONEST).choices[0].message.content

    def run(self) -> None:
        import openai

        while not self.over.wait(0.3):
            begun = time.monotonic()
            try:
                if (answer := self._ask()) != self.reference:
                    self._log.violate("corruption", "honest client", f"{answer!r} in place of {self.reference!r}")
            except openai.RateLimitError:
                self.busy += 1
            except openai.OpenAIError as error:
                if not self.over.is_set():
                    self._log.violate("server", "honest client", f"{type(error).__name__}: {error}")
                    self.over.wait(2)
            self.seconds.append(time.monotonic() - begun)


class ServerRound:
    """One server from start to end, and the attacks on it."""

    def __init__(self, server: Server, log: AttackLog) -> None:
        self.server, self.log = server, log
        self._served = server.ask("/policy").body
        self._logged = 0
        self.windows: list[tuple[float, float, str]] = []
        """When which attack was under way."""

    def attempt(self, name: str) -> None:
        number = self.log.number(name)
        where = {"number": number, "key": bool(self.server.key)}
        attempt = Attempt(
            self.server,
            self.log.rng(name, number),
            lambda kind, text, **more: self.log.violate(kind, name, text, **where, **more),
        )
        begun = time.monotonic()
        try:
            ATTACKS[name](attempt)
        except Exception as error:
            if self.server.process.poll() is None:  # else it is told below
                self.log.violate(
                    "server", name, f"the attack ended with {error!r}", trace=traceback.format_exc(), **where
                )
        self.windows.append((begun, time.monotonic(), f"{name} {number}"))
        self.log.add(name, attempt.answers, attempt.worst or time.monotonic() - begun)

    def during(self, slow: list[tuple[float, float]]) -> list[str]:
        """What was under way while `/health` was slowest."""
        worst = sorted(slow, key=lambda one: -one[1])[:12]
        return [
            f"{1000 * seconds:.0f} ms: "
            + (", ".join(name for begun, end, name in self.windows if begun <= at + seconds and end >= at) or "nothing")
            for at, seconds in worst
        ]

    def look(self, names: list[str]) -> None:
        """The server lives, serves what it served, and logged no bug."""
        where = {"number": [self.log._numbers[name] for name in names]}
        what = " + ".join(names)
        if self.server.process.poll() is not None:
            raise RuntimeError(
                f"the server ended with {self.server.process.returncode} after {what}: {self.server.log[-2000:]}"
            )
        try:
            if (policy := self.server.ask("/policy").body) != self._served:
                self.log.violate("corruption", what, f"/policy is {policy!r}, not {self._served!r}", **where)
        except TimeoutError:
            self.log.violate("hang", what, f"/policy had no answer in {HONEST_SECONDS:g} s", **where)
        log = self.server.log
        if "Traceback" in log[self._logged :] or "bug" in log[self._logged :]:
            self.log.violate("server", what, f"logged: {log[self._logged :][-1500:]}", **where)
        self._logged = len(log)


def run_round(log: AttackLog, seconds: float, names: list[str], rng: random.Random, key: str | None) -> dict:
    """Start a server, attack it for `seconds`, and return what was measured."""
    begun = time.monotonic()
    calm = min(CALM_SECONDS, seconds / 4)
    with serving(key) as server:
        server_round = ServerRound(server, log)
        honest = HonestClient(server, log)
        warm_up(server)
        before = server.resident()
        measured = server.folder / "probes"
        prober = subprocess.Popen([sys.executable, __file__, str(server.port), str(measured)])
        honest.start()
        end = begun + seconds - calm - 2
        order: list[str] = []
        worst_log, calm_from = 0, math.inf
        try:
            while time.monotonic() < end:
                order = order or rng.sample(names, len(names))
                at_once = [order.pop() for _ in range(min(len(order), rng.choice([1, 1, 1, 2, 3])))]
                print(f"  {time.monotonic() - begun:5.0f} s  {' + '.join(at_once)}", flush=True)
                threads = [threading.Thread(target=server_round.attempt, args=(name,), daemon=True) for name in at_once]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join(4 * ANSWER_SECONDS)
                server_round.look(at_once)
            print(f"  {time.monotonic() - begun:5.0f} s  calm for {calm:.0f} s", flush=True)
            peak = server.resident()
            calm_from = time.monotonic()
            time.sleep(calm)
            after = server.resident()
            worst_log = len(server.log)
        except RuntimeError as error:
            log.violate("server", "all", str(error))
            peak = after = 0
        finally:
            honest.over.set()
            prober.terminate()
            prober.wait()
        honest.join(ANSWER_SECONDS)
        took = end_server(server, log, rng)
        probed = probes(measured, calm_from)
    if probed.failed:
        log.violate("server", "/health", f"{probed.failed} of {len(probed.latencies)} probes had no answer")
    return {
        "key": bool(key),
        "seconds": time.monotonic() - begun,
        "latencies": probed.latencies,
        "calm": probed.calm,
        "delays": probed.delays,
        "slow_health": server_round.during(probed.slow),
        "honest": honest.seconds,
        "honest_busy": honest.busy,
        "memory": {"before": before, "peak": peak, "after": after},
        "log_bytes": worst_log,
        "end_seconds": took,
    }


def warm_up(server: Server) -> None:
    """Load what normal requests load: long prompts, many choices, grammars, streams."""
    for body in (
        HONEST,
        chat(n=64, logprobs=True),
        chat(regex="(ab|c){1,3}"),
        chat(regex="(ab{1,3}){1,3}"),  # by a process of its own
        chat(response_format={"type": "json_object"}),
        {"messages": [{"role": "user", "content": "word " * 20}], "max_tokens": 4, "n": 64},
    ):
        server.ask(CHAT, body, ANSWER_SECONDS)
    server.ask(COMPLETIONS, {"prompt": ["ab"] * 256, "max_tokens": 2}, ANSWER_SECONDS)


def enough(before: int, after: int) -> bool:
    """Whether memory is back: within a fifth and 100 MiB."""
    return after <= 1.2 * before + (100 << 20)


def end_server(server: Server, log: AttackLog, rng: random.Random) -> float:
    """SIGTERM while streams are open, as often as not: it ends in time and leaves nothing."""
    sockets = []
    attempt = Attempt(server, rng, lambda *_, **__: None)
    if rng.random() < 0.5:
        body = json.dumps(chat(max_tokens=64, stream=True, ignore_eos=True, n=64)).encode()
        with contextlib.suppress(OSError):
            for _ in range(8):
                sockets.append(attempt.socket())
                sockets[-1].sendall(attempt.head(CHAT, len(body)) + b"\r\n" + body)
    begun = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    try:
        code = server.process.wait(60)
    except subprocess.TimeoutExpired:
        code = None
    took = time.monotonic() - begun
    for door in sockets:
        door.close()
    if took > END_SECONDS + 1.5 or code not in (0, 130, 143):
        log.violate("hang", "SIGTERM to the server", f"exit {code} after {took:.1f} s, {len(sockets)} streams open")
    if left := [str(path.relative_to(server.temporary)) for path in server.temporary.rglob("*")]:
        log.violate("leftovers", "SIGTERM to the server", f"left in TMPDIR: {left[:10]}")
    if "Traceback" in server.log:
        log.violate("server", "SIGTERM to the server", server.log[-1500:])
    return took


def new_key() -> str:
    return secrets.token_hex(8)


if __name__ == "__main__":
    probe(int(sys.argv[1]), Path(sys.argv[2]))
