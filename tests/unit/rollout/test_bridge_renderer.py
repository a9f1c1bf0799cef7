"""Laws of `renderers` behind our own interface, with real tokenizers: `make doors` runs them, the package is needed."""

import importlib.util
from dataclasses import replace

import pytest

from conftest import ENDS
from paceline.data import Ticket
from paceline.rollout import Renderer, RenderError, Rollout, Turn, assemble

if importlib.util.find_spec("renderers") is None:
    pytest.skip("needs renderers, which is not installed here", allow_module_level=True)

from paceline.rollout.bridge_renderer import BridgeRenderer, make_renderer

MODELS = {"qwen3": "Qwen/Qwen3-8B", "deepseek_v3": "deepseek-ai/DeepSeek-V3"}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
ASKED = {"role": "user", "content": "what is\n\n1+1? "}
SYSTEM = {"role": "system", "content": "Be brief."}
THOUGHT = "<think>\nhm\n</think>\n\ntwo"


@pytest.fixture(scope="module", params=MODELS)
def family(request, load):
    return Family(request.param, load(request.param))


class Family:
    def __init__(self, name, tokenizer):
        self.name, self.tokenizer = name, tokenizer
        self.end = tokenizer.convert_tokens_to_ids(ENDS[name])
        self.plain = Renderer(tokenizer, [self.end])

    def known(self, **options):
        return make_renderer(self.tokenizer, [self.end], "renderers", MODELS[self.name], **options)

    def turn(self, renderer, messages, text, *, finish="stop", tools=None, pieces=None):
        """As if sampled: letter by letter if `pieces`, which no tokenizer would write."""
        parts = list(text) if pieces else [text]
        said = [token for part in parts for token in self.tokenizer.encode(part, add_special_tokens=False)]
        said += [self.end] if finish == "stop" else []
        return Turn(
            prompt_ids=renderer.prompt(messages, tools),
            completion_ids=said,
            logprobs=[0.0] * len(said),
            versions=[0] * len(said),
            finish=finish,
            temperature=1.0,
            messages=messages,
            tools=tools,
            text=renderer.reply(said),
        )


def recorded(turn):
    return [*turn.prompt_ids, *turn.completion_ids]


@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("messages", [[ASKED], [SYSTEM, ASKED], [ASKED, {"role": "assistant", "content": "2"}, ASKED]])
def test_a_first_prompt_is_token_for_token_what_the_template_writes(family, messages, tools):
    known = family.known()
    template = family.tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert known.prompt(messages, tools) == template
    assert known._program.render_ids(messages, tools=tools, add_generation_prompt=True) == template


@pytest.mark.parametrize("after", [ASKED, {"role": "tool", "tool_call_id": "1", "name": "add", "content": "2\n"}])
@pytest.mark.parametrize("pieces", [False, True])
def test_where_both_go_on_from_a_reply_they_go_on_alike(family, after, pieces):
    known = family.known()
    turn = family.turn(known, [SYSTEM, ASKED], "two é", tools=[TOOL], pieces=pieces)
    whole = [*turn.messages, turn.message, after]
    ours = family.plain.render_continuation(turn, whole).ids
    assert known.render_continuation(turn, whole).ids == ours
    assert ours[: len(recorded(turn))] == recorded(turn)


def test_a_reply_that_was_cut_short_stays_in_the_sample_the_template_would_break(family):
    """DeepSeek goes on after any reply; Qwen 3 within the work on one question, so a tool speaks here."""
    known = family.known()
    first = family.turn(known, [ASKED], "tw", finish="length", tools=[TOOL], pieces=True)
    told = [*first.messages, first.message, {"role": "tool", "tool_call_id": "1", "name": "add", "content": "2"}]
    assert family.plain.render_continuation(first, told).ids[: len(recorded(first))] != recorded(first)
    prompt = known.render_continuation(first, told)
    assert prompt.ids[: len(recorded(first))] == recorded(first)
    assert prompt.ids[len(recorded(first))] == family.end
    second = replace(family.turn(known, told, "o", tools=[TOOL]), prompt_ids=prompt.ids)
    (sample,) = assemble(Rollout(ticket=Ticket(0, "env", 0, 0, 0), member=0, turns=[first, second]))
    assert int(sample.loss_mask.sum()) == len(first.completion_ids) + len(second.completion_ids)
    # And on from there, by the template's rule too, although the package wrote the last prompt.
    more = [*told, second.message, ASKED]
    assert known.render_continuation(second, more, prompt.text).ids[: len(recorded(second))] == recorded(second)


