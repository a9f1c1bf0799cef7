"""Other people's clients, unchanged, against `paceline serve` and the recording URL: `make clients`."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from live_server import MODEL, served

from paceline.clients import Pool
from paceline.config import RunConfig
from paceline.config.inference import SamplingConfig
from paceline.engine import Completion
from paceline.model import load_tokenizer
from paceline.rollout import RecordingServer, Renderer, SamplingClient, Seat
from paceline.runtime.serving import embedded_engine

os.environ.setdefault("OPENAI_AGENTS_DISABLE_TRACING", "1")
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
CALL = '<tool_call>{"name":"add","arguments":{"a":1,"b":2}}</tool_call>'


@pytest.fixture(scope="module")
def server():
    with served("--engine.max_context", "2048") as running:
        yield running


class Script:
    """An engine that calls a tool first and then answers: a tiny model would not."""

    busy_seconds = 0.0

    def __init__(self, tokenizer, end: int, *texts: str) -> None:
        self.replies = [[*tokenizer.encode(text, add_special_tokens=False), end] for text in texts]
        self.calls = 0

    async def generate(self, request, listener=None) -> Completion:
        ids = self.replies[min(self.calls, len(self.replies) - 1)]
        self.calls += 1
        return Completion(token_ids=ids, logprobs=[-1.0] * len(ids), versions=[0] * len(ids), finish="stop")


@pytest.fixture(scope="module")
def model():
    config = RunConfig.model_validate({"model": {"name": MODEL}, "device": "cpu"})
    with embedded_engine(config) as (_, ends):
        yield load_tokenizer(config.model), ends


@pytest.fixture
def recorded(model):
    """Runs an agent on a recording URL whose policy says these texts; the seat that recorded it."""
    tokenizer, ends = model

    def run(agent, *texts: str) -> tuple[object, Seat]:
        async def story():
            recorder = RecordingServer()
            pool = Pool([Script(tokenizer, min(ends), *texts)])
            client = SamplingClient(
                pool, Renderer(tokenizer, ends), SamplingConfig(max_tokens=64), frozenset(ends), recorder
            )
            seat = Seat(client, (1, 0, 0, 0), 0)
            try:
                return await agent(await seat.base_url()), seat
            finally:
                await recorder.close()

        return asyncio.run(story())

    return run


def goes_on(seat: Seat) -> bool:
    """Whether each turn goes on from the recorded tokens of the one before."""
    pairs = zip(seat.turns, seat.turns[1:], strict=False)
    return all(
        after.prompt_ids[: len(b.prompt_ids + b.completion_ids)] == b.prompt_ids + b.completion_ids
        for b, after in pairs
    )


# -- LangChain and LangGraph ------------------------------------------------------------------------------------------


def test_langchain_asks_the_server(server):
    langchain = pytest.importorskip("langchain_openai")
    for responses in (False, True):
        llm = langchain.ChatOpenAI(
            base_url=f"{server.url}/v1", api_key="-", model=MODEL, max_tokens=8, use_responses_api=responses
        )
        assert llm.invoke("reverse: planet").usage_metadata["output_tokens"] > 0
        assert list(llm.stream("reverse: planet"))


@pytest.mark.parametrize("responses", [False, True])
def test_langgraph_calls_a_tool_on_the_recording_url(recorded, responses):
    langchain = pytest.importorskip("langchain_openai")
    prebuilt = pytest.importorskip("langgraph.prebuilt")

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    async def agent(url: str):
        llm = langchain.ChatOpenAI(base_url=url, api_key="-", model="policy", use_responses_api=responses)
        graph = prebuilt.create_react_agent(
            llm.bind_tools([add], tool_choice="required", parallel_tool_calls=False), [add]
        )
        return await graph.ainvoke({"messages": [("user", "add 1 and 2")]})

    answer, seat = recorded(agent, CALL, "three")
    assert answer["messages"][-1].text == "three"
    assert [turn.text for turn in seat.turns] == [CALL, "three"]
    assert goes_on(seat)
    assert {"tool_choice", "parallel_tool_calls"} <= seat.overrides.keys()


# -- OpenAI's agents SDK ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("api", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_agents_sdk_calls_a_tool_on_the_recording_url(recorded, api, stream):
    agents = pytest.importorskip("agents")
    import openai

    @agents.function_tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    async def agent(url: str):
        agents.set_tracing_disabled(True)
        client = openai.AsyncOpenAI(base_url=url, api_key="-")
        settings = agents.ModelSettings(tool_choice="required", parallel_tool_calls=False)
        model = getattr(agents, api)(model="policy", openai_client=client)
        adder = agents.Agent(name="adder", instructions="be brief", model=model, tools=[add], model_settings=settings)
        if not stream:
            return (await agents.Runner.run(adder, "add 1 and 2")).final_output
        running = agents.Runner.run_streamed(adder, "add 1 and 2")
        async for _ in running.stream_events():
            pass
        return running.final_output

    answer, seat = recorded(agent, CALL, "three")
    assert answer == "three"
    assert [turn.text for turn in seat.turns] == [CALL, "three"]
    assert goes_on(seat)


# -- smolagents -------------------------------------------------------------------------------------------------------


def test_smolagents_calls_tools_on_the_recording_url(recorded):
    smolagents = pytest.importorskip("smolagents")

    @smolagents.tool
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: one number
            b: the other
        """
        return a + b

    def work(url: str):
        model = smolagents.OpenAIServerModel("policy", api_base=url, api_key="-")
        return smolagents.ToolCallingAgent([add], model, max_steps=3, verbosity_level=0).run("add 1 and 2")

    final = '<tool_call>{"name":"final_answer","arguments":{"answer":"three"}}</tool_call>'
    answer, seat = recorded(lambda url: asyncio.to_thread(work, url), CALL, final)
    assert answer == "three"
    assert [turn.text for turn in seat.turns] == [CALL, final]
    assert seat.overrides["tool_choice"] == 2


# -- LiteLLM and guidellm ---------------------------------------------------------------------------------------------


def test_litellm_asks_the_server(server):
    litellm = pytest.importorskip("litellm")
    ask = {"model": f"openai/{MODEL}", "api_base": f"{server.url}/v1", "api_key": "-"}
    messages = [{"role": "user", "content": "reverse: planet"}]
    assert litellm.completion(**ask, messages=messages, max_tokens=4).usage.completion_tokens > 0
    assert list(litellm.completion(**ask, messages=messages, max_tokens=4, stream=True))
    assert litellm.responses(**ask, input="reverse: planet", max_output_tokens=4).usage.output_tokens > 0


def test_guidellm_measures_streams(server, tmp_path):
    pytest.importorskip("guidellm")
    words = ("ab", "cd", "ef", "gh")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"copy: {word}"}) + "\n" for word in words))
    command = [sys.executable, "-P", "-m", "guidellm", "run", "--disable-console", "--profile", "kind=synchronous"]
    command += ["--backend", f"kind=openai_http,target={server.url},model={MODEL}"]
    command += ["--constraint", f"kind=max_requests,count={len(words)}"]
    command += ["--data", "kind=json_file,path=prompts.jsonl", "--output", "kind=json,path=out.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (benchmark,) = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    ended = {end: len(benchmark["requests"][end]) for end in ("successful", "errored", "incomplete")}
    assert ended == {"successful": len(words), "errored": 0, "incomplete": 0}
