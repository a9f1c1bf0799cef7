"""Laws of the run file: how it is read, edited, checked and written back."""

import itertools
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import tomli_w
from annotated_types import Ge, Gt, Le, Lt, MinLen
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from paceline.config import ConfigError, RunConfig, dump, load, schema
from paceline.config.base import Section
from paceline.config.document import resolve_paths
from paceline.config.env import ArithmeticConfig, CustomEnvConfig, RetrievalConfig
from paceline.config.fields import ROOT, SchemaNode, dotted, is_union, key_paths, node_at
from paceline.config.foreign_names import ALIASES, FOREIGN_NAMES, nearest_keys
from paceline.config.inference import SamplingConfig
from paceline.config.trainer import TrainerConfig

# --- helpers

ARITHMETIC = '[[env]]\ntype = "arithmetic"'


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write files into the working directory."""
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "run.toml") -> str:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text, encoding="utf-8")
        return name

    return write


def problems(path: str | None, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    assert str(caught.value).splitlines() == caught.value.problems
    return caught.value.problems


# --- random valid run files, drawn from the models themselves

TEXT = st.text(max_size=12)
TOML = st.recursive(
    st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT | st.datetimes() | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
NAMES = st.text(min_size=1, max_size=12)
SOURCES = (
    NAMES
    | st.lists(NAMES, min_size=1, max_size=3, unique=True)
    | st.dictionaries(NAMES, st.floats(0, 9, exclude_min=True), min_size=1, max_size=3)
)
CHOSEN = {  # keys tied to one another by rules
    "name": st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,9}", fullmatch=True),
    "batch_size": st.sampled_from([64, 128]),
    "group_size": st.sampled_from([1, 2, 8]),
    "min_group_size": st.just(1),
    "max_inflight": st.integers(8, 10**6),
    "dataset": SOURCES,
    "eval_dataset": SOURCES,
    "source": st.just("policy"),
    "base_url": st.from_regex(r"https?://[a-z0-9.]{1,9}(:[0-9]{1,4})?(/v1)?", fullmatch=True),
    "block": TEXT.map(lambda text: text + "{demonstration}"),
    "roles": st.dictionaries(NAMES, st.floats(0, 9, exclude_min=True), min_size=1, max_size=3),
    "metrics": st.dictionaries(NAMES, st.floats(0, 9, exclude_min=True), max_size=3),
    "hopeless_at": st.just(0.0),  # below every `mastered_at`
    "advertise": st.from_regex(r"[a-z0-9.-]{1,9}", fullmatch=True) | st.just("fe80::1"),
}


def values(spot: SchemaNode) -> st.SearchStrategy:
    kind = spot.annotation
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    if spot.sections:
        return st.one_of([tables(section) for section in spot.sections.values()])
    if is_union(kind):
        return st.one_of([values(SchemaNode.of(option)) for option in get_args(kind)])
    if get_origin(kind) is tuple:
        return st.tuples(*(values(SchemaNode.of(option)) for option in get_args(kind))).map(list)
    least = max([note.min_length for note in spot.constraints if isinstance(note, MinLen)], default=0)
    if spot.is_list:
        return st.lists(values(SchemaNode.of(get_args(kind)[0])), min_size=least, max_size=3)
    if spot.is_open:
        inner = (*get_args(kind), Any, Any)[1]
        return st.dictionaries(TEXT, TOML if inner is Any else values(SchemaNode.of(inner)), max_size=3)
    text = st.text(min_size=least, max_size=12)
    return text if kind is str else st.booleans() if kind is bool else numbers(kind, spot.constraints)


def numbers(kind: type, notes: tuple[Any, ...]) -> st.SearchStrategy:
    least = next((float(n.ge if isinstance(n, Ge) else n.gt) for n in notes if isinstance(n, Ge | Gt)), None)
    most = next((float(n.le if isinstance(n, Le) else n.lt) for n in notes if isinstance(n, Le | Lt)), None)
    kinds = {type(note) for note in notes}
    if kind is int:
        first = None if least is None else int(least) + (Gt in kinds)
        return st.integers(first, None if most is None else int(most) - (Lt in kinds))
    finite = {"allow_nan": False, "allow_infinity": False}
    return st.floats(least, most, exclude_min=Gt in kinds, exclude_max=Lt in kinds, **finite)


def tables(section: type[Section]) -> st.SearchStrategy:
    keys = {key: CHOSEN.get(key, values(SchemaNode.of_field(field))) for key, field in section.model_fields.items()}
    needed = {k: v for k, v in keys.items() if k == "type" or section.model_fields[k].is_required()}
    return st.fixed_dictionaries(needed, optional={k: v for k, v in keys.items() if k not in needed})


def settle(table: dict[str, Any]) -> dict[str, Any]:
    """Repair what breaks a rule over several keys."""
    if "steps" in table:
        table.pop("epochs", None)
    if table.get("backend") == "mlx":  # see test_hardware.py
        table = {key: value for key, value in table.items() if key not in ("placement", "device")}
    if "sampling" in table:
        table["allow_truncated_sampling"] = True
        table["sampling"]["temperature"] = table["sampling"].get("temperature") or 0.5
    for key in ("stream", "clip_skip_scope", "parallel"):  # they do not go with half of the others
        table.get("trainer", {}).pop(key, None)
    for key in ("backend", "base_url", "api_key_env", "folder", "launch"):  # see test_backends.py
        table.get("engine", {}).pop(key, None)
    table.get("cluster", {}).pop("most_engines", None)
    if table.get("deterministic"):
        table.pop("oversample", None)
    priority = table.get("replay", {}).get("priority")
    if isinstance(priority, dict) and priority.get("by") == "advantage":
        priority.pop("metrics", None)
    if table.get("on_stale", "drop") != "drop":
        table.pop("cancel_stale", None)
    if table.get("group_size") == 1:
        del table["group_size"]
    settle_algorithm(table.get("algo", {}), table)
    for index, env in enumerate(table.get("env", [])):
        env["name"] = f"{env.get('name', '')}{index}"
        settle_algorithm(env.get("algo", {}), table)
        whole = (env.get("algo") or table.get("algo") or {}).get("type") == "sft"
        env["seats"] = [seat for seat in env.get("seats", []) if seat["algo"]["type"] != "sft" and not whole]
        for seat in env["seats"]:
            settle_algorithm(seat["algo"], table)
        # See test_judge_sections.py and test_curriculum.py.
        for key in (*TIED.get(env["type"], ()), "judges", "task_weight", "curriculum"):
            env.pop(key, None)
        if env.get("group_size") == 1:  # refused under most of the algorithms
            del env["group_size"]
        if env["type"] == "reasoning-gym":
            env["task"] = "gcd"
        if env["type"] == "remote":
            env["url"] = "http://there:8900/rollout"
    trainer = table.get("trainer", {})
    kl = trainer.get("kl") or {}  # see test_kl_section.py
    kl.pop("workers", None)
    if kl.get("how") == "reward":
        del kl["how"]
    if isinstance(kl.get("reference"), dict):
        kl["reference"].setdefault("base_url", "http://there/v1")
    offloads = any((trainer.get(part) or {}).get("offload") for part in ("optimizer", "kl"))
    if offloads or table.get("engine", {}).get("cache") == "pages":
        table.pop("backend", None)
    return table


def settle_algorithm(algo: dict[str, Any], run: dict[str, Any]) -> None:
    """Give an algorithm the slots its type needs."""
    if algo.get("type") == "gae":
        run.setdefault("trainer", {}).setdefault("critic", {})
    if algo.get("type") in ("opd", "sft"):
        algo.pop("source", None)
        if algo.get("teacher", "policy") == "policy":
            algo["teacher"] = {"name": "m", "base_url": "http://there/v1"}
    algo.pop("tools", None)  # see test_echo.py
    teacher = algo.get("teacher")
    if isinstance(teacher, dict) and teacher.get("base_url") is None:
        # Scorers of the run's own are started on Ray alone, never play, and have no key.
        scored = algo["type"] != "sft" and run.get("placement") == "ray" and not teacher.get("api_key_env")
        teacher.pop("base_url", None)
        teacher |= {} if scored else {"base_url": "http://there/v1"}
    if algo.get("type") == "sft":
        del algo["teacher" if algo.setdefault("demonstrations", False) else "demonstrations"]


TIED = {
    "reasoning-gym": ("tasks", "args"),
    "verifiers": ("dataset", "eval_dataset"),
    "alphabet-sort": ("min_turns", "max_turns", "min_names", "max_names", "letters", "items"),
    "calculator": (
        "min_terms", "max_terms", "min_operand", "max_operand", "question", "result", "partial_credit", "call_reward",
    ),
}  # fmt: skip
"""Keys of an environment that must fit one another."""


RUN_FILES = tables(RunConfig).map(settle)


def load_text(text: str, *overrides: str):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.toml")
        path.write_bytes(text.encode())
        return load(path, overrides)


@settings(max_examples=20, deadline=None)
@given(RUN_FILES)
def test_a_dumped_config_loads_as_itself(table):
    first = load_text(tomli_w.dumps(table))
    text = dump(first.config)
    again = load_text(text)
    assert again.config == first.config
    assert again.warnings == first.warnings
    assert dump(again.config) == text


OPEN = {
    "kwargs": {"my-key": 3, "my_key": {"-": [1]}},
    "roles": {"my-role": 0.5, "my_role": 0.25},
    "metrics": {"my-part": 0.5, "my_part": 0.25},
    "env": {"my-word": "a", "MY_WORD": "b"},
}
"""Tables whose keys are the user's own, with some that can be typed: none is empty or has a dot."""