def test_thoughts_that_the_template_drops_are_kept_on_request_only(load):
    family = Family("qwen3", load("qwen3"))
    turn = family.turn(family.plain, [ASKED], THOUGHT)
    whole = [ASKED, turn.message, ASKED]
    template = family.plain.render_continuation(turn, whole).ids
    assert "hm" not in family.tokenizer.decode(template)
    assert family.known().render_continuation(turn, whole).ids == template
    kept = family.known(keep_thoughts=True).render_continuation(turn, whole).ids
    assert kept[: len(recorded(turn))] == recorded(turn)
    # What follows is what the template writes after a reply without thoughts.
    plain = family.turn(family.plain, [ASKED], "two")
    after = family.plain.render_continuation(plain, [ASKED, plain.message, ASKED]).ids
    assert kept[len(recorded(turn)) :] == after[len(recorded(plain)) :]


def test_a_thought_the_package_went_on_from_is_dropped_when_the_template_drops_it(load):
    """Within the work on one question thoughts stay; the next question must not find them in what goes on."""
    family = Family("qwen3", load("qwen3"))
    known = family.known()
    first = family.turn(known, [ASKED], THOUGHT, tools=[TOOL])
    told = [ASKED, first.message, {"role": "tool", "tool_call_id": "1", "name": "add", "content": "2"}]
    prompt = known.render_continuation(first, told)
    assert prompt.ids[: len(recorded(first))] == recorded(first)
    second = replace(family.turn(known, told, "two", tools=[TOOL]), prompt_ids=prompt.ids)
    more = [*told, second.message, ASKED]
    assert known.render_continuation(second, more, prompt.text).ids == family.plain.prompt(more, [TOOL])


def test_a_model_the_package_does_not_know_is_written_by_its_template(load):
    tokenizer = load("qwen2_5")
    for model in (None, "Qwen/Qwen2.5-0.5B-Instruct", "default", "Qwen/Qwen3-8B"):
        assert type(make_renderer(tokenizer, [1], model=model)) is Renderer
    with pytest.raises(RenderError, match=r"cannot write for .*: it does not know the model"):
        make_renderer(tokenizer, [1], "renderers", "Qwen/Qwen2.5-0.5B-Instruct")
    with pytest.raises(RenderError, match=r"it refuses this tokenizer .*tool_response"):
        make_renderer(tokenizer, [1], "renderers", "qwen3")


def test_a_template_that_was_changed_is_noticed(load):
    """A fine-tune keeps its name and tokens but not always its template."""
    tokenizer = load("qwen3")
    ends = [tokenizer.eos_token_id]
    assert type(make_renderer(tokenizer, ends, model="qwen3")) is BridgeRenderer
    shipped = tokenizer.chat_template
    for before, after, says in (
        ("<|im_start|>assistant", "<|im_start|>model", "differ in the prompt of 1 messages without tools"),
        ("<tool_response>", "<tool_result>", "differ in what follows a reply with tool"),
    ):
        assert before in shipped
        tokenizer.chat_template = shipped.replace(before, after)
        assert type(make_renderer(tokenizer, ends, model="qwen3")) is Renderer
        with pytest.raises(RenderError, match=says):
            make_renderer(tokenizer, ends, "renderers", "qwen3")
        with pytest.raises(RenderError, match=says):
            make_renderer(tokenizer, ends, model="qwen3", keep_thoughts=True)


def test_a_choice_that_contradicts_itself_is_one_sentence(load):
    with pytest.raises(RenderError, match="keep_thoughts needs"):
        make_renderer(load("quickstart"), [1], "template", keep_thoughts=True)
