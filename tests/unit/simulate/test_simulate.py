"""Virtual time, the cost model, and the laws a simulated run keeps because the orchestrator is the real one."""

import asyncio

import pytest

from paceline.engine import GenerateRequest
from paceline.errors import PacelineError
from paceline.weights.update import WeightUpdate
from simulator.cost import CARDS, Lengths, SimulationPlan
from simulator.engine import SimulatedEngine, SimulationDeadlock, run_virtual
from simulator.run import best, simulate, sweep

ALIKE = Lengths(median=100, spread=0.0, longest=1000)


def small(**settings) -> SimulationPlan:
    """Forty GPUs, a batch of 32 bundles: an hour is a second or two."""
    lengths = Lengths(median=2000, spread=0.9, longest=16_000)
    given = {"gpus": 40, "sampling_gpus": 28, "lengths": lengths, "batch": 1024, "bundle": 32, "engines": 4}
    return SimulationPlan(**(given | {"staleness": 4, "concurrency": 32, "transfer": 1.0, "pause": 0.2} | settings))


# -- time -----------------------------------------------------------------------------------------------------------


def test_sleeps_end_in_order_and_at_their_times():
    async def naps():
        loop, seen = asyncio.get_running_loop(), []

        async def nap(seconds):
            await asyncio.sleep(seconds)
            seen.append((seconds, loop.time()))

        await asyncio.gather(*(nap(seconds) for seconds in (30, 0.5, 7200, 30.25, 0)))
        return seen

    assert run_virtual(naps()) == [(s, pytest.approx(s)) for s in (0, 0.5, 30, 30.25, 7200)]


def test_a_deadline_passes_in_virtual_time():
    async def late():
        async with asyncio.timeout(3600):
            await asyncio.sleep(3601)

    with pytest.raises(TimeoutError):
        run_virtual(late())


def test_what_would_hang_is_an_error():
    async def hang():
        await asyncio.sleep(60)
        await asyncio.Event().wait()

    with pytest.raises(SimulationDeadlock, match="second 60"):
        run_virtual(hang())


# -- lengths and costs ----------------------------------------------------------------------------------------------


def test_lengths_are_long_tailed_and_belong_to_their_noise():
    lengths = Lengths(median=1000, spread=1.0, longest=16_000)
    drawn = sorted(lengths.draw(i * 0x9E3779B97F4A7C15 - (1 << 63)) for i in range(4000))
    assert drawn[2000] == pytest.approx(1000, rel=0.05)
    assert sum(drawn) / len(drawn) == pytest.approx(lengths.mean, rel=0.05)
    assert drawn[-1] <= 16_000
    assert drawn[3960] > 8 * drawn[2000]
    assert lengths.draw(12345) == lengths.draw(12345)


def test_a_running_request_is_longer_than_a_drawn_one():
    assert ALIKE.progress == pytest.approx(ALIKE.mean / 2)
    tailed = Lengths(median=1000, spread=1.0, longest=16_000)
    assert tailed.progress > tailed.mean


def test_the_roofline():
    """Few requests cost what reading the weights costs; the more there are, the cheaper each, until memory is full."""
    plan = SimulationPlan(card=CARDS["h100"], gpus=200, sampling_gpus=100, decode_overhead=0.0, train_overhead=0.0)
    alone = plan.decode_seconds(1, 1000)
    assert alone == pytest.approx(14e9 / 3.35e12 / 0.7, rel=0.02)
    assert plan.decode_seconds(2, 1000) < 1.02 * alone
    per_token = [plan.decode_seconds(n, 1000) / n for n in (1, 8, 64, 512)]
    assert per_token == sorted(per_token, reverse=True)
    assert plan.room(2000) == pytest.approx(plan.room(1000) / 2, abs=1)
    with pytest.raises(PacelineError, match="raise cards_per_engine"):
        SimulationPlan(parameters=70e9, card=CARDS["h100"])
    assert plan.train_seconds(1e6) == pytest.approx(8 * 7e9 * 1e6 / (100 * 989e12 * 0.4))


# -- the engine -----------------------------------------------------------------------------------------------------


def ask(number: int, length: int = 1 << 30) -> GenerateRequest:
    return GenerateRequest(prompt_ids=(1,), max_tokens=length, noise=number, order=number)


async def asked(engine: SimulatedEngine, number: int, length: int = 1 << 30):
    reply = await engine.generate(ask(number, length))
    return reply, asyncio.get_running_loop().time()


