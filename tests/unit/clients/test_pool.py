"""The pool over engines whose whole life is written down: when they are full, when they die, what they answered.

Time is the event loop's, and the event loop here never waits: hours of back-off pass in a moment, always alike.
"""

import asyncio
import random
import selectors
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.clients import Pool
from paceline.clients.pool import MAX_WAIT_SECONDS, MOST_FAILED_ENGINES, MOST_LOST_CONNECTIONS
from paceline.clients.registry import (
    AFFINITY_SLACK,
    FIRST_DELAY,
    MOST_DELAY,
    PREFIX_BLOCK,
    EngineRegistry,
    PoolMember,
    PrefixAffinity,
    choose_member,
)
from paceline.engine import Completion, EngineLimits, EngineStats, GenerateRequest
from paceline.errors import EngineError, Overloaded, RequestError, Unreachable
from paceline.model import Adapter, ServedPolicy, WeightUpdate


class Hourglass(asyncio.SelectorEventLoop):
    """An event loop that turns the clock forward instead of waiting."""

    def __init__(self) -> None:
        super().__init__(_Impatient(self))
        self.elapsed = 0.0

    def time(self) -> float:
        return self.elapsed


class _Impatient(selectors.DefaultSelector):
    def __init__(self, loop: Hourglass) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout=None):
        assert timeout is not None, "everybody waits, and nothing will ever happen"
        self._loop.elapsed += max(0.0, timeout)
        return super().select(0)


def play(work):
    with asyncio.Runner(loop_factory=Hourglass) as runner:
        return runner.run(asyncio.wait_for(work, 1e6))


def now() -> float:
    return asyncio.get_running_loop().time()


@dataclass(eq=False)
class Fake:
    """Answers after a while with tokens that depend on the request alone. In `outages` it is dead, then as new."""

    capacity: int = 4
    queue: int = 1000
    context: int = 512
    seconds: float = 1.0
    outages: list[tuple[float, float]] = field(default_factory=list)
    name: str = "fake"
    busy_seconds: float = 0.0
    version: int = 0
    asked: int = 0
    answered: list[tuple[int, int]] = field(default_factory=list)
    inside: int = 0
    peak: int = 0
    lives: int = 0
    refuses: str | None = None

    def _here(self) -> None:
        past = sum(begin <= now() for begin, _ in self.outages)
        if past > self.lives:
            self.lives, self.version = past, 0
        if any(begin <= now() < end for begin, end in self.outages):
            raise Unreachable(f"{self.name} is dead")

    async def generate(self, request: GenerateRequest, listener=None) -> Completion:
        self.asked += 1
        self._here()
        if self.inside >= self.capacity + self.queue:
            raise Overloaded("no room")
        self.inside += 1
        self.peak = max(self.peak, self.inside)
        life = self.lives
        try:
            await asyncio.sleep(self.seconds * (1 + request.noise % 3))
            self._here()
            if self.lives != life:
                raise Unreachable(f"{self.name} died meanwhile")
        finally:
            self.inside -= 1
        self.answered.append((request.noise, self.version))
        return completion(request, self.version)

    async def score(self, sequences, temperature=1.0, model=""):
        self._here()
        return [[0.0] * len(s) for s in sequences]

    async def load_weights(self, update):
        self._here()
        await asyncio.sleep(0.3)
        self._here()
        if self.refuses:
            raise EngineError(self.refuses)
        self.version = update.version
        return 0.3

    async def policy(self):
        self._here()
        return ServedPolicy(self.version, "")

    async def limits(self):
        self._here()
        return EngineLimits(self.context, 100)

    async def stats(self):
        return EngineStats(capacity=self.capacity, running=self.inside)


class Far(Fake):
    """One that may come back."""

    async def store_update(self, update):
        return update


def completion(request, version):
    ids = [request.noise % 97, len(request.prompt_ids)]
    return Completion(token_ids=ids, logprobs=[0.0] * 2, versions=[version] * 2, finish="stop")


def request(noise: int = 0, prompt: int = 8, first: int = 0) -> GenerateRequest:
    return GenerateRequest(prompt_ids=(first,) * prompt, max_tokens=4, noise=noise)


def update(version: int, adapter: Adapter | None = None) -> WeightUpdate:
    return WeightUpdate(version, {}, adapter)


