"""Advisories on the task: its rows, its rewards, episodes that fail or are slow, replies that never end."""

import re
from collections import Counter
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.observe.record.advice.learning_rules import TRUTH
from paceline.observe.record.advice.measures import (
    SURE,
    Advisory,
    Finding,
    Knob,
    Mean,
    clustered_mean,
    series_mean,
    unmeasured,
    wilson_share,
)
from paceline.observe.record.advice.window import AdviceWindow, PromptTable
from paceline.observe.record.layout import GIVEN_UP, TRAINING

LEAST_TRIES = 64
"""Rollouts below which nothing is said."""
HINTS = {
    "judge": "see that the judge's address answers",
    "teacher": "see that the teacher's address answers",
    "timeout": "an episode may take longer",
    "engine": "see that an engine is there",
}


WAITING = re.compile(
    r"^(?:waiting for (?P<server>.+?) since|\d+ requests wait for an engine .*? for) (?P<seconds>\d+) s\b"
    r".*?: (?P<cause>.+)"
)
"""Notes of a run that waits for an engine, or for a model that scores."""


def check_unreachable(window: AdviceWindow, env: str) -> Finding:
    """The longest wait that the run has noted."""
    found = [match for note in window.notes if (match := WAITING.search(note))]
    if not found:
        return unmeasured("the run has waited for no server")
    longest = max(found, key=lambda match: int(match["seconds"]))
    seconds, limit, server = float(longest["seconds"]), window.advice.unreachable, longest["server"] or "an engine"
    if seconds <= limit:
        return Finding(seconds)
    return Finding(
        seconds,
        Advisory(
            title="A server does not answer, and the run waits for it",
            seen=f"It waited {seconds:.0f} s for {server}: {longest['cause']}.",
            basis=f"longest wait {seconds:.0f} ± 0 s by the run's own notes, limit {limit:g} s",
            fix="Start the server again at the same address: a run that still waits goes on by itself, one that ended "
            f"goes on with `--resume latest`. Another address is set in the run file ({_server_keys(window)}).",
            knobs=[
                window.knob(
                    "failures.teacher" if longest["server"] else "failures.engine", "fail", "stop when one is lost"
                )
            ],
            metrics=["time/score", "dropped/teacher_failed"],
        ),
    )


def _server_keys(window: AdviceWindow) -> str:
    keys = (
        f"`env[{place}].algo.teacher.base_url`" for place, env in enumerate(window.envs) if _has_teacher(window, env)
    )
    return ", ".join(keys) or "`engine`"


def _has_teacher(window: AdviceWindow, env: str) -> bool:
    return bool((window.env(env).get("algo") or window.get("algo", {})).get("teacher"))


def check_failures(window: AdviceWindow, env: str) -> Finding:
    """The share of episodes that ended in an error, in which those of one row stand together. A draw that the
    environment gave up on purpose is none."""
    rows = window.rows
    mine = (rows["env"] == window.number("env", env)) & (rows["domain"] == TRAINING)
    mine &= rows["state"] != window.number("state", GIVEN_UP)
    failed, ended = np.flatnonzero(mine & (rows["error"] != 0)), window.finished_rows(env)
    count = len(failed) + len(ended)
    if count < LEAST_TRIES:
        return unmeasured(f"fewer than {LEAST_TRIES} rollouts")
    is_failed = np.r_[np.ones(len(failed)), np.zeros(len(ended))]
    found = clustered_mean(is_failed, np.r_[rows["ticket"][failed], rows["ticket"][ended]])
    if found.low <= window.advice.failures:
        return Finding(found.value)
    kinds, counts = np.unique(rows["error"][failed], return_counts=True)
    names = {number: name for (column, name), number in window.names.items() if column == "error"}
    kind = names.get(int(kinds[int(np.argmax(counts))]), "episode")
    knobs: list[Knob] = []
    if kind == "timeout":
        seconds = float(window.env(env).get("timeout", 120.0))
        knobs.append(window.env_knob(env, "timeout", 4 * seconds, HINTS["timeout"]))
    elif kind in HINTS and window.get(f"failures.{kind}", "retry") != "retry":
        knobs.append(
            window.knob(f"failures.{kind}", "retry", HINTS[kind] + ", then try again before the episode is lost")
        )
    else:
        value = "fail" if window.get(f"failures.{kind}") != "fail" else "retry"
        knobs.append(window.knob(f"failures.{kind}", value, "stop at the first one, with its traceback"))
    return Finding(
        found.value,
        Advisory(
            title=f"Rollouts of `{env}` fail",
            seen=f"{len(failed)} of {count} rollouts ended in an error, {counts.max()} of them of the kind `{kind}`. "
            f"{HINTS.get(kind, 'The rollouts below have the message').capitalize()}.",
            basis=f"share {found.value:.3f} ± {found.error:.3f} (error over rows, not rollouts), limit "
            f"{window.advice.failures:g}",
            knobs=knobs,
            rollouts=window.numbers(failed[::-1]),
            metrics=["dropped/failed_rollouts"],
        ),
    )


