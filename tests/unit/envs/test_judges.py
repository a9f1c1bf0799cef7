"""Laws of judges: each question is asked once, a judge that fails is named, and grades add up to the reward."""

import asyncio
import threading

import pytest

from judge_server import in_turn, judge_server
from paceline.config.env import ReverseTextConfig
from paceline.config.inference import SamplingConfig
from paceline.envs import EnvError, JudgeFailed, Outcome, ReverseText
from paceline.envs.judges import JudgeService, verdict_metrics
from paceline.errors import PacelineError
from paceline.rollout import SessionMap
from paceline.rollout.endpoint import Endpoint

ROW = {"answer": "cba", "n": 3}
ASKED = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Reverse abc."}]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr("paceline.config.filters.FIRST_PAUSE", 0.01)


def section(url, *judges, **more):
    """An environment's section with these judges, all of them at one address unless they say otherwise."""
    model = {"name": "judge", "base_url": url, "retries": 1}
    given = [{"name": f"judge{at}", "prompt": "{reply}", **one} for at, one in enumerate(judges)]
    given = [one | {"model": model | one.get("model", {})} for one in given]
    return ReverseTextConfig(name="rev", judges=given, **more)


def run(config, work, *, env=None):
    """What `work(panel, service)` gives; everything is closed afterwards."""

    async def go():
        service = JudgeService()
        try:
            return await work(service.panel(config, env or ReverseText(config)), service)
        finally:
            await service.aclose()

    return asyncio.run(go())


async def table(url, actors=("policy",), untrained=()):
    """Seats at which an endpoint has spoken."""
    client = Endpoint(url, SamplingConfig(), model="policy")
    seats = SessionMap(client, (0,), 0, actors)
    for actor in untrained:
        seats.open(actor, trained=False)
    for seat in seats.values():
        await seat.chat(ASKED)
    await client.close()
    return seats


def graded(url, config, reward=0.5, row=ROW):
    """The seat and the outcome of one episode, graded by the judges."""

    async def work(panel, service):
        seats = await table(url)
        outcome = await panel.grade_episode(row, seats, Outcome.solo(reward, own=1.0))
        return seats["policy"], outcome

    return run(config, work)


def speaks(text, policy="cba"):
    """Answers of a server that is the policy too; its reply has no grade in it."""
    answer = text if callable(text) else lambda body: text
    return lambda body: policy if body["model"] == "policy" else answer(body)


def test_the_reward_is_the_weighted_sum_of_task_and_grades():
    with judge_server(speaks(lambda body: "Score: 8" if "kind" in body["messages"][0]["content"] else "2")) as server:
        judges = {"weight": 0.5, "prompt": "kind? {reply}"}, {"weight": -1.0}, {"weight": 0.0, "scale": [0, 2]}
        seat, outcome = graded(server.url, section(server.url, *judges, task_weight=2.0), reward=0.25)
    assert outcome.rewards == {"policy": pytest.approx(2 * 0.25 + 0.5 * 0.8 - 0.2)}
    assert outcome.metrics == {"own": 1.0}
    assert [(v.judge, v.score, v.weight) for v in seat.verdicts] == [
        ("task", 0.25, 2.0), ("judge0", 0.8, 0.5), ("judge1", 0.2, -1.0), ("judge2", 1.0, 0.0)
    ]  # fmt: skip
    assert verdict_metrics(seat.verdicts) == {
        "task_reward": 0.25, "judge/judge0": 0.8, "judge/judge1": 0.2, "judge/judge2": 1.0
    }  # fmt: skip
    first = seat.verdicts[1]
    assert (first.text, first.value, first.model, first.attempts) == ("Score: 8", 8.0, "judge", 1)
    assert first.seconds > 0


def test_a_judge_sees_the_conversation_the_reply_and_the_row():
    prompt = "{conversation}|{reply}|{answer}|{n}|{{n}}"
    with judge_server(speaks("Score: 1")) as server:
        config = section(server.url, {"prompt": prompt, "system": "You grade.", "extra_body": {"top_k": 1}})
        graded(server.url, config)
        body = server.asked[-1]
    assert body["messages"][0] == {"role": "system", "content": "You grade."}
    asked = body["messages"][1]["content"]
    assert asked.startswith("system: Be kind.\n\nuser: Reverse abc.|cba|cba|3|{n}\n\nGive your reasons")
    assert (body["temperature"], body["max_tokens"], body["top_k"]) == (0.0, 512, 1)