def members(*loads: tuple[int, int]) -> list[PoolMember]:
    made = []
    for unanswered, capacity in loads:
        made.append(PoolMember(Fake(), "m"))
        made[-1].unanswered, made[-1].capacity = unanswered, capacity
    return made


# -- where a request goes ---------------------------------------------------------------------------------------------

loads = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 256)), min_size=1, max_size=6)


@given(loads)
def test_without_a_home_the_least_loaded_takes_it(loads):
    some = members(*loads)
    assert choose_member(some).load == min((n + 1) / c for n, c in loads)


@given(loads, st.data())
def test_a_home_is_left_only_when_it_is_much_busier(loads, data):
    some = members(*loads)
    home = data.draw(st.sampled_from(some))
    least = min(member.load for member in some)
    chosen = choose_member(some, home)
    assert (chosen is home) == (home.load <= least + AFFINITY_SLACK or (home.load == least))
    assert chosen is home or chosen.load == least
    assert choose_member(some[:1], PoolMember(Fake(), "elsewhere")) is some[0]


tokens = st.lists(st.integers(0, 3), max_size=6 * PREFIX_BLOCK).map(tuple)


@given(tokens, tokens)
def test_a_conversation_goes_on_where_it_began(beginning, rest):
    """Found again exactly if whole blocks of what was seen cover half of the prompt."""
    homes, member = PrefixAffinity(), PoolMember(Fake(), "m")
    homes.record(beginning, member)
    prompt = beginning + rest
    known = len(beginning) // PREFIX_BLOCK * PREFIX_BLOCK
    if known and known * 2 >= len(prompt):
        assert homes.find(prompt) is member
    other = ((prompt[0] + 1) % 4 if prompt else 0, *prompt[1:])
    assert homes.find(other) is None
    homes.clear()
    assert homes.find(prompt) is None


def test_a_shared_template_ties_no_request_to_one_engine():
    homes, member = PrefixAffinity(), PoolMember(Fake(), "m")
    template = tuple(range(PREFIX_BLOCK))
    homes.record(template + (7,) * 3 * PREFIX_BLOCK, member)
    assert homes.find(template + (8,) * 3 * PREFIX_BLOCK) is None


