"""The web app's routes, on run directories that the real recorder wrote."""

import asyncio
import json
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

import paceline.observe.web
from child_processes import Launched
from paceline.commands import main
from paceline.config import ConfigError
from paceline.observe.analysis.timeline import bin_spans, spans_from_metrics, spans_from_record
from paceline.observe.analysis.vitals import family, table_row
from paceline.observe.monitor import RunDirectory
from paceline.observe.record import RunFolder, TimelineSpan
from paceline.observe.web import UiOptions, build_app, overview
from paceline.observe.web.app import HEADERS, ROUTE_MODULES
from paceline.observe.web.runs import encode_json
from recorded_runs import Told, served, torn


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("runs")
    for seed in range(2):
        Told(folder, f"twin-{seed}", seed=seed).step(12).end()
    Told(folder, "late", staleness=0).step(12).end()
    Told(folder, "failed").step(3).end("failed", "the loss is not finite: lower trainer.optimizer.lr")
    Told(folder, "crashed").step(5).note("nothing has moved").let_go()
    return folder


@pytest.fixture
def client(runs: Path):
    return _client(runs)


def _client(folder: Path, key: str | None = None, base: str = "http://127.0.0.1:8200") -> "Client":
    return Client(build_app(folder, key), base)


class Client:
    """A plain client of the app; each request has a loop of its own."""

    def __init__(self, app, base: str = "http://127.0.0.1:8200") -> None:
        self.app, self.base = app, base

    def get(self, path: str, **options) -> httpx.Response:
        return self.request("GET", path, **options)

    def request(self, method: str, path: str, **options) -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url=self.base) as client:
                return await client.request(method, path, **options)

        return asyncio.run(ask())


def _by_name(client: Client) -> dict[str, dict]:
    return {run["name"]: run for run in client.get("/api/runs").json()["runs"]}


def test_every_run_is_in_the_table_with_its_state_step_reward_and_evaluation(client):
    found = _by_name(client)
    assert {name: run["state"] for name, run in found.items()} == {
        "twin-0": "finished",
        "twin-1": "finished",
        "late": "finished",
        "failed": "failed",
        "crashed": "crashed",
    }
    run = found["twin-0"]
    assert (run["step"], run["total_steps"]) == (12, 40)
    assert run["reward"]["last_steps"] == "mean of steps 8 to 12"
    assert 0 < run["reward"]["last"] <= 1
    assert run["eval"]["last_steps"] == "step 10"
    assert run["tags"] == ["reverse-text", "grpo", "quickstart"]
    assert "lower trainer.optimizer.lr" in found["failed"]["message"]


def test_runs_that_differ_only_in_their_seed_are_one_family(client):
    found = _by_name(client)
    assert found["twin-0"]["family"] == found["twin-1"]["family"] != found["late"]["family"]
    assert family({}) == ""


def test_a_living_run_runs_and_a_killed_one_has_crashed(tmp_path):
    told = Told(tmp_path, "alive").step(2)
    client = _client(tmp_path)
    assert _by_name(client)["alive"]["state"] == "running"
    told.let_go()
    assert _by_name(client)["alive"]["state"] == "crashed"


def test_metrics_come_by_columns_and_a_mark_brings_only_what_is_new(tmp_path):
    told = Told(tmp_path, "grows").step(3)
    client = _client(tmp_path)
    first = client.get("/api/metrics", params={"run": "grows"}).json()
    assert first["fresh"]
    assert first["columns"]["step"] == [0, 1, 2, 3]
    assert first["columns"]["entropy"][0] is None
    assert {len(column) for column in first["columns"].values()} == {4}
    told.step(2)
    more = client.get("/api/metrics", params={"run": "grows", "mark": first["mark"]}).json()
    assert not more["fresh"]
    assert more["columns"]["step"] == [4, 5]
    told.recorder.roll_back(2)
    again = client.get("/api/metrics", params={"run": "grows", "mark": more["mark"]}).json()
    assert again["fresh"], "what was rolled back must not stay on the page"
    assert again["columns"]["step"] == [0, 1, 2]
    told.done = 2
    told.step(6)
    longer = client.get("/api/metrics", params={"run": "grows", "mark": more["mark"]}).json()
    assert longer["fresh"], "nor when the new lines are more than the old ones were"
    assert longer["columns"]["step"] == list(range(9))
    told.let_go()