def check_strict_grader(window: AdviceWindow, env: str) -> Finding:
    """Of the replies that are the expected answer but for case and the like, the share that earns no more than other
    replies do on average."""
    places = window.finished_rows(env, untrained=True)
    table = window.prompts(places)
    right, others = table.places[table.is_right], table.places[~table.is_right]
    if len(table.places) < LEAST_TRIES or len(right) < LEAST_RIGHT or not len(others):
        return unmeasured(f"fewer than {LEAST_RIGHT} replies that are their row's answer, or none that is not")
    rewards = window.rows["reward"]
    best, usual = float(rewards[places].max()), float(rewards[others].mean())
    unpaid = (rewards[right] <= usual) & (rewards[right] < (best if best > 0 else np.inf))
    found, share = wilson_share(int(unpaid.sum()), len(right)), float(unpaid.mean())
    limit, [example, *_] = window.advice.strict_grader, [*filter(None, table.examples), ("", "")]
    if found.low <= limit:
        return Finding(share)
    return Finding(
        share,
        Advisory(
            title=f"Right replies of `{env}` earn nothing",
            seen=f"{len(right)} of the last {len(table.places)} replies are the answer of their "
            f"row{_difference(*example)}. {'All' if unpaid.all() else unpaid.sum()} of them earned "
            f"{rewards[right][unpaid].mean():.3g} on average; wrong ones earned {usual:.3g}.",
            basis=f"share {share:.2f}, surely more than {found.low:.2f} (Wilson's interval of three standard "
            f"errors), limit {limit:g}",
            fix=f"Mend {_grader(window, env)}: compare both sides in lower case and stripped, and see that it reads "
            "the column with the answer. Or write the answers of the dataset as replies are to be written.",
            caution="A task may also forbid the plain answer.",
            knobs=window.pause_knobs("strict_grader", "draw nothing from it until its grader is mended"),
            rollouts=window.numbers(right[unpaid][::-1]),
            metrics=[f"reward/{env}/mean", f"reward/{env}/std"],
        ),
    )


def _difference(answer: str, reply: str) -> str:
    """`, but for upper and lower case: expected `AB`, got `ab``."""
    if answer == reply:
        return f" to the letter, such as `{reply}`" if reply else ""
    what = "white space"
    if answer.split() != reply.split():
        what = "upper and lower case" if answer.casefold().split() == reply.casefold().split() else "punctuation"
    return f", but for {what}: expected `{answer}`, got `{reply}`"


def _grader(window: AdviceWindow, env: str) -> str:
    section = window.env(env)
    return f"the reward in `{section['import_path']}`" if section.get("import_path") else f"the reward of `{env}`"