def flags(table: dict[str, Any], at: str = "--") -> list[str]:
    """The same settings as overrides. Keys of the user's own stay as they are."""
    mine = not OPEN.keys().isdisjoint(at.removeprefix("--").split("."))
    found: list[str] = []
    for key, value in table.items():
        if isinstance(value, dict) and value:
            found += flags(value, f"{at}{key}.")
        else:
            text = "{}" if value == {} else tomli_w.dumps({"x": value}).removeprefix("x = ").rstrip("\n")
            found += [at + (key if mine else key.replace("_", "-")), text]
    return found


@settings(max_examples=20, deadline=None)
@given(RUN_FILES)
def test_an_override_means_what_the_same_key_means_in_a_file(table):
    table.pop("env", None)
    typed = typable(table)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.toml")
        path.write_bytes(tomli_w.dumps(typed).encode())
        # But for paths, which start from the file's folder where a file holds them.
        placed = resolve_paths(typed, lambda _: Path(folder))
        assert load(None, flags(placed)) == load(path)


def typable(table: dict[str, Any]) -> dict[str, Any]:
    """With keys of the user's own that can be."""
    inside = {key: typable(value) if isinstance(value, dict) else value for key, value in table.items()}
    return inside | {key: OPEN[key] for key in inside.keys() & OPEN.keys()}