def test_compressed_metrics_are_those_of_now(tmp_path):
    told = Told(tmp_path, "grows").step(3)
    client = _client(tmp_path)
    for steps in (3, 3, 4):
        told.step(steps - told.done)
        answer = client.get("/api/metrics", params={"run": "grows"}, headers={"Accept-Encoding": "gzip"})
        assert answer.headers["content-encoding"] == "gzip"
        plain = client.get("/api/metrics", params={"run": "grows"}, headers={"Accept-Encoding": "identity"})
        assert answer.json() == plain.json()
        assert answer.json()["columns"]["step"][-1] == steps
    told.let_go()


def test_curves_of_a_run_are_judged_once_and_again_when_it_grows(tmp_path, monkeypatch):
    told = Told(tmp_path, "grows").step(3).let_go()
    looks = []
    real = overview.reward_trends
    monkeypatch.setattr(overview, "reward_trends", lambda columns: looks.append(1) or real(columns))
    client = _client(tmp_path)
    ends = []
    for _ in range(3):
        ends.append(client.get("/api/metrics", params={"run": "grows", "mark": "0:0"}).json()["ends"])
    assert (len(looks), ends[0]) == (1, ends[2])
    line = json.dumps({"step": 4, "time": told.now, "reward/reverse-text/mean": 0.75})
    with (told.path / "metrics.jsonl").open("a") as file:
        file.write(f"{line}\n")
    later = client.get("/api/metrics", params={"run": "grows"}).json()["ends"]
    assert later["reward"]["last"] != ends[0]["reward"]["last"]


def test_a_mark_of_nonsense_brings_everything(client):
    for mark in ("", ":", "x:y", "1:-4", "99:99", "\x00"):
        told = client.get("/api/metrics", params={"run": "twin-0", "mark": mark}).json()
        assert told["fresh"], mark
        assert len(told["columns"]["step"]) == 13


@pytest.mark.parametrize(
    "name", ["../late", "/etc", "..", ".", "", "late/../late", "late/", "%2e%2e", "nobody", "late\x00", "x" * 5000]
)
def test_no_name_leads_out_of_the_folder(client, name):
    for path in ("run", "metrics", "lanes", "config", "live"):
        answer = client.get(f"/api/{path}", params={"run": name})
        assert answer.status_code in (400, 404), path
        assert answer.json()["error"]


def test_a_link_out_of_the_folder_is_no_run_of_it(tmp_path):
    Told(tmp_path / "elsewhere", "secret").let_go()
    Told(tmp_path / "runs", "mine").let_go()
    (tmp_path / "runs" / "linked").symlink_to(tmp_path / "elsewhere" / "secret")
    client = _client(tmp_path / "runs")
    assert list(_by_name(client)) == ["mine"]
    assert client.get("/api/run", params={"run": "linked"}).status_code == 404


def test_static_files_lie_in_their_folder_only(client):
    assert client.get("/static/js/app.js").status_code == 200
    for path in ("/static/../app.py", "/static/%2e%2e/app.py", "/static/js/../../app.py", "/static//etc/passwd"):
        assert client.get(path).status_code == 404, path


def test_torn_lines_and_nonsense_are_named_and_the_rest_is_shown(tmp_path):
    told = Told(tmp_path, "torn").step(5).end()
    torn(told.path / "metrics.jsonl")
    torn(told.path / "events.jsonl")
    client = _client(tmp_path)
    assert _by_name(client)["torn"]["step"] == 5
    columns = client.get("/api/metrics", params={"run": "torn"}).json()["columns"]
    assert columns["step"] == [0, 1, 2, 3, 4, 5]
    problems = client.get("/api/run", params={"run": "torn"}).json()["problems"]
    assert any("metrics.jsonl" in problem for problem in problems)
    assert any("events.jsonl" in problem for problem in problems)