def test_a_group_shares_an_engine_and_groups_spread():
    async def run():
        engines = [Fake(capacity=32), Fake(capacity=32)]
        pool = Pool(engines)
        work = [pool.generate(request(8 * g + m, 2 * PREFIX_BLOCK, first=g)) for g in range(4) for m in range(8)]
        await asyncio.gather(*work)
        return engines

    engines = play(run())
    groups = [{noise // 8 for noise, _ in engine.answered} for engine in engines]
    assert groups[0].isdisjoint(groups[1])
    assert sorted(len(group) for group in groups) == [2, 2]


@given(st.lists(st.integers(1, 64), min_size=2, max_size=4), st.integers(1, 200))
@settings(max_examples=20, deadline=None)
def test_load_follows_capacity(capacities, count):
    """Equal work in equal time: every engine is as full as any other, to within one request."""

    async def run():
        engines = [Fake(capacity=c) for c in capacities]
        pool = Pool(engines)
        await asyncio.gather(*(pool.generate(request(3 * n)) for n in range(count)))
        return engines

    engines = play(run())
    full = [engine.peak / engine.capacity for engine in engines]
    assert max(full) - min(full) <= max(1 / engine.capacity for engine in engines) + 1e-9


# -- no request lost, none answered twice -----------------------------------------------------------------------------

outage = st.tuples(st.floats(0, 40), st.floats(0.5, 15)).map(lambda pair: (pair[0], pair[0] + pair[1]))
engines_st = st.lists(
    st.builds(
        Far,
        capacity=st.integers(1, 8),
        queue=st.integers(0, 8),
        seconds=st.floats(0.1, 3),
        outages=st.lists(outage, max_size=2),
    ),
    min_size=1,
    max_size=4,
)


@given(
    engines_st,
    st.lists(st.floats(0, 30), min_size=1, max_size=40),
    st.lists(st.floats(0, 30), max_size=3),
    st.integers(0, 9),
)
@settings(max_examples=40, deadline=None)
def test_every_request_is_answered_once_with_current_weights(engines, arrivals, publishes, seed):
    """However engines fill up, die and return: one right answer each, of weights no older than the published ones.

    The only other end is that two engines died under a request, and then it says so by name.
    """
    for number, engine in enumerate(engines):
        engine.name = f"fake {number}"
    published = [0]

    async def publish(pool, at):
        await asyncio.sleep(at)
        version = publishes.index(at) + 1
        await pool.load_weights(update(version))
        published[0] = version

    async def ask(pool, noise, at):
        await asyncio.sleep(at)
        before, first = published[0], now()
        try:
            answer = await pool.generate(request(noise))
        except EngineError as error:
            return error
        assert answer == completion(request(noise), answer.versions[0])
        assert answer.versions[0] >= before
        assert now() - first < MAX_WAIT_SECONDS + 100
        return answer

    async def run():
        pool = Pool(engines, jitter=random.Random(seed).random)
        publishing = [asyncio.ensure_future(publish(pool, at)) for at in sorted(set(publishes))[:1]]
        answers = await asyncio.gather(*(ask(pool, noise, at) for noise, at in enumerate(arrivals)))
        await asyncio.gather(*publishing)
        assert pool.running == 0
        assert all(member.unanswered == 0 for member in pool._registry.members)
        pool.close()
        return answers

    answers = play(run())
    answered = Counter(pair for engine in engines for pair in engine.answered)
    for noise, answer in enumerate(answers):
        assert isinstance(answer, EngineError) or answered[noise, answer.versions[0]] == 1
    for noise, answer in enumerate(answers):
        if isinstance(answer, EngineError):
            assert f"noise {noise}" in str(answer)
            assert "is given up after" in str(answer)
            assert sum(len(engine.outages) for engine in engines) >= MOST_FAILED_ENGINES


def test_an_engine_that_returns_has_the_weights_it_missed_before_it_serves():
    first = Far(outages=[(2.0, 6.0)])
    policy, extra = Adapter("", 1.0), Adapter("extra", 1.0)
    sent = []

    class Recording(Far):
        async def load_weights(self, given):
            sent.append((given.adapter, given.version))
            return await super().load_weights(given)

    second = Recording(outages=[(2.0, 20.0)])

    async def run():
        pool = Pool([first, second])
        await pool.load_weights(update(1, policy))
        await pool.load_weights(update(1))
        await pool.load_weights(update(4, extra))
        await asyncio.sleep(2.0)
        sent.clear()
        await pool.load_weights(update(2, policy))  # both are dead: waits for the one that returns
        assert 6.0 < now() < 6.0 + 2 * MOST_DELAY + 1.0
        assert await pool.policies() == [ServedPolicy(4, "")]  # the fake forgets names; the last one sent counts
        await asyncio.gather(*(pool.generate(request(n)) for n in range(8)))
        assert not second.answered
        await asyncio.sleep(20)
        assert len(await pool.policies()) == 2
        pool.close()

    play(run())
    assert sent[-3:] == [(None, 1), (policy, 2), (extra, 4)]


def test_an_update_that_one_refuses_leaves_the_others_in_service():
    fussy, fine = Far(name="fussy", refuses="too large"), Far(name="fine")

    async def run():
        pool = Pool([fussy, fine])
        assert await pool.load_weights(update(1)) == 0.3
        assert len(await pool.policies()) == 1
        await asyncio.gather(*(pool.generate(request(n)) for n in range(6)))
        assert not fussy.answered
        fine.refuses = "not this one"
        with pytest.raises(EngineError, match="not this one"):
            await pool.load_weights(update(2))
        assert (await pool.generate(request(7))).versions == [1, 1]  # the version before stays the current one
        fussy.refuses = None
        await asyncio.sleep(2 * MOST_DELAY)
        assert await pool.policies() == [ServedPolicy(1, ""), ServedPolicy(1, "")]
        pool.close()

    play(run())


# -- what is retried, and how often -----------------------------------------------------------------------------------


class Failing(Fake):
    def __init__(self, error, **more) -> None:
        super().__init__(**more)
        self.error = error

    async def generate(self, request, listener=None):
        self.asked += 1
        raise self.error


@pytest.mark.parametrize("error", [RequestError("never"), EngineError("the logits are not finite")])
def test_what_a_living_engine_says_is_final(error):
    engines = [Failing(error), Failing(error)]

    async def run():
        with pytest.raises(type(error), match=str(error)):
            await Pool(engines).generate(request())

    play(run())
    assert sum(engine.asked for engine in engines) == 1


def test_broken_connections_to_a_living_engine_are_retried_a_few_times():
    engine = Failing(Unreachable("connection reset"))
    with pytest.raises(Unreachable):
        play(Pool([engine]).generate(request()))
    assert engine.asked == MOST_LOST_CONNECTIONS


def test_an_engine_of_this_process_that_stopped_fails_its_requests_at_once():
    engine = Fake(outages=[(0.5, 1e9)])

    async def run():
        pool = Pool([engine])
        with pytest.raises(EngineError, match="is dead"):
            await pool.generate(request())
        with pytest.raises(EngineError, match="no engine is left"):
            await pool.generate(request())
        assert now() < 5

    play(run())
    assert engine.asked == 1


def test_a_full_engine_is_asked_again_until_the_deadline():
    engine = Failing(Overloaded("no room"))

    async def run():
        with pytest.raises(EngineError, match=r"no completion within 7 s \(no room\)"):
            await Pool([engine]).generate(request(), deadline=7)
        assert now() == pytest.approx(7)
        with pytest.raises(Overloaded):
            await Pool([engine]).generate(request())
        assert MAX_WAIT_SECONDS - MOST_DELAY < now() - 7 <= MAX_WAIT_SECONDS

    play(run())
    assert engine.asked < 2 * (MAX_WAIT_SECONDS + 7) / MOST_DELAY + 20


def test_a_full_engine_sends_its_requests_next_door_without_waiting():
    full, free = Failing(Overloaded("no room"), capacity=100), Fake(capacity=1)

    async def run():
        await Pool([full, free]).generate(request())
        assert now() < 1.5

    play(run())
    assert free.answered == [(0, 0)]


@given(st.integers(0, 10_000), st.floats(0, 1, exclude_max=True))
def test_back_off_doubles_up_to_a_limit(attempt, dice):
    delay = EngineRegistry([Fake()], lambda: dice).backoff_delay(attempt)
    whole = min(MOST_DELAY, FIRST_DELAY * 2 ** min(attempt, 30))
    assert whole / 2 <= delay <= whole


def test_a_deadline_ends_the_request_in_the_engine_too():
    engine = Fake(seconds=100)

    async def run():
        pool = Pool([engine])
        with pytest.raises(EngineError, match="no completion within 3 s"):
            await pool.generate(request(), deadline=3)
        assert pool.running == engine.inside == 0

    play(run())


def test_what_fits_no_engine_is_refused_at_once_and_what_fits_one_goes_there():
    small, large = Fake(context=16, capacity=64), Fake(context=128, capacity=1)

    async def run():
        pool = Pool([small, large])
        await asyncio.gather(*(pool.generate(request(n, prompt=100)) for n in range(3)))
        assert (small.asked, large.asked) == (0, 3)
        with pytest.raises(RequestError, match="needs 129 tokens, but no context holds more than 128"):
            await pool.generate(request(prompt=128))
        assert (small.asked, large.asked) == (0, 3)

    play(run())


def test_scores_go_to_the_least_loaded_and_survive_its_death():
    dead, alive = Far(outages=[(0.5, 99)], capacity=100), Far()

    async def run():
        pool = Pool([dead, alive])
        await pool.stats()
        await pool._registry.learn_sizes()
        await asyncio.sleep(1)
        assert await pool.score([(1, 2), (3,)]) == [[0.0, 0.0], [0.0]]
        assert pool.running == 0
        pool.close()

    play(run())


def test_a_bug_of_an_engine_in_this_process_is_raised_as_it_is():
    """Only what came over a wire can be an answer that cannot be read."""

    async def bug(request, listener=None):
        raise KeyError("a bug of ours")

    near = Fake()
    near.generate = bug
    del near.name  # and it has no `store_update`
    with pytest.raises(KeyError, match="a bug of ours"):
        play(Pool([near]).generate(request()))
    far = Far()
    far.generate = bug
    with pytest.raises(EngineError, match="answered what cannot be read"):
        play(Pool([far]).generate(request()))
