"""Answers keys of the layout that has an [orchestrator] table with the lines to write in this one.

That layout nests the algorithm (`[orchestrator.algo.advantage] type = ...`), keeps the policy at
`[orchestrator.model]`, and puts environments below the orchestrator. Nothing here is accepted: each key fails with the
exact line that says the same.
"""

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from paceline.config.fields import (
    KeyPath,
    describe_given,
    dotted,
    header,
    in_backticks,
    join_words,
    key_paths,
    node_at,
    toml_text,
)
from paceline.config.foreign_names import foreign_keys, nearest_keys

TYPES = {"group_norm": "grpo", "default": "grpo", "ref_kl": "opd", "logprobs": "opd"}
TYPES |= dict.fromkeys(("demo_ref_kl", "demo_logprobs", "self_distill"), "opsd")
TYPES |= dict.fromkeys(("supervised", "sft_distill"), "sft")
"""Names of algorithms as that layout had them at some time."""
BUILT_IN = ("reverse-text", "alphabet-sort", "gsm8k")
FIXED = "leave it out: the algorithm's type decides what trains each token"
PLACEHOLDER = '{name = "MODEL", base_url = "http://HOST:PORT/v1"}'
Answer = str | Callable[[str, Any], str]
"""Text in which `{algo}` is the header of the algorithm's table, `{key}` the last key and `{value}` the value; or what
makes it of header and value."""


def _kind(algo: str, value: Any) -> str:
    kind, known = TYPES.get(value, value), _algorithms()
    if value == "none":
        return "leave it out: opd, opsd and sft give no advantage, by their type"
    return f"{algo} type = {toml_text(kind) if kind in known else join_words(map(describe_given, known))}"


def _teacher(algo: str, value: Any) -> str:
    if value == "policy":
        return f'{algo} teacher = "policy"'
    table = value if isinstance(value, dict) else {"name": value}
    model, client = (one if isinstance(one := table.get(key), dict) else {} for key in ("model", "client"))
    reference = {
        "name": table.get("name") or model.get("name") or "MODEL",
        "base_url": table.get("base_url") or client.get("base_url") or "http://HOST:PORT/v1",
    }
    return f"{algo} teacher = {toml_text(reference)}"


def _source(algo: str, value: Any) -> str:
    if value == "policy":
        return "leave it out: the policy samples, unless sft names a teacher"
    return f'{_teacher(algo, value)} with type = "sft", whose teacher samples'


def _mode(algo: str, value: Any) -> str:
    kind = {"rl": "grpo"}.get(value, value)
    needs = f", teacher = {PLACEHOLDER}" if kind in ("opd", "sft") else ""
    return f"{algo} type = {toml_text(kind)}{needs}"


def _filters(_: str, value: Any) -> str:
    kinds = [
        one.get("type") if isinstance(one, dict) else one for one in (value if isinstance(value, list) else [value])
    ]
    lines = ["[filters] zero_advantage = true, which is the default"] if "zero_advantage" in kinds else []
    if others := [str(kind or "others") for kind in kinds if kind != "zero_advantage"]:
        mine = 'group = {import_path = "my_filters.py:keep"}'
        lines.append(f"for {' and '.join(others)}: [filters] {mine}, a function of your own over a group")
    return "; ".join(lines)