@pytest.mark.parametrize("lost", ["metrics.jsonl", "events.jsonl", "config.toml"])
def test_a_run_without_one_of_its_files_still_opens(tmp_path, lost):
    told = Told(tmp_path, "partial").step(5).end()
    (told.path / lost).unlink()
    client = _client(tmp_path)
    assert "partial" in _by_name(client)
    for path in ("run", "metrics", "lanes", "config"):
        assert client.get(f"/api/{path}", params={"run": "partial"}).status_code == 200, path


@pytest.mark.parametrize(
    "text", ["schema_version = 0\nold_key = 3\n[trainer]\nstrange = 1\n", "not [ toml", "\x00", ""]
)
def test_a_run_file_of_another_version_is_shown_and_its_trouble_named(tmp_path, text):
    told = Told(tmp_path, "older").step(2).end()
    (told.path / "config.toml").write_text(text)
    client = _client(tmp_path)
    answer = client.get("/api/config", params={"run": "older"}).json()
    assert answer["text"] == text
    assert bool(answer["problems"]) == bool(text)
    assert [row["known"] for row in answer["rows"] if row["name"] in ("old_key", "strange")].count(True) == 0
    assert _by_name(client)["older"]["step"] == 2


def test_values_that_are_no_numbers_leave_gaps(tmp_path):
    told = Told(tmp_path, "odd").step(2).let_go()
    with (told.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "time": 1.0, "entropy": "high", "loss": NaN, "grad_norm": null, "lr": true}\n')
        file.write('{"step": 4, "time": 1.0, "entropy": 1' + "0" * 400 + "}\n[1, 2]\n")
    client = _client(tmp_path)
    answer = client.get("/api/metrics", params={"run": "odd"})
    assert answer.status_code == 200
    columns = answer.json()["columns"]
    assert [columns[name][3] for name in ("entropy", "loss", "grad_norm", "lr")] == [None] * 4
    assert "odd" in _by_name(client)


def test_the_config_marks_what_differs_and_says_what_keys_mean(client):
    rows = {row["key"]: row for row in client.get("/api/config", params={"run": "late"}).json()["rows"]}
    assert rows["staleness"]["changed"]
    assert (rows["staleness"]["value"], rows["staleness"]["default"]) == (0, 1)
    assert not rows["trainer.micro_batch_tokens"]["changed"]
    assert rows["trainer.micro_batch_tokens"]["help"]
    assert rows["env[0].name"]["section"] == "env · reverse-text"


def test_lanes_come_from_the_times_of_steps_where_none_were_recorded(client):
    told = client.get("/api/lanes", params={"run": "twin-0"}).json()
    assert told["source"] == "metrics"
    assert [lane["lane"] for lane in told["lanes"]] == ["engine", "trainer", "publish", "evaluation"]
    assert told["extent"][0] < told["extent"][1]


def test_the_phases_of_a_step_lie_one_behind_the_other_and_end_with_it():
    spans = spans_from_metrics(
        {"step": [1], "time": [10.0], "time/train": [2.0], "time/publish": [1.0], "time/sample": [3.0]}
    )
    assert {(one.kind, one.start, one.end) for one in spans} == {
        ("publish", 9.0, 10.0),
        ("train", 7.0, 9.0),
        ("wait", 4.0, 7.0),
    }


def test_recorded_phases_stand_in_the_lane_of_who_did_them():
    spans = [
        TimelineSpan("run", "sample", 0.0, 1.0, 1, 1.0),
        TimelineSpan("run", "train", 1.0, 3.0, 1, 1.0),
        TimelineSpan("run", "publish", 3.0, 3.5, 1, 1.0),
        TimelineSpan("engine 0", "busy", 0.0, 3.0, 1, 0.25),
        TimelineSpan("environment words", "playing", 0.0, 1.0, 1, 4.0),
        TimelineSpan("environment words", "playing", 1.0, 2.0, 1, 8.0),
    ]
    told = [(one.lane, one.kind, one.value) for one in spans_from_record(spans)]
    assert told == [
        ("trainer", "wait", 1.0),
        ("trainer", "train", 1.0),
        ("publish", "publish", 1.0),
        ("engine 0", "busy", 0.25),
        ("environment words", "playing", 0.5),
        ("environment words", "playing", 1.0),
    ]