LEAST_RIGHT = 12
"""Right replies below which nothing is said."""
REWARDLESS = ("opd", "opsd", "sft", "constant")
"""Algorithms that learn from something else."""


def check_constant_reward(window: AdviceWindow, env: str) -> Finding:
    """The spread of all rewards this run has seen."""
    algo = window.env(env).get("algo") or window.get("algo", {})
    if algo.get("type", "grpo") in REWARDLESS:
        return unmeasured("its algorithm needs no reward")
    places = window.finished_rows(env, untrained=True)
    if len(places) < LEAST_TRIES:
        return unmeasured(f"fewer than {LEAST_TRIES} rollouts")
    rewards = window.rows["reward"][places]
    spread = max(float(rewards.std()), float(np.max(window.full_series(f"reward/{env}/std"), initial=0.0)))
    if spread >= window.advice.constant_reward:
        return Finding(spread)
    return Finding(
        spread,
        Advisory(
            title=f"The reward of `{env}` never changes",
            seen=f"All {len(places)} rollouts got exactly {rewards[0]:g}, so there is nothing to learn.",
            basis=f"standard deviation {spread:.1g} ± 0 over all rollouts, limit {window.advice.constant_reward:g}",
            fix=f"Read one of the rollouts, and what {_grader(window, env)} makes of it: a reward that never changes "
            "is more often a fault of the reward than of the task.",
            knobs=[window.env_knob(env, "curriculum", True, "if the reward is right: rows within reach come first")],
            rollouts=window.numbers(places[::-1]),
            metrics=[f"reward/{env}/mean", f"reward/{env}/std", "dropped/zero_advantage"],
        ),
    )


ROOM = 8
"""Tokens within which some reply of any task ends by itself, if it can."""


def check_stop_token(window: AdviceWindow, env: str) -> Finding:
    """The share of replies that end by themselves, where it was as small when the run began."""
    places = window.finished_rows(env)
    if len(places) < LEAST_TRIES:
        return unmeasured(f"fewer than {LEAST_TRIES} rollouts")
    limit = int(window.get("sampling.max_tokens", 256))
    ended = window.rows["finish"][places] != window.number("finish", "length")
    found, at_first = wilson_share(int(ended.sum()), len(ended)), window.full_series("truncated_ratio")[:3]
    share = float(ended.mean())
    if limit <= ROOM or found.high >= window.advice.stop_token or not (at_first > 1 - window.advice.stop_token).all():
        return Finding(share)
    table = window.prompts(places)
    [(marker, spelled)] = Counter(filter(None, table.markers)).most_common(1) or [("", 0)]
    fix = (
        "Compare `eos_token_id` of the model's generation_config.json with the token that ends a turn in its chat "
        "template, and name that one there or in `sampling.stop_token_ids`. A higher limit does not help."
    )
    if 2 * spelled > len(table.markers):
        fix = (
            f"{spelled} of the last {len(table.markers)} replies write `{marker}` and go on: let that token end a "
            "reply. Add its id to `sampling.stop_token_ids`, or make it `eos_token_id` in the model's "
            "generation_config.json. A higher limit does not help."
        )
    return Finding(
        share,
        Advisory(
            title=f"No reply of `{env}` ends by itself",
            seen=f"{len(ended) - ended.sum()} of {len(ended)} replies went on to `sampling.max_tokens` = {limit}, "
            "from the first "
            "step on: the token that ends a reply is not known as such, or the chat template asks for none.",
            basis=f"share that ended {share:.3f}, surely less than {found.high:.3f} (Wilson's interval of three "
            "standard errors), "
            f"limit {window.advice.stop_token:g}",
            fix=fix,
            rollouts=window.numbers(places[::-1]),
            metrics=["truncated_ratio", "length"],
        ),
    )


MARKERS = "mismatch/markers"
"""Metric: how many markers of the chat template the tokenizer has no token for, where there are any."""


