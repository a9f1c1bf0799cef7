"""Answers keys of the layout that has an [orchestrator] table with the lines to write in this one.

That layout nests the algorithm (`[orchestrator.algo.advantage] type = ...`), keeps the policy at
`[orchestrator.model]`, and puts environments below the orchestrator. Nothing here is accepted: each key fails with the
exact line that says the same.
"""

import json
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any

from paceline.config.fields import KeyPath

TYPES = {"group_norm": "grpo", "default": "grpo", "ref_kl": "opd", "demo_ref_kl": "opsd", "supervised": "sft"}
"""Names of algorithms as that layout had them at some time."""
BUILT_IN = ("reverse-text", "alphabet-sort", "gsm8k")
FIXED = "leave it out: the choice is not there to be made"
Answer = str | Callable[[str, Any], str]
"""Text in which `{algo}` is the header of the algorithm's table, `{key}` the last key and `{value}` the value; or what
makes it of header and value."""


def _kind(algo: str, value: Any) -> str:
    return f"{algo} type = {_toml(TYPES.get(value, value))}"


def _teacher(algo: str, value: Any) -> str:
    if value == "policy":
        return f'{algo} teacher = "policy"'
    table = value if isinstance(value, dict) else {"name": value}
    model, client = (one if isinstance(one := table.get(key), dict) else {} for key in ("model", "client"))
    reference = {
        "name": table.get("name") or model.get("name") or "MODEL",
        "base_url": table.get("base_url") or client.get("base_url") or "http://HOST:PORT/v1",
    }
    return f"{algo} teacher = {_toml(reference)}"


def _source(algo: str, value: Any) -> str:
    if value == "policy":
        return "leave it out: the policy samples, unless sft names a teacher"
    return f'{_teacher(algo, value)} with type = "sft", whose teacher samples'


def _mode(algo: str, value: Any) -> str:
    kind = {"rl": "grpo"}.get(value, value)
    needs = ', teacher = {name = "MODEL", base_url = "http://HOST:PORT/v1"}' if kind in ("opd", "sft") else ""
    return f"{algo} type = {_toml(kind)}{needs}"


def _filters(_: str, value: Any) -> str:
    kinds = [
        one.get("type") if isinstance(one, dict) else one for one in (value if isinstance(value, list) else [value])
    ]
    lines = ["[filters] zero_advantage = true, which is the default"] if "zero_advantage" in kinds else []
    if others := [str(kind) for kind in kinds if kind != "zero_advantage"]:
        mine = 'group = {import_path = "my_filters.py:keep"}'
        lines.append(f"for {' and '.join(others)}: [filters] {mine}, a function of your own over a group")
    return "; ".join(lines)


def _bonus(algo: str, value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else value
    return f"{algo} length_bonus = {_toml('turns' if kind == 'turns' else 'tokens')}"


def _environment(_: str, value: Any) -> str:
    known = value if value in BUILT_IN else None
    return f"[[env]] type = {_toml(known)}" if known else f'[[env]] type = "verifiers", id = {_toml(value)}'


ROWS: dict[str, Answer] = {
    "algo.advantage.type": _kind,
    "algo.advantage": lambda algo, value: _kind(algo, value) if isinstance(value, str) else f'{algo} type = "reward"',
    "algo.advantage.model": _teacher,
    "algo.advantage.teacher": _teacher,
    "algo.advantage.length_penalty": _bonus,
    "algo.advantage.roles": lambda algo, value: f"{algo} roles = {_toml(_alphas(value))}",
    "algo.advantage.*": "{algo} {key} = {value}",
    "algo.model": _teacher,
    "algo.teacher": _teacher,
    "algo.sampling.source": _source,
    "algo.sampling.*": "[sampling] {key} = {value}",
    "algo.loss*": FIXED,
    "algo.token_scorer*": "leave it out: the algorithm's type says who scores",
    "algo.*": "{algo} {key} = {value}",
    "sampling.source": _source,
    "teacher": _teacher,
    "training_mode": _mode,
    "length_penalty": _bonus,
    "filters": _filters,
    "renderer*": '[model] renderer = "renderers"; "auto" is the default',
    "model.name": "[model] name = {value}",
    "model.client.*": "leave it out: the run starts its own engine; or, for a server, [engine] backend = "
    '"vllm", base_url = "http://HOST:PORT"',
    "model.lora": "[model] lora = {value}",
    "model.trust_remote_code": "[model] trust_remote_code = {value}",
    "model.*": "[model] {key} = {value}, if `paceline config model` lists it",
    "sampling.*": "[sampling] {key} = {value}",
    "batch_size": "batch_size = {value} at the top of the file",
    "rollouts_per_example": "group_size = {value} at the top of the file",
    "group_size": "group_size = {value} at the top of the file",
    "max_off_policy_steps": "staleness = {value} at the top of the file",
    "max_async_level": "staleness = {value} at the top of the file",
    "max_inflight*": "max_inflight = {value} at the top of the file",
    "max_steps": "steps = {value} at the top of the file",
    "seed": "seed = {value} at the top of the file",
    "env.id": _environment,
    "env.ratio": "[[env]] weight = {value}",
    "env.*": "[[env]] {key} = {value}",
    "*": "no [orchestrator]: its keys stand at the top of the file, and `paceline config` lists them",
}
"""What stands where, below [orchestrator]; the first row that fits counts. Tables that are translated whole end in a
name, others are looked into."""
WHOLE = {key for key, answer in ROWS.items() if answer in (_teacher, _source, _bonus, _filters)} | {
    "algo.advantage.roles",
    "algo.advantage.filter",
    "algo.advantage.kwargs",
    "model.lora",
    "env.args",
}
OUTSIDE = ("algo.advantage*", "algo.model", "algo.sampling*", "algo.loss*", "algo.token_scorer*")
"""Rows that hold in this layout's own `[algo]` and `[[env]]` too, where such a key was never right."""
ALONE = ("training_mode", "teacher", "length_penalty", "renderer*")
"""Those that hold at the top of the file and in [[env]]."""
ALIASES = {"algorithm": "algo", "policy": "model", "student": "model", "client": "model.client"}


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
        if any(fnmatchcase(name, row) for row in (*OUTSIDE, *ALONE)):
            yield (*at, *path), value


def _leaves(value: Any, at: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """Every value that is translated as one, with its path."""
    inside = at[1:] if at[:1] == ("orchestrator",) else at
    if isinstance(value, dict) and value and not (inside and _name(inside) in WHOLE):
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
    return ".".join(["algo", *parts] if parts[:1] == ["advantage"] else parts)


def _row(path: KeyPath) -> str:
    name = _name(path)
    return next(row for row in ROWS if fnmatchcase(name, row))


def _answer(path: KeyPath, value: Any, algo: str = "") -> str:
    answer = ROWS[_row(path)]
    algo = algo or ("[env.algo]" if "env" in path else "[algo]")
    if isinstance(answer, str):
        text = answer.replace("{algo}", algo).replace("{key}", str(path[-1])).replace("{value}", _toml(value))
    else:
        text = answer(algo, value)
    return text if text.startswith(("leave", "no ", "for ")) else f"write {text}"


def _alphas(roles: Any) -> Any:
    """`{tool = {alpha = 0.1}}` as `{tool = 0.1}`."""
    if not isinstance(roles, dict):
        return roles
    return {role: one.get("alpha", 0.1) if isinstance(one, dict) else one for role, one in roles.items()}


def _toml(value: Any) -> str:
    """A value in one line, as TOML writes it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False, default=str)