def test_bins_hold_the_same_seconds_as_the_stretches_they_stand_for():
    spans = [
        TimelineSpan(
            "trainer", "train" if place % 2 else "wait", place * 0.37, place * 0.37 + 0.3, None, 1 / (1 + place % 3)
        )
        for place in range(500)
    ]
    bins = bin_spans(spans, (0.0, 185.0), 40)
    for kind in ("train", "wait"):
        told, done = (
            sum((one.end - one.start) * one.value for one in many if one.kind == kind) for many in (bins, spans)
        )
        assert told == pytest.approx(done)
    assert all(0 < one.value <= 1 for one in bins)


def test_every_answer_forbids_foreign_scripts_styles_and_frames(client):
    for path in ("/", "/static/js/app.js", "/api/runs", "/api/nothing", "/api/run?run=nobody"):
        answer = client.get(path)
        for name, value in HEADERS.items():
            assert answer.headers[name] == value, path
    policy = HEADERS["Content-Security-Policy"]
    assert policy.startswith("default-src 'self'")
    assert "unsafe" not in policy


def test_the_page_has_neither_inline_code_nor_foreign_addresses():
    static = Path(paceline.observe.web.__file__).parent / "static"
    for path in static.rglob("*"):
        if path.suffix not in (".html", ".js", ".css"):
            continue
        text = path.read_text()
        assert "https://" not in text, path
        assert "http://" not in text.replace("http://www.w3.org/2000/svg", ""), path
        for way in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            " style=",
        ):
            assert way not in text, (path, way)
        if path.suffix == ".html":
            assert "<style" not in text
            assert all("src=" in tag for tag in text.split("<script")[1:])


def test_every_page_is_plugged_in_the_same_way():
    pages = Path(paceline.observe.web.__file__).parent / "static" / "js"
    named = re.findall(r'import \* as (\w+) from "\./pages/(\w+)\.js"', (pages / "pages.js").read_text())
    assert {file.stem for file in (pages / "pages").glob("*.js")} == {file for _, file in named}
    for name, file in named:
        text = (pages / "pages" / f"{file}.js").read_text()
        assert name == file
        assert re.search(r'^export const title = "[A-Z][a-z ]+";$', text, re.MULTILINE), file
        assert re.search(r"^export (async )?function render\(root, ", text, re.MULTILINE), file


def test_every_route_of_every_group_answers_below_api(client):
    routes = [route for group in ROUTE_MODULES for route in group.router.routes]
    paths = [route.path for route in routes if "GET" in route.methods]
    assert len(paths) == len(set(paths)) >= len(ROUTE_MODULES)
    for path in paths:
        if path != "/live":  # it never ends
            answer = client.get(f"/api{path}", params={"run": "twin-0"})
            wants_more = answer.status_code == 400 and answer.json()["error"].endswith("`: Field required")
            assert answer.status_code == 200 or wants_more, path


def test_without_a_key_only_loopback_names_are_answered(runs):
    for base in ("http://127.0.0.1:1", "http://localhost", "http://[::1]:8200"):
        assert _client(runs, base=base).get("/api/runs").status_code == 200, base
    for base in ("http://evil.example:8200", "http://127.0.0.1.evil.example", "http://10.0.0.4"):
        assert _client(runs, base=base).get("/api/runs").status_code == 403, base


def test_with_a_key_nothing_is_shown_without_it(runs):
    client = _client(runs, "s3cret", base="http://10.0.0.4")
    for path in ("/api/runs", "/api/live", "/api/run?run=late", "/api/runs?key=wrong"):
        answer = client.get(path)
        assert answer.status_code == 401
        assert "late" not in answer.text
    page = client.get("/")
    assert page.status_code == 401
    assert "password" in page.text
    for path in ("/static/js/app.js", "/static/js/../css/base.css/../../js/app.js"):
        assert client.get(path).status_code in (401, 404)
    assert client.get("/api/runs", headers={"Authorization": "Bearer s3cret"}).status_code == 200