def test_fields_of_the_request_can_be_left_out():
    with judge_server(speaks("Score: 1")) as server:
        extra = {"temperature": "omit", "max_tokens": "omit", "max_completion_tokens": 9}
        graded(server.url, section(server.url, {"extra_body": extra}))
        assert set(server.asked[-1]) == {"model", "messages", "max_completion_tokens"}


def test_a_prompt_may_lie_in_a_file(tmp_path):
    (tmp_path / "q.txt").write_text("Wie gut ist {reply}? é")
    with judge_server(speaks("Score: 1")) as server:
        graded(server.url, section(server.url, {"prompt": "", "prompt_file": str(tmp_path / "q.txt")}))
        assert server.prompts()[-1].startswith("Wie gut ist cba? é")
    with pytest.raises(EnvError, match=r"judge `judge0` of environment `rev`: prompt_file .*gone.txt cannot be read"):
        JudgeService().panel(section("http://h", {"prompt": "", "prompt_file": "gone.txt"}), None)


def test_the_same_question_is_asked_once_also_while_it_is_being_answered():
    meet = threading.Event()

    def answer(body):
        meet.wait(30)
        return "Score: 3"

    with judge_server(answer) as server:

        async def work(panel, service):
            question = [{"role": "user", "content": "same?"}]
            first = [asyncio.ensure_future(panel["judge0"].ask(question)) for _ in range(3)]
            await asyncio.to_thread(server.first.wait, 30)
            first[0].cancel()  # whoever asked first may leave
            await asyncio.sleep(0)
            meet.set()
            got = await asyncio.gather(*first[1:])
            return [*got, await panel["judge0"].ask(question), await panel["judge1"].ask(question)]

        verdicts = run(section(server.url, {}, {"scale": [0, 3]}), work)
        assert [v.cached for v in verdicts] == [True, True, True, False]
        assert [v.score for v in verdicts] == [0.3, 0.3, 0.3, 1.0]  # another scale is another question
        assert len(server.asked) == 2


def test_without_cache_each_is_asked():
    with judge_server("Score: 3") as server:

        async def work(panel, service):
            return [await panel["judge0"].ask([{"role": "user", "content": "?"}]) for _ in range(3)]

        assert not any(v.cached for v in run(section(server.url, {"cache": False}), work))
        assert len(server.asked) == 3


def test_what_is_remembered_is_bounded_and_the_oldest_goes(monkeypatch):
    monkeypatch.setattr("paceline.envs.judges.REMEMBERED", 2)
    with judge_server("Score: 3") as server:

        async def work(panel, service):
            for text in "abacab":  # b goes for c, then c for b
                await panel["judge0"].ask([{"role": "user", "content": text}])
            return list(server.prompts())

        assert run(section(server.url, {}), work) == ["a", "b", "c", "b"]


def test_a_failure_is_not_remembered():
    with judge_server(in_turn(400, "Score: 3")) as server:

        async def work(panel, service):
            with pytest.raises(JudgeFailed):
                await panel["judge0"].ask([{"role": "user", "content": "?"}])
            return await panel["judge0"].ask([{"role": "user", "content": "?"}])

        assert run(section(server.url, {}), work).score == 0.3


def test_nonsense_is_asked_about_again_with_the_reason():
    cut = {"message": {"content": "Score: 1"}, "finish_reason": "length"}
    with judge_server(in_turn("Lovely.", cut, {"message": {"content": None}}, "Score: 4")) as server:

        async def work(panel, service):
            return await panel["judge0"].ask([{"role": "user", "content": "?"}])

        verdict = run(section(server.url, {"attempts": 4}), work)
        assert (verdict.score, verdict.attempts) == (0.4, 4)
        last = server.asked[-1]["messages"]
    assert [m["role"] for m in last] == ["user"] + ["assistant", "user"] * 3
    assert [m["content"] for m in last[1::2]] == ["Lovely.", "Score: 1", "(no answer)"]
    for message, why in zip(
        last[2::2], ["it holds no numbers", "it was cut off at max_tokens = 512", "it is empty"], strict=True
    ):
        assert message["content"].startswith(f"That cannot be read: {why}")
        assert "end with the line `Score: N`" in message["content"]


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ("Lovely.", r"in 2 answers; the first: 'Lovely.' \(it holds no numbers.*; it answers at http://127"),
        (500, r"answered 500: as told \(2 tries\)"),
        (429, r"answered 429: as told \(2 tries\)"),
        (401, "answered 401: as told"),
        (b"garbage", "answered 200, but no JSON object: garbage"),
        (None, r"took longer than 0.2 s \(2 tries\)"),
    ],
)
def test_a_judge_that_gives_no_grade_fails_the_episode_by_its_name(answer, sentence):
    with judge_server(speaks(lambda body: answer)) as server:
        config = section(server.url, {"attempts": 2, "model": {"timeout": 0.2 if answer is None else 30.0}})
        with pytest.raises(JudgeFailed, match=f"judge `judge0` of environment `rev`, `judge`: .*{sentence}"):
            graded(server.url, config)


