"""Laws of the planner: memory adds up, more hardware never hurts, and advice that is given works."""

import json
import math
import subprocess
import sys
import warnings
from dataclasses import replace
from functools import reduce
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from families import FAMILIES
from paceline.config import RunConfig, load
from paceline.config.run import ConfigWarning
from paceline.errors import PacelineError
from paceline.planner.hardware import found, parse, with_memory
from paceline.planner.memory import layout_of, memory
from paceline.planner.plan import predict
from paceline.planner.shape import ModelShape, Work, assumed, read_shape, shape_of
from paceline.planner.speed import Speeds, ways

ROOT = Path(__file__).parents[3]
QUICKSTART = str(ROOT / "examples" / "quickstart.toml")
QWEN = {"vocabulary": 151_936, "kv_heads": 2, "tied": True, "biased": True, "max_context": 32_768}
SMALL = ModelShape(layers=24, attending=24, hidden=896, heads=14, head_dim=64, mlp=4864, **QWEN)
LARGER = ModelShape(layers=28, attending=28, hidden=1536, heads=12, head_dim=128, mlp=8960, **QWEN)
HUGE = replace(LARGER, layers=64, hidden=5120, heads=40, kv_heads=8, mlp=27_648, tied=False)
SHAPES = {"0.5B": SMALL, "1.5B": LARGER}
WORK = Work(rollouts=256, group=8, prompt=128, reply=512, longest=512)


def run_file(**changes) -> RunConfig:
    """The benchmarks' own: bfloat16, 256 requests, micro-batches of 16k tokens."""
    plain = {
        "staleness": 0,
        "batch_size": 256,
        "model.dtype": "bfloat16",
        "sampling.max_tokens": 512,
        "engine.max_running": 256,
        "engine.max_context": 2048,
        "engine.prefill_tokens": 8192,
        "engine.cache_gib": 24.0,
        "trainer.micro_batch_tokens": 16_384,
    }
    table: dict = {}
    for path, value in (plain | {key.replace("__", "."): value for key, value in changes.items()}).items():
        *sections, key = path.split(".")
        reduce(lambda at, section: at.setdefault(section, {}), sections, table)[key] = value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigWarning)
        return RunConfig.model_validate(table)


# -- shapes -----------------------------------------------------------------------------------------------------------


def test_known_models_have_their_known_numbers_of_parameters():
    assert SMALL.parameters == 494_032_768
    assert LARGER.parameters == 1_543_714_304
    assert SMALL.kv_elements == 2 * 24 * 2 * 64


def test_the_package_model_is_counted_as_torch_counts_it():
    folder = ROOT / "src" / "paceline" / "quickstart"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    assert shape_of("paceline:quickstart").parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "mistral", "gemma", "gemma3", "olmo2", "phi3", "granite"]
)
def test_families_are_counted_from_their_config_alone(family, tmp_path):
    config = FAMILIES[family]()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    config.save_pretrained(tmp_path)
    counted = sum(p.numel() for p in model.parameters())
    assert shape_of(str(tmp_path)).parameters == pytest.approx(counted, rel=0.02)  # norms here and there


def test_experts_count_in_memory_and_only_active_ones_in_work():
    table = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    dense = read_shape(table | {"intermediate_size": 128})
    mixed = read_shape(table | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128})
    grown = 7 * 2 * 3 * 64 * 128 + 2 * 64 * 8
    assert mixed.parameters - dense.parameters == grown
    assert mixed.active_parameters - dense.active_parameters == 2 * 3 * 64 * 128 + 2 * 64 * 8


def test_a_model_that_is_not_here_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(PacelineError, match="hf download nobody/nothing"):
        shape_of("nobody/nothing")


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_static_state_by_hand(shape):
    """bfloat16: 2 bytes to sample, 2 to train, 4 master, 8 moments, 4 gradient sums, 2 fresh ones, by parameter."""
    parts = memory(run_file(), shape, parse("h200")).places[0].parts
    by_hand = {"engine weights": 2, "trainer weights": 2, "trainer masters": 4, "trainer moments": 8}
    by_hand |= {"trainer gradients": 4, "trainer fresh gradients": 2}
    for name, each in by_hand.items():
        assert parts[name] == each * shape.parameters, name
    page = 16 * shape.kv_elements * 2
    assert parts["KV pages"] == pytest.approx(min(24 * 2**30, 256 * 2048 * shape.kv_elements * 2), abs=2 * page)