def test_a_browser_that_gave_the_key_once_is_known_by_a_cookie_that_is_not_the_key(runs):
    client = _client(runs, "s3cret", base="http://10.0.0.4")
    answer = client.get("/?key=s3cret")
    assert answer.status_code == 303
    assert answer.headers["location"] == "./"
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    assert "s3cret" not in cookie
    named = cookie.partition(";")[0]
    assert client.get("/api/runs", headers={"Cookie": named}).status_code == 200
    assert client.get("/api/runs", headers={"Cookie": named[:-1] + "x"}).status_code == 401
    other = _client(runs, "other", base="http://10.0.0.4")
    assert other.get("/api/runs", headers={"Cookie": named}).status_code == 401


def test_a_key_in_a_strange_path_does_not_lead_to_another_host(runs):
    answer = _client(runs, "s3cret", base="http://10.0.0.4").get("//evil.example/?key=s3cret")
    assert answer.headers["location"] == "./", "relative to the path, whatever it is"


def test_options_of_nonsense_are_refused(runs):
    for root_path in ("paceline", "//evil.example", "/a?b", "/a b"):
        with pytest.raises(ConfigError, match="is no root path"):
            UiOptions(runs=str(runs), root_path=root_path)
    with pytest.raises(ConfigError, match="there is no folder"):
        UiOptions(runs=str(runs / "nowhere"))


def test_one_run_may_be_shown_alone(runs):
    assert list(_by_name(_client(runs / "late"))) == ["late"]


def test_an_empty_folder_is_an_empty_table(tmp_path):
    assert _client(tmp_path).get("/api/runs").json()["runs"] == []


def test_hostile_words_come_back_as_they_were_written(tmp_path):
    text = '<script>alert(1)</script>\u202e\u0000 & "quotes"'
    told = Told(tmp_path, "hostile").note(text).let_go()
    events = told.path / "events.jsonl"
    events.write_text(
        events.read_text() + json.dumps({"time": 1.0, "event": "note", "text": "lone \ud800 half"}) + "\n"
    )
    answer = _client(tmp_path).get("/api/run", params={"run": "hostile"})
    assert answer.headers["content-type"] == "application/json"
    told_texts = [event.get("text") for event in answer.json()["events"]]
    assert text in told_texts
    assert any("lone" in (one or "") for one in told_texts)


def test_text_that_is_no_unicode_is_shown_also_inside_of_a_dataclass():
    @dataclass
    class Inner:
        text: str

    assert json.loads(encode_json({"row": Inner("lone \ud800 half")})) == {"row": {"text": "lone ? half"}}