def check_chat_template(window: AdviceWindow, env: str) -> Finding:
    """The share of turns whose tokens do not say what their messages do: the template's markers are not tokens of this
    model, other messages have the same tokens, or the prompt is not what was said before, and more."""
    limit = window.advice.chat_template
    places = np.concatenate([np.empty(0, int), *(window.finished_rows(name, untrained=True) for name in window.envs)])
    markers = window.full_series(MARKERS)
    if len(markers) and markers[-1] > 0:
        return Finding(
            1.0,
            _template_advisory(
                window,
                places,
                title="The chat template is not this model's",
                seen=f"The tokenizer has no token for {markers[-1]:.0f} of the template's markers (such as "
                "`<|im_start|>`) and spells them out in letters, in every prompt.",
                basis=f"share of prompts 1 ± 0, limit {limit:g}: markers are looked up in the tokenizer",
                metrics=[MARKERS],
            ),
        )
    table = window.prompts(places)
    if (dropped := _merged_prompts(table)) is not None and dropped.low > limit:
        return Finding(
            dropped.value,
            _template_advisory(
                window,
                table.places[np.unique(np.array(table.digests), return_index=True)[1]],
                title="The chat template leaves messages out",
                seen=f"{dropped.value:.0%} of the last {len(table.places)} prompts have the same tokens as prompts "
                "with other messages: the model is not shown what the environment asks.",
                basis=f"share surely more than {dropped.low:.2f} (Wilson's interval of three standard errors), "
                f"limit {limit:g}",
                metrics=[f"reward/{name}/mean" for name in window.envs],
            ),
        )
    found = series_mean(window.series("mismatch/template")[1])
    if found.count < 5:
        return unmeasured("fewer than 5 steps")
    if found.low <= limit:
        return Finding(found.value)
    several = np.flatnonzero((window.rows["turns"] > 1) & (window.rows["samples"] > 1))
    return Finding(
        found.value,
        _template_advisory(
            window,
            several,
            title="Prompts rewrite what was said before",
            seen=f"{found.value:.0%} of the turns had a prompt that does not continue the tokens of the turns before "
            "it: the chat template, or the environment, changes earlier messages. Each such turn becomes a sample of "
            "its own.",
            basis=f"`mismatch/template` {found.value:.2f} ± {found.error:.2f}, limit {limit:g}; {found.count} steps",
            metrics=["mismatch/template"],
        ),
    )


def _merged_prompts(table: PromptTable) -> Mean | None:
    """The share of prompts whose tokens are those of other messages too."""
    if len(table.places) < LEAST_TRIES // 2 or len(set(table.digests)) < 2:
        return None
    messages: dict[bytes, set[bytes]] = {}
    for tokens, digest in zip(table.token_digests, table.digests, strict=True):
        messages.setdefault(tokens, set()).add(digest)
    return wilson_share(sum(len(messages[tokens]) > 1 for tokens in table.token_digests), len(table.places))


def _template_advisory(window: AdviceWindow, places: NDArray[Any], **words: Any) -> Advisory:
    own = window.get("model.chat_template")
    folder = window.get("model.tokenizer") or window.get("model.name")
    named = f"`{own}` (`model.chat_template`)" if own else f"the chat template of `{folder}`, or name another one in "
    named += "" if own else "`model.chat_template`"
    return Advisory(
        fix=f"Mend {named}, and compare a rollout's messages with its tokens (the page of its tokens shows both).",
        caution="Templates that leave out earlier thoughts do so on purpose.",
        rollouts=window.numbers(places[::-1]),
        **words,
    )