@given(
    ranks=st.integers(1, 16),
    shard=st.sampled_from(["none", "full"]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    shape=st.sampled_from([SMALL, LARGER, HUGE]),
)
def test_more_ranks_never_need_more_each(ranks, shard, dtype, shape):
    hardware = parse("h200x64")
    settings = {"placement": "ray", "model__dtype": dtype, "trainer__parallel__shard": shard}
    few, more = (
        memory(run_file(**settings, trainer__parallel__ranks=count), shape, hardware).places[1].used
        for count in (ranks, ranks + 1)
    )
    assert more <= few * (1 + 1e-9)


@given(
    lora=st.booleans(),
    offload=st.booleans(),
    checkpointing=st.booleans(),
    placement=st.sampled_from(["local", "processes", "ray"]),
    reference=st.sampled_from(["base", "ema"]),
)
def test_a_place_holds_the_sum_of_its_parts_and_savings_save(lora, offload, checkpointing, placement, reference):
    changes = {"placement": placement, "trainer__optimizer__offload": offload, "trainer__kl": {"reference": reference}}
    if lora:
        changes["model__lora"] = {"rank": 8}
    config = run_file(**changes)
    there = memory(config, LARGER, parse("h200x2"))
    for place in there.places:
        assert place.used == pytest.approx(math.fsum(place.parts.values()))
        assert all(size >= 0 for size in place.parts.values())
    assert any(place.name == "host" for place in there.places) == offload
    thrifty = memory(load(config, settings={"trainer.gradient_checkpointing": True}).config, LARGER, parse("h200x2"))
    assert max(p.used for p in thrifty.places) <= max(p.used for p in there.places)


# -- what does not fit ------------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(
    gigabytes=st.integers(4, 200),
    count=st.integers(1, 8),
    shape=st.sampled_from([SMALL, LARGER, HUGE]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    micro=st.sampled_from([4096, 65_536, "auto"]),
    cache=st.sampled_from([None, 8.0, 64.0]),
    ranks=st.sampled_from([1, 4]),
)
def test_advice_that_is_followed_makes_the_run_fit(gigabytes, count, shape, dtype, micro, cache, ranks):
    hardware = with_memory(parse(f"h200x{count}"), f"{gigabytes}GB")
    changes = {"model__dtype": dtype, "trainer__micro_batch_tokens": micro, "trainer__parallel__ranks": ranks}
    config = run_file(**changes, engine__cache_gib=cache, placement="ray" if ranks > 1 else "local")
    plan = predict(config, hardware, WORK, shape)
    assert bool(plan.advice) != plan.memory.fits
    for advice in plan.advice:
        after = memory(load(config, settings=advice.overrides).config, shape, hardware)
        assert after.fits == advice.enough, advice.sentence


def test_a_cache_that_is_too_large_is_named_with_the_size_that_fits():
    plan = predict(run_file(engine__cache_gib=64.0), with_memory(parse("h200"), "72GB"), WORK, LARGER)
    assert not plan.memory.fits
    assert "engine.cache_gib" in plan.advice[0].overrides
    sentences = [advice.sentence for advice in plan.advice]
    assert any(sentence.startswith("set trainer.gradient_checkpointing = true (saves ") for sentence in sentences)


def test_more_ranks_than_gpus_do_not_fit():
    plan = predict(run_file(trainer__parallel__ranks=4, placement="ray"), parse("h200x4"), WORK, SMALL)
    assert plan.memory.lacking == 1
    assert {"trainer.parallel.ranks": 3} in [advice.overrides for advice in plan.advice]


# -- time -------------------------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(
    factor=st.floats(1.0, 8.0),
    what=st.sampled_from(["bandwidth", "flops", "link"]),
    staleness=st.integers(0, 4),
    placement=st.sampled_from(["local", "processes", "ray"]),
    shape=st.sampled_from([SMALL, LARGER, HUGE]),
)
def test_faster_hardware_never_slows_a_run(factor, what, staleness, placement, shape):
    slow = parse("h100x2")
    fast = replace(slow, card=replace(slow.card, **{what: factor * getattr(slow.card, what)}))
    config = run_file(staleness=staleness, placement=placement)
    before, after = (predict(config, hardware, WORK, shape).times for hardware in (slow, fast))
    for name in ("sample", "train", "publish", "step"):
        assert getattr(after, name) <= getattr(before, name) * (1 + 1e-9), name