def test_a_reply_takes_its_tokens_times_the_step():
    """Together they are slower, and the one that is left alone is fast again."""

    async def play():
        engine = SimulatedEngine(8, lambda running: 0.01 * running, ALIKE)
        return await asyncio.gather(asked(engine, 0), asked(engine, 1, 50))

    (long, at_long), (short, at_short) = run_virtual(play())
    assert (sum(long.token_ids), sum(short.token_ids)) == (100, 50)
    assert at_short == pytest.approx(50 * 0.02)
    assert at_long == pytest.approx(50 * 0.02 + 50 * 0.01)


def test_who_finds_no_slot_waits_the_oldest_ticket_first():
    async def play():
        engine = SimulatedEngine(1, lambda running: 0.01, ALIKE)
        first = asyncio.create_task(asked(engine, 5))
        await asyncio.sleep(0.1)
        rest = [asyncio.create_task(asked(engine, number)) for number in (9, 7)]
        return [(await task)[1] for task in (first, *rest)]

    assert run_virtual(play()) == [pytest.approx(t) for t in (1.0, 3.0, 2.0)]


def test_who_is_cancelled_while_waiting_never_takes_a_slot():
    async def play():
        engine = SimulatedEngine(1, lambda running: 0.01, ALIKE)
        waits = asyncio.create_task(engine.generate(ask(0)))
        await asyncio.sleep(0)
        gone = asyncio.create_task(engine.generate(ask(1)))
        last = asyncio.create_task(asked(engine, 2))
        await asyncio.sleep(0.5)
        gone.cancel()
        await waits
        return (await last)[1]

    assert run_virtual(play()) == pytest.approx(2.0)


def test_each_version_samples_its_part_of_a_reply_and_none_while_weights_are_put_in_place():
    async def play():
        engine = SimulatedEngine(4, lambda running: 0.01, ALIKE, transfer=0.1, pause=5.0)
        reply = asyncio.create_task(asked(engine, 0))
        await asyncio.sleep(0.2)
        await engine.load_weights(WeightUpdate(1, {}))
        await engine.load_weights(WeightUpdate(2, {}))
        late = asyncio.create_task(asked(engine, 1))
        return await reply, await late

    (reply, at), (late, _) = run_virtual(play())
    assert reply.versions == [0, 1, 2]
    assert reply.token_ids == [30, 10, 60]
    assert at == pytest.approx(1.0 + 2 * 5.0)
    assert (late.versions, late.token_ids) == ([2], [100])


# -- whole runs -----------------------------------------------------------------------------------------------------


def test_a_simulated_run_keeps_the_gates_promise_and_repeats_exactly():
    one, two = simulate(small(), 0.4), simulate(small(), 0.4)
    assert len(one.steps) > 20
    assert 0 < one.staleness[1] <= 4
    told = [{k: v for k, v in line.items() if k not in ("blocks", "resident")} for line in one.steps]
    assert told == [{k: v for k, v in line.items() if k not in ("blocks", "resident")} for line in two.steps]
    prompts = one.plan.prompt * one.plan.bundle * sum(line["batch/samples"] for line in one.steps)
    trained = sum(line["simulated/tokens"] for line in one.steps)
    assert prompts < trained <= one.sampled_tokens + prompts
    # Two groups of eight in nine are all right or all wrong.
    dropped = sum(line["drop_ratio"] for line in one.steps) / len(one.steps)
    assert dropped == pytest.approx(2 / 9, abs=0.06)


def test_staleness_zero_never_trains_an_old_token():
    report = simulate(small(staleness=0), 0.25)
    assert report.steps
    assert report.staleness == (0, 0)
    assert report.waiting > 0.2  # nothing is sampled while it trains


def test_the_trainer_waits_less_the_more_gpus_sample():
    waits = [simulate(small(sampling_gpus=gpus), hours).waiting for gpus, hours in ((10, 0.3), (24, 0.3), (37, 1.0))]
    assert waits == sorted(waits, reverse=True)
    assert waits[0] > 0.5
    assert waits[2] < 0.01


def test_the_best_split_is_the_fastest_whose_trainer_hardly_waits():
    told = []
    reports = sweep(small(), 0.25, splits=4, closer=3, tell=told.append)
    gpus = [report.plan.sampling_gpus for report in reports]
    assert gpus == sorted(gpus)
    assert {8, 16, 24, 32} <= set(gpus)
    assert len(told) == len(reports) == 7
    chosen = best(reports)
    assert chosen.waiting < 0.05
    assert all(r.tokens_per_second <= chosen.tokens_per_second for r in reports if r.waiting < 0.05)
    assert reports[0].waiting > 0.05  # fewer would starve the trainer


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sampling_gpus": 40}, "leave some for each side"),
        ({"batch": 1000}, "give a multiple of 256"),
        ({"parameters": 400e9}, "raise cards_per_engine"),
    ],
)
def test_a_plan_that_cannot_be_says_why(settings, words):
    with pytest.raises(PacelineError, match=words):
        small(**settings)
