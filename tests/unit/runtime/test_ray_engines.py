"""A crowd passes a few at a time, and the event loop turns in between."""

import asyncio

from paceline.runtime.ray.engines import CallThrottle


async def crowd(size: int, each_turn: int, leave: frozenset[int] = frozenset()) -> tuple[list[int], list[int]]:
    """Who passed, in order, and how many passed between two turns of the loop."""
    pace, passed, between = CallThrottle(each_turn), [], [0]
    done = asyncio.Event()

    async def one(number: int) -> None:
        await pace.turn()
        passed.append(number)
        between[-1] += 1

    async def turns() -> None:
        while not done.is_set():
            between.append(0)
            await asyncio.sleep(0)

    watching = asyncio.create_task(turns())
    tasks = [asyncio.create_task(one(number)) for number in range(size)]
    await asyncio.sleep(0)
    for number in leave:
        tasks[number].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    done.set()
    await watching
    return passed, between


def test_a_crowd_passes_in_order_and_a_few_at_a_time():
    passed, between = asyncio.run(crowd(100, 8))
    assert passed == list(range(100))
    assert max(between) <= 16  # the first of a turn may meet the last of the one before
    assert sum(1 for n in between if n) >= 100 // 16


def test_a_request_that_leaves_takes_no_other_turn():
    gone = frozenset(range(20, 60))
    passed, _ = asyncio.run(crowd(100, 8, gone))
    assert passed == [number for number in range(100) if number not in gone]


def test_one_alone_does_not_wait():
    async def alone() -> None:
        pace = CallThrottle(2)
        for _ in range(3):
            turn = pace.turn()
            try:
                turn.send(None)
            except StopIteration:
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            else:
                raise AssertionError("waited")

    asyncio.run(alone())


def test_an_event_loop_that_ended_early_delays_no_other():
    pace = CallThrottle(1)

    async def leave() -> None:
        await pace.turn()

    async def stay() -> None:
        for _ in range(3):
            await asyncio.wait_for(pace.turn(), 5)

    for end in (leave, leave, stay):
        asyncio.run(end())