def test_riding_ahead_is_never_slower_than_taking_turns():
    for placement in ("local", "ray"):
        turns, ahead = (
            predict(run_file(staleness=s, placement=placement), parse("h200x2"), WORK, SMALL) for s in (0, 1)
        )
        assert ahead.times.step <= turns.times.step


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "in process"),
        ({"placement": "processes"}, "delta"),
        ({"placement": "processes", "model__dtype": "float32"}, "disk"),
        ({"placement": "processes", "weights__path": "http"}, "http"),
        ({"placement": "processes", "model__lora": {"rank": 4}}, "http"),
        ({"placement": "ray"}, "object store"),
    ],
)
def test_exactly_one_way_of_publishing_is_the_runs_own(changes, name):
    assert [way.name for way in ways(run_file(**changes), SMALL, parse("h200x2")) if way.used] == [name]


def stored(name: str) -> dict[str, dict]:
    text = (ROOT / "benchmarks" / "results" / f"{name}-h200.json").read_text()
    return {line["what"]: line for line in json.loads(text)["lines"]}


@pytest.mark.parametrize("name", SHAPES)
def test_what_the_h200_measured_is_what_is_planned_for_it(name):
    """Fitted to the first two kinds, so these are near; long prompts in groups and whole steps were not looked at."""
    engine, trainer, shape, hardware = stored("engine"), stored("trainer"), SHAPES[name], parse("h200")
    for requests in (1, 64, 256):
        config = run_file(batch_size=requests, group_size=1, **{"algo.type": "reward"})
        work = replace(WORK, rollouts=requests, group=1)
        seconds, _, running = Speeds(config, shape, hardware).sample(work, memory(config, shape, hardware))
        assert running == requests
        rate = engine[f"{name} {requests} requests, 128 in, 512 out"]["value"]
        assert requests * 512 / seconds == pytest.approx(rate, rel=0.1)
    for out in (128, 512):
        work = replace(WORK, prompt=1024, reply=out, longest=out)
        seconds, _, _ = Speeds(run_file(), shape, hardware).sample(work, memory(run_file(), shape, hardware))
        rate = engine[f"{name} groups of 8, 1,024-token prompt, {out} out"]["rate"]
        assert 256 * out / seconds == pytest.approx(rate, rel=0.25)
    one = Speeds(run_file(), shape, hardware)
    tokens = 4 * 16_384 * 0.98
    planned = tokens / (tokens * one.token_seconds(1004) + one.optimizer_seconds())
    assert planned == pytest.approx(trainer[f"{name} packed step"]["rate"], rel=0.1)
    parts = memory(run_file(), shape, hardware).places[0].parts
    beyond = (parts["trainer activations"] + parts["trainer fresh gradients"]) / 1e9
    assert beyond == pytest.approx(trainer[f"{name} memory beyond static state"]["GB"], rel=0.15)


def test_whole_steps_on_the_h200_come_out_as_planned():
    trainer = stored("trainer")
    measured = [trainer["0.5B whole synchronous GRPO step, 32 x 8, 128 in, 512 out"]["value"]]
    measured.append(trainer["0.5B at staleness 1"]["seconds"])
    for staleness, seconds in enumerate(measured):
        config = run_file(staleness=staleness, engine__cache_gib=16.0)
        assert predict(config, parse("h200"), WORK, SMALL).times.step == pytest.approx(seconds, rel=0.25)


# -- hardware ---------------------------------------------------------------------------------------------------------