def test_dump_keeps_the_order_of_declaration_and_leaves_out_what_is_unset():
    text = dump(RunConfig(epochs=2))
    keys = [line.split(" = ")[0] for line in text.split("\n\n")[0].splitlines()]
    declared = [key for key in RunConfig.model_fields if key in keys]
    assert keys == declared
    assert {"epochs", "steps", "resume"} & set(keys) == {"epochs"}


def test_values_survive_that_toml_could_bend():
    odd = {"quote\"'\n\r\t\\": "\x00\x7f\u2028é", "big": 2**70, "tiny": 5e-324, "list": [[], {}, [1, "a"]]}
    env = {"type": "custom", "import_path": "m:f", "kwargs": odd}
    config = RunConfig(env=[env])  # ty: ignore[invalid-argument-type]
    assert load_text(dump(config)).config.env[0].kwargs == odd


@pytest.mark.parametrize("value", [None, float("nan"), (1, 2), object(), "\ud800"])
def test_kwargs_that_no_file_can_hold_are_refused(value):
    with pytest.raises(ConfigError, match="TOML can hold"):
        RunConfig(env=[{"type": "custom", "import_path": "m:f", "kwargs": {"x": value}}])


# --- state and imports


def test_importing_the_config_loads_neither_torch_nor_transformers():
    code = "import sys, paceline.config; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def mutable(value: Any) -> set[int]:
    children = (
        [getattr(value, key) for key in type(value).model_fields]
        if isinstance(value, BaseModel)
        else list(value.values())
        if isinstance(value, dict)
        else value
        if isinstance(value, list)
        else []
    )
    own = {id(value)} if isinstance(value, BaseModel | dict | list) else set()
    return own.union(*map(mutable, children))


def test_no_two_configs_share_state():
    one, two = RunConfig(), RunConfig()
    assert not mutable(one) & mutable(two)
    assert one.env[0].algo is not one.algo


def test_a_section_given_to_two_runs_is_filled_in_for_each_alone():
    env = ArithmeticConfig()
    one, two = RunConfig(env=[env], group_size=4), RunConfig(env=[env], group_size=2)
    assert (one.env[0].group_size, two.env[0].group_size, env.group_size) == (4, 2, None)
    assert not mutable(one) & mutable(two)


# --- includes


def test_the_including_file_wins_then_later_includes(write):
    bottom = "sampling = {max_tokens = 1, temperature = 0.5}"
    write(f"seed = 1\nsteps = 1\nbatch_size = 64\n{bottom}", "deep/a.toml")
    write('include = ["a.toml"]\nseed = 2\nsteps = 2\nsampling.max_tokens = 2', "deep/b.toml")
    write("seed = 3\nrecord.exporters = ['wandb', 'trackio']", "c.toml")
    top = "sampling.max_tokens = 4\nrecord.exporters = ['tensorboard']"
    path = write(f'include = ["deep/b.toml", "c.toml"]\n{top}')
    config = load(path).config
    assert (config.seed, config.steps, config.batch_size) == (3, 2, 64)
    assert (config.sampling.max_tokens, config.sampling.temperature) == (4, 0.5)
    assert config.record.exporters == ["tensorboard"]


def test_a_file_may_be_included_twice_but_not_in_a_circle(write):
    write("seed = 1", "base.toml")
    write('include = ["base.toml"]', "a.toml")
    assert load(write('include = ["base.toml", "a.toml"]')).config.seed == 1
    write('include = ["run.toml"]', "a.toml")
    circle = "the files include each other: run.toml -> a.toml -> run.toml"
    assert problems("run.toml") == [f"a.toml: include: {circle}"]


def test_problems_of_includes_name_the_file_that_wrote_them(write):
    write("sede = 1", "base.toml")
    path = write('include = ["base.toml"]\nstep = 3')
    assert [line.split(":")[0] for line in problems(path)] == ["base.toml", "run.toml"]
    write("seed = 1", "base.toml")
    path = write('include = ["bas.toml", "no/where.toml"]')
    assert problems(path) == [
        "run.toml: include: there is no file bas.toml; did you mean base.toml?",
        "run.toml: include: there is no file no/where.toml: the folder no does not exist",
    ]
    assert "expected a list of files" in problems(write('include = "base.toml"'))[0]