def _bonus(algo: str, value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else value
    weights = isinstance(value, dict) and any("weight" in key for key in value)
    line = f"{algo} length_bonus = {toml_text('turns' if kind == 'turns' else 'tokens')}"
    return f"{line}, in which all tokens weigh alike" if weights else line


def _roles(algo: str, value: Any) -> str:
    """`{tool = {alpha = 0.1}}` as `{tool = 0.1}`."""
    if not isinstance(value, dict):
        return f"{algo} roles = {toml_text(value)}"
    alphas = {role: one.get("alpha", 0.1) if isinstance(one, dict) else one for role, one in value.items()}
    tools = [tool for one in value.values() if isinstance(one, dict) for tool in one.get("tool_names") or ()]
    return f"{algo} roles = {toml_text(alphas)}" + (f", tools = {toml_text(tools)}" if tools else "")


def _observations(algo: str, value: Any) -> str:
    roles = ("system", "user", "tool") if value == "all" else ("tool",)
    return f"{_roles(algo, dict.fromkeys(roles, 0.1))}, where the numbers are what was `observation_weight`"


def _environment(_: str, value: Any) -> str:
    known = value if value in BUILT_IN else None
    return f"[[env]] type = {toml_text(known)}" if known else f'[[env]] type = "verifiers", id = {toml_text(value)}'


def _server(_: str, value: Any) -> str:
    url = value[0] if isinstance(value, list) and value else value
    engine = f'[engine] backend = "vllm", base_url = {toml_text(url)}'
    return f"leave it out: the run starts its own engine; or, for a vLLM that runs already, write {engine}"


ROWS: dict[str, Answer] = {
    "algo.advantage.type": _kind,
    "algo.advantage": lambda algo, value: _kind(algo, value) if isinstance(value, str) else f'{algo} type = "reward"',
    "algo.name": _kind,
    "algo.type": _kind,
    "algo.advantage.model": _teacher,
    "algo.advantage.teacher": _teacher,
    "algo.advantage.length_penalty": _bonus,
    "algo.advantage.roles": _roles,
    "algo.roles": _roles,
    "algo.advantage.observations": _observations,
    "algo.advantage.observation_weight": "{algo} roles = {tool = {value}}",
    "algo.advantage.*loss*": FIXED,
    "algo.model": _teacher,
    "algo.teacher": _teacher,
    "algo.sampling.source": _source,
    "algo.loss*": FIXED,
    "algo.token_scorer*": FIXED,
    "sampling.source": _source,
    "teacher": _teacher,
    "training_mode": _mode,
    "models.*": f"name a frozen model where it is used: [algo] teacher = {PLACEHOLDER}, or [[env.judges]] "
    f"model = {PLACEHOLDER}",
    "length_penalty": _bonus,
    "*filters": _filters,
    "renderer*": '[model] renderer = "renderers"; "auto" is the default',
    "model.client.base_url": _server,
    "model.client.*": "leave it out: the run starts its own engine, and [engine] sets it up",
    "model.vlm*": "leave it out: conversations are text",
    "oversampling_factor": lambda _, factor: f"oversample = {toml_text(round(factor - 1, 9))} at the top of the file",
    "token_batch_size": "leave it out: a batch is counted in rollouts, by batch_size",
    "eval.env*": "leave it out: each environment is evaluated on its own held-out rows, eval_dataset where it reads "
    "a dataset",
    "env.id": _environment,
}
"""What stands where, below [orchestrator]; the first row that fits counts, and keys without one are looked for among
those of the run file."""
WHOLE = {key for key, answer in ROWS.items() if answer in (_teacher, _source, _bonus, _filters, _roles)} | {
    "models.*",
    "algo.advantage.filter",
    "algo.advantage.kwargs",
    "model.lora",
    "model.vlm",
    "env.args",
    "eval.env",
}
"""Tables that are answered as one; others are looked into."""
OUTSIDE = ("algo.advantage*", "algo.name", "algo.model", "algo.sampling*", "algo.loss*", "algo.token_scorer*")
"""Rows that hold in this layout's own `[algo]` and `[[env]]` too, where such a key was never right."""
ALONE = ("training_mode", "teacher", "length_penalty", "renderer*")
"""Those that hold at the top of the file and in [[env]]."""
ALIASES = {"algorithm": "algo", "policy": "model", "student": "model", "client": "model.client"}


@cache
def _algorithms() -> list[str]:
    node = node_at(("algo",), {})
    return list(node.sections) if node else []


def translate_layout(table: dict[str, Any]) -> dict[KeyPath, str]:
    """For each key of that layout, by its path, what to write for it."""
    found: dict[KeyPath, str] = {}
    orchestrator = table.get("orchestrator")
    if isinstance(orchestrator, dict):
        for path, value in _leaves(orchestrator, ("orchestrator",)):
            found[path] = _answer(path[1:], value)
    envs = table.get("env")
    for place, env in enumerate(envs if isinstance(envs, list) else []):
        for path, value in _foreign(env, ("env", place)):
            found[path] = _answer(path[2:], value, "[env.algo]")
        if isinstance(env, dict) and "id" in env and "type" not in env:
            found["env", place, "id"] = _answer(("env", "id"), env["id"])
    for path, value in _foreign(table, ()):
        found[path] = _answer(path, value)
    loss = (table.get("trainer") or {}).get("loss") if isinstance(table.get("trainer"), dict) else None
    if isinstance(loss, dict) and loss.get("type") == "default":
        found["trainer", "loss", "type"] = 'write [trainer.loss] type = "dppo", which is the default'
    return found


def _foreign(table: Any, at: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """Keys of that layout outside of [orchestrator]."""
    if not isinstance(table, dict):
        return
    for path, value in _leaves({key: entry for key, entry in table.items() if key != "orchestrator"}, ()):
        name = _name(path)
        renamed = name == "algo.type" and isinstance(value, str) and value in TYPES
        nested = (
            name == "algo.roles" and isinstance(value, dict) and any(isinstance(one, dict) for one in value.values())
        )
        if renamed or nested or any(fnmatchcase(name, row) for row in (*OUTSIDE, *ALONE)):
            yield (*at, *path), value


def _leaves(value: Any, at: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """Every value that is translated as one, with its path."""
    inside = at[1:] if at[:1] == ("orchestrator",) else at
    if isinstance(value, dict) and value and not any(fnmatchcase(_name(inside), row) for row in WHOLE):
        for key, entry in value.items():
            yield from _leaves(entry, (*at, key))
    elif isinstance(value, list) and inside and _name(inside) == "env":
        for place, entry in enumerate(value):
            yield from _leaves(entry, (*at, place))
    else:
        yield at, value


def _name(path: KeyPath) -> str:
    """The dotted name that rows know: without list places, and with today's words."""
    parts = [str(part) for part in path if not isinstance(part, int)]
    parts = parts[1:] if parts[:2] == ["train", "env"] else parts
    in_env = parts[:1] == ["env"] and parts[1:2] and parts[1] in ("algo", "advantage", "algorithm", "sampling")
    parts = parts[1:] if in_env else parts
    parts[:1] = ALIASES.get(parts[0], parts[0]).split(".") if parts else []
    parts = parts[1:] if parts[:2] == ["model", "model"] else parts
    return ".".join(["algo", *parts] if parts[:1] == ["advantage"] else parts)


def _row(path: KeyPath) -> str | None:
    name = _name(path)
    return next((row for row in ROWS if fnmatchcase(name, row)), None)


def _answer(path: KeyPath, value: Any, algo: str = "") -> str:
    row, algo = _row(path), algo or ("[env.algo]" if "env" in path else "[algo]")
    if row is None:
        return _likely(path, value, algo)
    answer = ROWS[row]
    if isinstance(answer, str):
        text = answer.replace("{algo}", algo).replace("{value}", toml_text(value))
    else:
        text = answer(algo, value)
    return text if text.startswith(("leave", "name", "for ")) else f"write {text}"


def _likely(path: KeyPath, value: Any, algo: str) -> str:
    """The key of this run file that one without a row stands for: the same one, or what else it may mean."""
    words = _name(path).replace("algo.advantage.", "algo.").replace("algo.sampling.", "sampling.").split(".")
    if words[0] == "algo" and algo == "[env.algo]":
        words = ["env", *words]
    target: KeyPath = ("env", 0, *words[1:]) if words[0] == "env" else tuple(words)
    everywhere = [known for known, _ in key_paths()]
    siblings = [str(known[-1]) for known in everywhere if known[:-1] == target[:-1]]
    found = [target] if target in everywhere else nearest_keys(target, siblings)
    if len(found) == 1 and (target in everywhere or foreign_keys(target) or found[0][-1] == target[-1]):
        return f"write {_line(found[0], value)}"
    if found:
        return f"did you mean {join_words(in_backticks(map(dotted, found)))}?"
    section = dotted(target[:1]) if len(target) > 1 and target[:1] in everywhere else ""
    listed = f"`paceline config {section}`" if section else "`paceline config`"
    return f"there is no [orchestrator], and no key `{words[-1]}`: {listed} lists those there are"


def _line(path: KeyPath, value: Any) -> str:
    """A key with its value, behind the header of its table."""
    table = header(path[:-1])
    line = f"{path[-1]} = {toml_text(value)}"
    if not table:
        return f"{line} at the top of the file"
    return f"[[{table}]] {line}" if isinstance(path[-2], int) else f"[{table}] {line}"
