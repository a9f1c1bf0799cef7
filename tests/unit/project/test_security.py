"""What must hold so that a run can be left alone on a shared machine. `docs/security.md` says it in words."""

import ast
import importlib
import json
import threading
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import paceline
from graded_code import graded
from paceline.commands.play import PlayOptions
from paceline.commands.rollouts import RolloutOptions
from paceline.config import ConfigError, RunConfig, load
from paceline.config.errors import options_from_flags
from paceline.config.run import RecordingConfig
from paceline.config.secret import address_secret, secrets_in
from paceline.config.serve import ServeConfig, is_loopback
from paceline.envs.base import POLICY
from paceline.envs.search.server import SearchOptions
from paceline.errors import PacelineError
from paceline.rollout import RecordingServer
from paceline.runtime.episode_runtime import OpenAIServer
from paceline.server.control import find_files
from paceline.server.errors import Refusal

ROOT = Path(__file__).parents[3]

SOURCE = Path(paceline.__file__).parent
SANDBOX = SOURCE / "envs" / "sandbox"
KEY = "sk-2f9c1d7e5b"


# -- code -------------------------------------------------------------------------------------------------------------

SERIALISERS = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "multiprocessing"}
"""Modules that make objects out of bytes by running what the bytes say; the last one sends them between processes."""
SHELLS = {"system", "popen", "create_subprocess_shell", "getoutput", "getstatusoutput"}


