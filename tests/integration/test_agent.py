"""Agents that know nothing of Paceline but a base URL train through it, asynchronous and in threads of their own."""

import json
import re

from test_runs import lines, metrics

AGENT = '''
import asyncio
import openai

async def ask(client, word):
    """An agent as anybody would write it: it asks, looks at the answer, and asks again if that is wrong."""
    messages = [{"role": "user", "content": f"reverse: {word}"}]
    for _ in range(2):
        answer = await client.chat.completions.create(model="whatever", messages=messages, temperature=0.3)
        messages.append(answer.choices[0].message)
        if answer.choices[0].message.content == word[::-1]:
            break
        messages.append({"role": "user", "content": f"reverse: {word}"})
    return messages[-1]["content"] if isinstance(messages[-1], dict) else messages[-1].content

def ask_in_a_thread(url, word):
    with openai.OpenAI(base_url=url, api_key="none") as client:
        stream = client.chat.completions.create(
            model="whatever", messages=[{"role": "user", "content": f"reverse: {word}"}], stream=True
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)

def graded(said, word):
    return sum(a == b for a, b in zip(said, word[::-1])) / len(word)

async def asynchronous(row, seat):
    async with openai.AsyncOpenAI(base_url=await seat.base_url(), api_key="none") as client:
        return graded(await ask(client, row["answer"]), row["answer"])

async def threaded(row, seat):
    return graded(await asyncio.to_thread(ask_in_a_thread, await seat.base_url(), row["answer"]), row["answer"])
'''
RUN = """
name = 'agents'
steps = 3
staleness = 0
batch_size = 16
group_size = 4
[sampling]
max_tokens = 12
[eval]
every = 3
[record]
rollouts = 16
[[env]]
type = 'custom'
name = 'asynchronous'
import_path = 'agent.py:asynchronous'
dataset = 'rows.jsonl'
eval_dataset = 'held_out.jsonl'
[[env]]
type = 'custom'
name = 'threaded'
import_path = 'agent.py:threaded'
dataset = 'rows.jsonl'
"""
WORDS = ["planet", "moon", "river", "stone", "window", "garden", "silver", "market"]


def rows(words: list[str]) -> str:
    return "".join(json.dumps({"answer": word}) + "\n" for word in words)


def test_agents_that_know_only_a_base_url_train(tmp_path, here):
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "rows.jsonl").write_text(rows(WORDS))
    (tmp_path / "held_out.jsonl").write_text(rows(["copper"]))
    (tmp_path / "run.toml").write_text(RUN)
    done = here("train", "run.toml")
    assert done.returncode == 0, done.stderr
    before, *steps = metrics(tmp_path, "agents")
    assert "eval/asynchronous/reward" in before
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert all(line["grad_norm"] > 0 for line in steps)
    # Engine and trainer give the same tokens the same probability: what was recorded is what was sampled.
    assert max(line["mismatch_kl"] for line in steps) < 1e-6
    assert max(line["turns"] for line in steps) > 1
    assert min(line["metric/asynchronous/overridden/temperature"] for line in steps) >= 1
    assert not any("threaded/overridden" in key for line in steps for key in line)
    rollouts = lines(tmp_path / "runs" / "agents" / "rollouts.jsonl")
    assert {record["env"] for record in rollouts} == {"asynchronous", "threaded"}
    for record in rollouts:
        assert record["error"] is None
        assert record["tokens"] > 0
        assert [message["role"] for message in record["messages"]] in (["user", "assistant"], ["user", "assistant"] * 2)
        assert re.match(r"reverse: \w+$", record["messages"][0]["content"])
