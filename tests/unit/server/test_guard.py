"""Which callers a server without a key obeys: programs on this machine, and no web page."""

from types import SimpleNamespace

import pytest
from starlette.testclient import TestClient

from paceline.observe.web.app import build_app as build_ui
from paceline.rollout.recording import RecordingServer
from paceline.server.app import ROUTES, build_app

CONTROL = ["/adapters/load", "/pause", "/resume", "/sleep", "/wake"]
CONTROL += [f"/weights/{way}" for way in ("load", "upload", "delta", "group", "receive")]


class Obeyed(Exception):
    """A call reached the engine."""


class Untouchable:
    """An engine that must not be asked anything."""

    def __getattr__(self, name):
        raise Obeyed(name)


def client(key=None, peers=("127.0.0.1",), base="http://127.0.0.1:8000"):
    app = build_app(Untouchable(), None, [], name="m", api_key=key, max_body_bytes=1 << 20)
    app.state.service = SimpleNamespace(engine=Untouchable(), peers=frozenset(peers), joining=False, receiver=None)
    return TestClient(app, base)


def test_control_calls_are_these():
    assert {route.path for route in ROUTES if route.control} == set(CONTROL)


@pytest.mark.parametrize("path", CONTROL)
def test_a_control_call_needs_the_key_also_on_loopback(path):
    keyless = client().post(path, json={})
    assert (keyless.status_code, keyless.json()["error"]["code"]) == (403, "needs_api_key")
    with_key = client("right")
    assert with_key.post(path, json={}).status_code == 401
    assert with_key.post(path, json={}, headers={"Authorization": "Bearer wrong"}).status_code == 401


def test_a_control_call_with_the_key_is_obeyed():
    with pytest.raises(Obeyed, match="pause"):
        client("right").post("/pause", headers={"Authorization": "Bearer right"})


FOREIGN = ["https://page.example", "http://localhost:3000", "null", "http://127.0.0.1:8001", "file://"]


@pytest.mark.parametrize("origin", FOREIGN)
@pytest.mark.parametrize("path", ["/v1/models", "/health", "/pause", "/v1/completions"])
def test_a_web_page_of_another_origin_is_refused(origin, path):
    answer = client().request("GET", path, headers={"Origin": origin})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "foreign_caller")


def test_a_page_of_the_server_itself_may_call():
    answer = client().get("/nowhere", headers={"Origin": "http://127.0.0.1:8000"})
    assert answer.status_code == 404


@pytest.mark.parametrize("host", ["rebound.example", "rebound.example:8000", "127.0.0.1.nip.io", "", "[::1"])
def test_a_name_that_was_pointed_at_loopback_is_refused_without_a_key(host):
    assert client().get("/nowhere", headers={"Host": host}).status_code == 403
    assert client("right").get("/nowhere", headers={"Host": host}).status_code == 401


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "[::1]:8000", "127.8.8.8"])
def test_loopback_has_several_names(host):
    assert client().get("/nowhere", headers={"Host": host}).status_code == 404


def test_a_group_meets_only_at_addresses_named_at_the_start():
    body = {"address": "10.9.8.7", "port": 22, "world": 2, "rank": 1}
    answer = client("right").post("/weights/group", json=body, headers={"Authorization": "Bearer right"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (403, "address")


def test_the_recording_address_is_not_for_web_pages():
    app = TestClient(RecordingServer()._app(), "http://agent-host:9000")
    refused = app.get("/some-key/v1/models", headers={"Origin": "https://page.example"})
    assert refused.status_code == 403
    assert app.get("/some-key/v1/models").status_code == 410


def test_the_ui_shows_no_run_whose_files_are_links_to_elsewhere(tmp_path):
    (secret := tmp_path / "secret").write_text("root:x:0")
    run = tmp_path / "runs" / "x"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("{}\n")
    (run / "config.toml").write_text("steps = 1\n")
    page = TestClient(build_ui(tmp_path / "runs"), "http://127.0.0.1:8200")
    assert "x" in page.get("/api/runs").text
    (run / "config.toml").unlink()
    (run / "config.toml").symlink_to(secret)
    answer = page.get("/api/config", params={"run": "x"})
    assert answer.status_code == 403
    assert "`config.toml` is a link that leads out of the run" in answer.json()["error"]
    assert "root:x" not in page.get("/api/runs").text
    (run / "config.toml").unlink()
    (run / "real.toml").write_text("steps = 1\n")
    (run / "config.toml").symlink_to("real.toml")
    (tmp_path / "disk").mkdir()
    (run / "checkpoints").symlink_to(tmp_path / "disk")
    assert page.get("/api/config", params={"run": "x"}).status_code == 200


@pytest.mark.parametrize("origin", ["https://page.example", "null"])
def test_the_ui_is_not_for_other_pages(tmp_path, origin):
    page = TestClient(build_ui(tmp_path), "http://127.0.0.1:8200")
    assert page.get("/api/runs", headers={"Origin": origin}).status_code == 403
