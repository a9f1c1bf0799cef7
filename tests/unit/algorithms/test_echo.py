"""Laws of learning from what one is told: message bodies and nothing else, once each, by role."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import ENDS
from paceline.algorithms import AlgorithmError, build_algorithm
from paceline.config.algorithm import EchoConfig, GRPOConfig
from paceline.config.base import UserCode
from paceline.orchestrator.admission import has_no_signal
from paceline.rollout import Renderer, RenderError, assemble
from rule_scorer import Oracle, context, grouped, spoken

laws = settings(max_examples=15, deadline=None)
WORDS = st.text("ab c:1\n", min_size=1, max_size=8)


@pytest.fixture(scope="module", params=list(ENDS))
def renderer(request, load):
    tokenizer = load(request.param)
    return Renderer(tokenizer, [tokenizer.convert_tokens_to_ids(ENDS[request.param])])


@pytest.fixture(scope="module")
def quick(load):
    return Renderer(load("quickstart"), [6])


def echo(renderer, **settings):
    algorithm = build_algorithm(EchoConfig(**settings))
    asyncio.run(algorithm.begin(context(renderer, Oracle())))
    return algorithm


def observed(algorithm, rollout):
    algorithm.observe(rollout)
    return rollout


def words_of(renderer, sample, alpha: float) -> str:
    """What the tokens of this weight spell."""
    if sample.ce_weights is None:
        return ""
    return renderer.decode(sample.token_ids[sample.ce_weights == np.float32(alpha)].tolist())


@laws
@given(st.lists(st.text('abé 漢1:{}"\n', max_size=12), min_size=1, max_size=3), st.data())
def test_only_the_words_of_the_named_roles_train_whatever_the_template(renderer, told, data):
    asked, alphas = data.draw(st.text("xyz?", min_size=1, max_size=5)), {"user": 0.25, "tool": 0.5}
    named = data.draw(st.sets(st.sampled_from(["user", "tool"]), min_size=1))
    algorithm = echo(renderer, roles={role: alphas[role] for role in named})
    messages = [{"role": "user", "content": asked}, *({"role": "tool", "content": text} for text in told)]
    rollout = spoken(renderer, *messages, replies=["ok"] * (len(told) + 1))
    observed(algorithm, rollout)
    seen = "".join(words_of(renderer, sample, alphas["tool"]) for sample in rollout.samples)
    if "tool" not in named:
        assert seen == ""
    else:
        # A token that reaches over the edge of a message belongs to the template, so words may lack their ends.
        assert _within(seen, told)
    heard = "".join(words_of(renderer, sample, alphas["user"]) for sample in rollout.samples)
    assert heard in asked if "user" in named else heard == ""
    for sample in rollout.samples:
        if sample.ce_weights is not None:
            assert not sample.ce_weights[sample.loss_mask].any()


def _within(seen: str, told: list[str]) -> bool:
    """Whether a text is made of letters of these, in order."""
    rest = iter("".join(told))
    return all(letter in rest for letter in seen)


def test_plain_words_are_found_whole_in_every_template(renderer):
    told = {"system": "Be brief, now.", "user": "What is up?", "tool": '{"x": 42} found\nmore'}
    alphas = {"system": 0.125, "user": 0.25, "tool": 0.5}
    messages = [{"role": role, "content": text} for role, text in told.items()]
    rollout = spoken(renderer, *messages, replies=["I look", "fine"])
    observed(echo(renderer, roles=alphas), rollout)
    (sample,) = rollout.samples
    assert {role: words_of(renderer, sample, alpha) for role, alpha in alphas.items()} == told
    assert rollout.metrics == {}


@laws
@given(WORDS, WORDS, WORDS)
def test_every_word_trains_where_each_letter_is_a_token(quick, asked, first, second):
    messages = [{"role": "user", "content": asked}] + [{"role": "tool", "content": text} for text in (first, second)]
    rollout = spoken(quick, *messages, replies=["a", "b", "c"])
    algorithm = echo(quick, roles={"user": 1.0, "tool": 0.5})
    observed(algorithm, rollout)
    (sample,) = rollout.samples
    assert words_of(quick, sample, 1.0) == asked
    assert words_of(quick, sample, 0.5) == first + second


def test_the_rewards_credit_is_grpos(quick):
    group, other = (
        grouped(
            *(
                spoken(
                    quick, {"role": "user", "content": "go"}, {"role": "tool", "content": "ab"}, replies=["a", "b"],
                    member=m, reward=r,
                )
                for m, r in enumerate([0.0, 1.0, 0.25])
            )
        )
        for _ in range(2)
    )  # fmt: skip
    algorithm = echo(quick, std="population")
    for rollout in group.rollouts:
        observed(algorithm, rollout)
    algorithm.assign(group)
    build_algorithm(GRPOConfig(std="population")).assign(other)
    for ours, theirs in zip(group.samples(), other.samples(), strict=True):
        np.testing.assert_array_equal(ours.advantages, theirs.advantages)
        assert (ours.rl_weights, ours.teacher_kl_weights) == (None, None)


def test_turns_of_another_model_train_what_can_be_read_of_them(quick):
    """Bare tokens, then messages; a branch from there; and messages that no template writes."""
    rollout = spoken(quick, {"role": "user", "content": "go"}, {"role": "tool", "content": "ab"}, replies=["a", "b"])
    first, second = rollout.turns
    branch = spoken(quick, {"role": "user", "content": "go"}, {"role": "tool", "content": "cd"}, replies=["a", "c"])
    strange = replace(second, prompt_ids=[9, 9, 9], messages=[{"role": "tool", "content": [{"image": "x"}]}])
    rollout.turns = [replace(first, messages=None), second, branch.turns[1], strange]
    rollout.samples = assemble(rollout)
    observed(echo(quick, roles={"tool": 0.5}), rollout)
    assert [words_of(quick, sample, 0.5) for sample in rollout.samples] == ["ab", "cd", ""]
    quick_text = quick.text

    def refuse(messages, tools=None, reply=True):
        raise RenderError("no such role") if messages[0]["content"] == "?" else quick_text(messages, tools, reply)

    algorithm = echo(quick, roles={"tool": 0.5})
    rollout.turns = [replace(second, messages=[{"role": "nobody", "content": "?"}, {"role": "tool", "content": "ab"}])]
    rollout.samples = assemble(rollout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quick, "text", refuse)
        observed(algorithm, rollout)
    assert rollout.samples[0].ce_weights is None
    assert rollout.metrics["unattributed"] == 1.0


def test_equal_rewards_are_a_signal_only_where_something_was_told(quick):
    def group(*told):
        messages = [{"role": "user", "content": "go"}, *({"role": "tool", "content": text} for text in told)]
        return grouped(*(spoken(quick, *messages, replies=["a"] * (1 + len(told)), member=m) for m in range(2)))

    algorithm = echo(quick)
    for told, silent in (((), True), (("ab",), False), (("",), True)):
        judged = group(*told)
        for rollout in judged.rollouts:
            observed(algorithm, rollout)
        algorithm.assign(judged)
        assert has_no_signal(judged) == silent


def test_a_message_that_a_later_branch_repeats_trains_once(quick):
    rollout = spoken(
        quick, {"role": "user", "content": "go"}, {"role": "tool", "content": "abc"}, replies=["a", "b"]
    )  # fmt: skip
    again = spoken(
        quick, {"role": "user", "content": "go"}, {"role": "tool", "content": "abc"}, replies=["a", "c"]
    )  # fmt: skip
    rollout.turns += again.turns[1:]
    rollout.samples = assemble(rollout)
    assert len(rollout.samples) == 2
    observed(echo(quick), rollout)
    assert [words_of(quick, sample, 0.1) for sample in rollout.samples] == ["abc", ""]


def test_a_special_token_written_into_a_message_does_not_train(quick):
    rollout = spoken(
        quick, {"role": "user", "content": "go"}, {"role": "tool", "content": "a<|end|>b"}, replies=["a", "b"]
    )  # fmt: skip
    observed(echo(quick), rollout)
    assert "".join(words_of(quick, sample, 0.1) for sample in rollout.samples) == "ab"


# --- tools by name


def call(name: str, id: str | None = None) -> dict:
    return {"type": "function", "function": {"name": name, "arguments": {"q": "x"}}} | ({"id": id} if id else {})


def used(renderer, calls, *answers, replies=("ok",)):
    """A rollout in which tools were called and answered."""
    asks = {"role": "assistant", "content": "", "tool_calls": calls}
    tools = [{"role": "tool", **answer} for answer in answers]
    return spoken(renderer, {"role": "user", "content": "What is up?"}, asks, *tools, replies=list(replies))


def trained_words(renderer, rollout, *alphas: float) -> list[str]:
    return ["".join(words_of(renderer, sample, alpha) for sample in rollout.samples) for alpha in alphas]


def test_only_the_answers_of_the_named_tools_train_in_every_template(renderer):
    for name, words in (("search", "found: 42 stones"), ("python", "")):
        rollout = used(
            renderer, [call(name, "call_1abcd")], {"content": "found: 42 stones", "tool_call_id": "call_1abcd"}
        )
        observed(echo(renderer, roles={"tool": 0.5}, tools=["search"]), rollout)
        assert trained_words(renderer, rollout, 0.5) == [words]


@pytest.fixture(params=["quickstart", "qwen2_5", "qwen3"])
def parallel(request, load):
    """Renderers of templates that write several calls at once."""
    tokenizer = load(request.param)
    return Renderer(tokenizer, [tokenizer.convert_tokens_to_ids(ENDS[request.param])])


FOUND, RAN = "found: 42 stones", "it gave: 7"
WAYS = {
    "by id, in any order": (
        [call("search", "a"), call("python", "b")],
        [{"content": RAN, "tool_call_id": "b"}, {"content": FOUND, "tool_call_id": "a"}],
    ),
    "by name": ([], [{"content": FOUND, "name": "search"}, {"content": RAN, "name": "python"}]),
    "in order": ([call("search"), call("python")], [{"content": FOUND}, {"content": RAN}]),
}


@pytest.mark.parametrize(("calls", "answers"), WAYS.values(), ids=WAYS)
def test_parallel_calls_train_each_with_its_tools_weight(parallel, calls, answers):
    rollout = used(parallel, calls, *answers)
    observed(echo(parallel, tools={"search": 0.25, "python": 0.5}), rollout)
    assert trained_words(parallel, rollout, 0.25, 0.5, 0.1) == [FOUND, RAN, ""]
    rollout = used(parallel, calls, *answers)
    observed(echo(parallel, roles={"user": 1.0}, tools={"python": 0.5}), rollout)
    assert trained_words(parallel, rollout, 1.0, 0.5) == ["What is up?", RAN]


def test_later_turns_of_an_episode_are_filtered_alike(quick):
    """What was said and answered turn by turn, and each message once."""
    rollout = spoken(
        quick,
        {"role": "user", "content": "go"},
        {"role": "tool", "content": "ab", "name": "search"},
        {"role": "tool", "content": "cd", "name": "python"},
        replies=["x", "y", "z"],
    )
    observed(echo(quick, roles={"tool": 0.5}, tools=["python"]), rollout)
    assert trained_words(quick, rollout, 0.5) == ["cd"]


@pytest.mark.parametrize(
    ("calls", "answer"),
    [
        # neither id nor call, the id of no call, and fewer answers than calls
        ([], {"content": FOUND}),
        ([call("a", "1")], {"content": FOUND, "tool_call_id": "2"}),
        ([call("a"), call("b")], {"content": FOUND}),
    ],
)
def test_an_answer_that_names_no_tool_is_refused_with_what_to_add(quick, calls, answer):
    algorithm = echo(quick, tools=["search"])
    with pytest.raises(
        AlgorithmError, match=r"env `maze`, ticket 4.* message 2 of role `tool` names none: give it the"
    ):
        algorithm.observe(used(quick, calls, answer))
    observed(echo(quick), used(quick, calls, answer))  # without `tools` nothing needs a name


def test_a_tool_that_is_not_offered_is_told_of_once(quick, caplog):
    algorithm = echo(quick, tools=["serach", "python"])
    for _ in range(2):
        rollout = used(quick, [call("python")], {"content": RAN})
        offered = [{"type": "function", "function": {"name": name}} for name in ("search", "python")]
        rollout.turns = [replace(turn, tools=offered) for turn in rollout.turns]
        observed(algorithm, rollout)
    (record,) = caplog.records
    assert "no tool there is called `serach`; did you mean `search`?" in record.message
    assert "`python` and `search`" in record.message


# --- the user's filter


def keep_even(rollout, every: int = 2):
    return [[at % every == 0 for at in range(len(t.prompt_ids) + len(t.completion_ids))] for t in rollout.turns]


def one_short(rollout):
    return [mask[:-1] for mask in keep_even(rollout)]


def one_turn(rollout):
    return keep_even(rollout)[:1]


def nothing(rollout):
    return None


def told(quick):
    return spoken(
        quick, {"role": "user", "content": "go"}, {"role": "tool", "content": "abcdef"}, replies=["a", "b"], member=6
    )  # fmt: skip


def test_a_filter_keeps_what_it_marks(quick):
    whole, half = told(quick), told(quick)
    observed(echo(quick), whole)
    observed(echo(quick, filter=UserCode(import_path=f"{__name__}:keep_even", kwargs={"every": 2})), half)
    kept = np.where(np.arange(len(whole.samples[0])) % 2 == 0, whole.samples[0].ce_weights, 0)
    np.testing.assert_array_equal(half.samples[0].ce_weights, kept)
    assert kept.any()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("one_short", r"gave a mask of (\d+) for turn 1, which has (\d+) tokens; they must align"),
        ("one_turn", "gave 1 masks for 2 turns; they must align"),
        ("nothing", "gave None masks for 2 turns"),
    ],
)
def test_a_misaligned_mask_names_env_rollout_and_both_lengths(quick, name, sentence):
    algorithm = echo(quick, filter=UserCode(import_path=f"{__name__}:{name}"))
    with pytest.raises(AlgorithmError, match=rf"env `maze`, ticket 4, rollout 6: .*{name} {sentence}"):
        algorithm.observe(told(quick))


def test_a_role_the_template_does_not_write_is_refused_at_the_start(quick):
    with pytest.raises(AlgorithmError, match="echo cannot tell which tokens are the words of a `narrator` message"):
        echo(quick, roles={"narrator": 0.1})


def test_a_template_that_writes_words_twice_is_refused(load):
    tokenizer = load("quickstart")
    tokenizer.chat_template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ m.content }}<|end|>{% endfor %}"
    with pytest.raises(AlgorithmError, match="words of a `tool` message"):
        echo(Renderer(tokenizer, [6]))
