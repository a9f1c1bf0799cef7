"""Errors as sentences for the user: where, what is wrong, what to write instead."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from paceline.config.base import Section
from paceline.config.document import COMMAND_LINE, ConfigDocument, Origin, plain_value
from paceline.config.fields import (
    ROOT,
    KeyPath,
    Spot,
    advice,
    code,
    dotted,
    either,
    expected,
    given,
    path_of,
    places,
    spot_at,
    value_at,
)
from paceline.errors import PacelineError

SIBLING_LIKENESS = 0.7
DISTANT_LIKENESS = 0.8
"""A key far from where it was written has to look more alike before it is worth naming."""

CLIPS = ("loss.clip_low", "loss.clip_high")

ALIASES: dict[str, tuple[str, ...]] = {
    # What users of TRL, verl, OpenRLHF and prime-rl would type.
    "learning_rate": ("lr",),
    "adam_epsilon": ("eps",),
    "adam_beta1": ("betas",),
    "adam_beta2": ("betas",),
    "lr_scheduler": ("schedule",),
    "lr_scheduler_type": ("schedule",),
    "num_warmup_steps": ("warmup_steps",),
    "lr_warmup_steps": ("warmup_steps",),
    "clip_grad": ("max_grad_norm",),
    "grad_clip": ("max_grad_norm",),
    "max_norm": ("max_grad_norm",),
    "clip_range": CLIPS,
    "cliprange": CLIPS,
    "clip_ratio": CLIPS,
    "clip_eps": CLIPS,
    "epsilon": ("eps", *CLIPS),
    "epsilon_low": ("loss.clip_low",),
    "clip_ratio_low": ("loss.clip_low",),
    "epsilon_high": ("loss.clip_high",),
    "clip_ratio_high": ("loss.clip_high",),
    "loss_agg_mode": ("normalise",),
    "max_new_tokens": ("sampling.max_tokens",),
    "max_completion_length": ("sampling.max_tokens",),
    "max_response_length": ("sampling.max_tokens",),
    "max_model_len": ("engine.max_context",),
    "max_num_seqs": ("engine.max_running",),
    "num_generations": ("group_size",),
    "rollouts_per_example": ("group_size",),
    "n_samples_per_prompt": ("group_size",),
    "per_device_train_batch_size": ("batch_size",),
    "train_batch_size": ("batch_size",),
    "rollout_batch_size": ("batch_size",),
    "max_steps": ("steps",),
    "total_training_steps": ("steps",),
    "num_train_epochs": ("epochs",),
    "total_epochs": ("epochs",),
    "max_off_policy_steps": ("staleness",),
    "max_staleness": ("staleness",),
    "max_async_level": ("staleness",),
    "async_level": ("staleness",),
    "model_name": ("model.name",),
    "model_name_or_path": ("model.name",),
    "model_path": ("model.name",),
    "tokenizer_name": ("model.tokenizer",),
    "torch_dtype": ("model.dtype",),
    "lora_r": ("lora.rank",),
    "lora_rank": ("lora.rank",),
    "lora_alpha": ("lora.alpha",),
    "lora_dropout": ("lora.dropout",),
    "target_modules": ("lora.targets",),
    "run_name": ("name",),
    "output_dir": ("runs",),
    "resume_from_checkpoint": ("resume",),
    "eval_steps": ("eval.every",),
    "eval_interval": ("eval.every",),
    "test_freq": ("eval.every",),
    "save_steps": ("checkpoint.every",),
    "save_freq": ("checkpoint.every",),
    "save_total_limit": ("checkpoint.keep",),
    "report_to": ("record.exporters",),
    "algorithm": ("algo",),
    "adv_estimator": ("algo.type",),
    "environment": ("env",),
}


def nearest_keys(unknown: KeyPath, siblings: list[str], root: Spot = ROOT) -> list[KeyPath]:
    """The keys `unknown` may have meant, all equally likely; none when nothing comes close.

    A known alias first, then a sibling of similar spelling, then the same key elsewhere in the file, then a
    similar one elsewhere: `trainer.lr` gives `trainer.optimizer.lr`.
    """
    *at, key = unknown
    key = str(key).replace("-", "_")
    everywhere = [_beside(unknown, path) for path, _ in places(root)]
    if key in ALIASES:
        return _closest(unknown, [path for alias in ALIASES[key] for path in _ending(everywhere, alias)])
    if near := get_close_matches(key, siblings, n=1, cutoff=SIBLING_LIKENESS):
        return [(*at, near[0])]
    if same := _closest(unknown, _ending(everywhere, key)):
        return same
    keys = {str(path[-1]) for path in everywhere}
    near = get_close_matches(key, keys, n=1, cutoff=DISTANT_LIKENESS)
    return _closest(unknown, _ending(everywhere, near[0])) if near else []


def _beside(unknown: KeyPath, path: KeyPath) -> KeyPath:
    """The same key of the list element the unknown key stands in: `env.2`, where `places` says `env.0`."""
    inside = len(unknown) > 2 and isinstance(unknown[1], int) and path[:2] == (unknown[0], 0)
    return unknown[:2] + path[2:] if inside else path


def _ending(paths: list[KeyPath], end: str) -> list[KeyPath]:
    keys = tuple(end.split("."))
    return [path for path in paths if path[-len(keys) :] == keys]


def _closest(unknown: KeyPath, candidates: list[KeyPath]) -> list[KeyPath]:
    """Those that share most of the way with where the key was written; among them the shortest."""

    def distance(path: KeyPath) -> tuple[int, int]:
        pairs = list(zip(path, unknown[:-1], strict=False))
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        return -shared, len(path)

    best = min(map(distance, candidates), default=None)
    return list(dict.fromkeys(path for path in candidates if distance(path) == best))


Options = TypeVar("Options", bound=BaseModel)


class ConfigError(PacelineError, ValueError):
    """A run file or command line that cannot be used. The message has one line per problem.

    A `ValueError` too, as pydantic's own: so code that guards `RunConfig(...)` keeps working.
    """

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))


def from_flags(kind: type[Options], flags: Mapping[str, object]) -> Options:
    """The options of a command that reads no run file; flags that are None have their defaults."""
    try:
        return kind.model_validate({key: value for key, value in flags.items() if value is not None})
    except ValidationError as error:
        raise ConfigError(_of_flag(detail) for detail in error.errors(include_url=False)) from None


def _of_flag(detail: ErrorDetails) -> str:
    place = "".join(f"--{str(part).replace('_', '-')}: " for part in detail["loc"][:1])
    return f"{place}{detail['msg'].removeprefix('Value error, ')}"


def explain(error: ValidationError, document: ConfigDocument) -> list[str]:
    """One sentence per problem that pydantic found, in its order."""
    sentences: list[str] = []
    for detail in _deepest(error.errors(include_url=False), document.root):
        sentences += EXPLAIN.get(detail["type"], _wrong_value)(path_of(detail["loc"], document.root), detail, document)
    # A union of plain values reports one problem per member, and all read alike here.
    return list(dict.fromkeys(sentences))


def explain_values(
    error: ValidationError, values: Mapping[str, object], section: type[Section], source: str = ""
) -> list[str]:
    """The same sentences for values that Python gave to a section, or to a call (`source`) that makes one of them."""
    origin = Origin(source or section.__name__)
    document = ConfigDocument(origins={(): origin}, root=Spot.of(section))
    document.merge(plain_value(values), origin)
    return explain(error, document)


def _deepest(details: list[ErrorDetails], root: Spot) -> list[ErrorDetails]:
    """Where any of several kinds of value may stand, each says why it is not the one. If one of them looked inside the
    value, that one was meant, and the others have nothing to add."""
    paths = [path_of(detail["loc"], root) for detail in details]
    return [
        detail
        for detail, path in zip(details, paths, strict=True)
        if detail["type"] in EXPLAIN or not any(path == other[: len(path)] != other for other in paths)
    ]


def _unknown_key(path: KeyPath, detail: ErrorDetails, document: ConfigDocument) -> Iterator[str]:
    *at, key = path
    table = document.with_types()
    spot = spot_at(tuple(at), table, document.root)
    section = spot.section(value_at(tuple(at), table)) if spot else None
    siblings = list(section.model_fields) if section else []
    yield (
        f"{document.origin(path).place(path)}: there is no key `{key}` {_header(tuple(at), table, document.root)}; "
        + (_other_type(path, spot) or _did_you_mean(path, siblings, document))
    )


def _header(at: KeyPath, table: dict, root: Spot) -> str:
    if not at:
        return "at the top level" if root == ROOT else f"in {root.sections[''].__name__}"
    name = f"[[{at[0]}]]" if isinstance(at[-1], int) else f"[{dotted(at)}]"
    spot = spot_at(at, table, root)
    chosen = value_at((*at, "type"), table)
    return f"in {name} of type `{chosen}`" if spot and spot.is_choice else f"in {name}"


def _other_type(path: KeyPath, spot: Spot | None) -> str | None:
    """The key is right, but for another `type` of this section."""
    *at, key = path
    owners = [name for name, section in (spot.sections if spot else {}).items() if key in section.model_fields]
    if not owners:
        return None
    return f"it belongs to {dotted((*at, 'type'))} = {either(map(given, owners))}"


def _did_you_mean(path: KeyPath, siblings: list[str], document: ConfigDocument) -> str:
    dashes = "--" if document.origin(path).flag else ""
    if likely := nearest_keys(path, siblings, document.root):
        return f"did you mean {either(code(dashes + dotted(one) for one in likely))}?"
    return f"the keys there are {either(code(siblings), 'and')}"


def _missing_key(path: KeyPath, detail: ErrorDetails, document: ConfigDocument) -> Iterator[str]:
    *at, key = path
    if isinstance(key, int):
        # A tuple that is too short; the list as a whole is what is wrong.
        yield _mismatch(tuple(at), document)
        return
    blamed = (*at, "type") if (*at, "type") in document.origins else tuple(at)
    place = document.origin(blamed).place(tuple(at))
    spot = spot_at(path, document.with_types(), document.root)
    takes = _first_sentence(spot.help) or expected(spot) if spot else "a value"
    yield f"{place}: `{key}` is missing; it takes {takes}"


def _first_sentence(text: str) -> str:
    return " ".join(text.split()).partition(". ")[0].rstrip(".")


def _unknown_type(path: KeyPath, detail: ErrorDetails, document: ConfigDocument) -> Iterator[str]:
    spot = spot_at(path, document.table, document.root)
    path = (*path, "type")
    types = list(spot.sections) if spot else []
    written = value_at(path, document.table)
    near = get_close_matches(str(written), types, n=1)
    hint = f"did you mean {given(near[0])}? The" if near else "the"
    yield (
        f"{document.origin(path).place(path)}: there is no type {given(written)}; {hint} types are "
        + either(code(types), "and")
    )


def _missing_type(path: KeyPath, detail: ErrorDetails, document: ConfigDocument) -> Iterator[str]:
    spot = spot_at(path, document.table, document.root)
    types = map(given, spot.sections if spot else ())
    yield f"{document.origin(path).place(path)}: `type` is missing: add type = {either(types)}"


def _rule(path: KeyPath, detail: ErrorDetails, document: ConfigDocument) -> Iterator[str]:
    """A validator's own sentences. A rule over several keys names every source of keys."""
    place = document.origin(path).place(path)
    flags = any(origin.flag for origin in document.origins.values())
    if not path and flags and not place.startswith(COMMAND_LINE):
        place = f"{place} and {COMMAND_LINE}"
    for sentence in str(detail.get("ctx", {}).get("error", detail["msg"])).splitlines():
        yield f"{place}: {sentence}"


def _wrong_value(path: KeyPath, detail: ErrorDetails, document: ConfigDocument) -> Iterator[str]:
    yield _mismatch(path, document)


def _mismatch(path: KeyPath, document: ConfigDocument) -> str:
    spot = spot_at(path, document.with_types(), document.root) or Spot.of(object)
    value = value_at(path, document.table)
    place = document.origin(path).place(path)
    return f"{place}: expected {expected(spot)}, got {given(value)}{advice(spot, value)}"


EXPLAIN: dict[str, Callable[[KeyPath, ErrorDetails, ConfigDocument], Iterator[str]]] = {
    "extra_forbidden": _unknown_key,
    "missing": _missing_key,
    "union_tag_invalid": _unknown_type,
    "union_tag_not_found": _missing_type,
    "value_error": _rule,
}