def test_a_file_that_changes_a_type_leaves_the_old_types_keys_behind(write):
    write('[trainer.loss]\ntype = "dppo"\nkl_tau = 0.5', "base.toml")
    config = load(write('include = ["base.toml"]\n[trainer.loss]\ntype = "ppo"')).config
    assert config.trainer.loss.type == "ppo"


# --- overrides


def test_overrides_as_the_command_line_passes_them():
    command = (
        "--staleness 2 --trainer.optimizer.lr=1e-3 --deterministic --env.0.group_size 4 --no-deterministic "
        "--env.reverse-text.algo.type max_rl --batch-size 64 --name=42 --trainer.gradient-checkpointing "
        "--trainer.optimizer.betas.1=0.5 --model.lora.rank 4"
    )
    config = load(None, command.split()).config
    assert (config.staleness, config.batch_size, config.name, config.deterministic) == (2, 64, "42", False)
    assert (config.trainer.optimizer.lr, config.trainer.optimizer.betas) == (1e-3, (0.9, 0.5))
    assert config.trainer.gradient_checkpointing is True
    assert config.model.lora.rank == 4
    env = config.env[0]
    assert (env.group_size, env.algo.type, env.type) == (4, "max_rl", "reverse-text")


def test_environments_are_addressed_by_index_name_or_type(write):
    path = write('[[env]]\ntype = "arithmetic"\nname = "my.sums"\n[[env]]\ntype = "reverse-text"')
    for address in ("0", "my.sums", "arithmetic"):
        sizes = [env.group_size for env in load(path, [f"--env.{address}.group-size", "2"]).config.env]
        assert sizes == [2, 8]
    assert load(path, ["--env.reverse_text.group_size", "4"]).config.env[1].group_size == 4
    known = "use an index or a name; there is 0 (`my.sums`) and 1 (`reverse-text`)"
    assert problems(path, "--env.7.weight", "2") == [
        f"command line: --env.7.weight: the list has no element `7`: {known}"
    ]
    assert known in problems(path, "--env.group_size", "2")[0]


def test_a_type_override_discards_only_what_the_new_type_does_not_know(write):
    env = '[[env]]\ntype = "reverse-text"\npartial_credit = 0\nweight = 2'
    path = write(f"[trainer.loss]\nkl_tau = 0.5\n{env}")
    command = ["--trainer.loss.type=ppo", "--trainer.loss.clip_low=0.1", "--env.0.type=arithmetic"]
    for order in itertools.permutations(command):
        config = load(path, order).config
        assert (config.trainer.loss.type, config.trainer.loss.clip_low) == ("ppo", 0.1)
        assert (config.env[0].type, config.env[0].weight) == ("arithmetic", 2.0)
    # What the user typed, or misspelled, is never thrown away in silence.
    assert "kl_tau" in problems(path, "--trainer.loss.kl_tau=1", "--trainer.loss.type=ppo")[0]
    path = write("[trainer.loss]\nkl_tua = 0.5")
    assert "kl_tua" in problems(path, "--trainer.loss.type=ppo")[0]


def test_a_section_without_a_type_has_the_default_type(write):
    assert load(write("[trainer.loss]\nkl_tau = 0.5")).config.trainer.loss.type == "dppo"
    assert load(write('[algo]\nstd = "sample"')).config.algo.type == "grpo"


def test_no_leaves_an_optional_key_out(write):
    path = write("steps = 3\n[model.lora]\nrank = 4")
    config = load(path, ["--no-steps", "--epochs=2", "--no-model.lora"]).config
    assert (config.steps, config.epochs, config.model.lora) == (None, 2, None)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["lr"], "command line: lr: expected a flag, such as --trainer.optimizer.lr 1e-3"),
        (["--"], "command line: --: expected a flag"),
        (["adv.estimator=gae"], "command line: adv.estimator=gae: expected a flag, write --adv.estimator=gae"),
        (["--seed", "1", "2"], "command line: 2: expected a flag"),
        (["--no-resume=x"], "command line: --no-resume takes no value: write --no-resume, or --resume=x"),
        (["--trainer.lr", "1"], "command line: --trainer.lr: there is no key `lr` in [trainer]; "
         "did you mean `--trainer.optimizer.lr` or `--trainer.critic.lr`?"),
        (["--group-size"], "command line: --group-size: expected a whole number, at least 1, got true"),
        (["--seed.x", "1"], "command line: --seed.x: expected a whole number, at least 0, got a table"),
        (["--steps", "1e3"], "got 1000.0; write 1000"),
        (["--seed", "-1"], "command line: --seed: expected a whole number, at least 0, got -1"),
        (["--env.0.type", "custom"], "command line: --env.0.type: `import_path` is missing; it takes `pack"),
        (["--batch-size", "7"], "command line: batch_size = 7 is not a multiple of group_size = 8"),
        (["--record.exporters", "wandb"], 'got "wandb"; write ["wandb"]'),
        (["--record.exporters.0", "wandb"], "the list is empty: give it as a whole"),
    ],
)  # fmt: skip
def test_command_line_errors(arguments, sentence):
    (line,) = problems(None, *arguments)
    assert sentence in line


