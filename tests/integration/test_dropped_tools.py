"""Tools that a model's chat template does not write are refused before anything trains."""

import logging

import httpx
import pytest

from paceline.config import EvalConfig, RunConfig
from paceline.config.env import CalculatorConfig, CustomEnvConfig
from paceline.config.inference import SamplingConfig
from paceline.config.model import ModelConfig
from paceline.envs import Environment, Outcome
from paceline.model import load_tokenizer
from paceline.rollout.render import ToolsDropped
from paceline.runtime import train
from paceline.runtime.local import renderer_of

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
ASKED = [{"role": "user", "content": "so?"}]
WRITES = "{%- if tools -%}<|system|>{{ tools | tojson }}<|end|>{%- endif -%}"
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|system|>You are helpful"
    "<|end|>' }}{% endif %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""As SmolLM2's template does it, in the quickstart's words."""
SENTENCE = "the model's chat template ignores `tools`: the environment offers `look`"


@pytest.fixture(params=["quickstart", "smollm2"])
def model(request, tmp_path) -> ModelConfig:
    """Two templates that write nothing of tools."""
    if request.param == "quickstart":
        return ModelConfig()
    (tmp_path / "smollm2.jinja").write_text(SMOLLM2)
    return ModelConfig(chat_template=str(tmp_path / "smollm2.jinja"))


def renderer(model: ModelConfig, **changes):
    model = model.model_copy(update=changes)
    tokenizer = load_tokenizer(model)
    return renderer_of(tokenizer, [tokenizer.eos_token_id], model)


def test_dropped_tools_are_refused_unless_that_is_allowed(model, tmp_path, caplog):
    refusing = renderer(model)
    with pytest.raises(ToolsDropped, match=f"{SENTENCE}.*model.allow_dropped_tools = true"):
        refusing.prompt(ASKED, [TOOL])
    assert refusing.prompt(ASKED), "without tools there is nothing to refuse"
    assert renderer(model, allow_dropped_tools=True).prompt(ASKED, [TOOL]) == refusing.prompt(ASKED)

    (tmp_path / "writes.jinja").write_text(WRITES + SMOLLM2)
    written = {"chat_template": str(tmp_path / "writes.jinja")}
    assert len(renderer(model, **written).prompt(ASKED, [TOOL])) > len(refusing.prompt(ASKED))

    warning = renderer_of(load_tokenizer(model), [1], model, "warn")
    with caplog.at_level(logging.WARNING):
        assert warning.prompt(ASKED, [TOOL]) == warning.prompt([*ASKED], [TOOL, TOOL])
    assert [SENTENCE in record.message for record in caplog.records] == [True]


class Agent(Environment):
    """Knows a URL only, and hears of what is refused there as an HTTP error."""

    def examples(self, split):
        return [{"row": number} for number in range(8)]

    async def play(self, example, seats):
        async with httpx.AsyncClient(base_url=await seats["policy"].base_url()) as client:
            answer = await client.post("chat/completions", json={"model": "m", "messages": ASKED, "tools": [TOOL]})
            answer.raise_for_status()
        return Outcome.solo(1.0)


@pytest.mark.parametrize("speaks", ["seat", "url"])
def test_a_run_is_refused_with_the_fix_before_a_token_is_sampled(tmp_path, speaks):
    agent = CustomEnvConfig(name="agent", import_path="x:y")
    env, given = (CalculatorConfig(name="calculator"), None) if speaks == "seat" else (agent, {"agent": Agent()})
    keys = {
        "runs": str(tmp_path),
        "steps": 1,
        "batch_size": 4,
        "group_size": 2,
        "eval": EvalConfig(every=0),
        "env": [env],
    }
    keys["filters"] = {"zero_advantage": False}  # so that a run that is not refused ends
    done = train(RunConfig(**keys, sampling=SamplingConfig(max_tokens=4), device="cpu"), environments=given)
    assert done.outcome.status == "failed"
    assert isinstance(done.error, ToolsDropped)
    assert "the prompt is the same without. Name a template that writes them with model.chat_template" in str(
        done.error
    )
    assert done.metrics == []