def test_environments_that_name_one_address_share_its_limits():
    meeting = threading.Barrier(2)

    def answer(body):
        meeting.wait(30)
        return "Score: 1"

    with judge_server(answer) as server:
        first = section(server.url, {"model": {"concurrency": 2}})
        second = ReverseTextConfig(
            name="other",
            judges=[{"name": "x", "prompt": "?", "model": {"name": "j", "base_url": server.url.removesuffix("/v1")}}],
        )

        async def work():
            service = JudgeService()
            judges = [service.panel(c, ReverseText(c)) for c in (first, second)]
            asked = [
                judge.ask([{"role": "user", "content": str(at)}])
                for panel in judges
                for judge in panel.values()
                for at in range(4)
            ]
            await asyncio.gather(*asked)
            await service.aclose()

        asyncio.run(work())
        assert (len(server.asked), server.most) == (8, 2)


def test_an_actor_that_the_environment_lacks_is_refused_by_its_name():
    config = section("http://h/v1", {"actors": ["solver"]})
    with pytest.raises(EnvError, match=r"judge `judge0` .*: actors: there is no actor `solver`, only `policy`"):
        JudgeService().panel(config, ReverseText(config))


def test_several_servers_of_a_judge_are_asked_in_turn():
    with judge_server("Score: 1") as one, judge_server("Score: 1") as two:

        async def work(panel, service):
            for at in range(4):
                await panel["judge0"].ask([{"role": "user", "content": str(at)}])

        run(section(one.url, {"model": {"base_url": [one.url, two.url]}}), work)
        assert (len(one.asked), len(two.asked)) == (2, 2)


def test_only_the_named_actors_are_graded_and_only_those_who_train():
    with judge_server(speaks("Score: 10")) as server:
        config = section(server.url, {"actors": ["solver"]}, {"automatic": False})

        async def work(panel, service):
            seats = await table(server.url, actors=("solver", "proposer"), untrained=("solver",))
            (other,) = seats.keys() - {"solver", "proposer"}
            outcome = await panel.grade_episode(ROW, seats, Outcome({"solver": 0.0, "proposer": 0.5, other: 0.0}))
            return outcome.rewards, {name: [v.judge for v in seat.verdicts] for name, seat in seats.items()}, other

        env = ReverseText(config)
        env.actors = ("solver", "proposer")
        rewards, judged, other = run(config, work, env=env)
        assert rewards == {"solver": 1.0, "proposer": 0.5, other: 0.0}
        assert judged == {"solver": ["task", "judge0"], "proposer": [], other: []}


def test_code_of_an_environment_asks_by_name():
    with judge_server(speaks("Score: 10")) as server:
        config = section(server.url, {"automatic": False})
        env = ReverseText(config)

        async def work(panel, service):
            seats = await table(server.url)
            verdict = await env.judges["judge0"].grade(seats["policy"], ROW)
            with pytest.raises(EnvError, match="there is no judge `other`: the run file names `judge0`"):
                env.judges["other"]
            return verdict, seats["policy"].verdicts

        verdict, kept = run(config, work, env=env)
        assert verdict.score == 1.0
        assert kept == [verdict]
    assert dict(ReverseText(ReverseTextConfig()).judges) == {}


def test_a_key_comes_from_the_environment(monkeypatch):
    with judge_server("Score: 1") as server:
        config = section(server.url, {"model": {"api_key_env": "PACELINE_TEST_JUDGE"}})
        monkeypatch.delenv("PACELINE_TEST_JUDGE", raising=False)
        with pytest.raises(PacelineError, match=r"judge `judge0` .*variable PACELINE_TEST_JUDGE is not set"):
            JudgeService().panel(config, ReverseText(config))
        monkeypatch.setenv("PACELINE_TEST_JUDGE", "abc")

        async def work(panel, service):
            await service.check()
            await panel["judge0"].ask([{"role": "user", "content": "?"}])

        run(config, work)
        assert server.keys == ["Bearer abc"]


def test_a_dead_endpoint_is_refused_at_the_start():
    with judge_server("x") as server:
        config = section(server.url, {})

    async def work(panel, service):
        await service.check()

    with pytest.raises(EnvError, match=r"judge `judge0` of environment `rev`: .* does not answer.*: start it, or take"):
        run(config, work)
