"""A rollout service: plays each row in two tries with the `openai` client, and answers with the tokens and the reward.

    ROLLOUT_KEY=secret python examples/seeds/async_rl_loop/rollout_service.py 8900

It may run on another machine and may be killed at any moment: Paceline posts what was under way again.
"""

import asyncio
import os
import sys

import openai
import uvicorn
from fastapi import FastAPI, Header, HTTPException

MEMORY = 4096  # answers that are kept, for a client whose connection broke
AGAIN = {"role": "user", "content": "That is not the right answer. Try again."}
app, episodes = FastAPI(), {}
openai_client = openai.AsyncOpenAI(base_url="http://policy", api_key="-")


@app.post("/rollout")
async def rollout(request: dict, authorization: str = Header("")) -> dict:
    if authorization.removeprefix("Bearer ") != os.environ.get("ROLLOUT_KEY", ""):
        raise HTTPException(401, "another key")
    key = request["id"]
    if key not in episodes:  # else it is being played, or was: the same id never samples twice
        episodes[key] = asyncio.create_task(play(request))
        episodes[key].add_done_callback(lambda task: task.exception() and episodes.pop(key, None))
        if len(episodes) > MEMORY:
            episodes.pop(next(iter(episodes)))
    return await asyncio.shield(episodes[key])


async def play(request: dict) -> dict:
    row, policy, turns = request["row"], request["policy"], []
    messages, right = list(row["messages"]), str(row["answer"]).rpartition("####")[2].strip()
    client = openai_client.with_options(base_url=policy["base_url"], timeout=request["timeout"])
    for _ in range(2):
        reply = await client.chat.completions.create(
            model=policy["model"],
            messages=messages,
            logprobs=True,
            extra_body={"return_token_ids": True, "return_versions": True},
        )
        choice = reply.choices[0]
        turn = {key: getattr(choice, key) for key in ("prompt_token_ids", "token_ids", "versions")}
        turn["logprobs"] = [token.logprob for token in choice.logprobs.content]
        turns.append({"role": "assistant", "finish": choice.finish_reason, **turn})
        said = choice.message.content
        correct = said.strip() == right or f"\\boxed{{{right}}}" in said
        if correct or choice.finish_reason == "length":
            break
        messages += [{"role": "assistant", "content": said}, AGAIN]
    answer = {"schema_version": 1, "id": request["id"], "tokenizer": request["tokenizer"], "turns": turns}
    return answer | {"reward": float(correct), "metrics": {"tries": len(turns)}}


if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