def test_the_command_says_where_it_listens_and_a_signal_ends_it_without_an_error(runs):
    command = [sys.executable, "-m", "paceline", "ui", str(runs), "--port", "0"]
    with Launched(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        told = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+/", told)
        assert found, told
        assert httpx.get(found[0], timeout=240).status_code == 200
        with httpx.stream("GET", f"{found[0]}api/live", timeout=240) as answer:
            next(answer.iter_lines())
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate(timeout=240)
    assert process.returncode == 0
    assert said == "paceline: stopped\n"


def test_the_command_refuses_with_a_sentence(runs, capsys):
    assert main(["ui", str(runs / "nowhere")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert main(["ui", str(runs), "--root-path", "paceline"]) == 2
    assert "write it as /paceline" in capsys.readouterr().err


def test_off_loopback_a_key_is_made_and_stands_in_the_address(runs):
    command = [sys.executable, "-m", "paceline", "ui", str(runs), "--port", "0", "--host", "0.0.0.0"]
    with Launched(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        found = re.search(r"http://0\.0\.0\.0:(\d+)/\?key=(\S{20,})$", process.stdout.readline().rstrip())
        assert found
        address = f"http://127.0.0.1:{found[1]}/api/runs"
        assert httpx.get(address, timeout=240).status_code == 401
        assert httpx.get(address, headers={"Authorization": f"Bearer {found[2]}"}, timeout=240).status_code == 200
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=240)


def test_a_root_path_is_served_whether_the_proxy_takes_it_off_or_not(runs):
    client = Client(build_app(runs, root_path="/tools/ui"))
    for prefix in ("", "/tools/ui"):
        page = client.get(f"{prefix}/")
        assert page.status_code == client.get(f"{prefix}/api/runs").status_code == 200
        linked = re.findall(r'(?:href|src)="([^"#]+)"', page.text)
        assert linked
        for path in linked:
            assert not path.startswith("/")
            assert client.get(f"{prefix}/{path}").status_code == 200, path
    assert client.get("/tools/ui").headers["location"] == "/tools/ui/"
    assert client.get("/tools/uix/api/runs").status_code == 404
    keyed = Client(build_app(runs, "s3cret", "/tools/ui"))
    assert keyed.get("/tools/ui/api/runs").status_code == 401
    assert keyed.get("/tools/ui/static/css/base.css").status_code == 200


def test_the_page_is_one_compressed_module_and_one_style_sheet_that_may_be_kept(client):
    files = re.findall(r'="(static/bundle-[0-9a-f]+\.(?:js|css))"', client.get("/").text)
    assert [path.rpartition(".")[2] for path in files] == ["css", "js"]
    for path in files:
        answer = client.get(f"/{path}")
        assert answer.headers["content-encoding"] == "gzip"
        assert "immutable" in answer.headers["cache-control"]
        assert not re.search(r"^(import|export)\b", answer.text, re.MULTILINE)
    assert client.get("/api/config", params={"run": "late"}).headers["content-encoding"] == "gzip"


def test_a_proxy_may_name_the_host_that_it_was_called_by(client):
    origin = {"Origin": "https://lab.example"}
    assert client.get("/api/runs", headers=origin).status_code == 403
    assert client.get("/api/runs", headers=origin | {"X-Forwarded-Host": "lab.example"}).status_code == 200


def test_importing_the_app_brings_neither_torch_nor_transformers():
    code = "import sys, paceline.observe.web; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    assert found.stdout.strip() == "[]"


@pytest.fixture
def address(tmp_path: Path):
    """A real server over an empty folder, for what streams."""
    with served(tmp_path) as here:
        yield here


def _events(lines):
    name, told = None, None
    for line in lines:
        if line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            told = json.loads(line[6:])
        elif not line and name:
            yield name, told
            name = None


def test_new_lines_are_pushed_and_so_is_a_death_that_wrote_nothing(tmp_path, address):
    told = Told(tmp_path, "alive").step(2)
    mark = httpx.get(f"{address}/api/metrics", params={"run": "alive"}, timeout=240).json()["mark"]
    with httpx.stream("GET", f"{address}/api/live", params={"run": "alive", "mark": mark}, timeout=240) as answer:
        events = _events(answer.iter_lines())
        assert next(one for name, one in events if name == "standing")["status"]["state"] == "running"
        told.step(1)
        pushed = next(one for name, one in events if name == "metrics")
        assert not pushed["fresh"]
        assert pushed["columns"]["step"] == [3]
        told.note("something happened")
        standing = next(one for name, one in events if name == "standing")
        assert standing["events"][-1]["text"] == "something happened"
        told.let_go()
        assert next(one for name, one in events if name == "status")["state"] == "crashed"
        shutil.rmtree(told.path)
        assert next(name for name, _ in events if name == "gone")


def test_the_table_hears_of_runs_that_come_and_go(tmp_path, address):
    with httpx.stream("GET", f"{address}/api/live", timeout=240) as answer:
        events = _events(answer.iter_lines())
        told = Told(tmp_path, "new").step(1)
        assert next(one for _, one in events)["changed"][0]["name"] == "new"
        told.let_go()
        while next(one for _, one in events)["changed"][0]["state"] != "crashed":
            pass
        shutil.rmtree(told.path)
        gone: list[str] = []
        while not gone:
            gone = next(one for _, one in events)["gone"]
        assert gone == ["new"]


def test_a_run_that_begins_while_its_row_is_made_is_running_with_all_its_tags_or_not_yet(tmp_path, monkeypatch):
    begun: list[Told] = []

    def config_before_it_begins(run: RunFolder) -> dict:
        found = read_config(run)
        if not begun:
            begun.append(Told(tmp_path, "young").step(1))
        return found

    read_config = RunFolder.config
    monkeypatch.setattr(RunFolder, "config", config_before_it_begins)
    run = RunFolder(RunDirectory(tmp_path / "young"))
    early, late = table_row("young", run, []), table_row("young", run, [])
    begun[0].let_go()
    assert (early["state"], early["tags"]) != ("running", [])
    assert late["state"] == "running"
    assert late["tags"]