# --- errors of a file


@pytest.mark.parametrize(
    ("text", "line"),
    [
        # Unknown keys: an alias, near siblings, the same key elsewhere, a near one, another type, the list.
        ("trainer.optimizer.learning_rate = 1", "trainer.optimizer.learning_rate: "
         "there is no key `learning_rate` in [trainer.optimizer]; did you mean `trainer.optimizer.lr`?"),
        ("stalness = 1", "stalness: there is no key `stalness` at the top level; did you mean `staleness`?"),
        ("batch-size = 8",
         "batch-size: there is no key `batch-size` at the top level; did you mean `batch_size`?"),
        ("trainer.max_tokens = 8", "trainer.max_tokens: there is no key `max_tokens` in [trainer]; "
         "did you mean `trainer.max_sample_tokens`?"),
        ("lr = 1", "lr: there is no key `lr` at the top level; "
         "did you mean `trainer.optimizer.lr` or `trainer.critic.lr`?"),
        ("every = 1", "every: there is no key `every` at the top level; "
         "did you mean `eval.every`, `checkpoint.every` or `promotion.every`?"),
        ("temprature = 1", "temprature: there is no key `temprature` at the top level; "
         "did you mean `sampling.temperature`?"),
        ("eval.max_new_tokens = 1", "eval.max_new_tokens: there is no key `max_new_tokens` in [eval]; "
         "did you mean `eval.sampling.max_tokens`?"),
        ("[[env]]\ntype = 'arithmetic'\n[[env]]\ntype = 'reverse-text'\nnum_generations = 2",
         "env.1.num_generations: there is no key `num_generations` in [[env]] of type `reverse-text`; "
         "did you mean `env.1.group_size`?"),
        ("trainer.loss.clip_low = 1", "trainer.loss.clip_low: there is no key `clip_low` in [trainer.loss] "
         'of type `dppo`; it belongs to trainer.loss.type = "ppo" or "gspo"'),
        ("checkpoint.zzz = 1", "checkpoint.zzz: there is no key `zzz` in [checkpoint]; "
         "the keys there are `every`, `keep` and `allow_changed_rows`"),
        # Types.
        ("algo.type = 'gpro'", 'algo.type: there is no type "gpro"; did you mean "grpo"? '
         "The types are `grpo`, `max_rl`, `reward`, `constant`, `rae`, `hierarchical`, `gae`, `echo`, `opd`, "
         "`opsd`, `sft` and `custom`"),
        ("trainer.loss.type = 3", "trainer.loss.type: there is no type 3; the types are "
         "`dppo`, `ppo`, `gspo`, `cispo`, `reinforce` and `custom`"),
        ("[[env]]\nweight = 1",
         'env.0: `type` is missing: add type = "reverse-text", "arithmetic", "alphabet-sort", "calculator", '
         '"equality", "tagged-answer", "math", "gsm8k", "code", "retrieval", "token-in", "remote", "module", '
         '"reasoning-gym", "textarena", "verifiers", "arena", "reward" or "custom"'),
        ("[env]\nweight = 1", "env: expected a list of tables, at least 1, got a table; "
         "write the header in double brackets, [[env]]"),
        # Values.
        ("seed = '64'", 'seed: expected a whole number, at least 0, got "64"; write 64, without quotes'),
        ("deterministic = 'True'",
         'deterministic: expected true or false, got "True"; write true, without quotes'),
        ("group_size = true", "group_size: expected a whole number, at least 1, got true"),
        ("seed = 1.5", "seed: expected a whole number, at least 0, got 1.5"),
        ("sampling.top_p = 2", "sampling.top_p: expected a number, above 0 and at most 1, got 2"),
        ("trainer.optimizer.lr = inf", "trainer.optimizer.lr: expected a number, at least 0, got inf; "
         "it must be finite"),
        ("trainer.optimizer.betas = [0.9]",
         "trainer.optimizer.betas: expected a list of 2 numbers, got [0.9]"),
        ("trainer.optimizer.betas = [0.9, 2]", "trainer.optimizer.betas.1: expected a number, "
         "at least 0 and below 1, got 2"),
        ("model.name = 3", "model.name: expected text, got 3"),
        ("model = 3", "model: expected a table, got 3"),
        ("trainer.loss = 3", "trainer.loss: expected a table, got 3"),
        ("model.lora.targets = [3]", "model.lora.targets.0: expected text, got 3"),
        ("model.lora.targets = 3", 'model.lora.targets: expected a list of text or "all-linear", got 3'),
        ("on_stale = 'dorp'", 'on_stale: expected one of "drop", "mask" or "keep", got "dorp"; '
         'did you mean "drop"?'),
        ("schema_version = 2", "schema_version: expected 1, got 2"),
        ("name = 'a b'", "name: `a b` cannot name the run directory: use letters, digits, `.`, `_` and `-`, "
         "and start with a letter or digit"),
        ("[[env]]\ntype = 'arithmetic'\nname = 'all'",
         "env.0.name: an environment name is used in metric keys: no '/' and not 'all'"),
    ],
)  # fmt: skip
def test_an_error_says_where_what_and_what_instead(write, text, line):
    assert problems(write(text, "examples/x.toml")) == [f"examples/x.toml: {line}"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("fields = {gt = 3, q = 'prompt'}", "fields.gt: expected text, got 3"),
        ("fields = {'a.b c' = {d = 'answer'}}", 'fields."a.b c": expected text, got a table'),
        ("fields = ['gt']", 'fields: expected a table, got ["gt"]'),
        ("eval_dataset = {'a.csv' = 1, 'b.csv' = 'x'}", 'eval_dataset."b.csv": expected a number, got "x"'),
        ("eval_dataset = ['a.csv', 3]", "eval_dataset.1: expected text, got 3"),
        ("eval_dataset = 3", "eval_dataset: expected text or a list of text or a table, got 3"),
        ("eval_dataset = {'a.csv' = -1}", "eval_dataset: the weight of `a.csv` is -1: it must be above 0"),
    ],
)
def test_in_a_table_of_the_users_own_keys_the_wrong_one_is_named(write, text, sentence):
    env = "[[env]]\ntype = 'equality'\ndataset = 'a.csv'\n"
    assert problems(write(env + text)) == [f"run.toml: env.0.{sentence}"]