def test_hardware_is_read_from_its_name():
    assert (parse("h200x8").count, parse("h200x8").card.name) == (8, "h200")
    assert (parse("A100-80x2").count, parse("a100-80x2").card.memory) == (2, 80e9)
    assert with_memory(parse("h100"), "24GB").card.memory == 24e9
    for wrong in ("h300", "h200x0", ""):
        with pytest.raises(PacelineError, match="such as h200x8"):
            parse(wrong)
    for wrong in ("much", "0GB", "1.2.3GB"):
        with pytest.raises(PacelineError, match="such as 24GB"):
            with_memory(parse("h200"), wrong)


def test_this_machine_is_measured():
    here = found("cpu", 0.02)
    assert here.kind == "cpu"
    assert here.card.memory > 1e8
    assert 1e8 < here.card.flops < 1e15
    assert 1e8 < here.card.bandwidth < 1e13


# -- the command ------------------------------------------------------------------------------------------------------


def test_checking_needs_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None; "  # as if it were not installed
        "from paceline.commands import main; "
        f"sys.exit(main(['check', {QUICKSTART!r}, '--hardware', 'h200x8']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert 'placement = "ray"' in done.stderr.replace("\n", " ")
    assert "torch is not installed here: the layers of `paceline:quickstart` are checked when" in done.stderr


def test_the_plan_as_json(here):
    done = here("check", QUICKSTART, "--hardware", "h200", "--memory", "1GB", "--json", "--reply-tokens", "7")
    table = json.loads(done.stdout)
    assert (table["fits"], table["work"]["reply"], table["hardware"]["card"]["memory"]) == (False, 7, 1e9)
    assert "GB short" in table["advice"][0]
    assert here("check", QUICKSTART, "--hardware", "abacus").returncode == 2


def test_a_run_keeps_its_plan_and_is_compared_with_it(here, tmp_path):
    brief = ["--steps", "4", "--batch-size", "64", "--eval.every", "0", "--quiet", "--device", "cpu"]
    assert here("train", QUICKSTART, *brief).returncode == 0
    plan = json.loads((tmp_path / "runs" / "quickstart" / "plan.json").read_text())
    assert plan["work"]["rollouts"] == 64
    done = here("check", "runs/quickstart", "--json")
    lines = {line["what"]: line for line in json.loads(done.stdout)["lines"]}
    assert {"step", "train", "publish", "sampled tokens", "trained tokens"} <= lines.keys()
    assert lines["memory of the trainer's process"]["measured"] > 0.1  # GB, of any process with torch
    assert "measured" in here("check", "runs/quickstart").stdout
    assert here("check", str(tmp_path)).returncode == 2
    for what, line in lines.items():
        assert math.isfinite(line["ratio"])
        assert math.isfinite(line["informed_ratio"])
        print(f"{what}: planned {line['planned']:.3g}, measured {line['measured']:.3g}, {line['informed_ratio']:.2f}")


def test_lengths_are_halved_only_where_none_is_given():
    work = assumed(run_file(), SMALL)
    assert (work.prompt, work.reply, work.assumed) == (128, 256, True)
    assert assumed(run_file(), SMALL, 50, 100).trained_tokens == 256 * 150


# -- teachers, tensor and context parallel, evaluation ---------------------------------------------------------------


def taught(**more):
    env = [{"type": "reverse-text", "algo": {"type": "opd", "teacher": {"name": "paceline:quickstart"}}}]
    return run_file(placement="ray", **more).model_copy(
        update={"env": RunConfig.model_validate({"placement": "ray", "env": env}).env}
    )


def test_each_scorer_takes_a_gpu_and_halves_the_scoring():
    hardware = parse("h200x8")
    one, two = taught(cluster__scorers=1), taught(cluster__scorers=2)
    places = [memory(config, SMALL, hardware).places[-1] for config in (one, two)]
    assert [place.count for place in places] == [1, 2]
    assert places[0].parts == places[1].parts
    assert layout_of(two, hardware).devices == layout_of(one, hardware).devices + 1
    assert Speeds(one, SMALL, hardware).score_seconds(WORK) == 2 * Speeds(two, SMALL, hardware).score_seconds(WORK) > 0
    assert Speeds(run_file(), SMALL, hardware).score_seconds(WORK) == 0


