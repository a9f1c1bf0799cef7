"""Whatever a client sends, the server answers as its OpenAPI document says and never with a 5xx.

The suite makes a few hundred calls; PACELINE_FUZZ_CALLS=2000 makes as many.
"""

import os
from collections import Counter

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from live_server import served
from schemathesis.generation import GenerationMode

from paceline.server.app import ROUTES

CALLS = int(os.environ.get("PACELINE_FUZZ_CALLS", "300"))
FUZZED = [route for route in ROUTES if route.path not in ("/pause", "/sleep", "/weights/group")]
"""Not the two that hold up all the others, nor the one that calls addresses it is given."""
BODIES = [route for route in FUZZED if route.body]
CHECKS = [
    schemathesis.checks.not_a_server_error,
    schemathesis.checks.status_code_conformance,
    schemathesis.checks.content_type_conformance,
    schemathesis.checks.response_schema_conformance,
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    with served("--engine.max_context", "48", "--engine.max_running", "64", "--allow", str(folder), key="k") as running:
        yield running


@pytest.fixture(scope="module")
def schema(server):
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json", headers=server.bearer)


seen: Counter[int] = Counter()
FRAGILE = (
    "model",
    "regex",
    "response_format",
    "tool_choice",
    "top_logprobs",
    "stream_options",
    "suffix",
    "stop_token_ids",
)


def tame(body):
    """Every other valid body without what is nearly always refused, so that many reach the engine."""
    if isinstance(body, dict) and len(repr(body)) % 2:
        body = {key: value for key, value in body.items() if key not in FRAGILE}
        if isinstance(body.get("prompt"), list | str):
            body["prompt"] = "copy: abc"
        if isinstance(body.get("token_ids"), list):
            body["token_ids"] = [[token % 103 for token in ids][:48] for ids in body["token_ids"]]
    return body


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["valid", "invalid"])
@pytest.mark.parametrize("route", FUZZED, ids=lambda route: route.path)
def test_the_server_keeps_its_word(server, schema, route, mode):
    if route.body is None and mode is GenerationMode.NEGATIVE:
        pytest.skip("nothing to get wrong")
    operation = schema[route.path][route.method]
    calls = max(1, CALLS // (2 * len(BODIES))) if route.body else 2

    @settings(
        max_examples=calls,
        deadline=None,
        database=None,
        derandomize=CALLS < 1000,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def call(case):
        if mode is GenerationMode.POSITIVE:
            case.body = tame(case.body)
        response = case.call(timeout=240, headers=server.bearer)
        seen[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    call()
    assert server.process.poll() is None


def test_afterwards_the_server_is_as_it_was(server):
    print("answers by status:", dict(seen))
    assert max(seen) < 500
    assert seen[200] > 0
    assert seen[400] > 0
    assert server.idle()
    assert server.get("/health").status_code == 200
    answer = server.post("/v1/completions", {"prompt": "copy: abc", "max_tokens": 4, "flat": True})
    assert answer.status_code == 200