@pytest.mark.parametrize("host", ["http://box", "box:80", "[::1]", ""])
def test_what_agents_are_told_is_a_host_alone(write, host):
    (sentence,) = problems(write(f"recording.advertise = '{host}'"))
    assert sentence.startswith(f"run.toml: recording.advertise: `{host}` is more than a host: leave out")


def test_all_problems_are_reported_at_once(write):
    path = write("sed = 1\nsteps = 0\nalgo.type = 'x'\n[[env]]\ntype = 'arithmetic'\nfoo = 1")
    assert len(problems(path, "--lr", "1", "--env.9.x", "1")) == 6
    path = write("steps = 1\nepochs = 1\nbatch_size = 7\nsampling.top_k = 1")
    assert len(problems(path)) == 3


def test_no_sentence_is_in_the_language_of_pydantic():
    said = []
    wrongs = itertools.cycle(["true", "'?'", "3.5", "[[]]", "-7"])
    for path in dict.fromkeys(path for path, _ in key_paths()):  # what several types know stands there several times
        for wrong in itertools.islice(wrongs, 3):
            try:
                load(None, [f"--{dotted(path)}={wrong}"])
            except ConfigError as error:
                said += error.problems
    assert len(said) > 400
    for phrase in ("Input should", "Value error", "pydantic", "another value", "valid dictionary"):
        assert not [line for line in said if phrase in line]


def test_a_rule_over_several_keys_names_everyone_who_had_a_say(write):
    assert problems(write("steps = 3"), "--epochs=2") == [
        "run.toml and command line: give either `steps` or `epochs`, not both"
    ]


def test_a_file_that_cannot_be_read_is_a_sentence(write, tmp_path):
    write("a = 1\nb 3\n")
    assert problems("run.toml") == [
        "run.toml, line 2, column 3: not valid TOML: expected '=' after a key in a key/value pair"
    ]
    assert problems(write("a = [1,\n"))[0].startswith("run.toml, line 2, column 1: not valid TOML")
    write("", "examples/reverse.toml")
    assert problems("examples/revrse.toml") == [
        "there is no file examples/revrse.toml; did you mean examples/reverse.toml?"
    ]
    assert problems("other.toml") == ["there is no file other.toml"]
    assert problems("examples") == ["examples is a folder: name a run file in it"]
    Path("run.toml").write_bytes(b"name = '\xff'")
    assert "is not UTF-8 text" in problems("run.toml")[0]
    Path("run.toml").write_bytes(b"\xef\xbb\xbfseed = 3")
    assert load("run.toml").config.seed == 3


# --- suggestions


