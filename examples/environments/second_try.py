"""An environment of your own: a tool that checks the answer, and a second try.

The policy is asked to reverse a word. A checker (here a plain function; yours may call a compiler, a database, a
browser) says whether it is right. If not, the policy hears so and may try once more for half the reward.
"""

import paceline


def check(word: str, answer: str) -> bool:
    """The tool. It may be as slow as it likes: other episodes go on meanwhile."""
    return answer.strip() == word[::-1]


async def rollout(row: dict, seat: paceline.Seat) -> paceline.Outcome:
    messages = [{"role": "user", "content": f"reverse: {row['word']}"}]
    for reward in (1.0, 0.5):
        reply = await seat.chat(messages)
        if check(row["word"], reply.text):
            return paceline.Outcome.solo(reward, solved=1.0, tries=float(len(seat.turns)))
        messages += [reply.message, {"role": "user", "content": f"no. reverse: {row['word']}"}]
    return paceline.Outcome.solo(0.0, solved=0.0, tries=2.0)