def offences(tree: ast.AST, sandbox: bool) -> list[str]:
    """What of a module must not be, by line."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        else:
            modules = []
        found += [f"{node.lineno}: {name}" for name in modules if name.split(".")[0] in SERIALISERS]
        if not isinstance(node, ast.Call):
            continue
        keywords = {word.arg: getattr(word.value, "value", ...) for word in node.keywords}
        called = node.func.id if isinstance(node.func, ast.Name) else ""
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        owner = (
            node.func.value.id if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name) else ""
        )
        bad = (
            keywords.get("shell", False) is not False
            or keywords.get("allow_pickle", False) is not False
            or method in SHELLS
            or (called in ("eval", "exec") and not sandbox)
            or ((owner, method) == ("torch", "load") and keywords.get("weights_only") is not True)
            or (owner, method) in {("torch", "save"), ("yaml", "load")}
            or keywords.get("trust_remote_code", False) is True
        )
        if bad:
            found.append(f"{node.lineno}: {called or method}")
    return found


@cache
def modules() -> dict[Path, ast.Module]:
    """All there is, read."""
    return {file: ast.parse(file.read_text(encoding="utf-8")) for file in sorted(SOURCE.rglob("*.py"))}


def test_nothing_unpickles_opens_a_shell_or_runs_text():
    assert len(modules()) > 150
    found = {file: offences(tree, file.is_relative_to(SANDBOX)) for file, tree in modules().items()}
    assert {str(file): wrong for file, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from multiprocessing import Queue",
        "eval(text)",
        "exec(text)",
        "os.system(text)",
        "subprocess.run(text, shell=True)",
        "subprocess.run(text, shell=wanted)",
        "await asyncio.create_subprocess_shell(text)",
        "torch.load(file)",
        "torch.load(file, weights_only=False)",
        "np.load(file, allow_pickle=True)",
        "yaml.load(file)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
    ],
)
def test_each_offence_is_found(line):
    assert offences(ast.parse(line), sandbox=False)


# -- sockets ----------------------------------------------------------------------------------------------------------


def test_everything_listens_on_loopback_unless_told_otherwise():
    hosts = [ServeConfig().host, SearchOptions().host, RecordingConfig().host, RecordingServer()._host]
    assert all(map(is_loopback, hosts))
    for file, tree in modules().items():
        values = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        assert "0.0.0.0" not in values, file
        assert "::" not in values, file
    for host in ("0.0.0.0", "192.168.1.2", "::", "example.org"):
        with pytest.raises(ValueError, match="can be reached from other machines: give an API key"):
            ServeConfig(host=host)
        with pytest.raises(ValueError, match="can be reached from other machines: give an API key"):
            SearchOptions(host=host)


# -- allowed folders --------------------------------------------------------------------------------------------------


def test_no_way_of_writing_a_path_leads_out_of_the_allowed_folders(tmp_path):
    inside, beside, outside = tmp_path / "weights", tmp_path / "weights-of-others", tmp_path / "outside"
    for folder in (inside, beside, outside):
        folder.mkdir()
        (folder / "model.safetensors").touch()
    (inside / "folder").symlink_to(outside, target_is_directory=True)
    (inside / "chain").symlink_to(inside / "folder")
    (tmp_path / "entry").symlink_to(inside)
    allowed = (inside.resolve(),)
    assert find_files(str(tmp_path / "entry"), allowed) == [inside / "model.safetensors"]
    for path in (beside, inside / "folder", inside / "chain", inside / "folder" / "model.safetensors", "/", "", ".."):
        with pytest.raises(Refusal) as refused:
            find_files(str(path), allowed)
        assert refused.value.status == 403, path
    with pytest.raises(Refusal, match="only from folders the server was started with"):
        find_files(str(inside), ())


# -- secrets ----------------------------------------------------------------------------------------------------------

ADDRESSES = [
    f"http://me:{KEY}@host/v1",
    f"https://{KEY}@host",
    f"http://host/v1?api_key={KEY}",
    f"https://h/?a=1&token={KEY}",
]


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_with_a_secret_is_refused_and_not_repeated(address, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    teacher = f'{{name = "big", base_url = "{address}"}}'
    files = {
        "algo.teacher": f'[algo]\ntype = "opd"\nteacher = {teacher}',
        "env.0.url": f'[[env]]\ntype = "retrieval"\nurl = "{address}"',
        "env.0.kwargs.deep.0": f'[[env]]\ntype = "custom"\nimport_path = "x:y"\nkwargs = {{deep = ["{address}"]}}',
    }
    for place, text in files.items():
        Path("run.toml").write_text(text)
        with pytest.raises(ConfigError) as refused:
            load("run.toml")
        assert place in str(refused.value)
        assert "a run file is kept with the run" in str(refused.value)
        assert KEY not in str(refused.value)
    found = {"embeddings_model": "m"}
    for make in (OpenAIServer, lambda url: options_from_flags(SearchOptions, found | {"embeddings_url": url})):
        with pytest.raises(PacelineError, match="where others may read it") as refused:
            make(address)
        assert KEY not in str(refused.value)


def test_a_key_by_its_name_is_refused_wherever_it_stands():
    env = {"type": "custom", "import_path": "x:y"}
    for kwargs in ({"api_key": KEY}, {"judge": {"API-Key": KEY}}, {"judges": [{"password": KEY}]}):
        with pytest.raises(ValueError, match="is a secret, and a run file is kept with the run") as refused:
            RunConfig(env=[env | {"kwargs": kwargs}])
        assert KEY not in str(refused.value).split("[type=")[0]
    harmless = {
        "api_key": "EMPTY",
        "password": "MY_VARIABLE",
        "token": "<eos>",
        "url": "http://host:1/v1?limit=3#key=a",
    }
    assert RunConfig(env=[env | {"kwargs": harmless}])
    assert list(secrets_in(RunConfig().model_dump())) == []
    assert address_secret("train@hub/name") is address_secret("mail me@home: http://host") is None


def kwargs(**entries) -> list[str]:
    return list(secrets_in({"kwargs": entries}))


NAMES = "api_key apiKey OPENAI_API_KEY openai_apikey x-api-key hf_token hfToken token client_secret db_password"


MORE = "openai_key auth pwd bearer credentials aws_secret_access_key Authorization api_keys"


@pytest.mark.parametrize("name", [*NAMES.split(), *MORE.split()])
def test_a_name_tells_by_its_end(name):
    assert kwargs(**{name: KEY})
    assert kwargs(**{name: ["MY_VARIABLE", KEY]})
    for harmless in ("MY_VARIABLE", "none", "Dummy", "not-needed", "EMPTY", "local", "", None, 7, [1, 2], True):
        assert not kwargs(**{name: harmless}), harmless


def test_names_that_only_sound_like_a_secret_pass():
    names = "max_tokens stop_token_ids tokens eos_token tokenizer key api_key_env api_key_variable password_file"
    assert not kwargs(**dict.fromkeys(names.split(), KEY))
    assert not kwargs(token="<|endoftext|>")


def test_addresses_of_every_kind():
    secret = [
        "postgres://me:s3cret@host/rows",
        "redis://:s3cret@host",
        f"git+https://{KEY}@host/repository",
        "https://host/file?X-Amz-Date=1&X-Amz-Signature=0a1b",
        "postgres://host/rows?password=hunter",
        "http://host?key=a1b2",
        "http://host?token=abcdefgh",
    ]
    harmless = [
        "ssh://git@host/repository",
        "s3://bucket/a@b",
        "http://host?key=train&x=1",
        "http://host?api_key=EMPTY",
    ]
    assert [address for address in secret if address_secret(address) is None] == []
    assert [address for address in harmless if address_secret(address)] == []


def test_whatever_holds_a_key_does_not_show_it():
    holders = [
        OpenAIServer("http://host", api_key=KEY),
        RolloutOptions(endpoint="http://host", api_key=KEY),
        PlayOptions(endpoint="http://host", api_key=KEY),
        ServeConfig(api_key=KEY),
        SearchOptions(api_key=KEY, embeddings_url="http://host", embeddings_model="m", embeddings_api_key=KEY),
    ]
    for holder in holders:
        assert KEY not in f"{holder!r} {holder}"


MINE = """
import itertools
from paceline.config.env import RetrievalConfig
from paceline.envs.retrieval import SearchClient