def test_every_alias_leads_to_a_key_and_hides_none():
    everywhere = {path for path, _ in key_paths()}
    for alias in ALIASES:
        path = tuple(alias.split("."))
        found = nearest_keys(path, list(RunConfig.model_fields))
        assert found, alias
        assert set(found) <= everywhere, alias
        if alias != "beta":  # elsewhere it is the weight of a KL; a curriculum's own stands in its table alone
            assert path not in {known[-len(path) :] for known in everywhere}, alias
    assert {key for keys in ALIASES.values() for key in keys} == FOREIGN_NAMES.keys()


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("[[env]]\ntype = 'module'\nmodule = 'a.py'\ndataset = 'a.jsonl'\n[env.algo]\ntype = 'opd'\n"
         "tool_names = ['a']", "did you mean `env.0.algo.tools`?"),
        ("[[env]]\ntype = 'custom'\npath = 'a.py:b'", "did you mean `env.0.dataset` or `env.0.import_path`?"),
        ("[[judges]]\nname = 'a'\n" + ARITHMETIC, "did you mean `env.0.judges` or `advice.judges`?"),
        ("[trainer.loss]\ntype = 'dppo'\ndppo_mask_low = 0.1\n" + ARITHMETIC, "did you mean `trainer.loss.low`?"),
        ("[[env]]\ntype = 'module'\npath = 'a.py'\ndataset = 'a.jsonl'", "did you mean `env.0.module`?"),
        ("[[env]]\ntype = 'module'\nenv_path = 'a.py'\ndataset = 'a.jsonl'", "did you mean `env.0.module`?"),
        ("[[env]]\ntype = 'math'\npath = 'a.jsonl'", "did you mean `env.0.dataset`?"),
        ("[[env]]\ntype = 'math'\ntrain_data_path = 'a.jsonl'", "did you mean `env.0.dataset`?"),
        ("[[env]]\ntype = 'math'\ndataset = 'a.csv'\ntest_data_path = 'b.csv'", "did you mean `env.0.eval_dataset`?"),
        ("[[env]]\ntype = 'verifiers'\nenv_id = 'x'", "did you mean `env.0.id`?"),
        ("[[env]]\ntype = 'verifiers'\nid = 'x'\nenv_args = {a = 1}", "did you mean `env.0.args`?"),
        ("[[env]]\ntype = 'reward'\ndataset = 'a.csv'\nreward_fn = 'a.py:b'", "did you mean `env.0.import_path`?"),
        ("[data]\ntrain_data_path = 'a'\nprompts_per_rollout = 8\nresponses_per_prompt = 4\n" + ARITHMETIC,
         "data.train_data_path is `env.0.dataset` here, data.prompts_per_rollout is `batch_size` here and "
         "data.responses_per_prompt is `group_size` here"),
        ("[actor]\nmodel_name = 'x'\ntp = 2\nkl.coef = 0.1\n" + ARITHMETIC,
         "actor.model_name is `model.name` here, actor.tp is `trainer.parallel.tensor` here and "
         "actor.kl.coef is `trainer.kl.coef` here"),
        ("[actor]\nddp_size = 1\nuse_liger_kernel = true\nmax_grad_norm = 1.0\nkl.type = 'reward'\n"
         "kl.reward_estimator = 'k3'\n" + ARITHMETIC,
         "actor.ddp_size is `trainer.parallel.replicas` here, actor.use_liger_kernel is nothing here, "
         "actor.max_grad_norm is `trainer.optimizer.max_grad_norm` here, actor.kl.type is `trainer.kl.how` here and "
         "actor.kl.reward_estimator is `trainer.kl.kind` here"),
        ("[rollout]\nenv_path = 'a.py'\ntest_sampling_params.temperature = 0.0\n" + ARITHMETIC,
         "rollout.env_path is `env.0.module` here and rollout.test_sampling_params is `eval.sampling` here"),
        ("[critic]\nmodel_name = 'x'\nlr = 5e-6\nclip = 0.5\n" + ARITHMETIC,
         "critic.model_name is `model.name` here, critic.lr is `trainer.critic.lr` here and "
         "critic.clip is `trainer.critic.value_clip` here"),
        ("[trianer]\nstaleness = 2\n" + ARITHMETIC, "did you mean `trainer`?"),
        ("[trainer]\nexperiment_name = 'x'\n" + ARITHMETIC, "did you mean `name`?"),
        ("[adv]\nestimator = 'reinforce'\nnorm_var = true\nglobal_norm = true\n" + ARITHMETIC,
         "adv.estimator is `algo.type` here, adv.norm_var is `algo.std` here and "
         "adv.global_norm is `algo.baseline` here"),
        ("dynamic_filtering = true\n" + ARITHMETIC, "did you mean `filters.zero_advantage`?"),
        ("use_wandb = true\n" + ARITHMETIC, "did you mean `record.exporters`?"),
        ("[trainer]\nproject = 'x'\n" + ARITHMETIC, "did you mean `record.project`?"),
        ("beta = 0.1\n" + ARITHMETIC, "did you mean `trainer.kl.coef`?"),
        ("staleness_limit = 3\n" + ARITHMETIC, "did you mean `staleness`?"),
        ("max_head_offpolicy_versions = 2\n" + ARITHMETIC, "did you mean `staleness`?"),
    ],
)  # fmt: skip
def test_a_key_of_another_trainer_is_answered_with_ours(write, text, hint):
    assert any(problem.endswith(f"; {hint}") for problem in problems(write(text))), problems(write(text))


def test_a_key_with_a_letter_missing_is_recognised_wherever_it_stands():
    everywhere = list(dict.fromkeys(path for path, _ in key_paths()))
    for path in everywhere:
        key = str(path[-1])
        siblings = [str(other[-1]) for other in everywhere if other[:-1] == path[:-1]]
        if len(key) > 3:
            misspelled = (*path[:-1], key[:2] + key[3:])
            assert nearest_keys(misspelled, siblings) == [path]