def check_leaked_answer(window: AdviceWindow, env: str) -> Finding:
    """Among the best rollouts, the share whose prompt holds the answer after a word such as `answer:`."""
    places = window.finished_rows(env)
    rewards = window.rows["reward"][places]
    if len(places) < LEAST_TRIES or np.ptp(rewards) == 0:
        return unmeasured(f"fewer than {LEAST_TRIES} rollouts, or one reward for all")
    top = float(rewards.max())
    table = window.prompts(places[rewards >= top])
    if len(table.places) < LEAST_TRIES // 4:
        return unmeasured("too few replies with the best reward, or no texts")
    found = wilson_share(int(table.holds_answer.sum()), len(table.places))
    share, limit = float(table.holds_answer.mean()), window.advice.leaked_answer
    if found.low <= limit:
        return Finding(share)
    return Finding(
        share,
        Advisory(
            title=f"The answer stands in the prompts of `{env}`",
            seen=f"Of the last {len(table.places)} rollouts with the best reward ({top:g}), "
            f"{table.holds_answer.sum()} have their answer word for word in their own prompt, after a word such as "
            "`answer` or `solution`: the reward can be had by copying.",
            basis=f"share {share:.2f}, surely more than {found.low:.2f} (Wilson's interval of three standard errors), "
            f"limit {limit:g}",
            fix=f"Take the answer out of the prompts of {_rows_of(window, env)}, and train again from the first "
            "weights.",
            caution="Where the task is to copy, this is no fault.",
            knobs=window.pause_knobs("leaked_answer", "draw nothing from it until its prompts are mended"),
            rollouts=window.numbers(table.places[table.holds_answer][::-1]),
            metrics=[f"reward/{env}/mean", f"eval/{env}/reward"],
        ),
    )


def _rows_of(window: AdviceWindow, env: str) -> str:
    dataset = window.env(env).get("dataset")
    return f"`{dataset}`" if dataset else "the environment"


def check_duplicate_rows(window: AdviceWindow, env: str) -> Finding:
    """The share of tries whose prompt stands in another row of the dataset too. Generated tasks may repeat."""
    if not window.env(env).get("dataset"):
        return unmeasured("its rows are not a dataset")
    places = window.finished_rows(env)
    table = window.prompts(places[window.rows["member"][places] == 0])
    if len(table.places) < LEAST_TRIES // 2:
        return unmeasured(f"fewer than {LEAST_TRIES // 2} prompts in the record")
    numbers, owners = window.rows["row"][table.places], {}
    for digest, number in zip(table.digests, numbers.tolist(), strict=True):
        owners.setdefault(digest, set()).add(number)
    if len(owners) < 2:
        return unmeasured("one prompt for all rows: what differs is not in it")
    shared = np.array([len(owners[digest]) > 1 for digest in table.digests])
    found, limit = wilson_share(int(shared.sum()), len(shared)), window.advice.duplicate_rows
    share = float(shared.mean())
    if found.low <= limit:
        return Finding(share)
    most = max(owners.values(), key=len)
    return Finding(
        share,
        Advisory(
            title=f"Rows of `{env}` repeat the same prompts",
            seen=f"{len(np.unique(numbers))} rows that were drawn have {len(owners)} different prompts; one prompt "
            f"stands in {len(most)} of them. So few can be learnt by heart, and the reward then says nothing of other "
            "prompts.",
            basis=f"share of tries {share:.2f}, surely more than {found.low:.2f} (Wilson's interval of three standard "
            "errors), limit "
            f"{limit:g}; {len(shared)} groups",
            fix=f"Leave out what repeats in {_rows_of(window, env)}, add prompts that differ, and evaluate on others "
            "(`eval_dataset`).",
            caution="Only rows that were drawn in the last steps are compared; the file may hold more.",
            knobs=window.pause_knobs("duplicate_rows", "draw nothing from it until its rows are distinct"),
            rollouts=window.numbers(table.places[shared][::-1]),
            metrics=[f"reward/{env}/mean", f"eval/{env}/reward"],
        ),
    )


FEW = 5
LOST = 0.3
"""Share of right answers that must be lost."""