played = itertools.count()

async def play(row, seat, url):
    await seat.chat(row["messages"])
    if next(played) % 2:
        await SearchClient(RetrievalConfig(url=url), url).search("anything")
    return 1.0
"""


class Parrot(BaseHTTPRequestHandler):
    """Refuses every client, and repeats their key in the answer."""

    def do_POST(self) -> None:
        self.send_response(401)
        self.end_headers()
        self.wfile.write(f"wrong key: {self.headers['Authorization']}".encode())

    def log_message(self, *args) -> None: ...


@pytest.fixture
def parrot():
    with ThreadingHTTPServer(("127.0.0.1", 0), Parrot) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_run_leaves_no_file_with_a_key_of_its_environment(here, parrot, tmp_path, monkeypatch):
    """Run directory, export, checkpoint, rollouts and whatever else: none of it, though everybody had the keys."""
    for name in ("PACELINE_API_KEY", "PACELINE_SEARCH_API_KEY", "OPENAI_API_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, f"{KEY}-{name}")
    (tmp_path / "mine.py").write_text(MINE)
    rows = [{"messages": [{"role": "user", "content": "reverse: cab"}], "answer": "bac"}] * 2
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.toml").write_text(
        "steps = 1\nbatch_size = 4\ngroup_size = 2\nstaleness = 0\neval.every = 0\nsampling.max_tokens = 4\n"
        "filters.zero_advantage = false\nrecord.batches = 1\ntrainer.threads = 1\nbreaker.window = 999\n"
        f'[[env]]\ntype = "retrieval"\nurl = "{parrot}"\ndataset = "rows.jsonl"\n'
        '[[env]]\ntype = "custom"\nimport_path = "mine.py:play"\ndataset = "rows.jsonl"\nmin_group_size = 1\n'
        f'kwargs = {{url = "{parrot}"}}\n'
    )
    done = here("train", "run.toml")
    files = [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink()]
    assert done.returncode == 0, done.stderr
    assert {"config.toml", "metrics.jsonl", "tickets.jsonl", "rollouts.jsonl"} <= {path.name for path in files}
    (failed,) = (tmp_path / "runs").rglob("rollouts.jsonl")
    assert "wrong key: Bearer ***" in failed.read_text()
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []
    assert KEY not in done.stdout + done.stderr


# -- sandbox ----------------------------------------------------------------------------------------------------------


def test_a_solution_has_the_memory_it_is_given_and_no_more():
    """Time, processes, files, network and environment: test_graded_envs."""
    solution = (
        "def f(megabytes):\n    try:\n        return len(bytearray(megabytes << 20)) >> 20\n"
        "    except MemoryError:\n        return 'refused'"
    )
    tests = ["assert f(8) == 8\nassert f(2000) == 'refused'"]
    (outcome,) = graded(solution, tests=tests, memory_mb=256)
    assert outcome.rewards[POLICY] == 1


def test_the_attack_has_as_many_kinds_as_the_page_says(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    attack, server, world = map(importlib.import_module, ("attack", "attack_server", "attack_env"))
    page = " ".join((ROOT / "docs" / "security.md").read_text().split())
    assert f"{len(server.ATTACKS)} attacks on the server" in page
    assert f"{len(attack.TRAINING)} faults of signals" in page
    assert f"misbehaves in {len(world.FAULTS)} ways" in page