def test_ranks_that_share_a_matrix_or_a_sequence_hold_less_of_it():
    hardware = parse("h200x8")

    def parts(**more):
        config = run_file(placement="ray", trainer__parallel__ranks=4, **more)
        return next(place for place in memory(config, LARGER, hardware).places if place.name == "trainer GPU").parts

    whole = parts(trainer__parallel__shard="none")
    cut = parts(trainer__parallel__shard="none", trainer__parallel__tensor=2)
    long = parts(trainer__parallel__shard="none", trainer__parallel__context=2)
    for name in ("trainer weights", "trainer moments", "trainer gradients"):
        assert cut[name] == whole[name] / 2
        assert long[name] == whole[name]
    assert long["trainer activations"] < whole["trainer activations"]
    assert cut["trainer activations"] < whole["trainer activations"]
    sharded = [parts(trainer__parallel__shard="full", trainer__parallel__tensor=tensor) for tensor in (1, 2)]
    assert sharded[0]["trainer moments"] == sharded[1]["trainer moments"]


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("shard", ["none", "full"])
def test_a_critic_takes_on_each_rank_what_the_policy_takes_to_train(shard, lora):
    """But for a frozen base, which it shares."""
    more = {"model__lora": {"rank": 16}} if lora else {}
    config = run_file(
        placement="ray", trainer__parallel__ranks=4, trainer__parallel__shard=shard, trainer__critic={}, **more
    )
    places = memory(config, LARGER, parse("h200x8")).places
    parts = next(place for place in places if place.name == "trainer GPU").parts
    for name in ("moments", "gradients"):
        assert parts[f"critic {name}"] == parts[f"trainer {name}"] > 0
    if lora:
        assert parts["critic weights"] < 0.1 * parts["trainer weights"]
    else:
        assert parts["critic weights"] == parts["trainer weights"]


def test_colocated_ranks_need_no_gpus_beside_their_own():
    hardware = parse("h200x8")
    config = run_file(placement="colocated", trainer__parallel__ranks=4)
    layout = layout_of(config, hardware)
    assert (layout.engines, layout.ranks, layout.devices) == (4, 4, 4)
    (place,) = [place for place in memory(config, LARGER, hardware).places if place.name != "host"]
    assert place.count == 4
    apart = memory(run_file(placement="ray", trainer__parallel__ranks=4), LARGER, hardware).places
    assert place.used < sum(each.used for each in apart if each.name != "host")


def test_an_evaluation_is_planned_by_its_episodes():
    hardware = parse("h200x1")
    config = run_file(eval__examples=64, eval__samples=2)
    work = assumed(config, SMALL)
    assert work.evaluated == 128
    once = Speeds(config, SMALL, hardware).evaluate_seconds(work)
    more = Speeds(config, SMALL, hardware).evaluate_seconds(replace(work, evaluated=256))
    assert more == pytest.approx(2 * once)
    assert assumed(run_file(eval__every=0), SMALL).evaluated == 0


def test_a_mac_with_more_memory_takes_larger_micro_batches_and_a_packed_base_leaves_room_for_them():
    settings = {"model.dtype": "bfloat16", "model.lora": {"rank": 16}, "engine.max_context": 2048}
    lora = load(run_file(), settings=settings).config

    def budget(gigabytes: int, shape: ModelShape) -> int:
        plan = predict(lora, parse(f"mac{gigabytes}"), WORK, shape)
        assert plan.times is None
        return int(plan.verdict.rsplit(" ", 1)[-1]) if "up to" in plan.verdict else 0

    packed = replace(LARGER, packed=4.5 / 8)
    plain, small = ([budget(size, shape) for size in (4, 8, 16, 32, 64)] for shape in (LARGER, packed))
    assert plain == sorted(plain)
    assert small == sorted(small)
    assert all(a <= b for a, b in zip(plain, small, strict=True))
    assert plain[0] == 0 < small[-1]
    assert sum(plain) < sum(small)


def test_a_quantised_config_says_how_much_a_weight_takes():
    config = json.loads((ROOT / "src/paceline/quickstart/config.json").read_text())
    assert read_shape(config).packed is None
    assert read_shape(config | {"quantization": {"bits": 4, "group_size": 64}}).packed == 4.5 / 8