def check_reward_hacking(window: AdviceWindow, env: str) -> Finding:
    """The reward rises from the run's beginning on, and a metric of right answers falls."""
    steps, rewards = window.series(f"reward/{env}/mean", since=1)
    own = [
        name for name in window.columns if name.startswith(f"metric/{env}/") and TRUTH.search(name.rpartition("/")[2])
    ]
    names = [*own, *(name for name in (f"eval/{env}/exact",) if name in window.columns)]
    spreads = window.series(f"reward/{env}/std", since=1)[1]
    scale = float(spreads.mean()) if len(spreads) else 0.0
    if not names or scale <= 0 or len(rewards) < 2 * FEW:
        return unmeasured("no metric of right answers" if not names else f"fewer than {2 * FEW} steps")
    rise = float(rewards[-FEW:].mean() - rewards[:FEW].mean()) / scale
    fallen = []
    for name in names:
        values = window.full_series(name)
        ends = max(1, min(FEW, len(values) // 3))
        before, now = float(values[:ends].mean()), float(values[-ends:].mean())
        if before > 0.02 and now < (1 - LOST) * before:
            fallen.append((name, before, now))
    groups = max(1.0, int(window.get("batch_size", 128)) / int(window.get("group_size", 8)))
    error = sqrt(2 / (FEW * groups))
    if rise - SURE * error <= window.advice.reward_hacking or not fallen:
        return Finding(rise)
    name, before, now = fallen[0]
    places = window.finished_rows(env)
    return Finding(
        rise,
        Advisory(
            title=f"The reward of `{env}` rises without the task",
            seen=f"The reward rose from {rewards[:FEW].mean():.3f} to {rewards[-FEW:].mean():.3f}, while `{name}` "
            "fell from "
            f"{before:.3f} to {now:.3f}: what is paid is not what is wanted.",
            basis=f"a rise of {rise:.2f} ± {error:.2f} standard deviations between the first and the last {FEW} steps, "
            f"limit {window.advice.reward_hacking:g}; {len(rewards)} steps",
            fix=f"Pay for what `{name}` measures, or take part in the reward from what can be had without it.",
            knobs=window.pause_knobs("reward_hacking", "draw nothing from it until its reward is mended"),
            steps=(int(steps[0]), int(steps[-1])),
            rollouts=window.numbers(places, by=-window.rows["reward"][places]),
            metrics=[f"reward/{env}/mean", name],
        ),
    )


def check_slow_environment(window: AdviceWindow, env: str) -> Finding:
    """The share of the time in which neither trainer nor sampler works, nor is anything scored or published."""
    since = max(4, window.steps[0])  # the first steps compile and load
    names = ("busy/trainer", "busy/sampler", "time/score", "time/publish", "time/step")
    parts = [window.series(name, since)[1] for name in names]
    if len({len(part) for part in parts}) > 1 or len(parts[0]) < 5:
        return unmeasured("fewer than 5 steps")
    trainer, sampler, score, publish, step = parts
    if not (sampler > 0).any():
        return unmeasured("the engine does not say how busy it is")
    waits = np.clip(1 - trainer - sampler - (score + publish) / np.maximum(step, 1e-9), 0, 1)
    found = series_mean(waits[sampler > 0])  # the last steps of a run sample nothing more
    limit = window.advice.slow_environment
    if found.low <= limit:
        return Finding(found.value)
    running = int(window.get("max_inflight") or 2 * int(window.get("batch_size", 128)))
    return Finding(
        found.value,
        Advisory(
            title="Environments are slow: trainer and sampler wait for them",
            seen=f"In {found.value:.0%} of the time neither the trainer ({trainer.mean():.0%} busy) nor the sampler "
            f"({sampler.mean():.0%}) works. A step takes {step.mean():.2f} s.",
            basis=f"{found.value:.2f} ± {found.error:.2f} (mean over {found.count} steps, errors widened for "
            "autocorrelation), "
            f"limit {limit:g}",
            knobs=[window.knob("max_inflight", 2 * running, "play more episodes at once")],
            metrics=["busy/trainer", "busy/sampler", "time/step"],
        ),
    )