# --- rules of a run


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"batch_size": 12}, "batch_size = 12 is not a multiple of group_size = 8"),
        ({"max_inflight": 7}, "max_inflight = 7 cannot hold one group"),
        ({"env": [{"type": "arithmetic"}] * 2}, "2 environments are named `arithmetic`"),
        (
            {"env": [{"type": "arithmetic", "min_group_size": 9}]},
            "min_group_size = 9 is larger than group_size = 8",
        ),
        ({"env": []}, "a list of tables, at least 1"),
        ({"sampling": {"top_p": 0.9}}, "allow_truncated_sampling = true"),
        ({"sampling": {"top_k": 5}}, "allow_truncated_sampling = true"),
        ({"sampling": {"temperature": 0}, "allow_truncated_sampling": True}, "training at temperature 0"),
        ({"steps": 1, "epochs": 1}, "either `steps` or `epochs`"),
        (
            {"placement": "ray", "model": {"lora": {}}, "trainer": {"parallel": {"ranks": 2, "tensor": 2}}},
            r"leave \[model.lora\] out, or set tensor = 1",
        ),
    ],
)
def test_a_run_that_cannot_work_is_refused(keys, sentence):
    with pytest.raises(ConfigError, match=sentence):
        RunConfig(**keys)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: TrainerConfig(lr=1e-3),  # ty: ignore[unknown-argument]
            "TrainerConfig: lr: there is no key `lr` in TrainerConfig; did you mean `optimizer.lr` or `critic.lr`?",
        ),
        (
            lambda: TrainerConfig(optimizer={"lr": "1e-3"}),  # ty: ignore[invalid-argument-type]
            'TrainerConfig: optimizer.lr: expected a number, at least 0, got "1e-3"; write 1e-3, without quotes',
        ),
        (
            lambda: TrainerConfig(loss={"type": "cispo", "clip_hi": 1}),  # ty: ignore[invalid-argument-type]
            "TrainerConfig: loss.clip_hi: there is no key `clip_hi` in [loss] of type `cispo`; did you mean",
        ),
        (
            lambda: RetrievalConfig(topk=2),  # ty: ignore[unknown-argument]
            "RetrievalConfig: topk: there is no key `topk` in RetrievalConfig; did you mean `top_k`?",
        ),
        (
            lambda: CustomEnvConfig(dataset="rows.jsonl"),
            "CustomEnvConfig: `import_path` is missing; it takes `package.module:name`",
        ),  # ty: ignore[missing-argument]
        (
            lambda: SamplingConfig(max_tokens=0),
            "SamplingConfig: max_tokens: expected a whole number, at least 1, got 0",
        ),
    ],
)
def test_a_section_made_in_python_is_refused_in_the_same_sentences(make, sentence):
    with pytest.raises(ConfigError) as caught:
        make()
    assert str(caught.value).startswith(sentence)


def test_what_is_left_out_is_filled_in():
    config = RunConfig(staleness=3, batch_size=64, group_size=4, algo={"type": "max_rl"})
    env = config.env[0]
    assert (config.steps, config.max_inflight) == (100, 256)
    assert (env.name, env.group_size, env.min_group_size, env.algo.type) == ("reverse-text", 4, 2, "max_rl")
    assert RunConfig(algo={"type": "reward"}).env[0].min_group_size == 1
    assert RunConfig(epochs=1).steps is None
    RunConfig(sampling={"top_p": 0.9}, allow_truncated_sampling=True)
    RunConfig(eval={"sampling": {"temperature": 0}})


def test_a_group_of_one_is_refused_where_rollouts_are_compared(recwarn):
    for algo, other in (("grpo", 'baseline = "batch"'), ("max_rl", 'type = "rae"')):
        with pytest.raises(ConfigError, match=rf"{algo} compares .* Write group_size = 8, .*{other}"):
            load(None, ["--group-size", "1", f"--algo.type={algo}"])
    assert load(None, ["--group-size=1", "--algo.type=reward"]).warnings == []
    for taught in ({"algo.type": "echo"}, {"env.0.type": "arena", "env.0.import_path": "a.py:A"}):
        loaded = load(None, ["--group-size=1", *(f"--{key}={value}" for key, value in taught.items())])
        assert ["group_size is 1" in warning for warning in loaded.warnings] == [True], taught
    assert not recwarn.list, "captured, not printed"


# --- schema


def test_the_schema_describes_every_key_and_allows_include():
    described = schema()
    assert described["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert described["properties"]["include"]["items"] == {"type": "string"}
    assert described["additionalProperties"] is False
    for section in [RunConfig, *(s for _, spot in key_paths() for s in spot.sections.values())]:
        entry = described if section is RunConfig else described["$defs"][section.__name__]
        assert entry["properties"].keys() - {"include"} == section.model_fields.keys()
        for key, field in section.model_fields.items():
            assert entry["properties"][key].get("description") == field.description
    assert described["properties"]["staleness"]["description"].startswith("How many versions")
    assert node_at(("staleness",), {}).help == described["properties"]["staleness"]["description"]
    assert ROOT.sections == {"": RunConfig}
